"""localllm chat --web: who may open it, and the chat itself in a browser."""

import asyncio
import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e.browser import PROGRAM, browser_page
from tests.waiting import PATIENCE_S, eventually

pytest.importorskip("textual_serve")
pytestmark = pytest.mark.slow


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address that the command prints."""
    environment = os.environ | {
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path),
        "BROWSER": "true",
    }
    command = [sys.executable, "-m", "localllm", "chat", "builtin", "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()
            assert server.wait(PATIENCE_S) == 0


def asked(address: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of the response to a request with these headers."""
    connection = HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE_S)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    text = response.read().decode(errors="replace")
    connection.close()
    return response.status, dict(response.getheaders()), text


def test_only_whoever_has_the_address_comes_in_and_only_once(address: str) -> None:
    own = urlsplit(address)
    assert own.hostname == "127.0.0.1" and len(own.query) > 40
    assert asked(address, "/")[0] == 403
    assert asked(address, "/ws")[0] == 403
    assert asked(address, "/static/js/textual.js")[0] == 403
    assert asked(address, "/?token=wrong")[0] == 403
    visit = f"/?{own.query}"
    assert asked(address, visit, Host=f"evil.example:{own.port}")[0] == 403
    assert asked(address, visit, Host=f"localhost:{own.port}")[0] == 403
    assert asked(address, visit, Origin="http://evil.example")[0] == 403
    status, headers, _ = asked(address, visit)
    assert (status, headers["Location"]) == (302, "/")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert asked(address, visit)[0] == 403  # it has been used
    jar = cookie.partition(";")[0]
    status, headers, text = asked(address, "/", Cookie=jar)
    assert status == 200 and "textual.js" in text
    assert "<title>localllm</title>" in text and "googleapis" not in text
    font = re.findall(r'url\("(/static/fonts/[^"]+)"\)', text)[0]
    assert asked(address, font, Cookie=jar)[0] == 200
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    assert asked(address, "/", Cookie=jar, Origin="http://evil.example")[0] == 403
    assert asked(address, "/ws", Cookie=jar, Origin="null")[0] == 403
    assert asked(address, "/", Cookie="localllm_chat=wrong")[0] == 403


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")
def test_the_chat_answers_in_a_browser_and_ends_with_its_page(address: str, tmp_path: Path) -> None:
    async def flow() -> None:
        async with browser_page(tmp_path / "profile") as page:
            await page.open(address)
            assert await page.evaluate("location.search") == ""  # the token is no longer valid
            await page.until("document.body.classList.contains('-first-byte')")
            await page.evaluate("document.querySelector('.xterm-helper-textarea').focus()")
            await page.type("Tell me of a fox\n")
            await asyncio.to_thread(eventually, lambda: answered(tmp_path / "data" / "localllm" / "sessions.db"))
            assert chats(address)

    asyncio.run(flow())
    eventually(lambda: not chats(address))


def answered(path: Path) -> bool:
    """Whether the store has a complete answer to the text typed in the browser."""
    if not path.is_file():
        return False
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT role, content, finish_reason FROM message ORDER BY id").fetchall()
    return len(rows) == 2 and rows[0][1] == "Tell me of a fox" and bool(rows[1][1]) and rows[1][2] is not None


def chats(address: str) -> list[psutil.Process]:
    """The chat processes started by the server at an address."""
    port = urlsplit(address).port
    (server,) = {
        each.pid for each in psutil.net_connections("tcp4") if each.status == "LISTEN" and each.laddr.port == port
    }
    return psutil.Process(server).children()
