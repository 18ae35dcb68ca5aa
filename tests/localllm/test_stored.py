"""localllm cache: everything stored is shown with its limit, and caches can be cleared."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm.cli.main import application
from tests.systems import CACHE, CAN_LINK, use_own_places


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_own_places(tmp_path, monkeypatch)
    monkeypatch.setenv("LOCALLLM_KERNEL_CACHE", str(tmp_path / "compiled"))
    return tmp_path


def kept(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(5000 * b"#")
    return path


def shown() -> dict[str, int]:
    rows = json.loads(CliRunner().invoke(application(), ["cache", "--json"]).stdout)
    assert all(row["bound"] and row["path"] for row in rows)
    return {row["what"]: row["bytes"] for row in rows}


def test_everything_is_shown_and_what_may_go_goes(home: Path) -> None:
    assert set(shown().values()) == {0}
    places = {
        "models": kept(home / "localllm/models/blobs/sha256-1"),
        "unfinished": kept(home / "localllm/models/partial/sha256-2.part"),
        "kernels": kept(home / "compiled/localllm-kernels" / ("ab" * 12) / "dot.kernel"),
        "kv": kept(home / CACHE / "kv" / ("0f" * 16) / f"{'1' * 32}.{'2' * 32}.kv"),
        "images": kept(home / CACHE / "images" / f"{'ef' * 16}.image"),
        "packed": kept(home / CACHE / "packed" / f"{'cd' * 16}.packed"),
        "documents": kept(home / "localllm/documents" / f"{'ab' * 16}.db"),
        "chats": kept(home / "localllm/sessions.db"),
        "answers": kept(home / CACHE / "semantic.db"),
        "changes": kept(home / "localllm/changes.db"),
        "speeds": kept(home / "localllm/speeds.json"),
        "agents": kept(home / "localllm/agents/claude/request.json"),
        "settings": kept(home / "localllm/config.toml"),
    }
    shared_prefix = kept(home / CACHE / "kv" / ("0f" * 16) / f"{'3' * 32}.trunk")
    pin = kept(home / CACHE / "kv" / ("0f" * 16) / f"{'4' * 32}.pin")
    strange = [
        kept(home / "compiled/localllm-kernels/mine/photo"),
        kept(home / CACHE / "kv" / "notes"),
        kept(home / CACHE / "images" / "holiday.image"),
        kept(home / CACHE / "packed" / "a.packed"),
    ]
    strange += [
        kept(home / "localllm/documents/thesis.db"),
        kept(home / "compiled/localllm-kernels" / ("cd" * 12) / "photo"),
        kept(home / CACHE / "kv" / ("0e" * 16) / "tax.kv"),
    ]
    outside = kept(home / "outside" / "dot.kernel")
    if CAN_LINK:
        (home / "compiled/localllm-kernels" / ("ef" * 12)).symlink_to(outside.parent)
    before = shown()
    assert before.keys() == places.keys() and min(before.values()) > 0
    caches = ("kernels", "kv", "images", "packed", "documents")
    told = CliRunner().invoke(application(), ["cache", *(word for name in caches for word in ("--free", name))])
    assert told.exit_code == 0 and "KiB" in told.stderr and "kernels: freed" in told.stderr
    gone = {what for what, path in places.items() if not path.exists()}
    assert gone == set(caches) and not shared_prefix.exists() and not pin.exists()
    assert all(path.exists() for path in [*strange, outside])


def test_what_cannot_be_removed_is_named_after_the_rest_is_gone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [kept(home / CACHE / "packed" / f"{digit * 32}.packed") for digit in "abc"]
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path == files[1]:
            raise PermissionError(13, "Access is denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    told = CliRunner().invoke(application(), ["cache", "--free", "packed"])
    assert f"{files[1]} cannot be removed: Access is denied. End the programs that use it" in str(told.exception)
    assert [path.exists() for path in files] == [False, True, False]


def test_nothing_else_is_freed(home: Path) -> None:
    told = CliRunner().invoke(application(), ["cache", "--free", "models"])
    assert "choose kernels, kv, images, packed, documents" in str(told.exception)
