"""The flags for TLS and API keys: what they name, and the sentences about what they can't."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from millstream_server.cli.client import connect
from millstream_server.cli.flags import KEY_VARIABLE, Destination, explain_tls, read_connection
from millstream_server.cli.main import main, parse
from tests.support.wire.certificates import Authority

KEY = "k" * 32
REMOTE = "processor.example:50051"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with ca.pem, a.pem with a.key, b.pem with b.key, and files that are bad."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    for name in ("a", "b"):
        issued = authority.issue(f"{name}.example")
        (tmp_path / f"{name}.pem").write_bytes(issued.cert)
        (tmp_path / f"{name}.key").write_bytes(issued.key)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "two").write_text(f"{KEY}\n{KEY}\n")
    (tmp_path / "key").write_text(f"{KEY}\n")
    return tmp_path


def read(*flags: str) -> Destination:
    return read_connection(parse(["models", "--address", REMOTE, *flags]))


def test_without_flags_there_is_neither_tls_nor_a_key() -> None:
    assert read() == Destination(REMOTE)


@pytest.mark.parametrize(
    "flags", [["--tls"], ["--tls-ca-file", "ca.pem"], ["--tls-server-name", "a.example"]]
)
def test_each_flag_turns_tls_on(flags: list[str]) -> None:
    assert read(*flags).tls


def test_all_flags_are_taken() -> None:
    flags = ["--tls-ca-file", "ca.pem", "--tls-cert-file", "a.pem", "--tls-key-file", "a.key"]
    flags += ["--tls-server-name", "x", "--api-key-file", "key", "--allow-plaintext-key"]
    server = read(*flags)
    assert server == Destination(
        REMOTE,
        tls=True,
        ca_file=Path("ca.pem"),
        cert_file=Path("a.pem"),
        key_file=Path("a.key"),
        server_name="x",
        api_key=KEY,
        allow_plaintext_key=True,
    )
    assert KEY not in repr(server)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--tls-ca-file no.pem", "--tls-ca-file: no.pem can't be read: No such file or directory"),
        ("--tls-ca-file text", "--tls-ca-file: text holds no valid PEM certificate"),
        ("--tls-ca-file empty", "--tls-ca-file: empty holds no valid PEM certificate"),
        ("--tls-cert-file a.pem", "belong together; --tls-key-file is missing"),
        ("--tls-key-file a.key", "belong together; --tls-cert-file is missing"),
        (
            "--tls-cert-file a.key --tls-key-file a.key",
            "--tls-cert-file: a.key holds no valid PEM certificate",
        ),
        (
            "--tls-cert-file a.pem --tls-key-file text",
            "--tls-key-file: text holds no valid PEM private key",
        ),
        (
            "--tls-cert-file a.pem --tls-key-file b.key",
            "--tls-key-file: b.key isn't the key of the certificate in a.pem",
        ),
        ("--api-key-file no", "--api-key-file: no can't be read: No such file or directory"),
        ("--api-key-file .", "--api-key-file: . can't be read: Is a directory"),
        ("--api-key-file empty", "--api-key-file: empty is empty"),
        ("--api-key-file two", "--api-key-file: two must hold an API key alone: one line"),
    ],
)
def test_what_is_wrong_is_said_before_a_call(
    flags: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", *flags.split()]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: --")
    assert sentence in said
    assert said.count("\n") == 1


def test_an_encrypted_key_is_not_asked_for_its_passphrase() -> None:
    key = load_pem_private_key(Path("a.key").read_bytes(), password=None)
    locked = BestAvailableEncryption(b"secret")
    Path("locked").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    with pytest.raises(ValueError, match="locked is encrypted; gRPC needs it without a passphrase"):
        read("--tls-cert-file", "a.pem", "--tls-key-file", "locked")


def test_a_bad_key_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "clé")
    with pytest.raises(ValueError, match=f"^{KEY_VARIABLE} must hold an API key alone") as caught:
        read()
    assert "clé" not in str(caught.value)


def test_a_key_goes_to_another_machine_with_tls_only_or_if_allowed() -> None:
    with pytest.raises(
        ValueError, match=r"unencrypted: give --tls-ca-file .*--allow-plaintext-key"
    ):
        connect(read("--api-key-file", "key"))
    for flags in (["--tls"], ["--allow-plaintext-key"]):
        connect(read("--api-key-file", "key", *flags))
    connect(Destination("127.0.0.1:50051", api_key=KEY))


@pytest.mark.parametrize(
    ("address", "name", "expected"),
    [
        ("a.example:1", "", "a.example"),
        ("[::1]:1", "", "::1"),
        ("dns:///a.example:1", "", "a.example"),
        ("127.0.0.1:1", "b.example", "b.example"),
    ],
)
def test_the_name_that_a_certificate_must_hold(address: str, name: str, expected: str) -> None:
    assert Destination(address, server_name=name).expected_name == expected


def test_what_a_server_says_itself_is_no_failure_of_tls() -> None:
    assert explain_tls("Socket closed", Destination(REMOTE)) is None
    assert explain_tls("certificate has expired", Destination(REMOTE)) is None
