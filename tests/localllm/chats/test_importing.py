"""Exports of other programs and of localllm, read as chats and stored beside others."""

import base64
import copy
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.answer.tool_calls import ToolCall
from localllm.chats import Attachment, Message, Role, SessionStore
from localllm.chats.importing import Export, ImportedChat, compare, exported, read_export, take
from localllm.cli.main import main
from localllm.errors import RequestError
from tests.picture_files import png

PNG = base64.b64encode(png(3)).decode()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    opened = SessionStore(tmp_path / "sessions.db")
    yield opened
    opened.close()


def llama_session() -> dict[str, Any]:
    """A chat of llama.cpp's page: instructions, two versions of an answer, a tool, files."""

    def message(key: str, parent: str | None, role: str, content: str, **more: Any) -> dict[str, Any]:
        common = {"convId": "c1", "type": "text", "timestamp": 1_760_000_000_000 + ord(key[0]), "children": []}
        return {"id": key, "parent": parent, "role": role, "content": content, **common, **more}

    call = {"id": "t1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Husum"}'}}
    files = [
        {"type": "IMAGE", "name": "pier.png", "base64Url": f"data:image/png;base64,{PNG}"},
        {"type": "TEXT", "name": "log.txt", "content": "wind 7"},
        {
            "type": "PDF",
            "name": "map.pdf",
            "content": "depth 4 m",
            "base64Data": "JVBERg==",
            "processedAsImages": False,
        },
        {"type": "AUDIO", "name": "horn.wav", "base64Data": "AAAA", "mimeType": "audio/wav"},
    ]
    return {
        "conv": {"id": "c1", "name": "Tides", "currNode": "g", "lastModified": 1_760_000_009_000},
        "messages": [
            message("a", None, "system", "", type="root", children=["b"]),
            message("b", "a", "system", "Be brief.", type="system", children=["c"]),
            message("c", "b", "user", "When is high water?", children=["d", "e"], extra=files),
            message("d", "c", "assistant", "At noon.", model="qwen3"),
            message("e", "c", "assistant", "", reasoningContent="I need a table.", toolCalls=json.dumps([call])),
            message("f", "e", "tool", "16:20", toolCallId="t1"),
            message("g", "f", "assistant", "<think>Found.</think>\n\nAt 16:20.", model="qwen3"),
        ],
    }


def as_lines(session: dict[str, Any]) -> str:
    """The page's newer format: a line for the chat, and one for each message with its calls as an array."""
    lines: list[Any] = [{"type": "session", "harness": "llama.cpp", **session["conv"]}]
    for one in copy.deepcopy(session["messages"]):
        if "toolCalls" in one:
            one["toolCalls"] = json.loads(one["toolCalls"])
        lines.append({"type": "message", "message": one})
    lines.insert(2, {"type": "a later kind of record"})
    return "\n".join(map(json.dumps, lines))


def open_webui_chat(**more: Any) -> dict[str, Any]:
    """A chat of Open WebUI with an edited prompt, thoughts, and an answer that failed."""
    thoughts = '<details type="reasoning" done="true" duration="2">\n<summary>Thought for 2 seconds</summary>\n'
    messages = {
        "q1": {
            "parentId": None,
            "childrenIds": ["a1"],
            "role": "user",
            "content": "Name a knot",
            "timestamp": 1_750_000_001,
        },
        "a1": {
            "parentId": "q1",
            "childrenIds": [],
            "role": "assistant",
            "content": f"{thoughts}&gt; A bowline\n&gt; or a sheet bend?\n</details>\nBowline.",
            "model": "llama3:8b",
            "done": True,
        },
        "q2": {
            "parentId": None,
            "childrenIds": ["a2"],
            "role": "user",
            "content": "Name two knots",
            "files": [
                {"type": "image", "url": f"data:image/png;base64,{PNG}"},
                {"type": "image", "url": "/api/v1/files/77/content"},
                {"type": "file", "name": "knots.md", "file": {"data": {"content": "# Knots"}}},
            ],
        },
        "a2": {
            "parentId": "q2",
            "childrenIds": [],
            "role": "assistant",
            "content": "",
            "error": {"content": "no memory"},
        },
    }
    body = {
        "models": ["llama3:8b"],
        "params": {"system": "Speak as a sailor."},
        "history": {"currentId": "a2", "messages": {key: {"id": key} | one for key, one in messages.items()}},
    }
    about = {"id": "u", "title": "Knots", "created_at": 1_750_000_000, "updated_at": 1_750_000_100}
    return {**about, "meta": {"tags": ["at sea"]}, "chat": body, **more}


