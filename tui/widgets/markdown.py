"""Markdown for answers, drawn by one widget: no text is hidden, code wraps, tables fit the width.

Textual's own Markdown makes a widget of each paragraph, list item and table cell. Laying them out at each piece of a
streaming answer took a fifth of a core, and a long chat kept thousands of them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.ruler import RuleOptionsType
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode
from rich import box
from rich.segment import Segment
from rich.style import Style as RichStyle
from rich.table import Table
from rich.text import Text
from textual.content import Content, Span
from textual.geometry import Region, Size
from textual.highlight import ANSIDarkHighlightTheme, ANSILightHighlightTheme, HighlightTheme, highlight
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, RichVisual
from textual.widget import Widget

from localllm.text import harmless
from tui.widgets.formulas import as_unicode
from tui.widgets.frame import CURRENT, MATCH

# Parser rules whose matches would not be displayed: raw HTML, link definitions, images.
_HIDING = ("html_block", "html_inline", "reference", "image", "autolink")
_LINE_END = re.compile(r"\r\n?|\n")
_BULLETS = "•▪‣⭑◦"
_BAR = "▌ "  # before the lines of a quotation
_CODE_MARGIN = 2  # columns left and right of code
_LONG_CELL = 24  # characters; a table with longer cells gets lines between rows
_LEAST_COLUMNS = 8  # for a text, however deep the list that it is in
# A formula in a text: \\( \\), \\[ \\], $$ $$, or $ $ that touch it and no letter or digit outside, as prices do.
_FORMULA = re.compile(
    r"\\\((.{1,2000}?)\\\)|\\\[(.{1,2000}?)\\\]|\$\$(.{1,2000}?)\$\$|(?<![\\$\w])\$([^\s$](?:[^$]{0,500}?[^\s$\\])?)\$(?![\w$])",
    re.DOTALL,
)
_LOOKS_LIKE_ONE = re.compile(r"[\\^_={}+<>|]|^(?!.*[A-Za-z]{3})(?=.*[A-Za-z])\S*(, \S+)*$")
_OPENING = {"$$": "$$", "\\[": "\\]"}  # of formulas on lines of their own
_STYLES = {".strong": "bold", ".em": "italic", ".s": "strike", ".code_inline": "bold"}  # in tables
_NONE = Content()


def parser() -> MarkdownIt:
    """GitHub-flavoured Markdown without rules that hide text. Keeps line breaks, and shows link targets."""
    markdown = MarkdownIt("gfm-like", {"html": False}).disable(_HIDING)
    markdown.core.ruler.before("text_join", "letter_by_letter", _show_all)
    markdown.inline.ruler.before("escape", "formula", _read_formula)
    stops: RuleOptionsType = {"alt": ["paragraph", "reference", "blockquote", "list"]}  # what such a line ends
    markdown.block.ruler.before("fence", "formula_block", _read_formula_block, stops)
    return markdown


def _read_formula(state: StateInline, silent: bool) -> bool:
    found = _FORMULA.match(state.src, state.pos) if state.src[state.pos] in "\\$" else None
    if found is None or (found[4] and not _LOOKS_LIKE_ONE.search(found[4])):
        return False
    if not silent:
        state.push("formula", "", 0).content = found[0]
    state.pos = found.end()
    return True


def _read_formula_block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A formula on lines of its own, up to its closing sign. While that is missing, its text, up to a blank line."""

    def line(number: int) -> str:
        return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]].strip()

    closing = _OPENING.get(line(start)[:2])
    if (
        closing is None
        or state.is_code_block(start)
        or (closing in line(start)[2:] and not line(start).endswith(closing))
    ):
        return False
    last, lines = start, [line(start)]
    while not (lines[-1].endswith(closing) and (last > start or len(lines[0]) >= 4)):
        last += 1
        if last >= end or state.sCount[last] < state.blkIndent:
            break
        lines.append(line(last))
        if not lines[-1]:  # a blank line: no formula has one
            return False
    if not silent:
        token = state.push("formula_block", "", 0)
        token.content, token.map = "\n".join(lines), [start, min(last + 1, end)]
        state.line = min(last + 1, end)
    return True


