"""Plans, grants, loads and what the server counts as held agree to the byte: they read the same record."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gguf_io import open_model
from localllm import advice
from localllm.library.entry import LibraryModel, Source
from localllm.placement.backends import DRAFT_KV_MIB, open_placed, place
from localllm.placement.companions import draft_file
from localllm.placement.placement import Placement
from localllm.server import loading
from localllm.server.catalog import CatalogEntry
from localllm.server.loading import MemoryLoader
from localllm.settings import Settings
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.oracle import llama_oracle
from tests.projector_files import write_projector

ROOM = 2**31
MIB = 2**20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: replace(MODELS[name], context=8192) for name in ("llama", "qwen35")}
    found = {
        name: write(model, folder / f"{name}.gguf", tokens=[f"<{at}>" for at in range(model.vocabulary)])
        for name, model in made.items()
    }
    tokens = [f"<{at}>" for at in range(made["llama"].vocabulary)]
    found["draft"] = write(replace(made["llama"], layers=1), folder / "draft.gguf", tokens=tokens)
    found["projector"] = write_projector(folder / "vision.gguf")
    found["native projector"] = write_projector(folder / "native.gguf", "gemma3", text=made["llama"].embedding)
    return found


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same free memory whenever it is asked for."""
    for module in (advice, loading):
        monkeypatch.setattr(module, "available_memory", lambda: ROOM)


def settings_of(files: dict[str, Path], **values: Any) -> Settings:
    draft, projector = values.pop("draft", False), values.pop("projector", False)
    files_of = {"draft": str(files["draft"]) if draft else None}
    kind = "native projector" if values.get("backend") == "native" else "projector"
    mmproj = str(files[kind]) if projector else "none"
    common = {"threads": 1, "max_models": 1, "disk_cache": False, "packed_mib": 0, "self_draft": False}
    return Settings(**common, **files_of, mmproj=mmproj, **values)


@contextmanager
def granted(path: Path, settings: Settings) -> Iterator[tuple[MemoryLoader, CatalogEntry, Placement]]:
    loader = MemoryLoader(settings)
    entry = CatalogEntry("model", LibraryModel(("model",), Source.PATH, path))
    yield loader, entry, loader.plan(entry, False, [], [])


NATIVE = [
    pytest.param(model, {"backend": "native", "draft": draft, "kv_mib": kv_mib, "ctx": ctx})
    for model, draft, kv_mib, ctx in product(("llama", "qwen35"), (False, True), (None, 16, 48), (None, 700, 4096))
]
NATIVE += [
    pytest.param("llama", {"backend": "native", "projector": True, "draft": draft, "kv_mib": kv_mib, "ctx": 700})
    for draft, kv_mib in product((False, True), (None, 48))
]
LLAMA = [
    pytest.param("llama", {"backend": "llama", "draft": draft, "projector": projector, "kv_mib": kv_mib, "ctx": ctx})
    for draft, projector, kv_mib, ctx in product((False, True), (False, True), (None, 16), (None, 700))
]


@pytest.mark.parametrize(("model", "values"), [*NATIVE, *LLAMA])
def test_a_plan_and_a_grant_are_the_same_bytes(model: str, values: dict[str, Any], files: dict[str, Path]) -> None:
    settings = settings_of(files, **values)
    with open_model(files[model]) as file:
        planned = advice.advise(file, settings)
        with draft_file(settings.draft) as draft:
            placed = place(file, settings, room=ROOM, draft=draft)
    with granted(files[model], settings) as (_, _, grant):
        pass
    assert grant.uses == placed.uses if settings.kv_mib or grant.backend == "llama" else grant.fits
    shown = planned.placement
    if settings.kv_mib is None and shown.backend == "native":  # shown with what the context needs; a load takes more
        assert any(f"{placed.tokens:,} tokens: kv_mib limits it" in note for note in shown.notes)
        with open_model(files[model]) as file, draft_file(settings.draft) as draft:
            ctx = settings.ctx or min(planned.longest_context, advice.USUAL_CONTEXT)
            alike = place(file, replace(settings, ctx=ctx), room=ROOM, draft=draft, kv_tokens=ctx)
        assert shown.uses == alike.uses
    else:
        assert shown.uses == placed.uses
    assert (shown.draft is None) is (settings.draft is None)
    if shown.draft is not None:
        assert shown.uses[0].other >= shown.draft.main_bytes > 0
        if shown.draft.backend == "native":
            assert shown.draft.uses[0].kv == DRAFT_KV_MIB * MIB


