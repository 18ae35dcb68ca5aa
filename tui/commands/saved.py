"""Commands on saved prompts and personas."""

from localllm.errors import RequestError
from localllm.text import shortened
from tui.saved import folder_of, read_persona, read_prompt, save_persona, save_prompt, saved_names
from tui.screens.chat import ChatScreen
from tui.sessions import Role


async def prompt(chat: ChatScreen, argument: str) -> None:
    """Write a saved prompt into the field, save the last one that was asked, or list them."""
    name, to_save, text = _parsed(argument)
    if to_save:
        asked = [message.content for message in chat.conversation.messages if message.role is Role.USER]
        if not text and not asked:
            raise RequestError("Nothing was asked yet. /prompt save NAME TEXT saves a text.")
        chat.show_note(f"Saved: {save_prompt(name, text or asked[-1])}")
    elif name:
        chat.prompt.put(read_prompt(name))
        chat.prompt.focus()
    else:
        rows = [(each, shortened(" ".join(read_prompt(each).split()), 60), "") for each in saved_names("prompt")]
        _list(chat, "prompt", rows)


async def persona(chat: ChatScreen, argument: str) -> None:
    """Answer as a saved persona, save the present system prompt and parameters as one, or list them."""
    conversation = chat.conversation
    name, to_save, _ = _parsed(argument)
    if to_save:
        path = save_persona(name, conversation.parameters, conversation.defaults, conversation.model)
        chat.show_note(f"Saved: {path}")
    elif name:
        found = read_persona(name)
        conversation.set_parameters(found.over(conversation.parameters, conversation.defaults))
        if found.model and found.model != conversation.model:
            chat.load_model(found.model)
        chat.notify(f"{name} answers from now on. /show shows how, /set and F5 change it.", markup=False)
    else:
        _list(chat, "persona", [(each, ", ".join(read_persona(each).values), "") for each in saved_names("persona")])


def _parsed(argument: str) -> tuple[str, bool, str]:
    """A name, whether something is saved under it, and the text that follows it."""
    first, _, rest = argument.strip().partition(" ")
    if first != "save":
        if rest:
            raise RequestError(f"A name is one word (got {shortened(argument)!r}).")
        return first, False, ""
    name, _, text = rest.strip().partition(" ")
    if not name:
        raise RequestError("Give a name behind save.")
    return name, True, text.strip()


def _list(chat: ChatScreen, kind: str, rows: list[tuple[str, str, str]]) -> None:
    hint = f"They are files in {folder_of(kind)}, to edit and to share. /{kind} save NAME adds one."
    chat.show_note([*rows, (hint, "", "")] if rows else f"There is no {kind} yet. {hint}")
