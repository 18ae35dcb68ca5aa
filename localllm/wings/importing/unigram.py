"""A Unigram tokenizer (XLM-RoBERTa's) as GGUF's "t5": pieces, scores, and the map that normalises characters.

Source: llama.cpp, conversion/bert.py (_xlmroberta_set_vocab).
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from gguf_io.tokenizer.vocabulary import UNKNOWN
from localllm.text import shortened
from localllm.wings.importing.errors import CheckpointError

_LEAST_SCORE = -10_000.0  # of tokens that are not pieces
_RUN_OF_SPACES = {"Regex": " {2,}"}
_MERGES, _STRIPS = {"WhitespaceSplit"}, {"Strip", "Replace"}  # steps that merge runs of spaces: alone, and together


def unigram_keys(content: Mapping[str, Any], tokens: list[str], kinds: list[int], where: str) -> dict[str, Any]:
    """The tokenizer's keys. Raises CheckpointError if its steps differ from SentencePiece's."""
    model = content["model"]
    if model.get("byte_fallback"):
        raise CheckpointError(f"{where}: Unigram with byte fallback cannot be imported. Get the model as GGUF instead.")
    scores = [_LEAST_SCORE] * len(tokens)
    for index, (_, score) in enumerate(model["vocab"]):
        scores[index] = float(score)
    if (unknown := model.get("unk_id")) is not None:
        kinds[unknown] = UNKNOWN
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": False,
    }
    if unknown is not None:
        keys["tokenizer.ggml.unknown_token_id"] = unknown
    found = set()
    for step in all_steps(content):
        found.add(kind := step.get("type"))
        if kind == "Precompiled":
            keys["tokenizer.ggml.precompiled_charsmap"] = _map(step["precompiled_charsmap"], where)
        elif kind == "Metaspace":
            keys["tokenizer.ggml.add_space_prefix"] = puts_space_before(step)
        elif kind not in _MERGES | _STRIPS and not (kind == "Replace" and step.get("pattern") == _RUN_OF_SPACES):
            raise CheckpointError(
                f"{where}: normalises or cuts by {shortened(str(kind))}, which SentencePiece does not. "
                "Get the model as GGUF instead."
            )
    merges = keys["tokenizer.ggml.remove_extra_whitespaces"] = bool(found & _MERGES or found >= _STRIPS)
    if keys["tokenizer.ggml.add_space_prefix"] and not merges:  # a leading space of the text must not be doubled
        raise CheckpointError(
            f"{where}: keeps runs of spaces and puts one before a text, which GGUF cannot express. "
            "Get the model as GGUF instead."
        )
    return keys


def all_steps(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The steps of a tokenizer's normalizer and pre-tokenizer, with nested lists flattened."""
    yield from _steps(content.get("normalizer"))
    yield from _steps(content.get("pre_tokenizer"))


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part.get("type") != "Sequence":
        yield part
        return
    for each in part.get("normalizers") or part.get("pretokenizers") or []:
        yield from _steps(each)


def _map(stated: str, where: str) -> bytes:
    try:
        return base64.b64decode(stated, validate=True)
    except (binascii.Error, TypeError) as error:
        raise CheckpointError(f"{where}: precompiled_charsmap is not base64. Download the folder again.") from error


def puts_space_before(step: Mapping[str, Any]) -> bool:
    """Whether a Metaspace step puts a space before a text, by the older or the newer name of the setting."""
    scheme = step.get("prepend_scheme")
    return bool(step.get("add_prefix_space", True)) if scheme is None else scheme != "never"
