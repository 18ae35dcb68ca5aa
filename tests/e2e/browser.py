"""A headless Chromium, driven through its DevTools protocol."""

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """A page of the browser. wire: the protocol's web socket."""

    def __init__(self, wire: Any) -> None:
        self._wire = wire
        self._count = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._count += 1
        await self._wire.send_json({"id": self._count, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._wire.receive(timeout=PATIENCE_S)).data)
            if message.get("id") == self._count:
                assert "error" not in message, message
                return dict(message["result"])

    async def evaluate(self, script: str) -> Any:
        """Evaluate a script."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until a script evaluates to true."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.evaluate(script):
                await asyncio.sleep(0.2)

    async def open(self, address: str) -> None:
        """Open an address and wait until it has loaded."""
        await self.call("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")

    async def type(self, text: str) -> None:
        """Type a text; a newline is the Enter key."""
        for letter in text:
            if letter == "\n":
                key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            else:
                key = {"key": letter, "text": letter}
            await self.call("Input.dispatchKeyEvent", type="keyDown", **key)
            await self.call("Input.dispatchKeyEvent", type="keyUp", **{**key, "text": ""})

    async def picture(self, path: Path) -> None:
        """Save a screenshot as PNG."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def browser_page(profile: Path) -> AsyncIterator[Page]:
    """A page in its own browser, which ends with it."""
    import aiohttp

    assert PROGRAM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1200,800"]
    with subprocess.Popen(
        [PROGRAM, *flags, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as browser:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (profile / "DevToolsActivePort").is_file():
                    await asyncio.sleep(0.1)
            port = (profile / "DevToolsActivePort").read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as response:
                    pages = [one for one in await response.json() if one["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as wire:
                    yield Page(wire)
        finally:
            browser.kill()
