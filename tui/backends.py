"""Chooses the backend of a chat: a model in this process, or a server."""

from collections.abc import Callable, Mapping

from localllm.settings import Settings, read_key
from tui.backend import Backend


def open_backend(
    settings: Settings, settings_with: Callable[[Mapping[str, object]], Settings], host: str | None
) -> Backend:
    """The backend: an Ollama server, an OpenAI server, or an in-process engine. Raises LocalLLMError."""
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


def remembered_as(remote: str | None, host: str | None) -> str:
    """The store's key for the last loaded model."""
    elsewhere = host or remote
    return f"model at {elsewhere}" if elsewhere else "model"
