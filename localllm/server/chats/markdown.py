"""Markdown of a model as HTML that is safe to insert into a page: highlighted code, and formulas as MathML.

A model's text is never HTML. Links lead to http, https and mailto only, and images are links, so that showing an answer
contacts no one. Heavy imports are deferred: a server that renders nothing does not pay for them.
"""

import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cache, lru_cache
from html import escape, unescape
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from localllm.text import harmless

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

# Larger blocks are shown as plain text: what they would take to read grows faster than their length.
MAX_BLOCK_CHARS = 30_000
_PART_CHARS = 10_000
MAX_CODE_CHARS = 60_000
MAX_FORMULA_CHARS = 2_000
MAX_FORMULA_DEPTH = 40  # braces within braces
_LINE_END = re.compile(r"\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")  # that splitlines() knows
_SAFE_LINK = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)
_BLOCK_MATHS = (("$$", "$$"), ("\\[", "\\]"))
_INLINE_MATHS = (("$$", "$$", True), ("\\[", "\\]", True), ("\\(", "\\)", False))
# Not a price: no space within the dollars, no letter or digit before them, and no digit after them.
_DOLLARS = re.compile(r"\$(?![\s$])((?:[^$\n\\]|\\.)+?)(?<!\s)\$(?!\d)")
_ALIGNED = re.compile(r"\{(?:aligned|gathered|split)\}")
_CLOSING = {"$$": "$$", "$": "$", "\\[": "\\]", "\\(": "\\)"}
_MATHML = frozenset({
    "math", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup", "msubsup",
    "munder", "mover", "munderover", "mmultiscripts", "mprescripts", "none", "mtable", "mtr", "mtd", "mpadded",
    "mphantom", "menclose", "mstyle", "mfenced",
})  # fmt: skip
_MATHML_ATTRIBUTES = frozenset({
    "display", "displaystyle", "scriptlevel", "mathvariant", "stretchy", "fence", "separator", "form", "lspace",
    "rspace", "minsize", "maxsize", "linethickness", "width", "height", "depth", "columnalign", "rowspacing",
    "columnspacing", "columnlines", "rowlines", "accent", "accentunder", "movablelimits", "notation", "open", "close",
})  # fmt: skip


class Blocks:
    """The HTML of a text that grows: one string for each top-level block.

    html: the blocks. Those before the last one do not change when text is appended.
    """

    def __init__(self) -> None:
        self.html: list[str] = []
        self._text = ""
        self._start = 0  # of the text that is parsed again when more arrives
        self._done = 0  # blocks before it

    def update(self, text: str) -> None:
        """Render the text. If it does not begin with the one before, all of it is rendered again."""
        text = _LINE_END.sub("\n", harmless(text))
        if not text.startswith(self._text):
            self._start = self._done = 0
        self._text = text
        tail = text[self._start :]
        found = list(_blocks(tail))
        self.html[self._done :] = [html for html, _, _ in found]
        # A line that has not ended, or a formula, may turn out to belong to the block before it.
        whole = tail.count("\n")
        last = next((at for at in range(len(found) - 1, 0, -1) if found[at][1] < whole), 0)
        if last and not any(pending for *_, pending in found):
            self._start += len("".join(tail.splitlines(keepends=True)[: found[last][1]]))
            self._done += last


@lru_cache(maxsize=256)
def rendered(text: str) -> tuple[str, ...]:
    """The blocks of a whole text. A long one is read in parts, so that only a long block is shown as plain text."""
    blocks = Blocks()
    for end in range(_PART_CHARS, len(text) + _PART_CHARS, _PART_CHARS):
        blocks.update(text[:end])
    return tuple(blocks.html)


def _blocks(text: str) -> Iterator[tuple[str, int, bool]]:
    """Each top-level block: its HTML, its first line, and whether it is a formula that has not ended."""
    if len(text) > MAX_BLOCK_CHARS:
        yield f'<pre class="plain" tabindex="0">{escape(text)}</pre>', 0, False
        return
    parser = _parser()
    env: MutableMapping[str, Any] = {}
    tokens = parser.parse(text, env)
    start = 0
    for place, token in enumerate(tokens):
        if token.level == 0 and token.nesting <= 0:
            block = tokens[start : place + 1]
            line = block[0].map[0] if block[0].map else 0
            yield parser.renderer.render(block, parser.options, env), line, bool(token.meta.get("pending"))
            start = place + 1


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    # Definitions of links would change blocks that are rendered already, and hide text.
    parser = MarkdownIt("gfm-like", {"html": False, "breaks": True}).disable(["reference", "image"])
    parser.validateLink = lambda url: _SAFE_LINK.match(url) is not None  # type: ignore[method-assign]
    parser.block.ruler.before("fence", "math_block", _math_block, {"alt": ["paragraph", "blockquote", "list"]})
    parser.inline.ruler.before("escape", "math", _math_inline)
    rules: Mapping[str, Any] = {
        "fence": _render_code,
        "code_block": _render_code,
        "math": _render_math,
        "math_block": _render_math,
        "link_open": _render_link,
        "th_open": _render_cell,
        "td_open": _render_cell,
        "table_open": lambda *_: '<div class="table" tabindex="0"><table>\n',
        "table_close": lambda *_: "</table></div>\n",
    }
    parser.renderer.rules.update(rules)  # type: ignore[attr-defined]
    return parser


