"""The routes for chats: answers that go on without their client, the terminal chat's file, and who may ask."""

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.chats import SessionStore
from localllm.library.suggestions import ranked
from tests.localllm.server.conftest import SLOWLY
from tests.picture_files import png
from tests.systems import STOP, own_places
from tests.waiting import PATIENCE_S, eventually

MODEL, OTHER = "stories260K-Q8_0", "tinystories656K-Q8_0"
BRIEF = {"max_tokens": "8", "temperature": "0"}


OPENED = contextlib.ExitStack()


@pytest.fixture(scope="module", autouse=True)
def close_connections() -> Iterator[None]:
    with OPENED:
        yield


class Client:
    """The routes for chats of one server."""

    def __init__(self, url: str, **headers: str) -> None:
        self.http = OPENED.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S, headers=headers))

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def begin(self, content: str = "Once upon a time", **body: Any) -> int:
        return int(self.post("/api/chats", **{"model": MODEL, "content": content, "parameters": BRIEF, **body})["chat"])

    def chat(self, chat: int) -> Any:
        return self.get(f"/api/chats/{chat}")

    def answered(self, chat: int) -> Any:
        """The chat, once no answer is being written to it."""
        eventually(lambda: self.chat(chat)["state"] is None, "the answer does not end")
        return self.chat(chat)

    def texts(self, chat: int) -> list[str]:
        return [message["content"] for message in self.answered(chat)["messages"]]


@pytest.fixture(scope="module")
def slow_server(start_server: Any) -> Iterator[Any]:
    with start_server(begins=SLOWLY) as running:
        yield running


@pytest.fixture
def slow(slow_server: Any) -> Client:
    return Client(slow_server.url)


@pytest.fixture
def client(server: Any) -> Client:
    return Client(server.url)


@contextlib.contextmanager
def events(client: Client, chat: int) -> Iterator[Iterator[Any]]:
    with client.http.stream("GET", f"/api/chats/events?chat={chat}") as response:
        assert response.status_code == 200
        yield (json.loads(line) for line in response.iter_lines() if line)


def test_a_chat_is_stored_where_the_terminal_chat_reads_it(start_server: Any, tmp_path: Path) -> None:
    with start_server(**own_places(tmp_path)) as server:
        client = Client(server.url)
        chat = client.begin("Hello there", parameters={**BRIEF, "top_k": "5"})
        _, answer = client.texts(chat)
        path = tmp_path / "localllm" / "sessions.db"
        store = SessionStore(path)
        with contextlib.closing(store):
            assert [one.title for one in store.sessions()] == ["Hello there"]
            said, told = store.path(chat)
            assert (said.content, told.content, told.model) == ("Hello there", answer, MODEL)
            assert told.error is None and told.stats["generated"] == 8 and told.finish_reason == "length"
            assert store.summary(chat).parameters["top_k"] == 5
            store.rename(chat, "Named in the terminal")
        assert client.chat(chat)["title"] == "Named in the terminal"


def test_pages_hear_of_changes_by_other_programs(start_server: Any, tmp_path: Path) -> None:
    with start_server(**own_places(tmp_path)) as server:
        client = Client(server.url)
        chat = client.begin()
        client.answered(chat)
        with events(client, chat) as lines:
            first = next(lines)
            store = SessionStore(tmp_path / "localllm" / "sessions.db")
            with contextlib.closing(store):
                store.rename(chat, "Another title")
            later = next(lines)
            assert later["chat"] > first["chat"] and later["list"] > first["list"]


def test_the_answer_continues_when_the_client_leaves(slow: Client) -> None:
    chat = slow.begin(parameters={"max_tokens": "12", "temperature": "0"})
    with events(slow, chat) as lines:
        next(line for line in lines if line.get("answer", {}).get("state", {}).get("phase") == "writing")
    assert slow.chat(chat)["state"] is not None  # the stream was closed in the middle
    with events(slow, chat) as lines:
        seen = next(line["answer"] for line in lines if "answer" in line)
        assert seen["from"] == 0 and seen["message"] == slow.chat(chat)["messages"][1]["id"]
    assert slow.answered(chat)["messages"][1]["stats"]["generated"] == 12


