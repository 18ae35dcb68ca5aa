"""Finds the files of a folder that may contain text."""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from gguf_io.system import read_file
from localllm.files import walked

MAX_FILES = 100_000
_MAX_RULES_BYTES = 2**16  # of a .gitignore
_MAX_STARS = 3  # in one of its patterns: each multiplies the matching time by the length of the name
# Folders of dependencies and of generated files, by the names that tools give them.
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "venv"})
# Formats without text, which need not be opened.
_NO_TEXT = re.compile(
    r"\.(7z|a|avi|bin|bmp|bz2|class|db|deb|dll|dylib|eot|exe|flac|gguf|gif|gz|ico|iso|jar|jpe?g|m4a|mkv|mov|mp[34]|npy|npz"
    r"|o|og[gv]|onnx|otf|parquet|pickle|pkl|png|pt|pyc|rar|rpm|safetensors|so|sqlite|tar|tgz|tiff?|ttf|wasm|wav|web[mp]"
    r"|whl|woff2?|xz|zip|zst)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A regular file. name: its path in the folder, with slashes. mtime: in nanoseconds."""

    name: str
    path: Path
    size: int
    mtime: int


def found_files(root: Path) -> Iterator[FoundFile]:
    """The files below a folder in a fixed order, at most MAX_FILES + 1.

    Left out: hidden files and folders, symbolic links, _SKIPPED folders, formats without text, names that are not
    UTF-8, and files that Git ignores: by .gitignore in the folder, and above it up to the root of its repository. Files
    that vanish meanwhile are left out too.
    """
    count = 0
    rules = {os.fspath(root): _rules_above(Path(os.path.abspath(root)))}  # of the folders not yet visited
    for parent, folders, files in walked(root):
        base = _prefix(Path(os.path.abspath(parent)))
        here = _with_rules(base, rules.pop(parent))
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _SKIPPED and not _is_ignored(f"{base}{name}/", here)
        )
        rules |= {os.path.join(parent, name): here for name in folders}
        for name in sorted(files):
            path = Path(parent, name)
            if name.startswith(".") or _NO_TEXT.fullmatch(path.suffix) or not _is_utf8(str(path)):
                continue
            if _is_ignored(base + name, here):
                continue
            try:
                status = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield FoundFile(path.relative_to(root).as_posix(), path, status.st_size, status.st_mtime_ns)
                count += 1
                if count > MAX_FILES:
                    return


# The rules of .gitignore files, the outermost first, each with its folder (https://git-scm.com/docs/gitignore).
_Rules = tuple[tuple[str, GitIgnoreSpec], ...]


def _rules_above(root: Path) -> _Rules:
    """The rules of the repository that a folder is in; none if they ignore that folder, since the user requested it."""
    repository = next((folder for folder in (root, *root.parents) if os.path.exists(folder / ".git")), root)
    rules: _Rules = ()
    for folder in reversed(root.parents):
        if folder.is_relative_to(repository):
            rules = _with_rules(_prefix(folder), rules)
    return () if _is_ignored(_prefix(root), rules) else rules


def _prefix(folder: Path) -> str:
    """The prefix of the paths in an absolute folder."""
    return f"{folder.as_posix().rstrip('/')}/"


def _with_rules(prefix: str, outer: _Rules) -> _Rules:
    """The rules in the folder of a prefix: the outer ones, then those of its .gitignore.

    Patterns that Git would reject, or with which a hostile file could keep matching for hours, are skipped.
    """
    path = Path(f"{prefix}.gitignore")
    try:
        if not os.path.isfile(path):  # missing, or a pipe, for example
            return outer
        lines = read_file(path, _MAX_RULES_BYTES).decode("utf-8-sig", errors="surrogateescape").splitlines()
    except OSError:
        return outer
    patterns = []
    for line in lines:
        with contextlib.suppress(ValueError):
            if len(re.findall(r"\*+", line)) <= _MAX_STARS:
                patterns.append(GitIgnoreSpecPattern(line))
    return (*outer, (prefix, GitIgnoreSpec(patterns)))


def _is_ignored(path: str, rules: _Rules) -> bool:
    """Whether the rules ignore an absolute path, which ends with a slash for a folder. The innermost rules decide."""
    for folder, patterns in reversed(rules):
        verdict = patterns.check_file(path.removeprefix(folder)).include
        if verdict is not None:
            return verdict
    return False


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
