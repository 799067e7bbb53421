"""Models from the Hub: the real library, a server of the same API, real processes."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.hub_server import COMMIT, GATED, REPO, TOKEN, HubServer
from tests.support.models.model_files import CONFIG, MODEL, WEIGHTS, Ended, ended, run, start

URI = f"hf://{REPO}"


@pytest.fixture
async def hub() -> AsyncIterator[HubServer]:
    async with HubServer(dict(MODEL)).serving() as server:
        yield server


async def _fetch(hub: HubServer, *args: object, **env: str) -> Ended:
    return await run("fetch", *args, env={"HF_ENDPOINT": hub.endpoint, **env})


def _mark(directory: Path, name: str = "complete") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f".millstream-{name}").read_text())
    return found


async def test_a_model_arrives_complete_once(hub: HubServer, tmp_path: Path) -> None:
    first = await _fetch(hub, URI, tmp_path / "m", "--period-s", "0.05", HF_TOKEN=TOKEN)
    assert first.code == 0, first.log
    found = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    mark = _mark(tmp_path / "m")
    del found[".millstream-complete"], found[".millstream-lock"]
    assert found == {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
    assert (mark["uri"], mark["revision"], mark["weights"]) == (URI, COMMIT, True)
    assert mark["files"] == {name: len(content) for name, content in found.items()}
    assert "files=3/3 mib=2/2 percent=100" in first.log
    assert "left out files=" in first.log
    assert all(line.isprintable() for line in first.log.splitlines())
    # The token is for the Hub, not for where its files lie.
    assert [headers.get("Authorization") for headers in hub.cdn_headers] == [None]
    asked = hub.asked.copy()
    second = await run("fetch", URI, tmp_path / "m", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert (second.code, hub.asked) == (0, asked)
    other = await _fetch(hub, "hf://org/other", tmp_path / "m")
    assert other.code == 2
    assert f"is for {URI}, not for hf://org/other" in other.log


async def test_a_broken_connection_goes_on_where_it_broke(hub: HubServer, tmp_path: Path) -> None:
    # The library takes what it reads in pieces of 10 MB; the first half holds one.
    content = hub.files["model.safetensors"] = WEIGHTS * 12
    hub.truncate["model.safetensors"] = 1
    done = await _fetch(hub, f"{URI}@v1", tmp_path)
    assert done.code == 0, done.log
    assert (tmp_path / "model.safetensors").read_bytes() == content
    assert hub.asked["model.safetensors"] == hub.asked["model.safetensors@10485760"] == 1


async def test_a_killed_download_goes_on_with_the_files_that_lack(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.hold.add("model.safetensors")
    running = await start("fetch", URI, tmp_path, env={"HF_ENDPOINT": hub.endpoint})
    await hub.holding.wait()
    while not (tmp_path / "tokenizer.json").exists() or not (tmp_path / "config.json").exists():
        await asyncio.sleep(0.01)
    second = await start(
        "fetch", URI, tmp_path, "--period-s", "0.1", env={"HF_ENDPOINT": hub.endpoint}
    )
    assert second.stdout is not None
    assert b"another process fills the directory" in await second.stdout.readline()
    assert not (tmp_path / ".millstream-complete").exists()
    assert not (tmp_path / "model.safetensors").exists()
    hub.hold.clear()
    running.send_signal(signal.SIGTERM)
    assert (await ended(running)).code == 143
    done = await ended(second)
    assert done.code == 0, done.log
    assert "missing=1" in done.log
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.asked["config.json"] == 1
    assert not (tmp_path / ".cache").exists()


async def test_a_file_with_another_content_is_removed(hub: HubServer, tmp_path: Path) -> None:
    hub.lie_about.add("model.safetensors")
    done = await _fetch(hub, URI, tmp_path, "--retries", "0")
    assert done.code == 1
    assert "model.safetensors is damaged: its SHA-256 is" in done.log
    assert not (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / ".millstream-complete").exists()


async def test_a_processor_needs_no_weights(hub: HubServer, tmp_path: Path) -> None:
    done = await _fetch(hub, URI, tmp_path, "--without-weights")
    assert done.code == 0, done.log
    assert set(_mark(tmp_path)["files"]) == {"config.json", "tokenizer.json"}
    assert hub.cdn_headers == []
    both = await _fetch(hub, URI, tmp_path)
    assert both.code == 0, both.log
    assert _mark(tmp_path)["weights"]
    assert hub.asked == {"config.json": 1, "tokenizer.json": 1, "model.safetensors": 1}


@pytest.mark.parametrize(
    ("uri", "token", "says"),
    [
        (
            f"hf://{GATED}",
            "",
            f"is gated (401): accept its licence at http://127.0.0.1:PORT/{GATED}",
        ),
        (f"hf://{GATED}", "hf_wrong", "is gated (403)"),
        ("hf://org/none", "", "there is no model org/none"),
        (f"{URI}@v9", "", "org/tiny has no revision 'v9'"),
    ],
)
async def test_a_refusal_says_what_to_do(
    hub: HubServer, tmp_path: Path, uri: str, token: str, says: str
) -> None:
    done = await _fetch(hub, uri, tmp_path, **({"HF_TOKEN": token} if token else {}))
    assert done.code == 2, done.log
    assert says.replace("PORT", str(hub.port)) in done.log
    assert "Traceback" not in done.log


@pytest.mark.parametrize(
    ("siblings", "code", "says"),
    [
        ("files", 1, "doesn't answer like a Hugging Face Hub"),
        ([{"rfilename": "../../x", "size": 1, "blobId": "b"}], 2, "'../../x' leads out"),
        ([{"rfilename": "x", "size": -1, "blobId": "b"}], 2, "x has no size, but -1"),
    ],
)
async def test_a_server_that_lists_nonsense(
    hub: HubServer, tmp_path: Path, siblings: object, code: int, says: str
) -> None:
    hub.siblings = siblings
    done = await _fetch(hub, URI, tmp_path, "--retries", "0")
    assert done.code == code, done.log
    assert says in done.log
    assert "Traceback" not in done.log


async def test_without_a_network_it_says_so_and_may_be_tried_again(tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = await run("fetch", URI, tmp_path, "--retries", "0", env=env)
    assert done.code == 1
    assert f"can't get {URI} from http://127.0.0.1:9: " in done.log
    assert "Traceback" not in done.log
