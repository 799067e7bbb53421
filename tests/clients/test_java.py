"""The example client in Java, with stubs made as Maven makes them, on Debian's grpc-java."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import ExampleChecks

_PROTOS = ROOT / "proto"
_DESCRIPTORS = ROOT / "generated" / "descriptors" / "millstream.binpb"
_EXAMPLE = Path(__file__).with_name("java")
_JARS = [
    Path("/usr/share/java", f"{name}.jar")
    for name in (
        *("protobuf", "proto-google-common-protos", "guava", "gson", "perfmark-api"),
        *(f"grpc-{part}" for part in ("api", "context", "core", "netty", "stub")),
        *("grpc-protobuf", "grpc-protobuf-lite"),
        *("netty-buffer", "netty-codec", "netty-codec-http", "netty-codec-http2", "netty-common"),
        *(
            "netty-handler",
            "netty-resolver",
            "netty-transport",
            "netty-transport-native-unix-common",
        ),
    )
]
# Debian has no grpc-services, and a google.rpc that is older than ErrorInfo.
_OTHER_PROTOS = (
    "google/rpc/error_details.proto",
    "grpc/health/v1/health.proto",
)

# 15 seconds on two idle cores; on busy ones more.
pytestmark = pytest.mark.timeout(240)


def _class_path(*folders: Path) -> str:
    return ":".join(map(str, [*folders, *_JARS]))


def _compile(sources: Path, classes: Path, *libraries: Path, release: int) -> None:
    files = sorted(map(str, sources.rglob("*.java")))
    options = [
        "-J-XX:TieredStopAtLevel=1",
        "-nowarn",
        "-proc:none",
        "--release",
        str(release),
        "-d",
        str(classes),
    ]
    run(["javac", *options, "-cp", _class_path(*libraries), *files], sources)


def _build(folder: Path, source: str, *protos: str, release: int) -> None:
    """Make stubs and compile them; `pom.xml` does the same with generators of Maven Central."""
    made = folder / "sources"
    made.mkdir()
    plugin = ["--plugin=protoc-gen-grpc=/usr/bin/grpc_java_plugin", f"--grpc_out={made}"]
    run(["protoc", source, f"--java_out={made}", *plugin, *protos], folder)
    for path in made.rglob("*Grpc.java"):  # Debian has no javax.annotation
        path.write_text(re.sub(r"@javax\.annotation\.Generated\([^)]*\)", "", path.read_text()))
    _compile(made, folder, release=release)


def _build_stubs(folder: Path) -> None:
    """Compile the contract's stubs as Java 8 code, which the libraries still support."""
    protos = [str(path.relative_to(_PROTOS)) for path in sorted(_PROTOS.glob("millstream/v1/*"))]
    _build(folder, f"--proto_path={_PROTOS}", *protos, release=8)


def _build_others(folder: Path) -> None:
    _build(folder, f"--descriptor_set_in={_DESCRIPTORS}", *_OTHER_PROTOS, release=11)


class TestJava(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls) -> list[str]:
        need("java", "javac", "protoc", "grpc_java_plugin", *_JARS)
        stubs = built("java-stubs", [_PROTOS], _build_stubs)
        others = built("java-others", [_DESCRIPTORS], _build_others)
        example = built(
            "java-example",
            [_PROTOS, _EXAMPLE],
            lambda folder: _compile(_EXAMPLE, folder, stubs, others, release=11),
        )
        return ["java", "-Xshare:auto", "-cp", _class_path(example, stubs, others), "Example"]
