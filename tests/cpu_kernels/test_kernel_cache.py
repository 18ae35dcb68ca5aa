"""The cache of compiled kernels: it saves time, and nothing that befalls its folder does more than cost time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpu_kernels.kernel_cache import CACHE_VARIABLE, SUFFIX
from tests.forking import Nursery, nursery

# Kernels that differ in what they close over alone, each compiled in a process of its own before one loads both. The
# inner function is too long to be inlined in two places.
FACTORS = f"""
import sys
import numpy as np
from cpu_kernels.kernel import Kernel, inner
from cpu_kernels.simd.vectors import put_i32
def times(factor):
    @inner
    def fill(out, value):
{"".join(f"        put_i32(out + {4 * i}, value * factor + {i} * (value + {i}))" + chr(10) for i in range(60))}
    def multiply(op, step, thread, threads):
        fill(op, step)
        fill(op + 240, step + 1)
    return Kernel(multiply, f"times_{{factor}}")
out = np.zeros(120, np.int32)
for factor in map(int, sys.argv[1:]):
    times(factor)(out.ctypes.data, 5, 0, 1)
    print(int(out[0]))
"""


def test_kernels_that_different_processes_compiled_do_not_mix(tmp_path: Path) -> None:
    script = tmp_path / "factors.py"
    script.write_text(FACTORS)
    environment = {
        **os.environ,
        CACHE_VARIABLE: str(tmp_path / "kernels"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    for factors, products in ((("2",), [10]), (("3",), [15]), (("2", "3"), [10, 15]), (("3", "2"), [15, 10])):
        command = [sys.executable, str(script), *factors]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert [int(line) for line in done.stdout.split()] == products


class Answer:
    """What a process of its own said."""

    def __init__(self, children: Nursery, cache: Path) -> None:
        child = children.start("import kernel_child; kernel_child.main()", variables={CACHE_VARIABLE: str(cache)})
        out, err = child.communicate()
        assert child.returncode == 0, err
        answer = json.loads(out)
        assert answer["result"] == 7
        self.cached = answer["cached"]
        self.has_compiler = answer["numba"]
        self.folder = Path(answer["folder"])
        self.warning = err.decode()


Start = Callable[[Path], Answer]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a process that uses a cache."""
    folder = tmp_path_factory.mktemp("children")
    with nursery(["kernel_child"], folder, [Path(__file__).parent]) as children:
        yield lambda cache: Answer(children, cache)


def test_a_second_process_loads_what_the_first_compiled(tmp_path: Path, start: Start) -> None:
    first, second = start(tmp_path), start(tmp_path)
    assert (first.cached, second.cached) == (False, True)
    # Importing the compiler takes longer than all else that a start does.
    assert (first.has_compiler, second.has_compiler) == (True, False)
    assert first.warning == second.warning == ""
    assert first.folder.parent == tmp_path
    if os.name == "posix":
        assert first.folder.stat().st_mode & 0o777 == 0o700


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def _overwrite(path: Path) -> None:
    path.write_bytes(b"not what was here" * 100)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [_empty, _cut, _overwrite])
def test_damaged_files_are_compiled_anew(tmp_path: Path, damage: Callable[[Path], None], start: Start) -> None:
    (file,) = start(tmp_path).folder.glob(f"*{SUFFIX}")
    damage(file)
    answer = start(tmp_path)
    assert not answer.cached
    assert "is damaged" in answer.warning
    # What was damaged does not stay.
    assert start(tmp_path).cached


def test_a_folder_that_cannot_be_made_costs_time_only(tmp_path: Path, start: Start) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("in the way")
    answer = start(obstacle / "kernels")
    assert not answer.cached
    assert "cannot be used" in answer.warning


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_folder_that_others_can_write_is_not_trusted(tmp_path: Path, start: Start) -> None:
    folder = start(tmp_path).folder
    folder.chmod(0o777)
    answer = start(tmp_path)
    assert not answer.cached
    assert "writable by others" in answer.warning


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, start: Start) -> None:
    os.chown(start(tmp_path).folder, 65534, 65534)
    answer = start(tmp_path)
    assert not answer.cached
    assert "writable by others" in answer.warning


def test_kernels_that_nobody_used_for_a_month_are_removed(tmp_path: Path, start: Start) -> None:
    old, recent = tmp_path / "old", tmp_path / "recent"
    for folder, days in ((old, 40), (recent, 20)):
        folder.mkdir()
        (folder / f"some{SUFFIX}").write_bytes(b"compiled")
        os.utime(folder, (time.time() - days * 86_400,) * 2)
    start(tmp_path)
    assert not old.exists()
    assert recent.exists()
