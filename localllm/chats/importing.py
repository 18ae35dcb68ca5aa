"""Reads exported chats: localllm's own, and those of llama.cpp's web page, Open WebUI and ChatGPT.

The formats are those that the programs write in 2026; none of them has a specification. An export is untrusted: what is
not understood is left out and counted, and nothing in it turns on tools or opens files.
"""

import base64
import binascii
import html
import io
import json
import os
import re
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote_to_bytes

from gguf_io.system import open_regular
from localllm.answer.tool_calls import ToolCall
from localllm.bounded_json import parsed
from localllm.chats.parameters import NAMES
from localllm.chats.records import Attachment, Message, Role, SessionSummary
from localllm.chats.saved import OF_THE_CHAT
from localllm.chats.store import TITLE_CHARS, SessionStore, tag_of
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError, RequestError
from localllm.text import counted, harmless

MAX_JSON_BYTES = 256 << 20  # of a file, or of each in an archive
MAX_PICTURE_BYTES = 512 << 20  # of all pictures of an export
MAX_TITLE_CHARS = 200

_ZIP = b"PK\x03\x04"
_CHATGPT_FILE = re.compile(r"(?:.*/)?conversations(?:-\d+)?\.json")
_ASSET = re.compile(r"file[-_][A-Za-z0-9]+")  # how ChatGPT names a file: file-AbC1-name.png, file_000-sanitized.png
_JSON_LINES = re.compile(rb'\s*\{\s*"type"\s*:\s*"session"')
_THOUGHTS = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_DETAILS, _DETAILS_END = re.compile(r'<details type="(\w+)"'), "</details>"  # Open WebUI's thoughts and calls
_MARKS = re.compile("\ue200[^\ue200\ue201]*\ue201")  # ChatGPT's references to pages that it found

KNOWN = "localllm's (/export NAME.json), llama.cpp's web page, Open WebUI's and ChatGPT's"


@dataclass(slots=True)
class ImportedChat:
    """A chat of an export. Ids of messages count from 1 and are its own; parents come before their children.

    shown: the last message of the shown path. times: when it was begun and changed, in seconds since the epoch.
    left_out: what the export has or mentions and the chat has not, with numbers.
    """

    title: str
    model: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    times: tuple[float, float] = (0.0, 0.0)
    messages: list[Message] = field(default_factory=list)
    shown: int | None = None
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def branches(self) -> int:
        """The number of paths through the messages."""
        return len({message.id for message in self.messages} - {message.parent_id for message in self.messages})


class Export(NamedTuple):
    """What a file has. problems: chats that cannot be read, each with the reason."""

    program: str
    chats: list[ImportedChat]
    problems: list[str]


class FoundExport(NamedTuple):
    """An export beside what is stored. present: chats that are stored already, maybe continued."""

    program: str
    new: list[ImportedChat]
    present: list[ImportedChat]
    problems: list[str]

    @property
    def summary(self) -> str:
        """One line: how many chats are new, are here already or cannot be read, and what is left out."""
        parts = [f"{self.program}: {counted(len(self.new), 'new chat')}"]
        if self.present:
            parts.append(f"{len(self.present)} here already")
        if self.problems:
            parts.append(f"{len(self.problems)} that cannot be read")
        lost = sum((chat.left_out for chat in self.new), Counter[str]())
        if lost:
            parts.append("left out: " + ", ".join(counted(number, what) for what, number in sorted(lost.items())))
        return "; ".join(parts) + "."

    def lines(self) -> Iterator[str]:
        """A line for each chat, and for each that cannot be read."""
        for state, chats in (("new", self.new), ("here", self.present)):
            for chat in chats:
                files = sum(len(message.attachments) for message in chat.messages)
                parts = [counted(len(chat.messages), "message")]
                parts += [f"{chat.branches} branches"] if chat.branches > 1 else []
                parts += [counted(files, "file")] if files else []
                yield f"{state:4}  {chat.title}  ({', '.join(parts)})"
        for problem in self.problems:
            yield f"bad   {problem}"