def chatgpt_chat() -> dict[str, Any]:
    """A chat of ChatGPT: thoughts and an answer in nodes of their own, two variants, a picture, code that ran."""

    def node(key: str, parent: str | None, children: list[str], role: str = "", **content: Any) -> dict[str, Any]:
        more = {name: content.pop(name) for name in ("recipient", "metadata") if name in content}
        author = {"role": role, "name": "python" if role == "tool" else None}
        message = {"id": key, "author": author, "create_time": 1_740_000_000.5, "content": content, **more}
        return {"id": key, "parent": parent, "children": children, "message": message if role else None}

    thoughts = [{"summary": "Counting", "content": "Two masts.", "chunks": []}]
    picture = {"content_type": "image_asset_pointer", "asset_pointer": "sediment://file_00ab"}
    nodes = [
        node(
            "answer-2", "thoughts", [], "assistant", content_type="text", parts=["A \ue200cite\ue202turn0\ue201ketch."]
        ),
        node("root", None, ["system"]),
        node("system", "root", ["asked"], "system", content_type="text", parts=[""]),
        node(
            "asked",
            "system",
            ["answer-1", "thoughts"],
            "user",
            content_type="multimodal_text",
            parts=[picture, "What is it?"],
        ),
        node(
            "answer-1",
            "asked",
            [],
            "assistant",
            content_type="text",
            parts=["A boat."],
            metadata={"model_slug": "gpt-4o"},
        ),
        node("thoughts", "asked", ["answer-2"], "assistant", content_type="thoughts", thoughts=thoughts),
        node("next", "answer-1", ["code"], "user", content_type="text", parts=["Its length in feet: 9 m?"]),
        node("code", "next", ["ran"], "assistant", content_type="code", text="9/0.3048", recipient="python"),
        node("ran", "code", ["said"], "tool", content_type="execution_output", text="29.5"),
        node("said", "ran", [], "assistant", content_type="text", parts=["29.5 ft."]),
        node("memory", "root", [], "assistant", content_type="model_editable_context", model_set_context="likes boats"),
    ]
    times = {"create_time": 1_740_000_000.0, "update_time": 1_740_000_900.0}
    mapping = {one["id"]: one for one in nodes}
    return {"title": "A ship", **times, "mapping": mapping, "current_node": "said"}


