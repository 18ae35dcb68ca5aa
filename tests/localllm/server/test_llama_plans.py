"""Memory grants over devices: what llama.cpp's models get beside others, on made-up GPUs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gguf_io import open_model
from gpu_offload import devices
from gpu_offload.devices import Device, DeviceKind
from gpu_offload.options import Use
from localllm.errors import OutOfMemoryError
from localllm.library.entry import LibraryModel, Source
from localllm.placement.backends import gpus_here, place
from localllm.placement.llama import DEFAULT_RESERVE
from localllm.placement.placement import Placement
from localllm.placement.text_encoders import place_text_encoder
from localllm.server import loading
from localllm.server.catalog import CatalogEntry
from localllm.server.loading import MIB, MemoryLoader, granted_on_llama
from localllm.settings import Settings
from models.needs import native_needs
from models.text_encoder import encoder_needs
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
    monkeypatch.setattr(devices, "gpus", lambda: found)


def granted(
    path: Path, *promised: tuple[int, ...], others_on_gpus: bool = False, settings: Settings = SETTINGS
) -> Placement:
    with open_model(path) as file:
        placed = place(file, settings, room=MAIN, gpus=partial(gpus_here, promised))
    return granted_on_llama(placed, others_on_gpus)


def needs(monkeypatch: pytest.MonkeyPatch, path: Path) -> int:
    """Bytes of the whole model on a GPU."""
    with_gpus(monkeypatch, 2**35)
    (needed,) = granted(path).gpu_bytes
    assert needed > MIB
    return needed


def test_what_loads_were_promised_is_not_granted_again(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    needed = needs(monkeypatch, path)
    with_gpus(monkeypatch, 2 * needed)
    assert granted(path).gpu_bytes == (needed,)
    assert granted(path, (needed,)).gpu_bytes == (needed,)
    assert granted(path, (needed,), (needed,)).gpu_bytes == (0,)  # some main memory is left


def test_a_second_gpu_takes_what_the_first_has_promised_away(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    needed = needs(monkeypatch, path)
    with_gpus(monkeypatch, 2 * needed, 3 * needed // 2)
    assert granted(path).gpu_bytes == (needed, 0)
    assert granted(path, (needed, 0)).gpu_bytes[0] == 0 < granted(path, (needed, 0)).gpu_bytes[1]


def test_others_on_gpus_make_room_before_a_model_is_given_less(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    needed = needs(monkeypatch, path)
    with_gpus(monkeypatch, needed - 2**16)
    with pytest.raises(OutOfMemoryError, match="while the other models are loaded") as caught:
        granted(path, others_on_gpus=True)
    assert "GPU 0" in str(caught.value)  # the sums
    assert granted(path).gpu_bytes[0] < needed
    by_hand = replace(SETTINGS, gpu_layers=1)
    assert 0 < granted(path, others_on_gpus=True, settings=by_hand).gpu_bytes[0] < needed


def test_embedders_lie_whole_where_there_is_most_room(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    with open_model(path) as file:

        def placed(*promised: tuple[int, ...], room: int = MAIN, **settings: Any) -> Placement:
            gpus = partial(gpus_here, promised)
            return place_text_encoder(file, replace(SETTINGS, **settings), room=room, gpus=gpus)

        needed = placed(gpu_layers=0).checked().main_bytes
        with_gpus(monkeypatch, needed, 2 * needed)
        assert (placed().gpu_bytes, placed().options.main_gpu) == ((0, needed), 1)
        second = placed((0, 2 * needed))
        assert (second.gpu_bytes, second.options.main_gpu) == ((needed, 0), 0)
        assert 0 < second.main_bytes < needed
        neither = placed((needed, 2 * needed))
        assert (neither.gpu_bytes, neither.options.gpu_layers, neither.main_bytes) == ((), 0, needed)
        assert placed(gpu_layers=0).gpu_bytes == ()
        with pytest.raises(OutOfMemoryError, match="available"):
            placed(gpu_layers=0, room=needed).checked()
        ours = encoder_needs(file)
        native = placed(backend="native")
        assert (native.gpu_bytes, native.main_bytes) == ((), ours.weights + ours.buffers)


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_the_loader_hands_on_what_is_under_way(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    needed = needs(monkeypatch, path)
    with_gpus(monkeypatch, needed)
    loader, entry = MemoryLoader(SETTINGS), CatalogEntry("story", LibraryModel(("story",), Source.PATH, path))
    first = loader.plan(entry, False, [], [])
    assert first.gpu_bytes == (needed,)
    with pytest.raises(OutOfMemoryError, match="1 other models hold"):
        loader.plan(entry, False, [], [first])
    elsewhere = Placement("native", "", (Use("main memory", MIB),))
    assert loader.plan(entry, False, [], [elsewhere]).gpu_bytes == (needed,)


def test_a_native_model_shares_its_memory_only_if_much_is_left(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    settings = Settings(backend="native", max_models=2)
    loader, entry = MemoryLoader(settings), CatalogEntry("story", LibraryModel(("story",), Source.PATH, path))
    with open_model(path) as file:
        ample = loading.AMPLE_TOKENS * native_needs(file).kv_per_token // MIB
    for left in (ample + 2, 4 * ample):
        kv = 0
        for room in range(530, 530 + 8 * ample):  # from the least memory on that leaves this much
            monkeypatch.setattr(loading, "available_memory", lambda room=room: room * MIB)
            with open_model(path) as file:
                if place(file, settings, room=room * MIB).uses[0].kv // MIB >= left:
                    kv = loader.plan(entry, False, [], []).settings.kv_mib or 0
                    break
        assert kv == max(ample, left // 2)
