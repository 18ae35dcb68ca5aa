"""Text to token ids and back, as the model's file defines it."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from gguf_io.errors import DAMAGED, TokenizerError, shortened
from gguf_io.interruption import checkpoint
from gguf_io.metadata import Metadata
from gguf_io.model_file import ModelFile, open_model
from gguf_io.tokenizer.vocabulary import BYTE, CONTROL, FRAMING, NORMAL, UNKNOWN, USER_DEFINED, read_vocabulary

# GPT-2 spells bytes as characters: printable ones as themselves, the others from U+0100 on, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
# Of the rules by tokenizer.ggml.model, where a release changed them.
_VERSIONS = {"bert": 2}
# isspace() of the C locale.
_SPACE = " \t\n\v\f\r"
_PIECE = 1 << 16
_LONGEST_PIECE = 1 << 20
_BYTE_OF = {chr(value): bytes([value]) for value in _PRINTABLE} | {
    chr(256 + index): bytes([value]) for index, value in enumerate(_OTHERS)
}


class Encoder(Protocol):
    """Encodes text that holds no special tokens."""

    @property
    def cuts(self) -> re.Pattern[str] | None:
        """Matches end where a text can be cut without changing its tokens. None if no such place is known."""

    def encode(self, text: str) -> list[int]:
        """Token ids of the text."""


class Partition:
    """Splits text into special tokens and the text between them, in about linear time.

    As in llama.cpp, the longest tokens are found first, then those further left.

    tokens: text to id of the tokens to find. lstrip, rstrip: those that swallow the white space before or after them.
    """

    def __init__(self, tokens: Mapping[str, int], lstrip: Collection[int], rstrip: Collection[int]) -> None:
        self._tokens = tokens
        self._lstrip = lstrip
        self._rstrip = rstrip
        lengths: dict[str, set[int]] = defaultdict(set)
        for text in tokens:
            lengths[text[:2]].add(len(text))
        # By the first two characters of a text: the lengths of the tokens that begin with them, longest first.
        self._lengths = {
            start: sorted(found | lengths.get(start[:1], set()), reverse=True) for start, found in lengths.items()
        }
        firsts = "".join(map(re.escape, {text[0] for text in tokens}))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(
        self,
        text: str,
        literal: Sequence[tuple[int, int]] = (),
    ) -> Iterator[int | str]:
        """Token ids and the non-empty stretches of text around them, in order. Can be interrupted at each token.

        literal: disjoint ascending ranges of the text in which nothing is a token.
        """
        position = 0
        for start, end, token in self._spans(text, literal):
            checkpoint()
            if position < start:
                yield text[position:start]
            if token is not None:
                yield token
            position = end
        if position < len(text):
            yield text[position:]

    def ranges(self, text: str) -> list[tuple[int, int]]:
        """Disjoint ascending ranges that cover every occurrence of every token, overlapping ones as one."""
        covered: list[tuple[int, int]] = []
        for start, length in self._longest(text, 0, len(text)):
            if covered and start < covered[-1][1]:
                covered[-1] = covered[-1][0], max(start + length, covered[-1][1])
            else:
                covered.append((start, start + length))
        return covered

    def _spans(self, text: str, literal: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int | None]]:
        """Disjoint (start, end, token) in order; token None is swallowed space."""
        begin = 0
        for start, end in (*literal, (len(text), len(text))):
            yield from sorted(self._spans_between(text, begin, start))
            begin = end

    def _spans_between(self, text: str, begin: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """The spans within text[begin:end], whose bounds no token may cross.

        A token is taken unless a longer one, or an earlier one of the same length, has taken some of its characters.
        Checking its first and last character is enough: every span taken before is at least as long.
        """
        places: dict[int, list[int]] = defaultdict(list)
        for start, length in self._longest(text, begin, end):
            checkpoint()
            places[length].append(start)
        taken = bytearray(end - begin)
        while places:
            length = max(places)
            for start in sorted(places.pop(length)):
                checkpoint()
                stop = start + length
                if taken[start - begin]:
                    continue
                if taken[stop - 1 - begin]:
                    if shorter := self._length_at(text, start, stop - 1):
                        places[shorter].append(start)
                    continue
                token = self._tokens[text[start:stop]]
                left, right = start, stop
                if token in self._lstrip:
                    while left > begin and text[left - 1] in _SPACE and not taken[left - 1 - begin]:
                        left -= 1
                if token in self._rstrip:
                    while right < end and text[right] in _SPACE and not taken[right - begin]:
                        right += 1
                taken[left - begin : right - begin] = b"\1" * (right - left)
                yield start, stop, token
                if left < start:
                    yield left, start, None
                if right > stop:
                    yield stop, right, None

    def _longest(self, text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """(start, length) of the longest token at each position of text[begin:end] where one begins."""
        if self._first is None:
            return
        for match in self._first.finditer(text, begin, end):
            start = match.start()
            if length := self._length_at(text, start, end):
                yield start, length

    def _length_at(self, text: str, start: int, end: int) -> int:
        """Length of the longest token that begins at `start` and does not reach beyond `end`, 0 for none."""
        for length in self._lengths.get(text[start : start + 2]) or self._lengths.get(text[start]) or ():
            if start + length <= end and text[start : start + length] in self._tokens:
                return length
        return 0


class Tokenizer:
    """A model's tokenizer; cheap to make, since what encoding needs is built on first use.

    Ids and text agree with llama.cpp's, except that text becomes a control token only with `parse_special`, that
    characters that the vocabulary cannot express are not fatal, and that word pieces follow BERT's own tokenizer.
    Several threads may use it at once.

    eog_ids: the tokens after which generation stops. pre: `tokenizer.ggml.pre`, "default" if the file has none.
    version: of the rules that encode; what was computed from tokens of another version is kept apart.
    """

    def __init__(self, metadata: Metadata) -> None:
        vocabulary = self.vocabulary = read_vocabulary(metadata)
        special = vocabulary.special
        self.vocab_size: int = len(vocabulary.tokens)
        self.pre: str = vocabulary.pre
        self.version: int = _VERSIONS.get(vocabulary.model, 1)
        self.add_bos: bool = vocabulary.add_bos
        self.add_eos: bool = vocabulary.add_eos
        self.add_sep: bool = vocabulary.add_sep
        self.eog_ids: frozenset[int] = vocabulary.end_ids
        self.bos_id: int | None = special.get("bos")
        self.eos_id: int | None = special.get("eos")
        self.sep_id: int | None = special.get("sep")
        self.fim_prefix_id: int | None = special.get("fim_prefix")
        self.fim_suffix_id: int | None = special.get("fim_suffix")
        self.fim_middle_id: int | None = special.get("fim_middle")
        self.fim_repo_id: int | None = special.get("fim_repo")
        self.fim_sep_id: int | None = special.get("fim_sep")

    def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special: bool = False,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """Token ids of a text. Can be interrupted (gguf_io.interruption).

        add_special: add the tokens that the model expects at both ends, such as BOS. parse_special: read "<|im_end|>"
        and the like as tokens; without it they are text, as anything that a user wrote must be. Tokens of the type
        user-defined are found either way, but none of either kind within the `literal` ranges of the text, which ascend
        and are disjoint. Lone surrogates count as U+FFFD. Raises TokenizerError if the text or the vocabulary cannot be
        encoded, or a text of over a million characters cannot be cut.
        """
        partition = self._all_special if parse_special else self._user_defined
        ids: list[int] = []
        after_special = True
        for part in partition.split(_without_surrogates(text), literal):
            if isinstance(part, int):
                ids.append(part)
            else:
                prefix = " " if after_special and self.vocabulary.add_space_prefix else ""
                for piece in self.pieces(prefix + part):
                    ids += self.encoder.encode(piece)
            after_special = isinstance(part, int)
        if add_special:
            before, after = self._frame
            ids = before + ids + after
        return ids

    def pieces(self, text: str) -> Iterator[str]:
        """The text in pieces of about _PIECE characters: the libraries that encode one cannot be interrupted."""
        start = 0
        while len(text) - start > _PIECE:
            cuts = self.encoder.cuts
            found = cuts.search(text, start + _PIECE) if cuts else None
            end = found.end() if found else len(text)
            if end - start > _LONGEST_PIECE:
                raise TokenizerError(
                    f"the text, of {len(text):,} characters, is too long to be tokenised: from character {start:,} on "
                    f"it has {end - start:,} without a word to divide it at, and at most {_LONGEST_PIECE:,} may be. "
                    "Shorten it, or break it into lines of words."
                )
            yield text[start:end]
            start = end
            checkpoint()
        if start < len(text):
            yield text[start:]

    def markup(self, text: str) -> list[tuple[int, int]]:
        """Disjoint ascending ranges of a text that spell control, unknown or framing tokens, which steer the model."""
        return self._steering.ranges(text)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The tokens' bytes as text, with U+FFFD for what is not UTF-8; `skip_special` leaves control tokens out.

        Nothing is trimmed: a SentencePiece model's text begins with the space that `encode` put there.
        """
        return b"".join(self.token_bytes(token, skip_special) for token in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int, skip_special: bool = False) -> bytes:
        """What a token adds to a text: often a part of a character, nothing for unused tokens.

        Control and unknown tokens are written by name, or left out with `skip_special`. TokenizerError for an id
        outside the vocabulary.
        """
        self._check(token)
        text, kind = self.vocabulary.tokens[token], self.vocabulary.kinds[token]
        if kind in (CONTROL, UNKNOWN):
            return b"" if skip_special else text.encode()
        if kind == BYTE:
            return _byte(text)
        if kind == USER_DEFINED:
            return text.encode()
        if kind != NORMAL:
            return b""
        if self.vocabulary.spells_bytes:
            return b"".join([_BYTE_OF.get(character) or character.encode() for character in text])
        return text.replace("\u2581", " ").encode()

    def is_control(self, token: int) -> bool:
        """Whether a token steers the model and is not text. TokenizerError for an id outside the vocabulary."""
        self._check(token)
        return self.vocabulary.kinds[token] == CONTROL

    def agrees_with(self, other: "Tokenizer") -> bool:
        """Whether every id that both have is the same token, so that one model's ids can be given to the other."""
        common = min(self.vocab_size, other.vocab_size)
        mine, theirs = self.vocabulary, other.vocabulary
        return mine.tokens[:common] == theirs.tokens[:common] and mine.kinds[:common] == theirs.kinds[:common]

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"token {token} is outside the vocabulary of {self.vocab_size}.")

    @cached_property
    def encoder(self) -> Encoder:
        # Imported here: decoding and `localllm show` do without these libraries.
        if self.vocabulary.pre_tokenizer is not None:
            from gguf_io.tokenizer.byte_pairs import BytePairs

            return BytePairs(self.vocabulary, self.vocabulary.pre_tokenizer)
        if self.vocabulary.model == "bert":
            from gguf_io.tokenizer.word_pieces import WordPieces

            return WordPieces(self.vocabulary)
        from gguf_io.tokenizer.sentence_pieces import SentencePieces

        return SentencePieces(self.vocabulary)

    @cached_property
    def _all_special(self) -> Partition:
        return self._partition(CONTROL, UNKNOWN, USER_DEFINED)

    @cached_property
    def _user_defined(self) -> Partition:
        return self._partition(USER_DEFINED)

    @cached_property
    def _steering(self) -> Partition:
        return self._partition(CONTROL, UNKNOWN, always=FRAMING)

    def _partition(self, *kinds: int, always: Sequence[str] = ()) -> Partition:
        vocabulary = self.vocabulary
        tokens = {vocabulary.tokens[index]: index for index, kind in enumerate(vocabulary.kinds) if kind in kinds}
        tokens |= {name: vocabulary.ids[name] for name in always if name in vocabulary.ids}
        return Partition(tokens, vocabulary.lstrip, vocabulary.rstrip)

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The tokens that add_special puts before and after a text."""
        if self.vocabulary.model == "bert":
            frame = (self.bos_id, self.sep_id)
        else:
            frame = (self.bos_id if self.add_bos else None, self.eos_id if self.add_eos else None)
        before, after = ([] if token is None else [token] for token in frame)
        return before, after


def load_tokenizer(model: str | Path | ModelFile) -> Tokenizer:
    """The tokenizer of a model file; an open one may be closed afterwards.

    Raises ModelFileError for a damaged file, TokenizerError for a vocabulary that cannot be rebuilt from it.
    """
    if isinstance(model, ModelFile):
        return Tokenizer(model.metadata)
    with open_model(model) as opened:
        return Tokenizer(opened.metadata)


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text


def _byte(text: str) -> bytes:
    """The byte that <0xNN> stands for."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes.fromhex(text[3:5])
        except ValueError:
            pass
    raise TokenizerError(f"tokenizer.ggml.tokens: {shortened(text)!r} must be a byte such as <0x0A>. {DAMAGED}")