def _formula(source: str) -> str:
    """A formula with its delimiters, for the screen: as Unicode, else as it is."""
    ends = 1 if source.startswith("$") and not source.startswith("$$") else 2
    closed = len(source) >= 2 * ends and source.endswith(_OPENING.get(source[:2], source[-ends:]))
    return (as_unicode(source[ends:-ends].strip()) if closed else None) or source


def _show_all(state: StateCore) -> None:
    for token in state.tokens:
        if token.children:
            token.children = list(_shown(token.children))


def _shown(tokens: Sequence[Token]) -> Iterator[Token]:
    """Rewrite inline tokens so that no text is hidden."""
    link: Token | None = None
    said = ""
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
        elif token.type == "text_special":  # an entity or backslash escape; LaTeX and paths contain many backslashes
            token.content = token.markup
        elif token.type == "link_open" and token.info != "auto":
            link, said = token, ""
        said += token.content
        yield token
        if token.type == "link_close" and link is not None:
            if target := _target(link, said):
                yield Token("text", "", 0, content=target)
            link = None


def _target(link: Token, said: str) -> str:
    """A link's address, unless it is also the link's text, and its title."""
    address, title = (str(link.attrs.get(name, "")) for name in ("href", "title"))
    shown = " ".join([*([address] if address != said else []), *([f'"{title}"'] if title else [])])
    return f" ({harmless(shown)})" if shown else ""  # a title may have written them as entities


Mark = tuple[int, int, int, str]
"""A match of a search: index in Piece.texts, start, end, style."""

Row = list[Segment]


@dataclass(slots=True)
class _Look:
    """How pieces are drawn: everything on which their look depends, beside their own content."""

    view: "AnswerMarkdown"
    style: Style
    theme: type[HighlightTheme]
    selected: Style | None

    def rows(self, content: Content, width: int, style: Style, selection: Selection | None, line: int) -> list[Row]:
        """A wrapped text. selection: relative to the text. line: the text's first line in the whole answer."""
        options = RenderOptions(self.view._get_style, {}, selection, self.selected)
        rows = []
        for strip in content.render_strips(width, None, style, options):
            row = []
            for text, drawn, _ in strip:
                x, y = drawn.meta.get("offset", (0, 0)) if drawn else (0, 0)
                row.append(Segment(text, drawn and drawn + RichStyle.from_meta({"offset": (x, y + line)})))
            rows.append(row)
        return rows

    def prefix(self, content: Content) -> Row:
        parts = content.render(self.style, end="", parse_style=self.view._get_style)
        return [Segment(text, (self.style + style).rich_style) for text, style in parts if text]


@dataclass
class Piece:
    """A part of an answer that is drawn on its own.

    first, rest: drawn before its first line and its other lines: bullets, indents, the bars of quotations. gap: blank
    lines above it, with `above` drawn in them. line: the number of lines of text in the pieces before it.
    """

    first: Content
    rest: Content
    gap: int = 0
    above: Content = _NONE
    line: int = 0
    _drawn: tuple[object, list[Strip]] = (None, [])

    @property
    def texts(self) -> Sequence[Content]:
        """What is searched."""
        return ()

    @cached_property
    def lines(self) -> Sequence[str]:
        """What is selected and copied."""
        return "\n".join(text.plain for text in self.texts).split("\n")

    def strips(self, width: int, look: _Look, selection: Selection | None, marks: Sequence[Mark]) -> list[Strip]:
        """The lines on the screen, after the gap."""
        key = (width, look.style, look.theme, look.view.styled, selection, tuple(marks))
        if self._drawn[0] != key:
            body = self._rows(self._room(width), look, selection, marks)
            before = [look.prefix(self.first), *[look.prefix(self.rest)] * (len(body) - 1)]
            rows = [look.prefix(self.above)] * self.gap + [left + row for left, row in zip(before, body, strict=True)]
            self._drawn = key, [Strip(row) for row in rows]
        return self._drawn[1]

    def line_of(self, text: int, end: int, width: int) -> int:
        """The line on the screen, counted from the start of the gap, with this position in one of the texts."""
        return self.gap

    def _room(self, width: int) -> int:
        return max(width - self.rest.cell_length, _LEAST_COLUMNS)

    def _rows(self, width: int, look: _Look, selection: Selection | None, marks: Sequence[Mark]) -> list[Row]:
        raise NotImplementedError


