"""Commands on the model, its parameters, tools, saved prompts and personas."""

from dataclasses import replace

from localllm.background import in_thread
from localllm.chats import Role
from localllm.chats.parameters import NAMES, Parameters
from localllm.chats.saved import folder_of, read_persona, read_prompt, save_persona, save_prompt, saved_names
from localllm.errors import RequestError
from localllm.files import user_path
from localllm.text import shortened
from tui.backend import short_name
from tui.screens.chat import ChatScreen
from tui.screens.folder import folder_note

NOTED_RIVALS = 5
_SWITCHES = {"think": "on", "nothink": "off"}  # Ollama's names


async def set_parameter(chat: ChatScreen, argument: str) -> None:
    """Set one parameter: /set temperature 0.2, /set parameter top_k 20, /set system Be brief, /set nothink."""
    name, _, text = argument.removeprefix("parameter ").strip().partition(" ")
    if not name:
        await show(chat, "")
        return
    if not text and name in _SWITCHES:
        name, text = "think", _SWITCHES[name]
    conversation = chat.conversation
    new = conversation.parameters.with_text(name, text.strip().strip('"'), conversation.defaults)
    chat.set_parameters(new)
    value = new.text(name)
    said = f"{name} is now {value}" if value else f"{name} is empty"
    chat.notify(said if said.endswith((".", "!", "?")) else f"{said}.", markup=False)


async def show(chat: ChatScreen, _argument: str) -> None:
    info = chat.info
    model = ("No model is loaded.", "", "")
    if info:
        model = (short_name(info.name), f"{info.place} · context {info.context or 'unknown'} tokens", "")
    parameters = chat.conversation.parameters
    chat.show_note([model, ("", "", ""), *((name, parameters.text(name), "") for name in NAMES)])


async def load(chat: ChatScreen, argument: str) -> None:
    if not argument:
        raise RequestError("Name a model: /load MODEL.")
    await chat.load_model(argument)


async def save(chat: ChatScreen, argument: str) -> None:
    """Save the model with this chat's system prompt, parameters and messages under a new name."""
    if not argument:
        raise RequestError("Give a name: /save NAME.")
    recipe, backend = chat.conversation.recipe(), chat.backend
    await in_thread(lambda: backend.save(argument, recipe))
    chat.notify(f"Saved. /load {argument} continues from here.", markup=False)


async def choose_model(chat: ChatScreen, _argument: str) -> None:
    from tui.screens.models import PickerScreen

    def chosen(name: str | None) -> None:
        if name:
            chat.app.run_worker(chat.attempt(chat.load_model(name)))

    chat.app.push_screen(PickerScreen(chat.backend, chat.conversation.model or None), chosen)


async def edit_parameters(chat: ChatScreen, _argument: str) -> None:
    from tui.screens.parameters import ParametersScreen

    def changed(parameters: Parameters | None) -> None:
        if parameters is not None:
            chat.set_parameters(parameters)

    conversation = chat.conversation
    screen = ParametersScreen(conversation.parameters, conversation.defaults, conversation.model)
    chat.app.push_screen(screen, changed)


async def use_tools(chat: ChatScreen, argument: str) -> None:
    """Turn tools on or off in this chat, and show them with their approval rules."""
    if argument:
        await set_parameter(chat, f"tools {argument}")
    tools = chat.tools
    names = (await in_thread(tools.open)).names
    rules = tools.approvals.rules
    state = "on" if chat.conversation.parameters.tools else "off: /tools on"
    rows = [
        ("tools", state, ""),
        ("folder", str(tools.folder.root), ""),
        ("offered", ", ".join(names), ""),
        *[("allowed" if not number else "", rule, "") for number, rule in enumerate(rules)],
        *[("problem", problem, "") for problem in tools.problems],
    ]
    chat.show_note(rows)


