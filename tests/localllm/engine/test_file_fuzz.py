"""Mutated model files, opened, planned and run by the native engine: each runs or is refused, and none crashes it.

benchmarks/fuzz.py tries thousands; these are the first of them.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_io.errors import LocalLLMError
from tests.models.architecture_models import MODELS

fuzz = pytest.importorskip("benchmarks.fuzz", reason="it bounds memory by the module resource, which Windows lacks")

DIES = f"""
import os
print('[3, "llama", "data"]', flush=True)
print('["computed", ""]', flush=True)
print('[5, "qwen2", "values"]', flush=True)
os.kill(os.getpid(), {int(signal.SIGSEGV)})
"""


@pytest.mark.slow
def test_no_mutated_file_of_any_architecture_ends_the_process() -> None:
    options = argparse.Namespace(models=[], files=len(MODELS), seed=2, processes=1, first=0, keep=None)
    found = list(fuzz.outcomes(options, 0))
    assert [each for each in found if each.faulty] == []
    assert {each.base for each in found} == set(MODELS)
    assert {each.kind for each in found} == {fuzz.COMPUTED, fuzz.REFUSED}
    assert len({each.mutation for each in found}) == 6


def test_a_signal_is_put_down_to_the_file_that_was_open() -> None:
    with subprocess.Popen([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True) as child:
        first, last = fuzz.outcomes_of(child)
    assert (first.index, first.kind, first.faulty) == (3, fuzz.COMPUTED, False)
    assert (last.index, last.base, last.mutation, last.faulty) == (5, "qwen2", "values", True)
    assert last.kind == f"status {-signal.SIGSEGV}"


@pytest.mark.parametrize(
    ("error", "kind"), [(LocalLLMError("no"), fuzz.REFUSED), (ValueError("no"), "foreign exception")]
)
def test_an_error_that_says_nothing_to_a_user_is_a_defect(
    error: Exception, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise error

    monkeypatch.setattr(fuzz, "load_model", load)
    assert fuzz.try_file(Path(os.devnull))[0] == kind


def test_the_same_number_is_the_same_file(tmp_path: Path) -> None:
    made = []
    for at, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        fuzzer = fuzz.Fuzzer(tmp_path / name, [], seed=1)
        for index in range(at, 3):  # despite the files before it
            path, base, mutation = fuzzer.make(index)
        made.append((path.read_bytes(), base, mutation))
    assert made[0] == made[1]