@dataclass
class Words(Piece):
    """A paragraph or a heading."""

    content: Content = _NONE

    @property
    def texts(self) -> Sequence[Content]:
        return (self.content,)

    def _rows(self, width: int, look: _Look, selection: Selection | None, marks: Sequence[Mark]) -> list[Row]:
        return look.rows(_marked(self.content, marks), width, look.style, selection, self.line)

    def line_of(self, text: int, end: int, width: int) -> int:
        return self.gap + len(self.content[:end].wrap(self._room(width))) - 1


@dataclass
class Code(Piece):
    """A code block, whose long lines wrap."""

    code: str = ""
    language: str = ""
    _coloured: tuple[object, Content] = (None, _NONE)

    @property
    def texts(self) -> Sequence[Content]:
        return (Content(self.code),)

    def _rows(self, width: int, look: _Look, selection: Selection | None, marks: Sequence[Mark]) -> list[Row]:
        if self._coloured[0] is not look.theme:
            self._coloured = look.theme, highlight(self.code, language=self.language or None, theme=look.theme)
        style = look.style + look.view.get_visual_style("code", partial=True)
        ground = style.rich_style
        rows = look.rows(_marked(self._coloured[1], marks), self._columns(width), style, selection, self.line)
        margin = Segment(" " * _CODE_MARGIN, ground)
        inner = [Segment.adjust_line_length([margin, *row], width, ground) for row in rows]
        blank = [Segment(" " * width, ground)]
        return [self._label(width, look, style), *inner, blank]

    def _label(self, width: int, look: _Look, style: Style) -> Row:
        """The line above the code: its language, and a mark that copies it."""
        language = Content.styled(harmless(self.language), "$text-muted").truncate(max(width - 10, 0), ellipsis=True)
        copy = Content.styled("⧉ copy", "$text-muted").stylize(Style.from_meta({"@click": f"copy({self.code!r})"}))
        room = width - 2 * _CODE_MARGIN - language.cell_length - copy.cell_length
        if room < 1:
            return [Segment(" " * width, style.rich_style)]
        margin = " " * _CODE_MARGIN
        line = Content.assemble(margin, language, " " * room, copy, margin)
        drawn = line.render(style, end="", parse_style=look.view._get_style)
        return [Segment(text, (style + own).rich_style) for text, own in drawn if text]

    def line_of(self, text: int, end: int, width: int) -> int:
        return self.gap + len(Content(self.code)[:end].wrap(self._columns(self._room(width))))

    def _columns(self, width: int) -> int:
        return max(width - 2 * _CODE_MARGIN, _LEAST_COLUMNS)


@dataclass
class Grid(Piece):
    """A table as wide as its content, at most as the screen; then cells wrap. Keeps the columns' alignment.

    cells: rows, the header first. sides: left, center or right for each column.
    """

    cells: list[list[Content]] = field(default_factory=list)
    sides: list[Any] = field(default_factory=list)

    @property
    def texts(self) -> Sequence[Content]:
        return [cell for row in self.cells for cell in row]

    @cached_property
    def lines(self) -> Sequence[str]:
        return ["\t".join(cell.plain for cell in row) for row in self.cells]

    def _rows(self, width: int, look: _Look, selection: Selection | None, marks: Sequence[Mark]) -> list[Row]:
        texts = iter([_text(cell, [mark for mark in marks if mark[0] == at]) for at, cell in enumerate(self.texts)])
        wraps = any(len(cell.plain) > _LONG_CELL for row in self.cells[1:] for cell in row)
        table = Table(box=box.ROUNDED, border_style="dim", header_style="bold", show_lines=wraps)
        for side in self.sides:
            table.add_column(next(texts), justify=side, overflow="fold")
        for row in self.cells[1:]:
            table.add_row(*(next(texts) for _ in row))
        style = look.style + look.selected if selection is not None and look.selected else look.style
        options = RenderOptions(look.view._get_style, {})
        return [[*strip] for strip in RichVisual(look.view, table).render_strips(width, None, style, options)]


