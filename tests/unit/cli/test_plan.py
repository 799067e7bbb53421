from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_server.cli import up
from millstream_server.cli.main import parse
from millstream_server.cli.suite.launching import Launcher
from millstream_server.cli.suite.models import (
    FurtherModel,
    PlanError,
    Task,
    choose_further,
    choose_model,
)
from millstream_server.cli.suite.plan import (
    PlannedService,
    PortClaims,
    SuitePlan,
    UpOptions,
    is_free,
    make_plan,
)
from millstream_server.cli.up import up_options
from millstream_server.decode.app import DecodeMode, DecodeSettings
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.routing.policy import PolicyName
from millstream_server.runtime import settings
from millstream_server.runtime.forking.preload import find
from tests.support.models.vector_models import write_modules
from tests.support.processes.stand_in import write_vision_config


@pytest.fixture
def ports() -> Iterator[PortClaims]:
    with PortClaims() as claims:
        yield claims


@pytest.fixture
def options(tmp_path: Path) -> UpOptions:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 321}))
    return UpOptions(model=tmp_path, model_name="m")


def test_commands_are_what_the_services_read(options: UpOptions, ports: PortClaims) -> None:
    simulated = replace(options, engine="simulated", policy=PolicyName.ROUND_ROBIN)
    plan = make_plan(simulated, ports)
    prefill, decode, processor = plan.services

    def flags(service: PlannedService) -> list[str]:
        command = plan.command(service)
        assert command[1:3] == ["-m", f"millstream_server.{service.role}"]
        return command[3:]

    p = settings.load(WorkerSettings, flags(prefill), {}, prog="p", description="")
    d = settings.load(DecodeSettings, flags(decode), {}, prog="d", description="")
    front = settings.load(ProcessorSettings, flags(processor), {}, prog="f", description="")
    assert p.listen == prefill.address
    assert p.common.bootstrap_port == prefill.bootstrap_port
    assert d.mode is DecodeMode.DISAGGREGATED
    assert {p.engine, d.engine} == {"simulated"}
    assert (p.model_path, p.model_name) == (options.model, "m")
    records = [one.control.weights_record for one in (p, d)]
    assert records == [plan.weights_record(prefill), plan.weights_record(decode)]
    assert records[0] != records[1]
    assert front.listen == processor.address
    assert front.metrics_listen == f"127.0.0.1:{processor.metrics_port}"
    assert p.admin_listen == f"127.0.0.1:{prefill.admin_port}"
    assert front.workers == (prefill.address, decode.address)
    assert front.model_directories() == {"m": options.model}
    assert front.policy is PolicyName.ROUND_ROBIN


