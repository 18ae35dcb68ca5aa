"""The file picker after an at sign."""

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest

from localllm.files import with_slashes
from localllm.text import human_bytes
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, loaded, until
from tests.tui.conftest import MakeApp
from tui.widgets.completion import list_files, matching_paths, ranked, size_of

PATHS = ["src/engine/cache.py", "docs/cache.md", "tests/test_cache_of_pages.py", "src/charge/eraser.py", "README.md"]


@pytest.mark.parametrize(
    ("letters", "best"),
    [
        ("cache", ["docs/cache.md", "src/engine/cache.py", "tests/test_cache_of_pages.py"]),
        ("CACHE.P", ["src/engine/cache.py"]),
        ("charge", ["src/charge/eraser.py"]),
        ("dcm", ["docs/cache.md"]),
        ("zzz", []),
    ],
)
def test_files_are_ranked_by_where_the_letters_are(letters: str, best: list[str]) -> None:
    assert [choice.path for choice in ranked(PATHS, letters, 8)][: len(best)] == best
    for choice in ranked(PATHS, letters, 8):
        assert "".join(choice.path[place] for place in choice.letters).lower() == letters.lower()


@pytest.mark.parametrize(("begun", "found"), [("folder\\", ["b.gguf", "of/"]), ("folder\\of\\", ["a.gguf"])])
def test_paths_with_backslashes_are_completed_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str, found: list[str]
) -> None:
    (tmp_path / "folder/of").mkdir(parents=True)
    for name in ("folder/of/a.gguf", "folder/b.gguf"):
        (tmp_path / name).touch()
    monkeypatch.setattr(os, "sep", "\\")
    prefix = f"{tmp_path.as_posix()}/{begun}".replace("\\", "/")
    assert sorted(matching_paths(f"{tmp_path}\\{begun}", 9)) == [f"{prefix}{name}" for name in found]


def test_paths_of_a_drive_are_those_of_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C: alone is a drive's current folder on Windows."""
    monkeypatch.chdir(tmp_path)
    root = with_slashes(tmp_path.anchor)
    found = {f"{root}{path.name}" for path in Path(root).iterdir() if not path.name.startswith(".")}
    assert {path.rstrip("/") for path in matching_paths(root, 1000)} == found


@pytest.mark.skipif(sys.platform != "win32", reason="names differ by case here")
def test_names_in_another_case_are_completed(tmp_path: Path) -> None:
    (tmp_path / "My Models").mkdir()
    assert matching_paths(f"{tmp_path}\\my", 9) == [f"{with_slashes(str(tmp_path))}/My Models/"]


def test_letters_that_fit_in_very_many_ways_are_found_in_one() -> None:
    """Trying all alignments would never end."""
    path = "ab" * 200 + "/c"
    assert [choice.path for choice in ranked([path], "abbabaabbabac", 8)] == [path]


def test_sizes_are_tokens_where_they_can_be_counted(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("three short words", encoding="utf-8")
    (tmp_path / "data.bin").write_bytes(b"\xff\x00\xfe" * 1000)
    (tmp_path / "large.txt").write_text("word " * 100_000, encoding="utf-8")

    def count(text: str) -> int:
        return len(text.split())

    assert size_of(str(tmp_path / "text.txt"), count) == "3 tokens"
    assert size_of(str(tmp_path / "text.txt"), lambda _text: None) == "17 B"
    assert size_of(str(tmp_path / "data.bin"), count) == human_bytes(3000)
    assert size_of(str(tmp_path / "large.txt"), count) == human_bytes(500_000)
    assert size_of(str(tmp_path / "nothing"), count) == ""
    assert size_of(str(tmp_path), count) == ""


def test_a_file_is_picked_by_letters_of_its_path_and_sent(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("src/engine/page_cache.py", "src/engine/other.py", ".git/page_cache", "node_modules/page_cache.js"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one two three four", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "project")
    assert list_files() == ["src/engine/other.py", "src/engine/page_cache.py"]
    backend = FakeBackend([said("Yes."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            completion = chat.prompt.completion
            await pilot.press(*"see @pgc")
            await until(pilot, lambda: completion.option_count == 1)
            await until(pilot, lambda: "4 tokens" in str(completion.get_option_at_index(0).prompt))
            await pilot.press("tab")
            await until(pilot, lambda: chat.prompt.text == "see @src/engine/page_cache.py")
            await until(pilot, lambda: not completion.display)
            await ask(pilot, "")

    asyncio.run(flow())
    assert "one two three four" in backend.requests[0].messages[0]["content"]


def test_a_list_of_files_that_comes_late_completes_what_is_typed_by_then(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed = threading.Event()

    def list_late() -> list[str]:
        assert listed.wait(60)
        return ["src/page_cache.py"]

    monkeypatch.setattr("tui.widgets.completion.list_files", list_late)

    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            await pilot.press(*"see @cache")
            await until(pilot, lambda: chat.prompt.text == "see @cache")
            listed.set()
            await until(pilot, lambda: chat.prompt.completion.is_open)
            await pilot.press("tab")
            await until(pilot, lambda: chat.prompt.text == "see @src/page_cache.py")

    asyncio.run(flow())


def test_sizes_that_come_late_are_not_shown_beside_commands(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("one two", encoding="utf-8")
    asked, counted = threading.Event(), threading.Event()

    def size_late(_path: str, _count: object) -> str:
        asked.set()
        assert counted.wait(60)
        return "2 tokens"

    monkeypatch.setattr("tui.widgets.completion.size_of", size_late)

    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            completion = chat.prompt.completion
            await pilot.press(*"@no")
            await until(pilot, asked.is_set)
            chat.prompt.put("/")
            await until(pilot, lambda: completion.option_count > 5)
            counted.set()
            await pilot.pause(0.2)
            assert str(completion.get_option_at_index(0).prompt).startswith("/help")

    asyncio.run(flow())
