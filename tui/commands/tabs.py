"""Commands on tabs."""

from localllm.errors import RequestError
from tui.screens.chat import ChatScreen


async def open_tab(chat: ChatScreen, _argument: str) -> None:
    """Open a new chat beside this one."""
    await chat.tabs.open()


async def close_tab(chat: ChatScreen, _argument: str) -> None:
    """Close this tab; its chat stays in the list. An answer on its way is stopped, and saved as far as it has come."""
    if len(chat.tabs.all) == 1:
        raise RequestError("This is the only tab. /new starts a new chat in it, /quit leaves.")
    await chat.stop()
    await chat.tabs.close(chat)


async def next_tab(chat: ChatScreen, argument: str) -> None:
    """Go to the next tab, or to one by its number."""
    tabs = chat.tabs
    if not argument:
        await tabs.step(1)
    elif argument.isdecimal() and 1 <= int(argument) <= len(tabs.all):
        await tabs.show(tabs.all[int(argument) - 1])
    else:
        raise RequestError(f"There is no tab {argument}. Tabs are numbered from 1 to {len(tabs.all)}.")


async def previous_tab(chat: ChatScreen, _argument: str) -> None:
    """Go to the previous tab."""
    await chat.tabs.step(-1)
