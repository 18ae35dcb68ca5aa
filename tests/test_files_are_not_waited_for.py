"""Pipes in place of files are not waited for, and folders of ours are private; the code has one place for each."""

import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gguf_io import open_model
from gguf_io.system import NotRegularError, make_folder, read_file
from localllm.actions.approvals import Approvals
from localllm.actions.folder import Folder
from localllm.chats.database import connect, in_memory
from localllm.engine.file_digest import _read as digests
from localllm.errors import LocalLLMError
from localllm.files import read_text, walked
from localllm.library.manifest import read_bounded
from localllm.library.partial import read_note
from localllm.settings import load_settings
from localllm.walk import found_files
from localllm.wings.tools.mcp_servers import read_servers
from localllm.wings.tools.reading import reading_tools
from tests.forking import PROGRAM, Nursery
from tests.systems import needs_named_pipes
from tui.attachments import attachments_at
from tui.widgets.completion import size_of

ROOT = Path(__file__).parent.parent
PACKAGES = ("localllm", "gguf_io", "cpu_kernels", "gpu_offload", "tui", "models")

pytestmark = [pytest.mark.timeout(120), needs_named_pipes]

READERS: dict[str, Callable[[Path], object]] = {
    "any file of ours": read_file,
    "a layer": lambda path: read_bounded(path, 100, ""),
    "a note of a pull": read_note,
    "digests": digests,
    "settings": lambda path: load_settings({}, {}, path),
    "a file that a person wrote": read_text,
    "MCP servers": read_servers,
    "approvals": lambda path: Approvals(path.parent, path),
    "a model": open_model,
    "chats": connect,
    "damaged chats": lambda path: in_memory(path).close(),
    "an attachment": lambda path: attachments_at("pipe", path),
    "a completion": lambda path: size_of(str(path), len),
}


@pytest.mark.parametrize("name", READERS)
def test_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    try:
        READERS[name](pipe)
    except (LocalLLMError, OSError) as error:
        assert "regular" in str(error)


def test_devices_and_folders_are_not_files(tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises((NotRegularError, IsADirectoryError)):
            read_file(path)


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ("config/localllm/config.toml", ["list"]),
        ("data/localllm/speeds.json", ["plan", "builtin"]),
        ("data/localllm/speeds.json", ["list"]),
        ("cache/localllm/kv/digests.json", ["cache"]),
        ("data/localllm/sessions.db", ["ask", "--index", "."]),
        ("data/localllm/agents/claude/warm.json", ["launch", "claude", "--print"]),
    ],
)
def test_commands_do_not_wait_for_pipes(place: str, arguments: list[str], tmp_path: Path, children: Nursery) -> None:
    pipe = tmp_path / place
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    folders = {f"XDG_{kind.upper()}_HOME": str(tmp_path / kind) for kind in ("config", "data", "cache")}
    variables = {**os.environ, **folders, "HOME": str(tmp_path)}
    process = children.start(PROGRAM, arguments, variables, tmp_path)
    process.wait()
    assert "Traceback" not in process.err.read_text() and "bug in localllm" not in process.err.read_text()


# Files of the product itself, of installed packages, of the system, and pipes that users name (`read_text`).
OTHER_READERS = {
    "cpu_kernels/cores.py", "cpu_kernels/kernel.py", "cpu_kernels/kernel_cache.py", "cpu_kernels/limits.py",
    "gguf_io/chat_template/defaults/__init__.py", "localllm/wings/lab/energy.py", "localllm/files.py",
    "localllm/front/prompt.py", "localllm/front/local_server.py", "localllm/packed.py",
    "localllm/wings/lab/quality/quantize.py", "localllm/gpu_install.py",
}  # fmt: skip
READING = re.compile(r"\.read_text\(|\.read_bytes\(\)|\.open\((?:\"r|encoding)|os\.walk\(")


def test_the_code_opens_files_in_one_place() -> None:
    """gguf_io.system opens files without waiting; files.walked lists folders without recursion."""
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            name = file.relative_to(ROOT).as_posix()
            if name not in OTHER_READERS and "/training/" not in name:
                found = [line for line in file.read_text().splitlines() if READING.search(line)]
                assert not found, f"{name}: {found}"


# The journal's folders, and those of installed packages, have the modes of what is around them.
OTHER_MAKERS = {"gguf_io/system.py", "localllm/wings/tools/journal.py", "localllm/gpu_install.py"}
MAKING = re.compile(r"\.mkdir\(|makedirs\(|os\.mkdir\(")


def test_the_code_makes_private_folders_in_one_place() -> None:
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            name = file.relative_to(ROOT).as_posix()
            if "/training/" not in name and name not in OTHER_MAKERS:
                assert not MAKING.search(file.read_text()), name


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b" / "c")
        make_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "a", *(tmp_path / "a").rglob("*")]]
    assert modes == [0o700] * 3
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """1,100 nested folders with a file in the last; pytest cannot remove so many."""
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        for _ in range(1100):
            os.mkdir("d")
            os.chdir("d")
        Path("last.txt").write_text("needle", encoding="utf-8")
    finally:
        os.chdir(here)
    yield tmp_path
    for parent, folders, files in reversed([*walked(tmp_path)]):
        for name in files:
            os.unlink(os.path.join(parent, name))
        for name in folders:
            os.rmdir(os.path.join(parent, name))


def test_nested_folders_are_walked(deep: Path) -> None:
    assert [file.name.count("/") for file in found_files(deep)] == [1100]
    assert sum(len(files) for *_, files in walked(deep)) == 1
    listing, searching = (
        next(tool for tool in reading_tools(Folder(deep)) if tool.name == name)
        for name in ("list_files", "search_files")
    )
    assert listing.plan({}).result(threading.Event()).endswith("last.txt")
    assert "needle" in searching.plan({"text": "NEEDLE"}).result(threading.Event())


def test_walking_leaves_out_what_the_caller_removes_and_follows_no_link(tmp_path: Path) -> None:
    for name in ("a/x", "b/y", "c"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    seen = []
    for parent, folders, files in walked(tmp_path):
        folders[:] = sorted(name for name in folders if name != "b")
        seen.append((os.path.relpath(parent, tmp_path), [*folders], files))
    assert seen == [(".", ["a", "c", "loop"], ["self"]), ("a", ["x"], []), ("a/x", [], []), ("c", [], [])]
