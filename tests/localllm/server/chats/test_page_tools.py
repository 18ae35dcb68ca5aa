"""Tools in the page's chats: off by default, nothing without the user's decision, the terminal chat's journal."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import RequestError
from localllm.server.options import checked_options
from localllm.wings.tools.journal import Journal
from tests.fakes.scripted_model import call, write_scripted_model
from tests.localllm.server.chats.test_chats import BRIEF, Client, events
from tests.systems import own_places
from tests.waiting import eventually

NOTE = "buy milk\ncall the plumber\n"
EDIT = call("edit_file", path="notes/today.txt", old_text="call the plumber", new_text="call nobody at all")
SCRIPTS = {
    "editor": {"plain": "No tools are here.", "0": EDIT, "1": "This is what was to be done."},
    "runner": {
        "plain": "No tool of any kind.",
        "0": call("run_command", command="touch made_by_command"),
        "1": "The command has come to its end.",
    },
    "reader": {
        "plain": "There are no tools.",
        "0": call("read_file", path="notes/today.txt"),
        "1": call("read_file", path="../outside.txt"),
        "2": "Both files were tried.",
    },
    "hidden": {"plain": "Not one tool.", "0": call("read_file", path=".secret"), "1": "It was read, or not read."},
    "reordered": {
        "plain": "Without a tool.",
        "0": call("run_command", command="echo \u202e3 #"),
        "1": "An end is reached here.",
    },
    "without": {"plain": "Says only this."},
}
WITH_TOOLS = {"max_tokens": "400", "temperature": "0", "tools": "on"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("scripted")
    paths = [write_scripted_model(folder / f"{name}.gguf", scripts) for name, scripts in SCRIPTS.items()]
    return [flag for path in paths for flag in ("--model", str(path))]


@pytest.fixture
def folder(place: Path) -> Path:
    for path in place.glob("**/*"):
        if path.is_file():
            path.unlink()
    (place / "notes").mkdir(exist_ok=True)
    (place / "notes" / "today.txt").write_text(NOTE, encoding="utf-8")
    (place / ".secret").write_text("sesame", encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def tooled(start_server: Any, models: list[str], place: Path, data: Path) -> Iterator[Any]:
    with start_server(*models, "--page-tools", str(place), models=(), **own_places(data)) as running:
        yield running


@pytest.fixture
def client(tooled: Any) -> Client:
    return Client(tooled.url)


def asked(client: Client, chat: int) -> Any:
    """The question of a chat, once it waits for the user."""
    eventually(lambda: (client.chat(chat)["state"] or {}).get("phase") == "asking", "the user is not asked")
    return client.chat(chat)["state"]


def decide(client: Client, chat: int, decision: str, reason: str = "") -> Any:
    preview = asked(client, chat)["preview"]
    return client.post(f"/api/chats/{chat}/decision", decision=decision, preview=preview, reason=reason)


def results(client: Client, chat: int) -> list[str]:
    return [one["content"] for one in client.answered(chat)["messages"] if one["role"] == "tool"]


def test_a_change_is_shown_allowed_and_undone(client: Client, folder: Path, data: Path) -> None:
    note = folder / "notes" / "today.txt"
    chat = client.begin("Tidy up", model="editor", parameters=WITH_TOOLS)
    question = asked(client, chat)
    assert question["question"] == "Make this change?" and question["changes"] is True
    assert "-call the plumber" in question["preview"] and "+call nobody at all" in question["preview"]
    assert question["rule"] == "edit_file notes/*.txt" and question["folder"] == str(folder)
    assert note.read_text(encoding="utf-8") == NOTE  # nothing happens before the user decides
    decide(client, chat, "once")
    assert results(client, chat)[0].startswith("Changed:")
    assert client.chat(chat)["messages"][-1]["content"] == SCRIPTS["editor"]["1"]
    assert "call nobody" in note.read_text(encoding="utf-8")
    change = Journal(data / "localllm" / "changes.db", folder).newest()
    assert change is not None and change.owner == f"chat {chat}" and change.path == note
    undone = client.post(f"/api/chats/{chat}/undo")
    assert "+call the plumber" in undone["undone"] and note.read_text(encoding="utf-8") == NOTE
    answer = client.http.post(f"/api/chats/{chat}/undo", json={})
    assert answer.status_code == 400 and "nothing to undo" in answer.json()["error"]


def test_another_chats_change_is_undone_only_after_it_was_shown(client: Client, folder: Path) -> None:
    note = folder / "notes" / "today.txt"
    first = client.begin("Tidy", model="editor", parameters=WITH_TOOLS)
    decide(client, first, "once")
    client.answered(first)
    second = client.begin("Hello", model="without", parameters=BRIEF)
    client.answered(second)
    shown = client.post(f"/api/chats/{second}/undo")
    assert shown["undone"] == "" and "+call the plumber" in shown["ask"]
    assert client.post(f"/api/chats/{second}/undo", seen="something else")["undone"] == ""
    assert note.read_text(encoding="utf-8") != NOTE
    assert client.post(f"/api/chats/{second}/undo", seen=shown["ask"])["undone"] == shown["ask"]
    assert note.read_text(encoding="utf-8") == NOTE


def test_a_refusal_tells_the_model_why(client: Client, folder: Path) -> None:
    chat = client.begin("Tidy", model="editor", parameters=WITH_TOOLS)
    decide(client, chat, "refuse", reason="  The plumber must come. ")
    assert results(client, chat) == ["Error: The user refused this call. The user says: The plumber must come."]
    assert (folder / "notes" / "today.txt").read_text(encoding="utf-8") == NOTE
    other = client.begin("Tidy", model="editor", parameters=WITH_TOOLS)
    decide(client, other, "refuse")
    assert results(client, other) == ["Error: The user refused this call."]


def test_what_is_allowed_in_a_chat_holds_for_that_chat_only(client: Client, folder: Path) -> None:
    chat = client.begin("Go", model="runner", parameters=WITH_TOOLS)
    assert asked(client, chat)["rule"] == "run_command touch made_by_command *"
    decide(client, chat, "chat")
    assert "[exit status 0]" in results(client, chat)[0] and (folder / "made_by_command").exists()
    client.post(f"/api/chats/{chat}/answers", message=client.chat(chat)["messages"][1]["id"])
    assert "[exit status 0]" in results(client, chat)[0]  # not asked again
    other = client.begin("Go", model="runner", parameters=WITH_TOOLS)
    asked(client, other)
    client.post(f"/api/chats/{other}/stop")
    assert results(client, other) == ["Error: The user stopped before this call."]


def test_files_of_the_folder_are_read_without_asking_and_others_not_at_all(client: Client, folder: Path) -> None:
    (folder.parent / "outside.txt").write_text("outside", encoding="utf-8")
    chat = client.begin("Read", model="reader", parameters=WITH_TOOLS)
    first, second = results(client, chat)
    assert first == NOTE and "is outside the folder" in second
    hidden = client.begin("Read", model="hidden", parameters=WITH_TOOLS)
    question = asked(client, hidden)
    assert question["question"] == "Show this hidden file to the model?" and question["rule"] is None
    for decision in ("chat", "always"):
        body = {"decision": decision, "preview": question["preview"]}
        assert client.http.post(f"/api/chats/{hidden}/decision", json=body).status_code == 400
    decide(client, hidden, "once")
    assert results(client, hidden) == ["sesame"]


def test_only_what_was_shown_is_allowed_and_only_once(client: Client, folder: Path) -> None:
    chat = client.begin("Go", model="runner", parameters=WITH_TOOLS)
    preview = asked(client, chat)["preview"]
    path = f"/api/chats/{chat}/decision"
    assert client.http.post(path, json={"decision": "once", "preview": "touch something"}).status_code == 409
    assert client.http.post(path, json={"decision": "yes", "preview": preview}).status_code == 400
    foreign = {"Origin": "http://localhost:3000"}
    assert client.http.post(path, json={"decision": "once", "preview": preview}, headers=foreign).status_code == 403
    assert not (folder / "made_by_command").exists()
    decide(client, chat, "once")
    client.answered(chat)
    assert client.http.post(path, json={"decision": "once", "preview": preview}).status_code == 409
    assert client.http.post("/api/chats/1/decision", json={"decision": "once", "preview": ""}).status_code == 409


def test_characters_that_reorder_text_are_shown_as_such(client: Client, folder: Path) -> None:
    chat = client.begin("Go", model="reordered", parameters=WITH_TOOLS)
    preview = asked(client, chat)["preview"]
    assert preview == "echo \ufffd3 #"
    decide(client, chat, "refuse")
    client.answered(chat)


def test_every_reader_of_a_chat_sees_the_question(client: Client, folder: Path) -> None:
    chat = client.begin("Tidy", model="editor", parameters=WITH_TOOLS)
    for _ in range(2):  # a page that is loaded again gets it too
        with events(client, chat) as lines:
            states = (line["answer"]["state"] for line in lines if "answer" in line)
            assert "+call nobody at all" in next(one for one in states if one["phase"] == "asking")["preview"]
    decide(client, chat, "refuse")
    client.answered(chat)


def test_without_tools_switched_on_none_are_offered(client: Client, folder: Path) -> None:
    chat = client.begin("Tidy", model="editor", parameters={"max_tokens": "400", "temperature": "0"})
    assert client.texts(chat)[1] == SCRIPTS["editor"]["plain"]
    client.post(f"/api/chats/{chat}", parameters={"tools": "on"})
    client.post(f"/api/chats/{chat}/messages", content="And now?")
    assert asked(client, chat)["question"] == "Make this change?"
    client.post(f"/api/chats/{chat}/stop")
    client.answered(chat)
    assert client.get("/api/chats/options")["tools"] == str(folder)


def test_the_page_offers_no_tools_by_default(start_server: Any, models: list[str], folder: Path, data: Path) -> None:
    with start_server(*models, "--page-tools", str(folder), models=(), **own_places(data)) as server:
        client = Client(server.url)
        chat = client.begin("Tidy", model="editor", parameters=WITH_TOOLS)
        decide(client, chat, "refuse")
        client.answered(chat)
    with start_server(*models, models=(), **own_places(data)) as server:
        client = Client(server.url)
        assert client.get("/api/chats/options")["tools"] is None
        client.post(f"/api/chats/{chat}/messages", content="Again")  # tools are on in this stored chat
        assert client.texts(chat)[-1] == SCRIPTS["editor"]["plain"]
        for path, body in (
            ("/api/chats", {"model": "editor", "content": "x", "parameters": {"tools": "on"}}),
            (f"/api/chats/{chat}", {"parameters": {"tools": "on"}}),
            (f"/api/chats/{chat}/undo", {}),
        ):
            answer = client.http.post(path, json=body)
            assert answer.status_code == 403 and "--page-tools FOLDER" in answer.json()["error"]


def test_a_server_that_stops_refuses_what_waits(start_server: Any, models: list[str], folder: Path, data: Path) -> None:
    variables = own_places(data)
    with start_server(*models, "--page-tools", str(folder), models=(), **variables) as server:
        chat = Client(server.url).begin("Go", model="runner", parameters=WITH_TOOLS)
        asked(Client(server.url), chat)
    with start_server(*models, models=(), **variables) as server:
        assert results(Client(server.url), chat) == ["Error: The user stopped before this call."]
    assert not (folder / "made_by_command").exists()


SERVER = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("clock")
@server.tool()
def time_in(town: str) -> str:
    return "noon in " + town
server.run()
"""


