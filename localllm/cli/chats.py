"""localllm chats: lists the stored chats, and imports chats of other programs."""

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.errors import RequestError
from localllm.front.terminal import answer, note
from localllm.settings import sessions_path
from localllm.text import counted, harmless, shortened, table

if TYPE_CHECKING:
    from localllm.chats import SessionSummary


def chats(
    action: Annotated[str | None, typer.Argument(metavar="import", help="Import chats.", show_default=False)] = None,
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE...", help="Exported chats.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be imported.")] = False,
    sessions: Annotated[Path | None, typer.Option(metavar="FILE", help="The stored chats (sessions.db).")] = None,
) -> None:
    """List the stored chats, or import chats of other programs.

    The terminal chat and the page share them. `import` reads exports of localllm (/export NAME.json), llama.cpp's web
    page, Open WebUI and ChatGPT: JSON, JSON lines or ZIP. Branches are kept, as are files and pictures that the export
    contains. Nothing stored is changed, and chats that are here already are not imported again.
    """
    from localllm.chats import SessionStore
    from localllm.chats.importing import compare, read_export, take

    if action not in (None, "import"):
        raise RequestError(f"`localllm chats` has no action {action!r}. Choose import, or none to list the chats.")
    if action and not files:
        raise RequestError("Name the file of exported chats: localllm chats import FILE.")
    if dry_run and not action:
        raise RequestError("--dry-run belongs to `localllm chats import FILE`.")
    with closing(SessionStore(sessions or sessions_path())) as store:
        if not action:
            _list(store.sessions())
            return
        for file in files or ():
            found = compare(read_export(file), store)
            for line in found.lines():
                answer(f"{line}\n")
            if not dry_run:
                take(found.new, store)
            note(f"{found.summary}{' Nothing was imported (--dry-run).' if dry_run else ''}")


def _list(stored: "list[SessionSummary]") -> None:
    if not stored:
        note("There are no chats yet. `localllm` opens one, `localllm chats import FILE` imports some.")
        return
    rows = [
        (
            time.strftime("%Y-%m-%d", time.localtime(one.updated)),
            str(one.messages),
            shortened(harmless(one.model), 40),
            harmless(one.title),
        )
        for one in stored
    ]
    answer(table([("CHANGED", "MESSAGES", "MODEL", "TITLE"), *rows], right=[1]))
    note(f"{counted(len(stored), 'chat')}. `localllm chat` opens them with F3.")
