"""A loaded model as front ends use it: loaded, rendered, constrained, trimmed."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_offload.options import Use
from localllm.answer.rendering import render
from localllm.engine.constraint import ConstraintKind
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest, SamplingParams, fit_prompt
from localllm.errors import OutOfMemoryError, RequestError
from localllm.placement import loaded_model
from localllm.placement.loaded_model import LoadedModel, load_model, release_memory
from localllm.placement.memory import LEAST_TOKENS, RESERVE_BYTES, place_from_disk, place_in_memory
from localllm.placement.placement import Placement
from localllm.settings import Settings
from models.needs import Needs
from tests.fakes.fake_runner import FakeRunner
from tests.localllm.engine.real_runners import KINDS


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[LoadedModel]:
    path = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    settings = Settings(backend=request.param, gpu_layers=0, ctx=400, threads=1, kv_mib=64, disk_cache=False)
    with load_model(path, settings) as loaded:
        yield loaded


def test_a_load_that_fails_after_its_weights_frees_them(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no home folder")

    runner = FakeRunner()
    monkeypatch.setattr(loaded_model, "open_placed", lambda *_: (runner, Placement("native", "", (Use(),))))
    monkeypatch.setattr(loaded_model, "disk_cache_of", fail)
    with pytest.raises(OSError, match="no home folder"):
        load_model(data_dir / "models" / "gguf" / "stories260K-F32.gguf", Settings())
    assert runner.closed


def test_a_draft_model_that_cannot_draft_is_freed(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    runner = FakeRunner(can_truncate=False)
    monkeypatch.setattr(loaded_model, "open_placed", lambda *_: (runner, Placement("native", "", (Use(),))))
    with pytest.raises(RequestError, match="cannot be cut back"):
        load_model(path, Settings(draft=str(path)))
    assert runner.closed


def conversation(turns: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Tell stories."}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"Tell story {turn}"},
            {"role": "assistant", "content": "She was happy."},
        ]
    return [*messages, {"role": "user", "content": "And then?"}]


def test_a_long_chat_drops_its_oldest_messages_and_keeps_the_cut(model: LoadedModel) -> None:
    cuts = []
    for turns in range(8, 30):
        prompt = render(model, conversation(turns))
        request = GenerationRequest(
            prompt.tokens, max_tokens=1, messages=prompt, context_policy=ContextPolicy.DROP_MESSAGES
        )
        counts = model.engine.submit(request).collect().last.counts
        assert counts.prompt < 400
        assert counts.prompt + counts.dropped_tokens == len(prompt.tokens)
        cuts.append(counts.dropped_messages)
        kept = conversation(turns)[:1] + conversation(turns)[1 + counts.dropped_messages :]
        assert tuple(fit_prompt(request, model.engine.context).tokens) == render(model, kept).tokens
    assert cuts[-1] > 0 and cuts == sorted(cuts)
    # The cut moves only now and then, not every turn, so that the prefix stays cached.
    assert len(set(cuts)) <= len(cuts) // 2


def test_answers_keep_to_a_constraint(model: LoadedModel) -> None:
    constraint = model.constraint(ConstraintKind.REGEX, r"(Lily|Tom) has [1-9][0-9]{0,3} cats\.")
    for seed in range(4):
        sampling = SamplingParams(temperature=seed / 2, seed=seed)
        request = GenerationRequest(
            tuple(model.tokenizer.encode("Once")), sampling, constraint=constraint, max_tokens=60
        )
        done = model.engine.submit(request).collect()
        assert done.last.finish_reason is FinishReason.STOP
        assert re.fullmatch(r"(Lily|Tom) has [1-9][0-9]{0,3} cats\.", done.text)
    with pytest.raises(RequestError):
        model.constraint(ConstraintKind.REGEX, "(")


def test_a_placement_in_memory_shows_its_sums() -> None:
    needs = Needs(weights=4 * 2**30, buffers=2**28, kv_per_token=2**17, position_bytes=2**9)
    placed = place_in_memory(needs, 1024, None, 8 * 2**30).checked()
    assert placed.uses[0].kv == 8 * 2**30 - 4 * 2**30 - 2**28 - 1024 * 2**9 - RESERVE_BYTES
    assert placed.main_bytes + RESERVE_BYTES == 8 * 2**30
    with pytest.raises(OutOfMemoryError, match=r"weights\s+4,096 MiB\n\s+buffers\s+256 MiB\n\s+KV cache\s+64 MiB"):
        place_in_memory(needs, 1024, None, 4 * 2**30).checked()
    with pytest.raises(OutOfMemoryError, match=r"KV cache\s+8,192 MiB(.|\n)*lower\.$"):
        place_in_memory(replace(needs, weights=2**30), 1024, 2**33, 2**32).checked()
    with pytest.raises(OutOfMemoryError, match=r"\(kv_mib\) higher: it holds 8 tokens\.$"):
        place_in_memory(needs, 1024, 2**20, 2**34).checked()
    with pytest.raises(OutOfMemoryError, match=r"draft\s+2,048 MiB"):
        place_in_memory(needs, 1024, None, 6 * 2**30, other=2**31).checked()


class Hybrid(Needs):
    """A model whose states take a part of the budget that holds no tokens."""

    def states(self, kv_bytes: int) -> int:
        return kv_bytes // 4


def test_a_placement_in_memory_counts_states() -> None:
    needs = Hybrid(2**30, 0, 2**14)
    placed = place_in_memory(needs, 1024, 2**30, 4 * 2**30)
    assert placed.tokens == (2**30 - 2**28) // 2**14
    assert re.search(r"KV cache\s+1,024 MiB\n\s+states\s+256 MiB", placed.sums())
    with pytest.raises(OutOfMemoryError, match=r"KV cache\s+1,024 MiB\n\s+states\s+1,024 MiB"):
        place_in_memory(Needs(2**30, 0, 2**14, fixed_states=2**30), 1024, 2**30, 4 * 2**30).checked()
    from_disk = place_from_disk(needs, LEAST_TOKENS, None, 2**30)
    assert from_disk.tokens == LEAST_TOKENS and from_disk.uses[0].kv == LEAST_TOKENS * 2**14 * 4 // 3


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_only_linux_is_asked_to_take_freed_memory_back(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no library of the whole process: asking for it raises TypeError."""
    trimmed: list[int] = []

    def library(name: str | None) -> SimpleNamespace:
        if system == "win32":
            raise TypeError(name)
        return SimpleNamespace(malloc_trim=trimmed.append)

    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("ctypes.CDLL", library)
    release_memory()
    assert trimmed == [0] * (system == "linux")
