# ruff: noqa: RUF001 - signs of formulas resemble letters
"""LaTeX formulas as one line of Unicode, or some lines: pylatexenc reads them and knows the symbols.

What it does not know is shown as it was written; fractions and scripts keep the parentheses that their meaning needs.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

MOST_CHARS = 4000  # of a formula; longer ones are shown as they are
_SUPERSCRIPTS = dict(
    zip("0123456789+-=()abcdefghijklmnoprstuvwxyz*′", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ*′", strict=True)
)
_SUPERSCRIPTS |= dict(zip("ABDEGHIJKLMNOPRTUVW−", "ᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂ⁻", strict=True))
_SUBSCRIPTS = dict(zip("0123456789+-=()aehijklmnoprstuvx−", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ₋", strict=True))
_SCRIPTS = {"^": _SUPERSCRIPTS, "_": _SUBSCRIPTS}
_ROOTS = {"": "√", "2": "√", "3": "∛", "4": "∜"}
_FRACTIONS = frozenset({"frac", "dfrac", "tfrac", "cfrac"})
# Macros of which only the last argument is shown, as it is.
# fmt: off
_PLAIN = frozenset({
    "text", "textrm", "textbf", "textit", "texttt", "textsf", "mathrm", "mathbf", "mathit", "mathsf", "mathtt",
    "boldsymbol", "bm", "operatorname", "mbox", "boxed", "underbrace", "overbrace", "ensuremath", "phantom",
    "substack",
})
# fmt: on
# fmt: off
_NOTHING = frozenset({
    "left", "right", "middle", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr",
    "Biggl", "Biggr", "limits", "nolimits", "displaystyle", "textstyle", "scriptstyle", "nonumber", "notag", "!",
})
# fmt: on
_SPACES = frozenset({",", ";", ":", ">", " ", "quad", "qquad", "enspace", "thinspace"})
_BRACKETS = {"pmatrix": "()", "bmatrix": "[]", "Bmatrix": "{}", "vmatrix": "||", "Vmatrix": "‖‖", "matrix": "[]"}
_BRACKETS |= {"smallmatrix": "[]", "array": "[]"}
_CELL = "\x1f"
_SIMPLE = re.compile(
    r"\d[\d.]*|[^\W\d_][\u0300-\u036f\u20d7′″²³¹⁰-₟ᵃ-ᶻᴬ-ᵪⱼⱽ]*|∞"
)  # a number, or a letter with its marks
# Arguments of macros that pylatexenc does not know, and symbols.
_ARGUMENTS = {
    "boxed": "{",
    "operatorname": "*{",
    "binom": "{{",
    "dfrac": "{{",
    "tfrac": "{{",
    "cfrac": "[{{",
    "bm": "{",
}
_ARGUMENTS |= {"substack": "{", "underbrace": "{", "overbrace": "{", "textsf": "{", "boldsymbol": "{", "mathsf": "{"}
_SYMBOLS = {
    "ne": "≠",
    "implies": "⟹",
    "iff": "⟺",
    "|": "‖",
    "lVert": "‖",
    "rVert": "‖",
    "lvert": "|",
    "rvert": "|",
    "dots": "…",
}


def as_unicode(latex: str) -> str | None:
    """A formula without its delimiters as Unicode; None if it cannot be read."""
    if len(latex) > MOST_CHARS:
        return None
    from pylatexenc.latexwalker import LatexWalker

    try:
        nodes, _, _ = LatexWalker(latex, latex_context=_known_macros(), tolerant_parsing=False).get_latex_nodes()
        shown = _written(nodes)
    except Exception:  # pylatexenc raises many kinds for what is no LaTeX, KeyError and RecursionError among them
        return None
    lines = (re.sub(r" {2,}", " ", line.replace(_CELL, " ")).strip() for line in shown.split("\n"))
    return "\n".join(line for line in lines if line)


@cache
def _symbols() -> Any:
    from pylatexenc.latex2text import LatexNodes2Text

    return LatexNodes2Text(math_mode="text")


@cache
def _known_macros() -> Any:
    from pylatexenc.latexwalker import get_default_latex_context_db
    from pylatexenc.macrospec import std_macro

    known = get_default_latex_context_db()
    macros = [std_macro(name, arguments) for name, arguments in _ARGUMENTS.items()]
    known.add_context_category("formulas", macros=macros, prepend=True)
    return known


def _written(nodes: Sequence[Any]) -> str:
    """What a list of nodes says."""
    items = [
        item for node in nodes if node for item in (re.sub(r"\s+", " ", node.chars) if _is(node, "Chars") else [node])
    ]
    out, place = "", 0
    while place < len(items):
        item, place = items[place], place + 1
        if isinstance(item, str) and item in _SCRIPTS:
            while place < len(items) - 1 and _is_blank(items[place]):
                place += 1
            said = _script(item, _one(items[place]) if place < len(items) else "")
            place += 1
            out += said + " " * (said[:1] == item and not _ends(items[place:]))
        elif isinstance(item, str):
            out += "′" if item == "'" else item
        elif _is(item, "Macro") and item.macroname in _NOTHING:
            following = items[place] if place < len(items) else ""
            place += isinstance(following, str) and following == "."  # \left. is an invisible bracket
        elif _is(item, "Macro"):
            out += _beside(out, item, _one(item), items[place:])
        else:
            out += _one(item)
    return out


def _beside(before: str, macro: Any, said: str, after: Sequence[Any]) -> str:
    """What a macro says, with the parentheses and spaces that keep it apart from its neighbours."""
    if macro.macroname in _FRACTIONS:
        return f"({said})" if before[-1:].isalnum() or not _ends(after) else said
    if len(said) > 1 and said.isalpha() and macro.macroname not in _PLAIN:  # a function, such as \sin
        following = next((one for one in after if not _is_blank(one)), "")
        apart = not isinstance(following, str) or following.isalnum()
        return f"{' ' * before[-1:].isalnum()}{said}{' ' * apart}"
    return said + " " * (before.endswith(" ") and bool(macro.macro_post_space) and not said.isalnum())


def _ends(after: Sequence[Any]) -> bool:
    """Whether what comes next is nothing, or a character that ends a fraction or a script."""
    skipped = (one for one in after if not _is_blank(one) and not (_is(one, "Macro") and one.macroname in _NOTHING))
    following = next(skipped, " ")
    return (following in " +-=,.;:)]|<>/") if isinstance(following, str) else _is(following, "Specials")


def _is_blank(item: Any) -> bool:
    return isinstance(item, str) and item == " "


def _is(node: Any, kind: str) -> bool:
    return type(node).__name__ == f"Latex{kind}Node"


def _one(node: Any) -> str:
    """What one node says."""
    if isinstance(node, str):
        return node
    if _is(node, "Group") or _is(node, "Math"):
        return _written(node.nodelist)
    if _is(node, "Environment"):
        return _environment(node)
    if _is(node, "Specials"):
        return {"&": _CELL, "''": "″"}.get(node.specials_chars) or str(_symbols().node_to_text(node))
    if _is(node, "Macro"):
        return _macro(node)
    return "" if _is(node, "Comment") else str(node.latex_verbatim())


def _macro(node: Any) -> str:  # noqa: PLR0911 - one for each kind of macro
    name = node.macroname
    given = [one for one in (node.nodeargd.argnlist if node.nodeargd else None) or [] if one is not None]
    if name == "\\":
        return "\n"
    if name in _SPACES or name in _SYMBOLS:
        return _SYMBOLS.get(name, " ")
    if name in _FRACTIONS and len(given) >= 2:
        return "/".join(_whole(_one(one)) for one in given[-2:])
    if name == "binom" and len(given) == 2:
        return f"({_one(given[0])} choose {_one(given[1])})"
    if name == "sqrt" and given:
        index = _one(given[0]).strip("[]") if len(given) > 1 else ""
        return _ROOTS.get(index, _script("^", index) + "√") + _whole(_one(given[-1]))
    if name in ("overline", "bar") and given:
        return "".join(f"{letter}\u0305" for letter in _one(given[-1]))
    if name in _PLAIN and given:
        return _one(given[-1])
    known = _symbols().latex_context.get_macro_spec(name)
    if not getattr(known, "macroname", ""):
        return str(node.latex_verbatim())
    return str(_symbols().node_to_text(node)).strip() or str(node.latex_verbatim())


def _environment(node: Any) -> str:
    rows = [row.strip() for row in _written(node.nodelist).split("\n") if row.strip()]
    name = node.environmentname.rstrip("*")
    if name not in _BRACKETS and name != "cases":
        return "\n".join(rows)
    cells = [" ".join(cell.strip() for cell in row.split(_CELL)) for row in rows]
    brackets = _BRACKETS.get(name, "{")
    return f"{brackets[0]}{'; '.join(cells)}{brackets[1:]}"


def _script(sign: str, text: str) -> str:
    """A superscript (^) or a subscript (_)."""
    text = text.strip().replace("\u2032\u2032", "″")
    if text in ("′", "″", "∘", "°"):
        return text.replace("∘", "°")
    table = _SCRIPTS[sign]
    if text and all(letter in table for letter in text):
        return "".join(table[letter] for letter in text)
    return sign + (text if len(text) == 1 else f"({text})")


def _whole(text: str) -> str:
    """A text that an operator can stand beside: in parentheses, unless it is a number or a name."""
    text = text.strip()
    return text if _SIMPLE.fullmatch(text) or (text[:1] == "(" and text.find(")") == len(text) - 1) else f"({text})"
