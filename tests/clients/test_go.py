"""The Go module, and the example client in Go, on Debian's Go and grpc-go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import ExampleChecks
from tests.support.clients.client_examples import ExampleSuite
from tests.support.clients.tool_checks import check_tool_loop

_MODULE = ROOT / "generated" / "go"
_EXAMPLE = Path(__file__).with_name("go")
_PATH = "github.com/millstream/millstream/generated/go"
_LIBRARIES = Path("/usr/share/gocode")
_CACHE = ROOT / ".millstream" / "clients" / "go-cache"

# Ten seconds on two idle cores; on busy ones more.
pytestmark = pytest.mark.timeout(240)


def _environment(folder: Path) -> dict[str, str]:
    """Debian's libraries are source packages in a GOPATH."""
    return {
        "GO111MODULE": "off",
        "GOFLAGS": "",
        "GOPATH": f"{folder}:{_LIBRARIES}",
        "GOCACHE": str(_CACHE),
    }


def _build(folder: Path) -> None:
    module = folder / "src" / _PATH
    module.parent.mkdir(parents=True)
    module.symlink_to(_MODULE)
    run(["go", "build", "-o", folder / "example", "."], _EXAMPLE, _environment(folder))


def command() -> list[str]:
    """Build the example; return how it is started."""
    need("go", _LIBRARIES / "src" / "google.golang.org" / "grpc")
    example = built("go", [_MODULE, _EXAMPLE], _build) / "example"
    # grpc-go before 1.43 retries only when told to.
    return ["env", "GRPC_GO_RETRY=on", str(example)]


class TestGo(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls) -> list[str]:
        return command()


def _build_ask(folder: Path, name: str = "ask") -> None:
    """Build a page's program; Debian's grpc-go is too old for two of its lines."""
    module = folder / "src" / _PATH
    module.parent.mkdir(parents=True)
    module.symlink_to(_MODULE)
    program = (_EXAMPLE / name / "main.go").read_text()
    for new, old in (
        ("grpc.NewClient(", "grpc.Dial("),
        ("grpc.WithTransportCredentials(insecure.NewCredentials())", "grpc.WithInsecure()"),
        ('\t"google.golang.org/grpc/credentials/insecure"\n', ""),
    ):
        assert new in program
        program = program.replace(new, old)
    (folder / "main.go").write_text(program)
    run(["go", "build", "-o", folder / name, "."], folder, _environment(folder))


def test_the_pages_program_asks_a_question(example_suite: ExampleSuite) -> None:
    need("go", _LIBRARIES / "src" / "google.golang.org" / "grpc")
    example_suite.check_ask([built("go-ask", [_MODULE, _EXAMPLE], _build_ask) / "ask"])


def test_the_tool_loop() -> None:
    need("go", _LIBRARIES / "src" / "google.golang.org" / "grpc")
    made = built("go-tools", [_MODULE, _EXAMPLE], lambda folder: _build_ask(folder, "tools"))
    check_tool_loop([made / "tools"])


def test_the_module_names_what_it_imports() -> None:
    """As `go mod tidy` would leave it; it can't run here."""
    text = (_MODULE / "go.mod").read_text()
    assert "google.golang.org/genproto/googleapis/rpc v0" in text.partition("\n)\n")[0]
    assert "go-cmp v0.6.0 h1:" not in (_MODULE / "go.sum").read_text()


def test_the_modules_path_is_the_one_that_the_protos_declare() -> None:
    need("go")
    module = json.loads(run(["go", "mod", "edit", "-json"], _MODULE).stdout)
    assert module["Module"]["Path"] == _PATH
    assert (
        f'option go_package = "{_PATH}/millstream/v1;millstreamv1";'
        in (ROOT / "proto" / "millstream" / "v1" / "chat.proto").read_text()
    )
