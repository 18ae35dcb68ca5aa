"""Packed weights on disk: found again, bounded, private, and never used for another model, processor or version."""

import os
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filelock import FileLock

from gguf_io import open_model
from localllm import files, packed
from localllm.library.own_store import OwnStore
from localllm.placement.backends import open_runner
from localllm.settings import Settings
from models.native_runner import NativeRunner
from models.needs import native_needs
from tests.localllm.packed.packed_loads import PLENTY, Loads, stored
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.systems import KILL, KILLED, needs_modes
from tests.waiting import PATIENCE_S


def test_a_second_load_packs_nothing(model: Path, load: Loads) -> None:
    first = load(model)
    (path,) = stored()
    os.utime(path, (1, 1))
    np.testing.assert_array_equal(load(model), first)
    assert load.packed == 1 and stored() == [path] and path.stat().st_mtime > 1
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_mapped_weights_are_reported_because_the_system_counts_them_as_free(model: Path) -> None:
    settings = Settings(backend="native", kv_mib=1, ctx=64, threads=1)
    found = []
    with open_model(model) as file:
        for _ in range(2):
            runner, choice = open_runner(file, settings, None)
            packed.finish_keeping()
            runner.close()
            found.append(choice)
        weights = native_needs(file, ("f16", "f16"), 1).weights
    assert [choice.mapped for choice in found] == [0, weights]
    assert found[0].main_bytes == found[1].main_bytes


def test_nothing_is_kept_or_used_where_it_is_off(model: Path, load: Loads) -> None:
    load(model, 0)
    assert not packed.packed_folder().exists()
    load(model)
    load(model, 0)
    assert load.packed == 3


def test_a_process_that_ends_soon_still_keeps_a_small_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_WAIT_S", PATIENCE_S)  # which ends before
    for most, kept in ((0, 0), (2**30, 1)):
        monkeypatch.setattr(packed, "_SOON_BYTES", most)
        with open_model(model) as file, closing(NativeRunner(file, kv_bytes=1 << 20, threads=1)) as runner:
            keeper = packed.keep_packed(file, runner.packed, PLENTY)
            packed.finish_keeping()
            assert keeper is not None and len(stored()) == kept
            keeper.stop()


def test_small_models_and_new_files_are_not_kept(model: Path, load: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLED_NS", 2**62)
    load(model)
    monkeypatch.setattr(files, "SETTLED_NS", -(2**62))
    monkeypatch.setattr(packed, "LEAST_BYTES", 2**40)
    load(model)
    assert not stored()


def test_a_file_that_was_changed_is_packed_again(model: Path, home: Path, load: Loads) -> None:
    first = load(model)
    other = write(MODELS["llama"], home / "other.gguf", seed=3)
    before = model.stat()
    model.write_bytes(other.read_bytes())
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))  # only its change time differs
    assert before.st_size == model.stat().st_size
    assert not np.array_equal(load(model), first)
    assert load.packed == 2 and len(stored()) == 1, "what was packed of the old file stays"


def test_a_model_that_was_copied_with_its_times_keeps_its_packed_weights(model: Path, home: Path, load: Loads) -> None:
    os.utime(model, (1, 1))
    load(model)
    load(write(MODELS["llama"], home / "other.gguf", seed=3))
    load(model)
    assert load.packed == 2 and len(stored()) == 2


