"""Stubs of other languages: the contract's names, the descriptor set, how stubs are made."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

ROOT = Path(__file__).parents[2]
_SET = ROOT / "generated" / "descriptors" / "millstream.binpb"


@pytest.fixture(scope="module")
def pool() -> Any:
    """The committed set, and nothing else."""
    found = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(_SET.read_bytes()).file:
        found.Add(file)
    return found


def _messages(pool: Any) -> list[Descriptor]:
    files = descriptor_pb2.FileDescriptorSet.FromString(_SET.read_bytes()).file
    return [
        pool.FindMessageTypeByName(f"{file.package}.{message.name}")
        for file in files
        if file.package == "millstream.v1"
        for message in file.message_type
    ]


def _java_accessors(field: FieldDescriptor) -> list[str]:
    """Return what Java's generator makes of a field besides its getter, as camel case."""
    name = field.camelcase_name
    if field.is_repeated:
        return [name + "Count", name + "List"]
    if field.type == FieldDescriptor.TYPE_STRING:
        return [name + "Bytes"]
    return [name + "Value"] if field.type == FieldDescriptor.TYPE_ENUM else []


def test_no_two_fields_of_a_message_get_the_same_name_in_java(pool: Any) -> None:
    messages = _messages(pool)
    clashes = [
        f"{message.name}.{field.name} and {other}"
        for message in messages
        for field in message.fields
        for other in _java_accessors(field)
        if other in {one.camelcase_name for one in message.fields}
    ]
    assert len(messages) > 50
    assert not clashes


def test_the_descriptor_set_needs_no_other_file(pool: Any) -> None:
    for name in ("millstream.v1.ProcessorService", "grpc.health.v1.Health"):
        assert pool.FindServiceByName(name).methods
    assert pool.FindServiceByName("xds.service.orca.v3.OpenRcaService").methods
    status: Any = GetMessageClass(pool.FindMessageTypeByName("google.rpc.Status"))()
    info = GetMessageClass(pool.FindMessageTypeByName("google.rpc.ErrorInfo"))(reason="OVERLOADED")
    status.details.add().Pack(info)
    assert status.details[0].type_url == "type.googleapis.com/google.rpc.ErrorInfo"


def test_the_descriptor_set_has_the_contracts_comments() -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(_SET.read_bytes()).file
    (chat,) = [file for file in files if file.name == "millstream/v1/chat.proto"]
    comments = [location.leading_comments for location in chat.source_code_info.location]
    assert any("the author of a message" in comment for comment in comments)


def test_all_packages_have_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    pom = (ROOT / "generated/java/pom.xml").read_text()
    package = (ROOT / "generated/typescript/package.json").read_text()
    assert re.search(r"<version>([^<]+)<", pom).group(1) == project  # type: ignore[union-attr]
    assert f'version = "{project}"' in (ROOT / "generated/java/build.gradle.kts").read_text()
    assert f'"version": "{project}"' in package


def _pom() -> tuple[dict[str, str], str]:
    """Return the pom's properties, with theirs filled in, and its text."""
    text = (ROOT / "generated/java/pom.xml").read_text()
    block = re.search(r"<properties>(.*)</properties>", text, re.DOTALL)
    assert block is not None
    found = dict(re.findall(r"<([\w.-]+)>([^<]+)</\1>", block[1]))
    found["project.basedir"] = str(ROOT / "generated/java")
    for _ in range(3):  # a folder's property names another's
        for name, value in found.items():
            found[name] = re.sub(r"\$\{([^}]+)\}", lambda match: found[match[1]], value)
    return found, text


def test_maven_finds_what_it_makes_the_java_package_of() -> None:
    properties, text = _pom()
    files = re.findall(r"<file>\$\{([^}]+)\}([^<]+)</file>", text)
    assert len(files) == 3
    for folder, path in files:
        assert Path(properties[folder] + path).is_file()
    (include,) = set(re.findall(r"<include>(.+\.proto)</include>", text))
    made = set(Path(properties["proto.dir"]).resolve().glob(include))
    assert made == set((ROOT / "proto/millstream/v1").iterdir())


