"""A model's Markdown as HTML: nothing in it acts or loads, and an answer looks the same while it grows."""

import random
from html.parser import HTMLParser

import pytest

from localllm.server.chats.markdown import MAX_BLOCK_CHARS, MAX_FORMULA_CHARS, Blocks, rendered

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<iframe src=javascript:alert(1)></iframe>",
    "text <b onmouseover=alert(1)>bold</b>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\nscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](vbscript:msgbox(1))",
    "[x](file:///etc/passwd)",
    "[x](//evil.example/x)",
    "[x](/api/delete)",
    "<javascript:alert(1)>",
    "![x](http://evil.example/track.png)",
    "![x](data:image/svg+xml;base64,PHN2Zz4=)",
    '[x](https://a.example "onclick=\\"alert(1)")',
    '[x](https://a.example/"onmouseover="alert(1))',
    "[a]\n\n[a]: javascript:alert(1)",
    "[a][b]\n\n[b]: https://evil.example\n",
    '```html" onclick="alert(1)\n<script>alert(1)</script>\n```',
    "```<script>alert(1)</script>\nx\n```",
    "~~~ js'><img src=x>\nx\n~~~",
    "| <script>alert(1)</script> | b |\n|-|-|\n| [x](javascript:1) | <img src=x> |",
    "$\\href{javascript:alert(1)}{x}$",
    "$$\\text{</mtext><script>alert(1)</script>}$$",
    "\\[\\text{<img src=x onerror=alert(1)>}\\]",
    "\\(\\style{background:url(https://evil.example)}{x}\\)",
    "\\(\\class{x}{y} \\cssId{a}{b} \\unicode{60}\\)",
    "$$ <script>alert(1)</script>",
    "https://a.example/<script>",
    "\u202etxt.exe\u202c \x1b[31m \x00",
]
SAFE_TAGS = frozenset({
    "a", "article", "blockquote", "br", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
    "ol", "p", "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", "math", "mrow", "mi",
    "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup", "msubsup", "munder", "mover",
    "munderover", "mtable", "mtr", "mtd", "mpadded", "mphantom", "menclose", "mstyle",
})  # fmt: skip
SAFE_ATTRIBUTES = frozenset({
    "align", "href", "title", "target", "rel", "class", "tabindex", "data-language", "start", "display",
    "mathvariant", "stretchy", "fence", "form", "separator", "columnalign", "displaystyle", "accent", "width", "lspace",
})  # fmt: skip