def archive(files: dict[str, bytes | str]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return made.getvalue()


def read(folder: Path, content: bytes | str | list[Any] | dict[str, Any]) -> Export:
    data = content if isinstance(content, bytes | str) else json.dumps(content)
    file = folder / "export"
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_export(file)


def shown(chat: ImportedChat, store: SessionStore) -> list[Message]:
    (identity,) = take([chat], store)
    return store.path(identity)


def test_a_chat_of_llama_cpps_page(tmp_path: Path, store: SessionStore) -> None:
    session = llama_session()
    formats = (session, [session], as_lines(session), archive({"a.jsonl": as_lines(session), "b.txt": "x"}))
    exports = [read(tmp_path, one) for one in formats]
    assert all(export == exports[0] for export in exports) and exports[0].program == "llama.cpp's web page"
    (chat,) = exports[0].chats
    assert (chat.title, chat.model, chat.parameters, chat.branches) == ("Tides", "qwen3", {"system": "Be brief."}, 2)
    assert chat.left_out == {"file": 1}
    asked, called, result, said = shown(chat, store)
    assert asked.content == "When is high water?" and asked.pictures() == (png(3),)
    assert [(file.name, file.text) for file in asked.attachments[1:]] == [
        ("log.txt", "wind 7"),
        ("map.pdf", "depth 4 m"),
    ]
    assert called.calls == result.calls == (ToolCall("tide", {"port": "Husum"}),)
    assert (called.reasoning, result.content) == ("I need a table.", "16:20")
    assert (said.reasoning, said.content, said.model) == ("Found.", "At 16:20.", "qwen3")
    assert len(store.variants(called)) == 2
    assert asked.created == 1_760_000_000.0 + ord("c") / 1000
    (summary,) = store.sessions()
    assert summary.updated == 1_760_000_009.0 and summary.titled


def test_a_chat_of_open_webui(tmp_path: Path, store: SessionStore) -> None:
    export = read(tmp_path, [open_webui_chat()])
    (chat,) = export.chats
    assert export.program == "Open WebUI"
    assert (chat.title, chat.model, chat.tags) == ("Knots", "llama3:8b", ("at-sea",))
    assert chat.left_out == {"picture": 1}
    asked, failed = shown(chat, store)
    assert (asked.content, [file.text for file in asked.attachments]) == ("Name two knots", ["", "# Knots"])
    assert (failed.content, failed.error, failed.finish_reason) == ("", "no memory", "error")
    store.select(asked.session_id, store.variants(asked)[0])
    first, answer = store.path(asked.session_id)
    assert (first.content, answer.content) == ("Name a knot", "Bowline.")
    assert answer.reasoning == "A bowline\nor a sheet bend?"
    (found,) = store.sessions(tags=["at-sea"])
    assert found.updated == 1_750_000_100 and store.summary(found.id).parameters == {"system": "Speak as a sailor."}


def test_an_old_chat_of_open_webui_is_a_list(tmp_path: Path, store: SessionStore) -> None:
    texts = [("user", "Hello"), ("assistant", "Hi."), ("user", "Bye"), ("assistant", "Bye.")]
    messages = [{"role": role, "content": content} for role, content in texts]
    (chat,) = read(tmp_path, {"title": "", "chat": {"messages": messages}}).chats
    assert chat.title == "Hello"
    assert [(one.role, one.content) for one in shown(chat, store)] == texts


def test_a_chat_of_chatgpt_with_its_pictures(tmp_path: Path, store: SessionStore) -> None:
    other = chatgpt_chat() | {"title": "Another"}
    files: dict[str, bytes | str] = {
        "conversations-000.json": json.dumps([chatgpt_chat()]),
        "conversations-001.json": json.dumps([other]),
        "file_00ab-sanitized.png": png(3),
        "user.json": "{}",
    }
    export = read(tmp_path, archive(files))
    assert [chat.title for chat in export.chats] == ["A ship", "Another"] and export.program == "ChatGPT"
    chat = export.chats[0]
    assert (chat.model, chat.branches, dict(chat.left_out)) == ("gpt-4o", 2, {})
    asked, boat, feet, code, ran, said = shown(chat, store)
    assert asked.content == "What is it?" and asked.pictures() == (png(3),)
    assert [one.content for one in (boat, feet, ran, said)] == [
        "A boat.",
        "Its length in feet: 9 m?",
        "29.5",
        "29.5 ft.",
    ]
    assert code.calls == (ToolCall("python", {"input": "9/0.3048"}),)
    store.select(boat.session_id, store.variants(boat)[1])
    ketch = store.path(boat.session_id)[-1]
    assert (ketch.content, ketch.reasoning) == ("A ketch.", "Counting\n\nTwo masts.")

    (alone,) = read(tmp_path, chatgpt_chat()).chats
    assert alone.left_out == {"picture": 1}, "the archive has the pictures"


def test_our_own_export_keeps_everything(tmp_path: Path, store: SessionStore) -> None:
    session = store.create("tiny", {"temperature": 0.2, "tools": True, "folder": "/secret"})
    asked = store.add(Message(0, session, None, Role.USER, "Look", attachments=(Attachment("a.png", "", 9, PNG),)))
    first = store.add(Message(0, session, asked.id, Role.ASSISTANT, "One.", finish_reason="stop", model="tiny"))
    call = (ToolCall("read_file", {"path": "x"}),)
    second = Message(0, session, asked.id, Role.ASSISTANT, "", "Hm.", "stop", None, "tiny", {"prompt": 12}, calls=call)
    store.add(second)
    store.add(Message(0, session, second.id, Role.TOOL, "text", calls=call))
    store.select(session, first.id)
    store.tag(session, "work")
    text = exported(store.summary(session), store.all_messages(session), first.id)

    export = read(tmp_path, text)
    found = compare(export, store)
    assert (len(found.new), len(found.present)) == (0, 1)
    other = SessionStore(tmp_path / "other.db")
    (copied,) = take(compare(export, other).new, other)
    assert other.summary(copied).parameters == {"temperature": 0.2}
    assert other.summary(copied).tags == ("work",) and other.summary(copied).title == "Look"

    def plain(messages: list[Message]) -> list[Any]:
        places = {message.id: place for place, message in enumerate(messages)}
        return [(places.get(one.parent_id or 0), [*map(str, list(vars_of(one).values()))]) for one in messages]

    def vars_of(one: Message) -> dict[str, Any]:
        return {name: getattr(one, name) for name in Message.__slots__ if name not in ("id", "session_id", "parent_id")}

    assert plain(other.all_messages(copied)) == plain(store.all_messages(session))
    assert [one.content for one in other.path(copied)] == ["Look", "One."]
    other.close()


def test_what_is_here_is_not_imported_again_even_if_it_went_on(tmp_path: Path, store: SessionStore) -> None:
    export = read(tmp_path, [open_webui_chat(), chatgpt_chat(), open_webui_chat()])
    found = compare(export, store)
    assert [chat.title for chat in found.new] == ["Knots", "A ship"], "the file has one chat twice"
    take(found.new, store)
    for session in store.sessions():
        last = store.path(session.id)[-1]
        store.add(Message(0, session.id, last.id, Role.USER, "Go on"))
    again = compare(export, store)
    assert (len(again.new), len(again.present)) == (0, 3)
    grown = open_webui_chat()
    grown["chat"]["history"]["messages"]["a1"]["content"] += " And a hitch."
    assert len(compare(read(tmp_path, [grown]), store).new) == 1
    store.delete(store.sessions()[0].id)
    assert len(compare(export, store).new) == 1, "a deleted chat may be imported"


def test_chats_of_one_export_that_begin_alike_are_all_imported(tmp_path: Path, store: SessionStore) -> None:
    texts = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    export = read(tmp_path, [{"title": "Long", "messages": texts}, {"title": "Short", "messages": texts[:2]}])
    found = compare(export, store)
    assert [chat.title for chat in found.new] == ["Long", "Short"]
    take(found.new, store)
    assert len(store.sessions()) == 2 and not compare(export, store).new


def test_one_chat_that_cannot_be_read_leaves_the_others(tmp_path: Path) -> None:
    export = read(tmp_path, [{"chat": {"title": "Empty"}}, open_webui_chat(), 5, {"mapping": {"x": None}}])
    assert [chat.title for chat in export.chats] == ["Knots"]
    assert len(export.problems) == 3 and export.problems[1] == "number 3 is no exported chat."


CHAT = json.dumps(open_webui_chat()).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not complete JSON"),
        (CHAT[: len(CHAT) // 2], "is not complete JSON .line 1, character .* Export it again"),
        (as_lines(llama_session()).encode()[:-9], r"is not complete JSON \(line 9, "),
        (b"[" * 500 + b"]" * 500, "nested deeper than 128 levels"),
        (b'{"a": 1' + b"0" * 5_000 + b"}", "cannot be read as JSON"),
        (b"\x89PNG\xff", "is not UTF-8 text"),
        (b"[]", "has no chats that can be read"),
        (b'{"models": []}', "has no chats that can be read. Exports that can be read: localllm's"),
        (b'{"mapping": {"a": {"parent": "b"}, "b": {"parent": "a"}}}', "has no chats that can be read"),
        (archive({"notes.txt": "x"}), "is an archive without exported chats"),
        (archive({"conversations.json": "x" * 999})[:-30], "is not a complete ZIP archive"),
        (archive({"a.jsonl": b'{"type": "session"'}), r"a\.jsonl is not complete JSON"),
    ],
    ids=[
        "empty",
        "half",
        "lines",
        "nested",
        "digits",
        "binary",
        "list",
        "models",
        "circle",
        "archive",
        "half-archive",
        "session",
    ],
)
def test_files_that_are_not_exports(content: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=why):
        read(tmp_path, content)


def test_files_that_cannot_be_opened_or_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.chats.importing.MAX_JSON_BYTES", 1000)
    for content in (CHAT, archive({"conversations.json": b" " * 10_000})):
        with pytest.raises(RequestError, match=r"has more than 0 MiB\. Export fewer chats at a time"):
            read(tmp_path, content)
    for path in (tmp_path, tmp_path / "missing", Path("a\0b")):
        with pytest.raises(RequestError, match="cannot be read"):
            read_export(path)


def test_pictures_that_are_none_or_too_many_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = llama_session()
    url = "data:image/png;base64,"
    extra = [
        {"type": "IMAGE", "name": "x", "base64Url": one} for one in (url + "!!", url + "aGVsbG8=", url + PNG, url + PNG)
    ]
    session["messages"][2]["extra"] = extra
    monkeypatch.setattr("localllm.chats.importing.MAX_PICTURE_BYTES", len(png(3)) + 5)
    (chat,) = read(tmp_path, session).chats
    assert chat.left_out == {"picture": 3} and len(chat.messages[0].attachments) == 1


def test_a_long_chat_and_a_damaged_tree(tmp_path: Path, store: SessionStore) -> None:
    many = 20_000
    messages = [{"role": "user", "content": f"number {place}"} for place in range(many)]
    (chat,) = read(tmp_path, {"messages": messages}).chats
    assert len(shown(chat, store)) == many
    nodes = {str(place): {"parentId": str(place + 1), "role": "user", "content": "x"} for place in range(3)}
    nodes["loop"] = {"parentId": "loop", "role": "user", "content": "y"}
    (chat,) = read(tmp_path, {"chat": {"history": {"messages": nodes, "currentId": ["bad"]}}}).chats
    assert (len(chat.messages), chat.branches, chat.left_out) == (3, 1, {"orphaned message": 1})


@pytest.mark.parametrize(
    "text", ['<details type="a"' * 60_000, '<details type="a">' * 60_000, "<think>" * 60_000, "\ue200" * 300_000]
)
def test_texts_that_begin_markup_again_and_again(text: str, tmp_path: Path) -> None:
    chat, other = open_webui_chat(), chatgpt_chat()
    chat["chat"]["history"]["messages"]["a1"]["content"] = f"</details>{text}"
    other["mapping"]["answer-1"]["message"]["content"]["parts"] = [text]
    assert len(read(tmp_path, [chat, other]).chats) == 2


SAMPLES: tuple[Callable[[], dict[str, Any]], ...] = (llama_session, open_webui_chat, chatgpt_chat)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just([]), st.just({}))


