"""Commands on whole conversations."""

from typing import TYPE_CHECKING

from localllm.errors import RequestError
from localllm.files import user_path
from tui.sessions.export import as_json, as_markdown

if TYPE_CHECKING:
    from tui.screens.chat import ChatScreen


async def new(chat: "ChatScreen", _argument: str) -> None:
    """Begin a new chat; the present one stays in the list."""
    await chat.stop()
    chat.conversation.clear()
    await _show(chat)


async def browse(chat: "ChatScreen", argument: str) -> None:
    """List the sessions, with what is looked for, and open the one chosen."""
    from tui.screens.sessions import SessionsScreen

    async def opened(session_id: int | None) -> None:
        if session_id is not None:
            await open_session(chat, session_id)
        elif chat.conversation.session_id not in {entry.id for entry in chat.conversation.store.sessions()}:
            await new(chat, "")  # the one on the screen was deleted
        else:
            chat.title_bar.title = chat.conversation.title  # it may have another name now

    chat.app.push_screen(SessionsScreen(chat.conversation.store, argument), opened)


async def open_session(chat: "ChatScreen", session_id: int) -> None:
    """Show a stored session; the model stays."""
    await chat.stop()
    chat.conversation.open(session_id)
    await _show(chat)


async def _show(chat: "ChatScreen") -> None:
    """Show a conversation that took another one's place, and what it took of the context."""
    messages = chat.conversation.messages
    chat.status_line.facts.recall(messages[-1].stats if messages else {})
    chat.status_line.redraw()
    await chat.show_conversation()
    chat.prompt.focus()


async def rename(chat: "ChatScreen", argument: str) -> None:
    """Give the chat a title; without one, bring the present title into the prompt."""
    session_id = _stored(chat)
    if not argument:
        chat.prompt.put(f"/rename {chat.conversation.title}")
        return
    chat.conversation.store.rename(session_id, argument)
    chat.title_bar.title = argument


async def delete(chat: "ChatScreen", _argument: str) -> None:
    """Delete the chat on the screen; /undo brings it back."""
    session_id = _stored(chat)
    await chat.stop()
    chat.conversation.store.delete(session_id)
    chat.deleted = session_id
    await new(chat, "")
    chat.notify("Deleted. /undo brings it back.")


async def undo(chat: "ChatScreen", _argument: str) -> None:
    """Bring the chat back that was deleted last."""
    if chat.deleted is None:
        raise RequestError("Nothing was deleted in this run.")
    chat.conversation.store.restore(chat.deleted)
    await open_session(chat, chat.deleted)
    chat.deleted = None


async def export(chat: "ChatScreen", argument: str) -> None:
    """Write the chat to a file: Markdown, or JSON where the name ends so. An existing file is not replaced."""
    _stored(chat)
    title = chat.conversation.title
    name = argument or "".join(letter if letter.isalnum() else "-" for letter in title).strip("-").lower() + ".md"
    path = user_path(name)
    write = as_json if path.suffix == ".json" else as_markdown
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(write(title, chat.conversation.messages))
    except FileExistsError as error:
        raise RequestError(f"{path} exists already. Give another name: /export NAME.") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}. Give another name: /export NAME.") from error
    chat.notify(f"Written to {path.absolute()}", markup=False)


async def leave(chat: "ChatScreen", _argument: str) -> None:
    """Leave the program; the answer on its way is kept as far as it has come."""
    await chat.app.action_quit()


def _stored(chat: "ChatScreen") -> int:
    if chat.conversation.session_id is None:
        raise RequestError("Nothing has been said in this chat yet.")
    return chat.conversation.session_id
