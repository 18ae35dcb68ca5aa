"""/api/chats: the chats that the terminal chat stores too, and answers to them, which go on without their client."""

import base64
import binascii
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote, urlsplit

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field
from starlette.types import Scope

from cpu_kernels.limits import available_memory
from gguf_io.media import is_sound
from localllm.actions.approvals import Decision, rule_for
from localllm.chats import Attachment, Message, Role, SessionStore, SessionSummary
from localllm.chats.attaching import MAX_TEXT_BYTES, attachments_of
from localllm.chats.conversation import Conversation
from localllm.chats.exporting import export, file_name
from localllm.chats.importing import Export, compare, read_export, take
from localllm.chats.parameters import NAMES, PRESETS, RANGES, Parameters
from localllm.chats.saved import read_persona, read_prompt, save_persona, save_prompt, saved_names
from localllm.chats.store import split_search, tag_of
from localllm.choices import described, suggested
from localllm.errors import RequestError
from localllm.files import TEMPORARY
from localllm.remote.connection import is_local
from localllm.server.bodies import Object
from localllm.server.chats.chats import Chats
from localllm.server.chats.markdown import rendered
from localllm.server.chats.schema import (
    AnswerBody,
    AskBody,
    BeginBody,
    ChangeBody,
    DecisionBody,
    FileBody,
    ImportBody,
    PlaceBody,
    RenderBody,
    SaveBody,
    TurnBody,
    UndoBody,
)
from localllm.server.errors import ApiError
from localllm.server.json_body import ProtocolRoute
from localllm.server.keys import namespace_of, user_of
from localllm.server.served import ServedModels
from localllm.server.service import Service, ServiceDep
from localllm.server.streams import streamed
from localllm.server.wire import NDJSON, ndjson
from localllm.settings import sessions_path
from localllm.text import harmless

MAX_LISTED = 1000
_PICTURES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
    b"RIFF": "image/webp",
}
"""What browsers show of attached pictures."""


class AllChats:
    """The chats of every user of a server, opened when they are asked for. For the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._of: dict[str, Chats] = {}

    def of(self, scope: Scope) -> Chats:
        """The chats of a request's user. Raises ApiError 403 if anybody might be asking."""
        options = self._service.options
        if not options.keys and not is_local(options.settings.host):
            raise ApiError(403, "chats need an API key on a server that other machines can reach: set LOCALLLM_API_KEY")
        user = user_of(namespace_of(scope), options.keys)
        if user not in self._of:
            self._of[user] = Chats(chats_path(user), self._service, is_own=not user)
        return self._of[user]

    def leave(self) -> None:
        """The server stops."""
        for chats in self._of.values():
            chats.leave()

    async def close(self) -> None:
        """Save and close all chats."""
        for chats in self._of.values():
            await chats.close()


def chats_path(user: str) -> Path:
    """The database of a user's chats: the terminal chat's, or a file of its own for each of several users."""
    path = sessions_path()
    return path.with_name(f"sessions-of-{user.casefold()}.db") if user else path


def same_origin(request: Request) -> None:
    """Refuse requests of other pages, also of those that may use the models. Raises ApiError 403."""
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
    if site not in ("same-origin", "none") or (origin and urlsplit(origin).netloc != request.headers.get("host")):
        raise ApiError(403, "chats are only for the page of this server and for programs, not for other pages")


def chats_of(request: Request) -> Chats:
    """The chats of the request's user."""
    return cast("AllChats", request.app.state.chats).of(request.scope)


router = APIRouter(route_class=ProtocolRoute, tags=["Chats"], dependencies=[Depends(same_origin)])

ChatsDep = Annotated[Chats, Depends(chats_of)]
ChatId = Annotated[int, Field(ge=0, le=2**63 - 1)]
SavedKind = Literal["prompt", "persona"]


@router.get("/api/chats")
async def list_chats(
    chats: ChatsDep, search: str = "", limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 200
) -> Object:
    """List chats, newest first. search: text in titles and messages, and tags such as #work."""
    text, tags = split_search(search)
    found = await chats.work(lambda store: store.sessions(text, limit, tags))
    answering = chats.answering
    return {"chats": [{**_summary(one, text), "answering": one.id in answering} for one in found]}


