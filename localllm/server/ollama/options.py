"""Ollama's `options` and defaults, as fields of an AnswerRequest."""

import logging
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from localllm.answer.request import UNLIMITED
from localllm.engine.request import SamplingParams
from localllm.sampling import ALIASES
from localllm.server.bodies import note_unknown, stop_strings
from localllm.server.errors import ApiError
from localllm.server.limits import MAX_ADAPTERS, MAX_INT, MAX_MARK_KEY_CHARS
from localllm.settings import IMAGE_TOKENS
from localllm.text import nearest

# Our sampling parameters have Ollama's names.
_INTEGERS, _NUMBERS = (
    frozenset(field.name for field in fields(SamplingParams) if field.type is kind) for kind in (int, float)
)
_LIMITS = frozenset({"num_ctx", "num_keep", "num_predict", "seed"})
_IMAGE_TOKENS = frozenset({"image_min_tokens", "image_max_tokens"})

# Options of Ollama's runner, and obsolete ones that clients still send. They are accepted without effect.
WITHOUT_EFFECT = frozenset(
    {
        "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "draft_num_predict",
        "numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "penalize_newline", "tfs_z",
    }
)  # fmt: skip

DEFAULTS = SamplingParams(top_p=0.9, min_p=0.0)
LONGEST_NAME = 64


def read_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of an AnswerRequest. Unknown names are logged once. Raises ApiError 400 for a value of the wrong type."""
    sampling: dict[str, Any] = {}
    read: dict[str, Any] = {"sampling": sampling, "defaults": DEFAULTS}
    unknown: list[str] = []
    for name, value in ((ALIASES.get(name, name), value) for name, value in (given or {}).items()):
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in _INTEGERS:
            sampling[name] = _integer(name, value)
        elif name in _NUMBERS:
            sampling[name] = _number(name, value)
        elif name == "dry_sequence_breakers":
            sampling[name] = stop_strings(value, name)
        elif name == "watermark_key":
            if not isinstance(value, str) or len(value) > MAX_MARK_KEY_CHARS:
                raise ApiError(400, f'option "{name}" must be a string of at most {MAX_MARK_KEY_CHARS} characters')
            sampling[name] = value
        elif name == "stop":
            read["stop"] = stop_strings(value)
        elif name == "lora":
            read["adapters"] = _adapters(value)
        elif name == "seed":
            sampling[name] = _integer(name, value, -(2**63), 2**63 - 1)
        elif name in _IMAGE_TOKENS:
            read[name] = _integer(name, value, int(IMAGE_TOKENS.low), int(IMAGE_TOKENS.high))
        elif name in _LIMITS:
            read |= _limit(name, _integer(name, value))
        else:
            unknown.append(name)
    note_unknown(unknown, "unknown option {}", logging.WARNING, _hint)
    return read


def _limit(name: str, value: int) -> dict[str, int | None]:
    if name == "num_keep":
        return {"keep": value}
    if name == "num_ctx":
        return {"context_limit": max(value, 4) if value > 0 else None}
    return {"max_tokens": UNLIMITED if value < 0 else value}


def _adapters(value: Any) -> tuple[tuple[int, float], ...]:
    """LoRA adapters by index, as in llama.cpp's server: [{"id": 0, "scale": 0.5}]; an empty list uses none."""
    if not isinstance(value, list) or len(value) > MAX_ADAPTERS or not all(isinstance(one, dict) for one in value):
        raise ApiError(400, f'option "lora" must be of type array of at most {MAX_ADAPTERS} objects with id and scale')
    return tuple((_integer("lora.id", one.get("id"), 0), _number("lora.scale", one.get("scale", 1.0))) for one in value)


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
    near = nearest(
        name[:LONGEST_NAME],
        [*_INTEGERS, *_NUMBERS, *_LIMITS, *_IMAGE_TOKENS, "dry_sequence_breakers", "lora", "stop", "watermark_key"],
    )
    return f"; did you mean {near!r}?" if near else ""