def test_without_a_gpu_workers_of_an_engine_that_imports_long_are_forked(
    options: UpOptions, ports: PortClaims, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpu = False
    monkeypatch.setattr("millstream_server.cli.suite.plan.gpu_present", lambda: has_gpu)
    plan = make_plan(replace(options, engine="sglang"), ports)
    *workers, processor = plan.services
    (preload,) = {plan.preload(worker) for worker in workers}
    assert "sglang.srt.managers.scheduler" in find(preload).modules
    assert plan.preload(processor) == ""
    simulated = SuitePlan(replace(options, engine="simulated"), plan.services)
    assert not any(simulated.preload(worker) for worker in workers)
    has_gpu = True
    assert not any(plan.preload(worker) for worker in workers)


def test_aggregated_has_no_prefill(options: UpOptions, ports: PortClaims) -> None:
    plan = make_plan(replace(options, topology="aggregated", decode=2, prefill=5), ports)
    assert [service.name for service in plan.services] == ["decode-1", "decode-2", "processor"]
    command = plan.command(plan.services[0])
    assert command[command.index("--mode") + 1] == "aggregated"
    assert command[command.index("--engine-tokenizer") + 1] == "true", "constraints need it"


def test_further_models_have_workers_of_their_own(
    options: UpOptions, ports: PortClaims, tmp_path: Path
) -> None:
    for task in Task:
        (tmp_path / task.value).mkdir()
        needed = "model_index.json" if task is Task.IMAGE else "config.json"
        (tmp_path / task.value / needed).write_text("{}")
    further = tuple(choose_further(task, tmp_path / task.value) for task in Task)
    plan = make_plan(replace(options, further=further), ports, gpus=2)
    names = ["prefill-1", "decode-1", "image-1", "dllm-1", "embedding-1", "reranker-1", "processor"]
    assert [service.name for service in plan.services] == names
    assert [service.role for service in plan.services[2:6]] == ["diffusion"] * 2 + ["embedding"] * 2
    assert [service.gpu for service in plan.services] == [0, 1, 0, 1, 0, 1, None]
    commands = {service.name: plan.command(service) for service in plan.services}
    models = commands["processor"][commands["processor"].index("--models") + 1].split(",")
    assert models[:2] == [f"m={options.model}", "image"], "an image model has no tokenizer there"
    assert models[2] == f"dllm={tmp_path / 'dllm'}"
    assert commands["processor"][-2:] == [
        "--default-models",
        "generate_image=image,generate_text=dllm,embed=embedding,rerank=reranker",
    ]
    for name, flags in {
        "image-1": ["--kind", "image", "--engine", "diffusers", "--model-path"],
        "dllm-1": ["--kind", "text", "--engine", "sglang", "--model-path"],
        "reranker-1": ["--engine", "sglang", "--model-path"],
    }.items():
        at = commands[name].index(flags[0])
        assert commands[name][at : at + len(flags)] == flags


def test_two_models_of_one_name_are_refused(options: UpOptions, ports: PortClaims) -> None:
    twice = (FurtherModel(Task.RERANK, options.model, "m"),)
    with pytest.raises(PlanError, match="two models would be called 'm'"):
        make_plan(replace(options, further=twice), ports)


def test_images_are_made_by_the_engine_that_was_chosen(
    options: UpOptions, ports: PortClaims
) -> None:
    model = FurtherModel(Task.IMAGE, options.model, "draw", image_engine="sglang")
    for engine, made_by in (("sglang", "sglang"), ("simulated", "simulated")):
        plan = make_plan(replace(options, engine=engine, further=(model,)), ports)
        command = plan.command(plan.workers[-1])
        assert command[command.index("--engine") + 1] == made_by


def test_a_model_for_vectors_gets_an_engine_and_flags_that_suit_it(tmp_path: Path) -> None:
    mean, answering = tmp_path / "mean", tmp_path / "answering"
    for folder, named in ((mean, "BertModel"), (answering, "Qwen3ForCausalLM")):
        folder.mkdir()
        config = {"architectures": [named], "hidden_size": 8, "max_position_embeddings": 9}
        (folder / "config.json").write_text(json.dumps(config))
    write_modules(mean, Pooling={"pooling_mode": "mean"})
    words = {"model": {"vocab": {"yes": 1, "no": 2}}}
    (answering / "tokenizer.json").write_text(json.dumps(words))
    assert FurtherModel(Task.EMBEDDING, mean, "m").flags("sglang")[:2] == [
        "--engine",
        "transformers",
    ]
    flags = FurtherModel(Task.RERANK, answering, "m").flags("sglang")
    assert (flags[1], flags[-2:]) == ("sglang", ["--rank-answers", "yes,no"])
    assert FurtherModel(Task.EMBEDDING, answering, "m").flags("sglang")[-1] == "m"


def test_up_says_that_workers_run_on_the_cpu(
    options: UpOptions, ports: PortClaims, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(options, ports)
    monkeypatch.delenv("MILLSTREAM_DEVICE", raising=False)
    for gpu, device in ((False, "cpu"), (True, None)):
        monkeypatch.setattr(up, "gpu_present", lambda gpu=gpu: gpu)
        children = up._children(plan, plan.command, "key", Launcher(options.log_dir / "log"))
        assert {child._env.get("MILLSTREAM_DEVICE") for child in children} == {device}


def test_a_further_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"it has no model_index\.json"):
        choose_further(Task.IMAGE, tmp_path)


def _with_vision(options: UpOptions) -> UpOptions:
    write_vision_config(options.model)
    return replace(options, encode=1)


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        ("disaggregated", ["encode-1", "prefill-1", "decode-1", "processor"]),
        ("aggregated", ["encode-1", "decode-1", "processor"]),
    ],
)
def test_multimodal_adds_an_encode_worker(
    options: UpOptions, ports: PortClaims, topology: str, names: list[str]
) -> None:
    plan = make_plan(replace(_with_vision(options), topology=topology), ports)
    assert [service.name for service in plan.services] == names
    encode, *_, processor = plan.services
    assert (encode.bootstrap_port, plan.first("encode")) == (None, encode)
    assert plan.command(encode)[1:] == [
        *("-m", "millstream_server.encode"),
        *encode.flags(),
        *("--model-path", str(options.model)),
        *("--model-name", "m"),
    ]
    command = plan.command(processor)
    workers = ",".join(service.address for service in plan.workers)
    assert command[command.index("--workers") + 1] == workers


def test_a_simulated_suite_has_a_simulated_encoder(options: UpOptions, ports: PortClaims) -> None:
    plan = make_plan(replace(_with_vision(options), engine="simulated"), ports)
    assert plan.command(plan.services[0])[-2:] == ["--engine", "simulated"]


def test_a_model_without_vision_is_refused(options: UpOptions, ports: PortClaims) -> None:
    with pytest.raises(PlanError, match=r"takes no images: .* leave out --multimodal"):
        make_plan(replace(options, encode=1), ports)


def test_a_vision_model_that_is_not_complete_is_refused(
    options: UpOptions, ports: PortClaims
) -> None:
    multimodal = _with_vision(options)
    (options.model / "tokenizer_config.json").unlink()
    with pytest.raises(PlanError, match=r"lacks tokenizer_config\.json"):
        make_plan(multimodal, ports)