@router.post("/api/chats")
async def begin_chat(body: BeginBody, request: Request, chats: ChatsDep, service: ServiceDep) -> Object:
    """Begin a chat with a prompt, and have the model answer it. Returns the chat's id."""
    conversation = await chats.new(body.model)
    conversation.parameters = _changed(conversation, body.parameters, chats)
    await _ask(conversation, body, (), request, chats, service)
    return {"chat": conversation.session_id}


@router.get("/api/chats/events")
async def chat_events(chats: ChatsDep, chat: ChatId | None = None) -> Response:
    """Follow what happens, as lines of JSON: new versions of the list and of one chat, and its answer as it is written.

    An answer's line replaces its HTML blocks from `from` on, and its reasoning from `reasoning_from` on.
    """

    async def lines() -> AsyncGenerator[bytes, None]:
        async for event in chats.events(chat):
            yield ndjson(event)

    return await streamed(lines(), lambda error: ndjson({"error": str(error)}), NDJSON, lambda: b"\n")


@router.get("/api/chats/options")
async def chat_options(chats: ChatsDep, model: str = "") -> Object:
    """The parameters of a chat with their ranges and the model's defaults, the presets of samplers, saved prompts and
    personas by name, and where tools may be used.
    """
    defaults = await chats.defaults(model)
    return {
        "parameters": [_parameter(name, defaults) for name in NAMES if name not in _ELSEWHERE],
        "presets": PRESETS,
        "prompts": saved_names("prompt") if chats.is_own else None,
        "personas": saved_names("persona") if chats.is_own else None,
        "tools": None if chats.folder is None else str(chats.folder),
    }


@router.get("/api/chats/models")
async def model_choices(service: ServiceDep) -> Object:
    """Memory and expected speed of models before they are loaded, and models to download that suit this machine.

    memory is for a model with a conversation of some length; speed, in tokens per second, is null until `localllm
    bench` has measured the machine. Status 501 if the models are on another server.
    """
    return await to_thread.run_sync(_choices, service.models)


@router.post("/api/chats/import")
async def import_chats(body: ImportBody, chats: ChatsDep) -> Object:
    """Import chats that localllm or another program has exported; chats that are here already are left out."""
    data = _bytes(body.name, body.data)

    def read() -> Export:
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
            path = Path(folder, "export")
            path.write_bytes(data)
            try:
                return read_export(path)
            except RequestError as error:
                raise RequestError(str(error).replace(str(path), body.name)) from error

    given = await to_thread.run_sync(read)
    found = await chats.work(lambda store: compare(given, store))
    stored = await chats.work(lambda store: take(found.new, store)) if body.stores and found.new else []
    for chat in stored:
        chats.changed(chat)
    return {"summary": found.summary, "new": len(found.new), "chats": stored}


@router.get("/api/chats/saved/{kind}/{name}")
async def show_saved(kind: SavedKind, name: str, chats: ChatsDep) -> Object:
    """A saved prompt, or a persona's parameters, as text, and its model."""
    chats.check_own()
    if kind == "prompt":
        return {"text": await to_thread.run_sync(read_prompt, name)}
    persona = await to_thread.run_sync(read_persona, name)
    return {"parameters": persona.values, "model": persona.model}


@router.post("/api/chats/saved/{kind}/{name}")
async def save(kind: SavedKind, name: str, body: SaveBody, chats: ChatsDep) -> Object:
    """Save a prompt, or the parameters that differ from the model's defaults as a persona, under a new name."""
    chats.check_own()
    if kind == "prompt":
        path = await to_thread.run_sync(save_prompt, name, body.text)
    else:
        conversation = await chats.new(body.model)
        parameters, defaults = _changed(conversation, body.parameters, chats), conversation.defaults
        path = await to_thread.run_sync(save_persona, name, parameters, defaults, body.model)
    return {"path": str(path)}


