"""Ollama's `options` as sampling parameters and limits, with its defaults."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.engine.request import SamplingParams
from localllm.server.errors import ApiError
from localllm.server.limits import MAX_ADAPTERS, MAX_INT, MAX_STOP_CHARS, MAX_STOPS

_INTEGERS = frozenset({"top_k", "repeat_last_n", "mirostat", "dry_allowed_length", "dry_penalty_last_n", "min_keep"})
_NUMBERS = frozenset(
    {
        "temperature", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
        "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
        "dynatemp_range", "dynatemp_exponent", "mirostat_tau", "mirostat_eta",
    }
)  # fmt: skip
_LIMITS = frozenset({"num_ctx", "num_keep", "num_predict", "seed"})

# How Ollama's own runner is to work, and options that it once had. Clients still send them; nothing here needs them.
WITHOUT_EFFECT = frozenset(
    {
        "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "draft_num_predict",
        "numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "penalize_newline", "tfs_z",
    }
)  # fmt: skip

_DEFAULTS = SamplingParams(top_p=0.9, min_p=0.0)


@dataclass(frozen=True, slots=True)
class Options:
    """max_tokens None is to the end of the context; context_limit None is the engine's own, adapters None the usual.

    keep: see GenerationRequest.
    """

    sampling: SamplingParams = _DEFAULTS
    max_tokens: int | None = None
    context_limit: int | None = None
    stop: tuple[str, ...] = ()
    adapters: tuple[tuple[int, float], ...] | None = None
    keep: int | None = None


def read_options(given: Mapping[str, Any] | None) -> Options:
    """Translate options. Raises ApiError 400 for an unknown name or a value of the wrong type."""
    options = Options()
    sampling: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in _INTEGERS:
            sampling[name] = _integer(name, value)
        elif name in _NUMBERS:
            sampling[name] = _number(name, value)
        elif name == "stop":
            options = replace(options, stop=stop_strings(value))
        elif name == "lora":
            options = replace(options, adapters=_adapters(value))
        elif name in _LIMITS:
            options = _with_limit(options, name, _limit(name, value))
        else:
            raise ApiError(400, f"unknown option {name[:64]!r}{_hint(name[:64])}")
    return replace(options, sampling=replace(options.sampling, **sampling))


def _limit(name: str, value: Any) -> int:
    return _integer(name, value, -(2**63), 2**63 - 1) if name == "seed" else _integer(name, value)


def _with_limit(options: Options, name: str, value: int) -> Options:
    if name == "seed":
        return replace(options, sampling=replace(options.sampling, seed=None if value < 0 else value))
    if name == "num_keep":
        return replace(options, keep=value)
    if name == "num_ctx":
        return replace(options, context_limit=max(value, 4) if value else None)
    return replace(options, max_tokens=None if value < 0 else value)


def _adapters(value: Any) -> tuple[tuple[int, float], ...]:
    """LoRA adapters by number, as llama.cpp's server has them: [{"id": 0, "scale": 0.5}]; an empty list is none."""
    if not isinstance(value, list) or len(value) > MAX_ADAPTERS or not all(isinstance(one, dict) for one in value):
        raise ApiError(400, f'option "lora" must be of type array of at most {MAX_ADAPTERS} objects with id and scale')
    return tuple((_integer("lora.id", one.get("id"), 0), _number("lora.scale", one.get("scale", 1.0))) for one in value)


def stop_strings(value: Any) -> tuple[str, ...]:
    """One text or a list of them; empty ones are left out. ApiError 400 for others, for too many and too long ones."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ApiError(400, 'option "stop" must be of type array of strings')
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ApiError(400, f"at most {MAX_STOPS} stop strings of {MAX_STOP_CHARS} characters are allowed")
    return tuple(stop for stop in stops if stop)


def _integer(name: str, value: Any, least: int = -MAX_INT, most: int = MAX_INT) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ApiError(400, f'option "{name}" must be of type integer')
    if not least <= value <= most:
        raise ApiError(400, f'option "{name}" is out of range')
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(400, f'option "{name}" must be of type number')
    if abs(value) > MAX_INT or not math.isfinite(value):
        raise ApiError(400, f'option "{name}" is out of range')
    return float(value)


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name, [*_INTEGERS, *_NUMBERS, *_LIMITS, "lora", "stop"], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
