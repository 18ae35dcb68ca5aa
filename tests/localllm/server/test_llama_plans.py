"""Memory grants over devices: what llama.cpp's models get beside others, on made-up GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest

from gguf_io import open_model
from gpu_offload.devices import Device, DeviceKind
from gpu_offload.planner import DEFAULT_RESERVE
from localllm.engine.backends import plan_native
from localllm.engine.text_encoders import choose_text_encoder, encoder_bytes
from localllm.errors import OutOfMemoryError
from localllm.library.entry import LibraryModel, Source
from localllm.server import loading
from localllm.server.catalog import CatalogEntry
from localllm.server.loading import MIB, Grant, LoadPlan, MemoryLoader, plan_embedder, plan_model
from localllm.settings import Settings
from tests.oracle import llama_oracle

MAIN = 4096 * MIB
SETTINGS = Settings(backend="llama")


@pytest.fixture
def path(data_dir: Path) -> Path:
    return data_dir / "models" / "gguf" / "stories260K-Q8_0.gguf"


def with_gpus(monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
    """GPUs with this many bytes free beyond the reserve."""
    found = [
        Device(f"CUDA{index}", f"GPU {index}", "CUDA", DeviceKind.GPU, 2**40, DEFAULT_RESERVE + size)
        for index, size in enumerate(free)
    ]
    monkeypatch.setattr(loading, "gpus", lambda: found)


def granted(
    path: Path, *promised: tuple[int, ...], others_on_gpus: bool = False, settings: Settings = SETTINGS
) -> Grant:
    with open_model(path) as file:
        return plan_model(settings, file, MAIN, promised, others_on_gpus)


def needs(monkeypatch: pytest.MonkeyPatch, path: Path) -> int:
    """Bytes of the whole model on a GPU."""
    with_gpus(monkeypatch, 2**35)
    (needed,) = granted(path).devices
    assert needed > MIB
    return needed


def test_what_loads_were_promised_is_not_granted_again(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    needed = needs(monkeypatch, path)
    with_gpus(monkeypatch, 2 * needed)
    assert granted(path).devices == (needed,)
    assert granted(path, (needed,)).devices == (needed,)
    assert granted(path, (needed,), (needed,)).devices == (0,)  # some main memory is left


def test_a_second_gpu_takes_what_the_first_has_promised_away(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    needed = needs(monkeypatch, path)
    with_gpus(monkeypatch, 2 * needed, 3 * needed // 2)
    assert granted(path).devices == (needed, 0)
    assert granted(path, (needed, 0)).devices[0] == 0 < granted(path, (needed, 0)).devices[1]


def test_others_on_gpus_make_room_before_a_model_is_given_less(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    needed = needs(monkeypatch, path)
    with_gpus(monkeypatch, needed - 2**16)
    with pytest.raises(OutOfMemoryError, match="while the other models are loaded") as caught:
        granted(path, others_on_gpus=True)
    assert "GPU 0" in str(caught.value)  # the sums
    assert granted(path).devices[0] < needed
    by_hand = replace(SETTINGS, gpu_layers=1)
    assert 0 < granted(path, others_on_gpus=True, settings=by_hand).devices[0] < needed


def test_embedders_lie_whole_where_there_is_most_room(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    with open_model(path) as file:
        choice = choose_text_encoder(file, SETTINGS)
        needed = sum(encoder_bytes(file, choice))
        with_gpus(monkeypatch, needed, 2 * needed)
        grant = plan_embedder(SETTINGS, choice, file, MAIN, [])
        assert (grant.devices, grant.settings.main_gpu) == ((0, needed), 1)
        grant = plan_embedder(SETTINGS, choice, file, MAIN, [(0, 2 * needed)])
        assert (grant.devices, grant.settings.main_gpu) == ((needed, 0), 0)
        grant = plan_embedder(SETTINGS, choice, file, MAIN, [(needed, 2 * needed)])
        assert (grant.devices, grant.settings.gpu_layers, grant.main) == ((), 0, needed)
        assert plan_embedder(replace(SETTINGS, gpu_layers=0), choice, file, MAIN, []).devices == ()
        with pytest.raises(OutOfMemoryError, match="available"):
            plan_embedder(replace(SETTINGS, gpu_layers=0), choice, file, needed, [])
        ours = choose_text_encoder(file, Settings(backend="native"))
        grant = plan_embedder(SETTINGS, ours, file, MAIN, [])
        assert (grant.devices, grant.main) == ((), sum(encoder_bytes(file, ours)))


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_the_loader_hands_on_what_is_under_way(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    needed = needs(monkeypatch, path)
    with_gpus(monkeypatch, needed)
    loader, entry = MemoryLoader(SETTINGS), CatalogEntry("story", LibraryModel(("story",), Source.PATH, path))
    first = loader.plan(entry, False, [], [])
    assert first.grant.devices == (needed,)
    with pytest.raises(OutOfMemoryError, match="1 other models hold"):
        loader.plan(entry, False, [], [first])
    elsewhere = LoadPlan(entry, Grant(SETTINGS, MIB), False, True, MAIN)
    assert loader.plan(entry, False, [], [elsewhere]).grant.devices == (needed,)


def test_a_native_model_shares_its_memory_only_if_much_is_left(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    settings = Settings(backend="native", max_models=2)
    loader, entry = MemoryLoader(settings), CatalogEntry("story", LibraryModel(("story",), Source.PATH, path))
    with open_model(path) as file:
        ample = loading.AMPLE_TOKENS * plan_native(file, settings, room=2**40).kv_bytes_per_token // MIB
    for left in (ample + 2, 4 * ample):
        kv = 0
        for room in range(530, 530 + 8 * ample):  # from the least memory on that leaves this much
            monkeypatch.setattr(loading, "available_memory", lambda room=room: room * MIB)
            with open_model(path) as file:
                if plan_native(file, settings, room=room * MIB).kv // MIB >= left:
                    kv = loader.plan(entry, False, [], []).grant.settings.kv_mib or 0
                    break
        assert kv == max(ample, left // 2)
