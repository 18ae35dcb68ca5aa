"""Commands on messages: regenerate, continue, edit, copy."""

import re
from functools import partial
from typing import cast

from localllm.chats import Role
from localllm.errors import LocalLLMError, RequestError
from tui.answering import summarise
from tui.editor import edited
from tui.screens.chat import ChatScreen
from tui.widgets.messages import AnswerView, MessageView, ToolView, UserView

_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


async def regenerate(chat: ChatScreen, _argument: str) -> None:
    """Answer again; the earlier answer stays as a variant."""
    view = _answer(chat)
    _require_idle(chat)
    chat.conversation.cut_before(view.message)
    await chat.show_conversation()
    chat.begin_answer()


async def continue_answer(chat: ChatScreen, _argument: str) -> None:
    messages = chat.conversation.messages
    _require_idle(chat)
    if messages and messages[-1].role is Role.TOOL:  # the tool rounds hit their limit, or the program ended
        chat.begin_answer()
        return
    view = _answer(chat)
    if view.message is not chat.conversation.messages[-1]:
        raise RequestError("Only the last answer can be continued. Fork the chat at this message first.")
    if chat.conversation.reread_if_changed(view.message):
        await chat.show_conversation()
        raise RequestError("Another chat has written to this answer. It was read again; /continue goes on from here.")
    chat.begin_answer(view)


async def take_back(chat: ChatScreen, argument: str) -> None:
    """Take a prompt that waits for the running answer back into the field; without a number, all of them."""
    queued = chat.prompt.queued
    if not queued:
        raise RequestError("No prompt is waiting. What you send while an answer runs waits for its end.")
    if not argument:
        chat.prompt.give_back_queue()
    elif argument.isdecimal() and 1 <= int(argument) <= len(queued):
        chat.prompt.give_back(chat.prompt.unqueue(int(argument) - 1))
    else:
        raise RequestError(f"There is no waiting prompt {argument}. They are numbered from 1 to {len(queued)}.")
    chat.prompt.focus()


async def write_in_editor(chat: ChatScreen, _argument: str) -> None:
    """Write the prompt in the user's editor."""
    chat.prompt.put(edited(chat.app, chat.prompt.text))
    chat.prompt.focus()


async def compact(chat: ChatScreen, argument: str) -> None:
    """Replace the oldest turns in requests by the model's own summary; undo: send them again."""
    _require_idle(chat)
    if argument == "undo":
        message = chat.conversation.summed()
        if message is None:
            raise RequestError("No summary is in use in this chat.")
        chat.conversation.set_summary(message, "")
        await chat.show_conversation()
        chat.notify("The messages themselves are sent to the model again.")
    elif argument:
        raise RequestError("/compact summarises the oldest turns, /compact undo reverts that.")
    elif chat.info is None or not chat.info.converses:
        raise RequestError("This needs a chat model. /models chooses one.")
    else:
        chat.begin(partial(_summarise, chat))


async def _summarise(chat: ChatScreen) -> None:
    conversation, backend, facts = chat.conversation, chat.backend, chat.status_line.facts
    try:
        facts.tool = "summarising, Esc stops"
        chat.status_line.redraw()
        if await summarise(conversation, backend, bool(chat.info and chat.info.sees), chat.stopping):
            await chat.show_conversation()
            chat.notify("From now on the model gets the summary. /compact undo reverts it.", timeout=10)
    except LocalLLMError as error:
        chat.show_error(str(error))
    finally:
        facts.tool = ""
        chat.status_line.redraw()


async def edit(chat: ChatScreen, _argument: str) -> None:
    """Edit an earlier message in the prompt; sending it creates a variant."""
    view = _selected(chat, Role.USER)
    _require_idle(chat)
    chat.prompt.begin_edit(view.message)
    chat.prompt.focus()


async def fork(chat: ChatScreen, _argument: str) -> None:
    """Continue in a copy of the chat that ends with the selected message."""
    view = chat.transcript.selected()
    if view is None:
        raise RequestError("There are no messages yet.")
    _require_idle(chat)
    chat.conversation.fork(view.message)
    await chat.show_conversation()
    chat.prompt.focus()
    chat.notify("This is a copy. F3 lists the first chat.")


async def find(chat: ChatScreen, argument: str) -> None:
    """Search the messages of this chat; repeating it goes to the previous match."""
    chat.find.open(argument)


async def copy(chat: ChatScreen, _argument: str) -> None:
    """Copy a message to the clipboard, through the terminal."""
    view = chat.transcript.selected() if isinstance(chat.focused, MessageView) else _answer(chat)
    assert view is not None
    chat.app.copy_to_clipboard(chat.conversation.checked(view.message))
    chat.notify("Copied.")


async def copy_code(chat: ChatScreen, _argument: str) -> None:
    blocks = _FENCE.findall(_answer(chat).message.content)
    if not blocks:
        raise RequestError("The answer has no code block.")
    chat.app.copy_to_clipboard(blocks[-1])
    chat.notify("Code copied.")


async def toggle_thinking(chat: ChatScreen, _argument: str) -> None:
    """Show or hide an answer's thinking, or the result of the selected tool call."""
    view = chat.transcript.selected()
    if isinstance(view, (ToolView, UserView)) and view is chat.focused:
        view.toggle()
    else:
        _answer(chat).toggle_thinking()


def _selected(chat: ChatScreen, role: Role) -> MessageView:
    view = chat.transcript.selected(role)
    if view is None:
        raise RequestError("There are no messages yet.")
    return view


def _answer(chat: ChatScreen) -> AnswerView:
    return cast("AnswerView", _selected(chat, Role.ASSISTANT))


def _require_idle(chat: ChatScreen) -> None:
    if chat.busy:
        raise RequestError("An answer is still running. Esc stops it.")
