"""Models that draft for themselves: the same answers with and without drafting, right and wrong drafts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_io import open_model
from localllm.engine.disk_cache import DiskCache
from localllm.engine.drafter import SelfDrafter
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.speculation import DraftLength
from localllm.engine.stream import Completion
from models.native_runner import NativeRunner
from models.needs import native_needs
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.models.prediction_models import PREDICTING, counting
from tests.models.synthetic import write

SYSTEM = [(at * 13) % 290 + 3 for at in range(70)]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLength, "choose", lambda _self, limit, *_: max(min(limit, 4), 0))


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counting(tmp_path_factory.mktemp("models") / "counting.gguf")


def request(prompt: list[int], temperature: float = 0, most: int = 40) -> GenerationRequest:
    sampling = SamplingParams(temperature=temperature, seed=5, repeat_penalty=1.1)
    return GenerationRequest(tuple(prompt), sampling=sampling, max_tokens=most, ignore_eos=True)


REQUESTS = [request([*SYSTEM[: 20 + 9 * at], 7 + at, 100 + at], temperature=at % 3 / 2) for at in range(6)]


def answers(
    path: Path, *wanted: GenerationRequest, drafts: bool = True, folder: Path | None = None
) -> list[Completion]:
    """All at once; then wait until all KV is on disk."""
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=128 << 20, threads=2, drafts=drafts)
    assert runner.info.can_draft == drafts
    disk = DiskCache(folder, runner.info.kv_layout) if folder else None
    engine = Engine(runner, FakeVocabulary(), drafter=SelfDrafter(runner) if drafts else None, disk=disk)
    streams = [engine.submit(one) for one in wanted]
    while engine.step():
        engine.check_integrity()
    done = [stream.collect() for stream in streams]
    engine.close()
    return done


def texts(done: list[Completion]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in done]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", PREDICTING)
def test_answers_are_the_same_to_the_token(name: str, tmp_path: Path) -> None:
    path = write(PREDICTING[name], tmp_path / "model.gguf")
    plain = texts(answers(path, *REQUESTS, drafts=False))
    drafted = answers(path, *REQUESTS, folder=tmp_path / "kv")
    assert texts(drafted) == plain
    assert sum(each.last.counts.drafted for each in drafted) > 100
    again = answers(path, *REQUESTS, folder=tmp_path / "kv")
    assert texts(again) == plain


@pytest.mark.usefixtures("eager")
def test_marked_answers_are_the_same_together_alone_and_after_a_restart(tmp_path: Path) -> None:
    path = write(PREDICTING[min(PREDICTING)], tmp_path / "model.gguf")
    marked = [
        replace(one, sampling=replace(one.sampling, watermark_key="mine", watermark_delta=3.0)) for one in REQUESTS
    ]
    plain = texts(answers(path, *marked, drafts=False))
    assert plain != texts(answers(path, *REQUESTS, drafts=False))
    drafted = answers(path, *marked, folder=tmp_path / "kv")
    assert texts(drafted) == plain and sum(each.last.counts.drafted for each in drafted) > 100
    restarted = answers(path, *marked, folder=tmp_path / "kv")
    assert texts(restarted) == plain and restarted[0].last.counts.cached_disk > 0
    assert texts(answers(path, marked[-1])) == plain[-1:]


@pytest.mark.usefixtures("eager")
def test_right_guesses_are_accepted(counter: Path) -> None:
    prompt = [*range(3, 30)]
    (plain,) = answers(counter, request(prompt), drafts=False)
    (drafted,) = answers(counter, request(prompt))
    assert drafted.token_ids == plain.token_ids and len(set(plain.token_ids)) > 30
    assert drafted.last.counts.accepted == drafted.last.counts.drafted - 2 >= 25, "two guesses only measure a step"


@pytest.mark.usefixtures("eager")
def test_guesses_of_random_weights_are_wrong(tmp_path: Path) -> None:
    path = write(PREDICTING["qwen35"], tmp_path / "model.gguf")
    done = answers(path, *REQUESTS)
    drafted, accepted = (sum(getattr(each.last.counts, name) for each in done) for name in ("drafted", "accepted"))
    assert drafted > 100 and accepted < drafted / 5


def test_a_turn_continued_from_a_known_prefix_drafts(counter: Path) -> None:
    with open_model(counter) as file:
        runner = NativeRunner(file, kv_bytes=128 << 20, threads=2)
    engine = Engine(runner, FakeVocabulary(), drafter=SelfDrafter(runner))
    prompt = [*SYSTEM, *range(3, 30)]
    for _ in range(3):
        stream = engine.submit(request(prompt))
        while engine.step():
            engine.check_integrity()
        done = stream.collect()
        prompt = [*prompt, *done.token_ids, 5, 6, 7]
    assert done.last.counts.cached > 100
    engine.close()


def test_a_failure_ends_drafts_and_nothing_else(counter: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def follow(self, _wanted: object) -> None:
            pass

        def draft(self, _wanted: object) -> list[list[int]]:
            raise ValueError("no guesses today")

    with open_model(counter) as file:
        runner = NativeRunner(file, kv_bytes=128 << 20, threads=2)
    engine = Engine(runner, FakeVocabulary(), drafter=SelfDrafter(Failing()))
    stream = engine.submit(request([*range(3, 30)]))
    while engine.step():
        pass
    assert len(stream.collect().token_ids) == 40
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "no guesses today" in caplog.text
    engine.close()


def test_plans_count_what_drafts_take(tmp_path: Path) -> None:
    path = write(PREDICTING["glm4moe"], tmp_path / "model.gguf")
    with open_model(path) as file:
        with_drafts, without = (native_needs(file, threads=2, drafts=on) for on in (True, False))
        layer = sum(one.nbytes for name, one in file.tensors.items() if name.startswith("blk.3."))
    assert 0.9 * layer < with_drafts.weights - without.weights < 1.2 * layer
    assert with_drafts.buffers > without.buffers
    assert (with_drafts.kv_per_token, with_drafts.row) == (without.kv_per_token, without.row)
    assert np.isfinite(with_drafts.buffers)
