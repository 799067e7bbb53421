"""How much there is to read: lines, long classes, files of one chat, objects of one turn.

    python -m tests.benchmarks.counts                          # a list, about two minutes
    python -m tests.benchmarks.counts --engine simulated       # no SGLang: half a minute
    python -m tests.benchmarks.counts --checkout ../before     # of another checkout's services

What is counted:

    services   files and lines of `services/`, comments and empty lines included
    classes    those of more than 200 lines, from the line of `class` to the last
    chat       files of `services/` of which anything runs while a Processor with one aggregated
               worker serves one chat on a connection that has served others, and the lines of these
               files: at the Processor, at the worker (SGLang's own processes don't count), and
               together, where a file that runs at both counts once. It has run in each of several
               chats, so what a timer does now and then isn't counted.
    turn       objects of the server's classes that a Processor has while one chat runs, less those
               it had before, after garbage collections: those that can change, and frozen values
               apart. The least of several chats. The worker is simulated and slow.
    settings   of the Processor and of Decode, as the chart's `files/settings.json` lists them
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.v1 import chat_pb2, processor_pb2, processor_pb2_grpc, sampling_pb2
from tests.benchmarks.against import environment_of
from tests.support.benchmarks.verdict import folder_for, parser_of, progress
from tests.support.models.models import VOCAB_SIZE, make_random_model
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running

_HERE = Path(__file__).resolve().parents[2]
_MOST_CLASS_LINES = 200
_WARM_CHATS = 5
_TRIALS = 5
_TOKENS = 8
_SLOW_STEP_S = 0.05
_SLOW_TOKENS = 400
# For what follows an answer: its log line, the end of its stream.
_QUIET_S = 0.5


# ---- text ----------------------------------------------------------------------------------------


def _services(checkout: Path) -> dict[str, int]:
    files = [*(checkout / "services").rglob("*.py")]
    return {"files": len(files), "lines": _lines_of(files)}


def _lines_of(files: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in files)


def _long_classes(checkout: Path) -> dict[str, int]:
    """Return the lines of each class that is too long, longest first."""
    found = {}
    for path in (checkout / "services").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > _MOST_CLASS_LINES:
                    found[f"{path.relative_to(checkout / 'services')}:{node.name}"] = lines
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _settings(checkout: Path) -> dict[str, int]:
    path = checkout / "deploy" / "helm" / "millstream" / "files" / "settings.json"
    known = json.loads(path.read_text())
    return {role: len(known[role]) for role in ("processor", "decode")}


# ---- running services ----------------------------------------------------------------------------


@dataclass
class Counted:
    """A service of a checkout, run by `tests.support.benchmarks.counted`."""

    checkout: Path
    folder: Path
    role: str
    flags: Mapping[str, object]
    process: ServiceProcess = field(init=False)

    def __post_init__(self) -> None:
        """Make its process; it isn't started yet."""
        loopback = {
            "metrics_listen": f"127.0.0.1:{free_port()}",
            "admin_listen": f"127.0.0.1:{free_port()}",
        }
        env = {
            **environment_of(self.checkout),
            "COUNTED_SERVICE": f"millstream_server.{self.role}",
            "COUNTED_REPORT": str(self._report),
        }
        log = self.folder / f"{self.role}.log"
        flags = {**loopback, **self.flags}
        # A service that is forked has no module of its own to run it.
        self.process = ServiceProcess("tests.support.benchmarks.counted", flags, log, env=env)
        self.process.interpreter = True

    @property
    def _report(self) -> Path:
        return self.folder / f"{self.role}.json"

    def ask(self, sig: signal.Signals) -> Any:
        """Send a signal and return the report that follows it."""
        self._report.unlink(missing_ok=True)
        os.kill(self.process.pid, sig)
        deadline = time.monotonic() + 30
        while not self._report.exists():
            assert time.monotonic() < deadline, f"no report of {self.role}"
            time.sleep(0.01)
        return json.loads(self._report.read_text())

    def files(self) -> set[Path]:
        """Return which of the checkout's files ran since the last call of `ask`."""
        root = (self.checkout / "services").resolve()
        ran = {Path(name) for name in self.ask(signal.SIGUSR2)["files"]}
        return {path for path in ran if path.is_relative_to(root)}


@dataclass
class Suite:
    """A Processor and an aggregated worker, and chats over one connection."""

    processor: Counted
    worker: Counted
    chats: Any

    def chat(self, tokens: int) -> None:
        """Run one chat to its end."""
        for _ in self.chats.Chat(iter([_request(tokens)])):
            pass

    @contextlib.contextmanager
    def running_chat(self) -> Iterator[None]:
        """Hold one chat whose first token has come."""
        call = self.chats.Chat(iter([_request(_SLOW_TOKENS)]))
        while not any(choice.token_count for choice in next(call).choices):
            pass
        yield
        call.cancel()