def compare(export: Export, store: SessionStore) -> FoundExport:
    """Tell the new chats of an export from those that the store has, maybe continued. Raises SessionError.

    Of chats of the same title and messages in one export, the first counts.
    """
    having: dict[int, list[frozenset[int]]] = {}  # by a path: the paths of the stored chats that have it
    for texts in store.all_texts():
        whole = frozenset(_paths(texts))
        for path in whole:
            having.setdefault(path, []).append(whole)
    found = FoundExport(export.program, [], [], export.problems)
    seen: set[tuple[str, frozenset[int]]] = set()
    for chat in export.chats:
        paths = _paths((one.id, one.parent_id, str(one.role), one.content) for one in chat.messages)
        same = chat.title, frozenset(paths)
        is_present = same in seen or any(stored.issuperset(paths) for stored in having.get(paths[-1], ()))
        (found.present if is_present else found.new).append(chat)
        seen.add(same)
    return found


def take(chats: Sequence[ImportedChat], store: SessionStore) -> list[int]:
    """Store chats beside all others, and return their ids. Raises SessionError."""
    stored: list[int] = []
    for place, chat in enumerate(chats, 1):
        summary = SessionSummary(0, chat.title, chat.model, chat.times[1], 0, True, chat.parameters, tags=chat.tags)
        lasting = place == len(chats)  # which makes the ones before it lasting too
        stored.append(store.add_session(summary, chat.times[0], chat.messages, chat.shown, lasting))
    return stored


def _paths(messages: Iterable[tuple[int, int | None, str, str]]) -> list[int]:
    """A hash of each path from the beginning to a message, of (id, parent's id, role, text), parents first."""
    found: dict[int | None, int] = {None: 0}
    for identity, parent, role, text in messages:
        found[identity] = hash((found.get(parent), role, text))
    return [*found.values()][1:]


def exported(summary: SessionSummary, messages: Sequence[Message], shown: int | None) -> str:
    """A chat as JSON: all stored fields of all messages. shown: the last message of the shown path."""
    return json.dumps(
        {
            "title": summary.title,
            "model": summary.model,
            "parameters": summary.parameters,
            "tags": summary.tags,
            "shown": shown,
            "messages": [asdict(message) for message in messages],
        },
        ensure_ascii=False,
        indent=2,
    )


def read_export(path: Path) -> Export:
    """Read a file of any known format. Raises RequestError, with the file's name, if it is none or has no chats."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            archive = file.read(len(_ZIP)) == _ZIP
            file.seek(0)
            found = [*_of_archive(file)] if archive else [*_of_text(file, "", _no_picture)]
    except _BadFileError as error:
        raise RequestError(f"{path}: {error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise RequestError(f"{path}: is not a complete ZIP archive ({error}). Export it again.") from error
    except (OSError, ValueError) as error:  # a ValueError for a null character
        words = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"{path}: cannot be read: {words}. Check the path.") from error
    except MemoryError as error:
        raise RequestError(f"{path}: needs more memory than there is. Export fewer chats at a time.") from error
    programs = [program for program, chat in found if isinstance(chat, ImportedChat)]
    chats = [chat for _, chat in found if isinstance(chat, ImportedChat)]
    problems = [problem for _, problem in found if isinstance(problem, str)]
    if not chats:
        raise RequestError(f"{path}: has no chats that can be read. Exports that can be read: {KNOWN}.")
    return Export(programs[0], chats, problems)


class _BadFileError(Exception):
    """The whole file cannot be read. The message is the end of a sentence, and what to do."""


class _Pictures:
    """The pictures of an export. read: a file of the archive that ChatGPT's text names; None if it is not there."""

    def __init__(self, read: "_ReadPicture") -> None:
        self.read, self._left = read, MAX_PICTURE_BYTES

    def attachment(self, name: str, data: bytes | None) -> Attachment | None:
        """A picture as an attachment; None if it is none, or more than all pictures may have."""
        from gguf_io import pictures

        if data is None or len(data) > self._left:
            return None
        try:
            pictures.check(data)
        except LocalLLMError:
            return None
        self._left -= len(data)
        return Attachment(name, "", None, base64.b64encode(data).decode())

    def of_url(self, name: str, url: str) -> Attachment | None:
        """A picture in a data: URL."""
        head, comma, body = url.partition(",")
        if not comma or not head.startswith("data:image/"):
            return None
        with suppress(binascii.Error, ValueError):
            return self.attachment(name, base64.b64decode(body) if ";base64" in head else unquote_to_bytes(body))
        return None


