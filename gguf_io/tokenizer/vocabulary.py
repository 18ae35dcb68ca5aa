# ruff: noqa: RUF001 - some models write their token names with look-alike characters
"""A model's vocabulary as its file defines it: token texts, types, scores, roles and flags.

Converters often leave out which tokens end a generation, a turn or a file. llama.cpp then goes by a token's text; these
are its names and its exceptions. Source: llama_vocab::impl::load in llama.cpp's src/llama-vocab.cpp.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gguf_io.errors import DAMAGED, TokenizerError, shortened
from gguf_io.metadata import Metadata, MetadataArray
from gguf_io.tokenizer.pretokenizers import PreTokenizer, find_pre_tokenizer

_log = logging.getLogger(__name__)

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

LONGEST_WORD = 100
"""Characters of the longest word that word pieces spell, if the file states no other number, as in BERT."""

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
    "fim_prefix": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suffix": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_middle": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_repo": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_NAMES = {"eot": _EOT, "eom": _EOM, **_FIM}

# Parts of a message that must appear in decoded text, whatever type the file gives them. They still frame messages.
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
FRAMING = (*_SHOWN, "<|end|>")

# By role: the keys of its token id.
_KEYS = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id",),  # the format's own spelling
    "fim_prefix": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suffix": ("fim_suf_token_id", "suffix_token_id"),
    "fim_middle": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_repo": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}
_ENDING = ("eos", "eot", "eom", "fim_pad", "fim_repo", "fim_sep")

# By tokenizer.ggml.model: the ids that llama.cpp uses if a file gives none. Its 11 for gpt2 is falcon's and an ordinary
# comma elsewhere, so it is left out here.
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "gpt2": {},
    "gemma4": {},
    "t5": {"eos": 1, "unk": 2},
    "bert": {"bos": 101, "unk": 100, "sep": 102},
}


# Pre-tokenizers of models that read pairs of texts with a token between them.
_SEPARATING = ("jina-v1-en", "jina-v2-code", "roberta-bpe")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts as the file spells them, with everything else that the file says about them."""

    model: str
    pre: str
    tokens: list[str]
    # From text to token id, every text once.
    ids: dict[str, int]
    # Values of tokenizer.ggml.token_type, corrected by name.
    kinds: list[int]
    # Tokens that are control or unknown in the file itself, which no text may become by merging.
    never_text: frozenset[int]
    # Token ids by role, for the roles that have one.
    special: dict[str, int]
    end_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    # Whether a separator comes between a pair of texts.
    add_sep: bool
    # Whether a space is put before a text; the normalisation of "t5" does that by itself.
    add_space_prefix: bool
    # lstrip, rstrip: special tokens that swallow the white space before or after them.
    lstrip: frozenset[int]
    rstrip: frozenset[int]
    pre_tokenizer: PreTokenizer | None
    metadata: Metadata

    @property
    def spells_bytes(self) -> bool:
        """Whether normal tokens are spelled in GPT-2's byte alphabet."""
        return self.pre_tokenizer is not None and self.pre_tokenizer.byte_level

    def need_unk_id(self) -> int:
        """The unknown token. Raises TokenizerError if there is none."""
        if "unk" not in self.special:
            raise TokenizerError(
                "tokenizer.ggml.unknown_token_id is missing. The file is incomplete: convert it again."
            )
        return self.special["unk"]

    def scores(self) -> list[float]:
        """One score per token; zeros if the file has none."""
        key = "tokenizer.ggml.scores"
        if key not in self.metadata:
            return [0.0] * len(self.tokens)
        array = self.metadata[key]
        if isinstance(array, MetadataArray) and len(array) and isinstance(array[0], int):  # some converters round
            return [float(score) for score in self.metadata.get_list(key, int, length=len(self.tokens))]
        return self.metadata.get_list(key, float, length=len(self.tokens))


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Reads all but scores and merges, which only encoding needs.

    Raises TokenizerError for an unknown kind of tokenizer and for contradictions, ModelFileError for keys that are
    missing or of the wrong type.
    """
    model = metadata.get_str("tokenizer.ggml.model")
    if model not in _DEFAULT_IDS:
        raise TokenizerError(
            f"tokenizer.ggml.model is '{shortened(model)}', which localllm cannot read. "
            f"It reads {', '.join(_DEFAULT_IDS)}."
        )
    tokens = metadata.get_list("tokenizer.ggml.tokens", str)
    if "" in tokens:
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        twice = next(index for index, token in enumerate(tokens) if ids[token] != index)
        raise TokenizerError(
            f"tokenizer.ggml.tokens: {twice} and {ids[tokens[twice]]} are both {shortened(tokens[twice])!r}. {DAMAGED}"
        )
    kinds = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        kinds = metadata.get_list("tokenizer.ggml.token_type", int, length=len(tokens))
    never_text = frozenset(index for index, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN))
    special = _find_special_ids(metadata, ids, _DEFAULT_IDS[model])
    ends = _find_end_ids(ids, never_text, special)
    for token, kind in _kind_overrides(ids, metadata, special, ends).items():
        kinds[token] = kind
    pre, pre_tokenizer = _pre_tokenizer(metadata, model)
    bos_implied = model in ("llama", "bert") or (pre_tokenizer is not None and pre_tokenizer.add_bos)
    # Gemma 4's files wrongly say no; llama.cpp overrides them too.
    bos_always = pre_tokenizer is not None and pre_tokenizer.whole_newlines
    lstrip, rstrip = _stripping(metadata, ids, kinds, pre)
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        ids=ids,
        kinds=kinds,
        never_text=never_text,
        special=special,
        end_ids=ends,
        add_bos=_adds("bos", metadata, bos_implied, special, always=bos_always),
        add_eos=_adds("eos", metadata, model == "t5", special),
        add_sep=metadata.get_bool("tokenizer.ggml.add_sep_token", model == "bert" or pre in _SEPARATING),
        add_space_prefix=model != "t5" and metadata.get_bool("tokenizer.ggml.add_space_prefix", model == "llama"),
        lstrip=lstrip,
        rstrip=rstrip,
        pre_tokenizer=pre_tokenizer,
        metadata=metadata,
    )


def _find_special_ids(metadata: Metadata, ids: Mapping[str, int], defaults: Mapping[str, int]) -> dict[str, int]:
    """By role: the id that the file gives, else the default, else that of a token with a known name. Ids beyond the
    vocabulary count as not given (old files write 4294967295).
    """
    found = {role: token for role, token in defaults.items() if token < len(ids)}
    for role, keys in _KEYS.items():
        for key in keys:
            value = metadata.get_int(f"tokenizer.ggml.{key}", -1, minimum=-1)
            if 0 <= value < len(ids):
                found[role] = value
    for role, names in _NAMES.items():
        for name in names:
            if name in ids:
                found.setdefault(role, ids[name])
    return found


def _known(ids: Mapping[str, int], names: Iterable[str]) -> set[int]:
    """The ids of those names that are there."""
    return {ids[name] for name in names if name in ids}


def _find_end_ids(ids: Mapping[str, int], control: frozenset[int], special: Mapping[str, int]) -> frozenset[int]:
    """The tokens after which generation stops: by role, and by name. control: those of type control in the file."""
    ends = _known(ids, _EOG) | _known(special, _ENDING)
    if ends & _known(ids, ("<|call|>", "<|calls|>")) and ends & _known(ids, ("<|return|>", "<|flush|>")):
        ends -= _known(ids, ("<|end|>",))  # it ends one message of several, in harmony's and solar's formats
    # HTML: qwen's and gemma 4's ordinary token; llama.cpp excepts only the latter.
    return frozenset(ends - (_known(ids, ("</s>",)) - {special.get("eos")} - control))


def _kind_overrides(
    ids: Mapping[str, int], metadata: Metadata, special: Mapping[str, int], ends: frozenset[int]
) -> dict[int, int]:
    """Token types that override the file's, by name: ends and fill-in-the-middle are control, framing user-defined."""
    kinds = dict.fromkeys(_known(ids, _EOG) & ends, CONTROL)
    for role in _FIM:
        if role in special and not any(f"tokenizer.ggml.{key}" in metadata for key in _KEYS[role]):
            kinds[special[role]] = CONTROL
    return kinds | dict.fromkeys(_known(ids, _SHOWN) | (_known(ids, ("<|end|>",)) - ends), USER_DEFINED)