@given(data=st.data())
def test_any_value_of_a_field_gives_a_chat_or_one_sentence(data: st.DataObject, tmp_path_factory: Any) -> None:
    sample: Any = data.draw(st.sampled_from(SAMPLES))()
    for _ in range(data.draw(st.integers(1, 4))):
        at = sample
        while True:
            keys = [*at] if isinstance(at, dict) else [*range(len(at))]
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and data.draw(st.booleans()):
                at = at[key]
                continue
            at[key] = data.draw(VALUES)
            break
    folder = tmp_path_factory.mktemp("any")
    with closing(SessionStore(folder / "sessions.db")) as store:
        try:
            chats = read(folder, sample).chats
        except RequestError:
            return
        for identity in take(chats, store):
            assert store.path(identity) and store.all_messages(identity)
        assert not compare(read(folder, sample), store).new


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[str, str]:
    """The output of `localllm chats`, and its messages."""
    monkeypatch.setattr("sys.argv", ["localllm", "chats", *words])
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    return out, err


def test_the_command_lists_before_it_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, stored = tmp_path / "all.json", f"--sessions={tmp_path / 's.db'}"
    file.write_text(json.dumps([open_webui_chat(title="Kno\x1b[31mts"), {"mapping": {}}]), encoding="utf-8")
    out, err = run(capsys, monkeypatch, "import", str(file), "--dry-run", stored)
    assert out.splitlines() == [
        "new   Kno\ufffd[31mts  (4 messages, 2 branches, 2 files)",
        "bad   Imported chat (number 2) has no messages.",
    ]
    assert err == (
        "Open WebUI: 1 new chat; 1 that cannot be read; left out: 1 picture. Nothing was imported (--dry-run).\n"
    )
    assert run(capsys, monkeypatch, stored)[1].startswith("There are no chats yet.")
    assert run(capsys, monkeypatch, "import", str(file), stored)[0] == out
    listed, _ = run(capsys, monkeypatch, stored)
    assert [line.split()[1:] for line in listed.splitlines()[1:]] == [["4", "llama3:8b", "Kno\ufffd[31mts"]]
    again, summary = run(capsys, monkeypatch, "import", str(file), stored)
    assert again.startswith("here  Kno") and summary.startswith("Open WebUI: 0 new chats; 1 here already;")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["delete"], "`localllm chats` has no action 'delete'. Choose import"),
        (["import"], "Name the file of exported chats"),
        (["--dry-run"], "--dry-run belongs to `localllm chats import FILE`."),
        (["import", "nowhere.json"], "nowhere.json: cannot be read: No such file or directory."),
    ],
)
def test_the_command_refuses(
    words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = run(capsys, monkeypatch, *words, f"--sessions={tmp_path / 's.db'}")
    assert out == "" and err.startswith("error: ") and why in err and err.count("\n") == 1