@router.get("/api/chats/{chat}")
async def show_chat(chat: ChatId, chats: ChatsDep) -> Object:
    """A chat: its parameters that differ from the defaults, and the shown path through its messages, as HTML too."""
    conversation = await chats.open(chat)
    running = chats.running(chat)
    if running is not None and running.message is not None:
        _take_over(conversation, running.message)

    def read(store: SessionStore) -> Object:
        messages = [_message(one, conversation.variant(one)) for one in conversation.messages]
        return {**_summary(store.summary(chat)), "messages": messages, "unsaved": store.unsaved}

    shown = await chats.work(read)
    for row, message in zip(shown["messages"], conversation.messages, strict=True):
        row["html"] = await to_thread.run_sync(rendered, conversation.checked(message)) if message.content else []
    now, usual = conversation.parameters, conversation.defaults
    changed = [name for name in NAMES if getattr(now, name) != getattr(usual, name)]
    return shown | {
        "parameters": {name: now.text(name) for name in changed},
        "state": running.state if running else None,
        "note": chats.note_of(chat),
    }


@router.post("/api/chats/{chat}")
async def change_chat(chat: ChatId, body: ChangeBody, chats: ChatsDep) -> Object:
    """Rename or tag a chat, delete or restore it, or change the model and the parameters of its next answers."""
    conversation = await chats.open(chat)
    if body.model is not None and body.model != conversation.model:
        own = await chats.defaults(body.model)
        conversation.set_defaults(own)
    parameters = _changed(conversation, body.parameters, chats)
    tags = None if body.tags is None else {tag_of(tag) for tag in body.tags}

    def change(store: SessionStore) -> None:
        if body.model is not None or body.parameters:
            conversation.model = body.model or conversation.model
            conversation.set_parameters(parameters)
        if body.title is not None:
            store.rename(chat, body.title)
        if tags is not None:
            present = set(store.summary(chat).tags)
            for tag in tags - present:
                store.tag(chat, tag)
            for tag in present - tags:
                store.untag(chat, tag)
        if body.deleted is not None:
            (store.delete if body.deleted else store.restore)(chat)

    await chats.work(change)
    chats.changed(chat)
    return {"chat": chat}


@router.post("/api/chats/{chat}/messages")
async def ask_chat(chat: ChatId, body: AskBody, request: Request, chats: ChatsDep, service: ServiceDep) -> Object:
    """Ask the next prompt, or edit an earlier one (the old path stays as a variant), and have the model answer."""
    async with chats.one_change:
        chats.check_idle(chat)
        conversation = await chats.open(chat)
        kept: Sequence[Attachment] = ()
        if body.edits is not None:
            edited = _message_of(conversation, body.edits, Role.USER)
            kept = [file for place, file in enumerate(edited.attachments) if place in body.kept]
        await _ask(conversation, body, kept, request, chats, service)
    return {"chat": chat}


@router.post("/api/chats/{chat}/answers")
async def answer_again(chat: ChatId, body: AnswerBody, request: Request, chats: ChatsDep) -> Object:
    """Write an answer again as a variant, the last one by default, or continue the last one."""
    async with chats.one_change:
        chats.check_idle(chat)
        conversation = await chats.open(chat)
        if not conversation.messages:
            raise ApiError(400, "the chat has no messages")
        last = conversation.messages[-1]
        if body.continues and last.role is not Role.ASSISTANT:
            raise ApiError(400, "the chat does not end with an answer that could be continued")
        if not body.continues and (body.message is not None or last.role is Role.ASSISTANT):
            again = last if body.message is None else _message_of(conversation, body.message, Role.ASSISTANT)
            await chats.work(lambda _: conversation.cut_before(again))
        chats.begin(conversation, namespace_of(request.scope), body.continues)
    return {"chat": chat}


@router.post("/api/chats/{chat}/stop")
async def stop_answer(chat: ChatId, chats: ChatsDep) -> Object:
    """Stop the answer that is being written; its text so far stays."""
    running = chats.running(chat)
    if running is not None:
        running.stop()
    return {"stopped": running is not None}


@router.post("/api/chats/{chat}/decision")
async def decide_call(chat: ChatId, body: DecisionBody, chats: ChatsDep) -> Object:
    """Allow or refuse the tool call that waits for it. What is allowed is what was shown."""
    running = chats.running(chat)
    waiting = None if running is None or running.asking is None else running.asking[0]
    if running is None or waiting is None or harmless(waiting.preview) != body.preview:
        raise ApiError(409, "this call does not wait for a decision any more")
    if body.decision in (Decision.CHAT, Decision.ALWAYS) and rule_for(waiting) is None:
        raise ApiError(400, "this call can only be allowed once")
    running.decide(body.decision, body.reason.strip() if body.decision is Decision.REFUSE else "")
    return {"chat": chat}


