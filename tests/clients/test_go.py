"""The Go module, and the example client in Go, on Debian's Go and grpc-go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import ExampleChecks

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


class TestGo(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls) -> list[str]:
        need("go", _LIBRARIES / "src" / "google.golang.org" / "grpc")
        example = built("go", [_MODULE, _EXAMPLE], _build) / "example"
        # grpc-go before 1.43 retries only when told to.
        return ["env", "GRPC_GO_RETRY=on", str(example)]


def test_the_modules_path_is_the_one_that_the_protos_declare() -> None:
    need("go")
    module = json.loads(run(["go", "mod", "edit", "-json"], _MODULE).stdout)
    assert module["Module"]["Path"] == _PATH
    assert (
        f'option go_package = "{_PATH}/millstream/v1;millstreamv1";'
        in (ROOT / "proto" / "millstream" / "v1" / "chat.proto").read_text()
    )