async def ask_folder(chat: ChatScreen, argument: str) -> None:
    """Answer from a folder's documents, or turn that off; without an argument, show the current folder's index."""
    if argument == "off":
        await set_parameter(chat, "folder")
        return
    folder = str(user_path(argument).absolute()) if argument else chat.conversation.parameters.folder
    if not folder:
        raise RequestError("Name a folder of documents: /folder PATH. /folder off turns it off.")
    if chat.conversation.parameters.tools:
        raise RequestError("With tools on, documents could trigger calls. Use /tools off first.")
    opened = await chat.folder.open(folder)
    chat.conversation.set_parameters(replace(chat.conversation.parameters, folder=folder))
    chat.show_note(folder_note(folder, opened))


async def inspect(chat: ChatScreen, _argument: str) -> None:
    from tui.screens.inspector import InspectorScreen

    def note_rivals() -> None:
        parameters = chat.conversation.parameters
        noted = 0 if parameters.rivals else NOTED_RIVALS
        chat.conversation.set_parameters(replace(parameters, rivals=noted))
        chat.app.notify(f"Token probabilities: {'on' if noted else 'off'} from the next answer.")

    chat.app.push_screen(InspectorScreen(chat.backend, chat.latency, note_rivals))


async def notify(chat: ChatScreen, argument: str) -> None:
    """Turn on or off the bell and notification for answers that end while the terminal lacks focus."""
    on = _switched(chat, "notify", argument, usually=True)
    chat.notify(f"Notifications are {'on' if on else 'off'}, if the terminal reports its focus.")


async def vim(chat: ChatScreen, argument: str) -> None:
    """Turn vim key bindings on or off in all tabs."""
    on = _switched(chat, "vim", argument, usually=False)
    if argument:
        for tab in chat.tabs.all:
            tab.prompt.use_vim(on)
    chat.notify(f"Vim's keys are {'on: Esc for normal mode, i to type' if on else 'off'}.")


def _switched(chat: ChatScreen, name: str, argument: str, usually: bool) -> bool:
    """Whether a switch is on. An argument "on" or "off" sets it for all chats. Raises RequestError for any other."""
    if argument not in ("", "on", "off"):
        raise RequestError(f"/{name} on or /{name} off.")
    store = chat.conversation.store
    if argument:
        store.remember(name, argument)
    return (store.remembered(name) or ("on" if usually else "off")) == "on"


async def theme(chat: ChatScreen, argument: str) -> None:
    if not argument:
        chat.app.search_themes()
        return
    if argument not in chat.app.available_themes:
        raise RequestError(f"Unknown theme {argument!r}. Choose from: {', '.join(sorted(chat.app.available_themes))}.")
    chat.app.theme = argument


async def prompt(chat: ChatScreen, argument: str) -> None:
    """Put a saved prompt into the input field, save the given text or the last question as one, or list them."""
    name, to_save, text = _parsed(argument)
    if to_save:
        asked = [message.content for message in chat.conversation.messages if message.role is Role.USER]
        if not text and not asked:
            raise RequestError("There is no question yet. /prompt save NAME TEXT saves a text.")
        chat.show_note(f"Saved: {save_prompt(name, text or asked[-1])}")
    elif name:
        chat.prompt.replace_draft(read_prompt(name))
        chat.prompt.focus()
    else:
        rows = [(each, shortened(" ".join(read_prompt(each).split()), 60), "") for each in saved_names("prompt")]
        _list(chat, "prompt", rows)


async def persona(chat: ChatScreen, argument: str) -> None:
    """Answer as a saved persona, save the current system prompt and parameters as one, or list them."""
    conversation = chat.conversation
    name, to_save, _ = _parsed(argument)
    if to_save:
        path = save_persona(name, conversation.parameters, conversation.defaults, conversation.model)
        chat.show_note(f"Saved: {path}")
    elif name:
        found = read_persona(name)
        chat.set_parameters(found.over(conversation.parameters, conversation.defaults))
        if found.model and found.model != conversation.model:
            await chat.load_model(found.model)
        chat.notify(f"{name} answers from now on. /show shows how, /set and F5 change it.", markup=False)
    else:
        _list(chat, "persona", [(each, ", ".join(read_persona(each).values), "") for each in saved_names("persona")])


def _parsed(argument: str) -> tuple[str, bool, str]:
    """Parse "NAME" or "save NAME TEXT": the name, whether to save, and the text. Raises RequestError."""
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
