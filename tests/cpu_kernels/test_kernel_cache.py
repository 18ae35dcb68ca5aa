"""The cache of compiled kernels: it saves time, damage only costs time, and nothing else is removed."""

import ast
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpu_kernels import kernel_cache
from cpu_kernels.isa import ISA_VARIABLE
from cpu_kernels.kernel_cache import CACHE_VARIABLE, SUFFIX, CachedKernel, read_kernel, write_kernel
from gguf_io.system import OpenFolder
from tests.forking import Nursery, nursery
from tests.kernels import declared_kernels

# Kernels that differ only in their closures, each compiled in its own process before one process loads both. The inner
# function is too long to be inlined twice.
FACTORS = f"""
import sys
from functools import partial
import numpy as np
from cpu_kernels.declarations import inner
from cpu_kernels.kernel import Kernel
from cpu_kernels.simd.vectors import put_i32
def times(factor):
    @inner
    def fill(out, value):
{"".join(f"        put_i32(out + {4 * i}, value * factor + {i} * (value + {i}))" + chr(10) for i in range(60))}
    def multiply(op, step, thread, threads):
        fill(op, step)
        fill(op + 240, step + 1)
    return multiply
kernels = {{factor: Kernel(f"times_{{factor}}", __name__, partial(times, factor)) for factor in (2, 3)}}
def main():
    out = np.zeros(120, np.int32)
    for factor in map(int, sys.argv[1:]):
        kernels[factor](out.ctypes.data, 5, 0, 1)
        print(int(out[0]))
"""


def test_kernels_that_different_processes_compiled_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "factors.py").write_text(FACTORS)
    environment = {
        **os.environ,
        CACHE_VARIABLE: str(tmp_path / "kernels"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]),
    }
    for factors, products in ((("2",), [10]), (("3",), [15]), (("2", "3"), [10, 15]), (("3", "2"), [15, 10])):
        command = [sys.executable, "-c", "import factors; factors.main()", *factors]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert [int(line) for line in done.stdout.split()] == products


class Answer:
    """The report of a child process."""

    def __init__(self, children: Nursery, cache: Path, variables: dict[str, str], function: str = "main") -> None:
        environment = {**os.environ, CACHE_VARIABLE: str(cache), **variables}
        child = children.start(f"import kernel_child; kernel_child.{function}()", variables=environment)
        out, err = child.communicate()
        assert child.returncode == 0, err
        answer = json.loads(out)
        assert answer["result"] == 7
        self.cached = answer["cached"]
        self.has_compiler = answer["numba"]
        self.portable = answer["portable"]
        self.folder = Path(answer["folder"])
        self.warning = err.decode()


Start = Callable[..., Answer]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a process that uses a cache."""
    folder = tmp_path_factory.mktemp("children")
    with nursery(["kernel_child"], folder, [Path(__file__).parent]) as children:
        yield lambda cache, function="main", **variables: Answer(children, cache, variables, function)


def test_a_second_process_loads_what_the_first_compiled(tmp_path: Path, start: Start) -> None:
    first, second = start(tmp_path), start(tmp_path)
    assert (first.cached, second.cached) == (False, True)
    assert not first.has_compiler, "only children compile"
    assert first.warning == second.warning == ""
    assert first.folder.parent == tmp_path / "localllm-kernels"
    if os.name == "posix":
        assert first.folder.stat().st_mode & 0o777 == 0o700


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def _overwrite(path: Path) -> None:
    path.write_bytes(b"not what was here" * 100)


def _link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said"),
    [(_empty, "is damaged"), (_cut, "is damaged"), (_overwrite, "is damaged"), (_link, "cannot be read")],
)
def test_damaged_files_are_compiled_anew(
    tmp_path: Path, damage: Callable[[Path], None], said: str, start: Start
) -> None:
    (file,) = start(tmp_path).folder.glob(f"*{SUFFIX}")
    damage(file)
    answer = start(tmp_path)
    assert not answer.cached
    assert said in answer.warning
    # Damaged files are replaced.
    assert start(tmp_path).cached


Damage = Callable[[Path, Path, bytes], object]
"""Damages the first path. The second one is another kernel's file; then the content that was there."""


def _instead(make: Callable[[Path], object]) -> Damage:
    def damage(path: Path, _other: Path, _data: bytes) -> None:
        path.unlink()
        make(path)

    return damage


