"""Options shared by several commands."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Self, TypeVar

import typer

from localllm.errors import LocalLLMError, RequestError
from localllm.front.terminal import log_to_stderr

N = TypeVar("N", int, float)

PROGRAM, COMPLETION_VARIABLE = "localllm", "_LOCALLLM_COMPLETE"


def model_names(incomplete: str) -> list[str]:
    """Names of local models for shell completion. If none match, the shell completes paths itself."""
    from localllm.library.lookup import all_models
    from localllm.settings import load_settings

    with contextlib.suppress(LocalLLMError):  # completion must not print messages into the shell's prompt
        return [model.name for model in all_models(load_settings({})) if model.name.startswith(incomplete)]
    return []


Model = Annotated[
    str, typer.Argument(help="Name, path or URL of a model.", show_default=False, autocompletion=model_names)
]
UsualModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="Model to use (the one last used in the chat).",
        autocompletion=model_names,
    ),
]
Remote = Annotated[str | None, typer.Option(metavar="URL", help="Use a server with OpenAI's protocol.")]
# Flags that only an in-process engine can honour: where and how it computes.
COMPUTING: dict[str, object] = {
    "ctx": Annotated[int | None, typer.Option(metavar="N", help="Context limit in tokens (the model's).")],
    "threads": Annotated[int | None, typer.Option(metavar="N", help="CPU threads (one per core).")],
    "backend": Annotated[str | None, typer.Option(metavar="NAME", help="auto, native or llama (auto).")],
    "gpu_layers": Annotated[int | None, typer.Option(metavar="N", help="Layers on GPUs (as many as fit).")],
    "main_gpu": Annotated[int | None, typer.Option(metavar="N", help="Put everything on this GPU, counted from 0.")],
    "split_mode": Annotated[
        str | None, typer.Option(metavar="HOW", help="Spread over GPUs by layer or row; none takes one GPU (layer).")
    ],
    "n_cpu_moe": Annotated[
        int | None,
        typer.Option("--n-cpu-moe", metavar="N", help="Keep the experts of the first N layers off the GPUs."),
    ],
    "lora": Annotated[
        list[str] | None,
        typer.Option(metavar="FILE[:W]", help="Apply a LoRA adapter with this weight (1); repeatable."),
    ],
    "mmproj": Annotated[
        str | None, typer.Option(metavar="FILE", help="Image projector, or none (the one beside the model).")
    ],
    "image_min_tokens": Annotated[
        int | None, typer.Option(metavar="N", help="At least N tokens for each picture (the model's limit).")
    ],
    "image_max_tokens": Annotated[
        int | None, typer.Option(metavar="N", help="At most N tokens for each picture (the model's limit).")
    ],
    "rpc": Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Put layers on llama.cpp's worker there; repeatable, or with commas."),
    ],
    "kv_type_k": Annotated[
        str | None, typer.Option("--kv-type-k", metavar="TYPE", help="Store keys as f16, q8_0 or q4_0 (f16).")
    ],
    "kv_type_v": Annotated[
        str | None, typer.Option("--kv-type-v", metavar="TYPE", help="Store values as f16, q8_0 or q4_0 (f16).")
    ],
}
_ONLY_HERE = (*COMPUTING, "draft", "disk_cache")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEBUG: dict[str, object] = {
    "debug": Annotated[
        bool, typer.Option("--debug", help="Show debug messages, and tracebacks of errors.", callback=log_to_stderr)
    ]
}


@dataclass(frozen=True)
class Flags:
    """Base of records whose fields are flags of a command, added with `with_flags`."""

    @classmethod
    def of(cls, given: typer.Context) -> Self:
        """The values of a command's flags."""
        return cls(**{field.name: given.params[field.name] for field in fields(cls)})


def with_flags(
    flags: Mapping[str, object] | type[Flags], names: Collection[str] | None = None, after: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the named flags, or all, to a command, behind its parameter `after`, or behind all of them.

    Their values are not passed to the command, which reads them from its context (`given.params`, or `Flags.of`). Flags
    of a mapping are None by default.
    """
    if isinstance(flags, type):
        declared = {field.name: (field.type, field.default) for field in fields(flags)}
    else:
        declared = {name: (flag, None) for name, flag in flags.items()}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    added = [
        inspect.Parameter(name, kind, default=default, annotation=flag)
        for name, (flag, default) in declared.items()
        if names is None or name in names
    ]
    hidden = {one.name for one in added}

    def extended(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())
        place = [one.name for one in own].index(after) + 1 if after else len(own)

        @functools.wraps(command)
        def called(**values: object) -> None:
            command(**{name: value for name, value in values.items() if name not in hidden})

        called.__signature__ = inspect.Signature([*own[:place], *added, *own[place:]])  # type: ignore[attr-defined]
        return called

    return extended


def setting_flags(given: typer.Context) -> dict[str, object]:
    """The values of the command's flags that are settings, by name; None for those not given."""
    from localllm.settings import Settings

    values = {name: value for name, value in given.params.items() if name in Settings.__dataclass_fields__}
    return {
        name: ",".join(value) or None if isinstance(value, list | tuple) else value for name, value in values.items()
    }


def refuse_beside_remote(flags: Mapping[str, object], more: Sequence[str] = ()) -> None:
    """Raise RequestError if flags are given that only an in-process engine can honour. more: further such flags."""
    misplaced = [f"--{name.replace('_', '-')}" for name in (*_ONLY_HERE, *more) if flags.get(name) is not None]
    if misplaced:
        raise RequestError(f"{', '.join(misplaced)} cannot be used with --remote: the server decides that.")


def numbers(text: str, option: str, kind: type[N], least: float, most: float = math.inf) -> tuple[N, ...]:
    """The distinct numbers of a comma-separated list, in its order. Raises RequestError."""
    try:
        found = tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(least <= number <= most for number in found):
        bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:,}"
        what = "whole numbers" if kind is int else "numbers"
        example = ",".join(f"{factor * max(least, 1):g}" for factor in (1, 2, 4) if factor * max(least, 1) <= most)
        raise RequestError(f"{option} is {text!r}; use {what} {bounds}, separated by commas, such as {example}.")
    return found