def test_processors_and_versions_have_a_file_each(model: Path, load: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(model)
    for code in ("another", packed.code_digest(), "another"):
        monkeypatch.setattr(packed, "code_digest", lambda code=code: code)
        np.testing.assert_array_equal(load(model), expected)
    assert load.packed == 2 and len(stored()) == 2


@pytest.mark.parametrize("place", [0.01, 0.5, 0.9, 0.999])
def test_damage_costs_a_packing_and_no_bit(
    place: float, model: Path, load: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    first = load(model)
    (path,) = stored()
    data = bytearray(path.read_bytes())
    offset = int(place * len(data))
    data[offset : offset + 1] = bytes([data[offset] ^ 1])
    path.write_bytes(data)
    np.testing.assert_array_equal(load(model), first)
    # The bits between two matrices belong to neither.
    assert load.packed == 2 and "packed again" in caplog.text
    np.testing.assert_array_equal(load(model), first)
    assert load.packed == 2


@pytest.mark.parametrize("left", [0, 100, 50_000])
def test_a_cut_file_is_packed_again(left: int, model: Path, load: Loads) -> None:
    first = load(model)
    os.truncate(stored()[0], left)
    np.testing.assert_array_equal(load(model), first)
    assert load.packed == 2


def test_another_models_file_is_not_taken(model: Path, home: Path, load: Loads) -> None:
    other = write(MODELS["llama"], home / "other.gguf", seed=3)
    first, second = load(model), load(other)
    mine, others = (
        next(each.path for each in packed.packed_files() if each.files[0][0] == str(p)) for p in (model, other)
    )
    shutil.copyfile(others, mine)
    np.testing.assert_array_equal(load(model), first)
    assert load.packed == 3 and not np.array_equal(first, second)


@needs_modes
def test_what_others_can_write_is_not_taken(model: Path, load: Loads) -> None:
    load(model)
    (path,) = stored()
    path.chmod(0o622)
    load(model)
    path.chmod(0o600)
    path.parent.chmod(0o777)
    load(model)
    path.parent.chmod(0o700)
    assert load.packed == 3
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))
    load(model)
    assert load.packed == 4


