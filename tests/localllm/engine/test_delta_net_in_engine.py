"""Chats of models with delta networks or scans: what is recomputed after an edit, a fork, a restart,
rejected drafts.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gguf_io import open_model
from localllm.engine.disk_cache import STATE_TOKENS, DiskCache
from localllm.engine.engine import Engine
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.localllm.engine.real_runners import answer, is_greedy
from tests.models.architecture_models import MODELS
from tests.models.state_checks import Counting
from tests.models.synthetic import write

PAGE = 16
SYSTEM = [(at * 13) % 290 + 3 for at in range(150)]
QUESTION = [(at * 7) % 290 + 3 for at in range(90)]
OTHER = [(at * 11) % 290 + 3 for at in range(40)]


@pytest.fixture(scope="module", params=["qwen35", "granitehybrid", "kimi-linear"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = replace(MODELS[request.param], context=2 * STATE_TOKENS)
    return write(model, tmp_path_factory.mktemp("models") / f"{request.param}.gguf")


def opened(path: Path, kind: type[Counting] = Counting) -> Counting:
    with open_model(path) as file:
        runner = kind(file, kv_bytes=256 << 20)
    runner.passes = []
    return runner


@pytest.fixture
def runner(path: Path) -> Iterator[Counting]:
    runner = opened(path)
    yield runner
    runner.close()


def test_an_edited_chat_computes_a_page_more_at_most(path: Path, runner: Counting) -> None:
    engine, fresh = Engine(runner, FakeVocabulary()), opened(path)
    first = answer(engine, SYSTEM + QUESTION)
    history = [*SYSTEM, *QUESTION, *first.token_ids]
    turns = {
        "next turn": (history + OTHER, len(history) - 1),
        "its last message edited": (history + OTHER[:3] + QUESTION, len(history) + 3),
        "the first message edited": (SYSTEM + OTHER, len(SYSTEM)),
        "another answer": (SYSTEM + QUESTION + OTHER, len(SYSTEM + QUESTION)),
    }
    for name, (prompt, known) in turns.items():
        runner.passes.clear()
        found = answer(engine, prompt, most=2)
        decoded = len(found.token_ids) - 1
        assert sum(runner.passes) <= len(prompt) - known + decoded + PAGE, name
        assert is_greedy(fresh, prompt, list(found.token_ids)), name
    engine.close()
    fresh.close()


def test_a_chat_continues_after_a_restart(path: Path, tmp_path: Path) -> None:
    prompt = SYSTEM * 2 + QUESTION
    runner = opened(path)
    layout = runner.info.kv_layout
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, layout, 2**28))
    first = answer(engine, prompt)
    engine.close()
    runner.close()
    again = opened(path)
    engine = Engine(again, FakeVocabulary(), disk=DiskCache(tmp_path, layout, 2**28))
    longer = [*prompt, *first.token_ids, *OTHER]
    found = answer(engine, longer, most=2)
    assert found.last.counts.cached_disk >= len(prompt)
    assert sum(again.passes) <= len(longer) - found.last.counts.cached_disk + len(found.token_ids) - 1 + PAGE
    assert is_greedy(again, longer, list(found.token_ids))
    engine.close()
    again.close()


LONG = [(at * 13 + at // 290) % 290 + 3 for at in range(STATE_TOKENS + 300)]


class Restored(Counting):
    """Records which states are imported."""

    states: list[int]

    def import_state(self, sequence: int, data: bytes | memoryview) -> None:
        self.states.append(self.sequence_length(sequence))
        super().import_state(sequence, data)


@pytest.mark.parametrize(
    ("kept", "state"),
    [
        (len(LONG), len(LONG) + 1),
        (len(LONG) - 40, STATE_TOKENS),
        (STATE_TOKENS + 3, STATE_TOKENS),
        (600, 512),
        (200, None),
    ],
)
def test_a_restart_takes_one_state(path: Path, tmp_path: Path, kept: int, state: int | None) -> None:
    """The state at the end, or at the last stored place before an edit."""
    tier, first = partial(DiskCache, tmp_path, limit_bytes=2**30), opened(path)
    engine = Engine(first, FakeVocabulary(), disk=tier(first.info.kv_layout))
    said = list(answer(engine, LONG, most=2).token_ids)
    engine.close()
    again = opened(path, Restored)
    assert isinstance(again, Restored)
    again.states = []
    engine = Engine(again, FakeVocabulary(), disk=tier(again.info.kv_layout))
    prompt = [*(LONG + said)[: kept + (kept == len(LONG))], *OTHER]
    found = answer(engine, prompt, most=2)
    assert again.states == ([] if state is None else [state])
    known = min(found.last.counts.cached_disk, state or 0)
    assert sum(again.passes) == len(prompt) - known + len(found.token_ids) - 1
    assert is_greedy(again, prompt, list(found.token_ids))
    engine.close()


class Refusing(Counting):
    """Takes states of another size only."""

    def import_state(self, sequence: int, data: bytes | memoryview) -> None:
        super().import_state(sequence, data[1:])


def test_a_state_that_is_refused_is_computed_again_and_keys_and_values_are_not(path: Path, tmp_path: Path) -> None:
    tier, first = partial(DiskCache, tmp_path, limit_bytes=2**30), opened(path)
    engine = Engine(first, FakeVocabulary(), disk=tier(first.info.kv_layout))
    prompt = SYSTEM + QUESTION
    said = list(answer(engine, prompt).token_ids)
    engine.close()
    again = opened(path, Refusing)
    engine = Engine(again, FakeVocabulary(), disk=tier(again.info.kv_layout))
    longer = prompt + said + OTHER
    found = answer(engine, longer, most=2)
    assert found.last.counts.cached_disk >= len(prompt)
    assert sum(again.passes) == len(longer) + len(found.token_ids) - 1
    assert is_greedy(again, longer, list(found.token_ids))
    engine.close()


def test_rejected_drafts_are_not_computed_again(path: Path, runner: Counting) -> None:
    """Prompt lookup drafts from repeated text; every computed row was planned."""
    engine, fresh = Engine(runner, FakeVocabulary()), opened(path)
    prompt = QUESTION[:40] * 6
    found = answer(engine, prompt, most=80)
    assert is_greedy(fresh, prompt, list(found.token_ids))
    planned = len(prompt) + len(found.token_ids) - 1 + found.last.counts.drafted - found.last.counts.accepted
    assert sum(runner.passes) <= planned
    engine.close()
    fresh.close()
