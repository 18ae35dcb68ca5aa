"""The table of all commands, from which slash commands, keys, the palette and the help are built."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from localllm.text import nearest, shortened
from tui.commands import answers, sessions, settings
from tui.screens.chat import ChatScreen
from tui.widgets.frame import key_names


@dataclass(frozen=True, slots=True)
class Command:
    """name follows the slash; argument describes the argument, "" for none.

    run takes the screen and the argument text. key is the default binding, "" for none; label is shown in the footer,
    "" hides it.
    """

    name: str
    title: str
    run: Callable[[ChatScreen, str], Awaitable[None]]
    key: str = ""
    argument: str = ""
    label: str = ""


async def show_help(chat: ChatScreen, _argument: str) -> None:
    keys = chat.keys
    commands = [
        (
            f"/{command.name} {command.argument}",
            command.title,
            key_names(keys.get(command.name, command.key).partition(",")[0]),
        )
        for command in COMMANDS
    ]
    others = [(key_names(keys.get(name, usual)), what, "") for name, usual, what in _KEYS]
    files = (("@path", "Attach a file", ""), ("!command", "Run a shell command; the model gets its output", ""))
    chat.show_note([*commands, ("", "", ""), *others, *files])


COMMANDS: tuple[Command, ...] = (
    Command("help", "Show commands and keys", show_help, "f1", label="Help"),
    Command("new", "Start a new chat", sessions.new, "ctrl+n", label="New"),
    Command("sessions", "Open, search, rename or delete chats", sessions.browse, "f3", "[TEXT]", "Chats"),
    Command("models", "Choose a model", settings.choose_model, "f4", label="Model"),
    Command("parameters", "Presets, system prompt, sampling, limits", settings.edit_parameters, "f5", label="Settings"),
    Command("inspect", "Inspect the engine", settings.inspect, "f2", label="Inspect"),
    Command("tab", "Open a new chat in a tab", sessions.open_tab, "f8"),
    Command("next", "Go to the next tab, or to tab N", sessions.next_tab, "f7,ctrl+pagedown", "[N]"),
    Command("previous", "Go to the previous tab", sessions.previous_tab, "f6,ctrl+pageup"),
    Command("close", "Close this tab; its chat is kept", sessions.close_tab),
    Command("rename", "Rename the chat", sessions.rename, argument="TITLE"),
    Command("tag", "Add tags to the chat, or remove them", sessions.tag, argument="[NAME -NAME]"),
    Command("delete", "Delete the chat", sessions.delete),
    Command("undo", "Restore a deleted chat, or undo a file edit", sessions.undo),
    Command("find", "Search in this chat", answers.find, "ctrl+f", "[TEXT]"),
    Command("export", "Export the chat to a .md or .json file", sessions.export, argument="[FILE]"),
    Command("import", "Import exported chats", sessions.import_chats, argument="FILE"),
    Command("regenerate", "Regenerate the answer", answers.regenerate, "ctrl+r"),
    Command("editor", "Write the prompt in your editor", answers.write_in_editor),
    Command("queue", "Take a waiting prompt back, or all", answers.take_back, argument="[N]"),
    Command("continue", "Continue an answer that was cut", answers.continue_answer, "ctrl+g"),
    Command("edit", "Edit and resend a message", answers.edit),
    Command("fork", "Continue in a copy of the chat", answers.fork),
    Command("compact", "Summarise the oldest turns", answers.compact, argument="[undo]"),
    Command("copy", "Copy the answer", answers.copy, "ctrl+y"),
    Command("code", "Copy the answer's code", answers.copy_code),
    Command("think", "Show or hide the thinking", answers.toggle_thinking, "ctrl+t"),
    Command("tools", "Let the model use files and commands", settings.use_tools, argument="[on|off]"),
    Command("folder", "Answer from the documents of a folder", settings.ask_folder, argument="[PATH|off]"),
    Command("set", "Set a parameter or the system prompt", settings.set_parameter, argument="NAME VALUE"),
    Command("show", "Show the model and the parameters", settings.show),
    Command("prompt", "Use a prompt; save NAME keeps the last", settings.prompt, argument="[NAME]"),
    Command("persona", "Use a persona; save NAME keeps one", settings.persona, argument="[NAME]"),
    Command("load", "Load another model", settings.load, argument="MODEL"),
    Command("save", "Save the model with this chat's settings", settings.save, argument="NAME"),
    Command("notify", "Notify me when an answer is done", settings.notify, argument="[on|off]"),
    Command("vim", "Use vim's keys", settings.vim, argument="[on|off]"),
    Command("theme", "Change the colours", settings.theme, argument="[NAME]"),
    Command("quit", "Leave", sessions.leave),
)

_NAMES = [command.name for command in COMMANDS]

# Keys without a command: the binding's id, its default keys, what they do.
_KEYS = (
    ("prompt.send", "enter", "Send"),
    ("prompt.newline", "ctrl+j,alt+enter,shift+enter", "New line; so does Enter after a backslash"),
    ("prompt.earlier", "up", "Earlier prompts, on the first line; a waiting one first"),
    ("prompt.editor", "ctrl+x", "... then Ctrl+E: write the prompt in your editor"),
    ("prompt.complete", "tab", "Complete a command or a path"),
    ("stop", "escape", "Stop an answer or a load; close this note"),
    ("message.earlier", "ctrl+up", "Select a message"),
    ("message.edit", "ctrl+e", "... edit it and send it again"),
    ("message.fork", "ctrl+o", "... continue in a copy that ends there"),
    ("message.code", "ctrl+b", "... copy its code"),
    ("scroll.up", "pageup", "Scroll"),
    ("", "ctrl+p", "Find a command"),
    ("interrupt", "ctrl+c", "Copy the selection, else stop; twice: leave"),
    ("leave", "ctrl+d", "Leave, when the prompt is empty"),
)


# Aliases, including Ollama's names.
_ALSO = {"?": "help", "clear": "new", "exit": "quit", "bye": "quit", "q": "quit"}
# Words that quit if they are the whole line, without a slash.
_LEAVING = frozenset({"exit", "quit", ":q", "bye"})
_COMMAND = re.compile(r"/([\w?-]+)(?:\s+(.*))?", re.DOTALL)


def find_command(text: str) -> tuple[str, str] | None:
    """The name and argument of the command in a line; None if it is not a command."""
    if text.lower() in _LEAVING:
        return "quit", ""
    match = _COMMAND.fullmatch(text)
    name = _ALSO.get(match[1].lower(), match[1].lower()) if match else ""
    return (name, match[2] or "") if match and name in _NAMES else None


def unknown_command(text: str) -> str | None:
    """An error message for a line that looks like a command but is none; None for any other line."""
    match = _COMMAND.fullmatch(text.rstrip())
    if match is None:
        return None
    near = nearest(match[1].lower(), _NAMES)
    hint = f"Did you mean /{near}?" if near else "/help lists them."
    return f"Unknown command /{shortened(match[1])}. {hint} Put a space before the slash to send it as a message."
