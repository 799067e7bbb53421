"""The example client in Java, with stubs made as Maven makes them, on Debian's grpc-java."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import ExampleChecks
from tests.support.clients.client_examples import ExampleSuite
from tests.support.clients.tool_checks import check_tool_loop

_PROTOS = ROOT / "proto"
_DESCRIPTORS = ROOT / "generated" / "descriptors" / "millstream.binpb"
_EXAMPLE = Path(__file__).with_name("java")
_PACKAGE = ROOT / "generated" / "java" / "src" / "main" / "java"
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
_KOTLIN = Path("/usr/share/java/kotlin-stdlib.jar")
# Debian has no grpc-services, and a google.rpc that is older than ErrorInfo.
_OTHER_PROTOS = (
    "google/rpc/error_details.proto",
    "grpc/health/v1/health.proto",
)

# 15 seconds on two idle cores; on busy ones more.
pytestmark = pytest.mark.timeout(240)


def _class_path(*folders: Path) -> str:
    return ":".join(map(str, [*folders, *_JARS]))


def _compile(
    sources: Path, classes: Path, *libraries: Path, release: int, pattern: str = "**/*.java"
) -> None:
    files = sorted(map(str, sources.glob(pattern)))
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


def _build(folder: Path, source: str, *protos: str) -> None:
    """Make stubs and compile them; `pom.xml` does the same with generators of Maven Central.

    As Java 8 code, which the libraries still support.
    """
    made = folder / "sources"
    made.mkdir()
    plugin = ["--plugin=protoc-gen-grpc=/usr/bin/grpc_java_plugin", f"--grpc_out={made}"]
    run(["protoc", source, f"--java_out={made}", *plugin, *protos], folder)
    for path in made.rglob("*Grpc.java"):  # Debian has no javax.annotation
        path.write_text(re.sub(r"@javax\.annotation\.Generated\([^)]*\)", "", path.read_text()))
    _compile(made, folder, release=8)


def _build_others(folder: Path) -> None:
    _build(folder, f"--descriptor_set_in={_DESCRIPTORS}", *_OTHER_PROTOS)


def _build_package(folder: Path, others: Path) -> None:
    protos = [str(path.relative_to(_PROTOS)) for path in sorted(_PROTOS.glob("millstream/v1/*"))]
    _build(folder, f"--proto_path={_PROTOS}", *protos)
    _compile(_PACKAGE, folder, folder, others, release=8)


def _libraries() -> tuple[Path, Path]:
    """Build the package, and what Debian lacks."""
    need("java", "javac", "protoc", "grpc_java_plugin", *_JARS)
    others = built("java-others", [_DESCRIPTORS], _build_others)
    package = built(
        "java-package", [_PROTOS, _PACKAGE], lambda folder: _build_package(folder, others)
    )
    return others, package


def _java(name: str, sources: Path, pattern: str, main: str) -> list[str]:
    """Compile a program; returns how it is started."""
    libraries = _libraries()
    made = built(
        name,
        [_PROTOS, _PACKAGE, sources],
        lambda folder: _compile(sources, folder, *libraries, release=11, pattern=pattern),
    )
    return ["java", "-Xshare:auto", "-cp", _class_path(made, *libraries), main]


def command() -> list[str]:
    """Build the example; return how it is started."""
    return _java("java-example", _EXAMPLE, "*.java", "Example")


class TestJava(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls) -> list[str]:
        return command()


def test_the_pages_program_asks_a_question(example_suite: ExampleSuite) -> None:
    example_suite.check_ask(_java("java-ask", _EXAMPLE / "ask", "**/*.java", "Ask"))


@pytest.mark.skipif(shutil.which("kotlinc") is None, reason="apt-get install kotlin: 290 MB")
def test_kotlins_program_asks_a_question(example_suite: ExampleSuite) -> None:
    libraries = _libraries()
    source = _EXAMPLE / "kotlin" / "Ask.kt"

    def build(folder: Path) -> None:
        class_path = ["-cp", _class_path(*libraries), "-jvm-target", "1.8"]
        run(["kotlinc", source, *class_path, "-d", folder], folder)

    made = built("kotlin-ask", [_PROTOS, _PACKAGE, source], build)
    command = ["java", "-Xshare:auto", "-cp", _class_path(made, _KOTLIN, *libraries), "AskKt"]
    example_suite.check_ask(command)
    example_suite.check_cancel(command)


def test_the_tool_loop() -> None:
    check_tool_loop(_java("java-tools", _EXAMPLE / "tools", "*.java", "Tools"))


def test_the_pages_program_has_what_the_package_has() -> None:
    """Maven Central isn't at hand: the pom was run by hand, and its versions are compared."""
    ours = (ROOT / "generated/java/pom.xml").read_text()
    theirs = (_EXAMPLE / "ask" / "pom.xml").read_text()
    (grpc,) = re.findall(r"<grpc.version>(.+)</grpc.version>", ours)
    (package,) = re.findall(r"<artifactId>millstream-grpc</artifactId>\s+<version>(.+)</", ours)
    assert f"<grpc.version>{grpc}</grpc.version>" in theirs
    assert f"<version>{package}</version>" in theirs
    for needed in ("grpc-netty-shaded", "grpc-services", "gson"):
        assert f"<artifactId>{needed}</artifactId>" in theirs
