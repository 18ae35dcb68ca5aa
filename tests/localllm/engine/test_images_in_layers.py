"""Images of models with states or windows: edits, forks and restarts change no answer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.image_rows import ImageRows, grid_of, row_ids
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.stream import Completion
from models.config import read_config, reading_images
from models.native_runner import NativeRunner
from models.vision.projector import NativeProjector
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.gpu_offload.projector_runs import append, positions_of
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.projector_files import write_projector

SYSTEM = tuple((at * 13) % 290 + 3 for at in range(70))
QUESTION = tuple((at * 7) % 290 + 3 for at in range(45))
OTHER = tuple((at * 11) % 290 + 3 for at in range(20))


@pytest.fixture(scope="module", params=["qwen35", "lfm2", "gemma3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(MODELS[request.param], tmp_path_factory.mktemp("models") / f"{request.param}.gguf")


def opened(path: Path, together: int = 0) -> NativeRunner:
    """A runner with a projector, which makes none of the rows here. together: the most rows that see each other."""
    with open_model(path) as file:
        config = reading_images(file, read_config(file), together)
        runner = NativeRunner(file, kv_bytes=64 << 20, config=config, threads=1)
    with open_model(write_projector(path.with_name("projector.gguf"), "gemma4uv")) as file:
        runner.projector = NativeProjector(file, threads=1, context=512)
    return runner


def image_of(runner: NativeRunner, seed: int, lines: int = 10, columns: int = 5) -> ImageRows:
    width = runner.config.embedding
    rows = np.random.default_rng(seed).standard_normal((lines * columns, width)).astype(np.float32)
    grid = grid_of(lines, columns) if runner.config.rope.sections else None
    return ImageRows(row_ids(bytes([seed]), 0, len(rows)), rows, bool(runner.info.window_tokens), grid)


def asked(engine: Engine, *pieces: ImageRows | tuple[int, ...], most: int = 6) -> Completion:
    prompt = [one for piece in pieces for one in (piece.ids if isinstance(piece, ImageRows) else piece)]
    images = {piece.ids[0]: piece for piece in pieces if isinstance(piece, ImageRows)}
    sampling = SamplingParams(temperature=0)
    request = GenerationRequest(tuple(prompt), sampling=sampling, images=images, max_tokens=most, ignore_eos=True)
    stream = engine.submit(request)
    while engine.step():
        engine.check_integrity()
    return stream.collect()


def direct(runner: NativeRunner, *pieces: ImageRows | tuple[int, ...], most: int = 6) -> tuple[int, ...]:
    """The greedy answer of a runner alone, without token 0, which would end it."""
    sequence, position = runner.create_sequence(), positions_of(pieces)
    logits, found = append(runner, sequence, pieces, wanted=True), []
    while len(found) < most:
        found.append(1 + int(logits[-1][1:].argmax()))
        logits = append(runner, sequence, ((found[-1],),), True, position + len(found) - 1)
    runner.free_sequence(sequence)
    return tuple(found)


def test_turns_edits_and_restarts_answer_like_the_model_alone(path: Path, tmp_path: Path) -> None:
    alone = opened(path)
    first, second = image_of(alone, 1), image_of(alone, 2, 7, 3)
    for restarted in (False, True):
        runner = opened(path)
        engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, runner.info.kv_layout))
        begun = (SYSTEM, first, QUESTION)
        known = asked(engine, *begun).last.counts.cached_disk
        # On disk, a short text has the window of its end only, which is behind this prompt.
        stored = restarted and not runner.info.window_tokens
        assert known >= len(SYSTEM) + len(first.ids) if stored else not known
        for pieces in (
            begun,
            (*begun, OTHER),
            (SYSTEM, first, OTHER),
            (SYSTEM, first, QUESTION[:9] + OTHER, second, QUESTION),
            (SYSTEM[:30], second, QUESTION, first, OTHER),
        ):
            assert asked(engine, *pieces).token_ids == direct(alone, *pieces)
        said = tuple(asked(engine, *begun).token_ids)
        again = asked(engine, SYSTEM, first, QUESTION + said + OTHER)
        assert tuple(again.token_ids) == direct(alone, SYSTEM, first, QUESTION + said + OTHER)
        counts = again.last.counts
        assert counts.cached_memory + counts.cached_disk >= len(SYSTEM) + len(first.ids) + len(QUESTION)
        engine.close()
        runner.close()
    alone.close()


def test_answers_side_by_side_are_those_of_each_alone(path: Path) -> None:
    runner, alone = opened(path), opened(path)
    engine = Engine(runner, FakeVocabulary())
    prompts = [(SYSTEM, image_of(alone, seed, 4 + seed, 6), QUESTION[seed:]) for seed in range(1, 5)]
    streams = []
    for pieces in prompts:
        ids = [one for piece in pieces for one in (piece.ids if isinstance(piece, ImageRows) else piece)]
        sampling = SamplingParams(temperature=0)
        request = GenerationRequest(
            tuple(ids), sampling=sampling, images={pieces[1].ids[0]: pieces[1]}, max_tokens=6, ignore_eos=True
        )
        streams.append(engine.submit(request))
    while engine.step():
        engine.check_integrity()
    assert [stream.collect().token_ids for stream in streams] == [direct(alone, *pieces) for pieces in prompts]
    engine.close()
    alone.close()


def test_random_turns_edits_and_branches_answer_like_the_model_alone(path: Path, tmp_path: Path) -> None:
    alone, runner = opened(path), opened(path)
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, runner.info.kv_layout))
    dice = np.random.default_rng(3)
    images = [image_of(alone, seed, 3 + 4 * seed, 6) for seed in range(4)]
    chats: list[tuple[ImageRows | tuple[int, ...], ...]] = [(SYSTEM,)]
    for _ in range(24):
        chat = chats[dice.integers(len(chats))]
        if dice.random() < 0.4:  # an edit of an earlier message
            chat = chat[: dice.integers(1, len(chat) + 1)]
        text = tuple(map(int, dice.integers(3, 290, dice.integers(1, 60))))
        chat = (*chat, images[dice.integers(len(images))], text) if dice.random() < 0.5 else (*chat, text)
        if sum(len(piece.ids if isinstance(piece, ImageRows) else piece) for piece in chat) > 900:
            continue
        said = tuple(asked(engine, *chat).token_ids)
        assert said == direct(alone, *chat)
        chats.append((*chat, said))
    engine.close()
    alone.close()


def test_a_restart_restores_an_image_of_more_rows_than_a_step_of_text_has(tmp_path: Path) -> None:
    """1,120 rows that see each other, the most of Gemma 4's pictures; its windows are shorter."""
    path = write(replace(MODELS["gemma4-odd"], context=2048), tmp_path / "model.gguf")
    alone = opened(path, 1120)
    image = replace(image_of(alone, 1, 40, 28), sees_all=True)
    begun = (SYSTEM, image, QUESTION)
    said: tuple[int, ...] = ()
    for restarted in (False, True):
        runner = opened(path, 1120)
        engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path / "kv", runner.info.kv_layout))
        pieces = (*begun[:2], QUESTION + said + OTHER) if restarted else begun
        completion = asked(engine, *pieces)
        said = tuple(completion.token_ids)
        assert said == direct(alone, *pieces)
        counts = completion.last.counts
        assert counts.cached_disk >= len(SYSTEM) + 1120 if restarted else counts.cached == 0
        engine.close()
        runner.close()
    alone.close()