def _flipped(at: float) -> Damage:
    def damage(path: Path, _other: Path, data: bytes) -> None:
        place = int(at * (len(data) - 1))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])

    return damage


def _of_another_version(path: Path, _other: Path, data: bytes) -> None:
    """A whole file as another version wrote it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel_cache, "_fingerprint", lambda _: "0" * 24)
        write_kernel("", "one", CachedKernel(data[32:]))
        (kernel_cache.cache_directory() / path.name).rename(path)


def _filled_folder(path: Path) -> None:
    path.mkdir()
    (path / "a").touch()


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


DAMAGES: dict[str, Damage] = {
    **{
        f"cut to {size} bytes": lambda path, _, data, size=size: path.write_bytes(data[:size])
        for size in (0, 1, 31, 32, 33)
    },
    **{
        f"cut by {size} bytes": lambda path, _, data, size=size: path.write_bytes(data[:-size])
        for size in (1, 100, 900)
    },
    **{f"a bit at {at:.0%}": _flipped(at) for at in (0, 0.01, 0.02, 0.3, 0.5, 0.7, 0.99, 1)},
    "zeros": lambda path, _, data: path.write_bytes(bytes(len(data))),
    "longer": lambda path, _, data: path.write_bytes(data + b"\0"),
    "twice": lambda path, _, data: path.write_bytes(data * 2),
    "without its digest": lambda path, _, data: path.write_bytes(data[32:]),
    "the other kernel": lambda path, other, _: path.write_bytes(other.read_bytes()),
    "both exchanged": lambda path, other, data: (path.write_bytes(other.read_bytes()), other.write_bytes(data)),
    "its portable build": lambda path, _, __: path.rename(path.with_name("one.portable.kernel")),
    "another version": _of_another_version,
    "a folder": _instead(Path.mkdir),
    "a folder with a file": _instead(_filled_folder),
    "a FIFO": _instead(os.mkfifo if hasattr(os, "mkfifo") else Path.mkdir),
    "a hole of 1 TiB": _instead(_hole),
    "a link to itself": _instead(lambda path: path.symlink_to(path)),
    "a link to a device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a link to the other kernel": lambda path, other, _: (path.unlink(), path.symlink_to(other)),
    "a link to nothing": _instead(lambda path: path.symlink_to("nothing")),
    "a file that all may write": lambda path, _, data: (path.write_bytes(data[:-1]), path.chmod(0o666)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_no_damage_gives_another_kernel_or_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged file is named and counts as missing, and a new one replaces it unless that cannot be."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    kernels = {"one": CachedKernel(b"one" * 700), "two": CachedKernel(b"two" * 700)}
    for each, kernel in kernels.items():
        write_kernel("", each, kernel)
    path, other = (kernel_cache.cache_directory() / f"{each}{SUFFIX}" for each in kernels)
    DAMAGES[name](path, other, path.read_bytes())
    assert read_kernel("", "one") is None
    assert read_kernel("", "two") in (kernels["two"], None)
    assert "one" in caplog.text and "it is compiled again" in caplog.text
    caplog.clear()
    write_kernel("", "one", kernels["one"])
    if path.is_dir():
        assert "cannot be kept" in caplog.text and read_kernel("", "one") is None
    else:
        assert (read_kernel("", "one"), path.is_symlink()) == (kernels["one"], False)
    assert not list(path.parent.glob("*.unfinished"))


def test_a_folder_that_cannot_be_made_costs_time_only(tmp_path: Path, start: Start) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("in the way")
    answer = start(obstacle / "kernels")
    assert not answer.cached
    assert "cannot be used" in answer.warning


def test_a_folder_that_can_only_be_read_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    kernel = CachedKernel(b"one")
    write_kernel("", "one", kernel)
    kernel_cache._opened.cache_clear()
    for changes in ("touch", "create"):
        monkeypatch.setattr(OpenFolder, changes, refuse)
    assert read_kernel("", "one") == kernel and not caplog.records
    for name in ("two", "three"):
        write_kernel("", name, kernel)
    assert len(caplog.records) == 1 and "files cannot be kept (Read-only file system)" in caplog.text


def test_a_folder_that_others_can_write_is_not_trusted(tmp_path: Path, start: Start) -> None:
    folder = start(tmp_path).folder
    folder.chmod(0o777)
    answer = start(tmp_path)
    assert not answer.cached
    assert "writable by others" in answer.warning


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, start: Start) -> None:
    os.chown(start(tmp_path).folder, 65534, 65534)
    answer = start(tmp_path)
    assert not answer.cached
    assert "writable by others" in answer.warning


def test_a_folder_that_leads_elsewhere_is_not_followed(tmp_path: Path, start: Start) -> None:
    folder = start(tmp_path).folder
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    answer = start(tmp_path)
    assert not answer.cached
    assert "cannot be used" in answer.warning


def test_what_was_opened_is_used_whatever_takes_its_place(tmp_path: Path, start: Start) -> None:
    """In a parent folder that others may write, they could replace the folder between two uses."""
    folder = start(tmp_path).folder
    answer = start(tmp_path, "exchange_folder_and_load")
    assert answer.cached
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "variables",
    [
        {"NUMBA_CPU_NAME": "znver3"},
        {"NUMBA_OPT": "1"},
        {"NUMBA_LOOP_VECTORIZE": "0"},
    ],
    ids=str,
)
def test_whatever_changes_code_gets_a_separate_folder(tmp_path: Path, variables: dict[str, str], start: Start) -> None:
    usual = start(tmp_path).folder
    answer = start(tmp_path, "folder_alone", **variables)
    assert answer.folder.parent == usual.parent
    assert answer.folder != usual


PACKAGE = Path(kernel_cache.__file__).parent
MODULES = {
    ".".join(("cpu_kernels", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def declaring() -> list[str]:
    """The modules of cpu_kernels that declare kernels."""
    return sorted({kernel.module for kernel in declared_kernels()})


def imported(module: str) -> set[str]:
    """The modules of cpu_kernels that a module imports, itself or through others."""
    found, waiting = set[str](), {module}
    while waiting:
        name = waiting.pop()
        found.add(name)
        named = {name.rpartition(".")[0]}
        for node in ast.walk(ast.parse(MODULES[name].read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None and node.level == 0
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
        waiting |= named & MODULES.keys() - found
    return found


def folder_names() -> dict[str, str]:
    """The names of the folders of modules with kernels, here and elsewhere, as a new process would choose them."""
    kernel_cache._sources.cache_clear()
    kernel_cache._fingerprint.cache_clear()
    return {module: kernel_cache.cache_directory(module).name for module in (*declaring(), "elsewhere")}


@pytest.fixture
def copied_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of cpu_kernels whose sources name the folders."""
    copy = tmp_path / "cpu_kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernel_cache, "__file__", str(copy / "kernel_cache.py"))
    yield copy
    monkeypatch.undo()
    folder_names()


