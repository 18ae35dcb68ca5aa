"""The folder of documents that a chat searches, and the attachments of a message."""

import asyncio
import base64
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.background import in_thread
from localllm.chats import Attachment
from localllm.errors import RequestError
from localllm.settings import load_settings
from tui.attachments import find_attachments
from tui.screens.chat_view import ChatView
from tui.widgets.frame import Row

if TYPE_CHECKING:
    from localllm.wings.documents.folder import IndexedFolder

EMBED_S = 30.0  # embedding time when a folder is opened; remaining chunks are found by keyword only
ASSUMED_CONTEXT = 8192  # tokens, for a server that does not report its context
_REDRAW_S = 0.1


class ChatFolder:
    """The folder set in the conversation's parameters, opened and indexed on first use. `close` frees it."""

    def __init__(self, chat: ChatView) -> None:
        self._chat = chat
        self._conversation, self._backend, self._status_line = chat.conversation, chat.backend, chat.status_line
        self._opened: IndexedFolder | None = None
        self._lock = threading.Lock()  # one thread at a time opens, and searches by meaning
        self._stop = threading.Event()

    async def attachments(self, text: str, known: Sequence[Attachment], strict: bool) -> tuple[Attachment, ...]:
        """The files that a text names, and matching excerpts from the folder. For the rest, see find_attachments."""
        counts = self._backend.count_tokens, self._chat.see_picture
        plain = [file for file in known if not file.line]
        named = await in_thread(lambda: find_attachments(text, *counts, plain, strict))
        folder = self._conversation.parameters.folder
        if not folder:
            return named
        opened = await self.open(folder)
        found, warnings = await in_thread(lambda: self._excerpts(opened, text))
        if not found and not named:
            raise RequestError(f"Nothing in {folder} fits that. /folder off asks the model without documents.")
        for warning in warnings:
            self._chat.notify(warning, severity="warning", markup=False)
        return (*found, *named)

    async def open(self, folder: str) -> "IndexedFolder":
        """Index what has changed in a folder, with progress in the status line. Raises RequestError."""
        facts = self._status_line.facts
        work = asyncio.ensure_future(in_thread(lambda: self._open(folder)))
        try:
            while not work.done():
                self._status_line.redraw()
                await asyncio.wait([work], timeout=_REDRAW_S)
            return work.result()
        finally:
            facts.activity = None
            self._status_line.redraw()

    def close(self) -> None:
        """Stop running work and free everything. Idempotent."""
        self._stop.set()
        if self._lock.acquire(timeout=1):
            self._close()
            self._lock.release()

    def _open(self, folder: str) -> "IndexedFolder":
        from localllm.wings.documents.folder import IndexedFolder

        with self._lock:
            if self._opened is None or self._opened.index.folder != Path(folder):
                self._close()
                self._opened = IndexedFolder(Path(folder), load_settings({}))
            self._opened.update(self._indexed, self._embedded, EMBED_S)
            return self._opened

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _indexed(self, done: int, total: int) -> None:
        if self._stop.is_set():
            raise RequestError("The chat has ended.")
        self._status_line.facts.activity = (f"indexing {total} files", done / max(total, 1))

    def _embedded(self, done: int, total: int) -> bool:
        self._status_line.facts.activity = (f"embedding {total} chunks", done / max(total, 1))
        return not self._stop.is_set()

    def _excerpts(self, opened: "IndexedFolder", question: str) -> tuple[list[Attachment], list[str]]:
        """The excerpts for a question, and warnings for the user."""
        info, count = self._backend.info, self._backend.count_tokens
        context = self._conversation.parameters.ctx or (info and info.context) or ASSUMED_CONTEXT
        room = context // (4 if self._conversation.messages else 2)  # leave space for other turns
        with self._lock:
            most = self._conversation.parameters.image_max_tokens
            found, warnings = opened.excerpts(question, room, count, bool(info and info.sees), most)
        files = []
        for each, picture in found:
            view = self._chat.see_picture(picture) if picture else None
            tokens = (view.tokens if view else None) if picture else count(each.text)
            encoded = base64.b64encode(picture).decode()
            files.append(Attachment(each.name, each.text, tokens, encoded, each.line, each.page))
        return files, warnings


def folder_note(folder: str, opened: "IndexedFolder") -> list[Row]:
    return [("folder", folder, ""), *((name, text, "") for name, text in opened.facts())]
