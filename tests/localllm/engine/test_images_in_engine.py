"""Images in the engine: computed whole, reused like any prefix, distinguished, never split."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_io import load_chat_template, load_tokenizer, open_model
from gguf_io.image_rows import ImagePieces, ImageRows
from gguf_io.tokenizer import Tokenizer
from gpu_offload import loading
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.answer.rendering import render
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import ContextPolicy, FinishReason, GenerationRequest, SamplingParams
from localllm.errors import ContextOverflowError, RequestError
from localllm.placement.loaded_model import LoadedModel
from localllm.placement.placement import Placement
from localllm.settings import Settings
from models.native_runner import NativeRunner
from models.needs import native_needs
from models.vision.projector import NativeProjector
from tests.gpu_offload.projector_runs import see
from tests.oracle import llama_oracle
from tests.picture_files import png
from tests.projector_files import write_projector

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

AnyRunner = LlamaCppRunner | NativeRunner

BEFORE, AFTER = "Once upon a time there was", "and a dog ran to"
ANSWER = 8


@pytest.fixture(scope="module")
def path(data_dir: Path) -> Path:
    return data_dir / "models" / "gguf" / "stories260K-F32.gguf"


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(path)


@pytest.fixture(scope="module", params=["llama mlp", "llama gemma3", "native gemma3"])
def backend_and_projector(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    backend, kind = request.param.split()
    return backend, write_projector(tmp_path_factory.mktemp("projectors") / "mmproj.gguf", kind)


def opened(path: Path, backend: str, projector: Path, cells: int = 512) -> AnyRunner:
    if backend == "native":
        with open_model(path) as model, open_model(projector) as file:
            needs = native_needs(model, together=0)
            runner = NativeRunner(model, kv_bytes=cells * needs.kv_per_token, threads=1, config=needs.config)
            runner.projector = NativeProjector(file, threads=1, context=512)
            return runner
    options = LlamaOptions(
        context_tokens=cells, max_sequences=8, batch_rows=32, threads=1, gpu_layers=0, mmproj=projector
    )
    with open_model(path) as model:
        return LlamaCppRunner(model, options)


@pytest.fixture
def runner(path: Path, backend_and_projector: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[AnyRunner]:
    monkeypatch.setattr(loading, "can_repack", lambda: False)
    made = opened(path, *backend_and_projector)
    yield made
    made.close()


def seen(runner: AnyRunner, seed: int) -> ImagePieces:
    """A picture without the texts around it, whose tokens this vocabulary may lack."""
    return tuple(piece for piece in see(runner, png(seed)) if not isinstance(piece, str))


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


def direct(runner: AnyRunner, request: GenerationRequest) -> list[int]:
    """The greedy answer, computed by the runner alone, text token by token."""
    sequence = runner.create_sequence()
    logits = np.empty(0)
    at = 0

    def append(token: int) -> Any:
        position = runner.sequence_length(sequence)
        return np.array(runner.run([token], [position], [sequence], [0])[0])

    while at < len(request.prompt):
        if rows := request.images.get(request.prompt[at]):
            runner.append_image(sequence, rows, runner.sequence_length(sequence))
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
    runner: AnyRunner, tokenizer: Tokenizer
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
    path: Path, backend_and_projector: tuple[str, Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend_and_projector[0] == "native":
        pytest.skip("its pages have more tokens than this picture")
    monkeypatch.setattr(loading, "can_repack", lambda: False)
    runner = opened(path, *backend_and_projector, cells=256)
    request = asked(seen(runner, 1), tokenizer, max_tokens=1)
    expected = direct(runner, request)
    engine = Engine(runner, tokenizer)
    first = engine.submit(request)
    run_all(engine)
    first.collect()
    start = next(at for at, token in enumerate(request.prompt) if token in request.images)
    engine.kv.cache.evict(engine.kv.cache.tokens - start - 2)  # two rows of the image are kept
    again = engine.submit(request)
    run_all(engine)
    completion = again.collect()
    assert list(completion.token_ids) == expected
    assert completion.last.counts.cached_memory == start
    engine.close()


def test_a_restart_restores_images(
    path: Path, backend_and_projector: tuple[str, Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    if backend_and_projector[0] != "native":
        pytest.skip("llama.cpp's runner stores the text before the first image only")
    found = []
    for seed, text in ((1, AFTER * 8), (1, AFTER * 8 + " and on"), (2, AFTER * 8)):
        runner = opened(path, *backend_and_projector)
        engine = Engine(runner, tokenizer, disk=DiskCache(tmp_path, runner.info.kv_layout))
        request = asked(seen(runner, seed), tokenizer, text)
        expected = direct(runner, request)
        stream = engine.submit(request)
        run_all(engine)
        completion = stream.collect()
        assert list(completion.token_ids) == expected
        found.append(completion.last.counts.cached_disk)
        whole = len(request.prompt)
        engine.close()
    assert found[0] == 0
    assert found[1] > whole * 0.8  # the image with what follows it
    assert found[2] == 0  # another image, and too little text before it


def test_what_would_cut_an_image_is_refused(runner: AnyRunner, tokenizer: Tokenizer) -> None:
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


def test_conversations_with_images(
    path: Path,
    runner: AnyRunner,
    backend_and_projector: tuple[str, Path],
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    file = open_model(path)
    placed = Placement(
        "llama", "", options=LlamaOptions(mmproj=backend_and_projector[1]), settings=Settings(disk_cache=False)
    )
    engine = Engine(runner, tokenizer, disk=DiskCache(tmp_path, runner.info.kv_layout))
    engine.start()
    with LoadedModel(file, tokenizer, load_chat_template(file), engine, placed) as model:
        assert model.sees_images
        image = {"type": "image", "data": png(1)}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": "Look: </s>"}, image, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": "A dog. " * 20},
            {"role": "user", "content": [{"type": "image", "data": png(2)}, {"type": "text", "text": "And this?"}]},
        ]
        prompt = render(model, messages)
        pieces = [piece for seed in (1, 2) for piece in model.see(png(seed)).pieces if isinstance(piece, ImageRows)]
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