def test_two_readers_get_the_same_answer(slow: Client) -> None:
    chat = slow.begin(parameters={"max_tokens": "12", "temperature": "0"})
    with events(slow, chat) as first, events(slow, chat) as second:
        for lines in (first, second):
            blocks: list[str] = []
            for line in lines:
                if "answer" in line:
                    blocks[line["answer"]["from"] :] = line["answer"]["blocks"]
                elif blocks and slow.chat(chat)["state"] is None:
                    break
            whole = slow.chat(chat)["messages"][1]["html"]
            assert len(blocks) == len(whole) and blocks[:-1] == whole[:-1]


def test_stop_keeps_the_text_and_continue_resumes_it(slow: Client) -> None:
    chat = slow.begin(parameters={"max_tokens": "40", "temperature": "0"})
    eventually(lambda: slow.chat(chat)["messages"][-1]["content"], "there is no text")
    assert slow.post(f"/api/chats/{chat}/stop") == {"stopped": True}
    stopped = slow.answered(chat)["messages"][1]
    assert stopped["finish_reason"] == "cancelled" and stopped["content"]
    slow.post(f"/api/chats/{chat}", parameters={"max_tokens": "4"})
    slow.post(f"/api/chats/{chat}/answers", continues=True)
    longer = slow.answered(chat)["messages"]
    assert len(longer) == 2 and longer[1]["content"].startswith(stopped["content"])
    assert len(longer[1]["content"]) > len(stopped["content"])
    assert slow.post(f"/api/chats/{chat}/stop") == {"stopped": False}


def test_a_second_answer_waits_for_the_first(slow: Client) -> None:
    chat = slow.begin(parameters={"max_tokens": "60"})
    for path, body in [("messages", {"content": "And then?"}), ("answers", {}), ("turn", {"message": 1, "step": 1})]:
        refused = slow.http.post(f"/api/chats/{chat}/{path}", json=body)
        assert refused.status_code == 409 and "stop it first" in refused.json()["error"]
    slow.post(f"/api/chats/{chat}/stop")
    assert len(slow.answered(chat)["messages"]) == 2


def test_a_killed_server_keeps_what_was_written(start_server: Any, tmp_path: Path) -> None:
    data = own_places(tmp_path)
    with start_server(begins=SLOWLY, **data) as server:
        client = Client(server.url)
        chat = client.begin(parameters={"max_tokens": "100"})
        eventually(lambda: len(client.chat(chat)["messages"][-1]["content"]) > 10, "there is no text")
        eventually(lambda: stored(tmp_path, chat), "nothing is saved while it is written")
        server.process.kill()
    with start_server(**data) as server:
        message = Client(server.url).chat(chat)["messages"][-1]
        assert message["content"] and message["finish_reason"] == "cancelled"


def stored(folder: Path, chat: int) -> str:
    store = SessionStore(folder / "localllm" / "sessions.db")
    with contextlib.closing(store):
        return store.path(chat)[-1].content


def test_a_server_that_stops_saves_and_does_not_wait_for_pages(start_server: Any, tmp_path: Path) -> None:
    with start_server(begins=SLOWLY, LOCALLLM_GRACE_S="600", **own_places(tmp_path)) as server:
        client = Client(server.url)
        chat = client.begin(parameters={"max_tokens": "500"})
        eventually(lambda: client.chat(chat)["messages"][-1]["content"], "there is no text")
        with events(client, chat) as lines:
            next(lines)
            server.process.send_signal(STOP)
            list(lines)
        server.process.wait()
    assert stored(tmp_path, chat)


