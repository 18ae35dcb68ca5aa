"""Checks quotations: text that an answer quotes from a document is looked up there, word for word."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from localllm.quoting.excerpt import Excerpt

NOT_FOUND = "not in the documents"
NOT_CHECKED = "not checked"
MAX_QUOTED_CHARS = 2000  # a quotation that is longer is shown unchecked
MAX_BLOCK_CHARS = 8000  # of code

# An opening quotation mark and its closing ones. A straight mark opens only where a word begins.
_PAIRS = {'"': '"', "“": "”", "„": "“”", "«": "»", "»": "«", "「": "」", "『": "』"}
_STRAIGHT = str.maketrans({"\u2019": "'", "\u2018": "'", "“": '"', "”": '"', "„": '"', "\u00ad": None})
_ELLIPSIS = re.compile(r"\s*(?:\[\s*)?(?:…|\.{3})(?:\s*\])?\s*")
# References that a model may write itself: [notes.md:12], [report.pdf, page 3, lines 1-9].
_REFERENCE = re.compile(
    r"\[`?([^\[\]\n]*[^\W\d][^\[\]\n]*?(?::\s?\d+(?:-\d+)?|, (?:page|lines?|paragraphs?) [\d-]+))`?\]"
)
MAX_REFERENCE_CHARS = 400
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


@dataclass(frozen=True, slots=True)
class Quotation:
    """A quotation in an answer. place: file and line where it is, None if not found. checked: False if it had no
    end, or was too long."""

    text: str
    place: str | None
    checked: bool = True


class QuotedSource:
    """An excerpt in which quotations are looked up: all white space counts as equal, and so do kinds of quotes."""

    def __init__(self, excerpt: Excerpt) -> None:
        self.excerpt = excerpt
        self._starts: list[int] = []
        pieces: list[str] = []
        length = 0
        for line in excerpt.text.split("\n"):
            self._starts.append(length)
            if words := _normal(line):
                pieces.append(words)
                length += len(words) + 1
        self._text = " ".join(pieces)

    def find(self, text: str) -> str | None:
        """The place of a quotation's first words, if all of its parts occur here in order; else None."""
        first: int | None = None
        after = 0
        for part in filter(None, map(_normal, _ELLIPSIS.split(text))):
            at = self._find(part, after)
            if at is None:
                return None
            first = at if first is None else first
            after = at + len(part)
        return None if first is None else self.excerpt.place(bisect_right(self._starts, first) - 1)

    def _find(self, part: str, after: int) -> int | None:
        """Where these whole words begin; punctuation at the end may be the answer's own."""
        for words in dict.fromkeys((part, part.rstrip(".,;:!?"))):
            at = self._text.find(words, after) if words else -1
            while at >= 0:
                if not _joined(self._text[at - 1 : at], words[0]) and not _joined(
                    words[-1], self._text[at + len(words) : at + len(words) + 1]
                ):
                    return at
                at = self._text.find(words, at + 1)
        return None