def test_gradle_makes_the_java_package_of_the_same() -> None:
    properties, text = _pom()
    gradle = (ROOT / "generated/java/build.gradle.kts").read_text()
    for artifact, name in (
        ("com.google.protobuf:protoc", "protoc.version"),
        ("io.grpc:protoc-gen-grpc-java", "protoc-gen-grpc-java.version"),
        ("com.google.protobuf:protobuf-java", "protobuf.version"),
    ):
        assert f'"{artifact}:{properties[name]}"' in gradle
    assert f'val grpc = "{properties["grpc.version"]}"' in gradle
    for said in ("millstream/v1/*.proto", "services/millstream_client/service_config"):
        assert said in text
        assert said in gradle


# ---- making them ---------------------------------------------------------------------------------


def _script(path: str) -> ModuleType:
    """Import a script by its path."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gen_clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The generator, with one language whose stub is the word "new"."""
    monkeypatch.syspath_prepend(ROOT / "generated" / "tools")
    module = _script("generated/tools/gen_clients.py")

    def generate(root: Path) -> None:
        folder = root / "stubs"
        folder.mkdir()
        (folder / "a.txt").write_text("new")

    monkeypatch.setattr(module, "ROOT", tmp_path)
    tool = module.Tool((sys.executable, "--version"), "Python")
    language = module.Language("stubs", generate, (tool,))
    monkeypatch.setattr(module, "LANGUAGES", {"made": language})
    return module


def test_the_check_finds_stale_missing_and_left_over_files(
    gen_clients: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gen_clients.main(["--check"]) == 1
    assert "stubs/a.txt is missing" in capsys.readouterr().err
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / "a.txt").write_text("old")
    (tmp_path / "stubs" / "b.txt").write_text("of a proto that is gone")
    assert gen_clients.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "stubs/a.txt differs" in said
    assert "stubs/b.txt isn't generated" in said
    assert gen_clients.main([]) == 0
    assert [path.name for path in (tmp_path / "stubs").iterdir()] == ["a.txt"]
    assert gen_clients.main(["--check"]) == 0


@pytest.mark.parametrize(("required", "code"), [("", 0), ("required", 1)])
def test_a_missing_generator_is_said_and_in_ci_a_failure(
    gen_clients: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    required: str,
    code: int,
) -> None:
    monkeypatch.setenv("TOOLCHAINS", required)
    other = gen_clients.Tool((sys.executable, "--version"), "Python 2.1")
    language = gen_clients.Language("stubs", lambda _: None, (other,))
    monkeypatch.setattr(gen_clients, "LANGUAGES", {"made": language})
    assert gen_clients.main(["--check"]) == code
    assert "SKIPPED made:" in capsys.readouterr().err


# ---- what they are made with ---------------------------------------------------------------------


def _program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def setup_clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The set-up on a machine that has all packages but Go, and npm nothing to do."""
    _program(tmp_path, "apt-get", f'echo "$@" >> {tmp_path}/calls')
    _program(
        tmp_path,
        "dpkg-query",
        'shift 3; for name in "$@"; do [ "$name" = golang-go ] || echo "$name installed"; done',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    module = _script("requirements/clients.py")
    monkeypatch.setattr(module, "NPM", ())
    return module


def test_root_installs_what_is_missing_and_no_more(
    setup_clients: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert setup_clients.main() == 0
    update, install = (tmp_path / "calls").read_text().splitlines()
    assert update.endswith("update")
    assert install.endswith("install --yes --no-install-recommends golang-go")


def test_others_are_told_the_command(
    setup_clients: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert setup_clients.main() == 1
    said = capsys.readouterr().err
    assert "sudo apt-get install --yes --no-install-recommends golang-go" in said
    assert not (tmp_path / "calls").exists()
