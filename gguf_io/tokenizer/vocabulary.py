"""A model's vocabulary as its file defines it: token texts, types, scores, roles and flags."""

import logging
from dataclasses import dataclass

from gguf_io.errors import DAMAGED, TokenizerError, shortened
from gguf_io.metadata import Metadata, MetadataArray
from gguf_io.tokenizer.pretokenizers import PreTokenizer, find_pre_tokenizer
from gguf_io.tokenizer.special_tokens import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SpecialIds,
    find_end_ids,
    find_special_ids,
    kind_overrides,
)

_log = logging.getLogger(__name__)

# By tokenizer.ggml.model: the ids that llama.cpp uses if a file gives none. Its 11 for gpt2 is falcon's and an ordinary
# comma elsewhere, so it is left out here.
_DEFAULT_IDS = {
    "llama": SpecialIds(bos_id=1, eos_id=2, unk_id=0),
    "gpt2": SpecialIds(),
    "gemma4": SpecialIds(),
    "t5": SpecialIds(eos_id=1, unk_id=2, pad_id=0),
    "bert": SpecialIds(bos_id=101, unk_id=100, sep_id=102, pad_id=0, mask_id=103),
}


# Pre-tokenizers of models that read pairs of texts with a token between them.
_SEPARATING = ("jina-v1-en", "jina-v2-code", "roberta-bpe")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts as the file spells them, with everything else that the file says about them.

    ids: from text to token id, every text once. kinds: the types of special_tokens.py, corrected by name.
    never_text: tokens that are control or unknown in the file itself, which no text may become by merging.
    add_sep: whether a separator comes between a pair of texts.
    add_space_prefix: whether a space is put before a text; the normalisation of "t5" does that by itself.
    lstrip, rstrip: special tokens that swallow the white space before or after them.
    """

    model: str
    pre: str
    tokens: list[str]
    ids: dict[str, int]
    kinds: list[int]
    never_text: frozenset[int]
    special: SpecialIds
    end_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_sep: bool
    add_space_prefix: bool
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
        if self.special.unk_id is None:
            raise TokenizerError(
                "tokenizer.ggml.unknown_token_id is missing. The file is incomplete: convert it again."
            )
        return self.special.unk_id

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
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(index for index, token in enumerate(tokens) if ids[token] != index)
        raise TokenizerError(
            f"tokenizer.ggml.tokens: {twice} and {ids[tokens[twice]]} are both {shortened(tokens[twice])!r}. {DAMAGED}"
        )
    kinds = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        kinds = metadata.get_list("tokenizer.ggml.token_type", int, length=len(tokens))
    never_text = frozenset(index for index, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN))
    special = find_special_ids(metadata, ids, _DEFAULT_IDS[model])
    ends = find_end_ids(ids, never_text, special)
    for token, kind in kind_overrides(ids, metadata, special, ends).items():
        kinds[token] = kind
    pre, pre_tokenizer = _pre_tokenizer(metadata, model)
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
        add_bos=_adds_bos(metadata, model, special, pre_tokenizer),
        add_eos=_adds_eos(metadata, model, special),
        add_sep=metadata.get_bool("tokenizer.ggml.add_sep_token", model == "bert" or pre in _SEPARATING),
        add_space_prefix=model != "t5" and metadata.get_bool("tokenizer.ggml.add_space_prefix", model == "llama"),
        lstrip=lstrip,
        rstrip=rstrip,
        pre_tokenizer=pre_tokenizer,
        metadata=metadata,
    )


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


def _adds_bos(metadata: Metadata, model: str, special: SpecialIds, pre_tokenizer: PreTokenizer | None) -> bool:
    implied = model in ("llama", "bert") or (pre_tokenizer is not None and pre_tokenizer.add_bos)
    wanted = metadata.get_bool("tokenizer.ggml.add_bos_token", implied)
    if pre_tokenizer is not None and pre_tokenizer.whole_newlines:
        wanted = True  # gemma 4 files wrongly say no; llama.cpp overrides them too
    return _checked("bos", metadata, wanted, special.bos_id)


def _adds_eos(metadata: Metadata, model: str, special: SpecialIds) -> bool:
    wanted = metadata.get_bool("tokenizer.ggml.add_eos_token", model == "t5")
    return _checked("eos", metadata, wanted, special.eos_id)


def _checked(role: str, metadata: Metadata, wanted: bool, token: int | None) -> bool:
    key = f"tokenizer.ggml.add_{role}_token"
    if wanted and token is None and key in metadata:
        raise TokenizerError(
            f"{key} is true, but the file has no {role} token. "
            f"Convert the model again, with tokenizer.ggml.{role}_token_id."
        )
    return wanted and token is not None


def _stripping(
    metadata: Metadata, ids: dict[str, int], kinds: list[int], pre: str
) -> tuple[frozenset[int], frozenset[int]]:
    """Tokens with lstrip and rstrip, which files leave out, by model; source: end of llama_vocab::impl::load."""
    name = metadata.get_str("general.name", "").lower()
    architecture = metadata.get_str("general.architecture", "")
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")
    ):
        return frozenset({ids["<mask>"]} if "<mask>" in ids else ()), frozenset()
    if "phi-3" in name or "phi3" in name:
        special = {index for index, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED, UNKNOWN)}
        plain = {ids[text] for text in ("<unk>", "<s>", "<|endoftext|>") if text in ids}
        return frozenset(), frozenset((special | ({ids["</s>"]} if "</s>" in ids else set())) - plain)
    if "modern-bert" in name:
        return frozenset({ids["[MASK]"]} if "[MASK]" in ids else ()), frozenset()
    return frozenset(), frozenset()