@dataclass(slots=True)
class QuotationChecker:
    """Checks an answer while it streams: `push` returns what may be shown.

    Text is held back from the beginning of a quotation until its end. A quotation found in a source is followed by its
    place, any other by a note. A block of code counts as a quotation. cite: formats the place after a quotation.
    """

    sources: Sequence[QuotedSource]
    cite: Callable[[str], str] = lambda place: f" [{place}]"
    quotations: list[Quotation] = field(default_factory=list)
    _held: str = ""
    _before: str = "\n"  # the last character that was shown
    _cited: bool = False  # a place was the last thing shown

    def push(self, text: str) -> str:
        """Take more of the answer; returns what can be shown now."""
        self._held += text
        return "".join(self._ready(whole=False))

    def flush(self) -> str:
        """Return the rest at the end of the answer."""
        return "".join(self._ready(whole=True))

    @property
    def places(self) -> list[str]:
        """The places of the quotations that were found, without repetitions."""
        return list(dict.fromkeys(each.place for each in self.quotations if each.place))

    def _ready(self, whole: bool) -> Iterator[str]:
        while self._held:
            taken = self._step(whole)
            if taken is None:
                return
            size, shown = taken
            self._held = self._held[size:]
            if shown:
                self._before = shown[-1]
            yield shown

    def _step(self, whole: bool) -> tuple[int, str] | None:
        """How many held characters to take and what to show for them; None to wait for more."""
        held = self._held
        cited, self._cited = self._cited, False
        if self._before == "\n":
            if not whole and len(held) < 6 and not held.strip(" `~>"):
                return None
            if fence := _FENCE.match(held):
                return self._block(fence, whole)
            if held.startswith(">") and _PAIRS.keys().isdisjoint(held.partition("\n")[0]):
                return self._quoted_lines(whole)
        return self._within_line(whole, cited)

    def _within_line(self, whole: bool, cited: bool) -> tuple[int, str] | None:
        held = self._held
        letter = held[0]
        if letter == "`":
            return self._inline_code(whole)
        if letter == "[" or (cited and held.lstrip(" ")[:1] in ("[", "")):
            return self._reference(whole, cited)
        if letter in _PAIRS and not (letter in '"»' and _joined("a", self._before)):
            return self._quotation(whole)
        end = next((at for at, each in enumerate(held) if at and (each in _STOPS or held[at - 1] == "\n")), len(held))
        return end, held[:end]

    def _quoted_lines(self, whole: bool) -> tuple[int, str] | None:
        """Lines after > are one quotation; if the first has quotation marks, only the text between them is quoted."""
        held = self._held
        end = next((match.start() for match in re.finditer(r"\n(?!>)", held)), -1)
        if end in (-1, len(held) - 1):  # more of them may come
            if not whole and len(held) <= MAX_QUOTED_CHARS:
                return None
            end = len(held.rstrip("\n"))
        text = re.sub(r"^>[ \t]?", "", held[:end], flags=re.MULTILINE)
        return end, held[:end] + self._judged(text)

    def _block(self, fence: "re.Match[str]", whole: bool) -> tuple[int, str] | None:
        held = self._held
        closing = re.compile(rf"\n {{0,3}}{re.escape(fence[1])}[`~]*[ \t]*(?=\n|$)")
        match = closing.search(held, fence.end())
        if match is None or (match.end() == len(held) and not whole):
            if not whole and len(held) <= MAX_BLOCK_CHARS:
                return None
            return len(held), held  # it has no end, or is too long for a quotation
        body = held[: match.start()].partition("\n")[2]
        return match.end(), held[: match.end()] + (f"\n{self._judged(body).lstrip()}" if body.strip() else "")

    def _inline_code(self, whole: bool) -> tuple[int, str] | None:
        """Inline code is shown unchanged: quotation marks in it do not quote."""
        run = len(self._held) - len(self._held.lstrip("`"))
        end = self._held.find("`" * run, run)
        line = self._held.find("\n")
        if end >= 0 and (line < 0 or end < line):
            return end + run, self._held[: end + run]
        return (run, self._held[:run]) if whole or line >= 0 else None

    def _reference(self, whole: bool, cited: bool) -> tuple[int, str] | None:
        """A reference that the model wrote: marked if it names no excerpt, left out after a place if it does."""
        blanks = len(self._held) - len(self._held.lstrip(" "))
        end = self._held.find("]")
        if end < 0 and not whole and "\n" not in self._held and len(self._held) < MAX_REFERENCE_CHARS:
            self._cited = cited
            return None
        match = _REFERENCE.match(self._held, blanks, blanks + MAX_REFERENCE_CHARS)
        if match is None:
            size = max(blanks, 1)
            return size, self._held[:size]
        known = any(self._names(source.excerpt, match[1]) for source in self.sources)
        if cited and known:
            return match.end(), ""
        return match.end(), self._held[: match.end()] + ("" if known else f" ({NOT_CHECKED})")

    def _names(self, excerpt: Excerpt, reference: str) -> bool:
        """Whether a reference names lines of an excerpt."""
        if reference == excerpt.label:
            return True
        name, _, lines = reference.rpartition(":")
        first = int(match[0]) if (match := re.match(r"\s?\d+", lines)) else 0
        is_named = not excerpt.page and excerpt.place(first - excerpt.line) == f"{name}:{first}"
        return is_named and excerpt.line <= first <= excerpt.last_line

    def _quotation(self, whole: bool) -> tuple[int, str] | None:
        held = self._held
        closing = _PAIRS[held[0]]
        end = next((at for at, each in enumerate(held) if at and each in closing), -1)
        paragraph = held.find("\n\n")
        bounded = paragraph >= 0 and (end < 0 or paragraph < end)
        if end < 0 and not bounded and not whole and len(held) <= MAX_QUOTED_CHARS:
            return None
        if bounded or end < 0 or end > MAX_QUOTED_CHARS:
            # It has no end, or not a near one.
            stop = paragraph if bounded else end + 1 if end >= 0 else len(held)
            text = held[1:stop].strip()
            if not text:
                return 1, held[:1]
            self.quotations.append(Quotation(text, None, checked=False))
            return stop, f"{held[:stop]}{self.cite(NOT_CHECKED)}"
        text = held[1:end]
        return end + 1, held[: end + 1] + (self._judged(text) if text.strip() else "")

    def _judged(self, text: str) -> str:
        """Check a quotation; return its place, or a note that it was not found."""
        if not _normal(text):
            return ""
        found = next((place for source in self.sources if (place := source.find(text))), None)
        self.quotations.append(Quotation(text, found))
        self._cited = found is not None
        return self.cite(found or NOT_FOUND)


_STOPS = frozenset({"`", "[", *_PAIRS})


def _normal(text: str) -> str:
    return " ".join(text.translate(_STRAIGHT).split())


def _joined(left: str, right: str) -> bool:
    """Whether two neighbouring characters belong to one word."""
    return bool(left and right) and (left.isalnum() or left == "_") and (right.isalnum() or right == "_")
