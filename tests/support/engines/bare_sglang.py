"""What a bare `sgl.Engine` answers, and what SGLang looks like: printed as JSON by a child process.

`python -m tests.support.engines.bare_sglang generate MODEL PROMPTS_JSON`, `… denoise MODEL
CASES_JSON` or `… names`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import os
import sys
from typing import Any

from millstream_server.engines.sglang import cpu as sglang_cpu

NEW_TOKENS = 12


def _generate(model_path: str, prompts: list[list[int]]) -> list[list[int]]:
    engine = importlib.import_module("sglang").Engine(
        model_path=model_path,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        max_total_tokens=8192,
    )
    params = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
    answers = [engine.generate(input_ids=ids, sampling_params=params) for ids in prompts]
    engine.shutdown()
    return [list(answer["output_ids"]) for answer in answers]


def _denoise(model_path: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a diffusion language model with SGLang's own defaults, one request after the other."""
    engine = importlib.import_module("sglang").Engine(
        model_path=model_path,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        max_total_tokens=8192,
        dllm_algorithm="LowConfidence",
    )
    answers = [engine.generate(**case) for case in cases]
    engine.shutdown()
    return [
        {"token_ids": list(a["output_ids"]), "finish": a["meta_info"]["finish_reason"]}
        for a in answers
    ]


def _names() -> dict[str, Any]:
    """Collect every name of SGLang's that the adapter and the stand-in rely on."""
    module = importlib.import_module
    engine = module("sglang.srt.entrypoints.engine")
    manager = module("sglang.srt.managers.tokenizer_manager")
    snapshot = module("sglang.srt.managers.load_snapshot")
    launch = inspect.getsource(engine.Engine.__init__)
    return {
        "version": module("sglang").__version__,
        "async_generate": list(inspect.signature(engine.Engine.async_generate).parameters),
        "server_args": list(module("sglang.srt.server_args").ServerArgs.__struct_fields__),
        "engine_attributes": [
            name
            for name in ("tokenizer_manager", "port_args", "send_to_rpc", "_scheduler_init_result")
            if f"self.{name} = " in launch
        ],
        "engine_methods": [name for name in dir(engine.Engine) if not name.startswith("__")],
        "engine_module": dir(engine),
        "manager_methods": dir(manager.TokenizerManager),
        "request_state": list(manager.ReqState.__dataclass_fields__),
        "handle_loop_guard": inspect.getsource(manager.TokenizerManager.auto_create_handle_loop),
        "load": list(snapshot.LoadSnapshot.__struct_fields__),
        "load_disaggregation": list(snapshot.DisaggregationMetrics.__struct_fields__),
        "load_queues": list(snapshot.QueueMetrics.__struct_fields__),
        "sampling": list(
            module("sglang.srt.sampling.sampling_params").SamplingParams.__struct_fields__
        ),
        "fake_host": module("sglang.srt.disaggregation.utils").FAKE_BOOTSTRAP_HOST,
        "dllm_algorithms": list(module("sglang.srt.dllm.algorithm").algo_name_to_cls),
        "dllm_config": inspect.getsource(
            module("sglang.srt.dllm.config").DllmConfig.from_server_args
        ),
        "schedule_policy": inspect.getsource(module("sglang.srt.managers.schedule_policy"))[:8000],
        **_control_names(),
        **_batch_names(),
        "environment": [
            name
            for name in dir(module("sglang.srt.environ").Envs)
            if name.startswith("SGLANG_DISAGGREGATION")
        ],
    }


def _batch_names() -> dict[str, Any]:
    """Collect what `requests.batches` relies on."""
    module = importlib.import_module
    messages = module("sglang.srt.managers.io_struct")
    manager = module("sglang.srt.managers.tokenizer_manager").TokenizerManager
    collector = module("sglang.srt.observability.metrics_collector").TokenizerMetricsCollector
    times = module("sglang.srt.observability.req_time_stats").APIServerReqTimeStats
    handler = inspect.getsource(manager._handle_batch_output)
    return {
        "batches": {
            kind.__name__: list(kind.__struct_fields__)
            for kind in (messages.BatchTokenIDOutput, messages.BatchStrOutput)
        },
        "batch_handler": hashlib.sha256(handler.encode()).hexdigest(),
        "handle_loop": inspect.getsource(manager.handle_loop),
        "collect_metrics": list(inspect.signature(manager.collect_metrics).parameters),
        "observe": list(inspect.signature(collector.observe_inter_token_latency).parameters),
        "times": dir(times),
    }


def _control_names() -> dict[str, Any]:
    """Collect what operators' operations rely on."""
    module = importlib.import_module
    messages = module("sglang.srt.managers.io_struct")
    manager = module("sglang.srt.managers.tokenizer_manager").TokenizerManager
    updater = module("sglang.srt.model_executor.model_runner_components.weight_updater")
    profiler = module("sglang.srt.managers.scheduler_components.profiler_manager")
    control = inspect.getsource(module("sglang.srt.managers.tokenizer_control_mixin"))
    scheduler = module("sglang.srt.managers.scheduler_components.weight_updater")
    sources = map(inspect.getsource, (updater, scheduler, profiler))
    return {
        "control_messages": {
            name: list(each.__struct_fields__)
            for name, each in vars(messages).items()
            if hasattr(each, "__struct_fields__")
        },
        "manager_source": inspect.getsource(manager) + control,
        "control_texts": "\n".join(sources),
    }


def _main() -> None:
    with contextlib.closing(os.fdopen(os.dup(1), "w")) as out:
        os.dup2(2, 1)  # SGLang's processes print, too
        sglang_cpu.activate()
        if sys.argv[1] == "names":
            sglang_cpu.patch_sglang()
            answer: object = _names()
        elif sys.argv[1] == "denoise":
            answer = _denoise(sys.argv[2], json.loads(sys.argv[3]))
        else:
            answer = _generate(sys.argv[2], json.loads(sys.argv[3]))
        json.dump(answer, out)


if __name__ == "__main__":
    _main()
