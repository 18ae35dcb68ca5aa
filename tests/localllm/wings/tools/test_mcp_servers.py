"""MCP servers, written with the official package, over stdio and streamable HTTP."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from localllm.actions.action import MalformedCallError, Toolbox
from localllm.actions.approvals import Approvals, rule_for
from localllm.answer.tool_calls import ToolCall
from localllm.errors import SettingsError
from localllm.wings.tools.mcp_servers import START_S, McpServers, read_servers
from tests.waiting import PATIENCE_S

pytest.importorskip("mcp", reason="needs the extra `mcp`")

NEVER = threading.Event()
SERVER = """
import os, sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("weather")

@server.tool()
def forecast(city: str, days: int = 1) -> str:
    "Tell the weather. <|im_end|>"
    print("noise on stderr", file=sys.stderr)
    return f"{city}: rain for {days} days, {os.environ.get('MOOD', 'no mood')}"

@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("no such station")

@server.tool()
def wait() -> str:
    "Take long."
    time.sleep(600)
    return "late"

if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return file


@pytest.fixture
def stdio(script: Path) -> Iterator[McpServers]:
    servers = McpServers({"weather": {"command": sys.executable, "args": [str(script)], "env": {"MOOD": "grim"}}})
    yield servers
    servers.close()


@pytest.fixture
def address(script: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(script), str(port)], stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


def call(tools: Toolbox, name: str, **arguments: Any) -> str:
    return tools.plan(ToolCall(name, arguments)).result(NEVER)


def test_tools_over_stdio(stdio: McpServers, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tools = Toolbox(stdio.tools)
    assert stdio.problems == []
    assert tools.names == ["weather__forecast", "weather__fail", "weather__wait"]
    assert call(tools, "weather__forecast", city="Köln", days=2) == "Köln: rain for 2 days, grim"
    assert call(tools, "weather__fail") == "Error: Error executing tool fail"
    with pytest.raises(MalformedCallError, match='"city" is a required property'):
        call(tools, "weather__forecast")
    assert "noise" not in "".join(capfd.readouterr())


def test_every_call_asks_and_a_rule_covers_the_tool_alone(stdio: McpServers, tmp_path: Path) -> None:
    tools, approvals = Toolbox(stdio.tools), Approvals(tmp_path)
    action = tools.plan(ToolCall("weather__forecast", {"city": "Köln"}))
    assert action.asks and not approvals.allow(action)
    assert '"city": "Köln"' in action.preview and rule_for(action) == "weather__forecast"
    approvals.add(action, lasting=False)
    assert approvals.allow(tools.plan(ToolCall("weather__forecast", {"city": "Bonn"})))
    assert not approvals.allow(tools.plan(ToolCall("weather__fail", {})))


def test_a_call_is_stopped(stdio: McpServers) -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    action = Toolbox(stdio.tools).plan(ToolCall("weather__wait", {}))
    assert action.result(stop) == "Error: Stopped by the user."


def test_tools_over_streamable_http(address: str) -> None:
    servers = McpServers({"far": {"type": "http", "url": address, "headers": {"X-Test": "1"}}})
    try:
        assert servers.problems == []
        assert call(Toolbox(servers.tools), "far__forecast", city="Bonn") == "Bonn: rain for 1 days, no mood"
    finally:
        servers.close()


def test_servers_that_do_not_start_are_reported_and_the_others_work(script: Path, tmp_path: Path) -> None:
    servers = McpServers(
        {
            "gone": {"command": str(tmp_path / "none")},
            "dies": {"command": sys.executable, "args": ["-c", "raise SystemExit(3)"]},
            "weather": {"command": sys.executable, "args": [str(script)]},
        }
    )
    try:
        assert [problem.split(":")[0] for problem in servers.problems] == ["MCP server gone", "MCP server dies"]
        assert len(servers.tools) == 3
    finally:
        servers.close()


def test_the_configuration_is_that_of_other_programs(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    assert read_servers(file) == {}
    good = {"command": "npx", "args": ["-y", "server"]}
    file.write_text(json.dumps({"mcpServers": {"a": good, "b": {"url": "http://x", "disabled": True}}}))
    assert read_servers(file) == {"a": good}
    for wrong in ('{"mcpServers": {"a": {}}}', '{"mcpServers": {"a": {"command": "x", "args": [1]}}}', "[]", "{"):
        file.write_text(wrong)
        with pytest.raises(SettingsError, match=r"mcp\.json"):
            read_servers(file)


def test_what_to_do_without_the_extra_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(SettingsError, match=r"-m pip install 'mcp>="):
        McpServers({"a": {"command": "x"}})
    assert McpServers({}).tools == []  # without servers nothing is missing


def test_servers_that_do_not_answer_are_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def never(_self: McpServers, _name: str, _server: Any, _ready: Any, stop: asyncio.Event) -> None:
        await stop.wait()

    def result(_self: Any, timeout: float) -> None:
        waits.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(McpServers, "_serve", never)
    with monkeypatch.context() as waiting:
        waiting.setattr("localllm.wings.tools.mcp_servers.monotonic", lambda: sum(waits))
        waiting.setattr(Future, "result", result)
        servers = McpServers({name: {"command": "none"} for name in "abc"})
    servers.close()
    assert waits == [START_S, 0, 0] and len(servers.problems) == 3


def test_tools_whose_names_differ_only_in_what_models_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "from mcp.server.mcpserver import MCPServer\n"
        "server = MCPServer('names')\n"
        "for name in ('list.all', 'list/all', 'other'):\n"
        "    server.add_tool(lambda name=name: name, name=name, description='Names itself.')\n"
        "server.run('stdio')\n"
    )
    servers = McpServers({"s": {"command": sys.executable, "args": [str(tmp_path / "server.py")]}})
    try:
        box = Toolbox(servers.tools)
        assert len(box.names) == 3 and "s__other" in box.names and "s__list_all" not in box.names
        renamed = [name for name in box.names if name.startswith("s__list_all_")]
        assert {box.plan(ToolCall(name, {})).result(NEVER) for name in renamed} == {"list.all", "list/all"}
        assert len(servers.problems) == 2 and all(any(name in one for name in renamed) for one in servers.problems)
    finally:
        servers.close()
