import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_io.system import write_at
from localllm.library.entry import Source
from localllm.library.errors import LibraryError, PullError
from localllm.library.lookup import find, users_models
from localllm.library.names import ModelName
from localllm.library.own_store import OwnStore
from localllm.library.places import own_store
from localllm.library.pull import PullStatus, pull
from localllm.library.stores import stored_models
from localllm.settings import Settings
from tests.localllm.library.model_server import ModelServer, refuse
from tests.localllm.library.store_contents import SETTINGS, no_model_and_no_half_file, stored
from tests.systems import needs_links


def test_a_full_disk_is_noticed_before(
    server: ModelServer, home: Path, tiny_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = server.add_ollama("library/x", "latest", {"model": tiny_gguf})["model"]
    monkeypatch.setattr("localllm.library.pull.free_bytes", lambda _folder: len(tiny_gguf) + (256 << 20) - 1)
    with pytest.raises(PullError, match="does not fit on the disk"):
        pull(f"{server.host}/library/x", SETTINGS)
    assert server.fetched(digest) == []
    monkeypatch.undo()


def test_a_disk_that_fills_up_keeps_what_came(
    server: ModelServer, home: Path, big_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:

    server.add_ollama("library/x", "latest", {"model": big_gguf})
    left = [2 << 20]

    def write(fd: int, data: memoryview, offset: int) -> None:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(fd, data, offset)

    with monkeypatch.context() as patched, pytest.raises(PullError, match="disk is full"):
        patched.setattr("localllm.library.partial.write_at", write)
        pull(f"{server.host}/library/x", SETTINGS)
    no_model_and_no_half_file(home)
    server.requests.clear()
    assert pull(f"{server.host}/library/x", SETTINGS).path.read_bytes() == big_gguf
    assert len(server.fetched("/blobs/")) < len(big_gguf) // (64 << 10) - 8  # not from the beginning


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fails", ["ftruncate", "write_at", "sync_file", "write_whole", "replace", "sync_folder"])
def test_a_disk_that_is_full_at_any_step_is_one_sentence(
    server: ModelServer, home: Path, big_gguf: bytes, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Whichever call fails, the error is a sentence, another model stays, and the next pull needs no byte twice."""
    server.add_ollama("library/old", "latest", {"model": big_gguf, "system": b"old"})
    old = pull(f"{server.host}/library/old", SETTINGS)
    newer = big_gguf[:-1] + b"!"
    server.add_ollama("library/x", "latest", {"model": newer})
    with (
        monkeypatch.context() as patched,
        pytest.raises(PullError, match=r"^The disk is full\. .* pull again to resume"),
    ):
        place = f"localllm.library.partial.{'os.' if fails == 'ftruncate' else ''}{fails}"
        patched.setattr("localllm.library.partial.CHECKPOINT_S", 0.0)
        patched.setattr(place, _full)
        pull(f"{server.host}/library/x", SETTINGS)
    assert old.path.read_bytes() == big_gguf
    assert [model.names for model in stored_models(own_store(SETTINGS), Source.OWN)] == [old.names]
    server.requests.clear()
    assert pull(f"{server.host}/library/x", SETTINGS).path.read_bytes() == newer
    if fails in ("replace", "sync_folder"):
        assert len(server.fetched("/blobs/")) <= 1, "what was complete is downloaded again"
    assert old.path.read_bytes() == big_gguf


def test_a_disk_too_full_for_the_manifest_keeps_the_files(
    server: ModelServer, home: Path, big_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add_ollama("library/x", "latest", {"model": big_gguf})
    with monkeypatch.context() as patched, pytest.raises(LibraryError, match=r"cannot be written: No space left"):
        patched.setattr("localllm.library.own_store.write_whole", _full)
        pull(f"{server.host}/library/x", SETTINGS)
    no_model_and_no_half_file(home)
    server.requests.clear()
    assert pull(f"{server.host}/library/x", SETTINGS).path.read_bytes() == big_gguf
    assert not server.fetched("/blobs/")


def test_a_stopped_pull_on_a_full_disk_still_says_that_it_was_stopped(
    server: ModelServer, home: Path, big_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add_ollama("library/x", "latest", {"model": big_gguf})

    def stop(_status: PullStatus) -> None:
        monkeypatch.setattr("localllm.library.partial.write_whole", _full)
        if _status.status == "pulling":
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        pull(f"{server.host}/library/x", SETTINGS, stop)
    no_model_and_no_half_file(home)


def test_a_folder_that_cannot_be_written(server: ModelServer, home: Path) -> None:
    (home / "file").write_text("")
    with pytest.raises(LibraryError, match="model_store"):
        pull(f"{server.host}/library/x", Settings(model_store=str(home / "file" / "models")))


@needs_links
def test_a_link_in_place_of_the_partial_file_is_not_followed(server: ModelServer, home: Path, tiny_gguf: bytes) -> None:
    digest = server.add_ollama("library/x", "latest", {"model": tiny_gguf})["model"]
    victim = home / "victim"
    victim.write_text("precious")
    OwnStore(own_store(SETTINGS)).prepare()
    partial = home / "localllm/models/partial"
    (partial / f"{digest.replace(':', '-')}.part").symlink_to(victim)
    with pytest.raises(PullError, match="cannot be written"):
        pull(f"{server.host}/library/x", SETTINGS)
    assert victim.read_text() == "precious"


def test_rm_and_cp(
    server: ModelServer, home: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.add_ollama("library/x", "latest", {"model": tiny_gguf, "system": b"x"})
    name = f"{server.host}/library/x"
    assert command("pull", name) == 0
    assert command("cp", name, "mine") == 0
    assert command("rm", name) == 0
    assert find("mine", SETTINGS).defaults().system == "x"
    assert find("mine", SETTINGS).path.read_bytes() == tiny_gguf
    assert command("rm", "MINE") == 0
    assert stored(home) == {}
    assert command("rm", "mine") == 2
    assert "own store" in capsys.readouterr().err
    server.routes["/x.gguf"] = tiny_gguf
    address = f"{server.url}/x.gguf"
    assert command("pull", address) == command("cp", address, "mine") == command("rm", address, "mine") == 0
    assert stored(home) == {}


def test_files_that_a_program_holds_stay_until_later(
    server: ModelServer,
    home: Path,
    tiny_gguf: bytes,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows refuses to remove a file while a program has it in memory."""
    server.add_ollama("library/held", "latest", {"model": tiny_gguf, "system": b"Be brief."})
    held, unlink = pull(f"{server.host}/library/held", SETTINGS).path, Path.unlink

    def refuse_held(path: Path, missing_ok: bool = False) -> None:
        if path == held:
            raise PermissionError(errno.EACCES, "Access is denied")
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse_held)
        assert command("rm", f"{server.host}/library/held") == 0
        assert f"{held} stays: Access is denied." in capsys.readouterr().err
    assert list(users_models(SETTINGS)) == [] and list(held.parent.iterdir()) == [held]
    assert command("rm", "--unfinished") == 0
    assert not held.exists()


def test_rm_leaves_other_programs_models_alone(
    full_home: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("qwen3:0.6b", "hf.co/user/Some-Model-GGUF:Q8_0"):
        assert command("rm", name) == 2
    assert command("rm", "../../x") == 2
    assert len(list(users_models(SETTINGS))) == 6


def test_unfinished_pulls_can_be_removed(
    server: ModelServer, home: Path, big_gguf: bytes, command: Callable[..., int]
) -> None:
    server.add_ollama("library/x", "latest", {"model": big_gguf})
    server.faults.append(refuse(1000, 404, part="/blobs/"))
    store = OwnStore(own_store(SETTINGS))
    store.prepare()
    key = f"sha256-{'0' * 64}"
    left = [store.partial / f"{key}.part", store.partial / f"{key}.json", store.blobs / key, store.temporary()]
    strange = [
        store.partial / "a.part",
        store.partial / "notes.json",
        store.partial / ".b.tmp",
        store.blobs / "tax.pdf",
    ]
    for path in (*left, *strange):
        path.write_text("x")
        os.utime(path, (0, 0))
    young = store.temporary()
    young.write_text("x")
    assert command("rm", "--unfinished") == 0
    assert {path for path in store.root.rglob("*") if path.is_file() and path.name != ".lock"} == {*strange, young}


def test_a_corrupt_blob_is_found_and_repaired(
    server: ModelServer, home: Path, big_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.add_ollama("library/x", "latest", {"model": big_gguf, "system": b"x"})
    model = pull(f"{server.host}/library/x", SETTINGS)
    assert command("verify") == 0
    with model.path.open("r+b") as file:
        file.seek(len(big_gguf) // 2)
        file.write(b"\0\1\2\3")
    assert command("verify", model.name) == 2
    assert str(model.path) in capsys.readouterr().err
    assert command("verify", "--repair") == 0
    assert model.path.read_bytes() == big_gguf
    assert command("verify") == 0


def test_verify_changes_nothing_of_others(full_home: Path, command: Callable[..., int]) -> None:
    path = find("qwen3:0.6b", SETTINGS).path
    path.write_bytes(b"damaged")
    assert command("verify", "--repair") == 2
    assert path.read_bytes() == b"damaged"


def test_a_model_with_missing_files_is_reported_and_repaired(
    server: ModelServer, home: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.add_ollama("library/x", "latest", {"model": tiny_gguf})
    model = pull(f"{server.host}/library/x", SETTINGS)
    model.path.unlink()
    assert command("verify") == 2
    assert "verified" not in capsys.readouterr().err
    assert command("verify", model.name, "--repair") == 0
    assert model.path.read_bytes() == tiny_gguf


def test_a_damaged_file_stays_until_there_is_a_better_one(
    server: ModelServer, home: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    digest = server.add_ollama("library/x", "latest", {"model": tiny_gguf})["model"]
    model = pull(f"{server.host}/library/x", SETTINGS)
    damaged = tiny_gguf[:-1] + b"!"
    model.path.write_bytes(damaged)
    server.faults.append(refuse(1000, 404))
    assert command("verify", "--repair") == 2
    assert model.path.read_bytes() == damaged
    assert "does not have" in capsys.readouterr().err
    server.faults.clear()
    assert command("verify", "--repair") == 0
    assert model.path.read_bytes() == tiny_gguf
    assert len(server.fetched(digest)) == 4  # each time a range probe and the file


def test_verify_says_what_it_did_not_look_at(
    full_home: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("verify", "hf.co/user/Some-Model-GGUF:Q8_0") == 0
    assert "is not verified" in capsys.readouterr().err
    assert command("verify") == 0
    assert "2 models verified." in capsys.readouterr().err


def test_a_file_elsewhere_is_a_model_or_refused(
    home: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "sound.gguf").write_bytes(tiny_gguf)
    assert command("verify", str(home / "sound.gguf")) == 0
    assert "is not verified beyond its header" in capsys.readouterr().err
    (home / "cut.gguf").write_bytes(tiny_gguf[:-100])
    (home / "notes.gguf").write_text("Buy milk.")
    for name, reason in (("cut.gguf", "ends at byte"), ("notes.gguf", "not a GGUF file"), ("nothing.gguf", "")):
        assert command("verify", str(home / name)) == 2
        assert reason in capsys.readouterr().err


def test_nothing_to_verify_is_said(home: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify") == 0
    assert "There are no stored models to verify." in capsys.readouterr().err


def test_the_store_of_another_program_is_left_alone(
    server: ModelServer, full_home: Path, tiny_gguf: bytes, command: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """model_store may name Ollama's store, which has the same layout: nothing in it is removed, and nothing added."""
    store = full_home / ".ollama/models"
    orphan = store / "blobs" / f"sha256-{'0' * 64}"
    orphan.write_text("a layer that Ollama is about to use")
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    server.add_ollama("library/x", "latest", {"model": tiny_gguf})
    monkeypatch.setenv("LOCALLLM_MODEL_STORE", str(store))
    assert command("list") == 0
    (full_home / "Modelfile").write_text("FROM builtin")
    for call in ("rm qwen3:0.6b", "rm --unfinished", f"pull {server.host}/library/x", "cp qwen3:0.6b a", "create a"):
        assert command(*call.split()) == 2, call
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


def test_a_manifest_that_cannot_be_read_keeps_all_weights(
    server: ModelServer, home: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.add_ollama("library/x", "latest", {"model": tiny_gguf, "system": b"Be brief."})
    server.add_ollama("library/y", "latest", {"model": tiny_gguf, "system": b"Be long."})
    model = pull(f"{server.host}/library/x", SETTINGS)
    pull(f"{server.host}/library/y", SETTINGS)
    path = OwnStore(own_store(SETTINGS)).manifest_path(ModelName.parse(model.name))
    manifest = path.read_bytes()
    path.write_bytes(manifest[:100])
    for call in (("rm", f"{server.host}/library/y"), ("rm", "--unfinished")):
        assert command(*call) == 0
        assert "Files of models are kept" in capsys.readouterr().err
    assert command("verify") == 2
    err = capsys.readouterr().err
    assert "is not a model's manifest" in err and "1 of 1 model damaged" in err
    path.write_bytes(manifest)
    assert command("verify") == 0
    assert find(model.name, SETTINGS).defaults().system == "Be brief."
    path.write_bytes(b"")
    assert command("verify", "--repair") == 0  # pulled again, although its files are here
    assert find(model.name, SETTINGS).defaults().system == "Be brief."
    assert command("rm", "--unfinished") == 0
    assert {path.read_bytes() for path in model.path.parent.iterdir()} == {tiny_gguf, b"Be brief."}


def test_a_bad_manifest_is_reported_and_can_be_removed(
    server: ModelServer, home: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.add_ollama("library/x", "latest", {"model": tiny_gguf})
    pull(f"{server.host}/library/x", SETTINGS)
    assert command("cp", f"{server.host}/library/x", "mine") == 0
    manifests = home / "localllm/models/manifests"
    manifests.joinpath(*ModelName.parse(f"{server.host}/library/x").folders).write_bytes(b"\0" * 100)
    assert [model.name for model in users_models(SETTINGS)] == ["mine:latest"]
    err = capsys.readouterr().err
    assert "is not a model's manifest" in err and "remove it with `localllm rm`" in err
    assert command("rm", f"{server.host}/library/x") == 0
    assert find("mine", SETTINGS).path.read_bytes() == tiny_gguf


@pytest.fixture
def read_only(server: ModelServer, home: Path, tiny_gguf: bytes) -> str:
    """The name of a model in a store that cannot be changed: a folder in place of the lock file, which stops even root.

    The store's content can still be read.
    """
    server.add_ollama("library/x", "latest", {"model": tiny_gguf})
    name = f"{server.host}/library/x"
    pull(name, SETTINGS)
    lock = home / "localllm/models/.lock"
    lock.unlink(missing_ok=True)
    lock.mkdir()
    return name


def test_a_read_only_store_is_reported(
    read_only: str, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for call in (("rm", read_only), ("rm", "--unfinished"), ("cp", read_only, "other")):
        assert command(*call) == 2
        err = capsys.readouterr().err
        assert "cannot be changed" in err and "defect" not in err
    assert command("rm", "nothing") == 2
    assert "nothing:latest is not in localllm's own store" in capsys.readouterr().err
    assert command("show", read_only) == 0


def test_a_folder_that_may_only_be_read_is_noticed_before_anything_comes(
    server: ModelServer, home: Path, tiny_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = server.add_ollama("library/x", "latest", {"model": tiny_gguf})["model"]
    OwnStore(own_store(SETTINGS)).prepare()
    monkeypatch.setattr("localllm.library.own_store.os.access", lambda _path, _mode: False)
    with pytest.raises(LibraryError, match=r"cannot be written\. Name another folder by the setting model_store"):
        pull(f"{server.host}/library/x", SETTINGS)
    assert server.fetched(digest) == []


def test_nothing_is_removed_from_a_store_that_is_not_there(home: Path, command: Callable[..., int]) -> None:
    assert command("rm", "--unfinished") == 0
    assert not (home / "localllm").exists()


def test_no_second_name_for_a_model_whose_files_are_gone(
    server: ModelServer, home: Path, tiny_gguf: bytes, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.add_ollama("library/x", "latest", {"model": tiny_gguf})
    name = f"{server.host}/library/x"
    pull(name, SETTINGS).path.unlink()
    assert command("cp", name, "other") == 2
    assert "--repair" in capsys.readouterr().err
