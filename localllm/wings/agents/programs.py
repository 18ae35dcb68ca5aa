"""The coding agents that `localllm launch` starts: what each needs to use a local model, as data.

A program gets variables, arguments and files for one run; the files are in a folder of localllm's. Its own files are
not changed.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf_io.system import shell_line
from localllm.errors import RequestError

# Longer than any prompt takes to compute.
PATIENCE_S = 3600
ANSWER_TOKENS = 8192
# For programs that require a key when the server has none.
NO_KEY = "none"


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """A server's model. url: without a path. context: tokens of prompt and answer together."""

    url: str
    model: str
    context: int
    key: str = NO_KEY


@dataclass(frozen=True, slots=True)
class ProgramSetup:
    """What a program gets for one run. removed: variables to unset. files: contents by path. arguments precede the
    user's.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """A coding agent. name: also its command. install: the command that installs it.

    first_prompt: approximate tokens of its first prompt. least_context: tokens that it needs to do any work.
    set_up: makes a run's Setup; the folder is for its files. asked: arguments before a prompt to start with. alone:
    arguments if the user gives none. own_path: its own configuration, below the home folder, "" if it reads none.
    own_text: what to write into it, or else what the user should do, as a sentence.
    """

    name: str
    install: str
    first_prompt: int
    least_context: int
    set_up: Callable[[AgentEndpoint, Path], ProgramSetup]
    own_text: Callable[[AgentEndpoint], str]
    asked: tuple[str, ...] = ()
    own_path: str = ""
    alone: tuple[str, ...] = ()


def program(name: str, others: Iterable[str] = ()) -> AgentProgram:
    """A program by name. others: further names to offer. Raises RequestError."""
    found = PROGRAMS.get(name)
    if found is None:
        raise RequestError(f"Unknown program {name[:32]!r}; choose one of {', '.join((*PROGRAMS, *others))}.")
    return found


def _claude_variables(at: AgentEndpoint) -> dict[str, str]:
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


def _claude(at: AgentEndpoint, _folder: Path) -> ProgramSetup:
    return ProgramSetup(_claude_variables(at), removed=("ANTHROPIC_API_KEY",))


def _codex_settings(at: AgentEndpoint) -> dict[str, Any]:
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


def _codex(at: AgentEndpoint, _folder: Path) -> ProgramSetup:
    lines = (f"{name}={json.dumps(value)}" for name, value in _codex_settings(at).items())  # JSON strings are TOML too
    variables = {} if at.key == NO_KEY else {"LOCALLLM_API_KEY": at.key}
    return ProgramSetup(variables, arguments=tuple(word for line in lines for word in ("-c", line)))


def _codex_text(at: AgentEndpoint) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in _codex_settings(at).items())


def _opencode_settings(at: AgentEndpoint) -> str:
    model = {"name": at.model, "limit": {"context": at.context, "output": answer_tokens(at)}}
    options = {"baseURL": f"{at.url}/v1", "apiKey": at.key, "timeout": False}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "localllm", "options": options, "models": {at.model: model}}
    name = f"localllm/{at.model}"
    return _json({"provider": {"localllm": provider}, "model": name, "small_model": name})


def _opencode(at: AgentEndpoint, _folder: Path) -> ProgramSetup:
    return ProgramSetup({"OPENCODE_CONFIG_CONTENT": _opencode_settings(at)})


def _continue_settings(at: AgentEndpoint) -> str:
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


def _continue(at: AgentEndpoint, folder: Path) -> ProgramSetup:
    path = folder / "config.yaml"
    return ProgramSetup(arguments=("--config", str(path)), files={path: _continue_settings(at)})


def _aider_settings(at: AgentEndpoint) -> dict[str, Any]:
    return {"model": f"openai/{at.model}", "openai-api-base": f"{at.url}/v1", "timeout": PATIENCE_S}


def _aider(at: AgentEndpoint, folder: Path) -> ProgramSetup:
    path = folder / "models.json"
    limits = {"max_input_tokens": at.context, "max_output_tokens": answer_tokens(at)}
    about = {**limits, "litellm_provider": "openai", "mode": "chat", "input_cost_per_token": 0}
    flags = [word for name, value in _aider_settings(at).items() for word in (f"--{name}", str(value))]
    return ProgramSetup(
        {"OPENAI_API_KEY": at.key},
        arguments=(*flags, "--model-metadata-file", str(path), "--no-show-model-warnings"),
        files={path: _json({f"openai/{at.model}": about})},
    )


def _aider_text(at: AgentEndpoint) -> str:
    settings = {**_aider_settings(at), "openai-api-key": at.key}
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())


def _cline(at: AgentEndpoint, folder: Path) -> ProgramSetup:
    given = {"provider": "openai-compatible", "apiKey": at.key, "model": at.model, "baseUrl": f"{at.url}/v1"}
    # Cline reads the settings only if the entry has both of the others.
    entry = {"settings": given, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    kept = {"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": entry}}
    return ProgramSetup(
        arguments=("--data-dir", str(folder), "--provider", "openai-compatible", "--model", at.model),
        files={folder / "settings" / "providers.json": _json(kept)},
    )


def _cline_way(at: AgentEndpoint) -> str:
    given = {"provider": "openai-compatible", "apikey": "KEY", "baseurl": f"{at.url}/v1", "modelid": at.model}
    return shell_line(["cline", "auth", *(word for name, value in given.items() for word in (f"--{name}", value))])


def _pi_provider(at: AgentEndpoint) -> dict[str, Any]:
    model = {
        "id": at.model,
        "name": at.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": at.context,
        "maxTokens": answer_tokens(at),
    }
    return {"baseUrl": f"{at.url}/v1", "apiKey": at.key, "api": "openai-completions", "models": [model]}


def _pi(at: AgentEndpoint, folder: Path) -> ProgramSetup:
    path = folder / "localllm.ts"
    extension = (
        f"export default function (pi) {{\n  pi.registerProvider('localllm', {_json(_pi_provider(at)).strip()});\n}}\n"
    )
    return ProgramSetup(
        {"PI_OFFLINE": "1"},
        arguments=("-e", str(path), "--provider", "localllm", "--model", at.model),
        files={path: extension},
    )


def _qwen_settings(at: AgentEndpoint) -> str:
    generation = {"contextWindowSize": at.context, "timeout": PATIENCE_S * 1000}
    return _json({"model": {"generationConfig": generation}, "general": {"enableAutoUpdate": False}})


def _qwen_variables(at: AgentEndpoint) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{at.url}/v1", "OPENAI_API_KEY": at.key, "OPENAI_MODEL": at.model}


def _qwen(at: AgentEndpoint, folder: Path) -> ProgramSetup:
    path = folder / "defaults.json"
    return ProgramSetup(
        {**_qwen_variables(at), "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(path)},
        arguments=("--auth-type", "openai", "--model", at.model),
        files={path: _qwen_settings(at)},
    )


def _qwen_text(at: AgentEndpoint) -> str:
    chosen = {"security": {"auth": {"selectedType": "openai"}}, "env": _qwen_variables(at)}
    return _json({**json.loads(_qwen_settings(at)), **chosen})


def _copilot_variables(at: AgentEndpoint) -> dict[str, str]:
    return {
        "COPILOT_PROVIDER_BASE_URL": f"{at.url}/v1",
        "COPILOT_PROVIDER_API_KEY": at.key,
        "COPILOT_MODEL": at.model,
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(at.context - answer_tokens(at)),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(answer_tokens(at)),
        "COPILOT_OFFLINE": "true",
    }


def _kilo(at: AgentEndpoint, _folder: Path) -> ProgramSetup:
    return ProgramSetup({"KILO_CONFIG_CONTENT": _opencode_settings(at)})


def _vibe_text(at: AgentEndpoint) -> str:
    """TOML: JSON strings and numbers are TOML too."""
    return (
        f"active_model = {json.dumps(at.model)}\nenable_update_checks = false\n\n"
        f'[[providers]]\nname = "localllm"\napi_base = {json.dumps(f"{at.url}/v1")}\n'
        'api_key_env_var = "LOCALLLM_API_KEY"\napi_style = "openai"\nbackend = "generic"\n\n'
        f'[[models]]\nname = {json.dumps(at.model)}\nalias = {json.dumps(at.model)}\nprovider = "localllm"\n'
        f"auto_compact_threshold = {at.context * 3 // 4}\n"
    )


def _vibe(at: AgentEndpoint, folder: Path) -> ProgramSetup:
    variables = {"VIBE_HOME": str(folder), "LOCALLLM_API_KEY": at.key}
    return ProgramSetup(variables, files={folder / "config.toml": _vibe_text(at)})


def _hermes_text(at: AgentEndpoint) -> str:
    """JSON is YAML."""
    chosen = {"provider": "custom", "default": at.model, "base_url": f"{at.url}/v1", "api_key": at.key}
    return _json({"model": {**chosen, "context_length": at.context}})


def _hermes(at: AgentEndpoint, folder: Path) -> ProgramSetup:
    return ProgramSetup({"HERMES_HOME": str(folder)}, files={folder / "config.yaml": _hermes_text(at)})


def _openclaw_text(at: AgentEndpoint) -> str:
    agents = {"defaults": {"model": {"primary": f"localllm/{at.model}"}, "skipBootstrap": True}}
    return _json({"agents": agents, "models": {"mode": "merge", "providers": {"localllm": _pi_provider(at)}}})


def _openclaw(at: AgentEndpoint, folder: Path) -> ProgramSetup:
    path = folder / "openclaw.json"
    variables = {"OPENCLAW_STATE_DIR": str(folder), "OPENCLAW_CONFIG_PATH": str(path)}
    return ProgramSetup(variables, files={path: _openclaw_text(at)})


def _droid_text(at: AgentEndpoint) -> str:
    model = {
        "model": at.model,
        "displayName": at.model,
        "baseUrl": f"{at.url}/v1",
        "apiKey": at.key,
        "provider": "generic-chat-completion-api",
        "maxContextLimit": at.context,
        "maxOutputTokens": answer_tokens(at),
    }
    chosen = f"custom:{at.model}-0"  # droid adds the place in the list
    return _json({"customModels": [model], "sessionDefaultSettings": {"model": chosen}})


def _droid(at: AgentEndpoint, folder: Path) -> ProgramSetup:
    path = folder / "settings.json"
    return ProgramSetup(arguments=("--settings", str(path)), files={path: _droid_text(at)})


def _kimi_variables(at: AgentEndpoint) -> dict[str, str]:
    return {
        "KIMI_MODEL_NAME": at.model,
        "KIMI_MODEL_PROVIDER_TYPE": "openai",
        "KIMI_MODEL_BASE_URL": f"{at.url}/v1",
        "KIMI_MODEL_API_KEY": at.key,
        "KIMI_MODEL_MAX_CONTEXT_SIZE": str(at.context),
        "KIMI_CODE_NO_AUTO_UPDATE": "1",
    }


def _goose_variables(at: AgentEndpoint) -> dict[str, str]:
    return {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": at.model,
        "GOOSE_CONTEXT_LIMIT": str(at.context),
        "OPENAI_HOST": at.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": at.key,
        "OPENAI_TIMEOUT": str(PATIENCE_S),
        "GOOSE_TELEMETRY_OFF": "1",
    }


def answer_tokens(at: AgentEndpoint) -> int:
    """The most tokens of an answer that programs are told."""
    return min(ANSWER_TOKENS, at.context // 4)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


_ALL = (
    AgentProgram(
        "claude",
        "npm install --global @anthropic-ai/claude-code",
        20600,
        32768,
        _claude,
        lambda at: _json({"env": _claude_variables(at)}),
        own_path=".claude/settings.json",
    ),
    AgentProgram(
        "codex",
        "npm install --global @openai/codex",
        10000,
        16384,
        _codex,
        _codex_text,
        ("exec", "--skip-git-repo-check"),
        ".codex/config.toml",
    ),
    AgentProgram(
        "opencode",
        "npm install --global opencode-ai",
        8000,
        16384,
        _opencode,
        _opencode_settings,
        ("run",),
        ".config/opencode/opencode.json",
    ),
    AgentProgram(
        "cn",
        "npm install --global @continuedev/cli",
        2500,
        8192,
        _continue,
        _continue_settings,
        ("-p",),
        ".continue/config.yaml",
    ),
    AgentProgram(
        "aider",
        "pipx install aider-chat",
        2500,
        8192,
        _aider,
        _aider_text,
        ("--no-git", "--yes-always", "--message"),
        ".aider.conf.yml",
    ),
    AgentProgram("cline", "npm install --global cline", 7500, 16384, _cline, _cline_way),
    AgentProgram(
        "pi",
        "npm install --global @earendil-works/pi-coding-agent",
        1500,
        8192,
        _pi,
        lambda at: _json({"providers": {"localllm": _pi_provider(at)}}),
        ("-p",),
        ".pi/agent/models.json",
    ),
    AgentProgram(
        "qwen",
        "npm install --global @qwen-code/qwen-code",
        14000,
        32768,
        _qwen,
        _qwen_text,
        (),
        ".qwen/settings.json",
    ),
    AgentProgram(
        "copilot",
        "npm install --global @github/copilot",
        11500,
        16384,
        lambda at, _folder: ProgramSetup(_copilot_variables(at)),
        lambda at: shell_line([], _copilot_variables(at)),
        ("-p",),
    ),
    AgentProgram(
        "kilo",
        "npm install --global @kilocode/cli",
        10000,
        16384,
        _kilo,
        _opencode_settings,
        ("run",),
        ".config/kilo/kilo.json",
    ),
    AgentProgram("vibe", "pipx install mistral-vibe", 8000, 16384, _vibe, _vibe_text, ("-p",), ".vibe/config.toml"),
    AgentProgram(
        "hermes",
        "pipx install hermes-agent",
        13500,
        64000,
        _hermes,
        _hermes_text,
        ("chat", "-q"),
        ".hermes/config.yaml",
    ),
    AgentProgram(
        "openclaw",
        "npm install --global openclaw",
        10000,
        16384,
        _openclaw,
        _openclaw_text,
        ("agent", "--local", "--agent", "main", "--message"),
        ".openclaw/openclaw.json",
    ),
    AgentProgram(
        "droid",
        "npm install --global @factory/cli",
        9500,
        16384,
        _droid,
        _droid_text,
        ("exec",),
        ".factory/settings.json",
    ),
    AgentProgram(
        "kimi",
        "npm install --global @moonshot-ai/kimi-code",
        21500,
        32768,
        lambda at, _folder: ProgramSetup(_kimi_variables(at)),
        lambda at: shell_line([], _kimi_variables(at)),
        ("-p",),
    ),
    AgentProgram(
        "goose",
        "brew install block-goose-cli",
        4500,
        8192,
        lambda at, _folder: ProgramSetup(_goose_variables(at)),
        lambda at: shell_line([], _goose_variables(at)),
        ("run", "--text"),
        alone=("session",),  # without a word it asks how to configure itself
    ),
)
PROGRAMS = {one.name: one for one in _ALL}
