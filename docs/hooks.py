"""What mkdocs adds to the pages: tables made from the code, and pages that lie outside this folder.

The tables are also written into the pages here, so that they can be read without the site.
"""

import posixpath
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from localllm.cli.help import EXAMPLES
from localllm.cli.main import COMMANDS
from localllm.cli.reference import EXIT_CODES, commands, default, description, parameters, usage
from localllm.settings import BOUNDS, MEANINGS, Settings
from tui.commands.table import COMMANDS as SLASH_COMMANDS
from tui.main import COMMANDS as CHAT_COMMANDS
from tui.widgets.frame import key_names

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")]
OUTSIDE += sorted(ROOT.glob("benchmarks/log/*.md"))


def commands_markdown(table: dict[str, str]) -> str:
    """Every command with its arguments, options and examples."""
    parts, last = [], ""
    for panel, name, command, context in commands(table):
        parts += [f"## {panel}"] if panel != last else []
        parts += [f"### {name}", f"    {usage(command, context)}", *description(command)]
        if rows := [f"| `{_cell(one)}` | {_cell(text)} |" for one, text in parameters(command, context)]:
            parts.append("\n".join(["| | |", "|---|---|", *rows]))
        if examples := EXAMPLES.get(name.split()[-1]):
            parts.append("\n".join(f"    {line}" for line in examples))
        last = panel
    return "\n\n".join(parts) + "\n"


def exit_codes_markdown() -> str:
    lines = [f"| {int(code)} | {_cell(text)} |" for code, text in EXIT_CODES.items()]
    return "\n".join(["| exit code | meaning |", "|---|---|", *lines]) + "\n"


def settings_markdown() -> str:
    """A table of every setting: its default, its range and what it does."""
    lines = ["| setting | default | range | meaning |", "|---|---|---|---|"]
    for field in fields(Settings):
        meaning, bounds = MEANINGS[field.name], BOUNDS.get(field.name)
        more = f" ([more]({meaning.page}))" if meaning.page else ""
        within = f"{bounds.low:,} to {bounds.high:,}" if bounds else ""
        lines.append(f"| `{field.name}` | {_cell(default(field.name))} | {within} | {_cell(meaning.text)}{more} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def slash_commands() -> str:
    """The chat's commands, with their keys."""
    rows = []
    for command in SLASH_COMMANDS:
        name = f"/{command.name} {command.argument}".strip().replace("|", "\\|")
        keys = ", ".join(key_names(key) for key in command.key.split(",") if key)
        rows.append(f"| `{name}` | {keys} | {command.title} |")
    return "\n".join(["| command | key | |", "|---|---|---|", *rows])


GENERATED: dict[str, Callable[[], str]] = {
    "settings": settings_markdown,
    "commands": lambda: commands_markdown({**CHAT_COMMANDS, **COMMANDS}),
    "exit codes": exit_codes_markdown,
    "slash commands": slash_commands,
}


def on_pre_build(**_config: Any) -> None:
    """Renew the tables in the pages, between their marks."""
    for path in Path(__file__).parent.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        new = re.sub(
            r"(<!-- generated: ([a-z ]+) -->\n).*?(<!-- end -->)",
            lambda found: f"{found[1]}\n{GENERATED[found[2]]().strip()}\n\n{found[3]}",
            text,
            flags=re.DOTALL,
        )
        if new != text:
            path.write_text(new, encoding="utf-8")


def on_files(files: Any, config: Any) -> Any:
    for path in OUTSIDE:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    source = page.file.src_uri
    here = posixpath.dirname(source if ROOT / source in OUTSIDE else f"docs/{source}")
    outside = {path.relative_to(ROOT).as_posix() for path in OUTSIDE}

    def link(found: re.Match[str]) -> str:
        """A link between files of the repository as a link between pages."""
        target = posixpath.normpath(posixpath.join(here, found[1]))
        site = target if target in outside else target.removeprefix("docs/")
        return f"]({posixpath.relpath(site, posixpath.dirname(source))}{found[2] or ''})"

    return re.sub(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)", link, markdown)
