"""Builds and runs the chat, and frees its resources afterwards. Reads the user's key bindings.

Key bindings are in keys.toml in the configuration folder, one line such as `new = "f9"` per action.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from textual.binding import Binding
from textual.logging import TextualHandler

from localllm.chats import SessionStore
from localllm.chats.parameters import Parameters
from localllm.chats.saved import read_persona
from localllm.errors import RequestError, SettingsError
from localllm.front.prompt import check_text
from localllm.front.terminal import warn
from localllm.settings import Settings, config_path, load_settings, read_toml, sessions_path
from localllm.text import nearest, shortened
from tui.app import ChatApp
from tui.backends import open_backend, remembered_as
from tui.screens.approval import ApprovalScreen
from tui.screens.chat import ChatScreen
from tui.screens.chat_view import ChatView
from tui.terminal import Abilities, ask_terminal, in_browser
from tui.widgets.find import FindBar
from tui.widgets.messages import MessageView
from tui.widgets.pictures import use_pictures
from tui.widgets.prompt import Prompt


def run_chat(
    model: str | None,
    flags: Mapping[str, object],
    sessions: Path | None = None,
    host: str | None = None,
    resume: bool = False,
    system: str | None = None,
    persona: str | None = None,
    visit: str | None = None,
    prompt: str | None = None,
) -> int:
    """Run the chat until the user quits, and return its exit code.

    model: None selects the last one used. flags: settings by name, as in load_settings. host: the address of a server
    to use instead of an in-process engine. resume, system, persona, visit, prompt: see ChatApp.begin_with. Raises
    SessionError if sessions cannot be saved, SettingsError for invalid settings or keys, RequestError if the persona
    cannot be read, the prompt is no text or TERM is dumb.
    """
    if os.environ.get("TERM") == "dumb" and not in_browser():
        raise RequestError(
            "The chat needs a terminal that it can draw on, but TERM is dumb. `localllm run MODEL PROMPT` answers in "
            "plain lines. "
            "If the terminal can do more, set TERM, for example TERM=xterm-256color."
        )
    check_text(prompt or "")
    # Log lines on stderr would corrupt the screen; Textual's console shows the log.
    logging.basicConfig(handlers=[TextualHandler(stderr=False)], force=True)
    keys = load_keys(config_path().with_name("keys.toml"))

    def settings_with(model_settings: Mapping[str, object]) -> Settings:
        return load_settings(flags, model=model_settings)

    settings = settings_with({})
    answering = read_persona(persona) if persona else None
    with ExitStack() as stack:
        # A file that the user names must be writable; the default one may be in a read-only home.
        store = SessionStore(sessions or sessions_path(), must_save=sessions is not None)
        stack.callback(_close, store)
        backend = open_backend(settings, settings_with, host)
        stack.callback(backend.close)
        # With 16 colours or fewer, only the terminal's own palette looks right.
        few = not in_browser() and Console(force_terminal=True).color_system == "standard"
        plain = few or bool(os.environ.get("NO_COLOR"))
        abilities = Abilities() if in_browser() else ask_terminal()
        if not plain:
            use_pictures(abilities)
        parameters = Parameters.from_settings(settings)
        model = model or (answering.model if answering else "")
        app = ChatApp(
            backend,
            store,
            model,
            parameters,
            keys,
            remembered_as(settings.remote, host),
            abilities.light,
            plain,
            abilities.typed,
        )
        app.begin_with(resume, system, answering, visit, prompt)
        app.run()
        return app.return_code or 0


def _close(store: SessionStore) -> None:
    store.close()
    if store.unsaved:
        warn(f"Chats were not saved: {store.unsaved} `localllm chat --sessions FILE` saves chats elsewhere.")


def actions() -> list[str]:
    """Names of all actions with a key binding, sorted. A dotted prefix says where the key works."""
    from tui.screens.inspector import InspectorScreen
    from tui.screens.models import PickerScreen
    from tui.screens.parameters import ParametersScreen
    from tui.screens.question import QuestionScreen
    from tui.screens.sessions import SessionsScreen

    panels = (SessionsScreen, PickerScreen, ParametersScreen, InspectorScreen, ApprovalScreen, QuestionScreen)
    owners = (ChatApp, ChatView, ChatScreen, Prompt, FindBar, MessageView, *panels)
    bindings = [binding for owner in owners for binding in owner.BINDINGS]
    return sorted({binding.id for binding in bindings if isinstance(binding, Binding) and binding.id})


def load_keys(file: Path) -> dict[str, str]:
    """Read the keys of each action, comma-separated; {} if there is no file. Raises SettingsError if it is invalid."""
    content = read_toml(file, SettingsError)
    known = actions()
    for name, key in content.items():
        if name not in known:
            near = nearest(name, known, cutoff=0.5)
            hint = f"Did you mean {near!r}?" if near else f"Choose from: {', '.join(known)}."
            raise SettingsError(f"{file}: there is no action {shortened(name)!r}. {hint}")
        if not isinstance(key, str) or not key:
            raise SettingsError(f'{file}: {name} must be a key such as "f9" or "ctrl+k" (got {key!r}).')
    return content
