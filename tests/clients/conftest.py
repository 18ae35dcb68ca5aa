"""Server fixtures for programs that are not started by `localllm launch`; which programs are installed, and a table of
what each did.
"""

import json
import os
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.localllm.server.conftest import model_files, start_server

__all__ = ["model_files", "start_server"]

CLIENTS = Path(os.environ.get("TEST_CLIENTS", os.devnull))
COLUMNS = ("program", "version", "result", "tokens of prompts", "computed / new")
"""Of the table. A test records its row under these names."""

Installed = Callable[..., None]


@pytest.fixture
def installed(record_property: Callable[[str, object], None]) -> Installed:
    """Begin a test's row of the table for a program, by its command or library. Skips the test if it is missing."""

    def begin(name: str, more: str = "") -> None:
        record_property("program", f"{name}{more}")
        if (found := _version(name)) is None:
            pytest.skip(f"it is not in {CLIENTS}; `make test-clients` says why it could not be installed")
        record_property("version", found)

    return begin


def _version(name: str) -> str | None:
    """The version of the package that has a command, or is the library, of this name. None if it is not installed."""
    for folder in (CLIENTS / name).glob("lib/python*/site-packages"):
        for package in distributions(path=[str(folder)]):
            if name in (package.name, *(point.name for point in package.entry_points)):
                return package.version
    command = CLIENTS / "node_modules" / ".bin" / name
    for folder in command.resolve().parents if command.exists() else ():
        if (about := folder / "package.json").exists() and "version" in (known := json.loads(about.read_text())):
            return str(known["version"])
    return None


def _rows(reporter: pytest.TerminalReporter) -> Iterator[list[str]]:
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in reporter.getreports(outcome):
            row = dict(report.user_properties)
            if "program" in row:
                why = f"{outcome}: {report.longrepr[2].removeprefix('Skipped: ')}" if outcome == "skipped" else outcome
                yield [str({**row, "result": why}.get(column, "")) for column in COLUMNS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what each program did, and why some were skipped, as a table for the documentation."""
    if rows := list(_rows(terminalreporter)):
        terminalreporter.section("programs")
        for row in (COLUMNS, ["---"] * len(COLUMNS), *rows):
            terminalreporter.line(f"| {' | '.join(row)} |")