_ReadPicture = Callable[[str], bytes | None]


def _no_picture(_name: str) -> bytes | None:
    return None


# ---- files


def _of_archive(file: BinaryIO) -> Iterator[tuple[str, ImportedChat | str]]:
    from gguf_io.pictures import MAX_BYTES

    with zipfile.ZipFile(file) as archive:
        names = [entry.filename for entry in archive.infolist()]
        assets = {found[0]: name for name in names if (found := _ASSET.match(os.path.basename(name)))}

        def picture(pointer: str) -> bytes | None:
            found = _ASSET.match(pointer.partition("://")[2])
            if found is None or found[0] not in assets:
                return None
            with archive.open(assets[found[0]]) as entry:
                return entry.read(MAX_BYTES + 1)

        wanted = [name for name in names if name.endswith(".jsonl") or _CHATGPT_FILE.fullmatch(name)]
        if not wanted:
            raise _BadFileError(f"is an archive without exported chats. Exports that can be read: {KNOWN}.")
        for name in sorted(wanted):
            with archive.open(name) as entry:
                yield from _of_text(entry, f"{harmless(name)} ", picture)


def _of_text(file: Any, where: str, picture: _ReadPicture) -> Iterator[tuple[str, ImportedChat | str]]:
    """The chats of a text, each with its program, or why it cannot be read. where: begins messages."""
    data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise _BadFileError(f"{where}has more than {MAX_JSON_BYTES >> 20} MiB. Export fewer chats at a time.")
    found = _json_lines(data, where) if _JSON_LINES.match(data) else _parsed(data, where, 0)
    files = _Pictures(picture)
    for place, raw in enumerate(found if isinstance(found, list) else [found], 1):
        source = next((one for one in SOURCES if isinstance(_dict(raw).get(one.mark), one.kind)), None)
        if source is None:
            yield "", f"{where}number {place} is no exported chat."
            continue
        chat = source.read(raw, files)
        yield source.program, chat if chat.messages else f"{where}{chat.title} (number {place}) has no messages."


def _parsed(data: bytes, where: str, line: int) -> Any:
    """JSON. line: the number of the line, if only one is parsed. Raises _BadFileError."""
    at = f"line {line}, " if line else ""
    try:
        return parsed(data)
    except json.JSONDecodeError as error:
        place = at or f"line {error.lineno}, "
        raise _BadFileError(
            f"{where}is not complete JSON ({place}character {error.colno}: {error.msg}). Export it again."
        ) from error
    except UnicodeDecodeError as error:
        raise _BadFileError(f"{where}is not UTF-8 text ({at}byte {error.start}). Choose another file.") from error
    except ValueError as error:  # too deep, or a number of thousands of digits
        raise _BadFileError(f"{where}cannot be read as JSON: {error}. Choose another file.") from error


def _json_lines(data: bytes, where: str) -> list[Any]:
    """llama.cpp's sessions, each as it was exported in one object before."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(io.BytesIO(data), 1):
        if not line.strip():
            continue
        record = _dict(_parsed(line, where, number))
        if record.get("type") == "session":
            found.append({"conv": record, "messages": []})
        elif record.get("type") == "message" and found:
            found[-1]["messages"].append(record.get("message"))
    return found


# ---- trees


@dataclass(slots=True)
class _Node:
    """A message in an export's tree. message: None for one that is not shown; what follows it follows its parent."""

    parent: Any
    message: Message | None
    order: Sequence[Any] = ()  # of its children


