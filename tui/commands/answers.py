"""Commands on messages: answer again, go on, edit, copy."""

import re
from typing import TYPE_CHECKING, cast

from localllm.errors import RequestError
from tui.sessions import Role
from tui.widgets.message_views import MessageView

if TYPE_CHECKING:
    from tui.screens.chat import ChatScreen
    from tui.widgets.answer_view import AnswerView

_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


async def regenerate(chat: "ChatScreen", _argument: str) -> None:
    """Answer again; the former answer stays as a variant."""
    view = _answer(chat)
    _require_rest(chat)
    chat.conversation.drop_answer(view.message)
    await chat.show_conversation()
    chat.begin_answer()


async def continue_answer(chat: "ChatScreen", _argument: str) -> None:
    """Let the last answer go on where it was cut."""
    view = _answer(chat)
    _require_rest(chat)
    if view.message is not chat.conversation.messages[-1]:
        raise RequestError("Only the last answer can go on. Fork the chat at this message first.")
    chat.begin_answer(view)


async def edit(chat: "ChatScreen", _argument: str) -> None:
    """Bring a message of the user's back into the prompt."""
    view = _selected(chat, Role.USER)
    _require_rest(chat)
    chat.editing = view.message
    chat.prompt.put(view.message.content)
    chat.prompt.focus()


async def fork(chat: "ChatScreen", _argument: str) -> None:
    """Go on in a copy of the chat that ends with the selected message."""
    view = chat.selected()
    if view is None:
        raise RequestError("There is no message yet.")
    _require_rest(chat)
    chat.conversation.fork(view.message)
    await chat.show_conversation()
    chat.prompt.focus()
    chat.notify("This is a copy; the first chat stays in the list.")


async def copy(chat: "ChatScreen", _argument: str) -> None:
    """Copy a message, through the terminal."""
    view = chat.selected() if isinstance(chat.focused, MessageView) else _answer(chat)
    assert view is not None
    chat.app.copy_to_clipboard(view.message.content)
    chat.notify("Copied.")


async def copy_code(chat: "ChatScreen", _argument: str) -> None:
    """Copy the last code block of an answer, through the terminal."""
    blocks = _FENCE.findall(_answer(chat).message.content)
    if not blocks:
        raise RequestError("The answer has no code block.")
    chat.app.copy_to_clipboard(blocks[-1])
    chat.notify("Copied the code.")


async def toggle_thinking(chat: "ChatScreen", _argument: str) -> None:
    """Fold or unfold an answer's thinking."""
    _answer(chat).toggle_thinking()


def _selected(chat: "ChatScreen", role: Role) -> MessageView:
    view = chat.selected(role)
    if view is None:
        raise RequestError("There is no message yet.")
    return view


def _answer(chat: "ChatScreen") -> "AnswerView":
    return cast("AnswerView", _selected(chat, Role.ASSISTANT))


def _require_rest(chat: "ChatScreen") -> None:
    if chat.busy:
        raise RequestError("An answer is on its way. Esc stops it.")
