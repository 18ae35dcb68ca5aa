# ruff: noqa: RUF001 - some models write their token names with look-alike characters
"""Which tokens end a generation, a turn or a file, by name if the file does not say.

Converters often leave these ids out, so llama.cpp goes by a token's text; these are its names and its exceptions.
Source: llama_vocab::impl::load in llama.cpp's src/llama-vocab.cpp.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from gguf_io.metadata import Metadata

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_EOT = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
_EOM = ("<|eom_id|>",)
_EOG = (
    *_EOT,
    *_EOM,
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "</s>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
)
_FIM = {
    "fim_prefix_id": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suffix_id": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_middle_id": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_repo_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_id": ("<|file_sep|>",),
}
_NAMES = {"eot_id": _EOT, "eom_id": _EOM, **_FIM}

# Parts of a message that must appear in decoded text, whatever type the file gives them. They still frame messages.
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
FRAMING = (*_SHOWN, "<|end|>")

_KEYS = {
    "bos_id": ("bos_token_id",),
    "eos_id": ("eos_token_id",),
    "eot_id": ("eot_token_id",),
    "eom_id": ("eom_token_id",),
    "unk_id": ("unknown_token_id",),
    "sep_id": ("seperator_token_id",),  # the format's own spelling
    "pad_id": ("padding_token_id",),
    "mask_id": ("mask_token_id",),
    "fim_prefix_id": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suffix_id": ("fim_suf_token_id", "suffix_token_id"),
    "fim_middle_id": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad_id": ("fim_pad_token_id",),
    "fim_repo_id": ("fim_rep_token_id",),
    "fim_sep_id": ("fim_sep_token_id",),
}


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Token ids by role; None if the vocabulary has no such token."""

    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    eom_id: int | None = None
    unk_id: int | None = None
    sep_id: int | None = None
    pad_id: int | None = None
    mask_id: int | None = None
    fim_prefix_id: int | None = None
    fim_suffix_id: int | None = None
    fim_middle_id: int | None = None
    fim_pad_id: int | None = None
    fim_repo_id: int | None = None
    fim_sep_id: int | None = None


def find_special_ids(metadata: Metadata, ids: Mapping[str, int], defaults: SpecialIds) -> SpecialIds:
    """The ids that the file gives, else `defaults`, else those of tokens with known names. Ids beyond the vocabulary
    count as not given (old files write 4294967295).
    """
    found: dict[str, int | None] = {}
    for role, keys in _KEYS.items():
        default: int | None = getattr(defaults, role)
        found[role] = default if default is not None and default < len(ids) else None
        for key in keys:
            value = metadata.get_int(f"tokenizer.ggml.{key}", -1, minimum=-1)
            if 0 <= value < len(ids):
                found[role] = value
    for role, names in _NAMES.items():
        if found[role] is None:
            found[role] = next((ids[name] for name in names if name in ids), None)
    return replace(defaults, **found)


def find_end_ids(ids: Mapping[str, int], control: Collection[int], special: SpecialIds) -> frozenset[int]:
    """The tokens after which generation stops: by role, and by name. control: those of type control in the file."""
    ends = {ids[name] for name in _EOG if name in ids}
    roles = (
        special.eos_id,
        special.eot_id,
        special.eom_id,
        special.fim_pad_id,
        special.fim_repo_id,
        special.fim_sep_id,
    )
    ends.update(token for token in roles if token is not None)

    def ending(name: str) -> bool:
        return ids.get(name, -1) in ends

    calls = ending("<|call|>") or ending("<|calls|>")
    if ending("<|end|>") and calls and (ending("<|return|>") or ending("<|flush|>")):
        ends.remove(ids["<|end|>"])  # it ends one message of several, in harmony's and solar's formats
    if ending("</s>") and ids["</s>"] != special.eos_id and ids["</s>"] not in control:
        ends.remove(ids["</s>"])  # HTML: qwen's and gemma 4's ordinary token; llama.cpp excepts only the latter
    return frozenset(ends)


def kind_overrides(
    ids: Mapping[str, int], metadata: Metadata, special: SpecialIds, ends: frozenset[int]
) -> dict[int, int]:
    """Token types that override the file's, by name: ends and fill-in-the-middle are control, framing user-defined."""
    kinds = {ids[name]: CONTROL for name in _EOG if name in ids and ids[name] in ends}
    for role in _FIM:
        token: int | None = getattr(special, role)
        if token is not None and not any(f"tokenizer.ggml.{key}" in metadata for key in _KEYS[role]):
            kinds[token] = CONTROL
    kinds.update({ids[name]: USER_DEFINED for name in _SHOWN if name in ids})
    if "<|end|>" in ids and ids["<|end|>"] not in ends:
        kinds[ids["<|end|>"]] = USER_DEFINED
    return kinds
