"""Formats help texts: plain arguments, commands in panels by use, examples to copy at the end."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from localllm.text import shortened

PANELS = {
    "Use": ("chat", "run", "ask", "serve", "launch", "agent", "chats", "detect"),
    "Models": ("list", "pull", "push", "show", "plan", "create", "cp", "rm", "verify", "quantize"),
    "Server": ("service", "ps", "stop", "warm"),
    "Measure": ("measure",),
    "This machine": ("doctor", "gpu", "cache", "config", "completion", "man"),
}
"""The commands that `localllm --help` lists, by heading."""

EXAMPLES = {
    "run": (
        "localllm run qwen3:0.6b",
        'localllm run qwen3:0.6b "Why is the sky blue?"',
        'git diff | localllm run qwen3:0.6b "Write a commit message for this change:"',
        'localllm run model.gguf "What is in it?" --image picture.png',
        'localllm run --remote http://host:8000 Qwen/Qwen3-8B "Hello"',
    ),
    "agent": ("localllm agent qwen3:8b", "localllm agent --host 127.0.0.1"),
    "chat": (
        "localllm chat",
        'localllm chat "Why is the sky blue?"',
        "localllm chat hf.co/user/repo-GGUF:Q4_K_M",
        "localllm chat --remote http://host:8000",
    ),
    "chats": (
        "localllm chats",
        "localllm chats import conversations.zip --dry-run",
        "localllm chats import conversations.zip",
    ),
    "ask": (
        'localllm ask notes "Which ports does the firewall open?"',
        'localllm ask ~/papers "Who measured it first?" --model qwen3:4b --json',
        "localllm ask ~/papers --index",
    ),
    "serve": (
        "localllm serve",
        "localllm serve --model model.gguf --port 8080",
        "localllm serve --host 0.0.0.0 --api-key-file key.txt",
    ),
    "service": (
        "localllm service install",
        "localllm service install -- --host 0.0.0.0 --api-key-file key.txt",
        "localllm service status",
        "localllm service uninstall",
    ),
    "show": ("localllm show qwen3:0.6b", "localllm show model.gguf --json"),
    "launch": ("localllm launch claude --model qwen3:8b", "localllm launch opencode -- run 'Fix the tests.'"),
    "warm": ("localllm warm claude --model qwen3:8b", "localllm warm --request first.json"),
    "plan": (
        "localllm plan qwen3:8b",
        "localllm plan hf.co/user/repo-GGUF --all",
        'localllm plan qwen3:8b --gpu-memory "RTX 4090" --ctx 32768',
        "localllm plan model.gguf --gpu-memory 8GiB --gpu-memory 8GiB --split-mode row",
    ),
    "list": ("localllm list", "localllm list --json"),
    "pull": (
        "localllm pull qwen3:0.6b",
        "localllm pull hf.co/user/repo-GGUF:Q4_K_M",
        "localllm pull https://host/path/model.gguf",
    ),
    "push": ("localllm push registry.example/me/mine",),
    "rm": ("localllm rm qwen3:0.6b", "localllm rm --unfinished"),
    "cp": ("localllm cp qwen3:0.6b mine",),
    "verify": ("localllm verify", "localllm verify qwen3:0.6b --repair"),
    "create": ("localllm create pirate --file Modelfile",),
    "cache": ("localllm cache", "localllm cache --free kernels --free kv", "localllm cache semantic --delete all"),
    "bench": ("localllm bench model.gguf --threads 1,2 --depth 0,4096",),
    "loadtest": (
        "localllm loadtest http://127.0.0.1:11434 --model qwen3:0.6b --concurrency 1,2,4,8",
        "localllm loadtest http://127.0.0.1:8080 --rate 0.5,1,2 --slo ttft=2s,tpot=100ms --svg load.svg",
        "localllm loadtest http://127.0.0.1:8080 --knee --slo ttft=2s,tpot=100ms --shared-prefix 128",
        "localllm loadtest http://127.0.0.1:8080 --trace AzureLLMInferenceTrace_conv.csv --scale 8 --requests 100",
    ),
    "simulate": (
        "localllm simulate --experiment all",
        "localllm simulate qwen3:0.6b --measure --concurrency 1,2,4,8",
        'localllm simulate model.gguf --machine "RTX 4090" --rate 1,2,4 --slo ttft=2s,tpot=100ms --plot',
        "localllm simulate --machine H100 --trace mooncake.jsonl --requests 1000 --no-prefix-cache",
    ),
    "cost": (
        "localllm cost --watts 65 --kwh-price 0.30",
        "localllm cost --for 3600 --kwh-price 0.30 --api-prompt 0.10 --api-generated 0.40",
    ),
    "detect": (
        "localllm detect text.txt --model qwen3:0.6b --key SECRET",
        "localllm detect text.txt --key SECRET --gamma 0.5 --json",
    ),
    "needle": (
        "localllm needle qwen3:0.6b",
        "localllm needle model.gguf --lengths 4096,16384 --trials 3 --svg needle.svg",
    ),
    "perplexity": (
        "localllm perplexity model.gguf text.txt",
        "localllm perplexity model-Q4_K_M.gguf text.txt --reference model-F16.gguf",
    ),
    "quantize": ("localllm quantize model-F16.gguf model-Q8_0.gguf --type Q8_0",),
    "ps": ("localllm ps", "localllm ps --host 192.168.1.5:11434"),
    "stop": ("localllm stop qwen3:0.6b",),
    "config": ("localllm config", "localllm config --json"),
    "completion": ("localllm completion bash",),
    "man": ("localllm man",),
    "gpu": ("localllm gpu", "localllm gpu install"),
    "doctor": ("localllm doctor",),
}

FIRST_STEPS = """\b
Examples:
  localllm
  localllm run qwen3:0.6b
  localllm run builtin "Tell me a story about a fox."
  localllm pull qwen3:0.6b
  localllm help COMMAND