def test_the_least_recently_used_go_first(home: Path, load: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [write(MODELS["llama"], home / f"{number}.gguf", seed=number) for number in range(4)]
    load(models[0])
    size = packed.packed_files()[0].bytes
    monkeypatch.setattr(packed, "limit_bytes", lambda _: 3 * size)
    for age, path in enumerate(models[1:3]):
        load(path)
        os.utime(stored()[-1], (10 + age, 10 + age))
    load(models[0])  # used now
    load(models[3])
    kept = {Path(each.files[0][0]).stem for each in packed.packed_files()}
    assert kept == {"0", "2", "3"}
    assert sum(each.bytes for each in packed.packed_files()) <= 3 * size


def refuse_to_remove(held: set[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Act like Windows, which lets nobody remove a file that a program has mapped; it may be renamed."""
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path in held:
            raise PermissionError(13, "Access is denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)


def test_files_that_programs_hold_stay_and_go_later(home: Path, load: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file goes in their place; if none may, nothing is written until one may."""
    models = [write(MODELS["llama"], home / f"{number}.gguf", seed=number) for number in range(4)]
    load(models[0])
    (held,) = stored()
    size = packed.packed_files()[0].bytes
    monkeypatch.setattr(packed, "limit_bytes", lambda _: 2 * size)
    load(models[1])
    os.utime(held, (1, 1))
    with monkeypatch.context() as patched:
        refuse_to_remove({held}, patched)
        load(models[2])
        assert {Path(each.files[0][0]).stem for each in packed.packed_files()} == {"0", "2"}
        refuse_to_remove(set(stored()), patched)
        load(models[3])
        assert {Path(each.files[0][0]).stem for each in packed.packed_files()} == {"0", "2"}
    load(models[3])
    assert {Path(each.files[0][0]).stem for each in packed.packed_files()} == {"2", "3"}


def test_a_damaged_file_that_a_program_holds_is_put_aside(
    model: Path, load: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(model)
    (path,) = stored()
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with monkeypatch.context() as patched:
        refuse_to_remove({path}, patched)
        np.testing.assert_array_equal(load(model), first)
    np.testing.assert_array_equal(load(model), first)
    assert load.packed == 2 and stored() == [path]


def test_a_model_that_is_larger_than_the_bound_or_the_disk_is_not_kept(
    model: Path, load: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as small:
        small.setattr(packed, "limit_bytes", lambda _: 1000)
        load(model)
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    load(model)
    assert load.packed == 2 and not stored()


def test_a_full_disk_evicts_nothing(home: Path, load: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [write(MODELS["llama"], home / f"{number}.gguf", seed=number) for number in range(2)]
    load(models[0])
    size = packed.packed_files()[0].bytes
    monkeypatch.setattr(packed, "limit_bytes", lambda _: size)
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda _: SimpleNamespace(free=size // 2))
    load(models[1])
    assert [Path(each.files[0][0]).stem for each in packed.packed_files()] == ["0"]


def test_nothing_is_written_where_memory_is_short(model: Path, load: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "available_memory", lambda: 2**20)
    load(model)
    assert not stored()


def test_a_folder_that_cannot_be_made_costs_nothing(model: Path, load: Loads, home: Path) -> None:
    (home / "home").mkdir()
    (home / "home/localllm").write_text("a file")
    np.testing.assert_array_equal(load(model), load(model))
    assert load.packed == 2 and (home / "home/localllm").read_text() == "a file"


def test_one_process_writes_at_a_time(model: Path, load: Loads) -> None:
    packed.packed_folder().mkdir(mode=0o700, parents=True)
    with FileLock(packed.packed_folder() / ".lock"):
        load(model)
    assert not stored()
    load(model)
    assert len(stored()) == 1


def test_a_model_that_is_closed_meanwhile_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go = threading.Event(), threading.Event()

    def memory() -> int:
        reached.set()
        assert go.wait(PATIENCE_S)
        return 2**40

    monkeypatch.setattr(packed, "available_memory", memory)
    with open_model(model) as file:
        runner = packed.open_with_packed(
            file, None, PLENTY, lambda ready: NativeRunner(file, kv_bytes=1 << 20, threads=1, ready=ready)
        )
    assert reached.wait(PATIENCE_S)
    threading.Timer(0.1, go.set).start()
    runner.close()
    assert {path.name for path in packed.packed_folder().iterdir()} <= {".lock"}


def test_what_a_killed_process_left_goes_with_the_next(model: Path, load: Loads) -> None:
    script = (
        "import os, signal, sys\nfrom gguf_io import open_model\nfrom localllm.packed import _writer_for\n"
        f"with open_model(sys.argv[1]) as file, _writer_for(file, 1, 100):\n    os.kill(os.getpid(), {KILL:d})\n"
    )
    assert subprocess.run([sys.executable, "-c", script, model], check=False).returncode == KILLED
    assert [path.name for path in packed.packed_folder().iterdir() if path.name.startswith(".localllm-")]
    (theirs := packed.packed_folder() / ".localllm-notes").write_text("somebody's")
    load(model)
    assert theirs.read_text() == "somebody's"
    theirs.unlink()
    assert len(stored()) == 1


def test_models_that_are_gone_take_their_packed_weights_along(home: Path, load: Loads) -> None:
    paths = [write(MODELS["llama"], home / f"{number}.gguf", seed=number) for number in range(2)]
    for path in paths:
        load(path)
    paths[0].unlink()
    packed.remove_orphans()
    (left,) = packed.packed_files()
    assert left.files[0][0] == str(paths[1])


def test_they_go_with_a_models_blob(model: Path, home: Path, load: Loads) -> None:
    store = OwnStore(home / "store")
    store.prepare()
    store.add_blob("model", model.read_bytes())
    (blob,) = store.blobs.iterdir()
    load(blob)
    assert len(stored()) == 1
    store.discard([blob.name])
    assert not stored()


def test_the_default_bound_follows_the_disk() -> None:
    free = shutil.disk_usage("/").free
    assert 0 < packed.limit_bytes(None) <= min(packed.DEFAULT_BYTES, free)
    assert packed.limit_bytes(5) == 5 * 2**20