def test_an_edit_renames_the_folders_of_all_that_import_the_module_and_no_others(copied_package: Path) -> None:
    before, compiler = folder_names(), imported("cpu_kernels.compile_child")
    needed = {module: imported(module) | compiler for module in declaring()} | {"elsewhere": set(MODULES)}
    assert folder_names() == before
    renamed = {}
    for module, path in MODULES.items():
        copy = copied_package / path.relative_to(PACKAGE)
        source = copy.read_bytes()
        copy.write_bytes(source + b"# another version\n")
        renamed[module] = {each for each, name in folder_names().items() if name != before[each]}
        copy.write_bytes(source)
        assert renamed[module] == {each for each in needed if module in needed[each]}, module
    # attention imports attention_q4_0, which imports attention_blocks.
    of_blocks = renamed["cpu_kernels.attention_blocks"]
    assert "cpu_kernels.attention" in of_blocks and "cpu_kernels.sums" not in of_blocks
    assert renamed["cpu_kernels.compiler"] == set(before)
    assert "cpu_kernels.formats.k_quants" not in renamed["cpu_kernels.choosing"]


MAKING = """
import json, sys
from importlib import import_module
import_module(sys.argv[1])
from cpu_kernels.kernel import _declared
for kernel in _declared.values():
    kernel.make()
json.dump([name for name in sys.modules if name.startswith("cpu_kernels")], sys.stdout)
"""


def test_making_a_module_s_kernels_uses_no_module_that_it_does_not_import(tmp_path: Path) -> None:
    with nursery(["json", "llvmlite.binding", "numpy.typing", "platformdirs", "gguf_io.system"], tmp_path) as children:
        started = {module: children.start(MAKING, [module]) for module in declaring()}
        assert len(started) > 20
        for module, child in started.items():
            out, err = child.communicate()
            assert child.returncode == 0, err
            assert set(json.loads(out)) <= imported(module) | imported("cpu_kernels.kernel"), module