def _grow(chat: ImportedChat, nodes: Mapping[Any, _Node], shown: Any) -> ImportedChat:
    """Give a chat the messages of a tree. Answers that only go on with the one before become one with it.

    shown: the key of the last message shown; if there is none, the last message is shown.
    """
    below: dict[Any, list[Any]] = {}
    for key, node in nodes.items():
        below.setdefault(node.parent if node.parent in nodes else None, []).append(key)
    for key, children in below.items():
        if key is not None and nodes[key].order:
            places = {child: place for place, child in enumerate(nodes[key].order)}
            children.sort(key=lambda child: places.get(child, len(places)))
    waiting: dict[int | None, int] = {}  # by message: the calls before it that have no result yet
    placed: dict[Any, int | None] = {}
    left: list[tuple[Any, int | None, bool]] = [(key, None, False) for key in reversed(below.get(None, []))]
    while left:
        key, parent, alone = left.pop()
        message, children = nodes[key].message, below.get(key, [])
        before = chat.messages[parent - 1] if parent else None
        if message is not None and message.role is Role.TOOL and not waiting.get(parent):
            chat.left_out["unmatched tool result"] += 1
            message = None
        if message is None or _is_empty(message):
            placed[key] = parent
        elif alone and before and before.role is message.role is Role.ASSISTANT and not before.calls:
            _merge(before, message)
            placed[key], waiting[parent], alone = parent, len(before.calls), True
        else:
            message.id, message.parent_id = len(chat.messages) + 1, parent
            chat.messages.append(message)
            waiting[message.id] = waiting[parent] - 1 if message.role is Role.TOOL else len(message.calls)
            placed[key], alone = message.id, True
        left += [(child, placed[key], alone and len(children) == 1) for child in reversed(children)]
    if lost := len(nodes) - len(placed):
        chat.left_out["orphaned message"] += lost
    ends = {message.id for message in chat.messages} - {message.parent_id for message in chat.messages}
    chat.shown = placed.get(shown) or max(ends, default=None)
    asked = next((one.content for one in chat.messages if one.role is Role.USER), "")
    title = " ".join(harmless(chat.title).split())[:MAX_TITLE_CHARS]
    chat.title = title or shorten(harmless(asked), TITLE_CHARS, placeholder=" …") or "Imported chat"
    times = [message.created for message in chat.messages if message.created]
    begun, changed = chat.times
    chat.times = begun or min(times, default=time.time()), changed or max(times, default=time.time())
    return chat


def _is_empty(message: Message) -> bool:
    return not (message.content or message.reasoning or message.calls or message.attachments or message.error)


def _merge(first: Message, second: Message) -> None:
    first.content = "\n\n".join(filter(None, (first.content, second.content)))
    first.reasoning = "\n\n".join(filter(None, (first.reasoning, second.reasoning)))
    first.calls, first.attachments = first.calls + second.calls, first.attachments + second.attachments
    first.model = second.model or first.model
    first.finish_reason, first.error = second.finish_reason, second.error


def _answer_of(message: Message, left_out: Counter[str]) -> Message:
    """An answer whose thoughts stand between tags in its text, as these programs store them."""
    text = message.content
    if thought := _THOUGHTS.match(text):
        message.reasoning, text = thought[1].strip(), text[thought.end() :]
    kept: list[str] = []
    while (begun := _DETAILS.search(text)) and (end := text.find(_DETAILS_END, begun.end())) >= 0:
        inner = text[begun.end() : end].partition(">")[2]
        inner = html.unescape(inner.partition("</summary>")[2] or inner)
        kept.append(text[: begun.start()])
        text = text[end + len(_DETAILS_END) :].lstrip()
        if begun[1] == "reasoning":
            lines = (line.removeprefix(">").removeprefix(" ") for line in inner.strip().splitlines())
            message.reasoning = "\n\n".join(filter(None, (message.reasoning, "\n".join(lines))))
        else:
            left_out["tool call"] += 1
    message.content = "".join(kept) + text
    return message


def _message(role: Role, content: str, created: float, model: str = "") -> Message:
    answers = role is Role.ASSISTANT
    reason = FinishReason.STOP if answers else None
    return Message(0, 0, None, role, content, finish_reason=reason, model=model if answers else "", created=created)