def test_tools_of_mcp_servers_are_asked_for_too(start_server: Any, tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("mcp")
    config = tmp_path / "localllm"
    config.mkdir(parents=True)
    (tmp_path / "clock.py").write_text(SERVER, encoding="utf-8")
    command = {"command": sys.executable, "args": [str(tmp_path / "clock.py")]}
    broken = {"command": str(tmp_path / "missing")}
    servers = {"mcpServers": {"clock": command, "broken": broken}}
    (config / "mcp.json").write_text(json.dumps(servers), encoding="utf-8")
    scripts = {
        "plain": "Nothing to do.",
        "0": call("clock__time_in", town="Kyoto"),
        "1": "That was the time.",
    }
    model = write_scripted_model(tmp_path / "clocked.gguf", scripts)
    given = ("--model", str(model), "--page-tools", str(folder))
    with start_server(*given, models=(), **own_places(tmp_path)) as server:
        client = Client(server.url)
        chat = client.begin("What time is it?", model="clocked", parameters=WITH_TOOLS)
        question = asked(client, chat)
        assert "time_in of the MCP server clock" in question["preview"] and question["rule"] == "clock__time_in"
        assert "MCP server broken" in client.chat(chat)["note"]
        decide(client, chat, "once")
        assert results(client, chat) == ["noon in Kyoto"]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::"])
def test_on_the_network_tools_need_a_key(host: str, tmp_path: Path) -> None:
    given = {"host": host, "page_tools": str(tmp_path)}
    with pytest.raises(RequestError, match="tools on the page need an API key"):
        checked_options(given, True, {})
    options = checked_options(given, False, {"LOCALLLM_API_KEY": "sesame"})
    assert options.settings.page_tools == str(tmp_path)


def test_the_folder_of_tools_must_exist(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no folder"):
        checked_options({"page_tools": str(tmp_path / "none")}, False, {})
