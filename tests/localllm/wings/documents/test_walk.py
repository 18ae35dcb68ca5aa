"""Which files of a folder are found: files ignored by Git's rules are left out, compared with Git itself."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from localllm.walk import found_files
from tests.systems import needs_named_pipes

RULES = (
    "*.log",
    "!keep.log",
    "build/",
    "/top.md",
    "docs/*.md",
    "!docs/a.md",
    "**/deep",
    "a?.txt",
    "[ab].md",
    "# no",
    "!b",
)
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def make(root: Path, *names: str, **rules: str) -> None:
    """Files, and the .gitignore of folders; "" is `root`."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    for folder, text in rules.items():
        (root / folder.strip("_") / ".gitignore").write_text(text)


def names(root: Path) -> list[str]:
    return [file.name for file in found_files(root)]


def by_git(root: Path) -> list[str]:
    """The files that Git would include, without hidden ones."""
    run = [
        *["git", "-c", "core.excludesFile=/dev/null", "-C"],
        str(root),
        *["ls-files", "-z", "--others", "--exclude-standard"],
    ]
    found = subprocess.run(run, capture_output=True, check=True, text=True).stdout.split("\0")
    return sorted(name for name in found if name and not any(part.startswith(".") for part in name.split("/")))


def test_nested_rules_and_negations(tmp_path: Path) -> None:
    make(
        tmp_path,
        *("a.md", "run.log", "keep.log", "build/out.md", "sub/run.log", "sub/own.md", "sub/x/own.md", "sub/x/y.md"),
        _="*.log\n!keep.log\nbuild/\n",
        sub="own.md\n!run.log\n",
    )
    assert names(tmp_path) == ["a.md", "keep.log", "sub/run.log", "sub/x/y.md"]


def test_rules_of_the_repository_above_count_up_to_its_root(tmp_path: Path) -> None:
    make(
        tmp_path,
        "repository/sub/a.md",
        "repository/sub/b.log",
        "repository/sub/c.txt",
        _="*.txt\n",
        repository="*.log\n",
    )
    (tmp_path / "repository" / ".git").mkdir()
    assert names(tmp_path / "repository" / "sub") == ["a.md", "c.txt"]


def test_an_ignored_folder_that_is_asked_for_by_name_is_read(tmp_path: Path) -> None:
    make(tmp_path, "build/docs/a.md", "build/docs/b.log", _="build/\n")
    (tmp_path / ".git").mkdir()
    assert names(tmp_path) == []
    assert names(tmp_path / "build" / "docs") == ["a.md", "b.log"]


@needs_named_pipes
def test_hostile_and_broken_rules_do_no_harm(tmp_path: Path) -> None:
    make(tmp_path, "a" * 250, "b.log", _="*a*a*a*a*a*a*a*b\nwrong\\\n*.log\n")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / ".gitignore")
    make(tmp_path, "pipe/c.md")
    assert names(tmp_path) == ["a" * 250, "pipe/c.md"]


@needs_git
@pytest.mark.parametrize("seed", range(8))
def test_it_is_as_git_has_it(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, capture_output=True)
    parts = ["docs", "build", "deep", "b", "sub"]
    files = ["a.md", "b.md", "top.md", "run.log", "keep.log", "a1.txt", "deep", "b"]
    for _ in range(40):
        path = tmp_path.joinpath(*drawn.choices(parts, k=drawn.randrange(4)), drawn.choice(files))
        if not path.exists() and not any(parent.is_file() for parent in path.parents):
            make(tmp_path, str(path.relative_to(tmp_path)))
    for folder in [
        tmp_path,
        *(path for path in sorted(tmp_path.rglob("*")) if path.is_dir() and ".git" not in path.parts),
    ]:
        if folder == tmp_path or drawn.random() < 0.3:
            (folder / ".gitignore").write_text("\n".join(drawn.sample(RULES, 5)))
    assert sorted(names(tmp_path)) == by_git(tmp_path)
