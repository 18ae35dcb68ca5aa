# ruff: noqa: RUF001 - look-alike characters are part of the probe
"""A Hugging Face tokenizer as GGUF keys: tokens, merges or scores, special ids, the chat template.

GGUF names the pre-tokenizer of a byte-level tokenizer. The name is found by trying: it is the one in
gguf_io.tokenizer.pretokenizers that cuts a probe text as the tokenizer's own rules do.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from gguf_io.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from gguf_io.tokenizer.vocabulary import BYTE, CONTROL, LONGEST_WORD, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from localllm.text import shortened
from localllm.wings.importing.checkpoint import Checkpoint
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.unigram import all_steps, puts_space_before, unigram_keys

_log = logging.getLogger(__name__)

MAX_TOKENS = 1 << 22
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask",
          "cls": "cls"}  # fmt: skip
# Markers by which answers are split, so they must appear in the text.
_GEMMA4_TEXT = {
    f"<{bar}>" for name in ("channel", "tool_call", "tool_response") for bar in (f"|{name}", f"{name}|")
} | {'<|"|>'}
# Has boundaries between letters of many scripts, digits, signs, spaces, lines, contractions and capitals.
_PROBE = (
    "Hello, world!  It's 12345678 o'clock,\n\n\tand WE'LL see...  \r\n  3.14159 x=y_z; naïve café déjà-vu ÀÉÎ "
    "camelCaseWord HTTPServer don'T I'D 你好，世界。 こんにちは テスト 안녕하세요 Привет مرحبا 😀🚀 e\u0301 สวัสดี "
    "1,000,000 v1.2.3 /usr/bin <tag> #hash @user $5 100% a\u00a0b   end   \n \n  x"
)


def vocabulary_keys(checkpoint: Checkpoint, size: int) -> dict[str, Any]:
    """The keys of a folder's tokenizer, for a model with `size` tokens.

    Raises CheckpointError for a tokenizer that is missing, damaged, or of a kind that GGUF cannot express.
    """
    content = checkpoint.json("tokenizer.json")
    config = checkpoint.optional_json("tokenizer_config.json") or {}
    where = str(checkpoint.folder / "tokenizer.json")
    try:
        keys = _keys(content, size, where)
        if checkpoint.model_type == "gemma4_text":
            keys |= _gemma4(content, keys)
        if checkpoint.model_type == "laguna":
            keys |= _laguna(checkpoint.config.get("eos_token_id"), keys)
        keys |= _special(checkpoint, content, config, keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.model"])
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{where}: is damaged ({shortened(repr(error))}). Download the folder again.") from error
    if (types := checkpoint.config.get("type_vocab_size")) is not None:
        keys["tokenizer.ggml.token_type_count"] = types
    template = _template(checkpoint, config)
    return keys | ({"tokenizer.chat_template": template} if template else {})


def _keys(content: Mapping[str, Any], size: int, where: str) -> dict[str, Any]:
    model = content["model"]
    kind = model.get("type")
    if kind not in ("BPE", "WordPiece", "Unigram"):
        raise CheckpointError(
            f"{where}: a tokenizer of the kind {shortened(str(kind))!r} is not imported; BPE, WordPiece and Unigram "
            "are."
        )
    added, pieces = content.get("added_tokens") or [], model["vocab"]
    if kind == "Unigram":
        pieces = {piece: index for index, (piece, _) in enumerate(pieces)}
    ids = {**pieces, **{token["content"]: token["id"] for token in added}}
    if not 0 < size <= MAX_TOKENS or any(type(index) is not int or index < 0 for index in ids.values()):
        raise CheckpointError(f"{where}: its token ids are unusable. Download the folder again.")
    if (most := max(ids.values(), default=0)) >= size:
        raise CheckpointError(f"{where}: has a token {most}, and the model's vocabulary is {size}.")
    tokens = [f"[PAD{index}]" for index in range(size)]
    kinds = [UNUSED] * size
    for text, index in ids.items():
        tokens[index], kinds[index] = text, NORMAL
    for token in added:
        kinds[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    if kind == "WordPiece":
        return _word_pieces(content, tokens, kinds, where)
    if kind == "Unigram":
        return unigram_keys(content, tokens, kinds, where)
    pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if model.get("byte_fallback"):
        return keys | _sentence_pieces(content, tokens, kinds, pairs, ids)
    if any(" " in part for pair in pairs for part in pair):
        raise CheckpointError(f"{where}: its merges have spaces in them. Get the model as GGUF instead.")
    pre = _pre_tokenizer(content, where, bool(model.get("ignore_merges")))
    merges = [f"{left} {right}" for left, right in pairs]
    return keys | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": merges,
    }


def _word_pieces(content: Mapping[str, Any], tokens: list[str], kinds: list[int], where: str) -> dict[str, Any]:
    """BERT's tokenizer. GGUF marks tokens that begin a word, instead of those that continue one."""
    model, normalizer = content["model"], content.get("normalizer") or {}
    prefix, splitter = model.get("continuing_subword_prefix", "##"), content.get("pre_tokenizer") or {}
    kinds_of_steps = normalizer.get("type"), splitter.get("type")
    if kinds_of_steps != ("BertNormalizer", "BertPreTokenizer") or prefix != "##":
        raise CheckpointError(f"{where}: it splits words by other rules than BERT. Get the model as GGUF instead.")
    lowercase, accents = normalizer.get("lowercase", True), normalizer.get("strip_accents")
    # Keys of our own, only for a tokenizer that departs from BERT's.
    rare = {
        f"tokenizer.ggml.normalizer.{name}": False
        for name in ("clean_text", "handle_chinese_chars")
        if not normalizer.get(name, True)
    }
    if (longest := model.get("max_input_chars_per_word", LONGEST_WORD)) != LONGEST_WORD:
        rare["tokenizer.ggml.max_input_chars_per_word"] = longest
    for index, text in enumerate(tokens):
        if kinds[index] == NORMAL:
            tokens[index] = text[2:] if text.startswith(prefix) else f"\u2581{text}"
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.normalizer.lowercase": bool(lowercase),
        "tokenizer.ggml.normalizer.strip_accents": bool(lowercase if accents is None else accents),
        **rare,
    }