# ---- formats


def _read_own(raw: dict[str, Any], _: _Pictures) -> ImportedChat:
    chat = ImportedChat(_text(raw.get("title")), _text(raw.get("model")), _parameters(raw.get("parameters")))
    chat.tags = _tags(raw.get("tags"))
    nodes: dict[Any, _Node] = {}
    previous: Any = None
    for place, value in enumerate(_list(raw.get("messages"))):
        one = _dict(value)
        key = _key(one.get("id"), place)
        parent = _key(one.get("parent_id"), None) if "parent_id" in one else previous
        nodes[key] = _Node(parent, _own_message(one, chat.left_out))
        previous = key
    return _grow(chat, nodes, _key(raw.get("shown"), previous))


def _own_message(one: dict[str, Any], left_out: Counter[str]) -> Message | None:
    try:
        role = Role(one["role"])
        message = _message(role, _text(one["content"]), _seconds(one.get("created")), _text(one.get("model")))
        message.reasoning, message.summary = _text(one.get("reasoning")), _text(one.get("summary"))
        message.finish_reason, message.error = one.get("finish_reason"), one.get("error")
        message.stats = dict(one.get("stats") or {})
        message.attachments = tuple(Attachment.stored(file) for file in one.get("attachments") or ())
        message.calls = tuple(ToolCall(**call) for call in one.get("calls") or ())
        message.check()
        if role is Role.TOOL and len(message.calls) != 1:
            raise ValueError("a result of a tool belongs to one call")
        return message
    except (ValueError, TypeError, KeyError):
        left_out["damaged message"] += 1
        return None


def _read_llama(raw: dict[str, Any], files: _Pictures) -> ImportedChat:
    """https://github.com/ggml-org/llama.cpp, tools/ui/src/lib/types/database.d.ts."""
    about = _dict(raw["conv"])
    chat = ImportedChat(_text(about.get("name")), times=(0.0, _seconds(about.get("lastModified"))))
    nodes: dict[Any, _Node] = {}
    calls: dict[str, ToolCall] = {}
    for place, value in enumerate(_list(raw.get("messages"))):
        one = _dict(value)
        message = None
        if one.get("role") == "system" or one.get("type") == "root":
            chat.parameters = chat.parameters or _parameters({"system": _text(one.get("content"))})
        elif one.get("role") in tuple(Role):
            role = Role(one["role"])
            message = _message(role, _text(one.get("content")), _seconds(one.get("timestamp")), _text(one.get("model")))
            if role is Role.ASSISTANT:
                message = _answer_of(message, chat.left_out)
                thoughts = one.get("reasoningContent") or one.get("thinking")
                message.reasoning = _text(thoughts).strip() or message.reasoning
                made = dict(_calls(one.get("toolCalls")))
                message.calls, calls = tuple(made.values()), calls | made
            elif role is Role.TOOL:
                message.calls = (calls.get(_text(one.get("toolCallId")), ToolCall("tool", {})),)
            if role is Role.USER:
                message.attachments = tuple(_llama_files(_list(one.get("extra")), files, chat.left_out))
            chat.model = message.model or chat.model
        nodes[_key(one.get("id"), place)] = _Node(
            _key(one.get("parent"), None), message, [_key(child, None) for child in _list(one.get("children"))]
        )
    return _grow(chat, nodes, _key(about.get("currNode"), None))


def _llama_files(extra: Sequence[Any], files: _Pictures, left_out: Counter[str]) -> Iterator[Attachment]:
    for file in map(_dict, extra):
        name, kind = _text(file.get("name")) or "file", _text(file.get("type")).lower()
        if kind in ("image", "imagefile") or file.get("processedAsImages") is True:
            for url in _list(file.get("images")) or [file.get("base64Url")]:
                picture = files.of_url(name, _text(url))
                if picture is None:
                    left_out["picture"] += 1
                else:
                    yield picture
        elif isinstance(file.get("content"), str):
            yield Attachment(name, _text(file["content"]))
        else:
            left_out["file"] += 1


