"""Formulas in answers, as Unicode."""

# ruff: noqa: RUF001 - signs of formulas resemble letters

import random

import pytest
from markdown_it.tree import SyntaxTreeNode
from textual.selection import Selection

from tui.widgets.formulas import as_unicode
from tui.widgets.markdown import AnswerMarkdown, parser, pieces_of

EVERYTHING = Selection(None, None)


@pytest.mark.parametrize(
    ("latex", "shown"),
    [
        (r"\int_0^1 x^2\,dx = \frac{1}{3}", "∫₀¹ x² dx = 1/3"),
        (r"x=\frac{-b\pm\sqrt{b^2-4ac}}{2a}", "x=(-b±√(b²-4ac))/(2a)"),
        (r"e^{i\pi}+1=0", "e^(iπ)+1=0"),
        (r"\frac{1}{2}mv^2", "(1/2)mv²"),
        (r"\left(\frac{a+b}{2}\right)^2", "((a+b)/2)²"),
        (r"\sum_{n=1}^{\infty}\frac{1}{n^2}", "∑ₙ₌₁^∞ 1/n²"),
        (r"\mathbb{R}^n \to \mathbb{C}", "ℝⁿ → ℂ"),
        (r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}", "(1 2; 3 4)"),
        (r"\begin{align*}a&=b\\c&=d\end{align*}", "a =b\nc =d"),
        (r"\sqrt[3]{x+1} + \sqrt{y}", "∛(x+1) + √y"),
        (r"f'(x), a'', 90^\circ, H_2O", "f′(x), a″, 90°, H₂O"),
        (r"\operatorname{softmax}(QK^T/\sqrt{d_k})", "softmax(QKᵀ/√dₖ)"),
        (r"\sin\theta, \log_2 n, \binom{n}{k}, 50\%", "sin θ, log₂ n, (n choose k), 50%"),
        (r"\mystery{x}", r"\mysteryx"),
    ],
)
def test_formulas_keep_their_meaning(latex: str, shown: str) -> None:
    assert as_unicode(latex) == shown


@pytest.mark.parametrize("latex", ["{", r"\frac", r"\begin{x", "{" * 1500 + "}" * 1500, "x" * 5000])
def test_what_cannot_be_read_is_left(latex: str) -> None:
    assert as_unicode(latex) is None


def test_no_text_makes_it_fail() -> None:
    draw = random.Random(7)
    parts = [
        "\\",
        "{",
        "}",
        "^",
        "_",
        "$",
        "&",
        "x",
        "1",
        " ",
        "\\frac",
        "\\sqrt",
        "[",
        "]",
        "\\begin{align}",
        "\\left",
        ".",
    ]
    parts += [
        "\\end{align}",
        "\\\\",
        "\\text",
        "\\(",
        "\\hat",
        "%",
        "#",
        "~",
        "\\left.",
        "\\binom",
        "\\right",
        "é",
        "\n",
    ]
    for _ in range(3000):
        text = "".join(draw.choice(parts) for _ in range(draw.randrange(1, 12)))
        shown = as_unicode(text)
        assert shown is None or isinstance(shown, str), text


def lines(text: str) -> list[str]:
    return [line for piece in pieces_of(SyntaxTreeNode(parser().parse(text)).children) for line in piece.lines]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("The $x^2$ and $n$ and $f(x)$", ["The x² and n and f(x)"]),
        (r"So \(a_1\) and \[\frac{1}{2}\] end", ["So a₁ and 1/2 end"]),
        ("$$\n\\alpha\n= 3\n- y\n$$\nafter", ["α= 3 - y", "after"]),
        ("text\n\\[ a^2 \\]\nmore", ["text", "a²", "more"]),
        ("- item\n  $$\n  x^2\n  $$\n- two", ["item", "x²", "two"]),
        ("| a | b |\n|--|--|\n| $x^2$ | $\\alpha$ |", ["a\tb", "x²\tα"]),
        ("Costs $5 and $10 and 10$.", ["Costs $5 and $10 and 10$."]),
        ("$HOME/$USER and `$x^2$`", ["$HOME/$USER and $x^2$"]),
        ("US$5-US$10, $20 (or $30)", ["US$5-US$10, $20 (or $30)"]),
        ("\\[\na\n\nb", ["\\[", "a", "b"]),
        ("$$ open", ["$$ open"]),
        ("```\n$$\nx^2\n$$\n```", ["$$", "x^2", "$$"]),
    ],
)
def test_formulas_are_found_in_texts_and_prices_are_not(text: str, shown: list[str]) -> None:
    assert lines(text) == shown


def test_a_streamed_answer_looks_like_a_whole_one() -> None:
    text = "A sum:\n\n$$\n\\sum_{i=1}^n i\n- 1\n= x\n$$\n\nand \\(x^2\\),\n\\[\ny_1\n\\]\n\n- $a$\n\nend $b_2$.\n"
    whole = AnswerMarkdown(text)
    for step in (1, 3, 7):
        streamed = AnswerMarkdown("")
        for start in range(0, len(text), step):
            streamed.append(text[start : start + step])
        assert streamed.get_selection(EVERYTHING) == whole.get_selection(EVERYTHING)
