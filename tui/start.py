"""Puts the chat together, runs it, and frees everything afterwards."""

import logging
from pathlib import Path

from textual.logging import TextualHandler

from localllm.remote.server import remote_server
from localllm.settings import Settings
from tui.app import ACTIONS, ChatApp
from tui.backend import Backend
from tui.engine_backend import EngineBackend
from tui.keys import keys_path, load_keys
from tui.openai_backend import OpenAIBackend
from tui.parameters import Parameters
from tui.server_backend import ServerBackend
from tui.sessions import SessionStore
from tui.sessions.database import sessions_path


def run_chat(model: str | None, settings: Settings, sessions: Path | None = None, host: str | None = None) -> int:
    """Run the chat until the user leaves, and return its exit code. Raises SessionError where sessions
    cannot be kept, SettingsError where keys.toml is wrong.

    model None takes the one used last. host is the address of a server that answers in place of an engine in here.
    """
    # A line on stderr would tear the screen; Textual's console shows the log.
    logging.basicConfig(handlers=[TextualHandler(stderr=False)], force=True)
    keys = load_keys(keys_path(), ACTIONS)
    backend = _backend(settings, host)
    store = SessionStore(sessions or sessions_path())
    try:
        elsewhere = host or settings.remote
        remembered_as = f"model at {elsewhere}" if elsewhere else "model"
        wanted = model or store.remembered(remembered_as) or ""
        app = ChatApp(backend, store, wanted, Parameters.from_settings(settings), keys, remembered_as)
        app.run()
        return app.return_code or 0
    finally:
        backend.close()
        store.close()


def _backend(settings: Settings, host: str | None) -> Backend:
    """Whoever computes: a server of Ollama's protocol, one of OpenAI's, or an engine in here. Raises LocalLLMError."""
    if host:
        return ServerBackend(host)
    if settings.remote:
        return OpenAIBackend(remote_server(settings.remote, settings))
    return EngineBackend(settings)
