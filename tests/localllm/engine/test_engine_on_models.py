"""The engine on real tiny models: batched, cached, restored and speculated answers equal those computed alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_io import ModelFile, load_tokenizer, open_model
from localllm.engine.constraint import ConstraintKind, ConstraintVocabulary, compile_constraint
from localllm.engine.disk_cache import DiskCache
from localllm.engine.drafter import DraftModel
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.runner import Runner
from localllm.engine.sampling import Sampler
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
    from models.native_runner import NativeRunner

    return NativeRunner(model, kv_bytes=2**24, threads=1)


def requests(model: ModelFile) -> list[GenerationRequest]:
    """Eight clients: greedy and seeded, with and without penalties, two of them with a constraint."""
    tokenizer = load_tokenizer(model)
    words = compile_constraint(
        ConstraintKind.REGEX, "(( she| he| was| a| the| big| dog| very happy)+[.,])+", ConstraintVocabulary(tokenizer)
    )
    return [
        GenerationRequest(
            tuple(tokenizer.encode(prompt)),
            sampling=SamplingParams(temperature=0 if at % 2 else 0.9, seed=at, repeat_penalty=1.1 if at % 4 else 1),
            max_tokens=40,
            constraint=words if at in (3, 6) else None,
        )
        for at, prompt in enumerate(PROMPTS)
    ]


def answers(engine: Engine, wanted: list[GenerationRequest]) -> list[tuple[int, ...]]:
    streams = [engine.submit(request) for request in wanted]
    while engine.step():
        engine.check_integrity()
    return [stream.collect().token_ids for stream in streams]


def alone(runner: Runner, model: ModelFile, request: GenerationRequest) -> tuple[int, ...]:
    """The answer without an engine: one token per run, nothing reused, forced or drafted."""
    sampler = Sampler(request.sampling, runner.info.vocab_size, request.prompt)
    state = request.constraint.fork() if request.constraint else None
    sequence = runner.create_sequence()
    tokens, produced = list(request.prompt), 0
    eog = load_tokenizer(model).eog_ids
    while produced < (request.max_tokens or 0) and (produced == 0 or tokens[-1] not in eog):
        start = runner.sequence_length(sequence)
        rows = tokens[start:]
        logits = runner.run(rows, range(start, len(tokens)), [sequence] * len(rows), [len(rows) - 1])
        token, _ = sampler.sample(logits[0], state.mask() if state else None)
        sampler.accept(token)
        tokens.append(token)
        produced += 1
        if state and token not in eog:
            state.accept(token)
    runner.free_sequence(sequence)
    return tuple(tokens[len(request.prompt) :])


@pytest.fixture(params=["no guesses", "lookup", "draft model"])
def guesses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Disable speculation, or its self-assessment, which would turn it off on such small models."""
    wanted = 0 if request.param == "no guesses" else 4
    monkeypatch.setattr(DraftLength, "choose", lambda _self, limit, *_: max(min(limit, wanted), 0))
    return str(request.param)


def test_eight_clients_get_the_answers_they_get_alone(
    runner: Runner, model: ModelFile, tmp_path: Path, guesses: str, data_dir: Path
) -> None:
    """Cold, from memory, and after a restart from disk; greedy and seeded; with and without drafts."""
    backend = "llama" if runner.info.backend == "llama.cpp" else "native"
    wanted = requests(model)
    expected = [alone(runner, model, request) for request in wanted]

    def engine_on(runner: Runner) -> Engine:
        guesser = None
        if guesses == "draft model":
            with open_model(data_dir / "models" / "gguf" / "stories260K-Q4_K_M-fallback.gguf") as small:
                guesser = DraftModel(open_runner(backend, small))
        disk = DiskCache(tmp_path, runner.info.kv_layout, 2**26)
        return Engine(runner, load_tokenizer(model), disk=disk, drafter=guesser)

    engine = engine_on(runner)
    assert answers(engine, wanted) == expected
    assert engine.stats().reused_disk_tokens == 0
    assert answers(engine, wanted) == expected
    stats = engine.stats()
    assert stats.reused_memory_tokens > stats.prompt_tokens // 2
    engine.close()
    engine = engine_on(open_runner(backend, model))
    assert answers(engine, wanted) == expected
    assert engine.stats().reused_disk_tokens > 0
    assert (stats.accepted_tokens > 0) == (guesses != "no guesses")
    if guesses == "draft model":
        assert stats.drafted_tokens > stats.accepted_tokens > stats.generated_tokens // 4
    engine.close()
