"""Kernels that are not in the cache are compiled by child processes only."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = """
import json, logging, sys
import psutil
import cpu_kernels.compile_children as children
from cpu_kernels import sums
from cpu_kernels.kernel import Kernel, compile_all

logging.basicConfig()
kernels = [each for each in vars(sums).values() if isinstance(each, Kernel)]
asked = []
children.usable_cores = lambda: 2
{patch}
error = ""
cached = [each.name for each in kernels if each.load()]
try:
    compile_all(kernels, lambda *counts: asked.append(counts))
except (InterruptedError, children.KernelError) as found:
    error = str(found)
idle = len(psutil.Process().children())
children.POOL.end_idle()
print(json.dumps(dict(all=[k.name for k in kernels], asked=asked, error=error, compiler="numba" in sys.modules,
                      cached=cached,
                      ready=[each.name for each in kernels if each.load()],
                      idle=idle, left=len(psutil.Process().children()))))
"""


def compiled(cache: Path, patch: str = "", said: list[str] | None = None, **variables: str) -> dict[str, Any]:
    """Run the script with a patch. said: gets what it logged."""
    environment = os.environ | {"LOCALLLM_KERNEL_CACHE": str(cache)} | variables
    call = [sys.executable, "-c", _SCRIPT.replace("{patch}", patch)]
    done = subprocess.run(call, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    if said is not None:
        said.append(done.stderr)
    assert result["left"] == 0
    assert not result["compiler"]
    return result


@pytest.mark.slow
def test_children_compile_them(tmp_path: Path) -> None:
    first = compiled(tmp_path)
    assert len(first["all"]) >= 6
    assert first["ready"] == first["all"] and first["cached"] == []
    assert first["asked"][-1] == [len(first["all"])] * 2
    assert first["idle"] == 2
    again = compiled(tmp_path)
    assert again["cached"] == again["all"]
    assert again["idle"] == 0, "nothing is started where all is in the cache"


@pytest.mark.slow
def test_they_do_so_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = compiled(tmp_path / "file" / "kernels")
    assert result["ready"] == result["all"] and result["cached"] == []


_ABORT = "import os, sys; sys.stdin.readline(); os.write(2, b'Assertion failed.\\n'); os.abort()"

# Windows has no signals: os.kill sets the exit status, and that of an abort depends on the C runtime.
if sys.platform == "win32":
    _ABORTED, _KILLED_IT, _CRASHED = "(Assertion failed.)", "its process ended with 9", "it crashes ("
else:
    _ABORTED, _KILLED_IT = "its process was ended by SIGABRT (Assertion failed.)", "its process was ended by SIGKILL"
    _CRASHED = "its process was ended by SIG"
_KILLED = 'import os, sys; sys.stdin.readline(); os.write(1, b"{reply}"); os.kill(os.getpid(), 9)'


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "its process ended with 3"),
        (_ABORT, _ABORTED),
        ("import sys; sys.stdout.write('no JSON\\n')", "its process ended with 0"),
        (_KILLED.format(reply=""), _KILLED_IT),
        (_KILLED.format(reply='{\\"bytes\\": 1'), _KILLED_IT),
        (_KILLED.format(reply='{\\"bytes\\": 1000}\\n\\x7fELF'), _KILLED_IT),
    ],
    ids=["ends", "aborts", "speaks otherwise", "killed", "killed in its reply", "killed in the code"],
)
def test_a_child_that_dies_is_one_error(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "dying.py").write_text(code)
    patch = (
        "Popen = children.subprocess.Popen\n"
        f"start = lambda command, **pipes: Popen([sys.executable, {str(tmp_path / 'dying.py')!r}], **pipes)\n"
        "children.subprocess.Popen = start"
    )
    result = compiled(tmp_path / "kernels", patch)
    assert result["error"].startswith("compiling the kernel ")
    assert said in result["error"] and "localllm doctor" in result["error"]
    assert result["ready"] == []


_CRASHING = """
import numpy as np
from llvmlite import binding, ir
from cpu_kernels.declarations import define, int64
from cpu_kernels.isa import IS_ARM64, Isa, emitted_isa
from cpu_kernels.kernel import Kernel
from cpu_kernels.records import argument
from cpu_kernels.self_check import Sample
from cpu_kernels.simd.vectors import I64, put_i64

binding.initialize_native_asmparser()

def emit(builder, value):
    if emitted_isa() is not Isa.PORTABLE:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.asm(kind, "{instruction}", "~{x9}" if IS_ARM64 else "", [], side_effect=True)
    return builder.add(value, I64(1))

next_number = define("next_number", [int64], int64, emit, lambda value: value + 1)

def count(op, step, thread, threads):
    put_i64(argument(op, 0), next_number(argument(op, 1)))

def samples():
    sample = Sample(rows=1)
    yield sample.arguments(sample.array([0], np.int64), 41)

crashing = Kernel("crashing.count", __name__, lambda: count, samples)
"""


@pytest.mark.parametrize("kind", ["an instruction that the processor lacks", "an address that is not mapped"])
def test_a_kernel_that_crashes_is_replaced_by_a_portable_build(tmp_path: Path, kind: str) -> None:
    arm = platform.machine().lower() in ("aarch64", "arm64")
    lacking, unmapped = ("udf #0", "mov x9, #8; str x9, [x9]") if arm else ("ud2", "movq $$0, 8")
    code = _CRASHING.replace("{instruction}", lacking if "instruction" in kind else unmapped)
    (tmp_path / "crashing.py").write_text(code)
    patch = f"sys.path.append({str(tmp_path)!r}); import crashing; kernels = [crashing.crashing]"
    result = compiled(tmp_path / "kernels", patch, said := [])
    assert result["error"] == "" and result["ready"] == ["crashing.count"]
    assert _CRASHED in said[0] and "crashing.count" in said[0]
    (cached,) = (tmp_path / "kernels").rglob("*.kernel")
    assert cached.name == "crashing.count.portable.kernel"


def test_kernels_of_another_version_are_refused(tmp_path: Path) -> None:
    result = compiled(tmp_path, "children.cache_directory = lambda module: __import__('pathlib').Path('another')")
    assert "was changed while this process ran" in result["error"]
    assert result["ready"] == []


def test_what_no_module_declares_is_refused(tmp_path: Path) -> None:
    result = compiled(tmp_path, "kernels = [Kernel('nowhere', '__main__', lambda: None)]")
    assert "importing __main__ does not declare the kernel nowhere" in result["error"]


def test_an_error_in_the_compiler_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from cpu_kernels.kernel import Kernel\n"
        "def make(): raise KeyError('a defect')\n"
        "broken = Kernel('broken.kernel', __name__, make)\n"
    )
    patch = f"sys.path.append({str(tmp_path)!r}); import broken; kernels = [broken.broken]"
    error = compiled(tmp_path / "kernels", patch)["error"]
    assert "compiling the kernel broken.kernel failed: its process ended with 1 (KeyError: 'a defect')" in error


def test_a_load_that_is_stopped_leaves_no_child(tmp_path: Path) -> None:
    stop = "class Stop(list):\n    def append(self, shown): raise InterruptedError('stopped')\nasked = Stop()"
    result = compiled(tmp_path, stop)
    assert result["error"] == "stopped" and result["ready"] == [] and result["idle"] == 0
