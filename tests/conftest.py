"""What every test of a session may share."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401 - else `TextModel.load` would start a process each time

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from tests.support.models.tiny_pipelines import TinyPipelines
from tests.support.processes import forked, preloads

ALPHABET_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}@{% endif %}"
)

_HANGS_S = 600
"""Longer than any test's time limit. That limit ends the test; nothing ends its cleanup."""
_stderr = pytest.StashKey[int]()
_HAS_VLLM = importlib.util.find_spec("vllm") is not None
"""Whether this is the environment of `make setup-vllm`."""
_VLLM_TIMEOUT_S = 420

_WORKERS = 2
"""Processes that `-n auto` runs tests in; two suites on real SGLang fit in 8 GiB."""
_TESTS = Path(__file__).parent
_LONGEST_FIRST = ("e2e", "integration", "deploy", "clients", "contract", "unit")
_TOGETHER: tuple[tuple[str, ...], ...] = (
    ("e2e/generate/",),
    ("e2e/multimodal/",),
    ("e2e/",),
    ("integration/sglang_engine/controls/",),
    ("clients/",),
    # They kill processes, and look at what all killed processes have left in /dev/shm.
    ("integration/media/", "contract/embeddings/", "unit/embeddings/"),
)
"""Paths whose tests share running processes or what the machine has once; the first fit counts."""


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A real tokenizer whose chats a simulated engine answers with the alphabet.

    Its ids 3 to 96 are the ASCII characters from "!" to "~" in their order, a rendered conversation
    ends with "@", and the simulated engine counts on from there: "ABCDEFG…", one letter a token.
    """
    return TextModel.load(alphabet_model(tmp_path_factory.mktemp("alphabet")))


@pytest.fixture(scope="session")
def tiny_pipelines(tmp_path_factory: pytest.TempPathFactory) -> TinyPipelines:
    """Pipelines of diffusers for images and videos, with random weights."""
    return TinyPipelines(tmp_path_factory.mktemp("pipelines"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vendor", action="store_true", help="run the cases of vendors' own code, and no others"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run single files and tests in this process: further ones would cost more than they gain."""
    return 0 if all(".py" in argument for argument in config.args) else _WORKERS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases of vendors' own code apart (`support.vendor`), and those of vLLM.

    Where tests run side by side, the folders with the longest come first.
    """
    wanted = config.option.vendor

    def runs_here(item: pytest.Item) -> bool:
        ours = _HAS_VLLM or not item.get_closest_marker("vllm")
        return ours and bool(item.get_closest_marker("vendor")) is wanted

    config.hook.pytest_deselected(items=[item for item in items if not runs_here(item)])
    items[:] = filter(runs_here, items)
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.filterwarnings("default"))  # its imports warn
            # An engine takes 15 s to start on a quiet machine and two minutes on a busy one.
            item.add_marker(pytest.mark.timeout(_VLLM_TIMEOUT_S))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _LONGEST_FIRST.index(item.path.relative_to(_TESTS).parts[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a group in one process, in order; groups begin as their first tests come."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - only side by side

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            own = nodeid.partition("::")[0].removeprefix("tests/")
            return next((each[0] for each in _TOGETHER if own.startswith(each)), own)

    config.option.loadscopereorder = False
    return Groups(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Keep stderr as it is before pytest captures it, and let Ctrl-C interrupt what tests start."""
    config.stash[_stderr] = os.dup(2)
    # A shell's background job ignores it, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _distributes(config):
        forked.announce("services", "sglang")


def _distributes(config: pytest.Config) -> bool:
    return bool(config.getoption("tx", None)) and not hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the run, and say what each thread does, when a test hangs beyond all limits."""
    faulthandler.dump_traceback_later(_HANGS_S, exit=True, file=item.config.stash[_stderr])


pytest_runtest_teardown = pytest_runtest_setup
"""Once more: pytest stops faulthandler's clock when a test has failed."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the traps that a vendor has removed: news, and no failure."""
    for report in terminalreporter.stats.get("xpassed", ()):
        terminalreporter.write_line(f"No longer a trap: {report.nodeid} ({report.wasxfail})")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the servers that fork test processes import beside the first tests."""
    if session.config.option.collectonly:
        return
    # Thousands of tests and all libraries: collections in the middle of tests leave them alone.
    gc.collect()
    gc.freeze()
    if any(item.get_closest_marker("vllm") for item in session.items):
        preloads.fork_engine_processes(preloads.VLLM)  # of the engines in this process
    sglang = any(item.get_closest_marker("sglang") for item in session.items)
    _begin_forking((item.path for item in session.items), sglang=sglang)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """Start them once for all processes that run tests."""
    files = {Path(each.partition("::")[0]) for each in ids}
    sglang = "not sglang" not in node.config.option.markexpr and any(
        "mark.sglang" in file.read_text(encoding="utf-8") for file in files
    )
    _begin_forking(files, sglang=sglang)


def _begin_forking(files: Iterable[Path], *, sglang: bool) -> None:
    folders = {part for file in files if "vllm_engine" not in file.parts for part in file.parts}
    if folders & {"clients", "deploy", "e2e", "integration"}:
        forked.begin("services")
    if sglang:
        forked.begin("sglang")
    if sglang and _HAS_VLLM:  # a fleet of both
        forked.begin("services", "vllm")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    forked.end()


def pytest_unconfigure() -> None:
    """Keep sentencepiece's SWIG capsule alive: freed at the interpreter's end, it crashes that.

    Processes of ours import sentencepiece too, through transformers; there the order differs.
    """
    runtime = sys.modules.get("swig_runtime_data4")
    if runtime is not None:
        for capsule in vars(runtime).values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(capsule))