@router.post("/api/chats/{chat}/undo")
async def undo_change(chat: ChatId, body: UndoBody, chats: ChatsDep) -> Object:
    """Undo the newest change of a file by tools. Another chat's change is shown first, as `ask`: send it as `seen`."""
    async with chats.one_change:
        chats.check_idle(chat)
        tools = chats.tools(await chats.open(chat))
        tools.seen, tools.unseen = body.seen, ""
        undone = await tools.undo()
    return {"undone": undone, "ask": "" if undone else tools.unseen}


@router.post("/api/chats/{chat}/turn")
async def turn_to_variant(chat: ChatId, body: TurnBody, chats: ChatsDep) -> Object:
    """Show the next or the previous variant of a message, with what follows it."""
    async with chats.one_change:
        chats.check_idle(chat)
        conversation = await chats.open(chat)
        message = _message_of(conversation, body.message)
        turned = await chats.work(lambda _: conversation.turn_to_variant(message, body.step))
    chats.changed(chat)
    return {"turned": turned}


@router.post("/api/chats/{chat}/fork")
async def fork_chat(chat: ChatId, body: PlaceBody, chats: ChatsDep) -> Object:
    """Copy a chat up to a message. Returns the copy's id."""
    conversation = await chats.open(chat)
    message = _message_of(conversation, body.message)
    await chats.work(lambda _: conversation.fork(message))
    chats.changed(chat)
    return {"chat": conversation.session_id}


@router.get("/api/chats/{chat}/export")
async def export_chat(chat: ChatId, chats: ChatsDep, form: Literal["markdown", "json"] = "markdown") -> Response:
    """A chat as a file: what is shown as Markdown, or everything as JSON, which can be imported."""
    conversation, as_json = await chats.open(chat), form == "json"
    text = await chats.work(lambda _: export(conversation, as_json))
    name = await chats.work(lambda _: file_name(conversation.title, ".json" if as_json else ".md"))
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    kind = "application/json" if as_json else "text/markdown; charset=utf-8"
    return Response(text.encode(errors="replace"), media_type=kind, headers=headers)


@router.get("/api/chats/{chat}/messages/{message}/files/{place}")
async def attached_file(chat: ChatId, message: ChatId, place: ChatId, chats: ChatsDep) -> Response:
    """A file attached to a message: a picture, a sound, or plain text."""
    files = _message_of(await chats.open(chat), message).attachments
    if place >= len(files):
        raise ApiError(404, "the message has no such file")
    data = files[place].picture_data()
    kind = next((kind for begin, kind in _PICTURES.items() if data.startswith(begin)), "text/plain")
    kind = "audio/wav" if is_sound(data) else kind
    headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'; sandbox"}
    return Response(data or files[place].text.encode(errors="replace"), media_type=kind, headers=headers)


@router.post("/api/render")
async def render_markdown(body: RenderBody) -> Object:
    """Markdown as HTML that is safe to insert into a page, a string for each block."""
    return {"html": await to_thread.run_sync(rendered, body.text)}


def _choices(models: ServedModels) -> Object:
    settings, entries = models.settings, models.entries()
    found = [models.library_model(entry) for entry in entries]
    free, rows = available_memory(), described(found, settings.threads, settings.mmproj)
    return {
        "free": free,
        "models": [
            {"name": entry.name, "memory": row.memory, "fits": row.fits, "speed": row.speed}
            for entry, row in zip(entries, rows, strict=True)
        ],
        "suggestions": [
            {
                "name": one.name,
                "size": one.size,
                "quantization": one.quantization,
                "context": one.context,
                "memory": one.memory,
                "fits": one.memory <= free,
                "speed": speed,
                "suits": one.suits,
                "licence": one.licence,
            }
            for one, speed in suggested(found, settings.threads)
        ],
    }