def _sentence_pieces(
    content: Mapping[str, Any],
    tokens: list[str],
    kinds: list[int],
    pairs: list[tuple[str, ...]],
    ids: Mapping[str, int],
) -> dict[str, Any]:
    """SentencePiece's tokenizer, which merges the pair with the highest score: the earlier a merge, the higher."""
    scores = [-1e6] * len(tokens)
    for rank, (left, right) in reversed(list(enumerate(pairs))):
        if left + right in ids:
            scores[ids[left + right]] = -float(rank)
    for index, text in enumerate(tokens):
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            kinds[index] = BYTE
    if (unknown := content["model"].get("unk_token")) in ids:
        kinds[ids[unknown]] = UNKNOWN
    prepends = any(
        step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and puts_space_before(step))
        for step in all_steps(content)
    )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prepends,
    }


def _gemma4(content: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 4's tokenizer, which merges by rank although its tokens are SentencePiece's, with its markers as text."""
    pairs = (merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"])
    kinds = zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"], strict=True)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": list(pairs),
        "tokenizer.ggml.token_type": [USER_DEFINED if token in _GEMMA4_TEXT else kind for token, kind in kinds],
    }


def _laguna(ends: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Laguna's second token that ends an answer, which its tokenizer treats as text."""
    if not isinstance(ends, list) or len(ends) < 2:
        return {}
    kinds = list(keys["tokenizer.ggml.token_type"])
    kinds[ends[1]] = CONTROL
    return {"tokenizer.ggml.eot_token_id": ends[1], "tokenizer.ggml.token_type": kinds}


def _pre_tokenizer(content: Mapping[str, Any], where: str, ignores_merges: bool) -> str:
    """GGUF's name of a byte-level tokenizer's pre-tokenizer. Raises CheckpointError for an unknown one."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    rest = ("truncation", "padding", "post_processor", "decoder", "normalizer")
    empty: dict[str, Any] = {"version": "1.0", "added_tokens": [], **dict.fromkeys(rest)}
    empty["model"] = {"type": "BPE", "vocab": {}, "merges": []}
    try:
        own = Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": content.get("pre_tokenizer")})).pre_tokenizer
        expected = [piece for piece, _ in own.pre_tokenize_str(_PROBE)]
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{where}: its pre-tokenizer cannot be used: {shortened(str(error))}.") from error

    def cuts_alike(way: PreTokenizer) -> bool:
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in way.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(_PROBE)] == expected

    for name, way in PRE_TOKENIZERS.items():
        if way.byte_level and way.ignore_merges == ignores_merges and not way.whole_newlines and cuts_alike(way):
            return name
    raise CheckpointError(f"{where}: splits text in a way that GGUF has no name for. Get the model as GGUF instead.")


def _special(
    checkpoint: Checkpoint, content: Mapping[str, Any], config: Mapping[str, Any], tokens: list[str], model: str
) -> dict[str, Any]:
    """Ids of special tokens, and which are added to a text. Raises CheckpointError."""
    ids = {text: index for index, text in enumerate(tokens)}
    keys: dict[str, Any] = {}
    for role, name in _ROLES.items():
        token = config.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        stated = checkpoint.config.get(f"{role}_token_id")
        stated = stated[0] if isinstance(stated, list) and stated else stated
        if text in ids:
            keys[f"tokenizer.ggml.{name}_token_id"] = ids[text]
        elif type(stated) is int and 0 <= stated < len(tokens):
            keys[f"tokenizer.ggml.{name}_token_id"] = stated
    first, last = _frame(content.get("post_processor") or {})
    bos, eos = (keys.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos"))
    if model == "bert":
        if first not in ids or last not in ids:
            raise CheckpointError(
                f"{checkpoint.folder / 'tokenizer.json'}: adds no tokens around a text, as BERT's does."
            )
        return keys | {"tokenizer.ggml.bos_token_id": ids[first], "tokenizer.ggml.cls_token_id": ids[first],
                       "tokenizer.ggml.seperator_token_id": ids[last]}  # fmt: skip
    if (content.get("post_processor") or {}).get("type") == "RobertaProcessing":
        keys["tokenizer.ggml.add_sep_token"] = True  # between the texts of a pair, after the token that ends the first
    adds_bos = config.get("add_bos_token") if first is None else True
    adds_eos = config.get("add_eos_token") if last is None else True
    keys["tokenizer.ggml.add_bos_token"] = bool(adds_bos) and bos is not None
    keys["tokenizer.ggml.add_eos_token"] = bool(adds_eos) and eos is not None
    if first is not None and ids.get(first) != bos:
        keys["tokenizer.ggml.bos_token_id"] = ids[first]
    if last is not None and ids.get(last) != eos:
        raise CheckpointError(f"{checkpoint.folder / 'tokenizer.json'}: adds {shortened(last)}, not EOS, after a text.")
    return keys


def _frame(processor: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The tokens that a post-processor puts before and after a text; None for none."""
    for step in processor.get("processors", [processor]):
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            return step["cls"][0], step["sep"][0]
        if step.get("type") == "TemplateProcessing":
            names = [part.get("SpecialToken", {}).get("id") for part in step["single"]]
            return names[0], names[-1] if len(names) > 1 else None
    return None, None


def _template(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str | None:
    """The chat template, from its own file or the tokenizer's configuration; of several, the default one."""
    found = checkpoint.optional_text("chat_template.jinja") or config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
