"""Kernels that are not in the cache are compiled by child processes; what a child cannot do is done here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = """
import json, sys
import psutil
import cpu_kernels.parallel_compile as parallel
from cpu_kernels import norms, sums, activations
from cpu_kernels.kernel import Kernel, find_kernel

kernels = [each for module in (norms, sums, activations) for each in vars(module).values() if isinstance(each, Kernel)]
built, asked = [], []
build = Kernel._build
Kernel._build = lambda self: (built.append(self.name), build(self))[1]
parallel.usable_cores = lambda: 2
{patch}
error = ""
try:
    parallel.compile_all(kernels, lambda done, count, name: asked.append((done, count, name)))
except InterruptedError as found:
    error = str(found)
ready = [each.name for each in kernels if each.is_ready]
children = len(psutil.Process().children())
print(json.dumps(dict(all=[k.name for k in kernels], built=built, asked=asked, ready=ready,
                      error=error, left=children)))
"""


def compiled(cache: Path, patch: str = "") -> dict[str, Any]:
    environment = os.environ | {"LOCALLLM_KERNEL_CACHE": str(cache)}
    call = [sys.executable, "-c", _SCRIPT.replace("{patch}", patch)]
    output = subprocess.run(call, env=environment, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(output)
    assert result["left"] == 0
    return result


@pytest.mark.slow
def test_children_compile_them(tmp_path: Path) -> None:
    first = compiled(tmp_path)
    assert len(first["all"]) >= 6
    assert first["ready"] == first["all"]
    assert first["built"] == []
    assert first["asked"][-1] == [len(first["all"]), len(first["all"]), ""]
    again = compiled(tmp_path)
    assert again["built"] == [] and again["ready"] == again["all"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "patch",
    [
        "parallel._CHILD = 'raise SystemExit(1)'",
        "parallel._CHILD = 'import os; os.write(1, b\"\\\\n\"); os.read(0, 1); os.abort()'",
        "parallel.cache_directory = lambda: __import__('pathlib').Path('another')",
    ],
    ids=["never begins", "dies", "another cache"],
)
def test_what_a_child_does_not_finish_is_compiled_here(tmp_path: Path, patch: str) -> None:
    result = compiled(tmp_path, patch)
    assert result["ready"] == result["all"]
    assert sorted(result["built"]) == sorted(result["all"])


def test_a_load_that_is_stopped_leaves_no_child(tmp_path: Path) -> None:
    stop = "class Stop(list):\n    def append(self, shown): raise InterruptedError('stopped')\nasked = Stop()"
    result = compiled(tmp_path, stop)
    assert result["error"] == "stopped" and result["ready"] == []