def _render_link(tokens: Sequence["Token"], place: int, *_: Any) -> str:
    link = tokens[place]
    title = f' title="{escape(str(link.attrs["title"]))}"' if "title" in link.attrs else ""
    return f'<a href="{escape(str(link.attrs["href"]))}"{title} target="_blank" rel="noopener noreferrer nofollow">'


def _render_cell(tokens: Sequence["Token"], place: int, *_: Any) -> str:
    """A cell of a table. Its alignment would be a style, which the page's policy forbids."""
    cell = tokens[place]
    side = str(cell.attrs.get("style", "")).rpartition(":")[2]
    return f'<{cell.tag} align="{side}">' if side else f"<{cell.tag}>"


def _render_code(tokens: Sequence["Token"], place: int, *_: Any) -> str:
    code = tokens[place]
    language = code.info.split()[0] if code.info.strip() else ""
    shown = highlighted(code.content, language)
    named = f' data-language="{escape(language[:40])}"' if language else ""
    return f'<div class="code"{named}><pre tabindex="0"><code>{shown}</code></pre></div>\n'


def highlighted(code: str, language: str) -> str:
    """Code as HTML, with Pygments' classes if it knows the language."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    if not language or len(code) > MAX_CODE_CHARS:
        return escape(code)
    try:
        lexer = get_lexer_by_name(language[:40].lower(), stripnl=False, ensurenl=False)
    except ClassNotFound:
        return escape(code)
    return str(highlight(code, lexer, HtmlFormatter(nowrap=True, classprefix="t-")))


def _math_block(state: "StateBlock", first: int, end: int, silent: bool) -> bool:
    """A formula that begins a line, up to its closing sign or a blank line. One that has not ended is pending."""
    begin = state.bMarks[first] + state.tShift[first]
    signs = next((pair for pair in _BLOCK_MATHS if state.src.startswith(pair[0], begin)), None)
    if signs is None or state.is_code_block(first):
        return False
    opening, closing = signs
    at, closed, line = begin + len(opening), -1, first
    while line < end and (line == first or (not state.isEmpty(line) and state.sCount[line] >= state.blkIndent)):
        closed = state.src.find(closing, at, state.eMarks[line])
        if closed >= 0:
            break
        line += 1
        at = state.bMarks[line] if line < end else at
    if closed >= 0:
        if state.src[closed + len(closing) : state.eMarks[line]].strip():
            return False  # text follows, so it is a formula within a paragraph
        line += 1
    elif line < state.lineMax or state.src.endswith("\n\n"):
        return False  # it ends without its sign
    if silent:
        return True
    text = state.getLines(first, line, state.blkIndent, False).strip().removeprefix(opening)
    token = state.push("math_block", "math", 0)
    token.content = text.removesuffix(closing) if closed >= 0 else text
    token.markup, token.block, token.map = opening, True, [first, line]
    token.meta = {"display": True, "pending": closed < 0}
    state.line = line
    return True


def _math_inline(state: "StateInline", silent: bool) -> bool:
    source, begin = state.src, state.pos
    if source[begin] not in "$\\":
        return False
    for opening, closing, display in _INLINE_MATHS:
        if source.startswith(opening, begin):
            end = source.find(closing, begin + len(opening), begin + MAX_FORMULA_CHARS)
            content = source[begin + len(opening) : end] if end >= 0 else ""
            if not content.strip():
                return False
            return _push_math(state, content, opening, end + len(closing), display, silent)
    before = source[begin - 1] if begin else " "
    found = _DOLLARS.match(source, begin, begin + MAX_FORMULA_CHARS)
    if found is None or before.isalnum() or before in "$\\":
        return False
    return _push_math(state, found[1], "$", found.end(), False, silent)


def _push_math(state: "StateInline", content: str, markup: str, end: int, display: bool, silent: bool) -> bool:
    if not silent:
        token = state.push("math", "math", 0)
        token.content, token.markup, token.meta = content, markup, {"display": display}
    state.pos = end
    return True


def _render_math(tokens: Sequence["Token"], place: int, *_: Any) -> str:
    token = tokens[place]
    display = token.meta["display"]
    pending = token.meta.get("pending", False)
    found = None if pending else mathml(token.content.strip(), display)
    if found is None:
        source = f"{token.markup}{token.content}{'' if pending else _CLOSING[token.markup]}"
        found = f'<code class="formula">{escape(source)}</code>'
    return f'<div class="formula" tabindex="0">{found}</div>\n' if token.block else found


@lru_cache(maxsize=512)
def mathml(latex: str, display: bool) -> str | None:
    """A LaTeX formula as MathML without anything that acts or loads; None if it cannot be read as a formula."""
    from latex2mathml.converter import convert_to_element

    if len(latex) > MAX_FORMULA_CHARS or _depth(latex) > MAX_FORMULA_DEPTH:
        return None
    try:
        root = convert_to_element(_ALIGNED.sub("{align*}", latex), display="block" if display else "inline")
    except Exception:  # the library raises errors of many kinds; the formula is shown as it was written
        return None
    for element in root.iter():
        if element.tag not in _MATHML:
            return None
        element.attrib = {name: value for name, value in element.attrib.items() if name in _MATHML_ATTRIBUTES}
        element.text = unescape(element.text or "")  # the library writes signs as HTML's entities
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _depth(latex: str) -> int:
    deepest = depth = 0
    for character in latex:
        depth += (character == "{") - (character == "}")
        deepest = max(deepest, depth)
    return deepest
