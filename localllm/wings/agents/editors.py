"""Programs that localllm cannot start with a model: what to enter in their settings, as text to show."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.wings.agents.programs import NO_KEY, AgentEndpoint, answer_tokens


@dataclass(frozen=True, slots=True)
class Editor:
    """title: its own name. steps: where to enter what, for a server's model."""

    title: str
    steps: Callable[[AgentEndpoint], str]


def _vscode(at: AgentEndpoint) -> str:
    model = {
        "id": at.model,
        "name": at.model,
        "url": f"{at.url}/v1/chat/completions",
        "toolCalling": True,
        "vision": False,
        "maxInputTokens": at.context - answer_tokens(at),
        "maxOutputTokens": answer_tokens(at),
    }
    group = {"name": "localllm", "vendor": "customendpoint", "apiKey": at.key, "apiType": "chat-completions"}
    return (
        "Chat: Manage Language Models, Add, Custom Endpoint. In chatLanguageModels.json, which the gear opens:\n\n"
        + _json([{**group, "models": [model]}])
    )


def _zed(at: AgentEndpoint) -> str:
    model = {"name": at.model, "max_tokens": at.context, "max_output_tokens": answer_tokens(at)}
    provider = {"api_url": f"{at.url}/v1", "available_models": [{**model, "capabilities": {"tools": True}}]}
    agent = {"type": "custom", "command": "localllm", "args": ["agent", at.model]}
    return (
        "In settings.json; Zed asks for the key, or reads LOCALLLM_API_KEY:\n\n"
        + _json({"language_models": {"openai_compatible": {"localllm": provider}}})
        + f"\nKey: {_key(at)}\n\nFor localllm's own agent in place of Zed's, which needs no server:\n\n"
        + _json({"agent_servers": {"localllm": agent}})
    )


def _jetbrains(at: AgentEndpoint) -> str:
    agent = {"command": "localllm", "args": ["agent", at.model]}
    return (
        f"Settings, Tools, AI Assistant, Models: choose Ollama with the address {at.url}, or OpenAI-compatible with "
        f"{at.url}/v1. Key: {_key(at)}\nThen choose {at.model} for each use.\n\n"
        "For localllm's own agent, which needs no server, in ~/.jetbrains/acp.json, with the command's whole path:\n\n"
        + _json({"agent_servers": {"localllm": agent}})
    )


def _xcode(at: AgentEndpoint) -> str:
    port = at.url.rpartition(":")[2]
    return (
        "Settings, Intelligence, Add a Model Provider, Locally Hosted:\n\n"
        f"Port: {port}\nDescription: localllm\n\n"
        f"For a server on another machine, or with a key: Internet Hosted, URL {at.url}, API key {_key(at)}, header "
        "Authorization.\n"
    )


def _open_webui(at: AgentEndpoint) -> str:
    return (
        "Start it with these variables, or enter the same under Admin Panel, Settings, Connections. In a container, "
        "127.0.0.1 is the container: use host.docker.internal, and serve with --host.\n\n"
        f"ENABLE_OLLAMA_API=false\nOPENAI_API_BASE_URL={at.url}/v1\nOPENAI_API_KEY={at.key}\n"
    )


def _home_assistant(at: AgentEndpoint) -> str:
    return (
        "Settings, Devices & services, Add integration, Ollama:\n\n"
        f"URL: {at.url}\nAPI key: {_key(at)}\nModel: {at.model}\nContext window size: {at.context}\n\n"
        "Home Assistant runs on another machine or in a container as a rule: serve with --host and a key.\n"
    )


def _key(at: AgentEndpoint) -> str:
    return "any text" if at.key == NO_KEY else at.key


def _json(value: Mapping[str, Any] | list[Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


EDITORS: Mapping[str, Editor] = {
    "vscode": Editor("VS Code", _vscode),
    "zed": Editor("Zed", _zed),
    "jetbrains": Editor("JetBrains' IDEs", _jetbrains),
    "xcode": Editor("Xcode", _xcode),
    "open-webui": Editor("Open WebUI", _open_webui),
    "home-assistant": Editor("Home Assistant", _home_assistant),
}
