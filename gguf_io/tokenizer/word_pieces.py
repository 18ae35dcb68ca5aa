"""Word pieces ("bert"): BERT's own normalizer and pre-tokenizer, then the longest tokens from the left.

The tokenizers library does it, as for the models' own tokenizers. llama.cpp differs from these: it keeps only the first
character of a decomposed one, so Korean syllables lose their vowels, drops all marks instead of the nonspacing ones,
and has no limit for the length of a word. GGUF vocabularies write "▁" before tokens that begin a word, where the
original writes "##" before those that do not.
"""

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from gguf_io.tokenizer.pretokenizers import BETWEEN_WORDS
from gguf_io.tokenizer.vocabulary import LONGEST_WORD, Vocabulary

_WORD_BEGINS, _WORD_GOES_ON = "\u2581", "##"
# Spelled with punctuation, which is cut apart before tokens are looked up, so no text becomes it.
_UNKNOWN = "[UNK]"


class WordPieces:
    """Encodes text without special tokens in it; a word that tokens cannot spell is one unknown token."""

    cuts = BETWEEN_WORDS

    def __init__(self, vocabulary: Vocabulary) -> None:
        metadata = vocabulary.metadata
        unknown = vocabulary.need_unk_id()
        ids = {
            token[1:] if token.startswith(_WORD_BEGINS) else _WORD_GOES_ON + token: index
            for token, index in vocabulary.ids.items()
            if index not in vocabulary.never_text
        }
        longest = metadata.get_int("tokenizer.ggml.max_input_chars_per_word", LONGEST_WORD, minimum=1)
        model = WordPiece(
            {**ids, _UNKNOWN: unknown},
            unk_token=_UNKNOWN,
            max_input_chars_per_word=longest,
            continuing_subword_prefix=_WORD_GOES_ON,
        )
        lowercase = metadata.get_bool("tokenizer.ggml.normalizer.lowercase", True)
        self._tokenizer = Tokenizer(model)
        self._tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=metadata.get_bool("tokenizer.ggml.normalizer.clean_text", True),
            handle_chinese_chars=metadata.get_bool("tokenizer.ggml.normalizer.handle_chinese_chars", True),
            strip_accents=metadata.get_bool("tokenizer.ggml.normalizer.strip_accents", lowercase),
            lowercase=lowercase,
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str) -> list[int]:
        # The library's only call that lets other threads run meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)