Settings come from flags, else from variables LOCALLLM_*, else from the user's config.toml."""


def examples(command: str) -> str:
    """The examples at the end of a command's help; "\\b" keeps their line breaks."""
    lines = [f"  {line}" for line in EXAMPLES.get(command, ())]
    return "\n".join(["\b", "Examples:", *lines]) if lines else ""


class PlainGroup(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_pydantic(super().get_params(ctx))


class CommandPanels(PlainGroup):
    """All commands, listed in panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(len(name) for names in PANELS.values() for name in names)
        for title, names in PANELS.items():
            listed = [(name, self.commands[name]) for name in names if name in self.commands]
            room = formatter.width - width - 6  # what click leaves for a description in its own list
            rows = [(name.ljust(width), command.get_short_help_str(room)) for name, command in listed]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class PlainCommand(TyperCommand):
    """A command whose help shows arguments by name, without Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_pydantic(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reject surplus arguments, with a hint about unquoted prompts."""
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            prompts = any(one.name == "prompt" and one.param_type_name == "argument" for one in self.params)
            hint = " Put quotes around a prompt of several words." if prompts else ""
            ctx.fail(f"Unexpected argument {shortened(rest[0])!r}.{hint}")
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            if rows := self.rows(ctx, kind):
                with formatter.section(title):
                    formatter.write_dl(rows)

    def rows(self, ctx: Any, kind: str) -> list[tuple[str, str]]:
        """Name and description of each argument, or of each option."""
        parameters = [one for one in self.get_params(ctx) if one.param_type_name == kind]
        rows = [(row[0], _ranges(row[1])) for one in parameters if (row := one.get_help_record(ctx))]
        return [(name.partition(" <")[0], text) for name, text in rows] if kind == "argument" else rows


def _ranges(text: str) -> str:
    """A help text with ranges in words: typer writes them as x>=1 and 1<=x<=8."""
    return re.sub(r"x>=([\d.]+)", r"at least \1", re.sub(r"([\d.]+)<=x<=([\d.]+)", r"\1 to \2", text))


def _without_pydantic(parameters: list[Any]) -> list[Any]:
    """Make the parameters, --help among them, bypass typer's converter for texts, integers and missing values."""
    for parameter in parameters:
        if "process_value" not in vars(parameter):
            parameter.process_value = partial(_converted, parameter, parameter.process_value)
    return parameters


def _converted(parameter: Any, convert: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    """Convert texts and numbers here, others by typer's `convert`: it imports pydantic, which takes 0.1 s."""
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if value is None and not parameter.required:
        value = () if parameter.multiple or parameter.nargs == -1 else None
    elif kind in (int, float) and isinstance(value, str):
        value = _number(parameter, kind, context, value)
    elif kind is not str or not isinstance(value, str):
        return convert(context, value)
    return parameter.callback(context, parameter, value) if parameter.callback else value


def _number(parameter: Any, kind: type[int] | type[float], context: Any, text: str) -> float:
    """A number within the parameter's bounds. Raises typer.BadParameter."""
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        wanted = f"must be a {'whole number' if kind is int else 'number'}"
    elif parameter.min is not None and number < parameter.min:
        wanted = f"must be at least {parameter.min}"
    elif parameter.max is not None and number > parameter.max:
        wanted = f"must be at most {parameter.max}"
    else:
        return number
    raise typer.BadParameter(f"{wanted} (got {shortened(text)}).", context, parameter)
