"""Model output is shown in full, even if it looks like HTML, at any width and however it arrives."""

import asyncio
import random
import re

import pytest
from textual.app import App, ComposeResult

from tests.tui.chatting import screen_lines
from tui.widgets.markdown import AnswerMarkdown

# Texts, and the parts of them that are markup and need not be shown.
LETTERS = [
    ("Use the <div> tag and the <List<String>> type.", ""),
    ("<details><summary>More</summary>hidden</details>", ""),
    ("<thinking>\nLet me see.\n</thinking>\n\nYes.", ""),
    ("<!-- a comment --> & <?php echo 1; ?> <![CDATA[x]]>", ""),
    ("&lt;div&gt; &amp; &nbsp; &#65; &copy;", ""),
    ("As \\(a_1 + \\frac{1}{2} and \\[x \\\\ y and \\{1, 2\\}", ""),  # no formulas: they do not end
    ("See [1] and [a].\n\n[1]: http://a.b/c\n[a]: <x> 'title'", ""),
    ("See [the page](http://a.b/c) and [that](http://d.e 'Title').", "[]'"),
    ("![A picture](http://a.b/c.png)", "[]"),
    ("Mail <me@a.b> or <https://a.b/c>.", ""),
    ("Roses are red\nViolets are blue", ""),
    ("C:\\path\\new\\*.txt and 5 \\< 6", ""),
    ("```html\n<b>&amp;</b>\n```", "`html"),
    ("    <indented>", ""),
    ("- [ ] open\n- [x] done", "-"),
    ("| a | <b> |\n|---|--:|\n| &lt; | \\(x\\ |", "|-:"),
    ("Generic<T>, a < b > c, 1 <2, x<y", ""),
    ("\u202eevil\u2066 text\x1b[2J", "\u202e\u2066\x1b"),
    ("line one\r\nline two\r\n", ""),
]


class Shown(App[None]):
    """One answer, on a screen of its own."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.markdown = AnswerMarkdown(text)

    def compose(self) -> ComposeResult:
        yield self.markdown

    def text(self) -> str:
        return "\n".join(strip.text.rstrip() for strip in screen_lines(self)).rstrip()


async def full(text: str, columns: int = 80) -> str:
    app = Shown(text)
    async with app.run_test(size=(columns, 300)) as pilot:
        await pilot.pause()
        return app.text()


async def streamed(pieces: list[str], columns: int = 80) -> str:
    app = Shown()
    async with app.run_test(size=(columns, 300)) as pilot:
        for piece in pieces:
            app.markdown.append(piece)
            await pilot.pause()
        return app.text()


def letters(text: str) -> str:
    """Without blanks, table lines and bullets."""
    return re.sub(r"[\s\u2500-\u257f•▪‣⭑◦✓]", "", text)


@pytest.mark.parametrize(("text", "markup"), LETTERS)
def test_every_character_shows(text: str, markup: str) -> None:
    from localllm.text import harmless

    shown = letters(asyncio.run(full(harmless(text))))
    for letter in letters(harmless(text)):
        if letter in markup:
            continue
        assert letter in shown, (letter, shown)
        shown = shown[shown.index(letter) + 1 :]


WIDE = (
    "```python\n"
    + "value = function(first_argument, second_argument, third_argument, fourth_argument)  # the_end\n```\n\n"
    "| left | right | what it is |\n|:--|--:|---|\n"
    "| one | 1 | many words that do not fit beside each other in so few columns, last_word |\n"
    "| two | 22 | " + "unbroken" * 12 + "END |\n"
)


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_wide_code_and_tables_can_be_read(columns: int) -> None:
    shown = asyncio.run(full(WIDE, columns))
    assert max(map(len, shown.splitlines())) <= columns
    together = letters(shown)
    assert "#the_end" in together and "last_word" in together and "…" not in together
    rows = [line for line in shown.splitlines() if " one " in line or " two " in line]
    assert [line.split("│")[2].rstrip()[-2:] for line in rows] == [" 1", "22"]  # scroll right


PARTS = [
    *(text for text, _ in LETTERS),
    "# A heading",
    "## Another",
    "A paragraph with **bold**, *italic*, `code` and ~~struck~~ words.",
    "1. one\n2. two\n   - inner\n   - second\n3. three",
    "> quoted\n> twice",
    "---",
    "```\nplain\n\n\nwith gaps\n```",
    "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |",
    "Some text\nand a table:\n\n| x |\n|---|\n| y |\n\nThe end.",
]


@pytest.mark.slow
def test_an_answer_that_streams_ends_as_if_it_came_at_once() -> None:
    chance = random.Random(3)
    for _ in range(40):
        text = "\n\n".join(chance.choice(PARTS) for _ in range(chance.randrange(1, 6)))
        text = text.replace("\r", "").replace("\x1b", "")
        pieces, at = [], 0
        while at < len(text):
            size = chance.choice((1, 3, 7, 40))
            pieces.append(text[at : at + size])
            at += size
        assert asyncio.run(streamed(pieces)) == asyncio.run(full(text)), repr(text)