@pytest.mark.parametrize(("model", "projector"), [("llama", False), ("llama", True), ("qwen35", False)])
@pytest.mark.parametrize("draft", [False, True])
def test_a_native_load_holds_what_it_was_granted(
    model: str, projector: bool, draft: bool, files: dict[str, Path]
) -> None:
    settings = settings_of(files, backend="native", draft=draft, projector=projector, kv_mib=48, ctx=4096)
    with granted(files[model], settings) as (loader, entry, grant), loader.load(entry, False, grant, _silent) as loaded:
        assert loading.all_held([loaded], []) == grant.main_bytes == loaded.placement.main_bytes
        kv, stats = grant.uses[0].kv, loaded.engine.stats()
        assert kv == 48 * MIB
        assert 0 <= kv - grant.states - stats.pages_total * stats.page_bytes < stats.page_bytes
        assert stats.pages_total * loaded.engine.runner.info.page_size <= grant.tokens
        unused = kv + (DRAFT_KV_MIB * MIB if draft else 0)
        assert loading.promised_bytes(loaded) == unused - (stats.pages_total - stats.pages_free) * stats.page_bytes
        # A second model gets neither what is held nor what may still be used.
        second = MemoryLoader(replace(settings, memory_mib=ROOM // MIB))
        assert second.room([loaded], [grant]) == ROOM - max(unused + grant.main_bytes, 2 * grant.main_bytes)


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("projector", [False, True])
@pytest.mark.parametrize("draft", [False, True])
def test_a_llama_cpp_load_holds_what_it_was_granted(draft: bool, projector: bool, files: dict[str, Path]) -> None:
    settings = settings_of(files, backend="llama", draft=draft, projector=projector, ctx=512, gpu_layers=0)
    with open_model(files["llama"]) as file, draft_file(settings.draft) as beside:
        placed = place(file, replace(settings, gpu_layers=None), room=ROOM, draft=beside)
        assert placed.options.mmproj == (files["projector"] if projector else None)
        runner, loaded = open_placed(file, replace(placed, options=replace(placed.options, mmproj=None)))
        runner.close()
    assert loaded.uses == placed.uses
    assert runner.info.pages_total >= placed.tokens
    alone = settings_of(files, backend="llama", ctx=512)
    with open_model(files["llama"]) as file:
        without = place(file, alone, room=ROOM)
    more = sum(use.other for use in placed.uses) - sum(use.other for use in without.uses)
    beside_bytes = placed.draft.main_bytes + placed.draft.device_bytes if placed.draft else 0
    assert more == beside_bytes + (_projector_bytes(files["projector"]) if projector else 0)


def test_the_kv_budget_decides_the_longest_context(files: dict[str, Path]) -> None:
    with open_model(files["llama"]) as file:
        found = {
            kv_mib: advice.advise(file, settings_of(files, backend="native", kv_mib=kv_mib, ctx=8192))
            for kv_mib in (1, 2, 64)
        }
        wanted = {kv_mib: place(file, settings_of(files, backend="native", kv_mib=kv_mib)) for kv_mib in (1, 2, 64)}
    for kv_mib, told in found.items():
        assert told.placement.uses[0].kv == kv_mib * MIB
        held = min(8192, wanted[kv_mib].tokens)
        assert told.longest_context == (held if held == 8192 else held // advice.CONTEXT_STEP * advice.CONTEXT_STEP)
        short = [note for note in told.placement.notes if "holds fewer than the 8,192 tokens of ctx" in note]
        assert bool(short) is (held < 8192)
    assert found[1].longest_context < found[2].longest_context < found[64].longest_context == 8192


def _silent(_what: str, _share: float) -> None:
    """Report nothing."""


def _projector_bytes(path: Path) -> int:
    from gpu_offload.memory import projector_bytes

    return projector_bytes(path)