async def _ask(
    conversation: Conversation,
    body: AskBody,
    kept: Sequence[Attachment],
    request: Request,
    chats: Chats,
    service: Service,
) -> None:
    """Store a prompt, or the new version of one, and begin its answer. Raises RequestError for files."""
    read = [await to_thread.run_sync(_attachments, file) for file in body.files]
    files = (*kept, *chain.from_iterable(read))
    if not body.content.strip() and not files:
        raise ApiError(400, "the prompt is empty")
    with_text = {file.name for file in files if not file.picture}
    media = [file.picture_data() for file in files if file.picture and file.name not in with_text]
    if media:
        models, entry = await service.find(conversation.model)
        senses = await to_thread.run_sync(models.capabilities, entry)
        if "vision" not in senses and not all(map(is_sound, media)):
            raise RequestError(f"{conversation.model} reads text only. Remove the image, or choose a vision model.")
        if "audio" not in senses and any(map(is_sound, media)):
            raise RequestError(f"{conversation.model} hears no sound. Remove it, or choose a model that hears.")

    def store(_: SessionStore) -> None:
        if body.edits is None:
            conversation.ask(body.content, files)
        else:
            conversation.edit(_message_of(conversation, body.edits, Role.USER), body.content, files)

    await chats.work(store)
    chats.begin(conversation, namespace_of(request.scope))


def _attachments(file: FileBody) -> tuple[Attachment, ...]:
    """A file of a request, and its pages that are pictures, as attachments. Raises RequestError."""
    if file.text is None:
        return attachments_of(file.name, _bytes(file.name, file.data or ""))
    if len(file.text) > MAX_TEXT_BYTES:
        raise RequestError(f"{file.name} is larger than {MAX_TEXT_BYTES >> 20} MiB. Attach a part of it.")
    return (Attachment(file.name, file.text),)


def _bytes(name: str, data: str) -> bytes:
    """The bytes of a file in a request. Raises RequestError."""
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{name}: data is not valid base64.") from error


def _message_of(conversation: Conversation, identity: int, role: Role | None = None) -> Message:
    """A message of the shown path. Raises ApiError 404."""
    found = next((one for one in conversation.messages if one.id == identity), None)
    if found is None or (role is not None and found.role is not role):
        raise ApiError(404, f"the chat shows no such {role or 'message'}")
    return found


def _take_over(conversation: Conversation, message: Message) -> None:
    """Show a message that is being written as it is, not as it was last saved."""
    for place, one in enumerate(conversation.messages):
        if one.id == message.id:
            conversation.messages[place] = message


def _changed(conversation: Conversation, values: Mapping[str, str], chats: Chats) -> Parameters:
    """A chat's parameters with some of them changed. Raises RequestError, and ApiError 403 for tools."""
    parameters = conversation.parameters
    for name, text in values.items():
        if name == "tools":
            chats.check_tools()
        elif name in _ELSEWHERE:
            raise RequestError(f"{name} cannot be changed by a request.")
        parameters = parameters.with_text(name, text, conversation.defaults)
    return parameters


# Of the machine that serves: what the settings do not show.
_ELSEWHERE = ("folder", "tools", "rivals")


def _parameter(name: str, defaults: Parameters) -> Object:
    kind = next(str(one.type) for one in fields(Parameters) if one.name == name)
    bounds = RANGES.get(name)
    return {
        "name": name,
        "kind": "switch" if "bool" in kind else "number" if bounds else "text",
        "whole": "int" in kind,
        "default": defaults.text(name),
        **({"low": bounds.low, "high": bounds.high} if bounds else {}),
    }


def _summary(session: SessionSummary, search: str = "") -> Object:
    at = max(session.found.casefold().find(search.casefold()) - 40, 0) if search else 0
    return {
        "id": session.id,
        "title": session.title,
        "model": session.model,
        "updated": session.updated,
        "messages": session.messages,
        "tags": list(session.tags),
        "deleted": session.deleted,
        "found": " ".join(session.found[at : at + 120].split()) if search else "",
    }


def _message(message: Message, variant: tuple[int, int]) -> dict[str, Any]:
    return {
        "id": message.id,
        "role": str(message.role),
        "content": message.content,
        "reasoning": message.reasoning,
        "finish_reason": message.finish_reason,
        "error": message.error,
        "model": message.model,
        "stats": message.stats,
        "files": [
            {"name": file.label, "picture": bool(file.picture), "characters": len(file.text)}
            for file in message.attachments
        ],
        "calls": [asdict(call) for call in message.calls],
        "created": message.created,
        "summary": bool(message.summary),
        "variant": variant[0],
        "variants": variant[1],
    }