@contextlib.contextmanager
def _suite(checkout: Path, folder: Path, engine: Mapping[str, object]) -> Iterator[Suite]:
    folder.mkdir(exist_ok=True)
    model = make_random_model(folder / "tiny")
    flags = {"model_path": model, "model_name": "tiny", **engine}
    worker = Counted(checkout, folder, "decode", flags)
    front = {"models": f"tiny={model}", "workers": worker.process.address}
    processor = Counted(checkout, folder, "processor", front)
    with running(worker.process, processor.process), processor.process.channel() as channel:
        stubs: Any = processor_pb2_grpc.ProcessorServiceStub
        suite = Suite(processor, worker, stubs(channel))
        for _ in range(_WARM_CHATS):
            suite.chat(_TOKENS)
        time.sleep(_QUIET_S)
        yield suite


def _request(tokens: int) -> processor_pb2.ChatRequest:
    message = chat_pb2.ChatMessage(
        role=chat_pb2.CHAT_ROLE_USER, content=[chat_pb2.ContentPart(text="What is Millstream?")]
    )
    options = processor_pb2.GenerationOptions(
        sampling=sampling_pb2.SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    )
    start = processor_pb2.ChatStart(messages=[message], options=options)
    return processor_pb2.ChatRequest(start=start)


def _simulated(step_s: float = 0.0) -> Mapping[str, object]:
    return {
        "engine": "simulated",
        "context_length": 2048,
        "simulated_vocab_size": VOCAB_SIZE,
        "simulated_step_s": step_s,
    }


def _chat_files(suite: Suite) -> dict[str, set[Path]]:
    """Return which files run in each of several chats, by place."""
    services = {"processor": suite.processor, "worker": suite.worker}
    trials = []
    for _ in range(_TRIALS):
        for service in services.values():
            service.ask(signal.SIGUSR2)
        suite.chat(_TOKENS)
        time.sleep(_QUIET_S)
        trials.append({place: service.files() for place, service in services.items()})
    return {place: set.intersection(*(trial[place] for trial in trials)) for place in services}


def _turn_objects(suite: Suite) -> dict[str, Counter[str]]:
    """Return how many instances of a class a running chat has, at least."""
    trials = []
    for _ in range(_TRIALS):
        before = suite.processor.ask(signal.SIGUSR1)
        with suite.running_chat():
            during = suite.processor.ask(signal.SIGUSR1)
        time.sleep(_QUIET_S)
        trials.append({kind: Counter(during[kind]) - Counter(before[kind]) for kind in before})
    least = trials[0]
    for trial in trials[1:]:
        least = {kind: least[kind] & trial[kind] for kind in least}
    return least


# ---- all -----------------------------------------------------------------------------------------


def _count(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    checkout = arguments.checkout.resolve()
    progress("reading")
    counted: dict[str, Any] = {
        "services": _services(checkout),
        "classes": _long_classes(checkout),
        "settings": _settings(checkout),
    }
    progress(f"one chat, {arguments.engine}")
    engine: Mapping[str, object] = {"max_total_tokens": 16384}
    if arguments.engine == "simulated":
        engine = _simulated()
    with _suite(checkout, folder / "chat", engine) as suite:
        files = _chat_files(suite)
    files["together"] = files["processor"] | files["worker"]
    progress("one turn")
    with _suite(checkout, folder / "turn", _simulated(_SLOW_STEP_S)) as suite:
        objects = _turn_objects(suite)
    services = (checkout / "services").resolve()
    counted["chat"] = {
        place: {
            "files": len(ran),
            "lines": _lines_of(list(ran)),
            "names": sorted(str(path.relative_to(services)) for path in ran),
        }
        for place, ran in files.items()
    }
    counted["turn"] = {
        "objects": sum(found.total() for found in objects.values()),
        **{
            kind: {"objects": found.total(), "names": dict(sorted(found.items()))}
            for kind, found in objects.items()
        },
    }
    return counted


def _text(counted: dict[str, Any], *, names: bool) -> str:
    services, classes, settings = (counted[key] for key in ("services", "classes", "settings"))
    lines = [
        f"services: {services['files']} files, {services['lines']:,} lines",
        f"classes over {_MOST_CLASS_LINES} lines: {len(classes)}",
        *(f"    {name} {length}" for name, length in classes.items()),
        "settings: " + ", ".join(f"{role} {count}" for role, count in settings.items()),
    ]
    for place, ran in counted["chat"].items():
        lines.append(f"one chat, {place}: {ran['files']} files, {ran['lines']:,} lines")
        if names and place != "together":
            lines += [f"    {name}" for name in ran["names"]]
    turn = counted["turn"]
    for kind in ("stateful", "values"):
        lines.append(f"one turn, {kind}: {turn[kind]['objects']} objects")
        lines += [f"    {count} {name}" for name, count in turn[kind]["names"].items()]
    return "\n".join([*lines, f"one turn, all: {turn['objects']} objects"])


def main() -> None:
    """Parse arguments, count, print."""
    parser = parser_of("counts", __doc__)
    parser.add_argument("--checkout", type=Path, default=_HERE, help="whose services (this one's)")
    parser.add_argument(
        "--engine", choices=("sglang", "simulated"), default="sglang", help="of the chat (sglang)"
    )
    parser.add_argument("--names", action="store_true", help="list the files of a chat, too")
    arguments = parser.parse_args()
    with folder_for(arguments) as folder:
        counted = _count(arguments, folder)
    print(json.dumps(counted) if arguments.json else _text(counted, names=arguments.names))  # noqa: T201


if __name__ == "__main__":
    main()
