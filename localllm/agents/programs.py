"""The coding agents that `localllm launch` starts: what each needs to use a local model, as data.

A program gets variables, arguments and files for one run; the files are in a folder of localllm's. Its own files are
not changed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.errors import RequestError

# Longer than any prompt takes to compute.
PATIENCE_S = 3600
ANSWER_TOKENS = 8192
# For programs that require a key when the server has none.
NO_KEY = "none"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's model. url: without a path. context: tokens of prompt and answer together."""

    url: str
    model: str
    context: int
    key: str = NO_KEY


@dataclass(frozen=True, slots=True)
class Setup:
    """What a program gets for one run. removed: variables to unset. files: contents by path. arguments precede the
    user's.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Program:
    """A coding agent. name: also its command. install: the command that installs it.

    first_prompt: approximate tokens of its first prompt. least_context: tokens that it needs to do any work.
    set_up: makes a run's Setup; the folder is for its files. asked: arguments before a prompt to start with.
    own_path: its own configuration, below the home folder, and own_text, what to write into it; None if it has a
    command for that.
    """

    name: str
    install: str
    first_prompt: int
    least_context: int
    set_up: Callable[[Endpoint, Path], Setup]
    asked: tuple[str, ...] = ()
    own_path: str = ""
    own_text: Callable[[Endpoint], str] | None = None


def program(name: str) -> Program:
    """A program by name. Raises RequestError."""
    found = PROGRAMS.get(name)
    if found is None:
        raise RequestError(f"Unknown program {name[:32]!r}; choose one of {', '.join(PROGRAMS)}.")
    return found


def _claude_variables(at: Endpoint) -> dict[str, str]:
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    return {
        "ANTHROPIC_BASE_URL": at.url,
        "ANTHROPIC_AUTH_TOKEN": at.key,
        **{f"ANTHROPIC_{name}": at.model for name in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": at.model,
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(at.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(PATIENCE_S * 1000),
    }


def _claude(at: Endpoint, _folder: Path) -> Setup:
    return Setup(_claude_variables(at), removed=("ANTHROPIC_API_KEY",))


def _codex_settings(at: Endpoint) -> dict[str, Any]:
    return {
        "model": at.model,
        "model_provider": "localllm",
        "model_context_window": at.context,
        "model_providers.localllm.name": "localllm",
        "model_providers.localllm.base_url": f"{at.url}/v1",
        "model_providers.localllm.wire_api": "responses",
        "model_providers.localllm.stream_idle_timeout_ms": PATIENCE_S * 1000,
        **({} if at.key == NO_KEY else {"model_providers.localllm.env_key": "LOCALLLM_API_KEY"}),
    }


def _codex(at: Endpoint, _folder: Path) -> Setup:
    lines = (f"{name}={json.dumps(value)}" for name, value in _codex_settings(at).items())  # JSON strings are TOML too
    variables = {} if at.key == NO_KEY else {"LOCALLLM_API_KEY": at.key}
    return Setup(variables, arguments=tuple(word for line in lines for word in ("-c", line)))


def _codex_text(at: Endpoint) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in _codex_settings(at).items())


def _opencode_settings(at: Endpoint) -> str:
    model = {"name": at.model, "limit": {"context": at.context, "output": min(ANSWER_TOKENS, at.context // 4)}}
    options = {"baseURL": f"{at.url}/v1", "apiKey": at.key, "timeout": False}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "localllm", "options": options, "models": {at.model: model}}
    name = f"localllm/{at.model}"
    return _json({"provider": {"localllm": provider}, "model": name, "small_model": name})


def _opencode(at: Endpoint, _folder: Path) -> Setup:
    return Setup({"OPENCODE_CONFIG_CONTENT": _opencode_settings(at)})


def _continue_settings(at: Endpoint) -> str:
    model = {
        "name": at.model,
        "provider": "openai",
        "model": at.model,
        "apiBase": f"{at.url}/v1",
        "apiKey": at.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": at.context},
        "requestOptions": {"timeout": PATIENCE_S * 1000},
    }
    return _json({"name": "localllm", "version": "1.0.0", "schema": "v1", "models": [model]})  # JSON is YAML


def _continue(at: Endpoint, folder: Path) -> Setup:
    path = folder / "config.yaml"
    return Setup(arguments=("--config", str(path)), files={path: _continue_settings(at)})


def _aider_settings(at: Endpoint) -> dict[str, Any]:
    return {"model": f"openai/{at.model}", "openai-api-base": f"{at.url}/v1", "timeout": PATIENCE_S}


def _aider(at: Endpoint, folder: Path) -> Setup:
    path = folder / "models.json"
    limits = {"max_input_tokens": at.context, "max_output_tokens": min(ANSWER_TOKENS, at.context // 4)}
    about = {**limits, "litellm_provider": "openai", "mode": "chat", "input_cost_per_token": 0}
    flags = [word for name, value in _aider_settings(at).items() for word in (f"--{name}", str(value))]
    return Setup(
        {"OPENAI_API_KEY": at.key},
        arguments=(*flags, "--model-metadata-file", str(path), "--no-show-model-warnings"),
        files={path: _json({f"openai/{at.model}": about})},
    )


def _aider_text(at: Endpoint) -> str:
    settings = {**_aider_settings(at), "openai-api-key": at.key}
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())


def _cline(at: Endpoint, folder: Path) -> Setup:
    given = {"provider": "openai-compatible", "apiKey": at.key, "model": at.model, "baseUrl": f"{at.url}/v1"}
    # Cline reads the settings only if the entry has both of the others.
    entry = {"settings": given, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    kept = {"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": entry}}
    return Setup(
        arguments=("--data-dir", str(folder), "--provider", "openai-compatible", "--model", at.model),
        files={folder / "settings" / "providers.json": _json(kept)},
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


_ALL = (
    Program(
        "claude",
        "npm install --global @anthropic-ai/claude-code",
        20600,
        32768,
        _claude,
        own_path=".claude/settings.json",
        own_text=lambda at: _json({"env": _claude_variables(at)}),
    ),
    Program(
        "codex",
        "npm install --global @openai/codex",
        10000,
        16384,
        _codex,
        ("exec", "--skip-git-repo-check"),
        ".codex/config.toml",
        _codex_text,
    ),
    Program(
        "opencode",
        "npm install --global opencode-ai",
        8000,
        16384,
        _opencode,
        ("run",),
        ".config/opencode/opencode.json",
        _opencode_settings,
    ),
    Program(
        "cn",
        "npm install --global @continuedev/cli",
        2500,
        8192,
        _continue,
        ("-p",),
        ".continue/config.yaml",
        _continue_settings,
    ),
    Program(
        "aider",
        "pipx install aider-chat",
        2500,
        8192,
        _aider,
        ("--no-git", "--yes-always", "--message"),
        ".aider.conf.yml",
        _aider_text,
    ),
    Program("cline", "npm install --global cline", 7500, 16384, _cline),
)
PROGRAMS = {one.name: one for one in _ALL}
