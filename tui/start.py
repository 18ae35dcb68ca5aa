"""Puts the chat together, runs it, and frees everything afterwards."""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from textual.logging import TextualHandler

from localllm.cli.terminal import warn
from localllm.errors import RequestError
from localllm.settings import Settings, load_settings, read_key, sessions_path
from tui.app import ChatApp
from tui.backend import Backend
from tui.keys import keys_path, load_keys
from tui.parameters import Parameters
from tui.sessions import SessionStore
from tui.sessions.database import SessionError


def run_chat(
    model: str | None, flags: Mapping[str, object], sessions: Path | None = None, host: str | None = None
) -> int:
    """Run the chat until the user leaves, and return its exit code.

    model None takes the one used last. flags are settings by name, as in load_settings. host is the address of a server
    that answers in place of an engine in here. Raises SessionError where sessions cannot be kept, SettingsError for
    wrong settings or keys, RequestError for a terminal that draws nothing.
    """
    if os.environ.get("TERM") == "dumb":
        raise RequestError(
            "The chat needs a terminal that can be drawn on, and TERM says it is dumb. `localllm run` answers in plain "
            "lines; set TERM, such as TERM=xterm-256color, if it can do more."
        )
    # A line on stderr would tear the screen; Textual's console shows the log.
    logging.basicConfig(handlers=[TextualHandler(stderr=False)], force=True)
    keys = load_keys(keys_path())

    def settings_with(model_settings: Mapping[str, object]) -> Settings:
        return load_settings(flags, model=model_settings)

    settings = settings_with({})
    with ExitStack() as stack:
        store = _store(sessions, stack)
        stack.callback(store.close)
        backend = _backend(settings, settings_with, host)
        stack.callback(backend.close)
        elsewhere = host or settings.remote
        remembered_as = f"model at {elsewhere}" if elsewhere else "model"
        app = ChatApp(backend, store, model or "", Parameters.from_settings(settings), keys, remembered_as)
        app.run()
        return app.return_code or 0


def _store(named: Path | None, stack: ExitStack) -> SessionStore:
    """The sessions of the file that was named, or of the usual one.

    Where the usual one is not there and cannot be made, as in a home that is read-only, they last as long as the
    stack, and a warning says so. Raises SessionError.
    """
    usual = sessions_path()
    try:
        return SessionStore(named or usual)
    except SessionError as error:
        if named or usual.exists():
            raise
        warn(f"{error} This chat is gone when it ends; --sessions FILE keeps it elsewhere.")
        folder = stack.enter_context(TemporaryDirectory(prefix="localllm-"))
        return SessionStore(Path(folder) / usual.name)


def _backend(
    settings: Settings, settings_with: Callable[[Mapping[str, object]], Settings], host: str | None
) -> Backend:
    """Whoever computes: a server of Ollama's protocol, one of OpenAI's, or an engine in here. Raises LocalLLMError."""
    if host:
        from localllm.remote.ollama import OllamaServer
        from tui.server_backend import OllamaBackend

        key = read_key(settings.remote_key, settings.remote_key_file, "remote_key_file")
        return OllamaBackend(OllamaServer(host, key))
    if settings.remote:
        from localllm.remote.openai import OpenAIServer
        from tui.server_backend import OpenAIBackend

        return OpenAIBackend(OpenAIServer.at(settings.remote, settings))
    from tui.engine_backend import EngineBackend

    return EngineBackend(settings_with)
