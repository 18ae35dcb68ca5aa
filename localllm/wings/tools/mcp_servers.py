"""Tools of MCP servers (https://modelcontextprotocol.io), through the official client, the extra `mcp`.

Servers are configured in mcp.json in localllm's configuration folder, in the format that other programs use:
{"mcpServers": {"NAME": {"command": ..., "args": [...], "env": {...}, "cwd": ...}, "OTHER": {"url": ..., "headers":
{...}}}}. No other file is read: an untrusted project folder must not be able to start programs.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from gguf_io.system import pip_line
from localllm.actions.action import Action, Tool, ToolError
from localllm.errors import SettingsError, reason
from localllm.files import read_text
from localllm.settings import config_path

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

START_S = 30.0  # for all servers to start and list their tools
CALL_S = 120.0
CLOSE_S = 5.0  # for a server to end
POLL_S = 0.05
MAX_TOOLS = 128  # per server
MAX_DESCRIPTION = 1000  # characters


def servers_path() -> Path:
    """The servers' configuration file, e.g. ~/.config/localllm/mcp.json. It may not exist."""
    return config_path().parent / "mcp.json"


def read_servers(file: Path) -> dict[str, Mapping[str, Any]]:
    """The servers in a file by name, without disabled ones; {} if there is no file. Raises SettingsError if invalid."""
    text = read_text(file, SettingsError, missing="{}")
    try:
        servers = json.loads(text).get("mcpServers", {})
        checked = {str(name): _checked(server) for name, server in servers.items() if not server.get("disabled")}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SettingsError(f"{file}: {error}. It needs an object mcpServers of servers by name.") from error
    return checked


def _checked(server: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(server.get("command"), str) == isinstance(server.get("url"), str):
        raise ValueError('a server needs either a "command" or a "url"')
    for key in ("env", "headers"):
        if not all(isinstance(value, str) for value in server.get(key, {}).values()):
            raise ValueError(f'the values of "{key}" are not text')
    if not all(isinstance(argument, str) for argument in server.get("args", [])):
        raise ValueError('the "args" are not text')
    return server


@dataclass(frozen=True, slots=True)
class _Found:
    """A tool of a running server."""

    server: str
    client: "Client"
    tool: Any

    @property
    def name(self) -> str:
        """A name that models can write."""
        return re.sub(r"[^\w-]", "_", f"{self.server}__{self.tool.name}", flags=re.ASCII)[:64]


class McpServers:
    """Running servers and their tools. `close` ends them.

    problems: messages about servers that did not start, and tools with new names.
    """

    def __init__(self, servers: Mapping[str, Mapping[str, Any]]) -> None:
        """Start all servers at once and wait for them. Raises SettingsError if the extra is not installed."""
        self.problems: list[str] = []
        self.tools: list[Tool] = []
        self._stops: list[asyncio.Event] = []
        self._running: list[Future[None]] = []
        if not servers:
            return
        try:
            import mcp  # noqa: F401 - fail early if it is missing
        except ImportError as error:
            raise SettingsError(
                "The servers in mcp.json need the package mcp, which is not installed. Install it for this Python, or "
                f"remove mcp.json:\n  {pip_line('install', 'mcp>=2.3')}"
            ) from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="MCP servers", daemon=True)
        self._thread.start()
        due = monotonic() + START_S
        found: list[_Found] = []
        for name, ready in [(name, self._start(name, server)) for name, server in servers.items()]:
            try:
                found += ready.result(max(due - monotonic(), 0.0))
            except FutureTimeoutError:
                self.problems.append(f"MCP server {name}: did not start within {START_S:.0f} s.")
            except Exception as error:  # any failure of a third-party server is shown as a problem
                self.problems.append(f"MCP server {name}: {_why(error)}")

        self._name(found)

    def _name(self, found: "Sequence[_Found]") -> None:
        """Make the tools. Those whose names differ only in what models cannot write get names of their own.

        Such names do not depend on the other tools: an approval of one must never hold for another.
        """
        counts = Counter(one.name for one in found)
        for one in found:
            name = one.name
            if counts[name] > 1:
                digest = hashlib.sha256(f"{one.server}\0{one.tool.name}".encode()).hexdigest()[:8]
                name = f"{name[:55]}_{digest}"
                self.problems.append(
                    f"MCP server {one.server}: its tool {one.tool.name} is called {name}, because another tool would "
                    f"be called {one.name} too."
                )
            self.tools.append(self._tool(name, one))

    def close(self) -> None:
        """End the servers. Idempotent."""
        if not self._running:
            return
        for stop in self._stops:
            self._loop.call_soon_threadsafe(stop.set)
        for running in self._running:
            with contextlib.suppress(Exception):  # it has failed, or does not end; closing continues
                running.result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_S)
        self._running.clear()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _start(self, name: str, server: Mapping[str, Any]) -> "Future[list[_Found]]":
        ready: Future[list[_Found]] = Future()
        stop = asyncio.Event()
        self._stops.append(stop)
        self._running.append(asyncio.run_coroutine_threadsafe(self._serve(name, server, ready, stop), self._loop))
        return ready

    async def _serve(
        self, name: str, server: Mapping[str, Any], ready: "Future[list[_Found]]", stop: asyncio.Event
    ) -> None:
        """Keep the connection open until `stop`; one task opens and closes it, as anyio requires."""
        try:
            async with _connected(server) as client:
                found: list[_Found] = []
                cursor = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    found += [_Found(name, client, tool) for tool in page.tools]
                    cursor = page.next_cursor
                    if not cursor or len(found) >= MAX_TOOLS:
                        break
                ready.set_result(found[:MAX_TOOLS])
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                return
            raise

    def _tool(self, name: str, found: "_Found") -> Tool:
        tool = found.tool

        def plan(arguments: dict[str, Any]) -> Action:
            shown = json.dumps(arguments, ensure_ascii=False, indent=2)

            def run(stop: threading.Event) -> str:
                return self._call(found.client.call_tool(tool.name, arguments, CALL_S), stop)

            return Action(name, "", f"{tool.name} of the MCP server {found.server}\n{shown}", run, pattern="")

        return Tool(name, (tool.description or "")[:MAX_DESCRIPTION], tool.input_schema, plan)

    def _call(self, call: "Coroutine[Any, Any, CallToolResult]", stop: threading.Event) -> str:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        while True:
            try:
                result = future.result(POLL_S)
                break
            except FutureTimeoutError:
                if stop.is_set():
                    future.cancel()
                    raise ToolError("Stopped by the user.") from None
            except Exception as error:
                raise ToolError(_why(error)) from error
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise ToolError(text or "the tool failed without a reason")
        return text


@contextlib.asynccontextmanager
async def _connected(server: Mapping[str, Any]) -> "AsyncIterator[Client]":
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with contextlib.AsyncExitStack() as stack:
        if "url" in server:
            http = await stack.enter_async_context(create_mcp_http_client(headers=dict(server.get("headers", {}))))
            transport = streamable_http_client(server["url"], http_client=http)
        else:
            # A server's stderr output would corrupt the screen.
            silent = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
            names = ("command", "args", "env", "cwd")
            given = {key: server[key] for key in names if key in server}
            transport = stdio_client(StdioServerParameters(**given), silent)
        yield await stack.enter_async_context(Client(transport))


def _why(error: BaseException) -> str:
    """The message of an error; of the first one in an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return reason(error) if isinstance(error, Exception) else repr(error)
