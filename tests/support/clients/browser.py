"""Headless Chromium, driven by its DevTools protocol over a WebSocket: no driver is needed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from millstream_testing.waiting import until

CHROMIUM = "chromium-headless-shell"
"""Debian's, which `make setup-clients` installs."""
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowRight": (39, "")}
_LATE_S = 20.0
_CLOSES = aiohttp.ClientWSTimeout(ws_close=1.0)
_ROLES = frozenset(
    ("button", "combobox", "log", "progressbar", "spinbutton", "status", "tab", "textbox")
)


class Page:
    """One tab; it collects what must not be."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Use `browsing` to make one."""
        self.errors: list[str] = []
        """Of the console: messages, exceptions, what the browser itself says."""
        self.hosts: set[str] = set()
        """Of all that was asked for."""
        self._socket = socket
        self._session = ""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.ensure_future(self._read())

    async def begin(self) -> None:
        """Open the tab."""
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM", "Accessibility"):
            await self.send(f"{domain}.enable")

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait({self._reading})

    async def send(self, method: str, **params: Any) -> Any:
        """Run a command; return its result."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        return await asyncio.wait_for(answer, _LATE_S)

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                answer = self._waiting.pop(said["id"])
                if "error" in said:
                    answer.set_exception(RuntimeError(said["error"]["message"]))
                else:
                    answer.set_result(said["result"])
            else:
                self._note(said["method"], said["params"])

    def _note(self, event: str, said: Any) -> None:
        if event == "Network.requestWillBeSent":
            self.hosts.add(urlsplit(said["request"]["url"]).netloc)
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(said["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and said["type"] in {"error", "warning"}:
            self.errors.append(str(said["args"]))
        elif event == "Log.entryAdded" and said["entry"]["level"] in {"error", "warning"}:
            self.errors.append(said["entry"]["text"])

    # ---- as a user

    async def open(self, address: str, width: int) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.send("Page.navigate", url=f"http://{address}/")
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """Return what a script's last expression is, awaited."""
        result = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(_LATE_S):
            while not await self.run(script):
                await asyncio.sleep(0.02)

    async def type(self, text: str) -> None:
        """Type where the focus is."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        code, text = _KEYS[key]
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    async def choose(self, selector: str, file: Path) -> None:
        """Choose a file for an input."""
        root = (await self.send("DOM.getDocument"))["root"]["nodeId"]
        node = await self.send("DOM.querySelector", nodeId=root, selector=selector)
        await self.send("DOM.setFileInputFiles", nodeId=node["nodeId"], files=[str(file)])

    async def controls(self) -> list[tuple[str, str]]:
        """Return role and name of what a screen reader finds to be used or followed."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in _ROLES
        ]


@contextlib.asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Page]:
    """Run a browser; ``folder`` gets its profile."""
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        "--no-sandbox",  # containers' root has none
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(await _address(folder), max_msg_size=0, timeout=_CLOSES) as socket,
        ):
            page = Page(socket)
            await page.begin()
            try:
                yield page
            finally:
                await page.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its pages' processes outlive it otherwise
        await process.wait()


async def _address(folder: Path) -> str:
    """Return where the browser listens, which it writes into its profile."""
    file = folder / "DevToolsActivePort"
    await until(lambda: file.is_file() and file.read_text("utf-8").count("\n") == 1, _LATE_S)
    port, path = file.read_text("utf-8").split("\n")
    return f"ws://127.0.0.1:{port}{path}"
