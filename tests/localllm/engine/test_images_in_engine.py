"""Images in the engine: computed whole, reused like any prefix, distinguished, never split."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_io import load_chat_template, load_tokenizer, open_model
from gguf_io.tokenizer import Tokenizer
from gpu_offload import loading
from gpu_offload.image_rows import ImagePieces, ImageRows
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.answer.rendering import render
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest, SamplingParams
from localllm.errors import ContextOverflowError, RequestError
from localllm.placement.loaded_model import LoadedModel
from localllm.placement.placement import Placement
from tests.gpu_offload.projector_files import png, write_projector
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

BEFORE, AFTER = "Once upon a time there was", "and a dog ran to"
ANSWER = 8


@pytest.fixture(scope="module")
def path(data_dir: Path) -> Path:
    return data_dir / "models" / "gguf" / "stories260K-F32.gguf"


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(path)


@pytest.fixture(scope="module", params=["mlp", "gemma3"])
def projector(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("projectors") / "mmproj.gguf", request.param)


def opened(path: Path, projector: Path, cells: int = 512) -> LlamaCppRunner:
    options = LlamaOptions(
        context_tokens=cells, max_sequences=8, batch_rows=32, threads=1, gpu_layers=0, mmproj=projector
    )
    with open_model(path) as model:
        return LlamaCppRunner(model, options)


@pytest.fixture
def runner(path: Path, projector: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaCppRunner]:
    monkeypatch.setattr(loading, "can_repack", lambda: False)
    made = opened(path, projector)
    yield made
    made.close()


def seen(runner: LlamaCppRunner, seed: int) -> ImagePieces:
    assert runner.projector is not None
    return runner.projector.see(png(seed))


def asked(pieces: ImagePieces, tokenizer: Tokenizer, after: str = AFTER, **more: Any) -> GenerationRequest:
    """Text, an image, text."""
    prompt = tokenizer.encode(BEFORE)
    rows = {}
    for piece in pieces:
        prompt += piece.ids if isinstance(piece, ImageRows) else piece
        if isinstance(piece, ImageRows):
            rows[piece.ids[0]] = piece
    prompt += tokenizer.encode(after, add_special=False)
    options: dict[str, Any] = {"max_tokens": ANSWER, "ignore_eos": True} | more
    return GenerationRequest(tuple(prompt), sampling=SamplingParams(temperature=0), images=rows, **options)


def direct(runner: LlamaCppRunner, request: GenerationRequest) -> list[int]:
    """The greedy answer, computed by the runner alone, text token by token."""
    sequence = runner.create_sequence()
    logits = np.empty(0)
    at = 0

    def append(token: int) -> Any:
        position = runner.sequence_length(sequence)
        return np.array(runner.run([token], [position], [sequence], [0])[0])

    while at < len(request.prompt):
        if rows := request.images.get(request.prompt[at]):
            runner.append_image(sequence, rows)
            at += len(rows.ids)
        else:
            logits = append(request.prompt[at])
            at += 1
    answer = []
    for _ in range(request.max_tokens or 0):
        answer.append(int(logits.argmax()))
        logits = append(answer[-1])
    runner.free_sequence(sequence)
    return answer


def run_all(engine: Engine) -> None:
    while engine.step():
        engine.check_integrity()


def test_answers_are_those_of_the_runner_and_images_are_reused_like_any_prefix(
    runner: LlamaCppRunner, tokenizer: Tokenizer
) -> None:
    requests = [asked(seen(runner, seed), tokenizer) for seed in (1, 2)]
    expected = [direct(runner, request) for request in requests]
    engine = Engine(runner, tokenizer)
    streams = [engine.submit(request) for request in requests]
    run_all(engine)
    found = [stream.collect() for stream in streams]
    assert [list(completion.token_ids) for completion in found] == expected

    follow_up = asked(seen(runner, 1), tokenizer, "and a cat sat on")
    answer = direct(runner, follow_up)
    stream = engine.submit(follow_up)
    run_all(engine)
    whole = len(follow_up.prompt) - len(tokenizer.encode("and a cat sat on", add_special=False))
    completion = stream.collect()
    assert list(completion.token_ids) == answer
    assert completion.last.counts.cached_memory >= whole
    assert completion.last.counts.prompt == len(follow_up.prompt)

    other = engine.submit(asked(seen(runner, 3), tokenizer))
    run_all(engine)
    text = next(at for at, token in enumerate(requests[0].prompt) if token in requests[0].images)
    assert other.collect().last.counts.cached_memory == text
    engine.close()


def test_a_prefix_that_ends_inside_of_an_image_is_used_up_to_the_image(
    path: Path, projector: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "can_repack", lambda: False)
    runner = opened(path, projector, cells=256)
    request = asked(seen(runner, 1), tokenizer, max_tokens=1)
    expected = direct(runner, request)
    engine = Engine(runner, tokenizer)
    first = engine.submit(request)
    run_all(engine)
    first.collect()
    start = next(at for at, token in enumerate(request.prompt) if token in request.images)
    engine._kv.cache.evict(engine._kv.cache.tokens - start - 2)  # two rows of the image are kept
    again = engine.submit(request)
    run_all(engine)
    completion = again.collect()
    assert list(completion.token_ids) == expected
    assert completion.last.counts.cached_memory == start
    engine.close()


def test_what_would_cut_an_image_is_refused(runner: LlamaCppRunner, tokenizer: Tokenizer) -> None:
    engine = Engine(runner, tokenizer, context_limit=64)
    request = asked(seen(runner, 1), tokenizer)
    rows = next(iter(request.images.values()))
    bare = request.prompt[: request.prompt.index(rows.ids[0])]
    for prompt, problem in [
        ((*bare, *rows.ids), "ends with an image"),
        ((*bare, *rows.ids[:2], 5), "is incomplete"),
        ((*bare, rows.ids[1], 5), "outside the vocabulary"),
    ]:
        with pytest.raises(RequestError, match=problem):
            engine.submit(GenerationRequest(prompt, images=request.images))
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.submit(GenerationRequest(request.prompt))
    rolling = asked(seen(runner, 1), tokenizer, max_tokens=None, context_policy=ContextPolicy.ROLLING)
    stream = engine.submit(rolling)
    run_all(engine)
    last = stream.collect().last
    assert (last.finish_reason, last.counts.dropped_tokens) == (FinishReason.LENGTH, 0)
    long = asked(seen(runner, 1), tokenizer, AFTER * 20, context_policy=ContextPolicy.ROLLING)
    with pytest.raises(ContextOverflowError):
        engine.submit(long)
    engine.close()


def test_conversations_with_images(path: Path, runner: LlamaCppRunner, tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = open_model(path)
    engine = Engine(runner, tokenizer, disk=DiskCache(tmp_path, runner.info.kv_layout))
    engine.start()
    with LoadedModel(file, tokenizer, load_chat_template(file), engine, Placement("llama", "")) as model:
        assert model.sees_images
        image = {"type": "image", "data": png(1)}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": "Look: </s>"}, image, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": "A dog. " * 20},
            {"role": "user", "content": [{"type": "image", "data": png(2)}, {"type": "text", "text": "And this?"}]},
        ]
        prompt = render(model, messages)
        pieces = [piece for seed in (1, 2) for piece in seen(runner, seed) if isinstance(piece, ImageRows)]
        assert set(prompt.images) == {piece.ids[0] for piece in pieces}
        assert [token for token in prompt.tokens if token >= 2**62] == [
            token for piece in pieces for token in piece.ids
        ]
        assert tokenizer.eos_id not in prompt.tokens[1 : prompt.tokens.index(pieces[0].ids[0])]

        shorter = GenerationRequest(
            prompt.tokens,
            images=prompt.images,
            messages=prompt,
            context_policy=ContextPolicy.DROP_MESSAGES,
            context_limit=len(prompt.tokens) - 1,
            max_tokens=1,
        )
        counts = engine.submit(shorter).collect().last.counts
        assert counts.dropped_messages == 2
        alone = render(model, messages[2:])
        assert counts.prompt == len(alone.tokens)
