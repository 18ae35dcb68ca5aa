"""Commands on whole conversations."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tui.screens.chat import ChatScreen


async def new(chat: "ChatScreen", _argument: str) -> None:
    """Begin a new chat; the present one stays in the list."""
    await chat.stop()
    chat.conversation.clear()
    await chat.show_conversation()
    chat.prompt.focus()


async def leave(chat: "ChatScreen", _argument: str) -> None:
    """Leave the program."""
    await chat.app.action_quit()
