"""The example client in TypeScript, on the package as `npm pack` makes it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import ExampleChecks, check_cost
from tests.support.clients.client_examples import (
    API_KEY,
    RECOMMENDED,
    ROUND_ROBIN,
    ExampleSuite,
)
from tests.support.clients.tool_checks import check_tool_loop
from tests.support.processes.command_line import until
from tests.support.processes.simulated_suite import MODEL
from tests.support.vendor import trap
from tests.support.wire.relay import Relay

_PACKAGE = ROOT / "generated" / "typescript"
_EXAMPLE = Path(__file__).with_name("typescript")
_INSTALLED = _PACKAGE / "node_modules"
_SOURCES = [
    _EXAMPLE,
    _PACKAGE / "package-lock.json",
    _PACKAGE / "package.json",
    _PACKAGE / "src",
]
_OLDEST = {
    "@grpc/grpc-js": "1.13.4",
    "@bufbuild/protobuf": "2.2.0",
    "typescript": "5.0.4",
    "@types/node": "20.10.0",
}
"""What docs/clients/typescript.md says; the peers are the lower bounds of package.json."""

# Ten seconds on two idle cores; on busy ones more, and npm downloads.
pytestmark = pytest.mark.timeout(240)


def _build(folder: Path) -> None:
    """Install the package from its archive, as npm would, but without a network."""
    modules = folder / "node_modules"
    shutil.copytree(_EXAMPLE, folder, dirs_exist_ok=True)
    run(["npm", "pack", "--pack-destination", folder], _PACKAGE)
    (archive,) = folder.glob("*.tgz")
    shutil.unpack_archive(archive, modules)
    (modules / "@millstream").mkdir()
    (modules / "package").rename(modules / "@millstream" / "grpc")
    for package in _INSTALLED.iterdir():
        (modules / package.name).symlink_to(package)
    run([modules / ".bin" / "tsc", "-p", folder], folder)


def command(name: str = "example.js") -> list[str]:
    """Build the programs; return how one is started."""
    need("node", "npm", _INSTALLED)
    return ["node", str(built("typescript", _SOURCES, _build) / name)]


def with_config(command: list[str], config: str) -> list[str]:
    """Return the example with another service config than the package's."""
    example = Path(command[1])
    ours = '"grpc.service_config": recommendedServiceConfig'
    text = example.read_text()
    assert ours in text
    other = example.with_name(f"example-{hashlib.sha256(config.encode()).hexdigest()[:8]}.js")
    other.write_text(text.replace(ours, f'"grpc.service_config": {json.dumps(config)}'))
    return ["node", str(other)]


class TestTypeScript(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls) -> list[str]:
        return command()

    @pytest.fixture(scope="class")
    @classmethod
    def round_robin(cls, command: list[str]) -> list[str]:
        return with_config(command, ROUND_ROBIN)

    @pytest.mark.parametrize(
        "config",
        [pytest.param(RECOMMENDED, marks=trap("grpc-js loads ORCA's proto for every call"))],
    )
    def test_the_weighted_policy_costs_what_round_robin_does(
        self, example_suite: ExampleSuite, command: list[str], round_robin: list[str], config: str
    ) -> None:
        """docs/upstream/grpc-js.md; where it passes, `gen_clients.py` needs no other config."""
        check_cost(example_suite, with_config(command, config), round_robin)


def test_the_pages_program_asks_a_question(example_suite: ExampleSuite) -> None:
    example_suite.check_ask(command("ask.js"))
    example_suite.check_cancel(command("ask.js"))


async def test_the_pages_program_waits_for_a_server(example_suite: ExampleSuite) -> None:
    """Longer than its retries: they end before the third connection is tried, after 2.6 s."""
    relay = Relay(int(example_suite.processors[0].address.rpartition(":")[2]))
    async with relay.laid():
        relay.cut()
        program = await asyncio.create_subprocess_exec(
            *command("ask.js"),
            *(relay.address, MODEL),
            env={**os.environ, "MILLSTREAM_API_KEY": API_KEY},
            stdout=asyncio.subprocess.PIPE,
        )
        await until(lambda: relay.refused > 2 or program.returncode is not None)
        relay.flow()
        out, _ = await program.communicate()
    assert (program.returncode, out) == (0, b"ABCDE\n5 tokens\n")


def test_the_tool_loop() -> None:
    check_tool_loop(command("tools.js"))


def _build_oldest(folder: Path) -> None:
    """Install the archive into a fresh project with other versions of what it needs."""
    run(["npm", "pack", "--pack-destination", folder], _PACKAGE)
    (archive,) = folder.glob("*.tgz")
    for name in ("ask.ts", "example.ts", "tools.ts", "tsconfig.json"):
        shutil.copy(_EXAMPLE / name, folder)
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    others = [f"{name}@{version}" for name, version in _OLDEST.items()]
    quiet = ["--no-audit", "--no-fund", "--silent", "--save-exact"]
    run(["npm", "install", *quiet, archive, *others], folder)
    run([folder / "node_modules" / ".bin" / "tsc", "-p", folder], folder)


class TestOldestVersions(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def project(cls) -> Path:
        need("node", "npm", _INSTALLED)
        probe = ["npm", "view", "@grpc/grpc-js", "name"]
        if subprocess.run(probe, capture_output=True, check=False).returncode:
            need("a package registry that npm reaches")
        return built("typescript-oldest", [*_SOURCES, Path(__file__)], _build_oldest)

    @pytest.fixture(scope="class")
    @classmethod
    def command(cls, project: Path) -> list[str]:
        return ["node", str(project / "example.js")]

    @pytest.fixture(scope="class")
    @classmethod
    def round_robin(cls, command: list[str]) -> list[str]:
        return with_config(command, ROUND_ROBIN)

    def test_the_project_has_its_own_versions_and_no_second_copy(self, project: Path) -> None:
        modules = project / "node_modules"
        found = {
            name: json.loads((modules / name / "package.json").read_text())["version"]
            for name in _OLDEST
        }
        assert found == _OLDEST
        assert not (modules / "@millstream" / "grpc" / "node_modules").exists()

    def test_the_archive_has_the_licence(self, project: Path) -> None:
        licence = project / "node_modules" / "@millstream" / "grpc" / "LICENSE"
        assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()

    def test_commonjs_may_load_it(self, project: Path) -> None:
        script = 'import("@millstream/grpc").then((found) => console.log(found.ChatRole.USER))'
        program = project / "program.cjs"
        program.write_text(script)
        assert run(["node", program], project).stdout == "3\n"


def test_the_oldest_versions_are_those_that_the_package_states() -> None:
    package = json.loads((_PACKAGE / "package.json").read_text())
    assert "dependencies" not in package  # else a project gets a second grpc-js
    peers = package["peerDependencies"]
    assert peers == {name: f"^{_OLDEST[name]}" for name in peers}
    page = (ROOT / "docs" / "clients" / "typescript.md").read_text()
    for stated in ("Node.js 20", "grpc-js 1.13", "TypeScript 5.0", "protobuf` 2.2"):
        assert stated in page
