"""Byte-pair encoding ("gpt2", "gemma4"): cut by patterns, then merge by rank, through the tokenizers library."""

import re

from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from gguf_io.errors import DAMAGED, TokenizerError, shortened
from gguf_io.tokenizer.pretokenizers import PreTokenizer
from gguf_io.tokenizer.vocabulary import Vocabulary

_NEWLINES = re.compile("(\n+)")


class BytePairs:
    """Encodes text without special tokens in it. Building takes about half a second for 150,000 tokens."""

    def __init__(self, vocabulary: Vocabulary, pre: PreTokenizer) -> None:
        self._pre = pre
        self.cuts = pre.cuts
        self._ids = vocabulary.ids
        ids = {token: index for token, index in vocabulary.ids.items() if index not in vocabulary.never_text}
        hidden = {vocabulary.tokens[index] for index in vocabulary.never_text}
        merges = vocabulary.metadata.get_list("tokenizer.ggml.merges", str)
        pairs = [
            (left, right)
            for left, right in map(_pair, dict.fromkeys(merges))  # a duplicate pair keeps its first rank
            if left not in hidden and right not in hidden and left + right not in hidden
        ]
        try:
            model = BPE(ids, pairs, ignore_merges=pre.ignore_merges, byte_fallback=not pre.byte_level)
        except Exception as error:  # the library raises no narrower class
            raise TokenizerError(f"tokenizer.ggml.merges: {shortened(error)}. {DAMAGED}") from error
        self._tokenizer = Tokenizer(model)
        cuts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns
        ]
        if pre.byte_level:
            cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)

    def encode(self, text: str) -> list[int]:
        if not self._pre.byte_level:
            text = text.replace(" ", "\u2581")
        if not self._pre.whole_newlines:
            return self._merge(text)
        ids: list[int] = []
        for piece in _NEWLINES.split(text):
            whole = self._ids.get(piece) if piece.startswith("\n") else None
            ids += self._merge(piece) if whole is None else [whole]
        return ids

    def _merge(self, text: str) -> list[int]:
        # The library's only call that lets other threads run meanwhile; a long text takes seconds.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise TokenizerError(
            f"tokenizer.ggml.merges: {shortened(merge)!r} is not two tokens with a space between. {DAMAGED}"
        )
    return left, right
