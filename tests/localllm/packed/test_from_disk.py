"""Models that do not fit into memory: packed to the disk, mapped, waited for, planned."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from gguf_io import open_model
from gguf_io.runner_info import LoadProgress
from localllm import advice, packed
from localllm.errors import OutOfMemoryError
from localllm.placement import memory
from localllm.placement.backends import open_placed, place
from localllm.settings import Settings
from models import packed_file
from models.native_runner import NativeRunner
from models.needs import native_needs
from tests.localllm.packed.packed_loads import PLENTY, Loads, stored
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write


def from_disk(path: Path, limit_mib: int = PLENTY, progress: LoadProgress | None = None) -> np.ndarray:
    """Logits of a token from weights that were never completely in memory."""
    with open_model(path) as file:
        runner = packed.open_from_disk(
            file,
            packed.find_packed(file, limit_mib),
            limit_mib,
            1 << 20,
            lambda ready: NativeRunner(file, kv_bytes=1 << 20, threads=1, ready=ready),
            progress,
        )
    logits = runner.run([5], [0], [runner.create_sequence()], [0]).copy()
    runner.close()
    return logits


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "glm4moe", "lfm2", "deepseek2", "qwen35moe"])
def test_what_is_packed_to_the_disk_tensor_by_tensor_is_the_same(name: str, home: Path, load: Loads) -> None:
    path = write(MODELS[name], home / "model.gguf")
    expected = load(path, 0)
    np.testing.assert_array_equal(from_disk(path), expected)
    (file,) = stored()
    streamed = file.read_bytes()
    file.unlink()
    load(path)
    assert file.read_bytes() == streamed
    np.testing.assert_array_equal(load(path), expected)
    assert load.packed == 2


def test_a_damaged_file_is_packed_to_the_disk_again(model: Path, load: Loads) -> None:
    expected = from_disk(model)
    (path,) = stored()
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    np.testing.assert_array_equal(from_disk(model), expected)


def test_what_cannot_be_read_is_packed_to_the_disk_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = from_disk(model)
    before = stored()[0].stat().st_ino

    read, failed = packed_file.read_at, []

    def fail_once(*arguments: Any) -> int:
        if not failed:
            failed.append(arguments)
            raise OSError(errno.EIO, "the disk fails")
        return read(*arguments)

    monkeypatch.setattr(packed_file, "read_at", fail_once)
    np.testing.assert_array_equal(from_disk(model), expected)
    assert stored()[0].stat().st_ino != before


def test_a_model_from_disk_waits_for_another_writer(model: Path, load: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may have packed the same model meanwhile."""
    monkeypatch.setattr(packed, "_POLL_S", 0.0)
    expected = load(model)
    (path,) = stored()
    path.rename(kept := path.with_suffix(".kept"))
    lock = FileLock(packed.packed_folder() / ".lock")
    lock.acquire()
    waited = []

    def progress(what: str, _: float) -> None:
        if what.startswith("waiting"):
            waited.append(what)
            kept.rename(path)
            lock.release()

    np.testing.assert_array_equal(from_disk(model, progress=progress), expected)
    assert len(waited) == 1 and load.packed == 1


def test_a_model_that_fits_nowhere_says_what_to_do(model: Path) -> None:
    with pytest.raises(OutOfMemoryError, match="packed_mib"):
        from_disk(model, 0)


def test_the_setting_lets_a_model_run_that_memory_has_no_room_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(backend="native", kv_mib=1, ctx=64, threads=1)
    monkeypatch.setattr(memory, "RESERVE_BYTES", 0)
    with open_model(model) as file:
        needs = native_needs(file, threads=1)
        whole = place(file, settings, room=2**40)
        room = whole.main_bytes - needs.weights // 2
        with pytest.raises(OutOfMemoryError, match="from_disk"):
            place(file, settings, room=room).checked()
        allowed = replace(settings, from_disk=True)
        plan = place(file, allowed, room=room)
        assert plan.on_disk == needs.weights - plan.uses[0].weights == needs.weights // 2
        assert plan.main_bytes == room and "on disk" in plan.sums()
        assert place(file, allowed, room=2**40).on_disk == 0
        with pytest.raises(OutOfMemoryError, match="from disk either"):
            place(file, allowed, room=whole.main_bytes - needs.weights).checked()
        runner, choice = open_placed(file, plan)
    assert stored() and "from disk" in choice.why
    runner.close()


def test_a_plan_tells_what_stays_on_the_disk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(backend="native", ctx=64, threads=1, from_disk=True)
    with open_model(model) as file:
        needs = native_needs(file, threads=1)
        room = memory.RESERVE_BYTES + needs.total(64) - needs.weights // 2
        monkeypatch.setattr(advice, "available_memory", lambda: room)
        monkeypatch.setattr(memory, "LEAST_TOKENS", 64)
        told = advice.advise(file, settings)
        refused = advice.advise(file, replace(settings, from_disk=False))
    assert told.placement.fits and told.longest_context == 64 and told.expected is None
    assert any("from disk" in note for note in told.placement.notes)
    assert not refused.placement.fits and any("from_disk" in note for note in refused.placement.notes)