def _calls(value: Any) -> Iterator[tuple[str, ToolCall]]:
    """OpenAI's tool calls by their ids; llama.cpp's page stores them as a JSON text."""
    with suppress(ValueError):
        value = parsed(value) if isinstance(value, str) and value else value
    for place, call in enumerate(map(_dict, _list(value))):
        function = _dict(call.get("function"))
        text = _text(function.get("arguments"))
        arguments: Any = None
        with suppress(ValueError):
            arguments = parsed(text)
        known = arguments if isinstance(arguments, dict) else {"arguments": text}
        yield _text(call.get("id")) or str(place), ToolCall(_text(function.get("name")) or "tool", known)


def _read_open_webui(raw: dict[str, Any], files: _Pictures) -> ImportedChat:
    """https://github.com/open-webui/open-webui, src/lib/components/chat/Chat.svelte: the history of a chat."""
    body = _dict(raw["chat"])
    models = _list(body.get("models"))
    chat = ImportedChat(_text(raw.get("title") or body.get("title")), _text(models[0]) if models else "")
    system = _text(_dict(body.get("params")).get("system")) or _text(body.get("system"))
    chat.parameters = _parameters({"system": system})
    chat.times = _seconds(raw.get("created_at") or body.get("timestamp")), _seconds(raw.get("updated_at"))
    tags = _list(_dict(raw.get("meta")).get("tags")) or [_dict(tag).get("name") for tag in _list(body.get("tags"))]
    chat.tags = _tags(tags)
    history = _dict(body.get("history"))
    messages = _dict(history.get("messages"))
    shown = _key(history.get("currentId"), None)
    if not messages:  # chats of before its trees
        texts = [_dict(one) for one in _list(body.get("messages"))]
        messages = {str(place): one | {"parentId": str(place - 1)} for place, one in enumerate(texts)}
    nodes: dict[Any, _Node] = {}
    for key, value in messages.items():
        one = _dict(value)
        message = None
        if one.get("role") in (Role.USER, Role.ASSISTANT):
            role = Role(one["role"])
            message = _message(role, _text(one.get("content")), _seconds(one.get("timestamp")), _text(one.get("model")))
            if role is Role.USER:
                message.attachments = tuple(_open_webui_files(_list(one.get("files")), files, chat.left_out))
            else:
                message = _answer_of(message, chat.left_out)
                if one.get("done") is False:
                    message.finish_reason = FinishReason.CANCELLED
                if error := one.get("error"):
                    message.finish_reason = FinishReason.ERROR
                    message.error = _text(error) or _text(_dict(error).get("content")) or "The answer failed."
        elif one.get("role") == "system":
            chat.parameters = chat.parameters or _parameters({"system": _text(one.get("content"))})
        children = [_key(child, None) for child in _list(one.get("childrenIds"))]
        nodes[key] = _Node(_key(one.get("parentId"), None), message, children)
    return _grow(chat, nodes, shown)


def _open_webui_files(listed: Sequence[Any], files: _Pictures, left_out: Counter[str]) -> Iterator[Attachment]:
    for file in map(_dict, listed):
        inner = _dict(file.get("file"))
        name = _text(file.get("name")) or _text(inner.get("filename")) or "file"
        content = _dict(inner.get("data")).get("content")
        is_picture = file.get("type") == "image" or _text(file.get("content_type")).startswith("image/")
        picture = files.of_url(name, _text(file.get("url"))) if is_picture else None
        if picture is not None:
            yield picture
        elif is_picture:
            left_out["picture"] += 1
        elif isinstance(content, str) and content:
            yield Attachment(name, _text(content))
        else:
            left_out["file"] += 1


