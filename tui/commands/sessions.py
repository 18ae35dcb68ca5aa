"""Commands on whole conversations and their tabs."""

import io
from contextlib import closing

from textual.content import Content

from localllm.background import in_thread
from localllm.chats import SessionStore
from localllm.chats.exporting import export as export_text
from localllm.chats.exporting import file_name
from localllm.chats.importing import KNOWN, FoundExport, compare, read_export, take
from localllm.chats.store import change_tags
from localllm.errors import RequestError
from localllm.files import user_path
from localllm.text import counted
from tui.screens.chat import ChatScreen
from tui.terminal import in_browser
from tui.widgets.frame import preview

MOST_TITLES = 8  # of chats to import, in the question


async def new(chat: ChatScreen, _argument: str) -> None:
    """Start a new chat; if an answer is running, ask first."""
    await chat.unless_busy("Start a new chat?", lambda: _start_new(chat))


async def _start_new(chat: ChatScreen) -> None:
    await chat.stop()
    chat.conversation.clear()
    await _show(chat)


async def browse(chat: ChatScreen, argument: str) -> None:
    from tui.screens.sessions import SessionsScreen

    def closed(session_id: int | None) -> None:
        chat.app.run_worker(chat.attempt(_after_list(chat, session_id)))  # stopping an answer would block the app

    chat.app.push_screen(SessionsScreen(chat.conversation.store, argument), closed)


async def _after_list(chat: ChatScreen, session_id: int | None) -> None:
    """Update the tabs, whose chats may have been deleted or renamed in the list; then open the chosen chat, if any."""
    for tab in [*chat.tabs.all]:
        if tab.conversation.is_deleted:
            await _start_new(tab)
        else:
            tab.show_title()
    if session_id is not None:
        await open_session(chat, session_id)


async def open_session(chat: ChatScreen, session_id: int) -> None:
    """Open a stored chat, or switch to the tab that shows it. Does not change the model."""
    if tab := next((tab for tab in chat.tabs.all if tab.conversation.session_id == session_id), None):
        await chat.tabs.show(tab)
        return

    async def replace_chat() -> None:
        await chat.stop()
        chat.conversation.open(session_id)
        await _show(chat)

    await chat.unless_busy("Open another chat here?", replace_chat)


async def _show(chat: ChatScreen) -> None:
    """Redraw after the conversation was replaced, including its context usage."""
    messages = chat.conversation.messages
    chat.status_line.facts.recall(messages[-1].stats if messages else {})
    chat.status_line.redraw()
    await chat.show_conversation()
    chat.prompt.focus()


async def rename(chat: ChatScreen, argument: str) -> None:
    """Rename the chat; without a title, put the current one into the prompt."""
    session_id = _stored(chat)
    if not argument:
        chat.prompt.replace_draft(f"/rename {chat.conversation.title}")
        return
    chat.workers.cancel_group(chat, "title")
    chat.conversation.store.rename(session_id, argument)
    chat.show_title()


async def tag(chat: ChatScreen, argument: str) -> None:
    """Add tags to the chat, or remove those with a leading minus; without an argument, list all tags."""
    store = chat.conversation.store
    if argument:
        change_tags(store, _stored(chat), argument)
        chat.show_title()
        return
    used = [(f"#{name}", counted(count, "chat"), "") for name, count in store.tags()]
    chat.show_note(used or "No chat has a tag. /tag NAME adds one, /tag -NAME removes it.")


async def delete(chat: ChatScreen, _argument: str) -> None:
    session_id = _stored(chat)
    await chat.stop()
    chat.conversation.store.delete(session_id)
    chat.deleted = session_id
    await _start_new(chat)
    chat.notify("Deleted. /undo brings it back.")


async def undo(chat: ChatScreen, _argument: str) -> None:
    """Restore the last deleted chat; if there is none, undo the last file change."""
    if chat.deleted is None:
        if chat.busy:
            raise RequestError("An answer is still running. Esc stops it.")
        if text := await chat.tools.undo():
            chat.show_note(Content.assemble("Undone:\n", preview(text, is_diff=True)))
        return
    chat.conversation.store.restore(chat.deleted)
    await open_session(chat, chat.deleted)
    chat.deleted = None


