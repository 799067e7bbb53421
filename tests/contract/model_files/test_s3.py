"""Models from S3: the real library, a server of the same API, real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.models.model_files import MODEL, WEIGHTS, run
from tests.support.models.s3_server import BUCKET, DENIED, S3Server

pytest.importorskip("boto3", reason="the extra s3 isn't installed: run `make setup`")
URI = f"s3://{BUCKET}/llama/v1"


@pytest.fixture
async def s3() -> AsyncIterator[S3Server]:
    objects = {f"llama/v1/{name}": content for name, content in MODEL.items()}
    objects |= {"llama/v1/sub/": b"", "llama/v1/sub/extra.json": b"{}", "llama/v10/x": b"no"}
    async with S3Server(objects).serving() as server:
        yield server


def _content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith(".millstream-")
    }


async def test_a_prefix_arrives_complete_once(s3: S3Server, tmp_path: Path) -> None:
    first = await run("fetch", f"{URI}/", tmp_path, env=s3.environment)
    assert first.code == 0, first.log
    found = _content(tmp_path)
    names = ("config.json", "tokenizer.json", "model.safetensors")
    assert found == {name: MODEL[name] for name in names} | {"sub/extra.json": b"{}"}
    asked = s3.asked.copy()
    second = await run("fetch", URI, tmp_path, env={})
    assert (second.code, s3.asked) == (0, asked)


async def test_a_later_attempt_goes_on_inside_a_file(s3: S3Server, tmp_path: Path) -> None:
    key = "llama/v1/model.safetensors"
    s3.truncate[key] = 1
    first = await run("fetch", URI, tmp_path, "--retries", "0", env=s3.environment)
    assert first.code == 1
    assert not (tmp_path / "model.safetensors").exists()
    second = await run("fetch", URI, tmp_path, env=s3.environment)
    assert second.code == 0, second.log
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
    assert s3.asked[f"{key}@0"] == 1
    assert s3.asked[f"{key}@{len(WEIGHTS) // 2}"] == 1


async def test_a_servers_entity_tag_does_not_lead_out_of_the_directory(
    s3: S3Server, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("mine")
    s3.etags["llama/v1/config.json"] = "/../../../../notes"
    done = await run("fetch", URI, tmp_path / "model", env=s3.environment)
    assert done.code == 0, done.log
    assert (tmp_path / "notes").read_text() == "mine"
    assert (tmp_path / "model/config.json").read_bytes() == MODEL["config.json"]


async def test_what_changed_between_two_attempts_is_downloaded_again(
    s3: S3Server, tmp_path: Path
) -> None:
    s3.truncate["llama/v1/model.safetensors"] = 1
    args = ("fetch", URI, tmp_path, "--retries", "0", "--parallel", "1")
    assert (await run(*args, env=s3.environment)).code == 1
    assert (tmp_path / "config.json").exists()
    s3.objects["llama/v1/config.json"] = b'{"model_type": "tinY"}'
    done = await run(*args, env=s3.environment)
    assert done.code == 0, done.log
    assert (tmp_path / "config.json").read_bytes() == b'{"model_type": "tinY"}'


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3://nothing/llama", "there is no bucket nothing"),
        (f"s3://{BUCKET}/none", f"s3://{BUCKET}/none: there are no files"),
        (f"s3://{DENIED}/llama", "(AccessDenied): the credentials need s3:ListBucket"),
    ],
)
async def test_a_refusal_says_what_to_do(s3: S3Server, tmp_path: Path, uri: str, says: str) -> None:
    done = await run("fetch", uri, tmp_path, env=s3.environment)
    assert done.code == 2, done.log
    assert says in done.log
    assert "Traceback" not in done.log


async def test_without_credentials_it_says_so(s3: S3Server, tmp_path: Path) -> None:
    env = {k: v for k, v in s3.environment.items() if "KEY" not in k}
    done = await run("fetch", URI, tmp_path, env={**env, "HOME": str(tmp_path / "home")})
    assert done.code == 2, done.log
    assert "there are no credentials" in done.log
