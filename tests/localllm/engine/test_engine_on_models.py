"""The engine on real tiny models: together, cached, restored and speculated as alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_io import ModelFile, load_tokenizer, open_model
from localllm.engine.disk_cache import DiskCache
from localllm.engine.draft_model import DraftModel
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.runner import Runner
from localllm.engine.speculation import DraftLength

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
PROMPTS = [STORY * 2 + ending for ending in ("One", "One day", "The", "She", "He", "Her mom", "The cat", "A")]


@pytest.fixture(scope="module")
def model(data_dir: Path) -> Iterator[ModelFile]:
    with open_model(data_dir / "models" / "gguf" / "stories260K-F32.gguf") as file:
        yield file


@pytest.fixture(params=[pytest.param("llama", marks=pytest.mark.oracle), "native"])
def runner(request: pytest.FixtureRequest, model: ModelFile) -> Iterator[Runner]:
    opened = open_runner(request.param, model)
    yield opened
    opened.close()


def open_runner(backend: str, model: ModelFile) -> Runner:
    if backend == "llama":
        pytest.importorskip("llama_cpp", reason="needs the llama extra")
        from gpu_offload.options import LlamaOptions
        from gpu_offload.runner import LlamaCppRunner

        return LlamaCppRunner(model, LlamaOptions(context_tokens=8192, max_sequences=24, gpu_layers=0, threads=1))
    from models import NativeRunner

    return NativeRunner(model, kv_bytes=2**24, threads=1)


def requests(model: ModelFile) -> list[GenerationRequest]:
    tokenizer = load_tokenizer(model)
    return [
        GenerationRequest(
            tuple(tokenizer.encode(prompt)),
            sampling=SamplingParams(temperature=0 if at % 2 else 0.9, seed=at, repeat_penalty=1.1 if at % 4 else 1),
            max_tokens=40,
        )
        for at, prompt in enumerate(PROMPTS)
    ]


def answers(engine: Engine, wanted: list[GenerationRequest]) -> list[tuple[int, ...]]:
    streams = [engine.submit(request) for request in wanted]
    while engine.step():
        engine.check_integrity()
    return [stream.collect().token_ids for stream in streams]


def alone(runner: Runner, model: ModelFile, request: GenerationRequest) -> tuple[int, ...]:
    """The answer without engine: one token a run, nothing reused."""
    from localllm.engine.sampling import Sampler

    sampler = Sampler(request.sampling, runner.vocab_size, request.prompt)
    sequence = runner.create_sequence()
    tokens, produced = list(request.prompt), 0
    eog = load_tokenizer(model).eog_ids
    while produced < (request.max_tokens or 0) and (produced == 0 or tokens[-1] not in eog):
        start = runner.sequence_length(sequence)
        rows = tokens[start:]
        logits = runner.run(rows, range(start, len(tokens)), [sequence] * len(rows), [len(rows) - 1])
        token, _ = sampler.sample(logits[0])
        sampler.accept(token)
        tokens.append(token)
        produced += 1
    runner.free_sequence(sequence)
    return tuple(tokens[len(request.prompt) :])


def test_eight_clients_get_the_answers_they_get_alone(runner: Runner, model: ModelFile, tmp_path: Path) -> None:
    wanted = requests(model)
    expected = [alone(runner, model, request) for request in wanted]
    engine = Engine(runner, load_tokenizer(model), disk=DiskCache(tmp_path, runner.kv_identity, 2**26))
    assert answers(engine, wanted) == expected
    assert answers(engine, wanted) == expected
    stats = engine.stats()
    assert stats.reused_memory_tokens > stats.prompt_tokens // 2
    assert stats.accepted_tokens > 0
    engine.close()


def test_a_restart_restores_from_the_disk(model: ModelFile, tmp_path: Path, runner: Runner) -> None:
    wanted = requests(model)[:3]
    engine = Engine(runner, load_tokenizer(model), disk=DiskCache(tmp_path, runner.kv_identity, 2**26))
    before = answers(engine, wanted)
    engine.close()
    backend = "llama" if runner.backend == "llama.cpp" else "native"
    engine = Engine(
        open_runner(backend, model), load_tokenizer(model), disk=DiskCache(tmp_path, runner.kv_identity, 2**26)
    )
    assert answers(engine, wanted) == before
    assert engine.stats().reused_disk_tokens > 0
    engine.close()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation that never judges itself: on models as small as these it would turn itself off."""
    monkeypatch.setattr(DraftLength, "choose", lambda _self, limit, *_: max(min(limit, 4), 0))


@pytest.mark.usefixtures("eager")
def test_a_draft_model_changes_no_answer(runner: Runner, model: ModelFile, data_dir: Path) -> None:
    wanted = requests(model)
    expected = [alone(runner, model, request) for request in wanted]
    backend = "llama" if runner.backend == "llama.cpp" else "native"
    with open_model(data_dir / "models" / "gguf" / "stories260K-Q4_K_M-fallback.gguf") as small:
        draft_model = DraftModel(open_runner(backend, small))
    engine = Engine(runner, load_tokenizer(model), draft_model=draft_model)
    assert answers(engine, wanted) == expected
    assert answers(engine, wanted) == expected
    stats = engine.stats()
    assert stats.drafted_tokens > stats.accepted_tokens > stats.generated_tokens // 4
    engine.close()