async def export(chat: ChatScreen, argument: str) -> None:
    """Write the chat to a file. An existing file is never replaced.

    Markdown has the shown messages. JSON, if the name ends with .json, has all branches and can be imported. In a
    browser, the file is downloaded.
    """
    _stored(chat)
    conversation = chat.conversation
    path = user_path(argument or ".md")
    if path.name in (".md", ".json"):  # only an ending: without a name the file would be hidden
        path = path.with_name(file_name(conversation.title, path.name))
    text = export_text(conversation, path.suffix == ".json")
    if in_browser():
        name = path.name if path.name.isascii() else f"chat{path.suffix}"  # it goes into a header
        chat.app.deliver_text(io.StringIO(text), save_filename=name)
        chat.show_note(f"The browser downloads {name}.")
        return
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise RequestError(f"{path} exists already. Give another name: /export NAME.") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}. Give another name: /export NAME.") from error
    chat.show_note(f"Written to {path.absolute()}")


async def import_chats(chat: ChatScreen, argument: str) -> None:
    """Import the chats of a file that localllm or another program exported, after asking."""
    from tui.screens.question import QuestionScreen

    if not argument:
        raise RequestError(f"Name the file of exported chats: /import FILE. It may be {KNOWN}.")
    path, file = user_path(argument), chat.conversation.store.file

    def look() -> FoundExport:
        with closing(SessionStore(file)) as store:
            return compare(read_export(path), store)

    def store_them() -> list[int]:
        with closing(SessionStore(file)) as store:
            return take(found.new, store)

    async def do() -> None:
        stored = await in_thread(store_them)
        chat.notify(f"Imported {counted(len(stored), 'chat')}. F3 lists them.")
        if len(stored) == 1:
            await open_session(chat, stored[0])

    def chosen(sure: bool | None) -> None:
        if sure:
            chat.app.run_worker(chat.attempt(do()))

    found = await in_thread(look)
    if not found.new:
        chat.show_note(f"{found.summary} There is nothing to import.")
        return
    titles = [chat.title for chat in found.new]
    more = f"\n... and {len(titles) - MOST_TITLES} more" if len(titles) > MOST_TITLES else ""
    question = "\n".join([found.summary, *titles[:MOST_TITLES]]) + more
    chat.app.push_screen(QuestionScreen(question, "Do not import", "Import"), chosen)


async def leave(chat: ChatScreen, _argument: str) -> None:
    """Quit; a running answer is saved as it is."""
    await chat.app.action_quit()


def _stored(chat: ChatScreen) -> int:
    if chat.conversation.session_id is None:
        raise RequestError("This chat has no messages yet.")
    return chat.conversation.session_id


async def open_tab(chat: ChatScreen, _argument: str) -> None:
    await chat.tabs.show(chat.tabs.add())


async def close_tab(chat: ChatScreen, _argument: str) -> None:
    """Close this tab; its chat stays in the list. A running answer is stopped and saved as it is."""
    if len(chat.tabs.all) == 1:
        raise RequestError("This is the only tab. /new starts a new chat in it, /quit leaves.")
    await chat.stop()
    unsent, pasted = chat.prompt.unsent, chat.prompt.pasted
    await chat.tabs.close(chat)
    chat.tabs.current.take_over(unsent, pasted)


async def next_tab(chat: ChatScreen, argument: str) -> None:
    """Go to the next tab, or to the tab with the given number."""
    tabs = chat.tabs
    if not argument:
        await tabs.step(1)
    elif argument.isdecimal() and 1 <= int(argument) <= len(tabs.all):
        await tabs.show(tabs.all[int(argument) - 1])
    else:
        raise RequestError(f"There is no tab {argument}. Tabs are numbered from 1 to {len(tabs.all)}.")


async def previous_tab(chat: ChatScreen, _argument: str) -> None:
    await chat.tabs.step(-1)