def test_a_forced_instruction_set_gets_a_separate_folder() -> None:
    code = "from cpu_kernels.kernel_cache import cache_directory; print(cache_directory())"
    command, folders = [sys.executable, "-c", code], set()
    for forced in ("", "portable"):
        environment = {**os.environ, ISA_VARIABLE: forced}
        folders.add(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len(folders) == 2


def _age(path: Path, days: int) -> None:
    os.utime(path, (time.time() - days * 86_400,) * 2, follow_symlinks=False)


def _remove_kernels(folder: Path) -> None:
    """So that the next process compiles and writes some."""
    for path in folder.glob(f"*{SUFFIX}"):
        path.unlink()


def test_kernels_unused_for_a_month_are_removed_when_others_are_written(tmp_path: Path, start: Start) -> None:
    current = start(tmp_path).folder
    root = current.parent
    old, recent = root / ("0" * 24), root / ("1" * 24)
    for folder, days in ((old, 40), (recent, 20)):
        folder.mkdir()
        (folder / f"some{SUFFIX}").write_bytes(b"compiled")
        (folder / "0123456789abcdef.unfinished").write_bytes(b"comp")
        _age(folder, days)
    _age(current, 40)
    assert start(tmp_path).cached
    assert old.exists()
    assert current.stat().st_mtime > time.time() - 86_400, "it was used"
    _remove_kernels(current)
    assert not start(tmp_path).cached
    assert not old.exists()
    assert recent.exists()


def test_two_processes_may_remove_the_same_folder(tmp_path: Path, start: Start) -> None:
    folder = start(tmp_path).folder
    old = folder.with_name("0" * 24)
    old.mkdir()
    (old / f"some{SUFFIX}").write_bytes(b"compiled")
    _age(old, 40)
    _remove_kernels(folder)
    answer = start(tmp_path, "another_process_removes")
    assert not list(old.iterdir())
    assert not answer.cached and answer.warning == ""


def test_nothing_but_kernels_is_ever_removed(tmp_path: Path, start: Start) -> None:
    """In the folder that the variable names, and in our own: old folders, files and links of all kinds."""
    current = start(tmp_path).folder
    root, elsewhere = current.parent, tmp_path / "documents"
    for parent in (tmp_path, root):
        for name in ("photos", "2" * 24, "3" * 24, "4" * 24, "ABCDEF" * 4, "5" * 23):
            (parent / name).mkdir()
        (parent / "photos" / f"holiday{SUFFIX}").write_text("a picture")
        (parent / ("2" * 24) / "letter.txt").write_text("dear")
        (parent / ("3" * 24) / f"sub{SUFFIX}").mkdir()
        (parent / ("4" * 24) / f"link{SUFFIX}").symlink_to(tmp_path / "documents")
        (parent / ("ABCDEF" * 4) / f"some{SUFFIX}").write_text("upper case")
        (parent / ("6" * 24)).write_text("a file")
        (parent / ("7" * 24)).symlink_to(elsewhere, target_is_directory=True)
    elsewhere.mkdir()
    (elsewhere / f"ours{SUFFIX}").write_text("behind a link")
    before = sorted(tmp_path.rglob("*"))
    for path in before:
        _age(path, 400)
    _age(elsewhere, 400)
    _remove_kernels(current)
    assert not start(tmp_path).cached
    assert sorted(tmp_path.rglob("*")) == before
    assert (elsewhere / f"ours{SUFFIX}").read_text() == "behind a link"


def test_a_build_that_computes_something_else_is_replaced_by_a_portable_one(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path, "liar")
    assert not first.cached
    assert "its results are wrong" in first.warning
    assert first.portable == ["kernel_child.liar"]
    second = start(tmp_path, "liar")
    assert second.cached
    assert "portable" in second.warning


def test_where_no_build_is_right_the_kernel_is_refused(tmp_path: Path, start: Start) -> None:
    answer = start(tmp_path, "always_wrong")
    assert "no build of the kernel kernel_child.always_wrong" in answer.warning
    assert not list(answer.folder.glob(f"*{SUFFIX}"))


def test_code_that_calls_what_kernels_may_not_is_refused(tmp_path: Path, start: Start) -> None:
    answer = start(tmp_path, "calls_out")
    assert "it calls clock" in answer.warning
    assert not list(answer.folder.glob(f"*{SUFFIX}"))