def test_edits_and_regenerated_answers_are_variants(client: Client) -> None:
    chat = client.begin("Tom had a dog")
    first = client.answered(chat)["messages"]
    client.post(f"/api/chats/{chat}/answers")
    again = client.answered(chat)["messages"]
    assert (again[1]["variant"], again[1]["variants"]) == (2, 2) and again[1]["id"] != first[1]["id"]
    client.post(f"/api/chats/{chat}/messages", content="Lily had a cat", edits=first[0]["id"])
    edited = client.answered(chat)["messages"]
    assert edited[0]["content"] == "Lily had a cat" and (edited[0]["variant"], edited[0]["variants"]) == (2, 2)
    assert client.post(f"/api/chats/{chat}/turn", message=edited[0]["id"], step=-1) == {"turned": True}
    back = client.chat(chat)["messages"]
    assert [message["id"] for message in back] == [message["id"] for message in again]
    assert client.post(f"/api/chats/{chat}/turn", message=back[0]["id"], step=-1) == {"turned": False}


def test_a_branch_is_a_copy_up_to_a_message(client: Client) -> None:
    chat = client.begin("Tom had a dog")
    client.answered(chat)
    client.post(f"/api/chats/{chat}/messages", content="And then?")
    messages = client.answered(chat)["messages"]
    copy = client.post(f"/api/chats/{chat}/fork", message=messages[1]["id"])["chat"]
    assert copy != chat and client.texts(copy) == [message["content"] for message in messages[:2]]
    assert client.chat(copy)["title"].endswith("(fork)")


def test_search_tags_rename_delete_and_restore(client: Client) -> None:
    chat = client.begin("A giraffe named Zebulon")
    client.answered(chat)
    found = client.get("/api/chats?search=zebulon")["chats"]
    assert [row["id"] for row in found] == [chat] and "Zebulon" in found[0]["found"]
    client.post(f"/api/chats/{chat}", title="Animals", tags=["work", "zoo"])
    assert [row["title"] for row in client.get("/api/chats?search=%23zoo")["chats"]] == ["Animals"]
    client.post(f"/api/chats/{chat}", tags=["work"])
    assert client.get("/api/chats?search=%23zoo")["chats"] == []
    client.post(f"/api/chats/{chat}", deleted=True)
    assert client.get("/api/chats?search=zebulon")["chats"] == []
    client.post(f"/api/chats/{chat}", deleted=False)
    assert [row["id"] for row in client.get("/api/chats?search=zebulon")["chats"]] == [chat]


def test_parameters_and_model_are_the_chats_own(client: Client) -> None:
    chat = client.begin(parameters={**BRIEF, "seed": "3"})
    first = client.texts(chat)[1]
    assert client.chat(chat)["parameters"] == {**BRIEF, "temperature": "0.0", "seed": "3"}
    client.post(f"/api/chats/{chat}", parameters={"seed": "default"}, model=OTHER)
    changed = client.chat(chat)
    assert changed["parameters"] == {**BRIEF, "temperature": "0.0"} and changed["model"] == OTHER
    client.post(f"/api/chats/{chat}/answers")
    other = client.answered(chat)["messages"][1]
    assert other["model"] == OTHER and other["content"] != first


@pytest.mark.parametrize(
    ("parameters", "status", "words"),
    [
        ({"temperature": "1000"}, 400, "temperature must be between 0 and 100"),
        ({"temprature": "1"}, 400, "Did you mean temperature?"),
        ({"tools": "on"}, 403, "tools are not allowed here"),
        ({"folder": "/etc"}, 400, "folder cannot be changed"),
    ],
)
def test_wrong_parameters_are_refused_and_nothing_is_stored(
    client: Client, parameters: Any, status: int, words: str
) -> None:
    before = client.get("/api/chats")["chats"]
    refused = client.http.post("/api/chats", json={"model": MODEL, "content": "x", "parameters": parameters})
    assert refused.status_code == status and words in refused.json()["error"]
    assert client.get("/api/chats")["chats"] == before