def _pre_tokenizer(metadata: Metadata, model: str) -> tuple[str, PreTokenizer | None]:
    pre = "gemma4" if model == "gemma4" else metadata.get_str("tokenizer.ggml.pre", "")
    if model not in ("gpt2", "gemma4"):
        return pre or "default", None
    if not pre:
        _log.warning(
            "The file names no pre-tokenizer (tokenizer.ggml.pre is missing), so answers may be worse than they should "
            "be. Convert the model again."
        )
        pre = "default"
    return pre, find_pre_tokenizer(pre)


def _adds(role: str, metadata: Metadata, implied: bool, special: Mapping[str, int], always: bool = False) -> bool:
    """Whether a text gets this token: if the file says so or `always`, else if it is implied."""
    key = f"tokenizer.ggml.add_{role}_token"
    wanted = metadata.get_bool(key, implied) or always
    if wanted and role not in special and key in metadata:
        raise TokenizerError(
            f"{key} is true, but the file has no {role} token. "
            f"Convert the model again, with tokenizer.ggml.{role}_token_id."
        )
    return wanted and role in special


def _stripping(
    metadata: Metadata, ids: dict[str, int], kinds: list[int], pre: str
) -> tuple[frozenset[int], frozenset[int]]:
    """Tokens with lstrip and rstrip, which files leave out, by model; source: end of llama_vocab::impl::load."""
    name = metadata.get_str("general.name", "").lower()
    architecture = metadata.get_str("general.architecture", "")
    if re.search("jina-v2-(de|es|code)", pre) or re.search("nomic-bert-moe|jina-bert-v3", architecture):
        return frozenset(_known(ids, ("<mask>",))), frozenset()
    if "phi-3" in name or "phi3" in name:
        special = {index for index, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED, UNKNOWN)}
        plain = _known(ids, ("<unk>", "<s>", "<|endoftext|>"))
        return frozenset(), frozenset((special | _known(ids, ("</s>",))) - plain)
    if "modern-bert" in name:
        return frozenset(_known(ids, ("[MASK]",))), frozenset()
    return frozenset(), frozenset()