@dataclass
class Rule(Piece):
    """A horizontal line."""

    def _rows(self, width: int, look: _Look, selection: Selection | None, marks: Sequence[Mark]) -> list[Row]:
        return [look.prefix(Content.styled("─" * width, "$secondary"))]


def pieces_of(nodes: Iterable[SyntaxTreeNode]) -> list[Piece]:
    """The pieces of a parsed text's top-level blocks."""
    return _pieces([*nodes], _NONE, _NONE, inside=False, depth=0)


def _pieces(nodes: list[SyntaxTreeNode], first: Content, rest: Content, inside: bool, depth: int) -> list[Piece]:
    """inside: in a list's item, where paragraphs and lists follow each other without a gap. depth: of bullet lists."""
    found: list[Piece] = []
    for node in nodes:
        made = _made(node, rest if found else first, rest, depth)
        if found and made:
            close = inside and isinstance(found[-1], Words) and isinstance(made[0], Words) and node.type != "paragraph"
            made[0].gap, made[0].above = int(not close), rest
        found += made
    return found or [Words(first, rest)]


def _made(node: SyntaxTreeNode, first: Content, rest: Content, depth: int) -> list[Piece]:
    made: list[Piece]
    match node.type:
        case "paragraph" | "heading":
            content = _inline(node)
            made = [Words(first, rest, content=content.stylize_before(f".{node.tag}") if node.tag != "p" else content)]
        case "fence" | "code_block":
            made = [Code(first, rest, code=node.content.rstrip(), language=node.info.strip())]
        case "formula_block":
            made = [Words(first + "  ", rest + "  ", content=Content(_formula(node.content)))]
        case "hr":
            made = [Rule(first, rest)]
        case "table":
            rows = [row for part in node.children for row in part.children]
            styles = [str(cell.attrs.get("style", "text-align:left")) for cell in rows[0].children]
            cells = [[_inline(cell) for cell in row.children] for row in rows]
            made = [Grid(first, rest, cells=cells, sides=[style.partition(":")[2] for style in styles])]
        case "blockquote":
            bar = Content.styled(_BAR, ".bar")
            made = _pieces(node.children, first + bar, rest + bar, False, depth)
        case "bullet_list" | "ordered_list":
            made = _items(node, first, rest, depth)
        case other:
            raise AssertionError(other)
    return made


def _items(node: SyntaxTreeNode, first: Content, rest: Content, depth: int) -> list[Piece]:
    ordered = node.type == "ordered_list"
    bullet = _BULLETS[depth % len(_BULLETS)]
    signs = [f"{item.info}{item.markup}" if ordered else bullet for item in node.children]
    columns = max(map(len, signs)) + ordered  # numbers are indented by one column
    found: list[Piece] = []
    for item, sign in zip(node.children, signs, strict=True):
        begin = (rest if found else first) + Content.styled(sign.rjust(columns) + " ", ".bullet")
        found += _pieces(item.children, begin, rest + " " * (columns + 1), True, depth + (not ordered))
    return found


def _inline(node: SyntaxTreeNode) -> Content:
    """The text of a paragraph, heading or cell. Styles are component classes; links carry an action."""
    text, spans, opened = "", list[Span](), list[tuple[int, Style | str]]()
    for token in node.children[0].token.children or () if node.children else ():  # type: ignore[union-attr]
        name, _, what = token.type.rpartition("_")
        if token.type == "text":
            text += re.sub(r"\s+", " ", token.content)
        elif token.type == "hardbreak":
            text += "\n"
        elif token.type == "formula":
            text += _formula(token.content).replace("\n", "; ")
        elif token.type == "code_inline":
            spans.append(Span(len(text), len(text) + len(token.content), ".code_inline"))
            text += token.content
        elif what == "open" and name == "link":
            action = Style.from_meta({"@click": f"link({str(token.attrs.get('href', ''))!r})"})
            opened.append((len(text), Style(underline=True) + action))
        elif what == "open":
            opened.append((len(text), f".{name}"))
        elif what == "close":
            start, style = opened.pop()
            spans.append(Span(start, len(text), style))
    return Content(text, spans=spans)


