"""Markdown for answers: no text is hidden, code wraps, tables fit the width."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from rich import box
from rich.table import Table
from rich.text import Text
from textual.content import Content
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

# Parser rules whose matches would not be displayed: raw HTML, link definitions, images.
_HIDING = ("html_block", "html_inline", "reference", "image", "autolink")
_LONG_CELL = 24  # characters; a table with longer cells gets lines between rows
_MarkdownTable: Any = Markdown.BLOCKS["table_open"]
_STYLES = {".strong": "bold", ".em": "italic", ".s": "strike", ".code_inline": "bold"}


def parser() -> MarkdownIt:
    """GitHub-flavoured Markdown without rules that hide text. Keeps line breaks, and shows link targets."""
    markdown = MarkdownIt("gfm-like", {"html": False}).disable(_HIDING)
    markdown.core.ruler.before("text_join", "letter_by_letter", _show_all)
    return markdown


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
    return f" ({shown})" if shown else ""


class WrappedCode(MarkdownFence):
    """A code block whose long lines wrap."""

    DEFAULT_CSS = """
    WrappedCode { overflow: hidden; }
    WrappedCode > Label { width: 1fr; }
    """


class FittedTable(_MarkdownTable):  # type: ignore[misc]
    """A table as wide as its content, at most as the screen; then cells wrap. Keeps the columns' alignment."""

    def compose(self) -> Any:
        """No children: the table draws itself."""
        self.update(self._drawn())
        return ()

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if isinstance(block, FittedTable):
            self.update(block._drawn())
        else:
            await MarkdownBlock._update_from_block(self, block)

    def mark_matches(self, pattern: re.Pattern[str] | None) -> int:
        """Highlight a pattern's matches in the cells; None clears them. Returns the number of matches."""
        headers, rows = self._get_headers_and_rows()
        self.update(self._drawn(pattern))
        cells = [cell for row in (headers, *rows) for cell in row]
        return sum(len(pattern.findall(cell.plain)) for cell in cells) if pattern else 0

    def _drawn(self, pattern: re.Pattern[str] | None = None) -> Table:
        headers, rows = self._get_headers_and_rows()
        wraps = any(len(cell.plain) > _LONG_CELL for row in rows for cell in row)
        table = Table(box=box.ROUNDED, border_style="dim", header_style="bold", show_lines=wraps)
        for header, side in zip(headers, self._sides(), strict=True):
            table.add_column(_text(header, pattern), justify=side, overflow="fold")
        for row in rows:
            table.add_row(*(_text(cell, pattern) for cell in row))
        return table

    def _sides(self) -> list[Any]:
        """left, center or right for each column."""
        (head, *_) = self._blocks
        cells = [cell for row in head._blocks for cell in row._blocks]
        return [str(cell._token.attrs.get("style", "text-align:left")).partition(":")[2] for cell in cells]


def _text(content: Content, pattern: re.Pattern[str] | None) -> Text:
    text = Text(content.plain)
    for span in content.spans:
        if isinstance(span.style, str) and span.style in _STYLES:
            text.stylize(_STYLES[span.style], span.start, span.end)
    if pattern:
        text.highlight_regex(pattern, "bold underline reverse")
    return text


_BLOCKS: dict[str, type[MarkdownBlock]] = {"fence": WrappedCode, "code_block": WrappedCode, "table_open": FittedTable}


class AnswerMarkdown(Markdown):
    """An answer's Markdown. The chat copies links and never opens them."""

    def __init__(self, text: str) -> None:
        super().__init__(text, parser_factory=parser, open_links=False)

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        return _BLOCKS.get(block_name) or super().get_block_class(block_name)