def _read_chatgpt(raw: dict[str, Any], files: _Pictures) -> ImportedChat:
    chat = ImportedChat(_text(raw.get("title")), _text(raw.get("default_model_slug")))
    chat.times = _seconds(raw.get("create_time")), _seconds(raw.get("update_time"))
    nodes: dict[Any, _Node] = {}
    for key, value in _dict(raw["mapping"]).items():
        node = _dict(value)
        message = _chatgpt_message(_dict(node.get("message")), files, chat.left_out)
        if message is not None and message.model:
            chat.model = message.model
        children = [_key(child, None) for child in _list(node.get("children"))]
        nodes[key] = _Node(_key(node.get("parent"), None), message, children)
    return _grow(chat, nodes, _key(raw.get("current_node"), None))


def _chatgpt_message(one: dict[str, Any], files: _Pictures, left_out: Counter[str]) -> Message | None:
    """A message, or None for what ChatGPT does not show: instructions, memories, summaries of thoughts."""
    author, about, body = _dict(one.get("author")), _dict(one.get("metadata")), _dict(one.get("content"))
    kind = body.get("content_type")
    hidden = about.get("is_visually_hidden_from_conversation") is True
    if author.get("role") not in tuple(Role) or hidden or kind in _CHATGPT_HIDDEN:
        return None
    role = Role(author["role"])
    message = _message(role, "", _seconds(one.get("create_time")), _text(about.get("model_slug")))
    texts: list[str] = [_text(body.get("text"))]
    attached: list[Attachment] = []
    for part in _list(body.get("parts")):
        if isinstance(part, str):
            texts.append(_text(part))
        elif isinstance(_dict(part).get("text"), str):  # the transcript of what was said
            texts.append(_text(part["text"]))
        elif pointer := _text(_dict(part).get("asset_pointer")):
            name = f"picture-{len(attached) + 1}"
            picture = files.attachment(name, files.read(pointer)) if role is Role.USER else None
            if picture is None:
                left_out["picture"] += 1
            else:
                attached.append(picture)
    text, recipient = _MARKS.sub("", "\n\n".join(filter(None, texts))), _text(one.get("recipient"))
    message.attachments = tuple(attached)
    if kind == "thoughts":
        thoughts = [_dict(thought) for thought in _list(body.get("thoughts"))]
        parts = [_text(thought.get(name)) for thought in thoughts for name in ("summary", "content")]
        message.reasoning = "\n\n".join(filter(None, parts))
    elif role is Role.ASSISTANT and recipient not in ("", "all"):
        message.calls = (ToolCall(recipient, {"input": text}),)
    else:
        message.content = text
        if role is Role.TOOL:
            message.calls = (ToolCall(_text(author.get("name")) or "tool", {}),)
    return message


_CHATGPT_HIDDEN = frozenset({"reasoning_recap", "user_editable_context", "model_editable_context"})


class _Source(NamedTuple):
    """A format of exports. mark, kind: a field that its chats have, and its type."""

    program: str
    mark: str
    kind: type
    read: Callable[[dict[str, Any], _Pictures], ImportedChat]


SOURCES = (
    _Source("ChatGPT", "mapping", dict, _read_chatgpt),
    _Source("llama.cpp's web page", "conv", dict, _read_llama),
    _Source("Open WebUI", "chat", dict, _read_open_webui),
    _Source("localllm", "messages", list, _read_own),
)


# ---- values of unknown types


def _text(value: Any) -> str:
    """A text, without halves of surrogate pairs; "" for anything else."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _key(value: Any, otherwise: Any) -> Any:
    return value if isinstance(value, str | int) else otherwise


def _seconds(value: Any) -> float:
    """A time in seconds since the epoch, of one in seconds, milliseconds or nanoseconds; 0.0 for no sensible time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        return 0.0
    while value > 1e11:
        value /= 1000
    return float(value) if value > 0 else 0.0


def _parameters(value: Any) -> dict[str, Any]:
    """The parameters that an export may set: none that turns on tools or names a folder."""
    return {
        name: one
        for name, one in _dict(value).items()
        if name in NAMES and name not in OF_THE_CHAT and isinstance(one, str | int | float) and one != ""
    }


def _tags(value: Any) -> tuple[str, ...]:
    tags: list[str] = []
    for word in _list(value):
        with suppress(RequestError):
            tags.append(tag_of("-".join(_text(word).split())))
    return tuple(dict.fromkeys(tags))
