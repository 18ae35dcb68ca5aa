"""localllm chat --web: the terminal chat in a browser on this machine, drawn by textual-serve (the extra `web`).

The page is served on 127.0.0.1 only. Other users of the machine can reach that address, and so can web pages through
the browser. Therefore a single-use token is exchanged for a cookie, every request needs the cookie, and the Host and
Origin headers are checked. A content security policy stops the page from loading anything from other hosts.
"""

import asyncio
import hmac
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from textual_serve.server import Server

from localllm.front.terminal import answer, note

COOKIE = "localllm_chat"
VISIT = "--visit"  # the option with which each process of one server opens the chat of the process before it
EARLIER_S = 10.0  # how long a reloaded page waits for its previous chat to end
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self' {socket}; font-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
# textual-serve's page takes its font from Google, which the policy forbids; the font comes with textual-serve as well.
_GOOGLE_FONT = re.compile(r"<link[^>]*fonts\.googleapis\.com[^>]*>")
_HEAD = """<title>localllm</title>
    <meta name="viewport" content="width=device-width, initial-scale=1" />
    <link rel="icon" href="data:," />
    <style>
      @font-face { font-family: "Roboto Mono"; src: url("/static/fonts/RobotoMono-VariableFont_wght.ttf"); }
    </style>"""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve_chat(arguments: Sequence[str]) -> None:
    """Serve the chat with these arguments until Ctrl-C."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(_serve(listening, arguments))


async def _serve(listening: socket.socket, arguments: Sequence[str]) -> None:
    port = listening.getsockname()[1]
    words = [sys.executable, "-m", "localllm", "chat", *arguments, VISIT, secrets.token_hex(8)]
    # exec, so that closing the page ends the chat and not only its shell.
    command = subprocess.list2cmdline(words) if sys.platform == "win32" else "exec " + shlex.join(words)
    server = ChatServer(command, host="127.0.0.1", port=port, title="localllm")
    gate = BrowserGate(port)
    site = await server._make_app()
    site.on_startup.clear()  # it prints textual-serve's own banner
    site.middlewares.append(gate.check)
    runner = web.AppRunner(site, access_log=None)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):  # add_signal_handler of the loop is not for Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        address = f"http://127.0.0.1:{port}/?token={gate.token}"
        answer(f"{address}\n")
        note("The address opens the chat once, in one browser. Ctrl-C ends it.")
        webbrowser.open(address)
        await stop.wait()
    finally:
        await runner.cleanup()


class ChatServer(Server):
    """Serves the chat in a page with a title, which loads nothing from elsewhere."""

    async def handle_index(self, request: web.Request) -> web.Response:
        """textual-serve's page, changed where its template cannot be."""
        page = await super().handle_index(request)
        assert isinstance(page, web.Response) and page.text is not None
        page.text = _GOOGLE_FONT.sub(_HEAD, page.text, count=1).replace("<html>", '<html lang="en">', 1)
        return page


class BrowserGate:
    """Checks Host, Origin and cookie of each request, and allows one chat at a time. token: valid for one visit."""

    def __init__(self, port: int) -> None:
        self.token = secrets.token_urlsafe(32)
        self._cookie = secrets.token_urlsafe(32)
        self._host = f"127.0.0.1:{port}"
        self._policy = _POLICY.format(socket=f"ws://{self._host}")
        self._chat = asyncio.Lock()

    @web.middleware
    async def check(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Reject the request, exchange its token for a cookie, or pass it on."""
        if request.headers.get("Host") != self._host:
            raise web.HTTPForbidden(text="This Host is not allowed.")
        if request.headers.get("Origin", f"http://{self._host}") != f"http://{self._host}":
            raise web.HTTPForbidden(text="This Origin is not allowed.")
        if (given := request.query.get("token")) is not None:
            return self._first_visit(given)
        if not hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), self._cookie.encode()):
            raise web.HTTPForbidden(text="Open the address that `localllm chat --web` has printed; it works once.")
        if request.path.endswith("/ws"):
            return await self._one_chat(request, handler)
        response = await handler(request)
        response.headers["Content-Security-Policy"] = self._policy
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    def _first_visit(self, given: str) -> web.StreamResponse:
        if not self.token or not hmac.compare_digest(given.encode(), self.token.encode()):
            raise web.HTTPForbidden(text="This address has been used. Start `localllm chat --web` again.")
        self.token = ""
        response = web.HTTPFound("/")
        response.set_cookie(COOKIE, self._cookie, httponly=True, samesite="Strict", path="/")
        return response

    async def _one_chat(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Allow one chat at a time, since each loads a model. A reloaded page waits for the previous chat to end."""
        try:
            async with asyncio.timeout(EARLIER_S):
                await self._chat.acquire()
        except TimeoutError as error:
            raise web.HTTPConflict(text="The chat is open in another tab.") from error
        try:
            return await handler(request)
        finally:
            self._chat.release()