def test_no_two_services_share_a_port(options: UpOptions, ports: PortClaims) -> None:
    plan = make_plan(replace(options, prefill=15, decode=3), ports)
    taken = [service.address.rpartition(":")[2] for service in plan.services]
    taken += [str(s.bootstrap_port) for s in plan.services if s.bootstrap_port is not None]
    taken += [str(port) for s in plan.services for port in (s.metrics_port, s.admin_port)]
    assert len(set(taken)) == len(taken) == 15 + 3 + 1 + 15 + 2 * (15 + 3 + 1)


def test_workers_take_gpus_in_turn(options: UpOptions, ports: PortClaims) -> None:
    plan = make_plan(replace(options, decode=2), ports, gpus=2)
    assert [service.gpu for service in plan.services] == [0, 1, 0, None]


def test_one_gpu_is_left_to_everyone(options: UpOptions, ports: PortClaims) -> None:
    assert {service.gpu for service in make_plan(options, ports, gpus=1).services} == {None}


@pytest.mark.parametrize(
    "counts", [{"decode": 0}, {"prefill": 0}, {"topology": "aggregated", "decode": 0}]
)
def test_a_suite_needs_workers(
    options: UpOptions, ports: PortClaims, counts: dict[str, int]
) -> None:
    with pytest.raises(PlanError, match="--decode 1 or more"):
        make_plan(replace(options, **counts), ports)  # type: ignore[arg-type]


def test_a_given_port_that_is_taken_is_refused(options: UpOptions, ports: PortClaims) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PlanError, match=f"can't listen on 127.0.0.1:{port}"):
            make_plan(replace(options, port=port), ports)


def test_a_given_port_moves_all_others(options: UpOptions, ports: PortClaims) -> None:
    plan = make_plan(replace(_with_vision(options), port=23400), ports)
    taken = [int(service.address.rpartition(":")[2]) for service in plan.services]
    taken += [port for s in plan.services for port in (s.metrics_port, s.admin_port)]
    taken += [s.bootstrap_port for s in plan.services if s.bootstrap_port is not None]
    assert taken[3] == 23400
    assert len(set(taken)) == len(taken) == 13
    assert all(23400 <= port < 23500 for port in taken)
    with pytest.raises(PlanError, match="leaves no room"):
        make_plan(replace(options, port=65500), ports)


def test_a_host_of_another_machine_is_refused(options: UpOptions, ports: PortClaims) -> None:
    with pytest.raises(PlanError, match="no address of this machine"):
        make_plan(replace(options, host="203.0.113.1"), ports)


def test_all_interfaces_are_reached_by_loopback() -> None:
    service = PlannedService(
        name="processor", role="processor", address="0.0.0.0:50051", metrics_port=1, admin_port=2
    )
    assert service.client_address == "127.0.0.1:50051"


def test_a_taken_port_is_passed_over(ports: PortClaims) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        assert ports.next_free("127.0.0.1", port) > port


def test_a_claimed_port_is_passed_over(ports: PortClaims) -> None:
    first = ports.next_free("127.0.0.1", 20000)
    with PortClaims() as others:
        assert others.next_free("127.0.0.1", first) > first
        with pytest.raises(PlanError):
            others.exactly("127.0.0.1", first)


def test_the_demo_model_is_found_here_and_called_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "demo" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert choose_model(None, "") == (model.resolve(), "demo")
    assert choose_model(Path("demo/model"), "mine")[1] == "mine"


def test_multimodal_takes_the_demo_vision_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "demo" / "vision" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert choose_model(None, "", multimodal=True) == (model.resolve(), "demo-vision")


@pytest.mark.parametrize(
    ("flags", "encode"), [([], 0), (["--multimodal"], 1), (["--encode", "2"], 2)]
)
def test_flags_say_how_many_encode(options: UpOptions, flags: list[str], encode: int) -> None:
    args = parse(["up", "--model", str(options.model), *flags])
    assert up_options(args).encode == encode


def test_sglang_s_own_arguments_go_to_prefill_and_decode(
    options: UpOptions, ports: PortClaims
) -> None:
    args = parse(["up", "--model", str(options.model), "--", "--page-size", "16"])
    plan = make_plan(up_options(args), ports)
    behind = {each.role: plan.command(each)[-3:] for each in plan.services}
    assert behind["prefill"] == behind["decode"] == ["--", "--page-size", "16"]
    assert "--page-size" not in behind["processor"]


def test_a_model_is_called_after_its_directory(options: UpOptions) -> None:
    assert choose_model(options.model, "") == (options.model.resolve(), options.model.name)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no config\.json"):
        choose_model(tmp_path, "")


def test_names_that_flags_cannot_carry_are_refused(options: UpOptions) -> None:
    with pytest.raises(PlanError, match="comma"):
        choose_model(options.model, "a=b")


def test_without_any_model_the_error_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream_server.cli.suite.models.default_model", lambda **_: None)
    with pytest.raises(PlanError, match="give --model DIR"):
        choose_model(None, "")