def _marked(content: Content, marks: Sequence[Mark]) -> Content:
    for _, start, end, style in marks:
        content = content.stylize(style, start, end)
    return content


def _text(cell: Content, marks: Sequence[Mark]) -> Text:
    """A table's cell for rich, which draws tables."""
    text = Text(cell.plain)
    for span in cell.spans:
        if isinstance(span.style, str) and span.style in _STYLES:
            text.stylize(_STYLES[span.style], span.start, span.end)
    for _, start, end, style in marks:
        text.stylize("bold reverse" if style == CURRENT else "bold underline", start, end)
    return text


class AnswerMarkdown(Widget):
    """An answer's Markdown, to which text can be appended. The chat copies links and never opens them.

    source: the whole text.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *("em", "strong", "s", "code_inline", "code", "bullet", "bar", "h1", "h2", "h3", "h4", "h5", "h6"),
    }
    DEFAULT_CSS = """
    AnswerMarkdown {
        width: 1fr;
        height: auto;
        & > .em { text-style: italic; }
        & > .strong { text-style: bold; }
        & > .s { text-style: strike; }
        & > .bullet { color: $text-primary; }
        & > .bar { color: $text-primary; }
        & > .code { color: $text; background: $surface; }
        & > .h1 { color: $markdown-h1-color; text-style: $markdown-h1-text-style; }
        & > .h2 { color: $markdown-h2-color; text-style: $markdown-h2-text-style; }
        & > .h3 { color: $markdown-h3-color; text-style: $markdown-h3-text-style; }
        & > .h4 { color: $markdown-h4-color; text-style: $markdown-h4-text-style; }
        & > .h5 { color: $markdown-h5-color; text-style: $markdown-h5-text-style; }
        & > .h6 { color: $markdown-h6-color; text-style: $markdown-h6-text-style; }
        &:dark > .code_inline { background: $warning 10%; color: $text-warning 95%; }
        &:light > .code_inline { background: $error 5%; color: $text-error 95%; }
        &:light > .bullet { color: $text-secondary; }
        &:light > .bar { color: $text-secondary; }
        &:ansi > .code_inline { background: ansi_default; }
        &:ansi > .code { background: ansi_default; }
    }
    """

    @dataclass
    class LinkClicked(Message):
        """The user has clicked a link."""

        href: str

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.auto_links = False
        self.source = ""
        self.styled = 0  # counts changes of the styles
        self._parser = parser()
        self._pieces: list[Piece] = []
        self._last, self._open = 0, ""  # where the last block starts in _pieces, and its text
        self._lines: tuple[object, list[Strip], list[int]] = (None, [], [])  # what is drawn, and each piece's end in it
        self._pattern: re.Pattern[str] | None = None
        self._matches: list[tuple[int, int, int, int]] = []  # piece, index in its texts, start, end
        self._at = -1  # the current match
        self.append(text)

    def append(self, text: str) -> None:
        """Add text at the end. Only the last block is parsed and drawn again."""
        if not text:
            return
        self.source += text
        self._open += text
        tokens = self._parser.parse(self._open)
        nodes = SyntaxTreeNode(tokens).children
        kept = sum(len(piece.lines) for piece in self._pieces[: self._last])
        height = len(self._lines[1])
        same = self._ends()[self._last - 1] if self._last and height else 0
        old = self._pieces[: self._last]
        before, last = pieces_of(nodes[:-1]) if nodes[1:] else [], pieces_of(nodes[-1:]) if nodes else []
        self._pieces = [*old, *before, *last]
        if new := self._pieces[len(old) :]:
            if old:
                new[0].gap, new[0].above = 1, _NONE
            if before and last:
                last[0].gap = 1
            for piece, line in zip(new, accumulate((len(piece.lines) for piece in new), initial=kept), strict=False):
                piece.line = line
        self._last = len(old) + len(before)
        if nodes and nodes[-1].map and (begin := nodes[-1].map[0]):
            ends = [found.end() for found in _LINE_END.finditer(self._open)]
            self._open = self._open[ends[begin - 1] :]
        self._search()
        self._redraw(same, height)

    def mark(self, pattern: re.Pattern[str] | None) -> int:
        """Highlight a pattern's matches; None clears them. Returns the number of matches."""
        if (pattern, -1) != (self._pattern, self._at):
            self._pattern, self._at = pattern, -1
            self._search()
            self.refresh()
        return len(self._matches)

    def go(self, match: int) -> int:
        """Highlight one of the matches as the current one. Returns its line."""
        self._at = match
        self.refresh()
        place, text, _, end = self._matches[match]
        ends = self._ends()
        return (ends[place - 1] if place else 0) + self._pieces[place].line_of(text, end, self.content_size.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """The number of lines at this width."""
        return len(self._strips(width)) if width else 0

    def render_line(self, y: int) -> Strip:
        """A line, drawn before."""
        strips = self._strips(self.size.width)
        return strips[y] if y < len(strips) else Strip.blank(self.size.width, self.visual_style.rich_style)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text, with bullets and the bars of quotations; a table's cells are separated by tabs."""
        found: list[str] = []
        for piece in self._pieces:
            for number, text in enumerate(piece.lines, piece.line):
                if (span := selection.get_span(number)) is not None:
                    before = (piece.first if number == piece.line else piece.rest).plain if not span[0] else ""
                    found.append(before + text[span[0] : None if span[1] == -1 else span[1]])
        return "\n".join(found), "\n"

    def notify_style_update(self) -> None:
        """Draw everything anew: the colours have changed."""
        self.styled += 1
        super().notify_style_update()

    def action_copy(self, code: str) -> None:
        self.app.copy_to_clipboard(code)
        self.app.notify("Code copied.")

    def action_link(self, href: str) -> None:
        self.post_message(self.LinkClicked(href))

    def _search(self) -> None:
        self._matches = [
            (place, at, *found.span())
            for place, piece in enumerate(self._pieces if self._pattern else ())
            for at, text in enumerate(piece.texts)
            for found in self._pattern.finditer(text.plain)  # type: ignore[union-attr]
        ]

    def _redraw(self, same: int, before: int) -> None:
        """Refresh the lines from `same` on, and the layout if their number has changed from `before`."""
        if not self.is_attached or not (width := self.size.width):
            return
        after = len(self._strips(width))
        self.refresh(Region(0, same, width, max(after - same, 1)), layout=after != before)

    def _ends(self) -> list[int]:
        """Behind each piece, the number of lines drawn."""
        return self._lines[2]

    def _strips(self, width: int) -> list[Strip]:
        selection = self.text_selection if self.is_attached else None
        look = _Look(self, self.visual_style, self._theme(), self._selected() if selection else None)
        key = (width, look.style, look.theme, self.styled, selection, len(self.source), self._pattern, self._at)
        if self._lines[0] != key:
            strips, ends = list[Strip](), list[int]()
            for place, piece in enumerate(self._pieces):
                marks = [
                    (text, start, end, CURRENT if number == self._at else MATCH)
                    for number, (where, text, start, end) in enumerate(self._matches)
                    if where == place
                ]
                strips += piece.strips(width, look, _within(selection, piece), marks)
                ends.append(len(strips))
            self._lines = key, strips, ends
        return self._lines[1]

    def _theme(self) -> type[HighlightTheme]:
        if not self.app.native_ansi_color:
            return HighlightTheme
        return ANSIDarkHighlightTheme if self.app.current_theme.dark else ANSILightHighlightTheme

    def _selected(self) -> Style:
        return Style.from_styles(self.screen.get_component_styles("screen--selection"))


def _within(selection: Selection | None, piece: Piece) -> Selection | None:
    """The part of a selection in a piece, relative to the piece's text; None if there is none."""
    if selection is None or all(
        selection.get_span(line) is None for line in range(piece.line, piece.line + len(piece.lines))
    ):
        return None
    start, end = (None if offset is None else offset - (0, piece.line) for offset in selection)
    return Selection(start, end)