def test_options_name_every_parameter_with_its_range(client: Client) -> None:
    options = client.get(f"/api/chats/options?model={MODEL}")
    found = {one["name"]: one for one in options["parameters"]}
    assert found["temperature"] == {
        "name": "temperature", "kind": "number", "whole": False, "default": "0.8", "low": 0, "high": 100,
    }  # fmt: skip
    assert found["system"]["kind"] == "text" and found["think"]["kind"] == "switch" and found["top_k"]["whole"]
    assert "greedy" in options["presets"] and "tools" not in found


def test_text_files_are_attached_and_kept_by_an_edit(client: Client) -> None:
    data = base64.b64encode("Grüße".encode()).decode()
    chat = client.begin("Read @a", files=[{"name": "a.txt", "data": data}, {"name": "b.md", "text": "more"}])
    message = client.answered(chat)["messages"][0]
    assert [(file["name"], file["characters"]) for file in message["files"]] == [("a.txt", 5), ("b.md", 4)]
    found = client.http.get(f"/api/chats/{chat}/messages/{message['id']}/files/0")
    assert found.text == "Grüße" and found.headers["content-type"].startswith("text/plain")
    assert found.headers["x-content-type-options"] == "nosniff"
    client.post(f"/api/chats/{chat}/messages", content="Again", edits=message["id"], kept=[1])
    assert [file["name"] for file in client.answered(chat)["messages"][0]["files"]] == ["b.md"]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"name": "x.bin", "data": base64.b64encode(b"\0\1\2").decode()}, "x.bin: is not UTF-8 text"),
        ({"name": "x.txt", "data": "***"}, "data is not valid base64"),
        ({"name": "p.png", "data": base64.b64encode(b"\x89PNG\r\n\x1a\nbroken").decode()}, "p.png cannot be attached"),
        ({"name": "p.png", "data": base64.b64encode(png(1)).decode()}, "reads text only"),
        ({"name": "big.txt", "text": "x" * (2**21 + 1)}, "larger than 2 MiB"),
    ],
)
def test_files_that_cannot_be_attached_are_named(client: Client, file: Any, words: str) -> None:
    refused = client.http.post("/api/chats", json={"model": MODEL, "content": "Look", "files": [file]})
    assert refused.status_code == 400 and words in refused.json()["error"]


def test_unknown_chats_and_messages_are_404(client: Client) -> None:
    chat = client.begin()
    user, answer = (message["id"] for message in client.answered(chat)["messages"])
    for path, body in [
        ("/api/chats/1", None),
        ("/api/chats/1/messages", {"content": "x"}),
        (f"/api/chats/{chat}/answers", {"message": user}),
        (f"/api/chats/{chat}/messages", {"content": "x", "edits": answer}),
        (f"/api/chats/{chat}/turn", {"message": 5, "step": 1}),
        (f"/api/chats/{chat}/fork", {"message": 5}),
    ]:
        found = client.http.get(path) if body is None else client.http.post(path, json=body)
        assert found.status_code == 404, (path, found.text)
    assert client.http.post("/api/chats", json={"model": "nothing", "content": "x"}).status_code == 404
    assert client.http.post("/api/chats", json={"model": MODEL, "content": "  "}).status_code == 400


