"""Quotations are checked word for word before they are shown, however the answer is cut while it streams."""

import random
import string

import pytest

from localllm.quoting.excerpt import Excerpt
from localllm.quoting.quotations import MAX_BLOCK_CHARS, MAX_QUOTED_CHARS, QuotationChecker, QuotedSource

SHIPS = """\
# Ships

The harbour was built in 1924.
It has three piers, and
a small crane.
print("x")
"""
EXCERPTS = (
    Excerpt("notes.md", SHIPS, 10),
    Excerpt("a.pdf", "It\u2019s raining.", 3, 2),
    Excerpt("letter.docx", "Dear all\nThe ship is late", 7),
)

CASES = {
    'It says "The harbour was built in 1924."': 'It says "The harbour was built in 1924." [notes.md:12]',
    'So "three piers, and a small crane".': 'So "three piers, and a small crane" [notes.md:13].',
    "So “a small\ncrane”.": "So “a small\ncrane” [notes.md:14].",
    '"It was red", they say.': '"It was red" [not in the documents], they say.',
    'Not a part of a word: "arbour was".': 'Not a part of a word: "arbour was" [not in the documents].',
    'Nor "the harbour was".': 'Nor "the harbour was" [not in the documents].',
    '"The harbour ... three piers" is short.': '"The harbour ... three piers" [notes.md:12] is short.',
    '"three piers … The harbour"': '"three piers … The harbour" [not in the documents]',
    '"It\'s raining!"': '"It\'s raining!" [a.pdf, page 2, line 3]',
    "«The ship is late»": "«The ship is late» [letter.docx, paragraph 8]",
    'A 5" pipe and a 6" pipe.': 'A 5" pipe and a 6" pipe.',
    '"no end\n\nand more': '"no end [not checked]\n\nand more',
    '"no end': '"no end [not checked]',
    "> The harbour was built in 1924.\n> It has\n\nYes.": (
        "> The harbour was built in 1924.\n> It has [notes.md:12]\n\nYes."
    ),
    "> It was red.\n": "> It was red. [not in the documents]\n",
    '> He said "It was red".\n': '> He said "It was red" [not in the documents].\n',
    '```python\nprint("x")\n```\n': '```python\nprint("x")\n```\n[notes.md:15]\n',
    '```\nprint("y")\n```': '```\nprint("y")\n```\n[not in the documents]',
    'Code: `"It was red"`.': 'Code: `"It was red"`.',
    "See [notes.md:12] and [fake.md:3].": "See [notes.md:12] and [fake.md:3] (not checked).",
    "See [notes.md:99].": "See [notes.md:99] (not checked).",
    'It is "three piers" [notes.md:10-16].': 'It is "three piers" [notes.md:13].',
    '"It was red" [notes.md:12].': '"It was red" [not in the documents] [notes.md:12].',
    "[a link](http://host) and [1] and [x]": "[a link](http://host) and [1] and [x]",
    'Empty "" and " ".': 'Empty "" and " ".',
}


def checked(answer: str, size: int) -> tuple[str, QuotationChecker]:
    checker = QuotationChecker([QuotedSource(excerpt) for excerpt in EXCERPTS])
    shown = "".join(checker.push(answer[at : at + size]) for at in range(0, len(answer), size))
    return shown + checker.flush(), checker


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("answer", CASES)
def test_an_answer_is_marked(answer: str, size: int) -> None:
    assert checked(answer, size)[0] == CASES[answer]


def test_nothing_of_a_quotation_is_shown_before_it_is_checked() -> None:
    checker = QuotationChecker([QuotedSource(excerpt) for excerpt in EXCERPTS])
    assert checker.push('They write "It was') == "They write "
    assert checker.push(" red") == ""
    assert checker.push('" ') == '"It was red" [not in the documents] '


@pytest.mark.parametrize(("begin", "bound"), [('"', MAX_QUOTED_CHARS), ("```\n", MAX_BLOCK_CHARS)])
def test_what_has_no_end_is_not_held_back_for_ever(begin: str, bound: int) -> None:
    checker = QuotationChecker([])
    shown = checker.push(begin) + "".join(checker.push("word ") for _ in range(bound // 5 + 2))
    assert len(shown) >= bound


def test_random_answers_lose_nothing_and_do_not_depend_on_how_they_are_cut() -> None:
    source = random.Random(5)
    pieces = ['"', "“", "”", "`", "```", "\n", "\n\n", "> ", "[", "]", "notes.md:12", "The harbour", " ", "x", ":1"]
    for _ in range(400):
        answer = "".join(source.choice([*pieces, source.choice(string.ascii_letters)]) for _ in range(40))
        shown = {checked(answer, size)[0] for size in (1, 4, 1000)}
        assert len(shown) == 1, answer
        bare = shown.pop()
        for excerpt in EXCERPTS:
            for row in range(8):
                bare = bare.replace(f"[{excerpt.place(row)}]", "")
        for mark in ("[not in the documents]", "[not checked]", "(not checked)"):
            bare = bare.replace(mark, "")
        wanted = answer
        for place in ("[notes.md:12]",):  # a repeated reference to the same place is left out
            wanted = wanted.replace(place, "")
        assert _letters(bare) == _letters(wanted), answer


def _letters(text: str) -> str:
    return "".join(text.split())