class Audit(HTMLParser):
    """Collects what a page would do with HTML that is not on the lists."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in SAFE_TAGS:
            self.wrong.append(f"<{tag}>")
        for name, value in attrs:
            if name not in SAFE_ATTRIBUTES:
                self.wrong.append(f"{name}={value}")
            if name == "href" and not str(value).lower().startswith(("https://", "http://", "mailto:")):
                self.wrong.append(f"href={value}")


def wrong_in(text: str) -> list[str]:
    audit = Audit()
    audit.feed("".join(rendered(text)))
    return audit.wrong


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("around", ["{}", "> - {}", "a {} b", "## {}", "**{}**", "```\n\n{}"])
def test_hostile_markdown_becomes_harmless_html(text: str, around: str) -> None:
    assert wrong_in(around.format(text)) == []


def test_random_mixtures_of_hostile_pieces_are_harmless() -> None:
    chance = random.Random(7)
    for _ in range(300):
        text = "".join(chance.choice(HOSTILE) + chance.choice(["", "\n", "\n\n", " ", "`", "$"]) for _ in range(6))
        assert wrong_in(text) == [], text


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a **b** `c`", "<p>a <strong>b</strong> <code>c</code></p>"),
        ("a\nb", "<p>a<br />\nb</p>"),
        ("https://a.example", '<a href="https://a.example" target="_blank" rel="noopener noreferrer nofollow">'),
        ("```python\ndef f(): pass\n```", '<span class="t-k">def</span>'),
        ("```nolanguage\n<b>\n```", "&lt;b&gt;"),
        ("```\nx\n```", '<div class="code"><pre tabindex="0"><code>x\n</code></pre></div>'),
        ("|a|\n|-|\n|b|", '<div class="table" tabindex="0"><table>'),
        ("|a|\n|-:|\n|b|", '<td align="right">b</td>'),
        ("so \\(x^2\\)", "<msup><mi>x</mi><mn>2</mn></msup>"),
        ("so $x^2$.", "<msup><mi>x</mi><mn>2</mn></msup>"),
        ("text\n\\[ a \\]\nmore", '<math display="block"><mrow><mi>a</mi></mrow></math></div>'),
        ("$$\na\n+ b\n$$", "<mi>a</mi><mo>+</mo><mi>b</mi>"),
        ("\\begin{aligned} $$a$$", "<mi>a</mi>"),
        ("$$\\begin{aligned}a&=b\\end{aligned}$$", "<mtable"),
    ],
)
def test_what_models_write(text: str, html: str) -> None:
    assert html in "".join(rendered(text))


@pytest.mark.parametrize(
    "text", ["It costs $5 and $6.", "US$5 to US$6", "a $ b $ c", "`$x$`", "```\n$x$\n```", "\\$x\\$", "$5/$6"]
)
def test_prices_and_code_are_not_formulas(text: str) -> None:
    assert "<math" not in "".join(rendered(text))


@pytest.mark.parametrize("formula", ["\\frac", "{" * 200 + "}" * 200, "x" * (MAX_FORMULA_CHARS + 1), "\\begin{matrix}"])
def test_a_formula_that_cannot_be_read_is_shown_as_written(formula: str) -> None:
    html = "".join(rendered(f"$${formula}$$"))
    assert "<math" not in html and formula in html


def test_an_answer_that_grows_looks_like_the_whole_answer() -> None:
    chance = random.Random(3)
    pieces = ["a ", "b\n", "\n\n", "- ", "1. ", "> ", "```", "```py\n", "**", "`", "# ", "    ", "|", "|-|\n", "---\n",
              "\\(x\\)", "$y$", "[a](https://b.example)", "<b>", "===\n", "www.a.example ", "\t", "\r\n"]  # fmt: skip
    for _ in range(1000):
        text = "".join(chance.choice(pieces) for _ in range(chance.randint(1, 25)))
        blocks, at = Blocks(), 0
        while at < len(text):
            at += chance.randint(1, 6)
            blocks.update(text[:at])
        assert "".join(blocks.html) == "".join(rendered(text)), text


def test_finished_blocks_are_not_rendered_again() -> None:
    blocks = Blocks()
    blocks.update("one\n\ntwo\n\nthree")
    first = blocks.html[0]
    blocks.update("one\n\ntwo\n\nthree and more\n\nfour")
    assert blocks.html[0] is first and len(blocks.html) == 4


def test_another_text_is_rendered_from_the_start() -> None:
    blocks = Blocks()
    blocks.update("one\n\ntwo\n\nthree")
    blocks.update("other")
    assert blocks.html == ["<p>other</p>\n"]


@pytest.mark.parametrize("piece", ["[", "*a **a ", "`", "> ", "- ", "$a ", "\\(", "<", "http://", "|a", "$$", "~~a ~"])
def test_repeated_signs_take_bounded_work(piece: str) -> None:
    text = piece * (MAX_BLOCK_CHARS // len(piece))
    assert "".join(rendered(text))  # the test's time limit catches work that grows much faster than the text


def test_a_very_long_block_is_plain_text() -> None:
    html = rendered("<b>" * MAX_BLOCK_CHARS)
    assert len(html) == 1 and html[0].startswith('<pre class="plain"') and "<b>" not in html[0]


def test_a_long_answer_of_short_blocks_is_rendered_whole() -> None:
    html = rendered("\n\n".join(f"**{number}** of many" for number in range(5000)))
    assert len(html) == 5000 and html[4999] == "<p><strong>4999</strong> of many</p>\n"