def test_the_events_of_no_chat_tell_of_the_list(client: Client) -> None:
    with client.http.stream("GET", "/api/chats/events") as response:
        lines = (json.loads(line) for line in response.iter_lines() if line)
        first = next(lines)
        client.begin()
        assert next(lines)["list"] > first["list"] and "chat" not in first


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://localhost:3000"},
        {"Origin": "vscode-webview://x"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_pages_do_not_get_the_chats(server: Any, headers: dict[str, str]) -> None:
    for path in ("/api/chats", "/api/chats/options"):
        assert httpx.get(server.url + path, headers=headers, timeout=PATIENCE_S).status_code == 403
    body = {"model": MODEL, "content": "x"}
    assert httpx.post(f"{server.url}/api/chats", json=body, headers=headers, timeout=PATIENCE_S).status_code == 403
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    assert httpx.get(f"{server.url}/api/chats", headers=own, timeout=PATIENCE_S).status_code == 200


def test_each_user_has_chats_of_their_own(start_server: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann: one\nBob: two\n", encoding="utf-8")
    with start_server("--api-key-file", str(keys), **own_places(tmp_path)) as server:
        ann, bob = (Client(server.url, Authorization=f"Bearer {key}") for key in ("one", "two"))
        chat = ann.begin("A secret of Ann's")
        ann.answered(chat)
        assert bob.get("/api/chats")["chats"] == [] and bob.http.get(f"/api/chats/{chat}").status_code == 404
        assert httpx.get(f"{server.url}/api/chats", timeout=PATIENCE_S).status_code == 401
        assert {path.name for path in (tmp_path / "localllm").glob("*.db")} == {
            "sessions-of-ann.db",
            "sessions-of-bob.db",
        }


def test_no_route_reaches_another_users_chats(start_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann: first-secret\nben: second-secret\n", encoding="utf-8")
    with start_server("--api-key-file", str(file), "--page-tools", str(tmp_path)) as server:
        ann, ben = (Client(server.url, Authorization=f"Bearer {key}-secret") for key in ("first", "second"))
        chat = ann.begin("Only for Ann", files=[{"name": "note.txt", "text": "secret of Ann"}])
        ann.answered(chat)
        message = ann.chat(chat)["messages"][0]["id"]
        ben.answered(ben.begin("Only for Ben"))
        assert [one["title"] for one in ann.get("/api/chats")["chats"]] == ["Only for Ann"]
        assert ben.get("/api/chats?search=Ann")["chats"] == []
        for path in ("", "/export", f"/messages/{message}/files/0"):
            assert ann.http.get(f"/api/chats/{chat}{path}").status_code == 200
            assert ben.http.get(f"/api/chats/{chat}{path}").status_code == 404, path
        bodies: dict[str, dict[str, Any]] = {
            "": {"title": "Ben's"},
            "/messages": {"content": "More"},
            "/answers": {},
            "/turn": {"message": message, "step": 1},
            "/fork": {"message": message},
            "/undo": {},
        }
        for path, body in bodies.items():
            assert ben.http.post(f"/api/chats/{chat}{path}", json=body).status_code == 404, path
        assert ben.post(f"/api/chats/{chat}/stop")["stopped"] is False
        decision = {"decision": "once", "preview": ""}
        assert ben.http.post(f"/api/chats/{chat}/decision", json=decision).status_code == 409
        with events(ben, chat) as lines:
            assert "answer" not in next(lines)
        assert ann.chat(chat)["title"] == "Only for Ann"
        for client in (ann, ben):  # the prompts and personas of the machine's user are neither's
            assert client.get("/api/chats/options")["prompts"] is None
            assert client.http.get("/api/chats/saved/prompt/x").status_code == 403


def test_a_server_for_everybody_keeps_its_chats_closed(start_server: Any) -> None:
    with start_server("--host", "0.0.0.0", "--without-key") as server:
        refused = httpx.get(f"http://127.0.0.1:{server.port}/api/chats", timeout=PATIENCE_S)
        assert refused.status_code == 403 and "LOCALLLM_API_KEY" in refused.json()["error"]


def test_markdown_is_rendered(client: Client) -> None:
    assert client.post("/api/render", text="a **b**") == {"html": ["<p>a <strong>b</strong></p>\n"]}


def test_memory_and_speed_are_known_before_a_load(server: Any, client: Client) -> None:
    """The figures are those of `localllm list`, and downloads are suggested that are not here."""
    told = client.get("/api/chats/models")
    assert {row["name"] for row in told["models"]} >= {MODEL, OTHER, "builtin"} and told["free"] > 0
    sizes = {row["name"]: row["size"] for row in client.get("/api/tags")["models"]}
    small = next(row for row in told["models"] if row["name"] == MODEL)
    assert 0 < small["memory"] < 64 * 2**20 and sizes[MODEL] > 0
    assert small["fits"] is True and small["speed"] is None  # this machine is not measured
    assert [row["name"] for row in told["suggestions"]] == [one.name for one in ranked(told["free"])]
    for row, one in zip(told["suggestions"], ranked(told["free"]), strict=True):
        assert (row["memory"], row["size"], row["licence"]) == (one.memory, one.size, one.licence)
        assert row["fits"] is (one.memory <= told["free"])


def test_prompts_and_personas_are_those_of_the_terminal_chat(start_server: Any, tmp_path: Path) -> None:
    folder = tmp_path / "localllm"
    (folder / "prompts").mkdir(parents=True)
    (folder / "prompts" / "translate.md").write_text("Translate into Dutch:\n", encoding="utf-8")
    with start_server(**own_places(tmp_path)) as server:
        client = Client(server.url)
        options = client.get("/api/chats/options")
        assert (options["prompts"], options["personas"]) == (["translate"], [])
        assert client.get("/api/chats/saved/prompt/translate") == {"text": "Translate into Dutch:"}
        client.post("/api/chats/saved/prompt/greet", text="Say hello.")
        assert (folder / "prompts" / "greet.md").read_text(encoding="utf-8") == "Say hello.\n"
        values = {"system": 'You are a "pirate".', "temperature": "0.3"}
        client.post("/api/chats/saved/persona/pirate", parameters=values, model=MODEL)
        assert client.get("/api/chats/saved/persona/pirate") == {"parameters": values, "model": ""}
        assert client.get("/api/chats/options")["personas"] == ["pirate"]
        again = client.http.post("/api/chats/saved/prompt/greet", json={"text": "Other"})
        assert again.status_code == 400 and "exists already" in again.json()["error"]
        for name in ("../x", "..%2f..%2fconfig", ".hidden", "none"):
            assert client.http.get(f"/api/chats/saved/prompt/{name}").status_code in (400, 404), name
        (folder / "personas" / "bad.toml").write_text("top_p = 99\n", encoding="utf-8")
        bad = client.http.get("/api/chats/saved/persona/bad")
        assert bad.status_code == 400 and "bad.toml" in bad.json()["error"]


def test_chats_are_exported_and_imported(start_server: Any, client: Client) -> None:
    chat = client.begin("Wörter <b>zählen</b>", parameters={**BRIEF, "system": "Count."})
    client.answered(chat)
    client.post(f"/api/chats/{chat}/answers")
    _, answer = client.texts(chat)
    client.post(f"/api/chats/{chat}", title="Wörter / zählen", tags=["words"])
    markdown = client.http.get(f"/api/chats/{chat}/export")
    assert markdown.text.startswith("# Wörter / zählen\n") and answer.strip() in markdown.text
    assert markdown.headers["content-disposition"] == "attachment; filename*=UTF-8''w%C3%B6rter---z%C3%A4hlen.md"
    whole = client.http.get(f"/api/chats/{chat}/export?form=json").content
    body = {"name": "words.json", "data": base64.b64encode(whole).decode()}
    assert client.post("/api/chats/import", **body, stores=True)["chats"] == []  # it is here already
    with start_server() as server:
        other = Client(server.url)
        told = other.post("/api/chats/import", **body)
        assert told["new"] == 1 and told["chats"] == [] and "1 new chat" in told["summary"]
        assert other.get("/api/chats")["chats"] == []  # looking stores nothing
        (copy,) = other.post("/api/chats/import", **body, stores=True)["chats"]
        there = other.chat(copy)
        assert (there["title"], there["tags"]) == ("Wörter / zählen", ["words"])
        assert there["parameters"]["system"] == "Count." and there["messages"][1]["variants"] == 2
        assert other.texts(copy) == client.texts(chat)
        for data in (b"no chats", b"{}", b"PK\x03\x04"):
            refused = other.http.post("/api/chats/import", json={**body, "data": base64.b64encode(data).decode()})
            assert refused.status_code == 400 and refused.json()["error"].startswith("words.json")
