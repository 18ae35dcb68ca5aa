"""Chats of models with sliding windows: what is kept, and what is computed after a turn, an edit, a fork, a restart."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_io import open_model
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from models import decoder_program
from models.native_runner import NativeRunner
from models.needs import native_needs
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.localllm.engine.real_runners import answer, is_greedy
from tests.models.architecture_models import MODELS
from tests.models.gemma_models import GEMMA_MODELS
from tests.models.mixture_models import CHUNKED
from tests.models.state_checks import Counting, opened
from tests.models.synthetic import write

PAGE = 16
WINDOW = 40
APART = 1024
"""The distance of windows that are kept in long texts, with windows this short."""
CONTEXT = 4096


def text(seed: int, length: int) -> list[int]:
    return [(seed + at * 7 + at * at // 3) % 290 + 3 for at in range(length)]


def is_chunked(path: Path) -> bool:
    """Whether windows are chunks, at whose starts nothing before them is needed."""
    return path.stem == "llama4-chunks"


def unlimited(*_: object) -> None:
    """In place of window_layers: all tokens of all layers are kept."""


@pytest.fixture(scope="module", params=["gemma3", "gemma4", "gpt-oss", "llama4-chunks"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = replace({**MODELS, **GEMMA_MODELS, **CHUNKED}[request.param], context=CONTEXT)
    return write(model, tmp_path_factory.mktemp("models") / f"{request.param}.gguf")


@pytest.fixture
def runner(path: Path) -> Iterator[Counting]:
    runner = opened(path)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def reference(path: Path) -> Iterator[NativeRunner]:
    """The same model with all keys and values kept."""
    with pytest.MonkeyPatch.context() as patch, open_model(path) as file:
        patch.setattr(decoder_program, "window_layers", unlimited)
        runner = NativeRunner(file, kv_bytes=64 << 20)
    yield runner
    runner.close()


def read(runner: NativeRunner, sequence: int, tokens: list[int], chunks: tuple[int, ...] = (512,)) -> np.ndarray:
    """Append tokens in chunks of these sizes, the last one repeated; return the logits of the last row of each."""
    rows, at, sizes = [], 0, [*chunks]
    start = runner.sequence_length(sequence)
    while at < len(tokens):
        count = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], len(tokens) - at)
        positions = range(start + at, start + at + count)
        rows.append(runner.run(tokens[at : at + count], positions, [sequence] * count, [count - 1])[0].copy())
        at += count
    return np.array(rows)


def test_freed_windows_change_no_logits(runner: Counting, reference: NativeRunner) -> None:
    tokens, chunks = text(1, 1500), (100, 300, 1, 1, 7, 512, 1, 33)
    found = []
    for one in (runner, reference):
        sequence = one.create_sequence()
        found.append(read(one, sequence, tokens, chunks))
        one.free_sequence(sequence)
    np.testing.assert_array_equal(*found)
    runner.check_integrity(set())
    assert runner.pages_free() == runner.info.pages_total


def test_a_long_text_keeps_the_window_of_some_layers_only(path: Path) -> None:
    """Exactly the planned memory suffices for the planned tokens, in chunks and token by token."""
    with open_model(path) as file:
        needs = native_needs(file)
    budget = needs.kv(3000)
    assert needs.window_tokens <= WINDOW + 512 + 4 * PAGE
    assert budget == 3000 * needs.kv_per_token + needs.window_tokens * needs.window_per_token
    assert 2999 <= needs.tokens(budget) <= 3000
    runner = opened(path, budget)
    most = runner.info.tokens_within(runner.info.pages_total)
    assert 3000 - 2 * PAGE <= most <= 3000
    assert runner.info.pages_of(most) <= runner.info.pages_total
    sequence = runner.create_sequence()
    read(runner, sequence, text(2, most - 40), (512,))
    read(runner, sequence, text(2, 40), (1,))
    assert runner.sequence_length(sequence) == most
    runner.check_integrity({sequence})
    runner.close()


def test_a_sequence_without_its_window_is_refused(path: Path, runner: Counting) -> None:
    sequence = runner.create_sequence()
    read(runner, sequence, text(3, 600), (200,))
    assert runner.reusable(sequence, 600) == 600
    assert runner.reusable(sequence, 300) == (288 if is_chunked(path) else 0)
    fork = runner.fork_sequence(sequence, 300)
    with pytest.raises(ValueError, match="lost the window"):
        runner.run([5], [300], [fork], [0])
    runner.check_integrity({sequence, fork})
    runner.free_sequence(fork)
    runner.free_sequence(sequence)


def test_windows_at_branches_and_fixed_distances_are_kept(
    path: Path, runner: Counting, reference: NativeRunner
) -> None:
    tokens, other = text(4, 2 * APART + 300), text(5, 200)
    sequence = runner.create_sequence()
    read(runner, sequence, tokens[:500])
    runner.keep_window(sequence, 437)
    read(runner, sequence, tokens[500:])
    far = 2 * APART - 100
    others = ((500, 480), (far, 1920)) if is_chunked(path) else ((500, 448), (far, APART))
    for length, kept in ((437, 437), (450, 448), (APART, APART), *others):
        assert runner.reusable(sequence, length) == kept
    fork = runner.fork_sequence(sequence, 437)
    again = runner.create_sequence()
    expected = reference.create_sequence()
    read(reference, expected, tokens[:437])
    np.testing.assert_array_equal(read(runner, fork, other, (1, 150)), read(reference, expected, other, (1, 150)))
    runner.check_integrity({sequence, fork, again})
    reference.free_sequence(expected)
    for one in (sequence, fork, again):
        runner.free_sequence(one)
    assert runner.pages_free() == runner.info.pages_total


def test_turns_and_edits_compute_what_is_new(path: Path, runner: Counting, reference: NativeRunner) -> None:
    engine = Engine(runner, FakeVocabulary())
    system, question, other = text(6, 300), text(7, 200), text(8, 100)
    first = answer(engine, system + question, most=60, shared_prefix=len(system))
    history = [*system, *question, *first.token_ids]
    second = answer(engine, history + other, most=60)
    longer = [*history, *other, *second.token_ids]
    turns = {
        "next turn": (longer + question, len(longer) - 1),
        "regenerate": (history + other, len(history + other) - 1),
        "last message edited": (history + question, len(history) - 1),
        "first message edited": (system + other, len(system)),
        "back to the longest branch": (longer + question[:50], len(longer) - 1),
        "an edit within a message": (history + other[:50] + question, len(history) - 1),
    }
    for name, (prompt, known) in turns.items():
        runner.passes.clear()
        asked = engine.expected_counts(GenerationRequest(tuple(prompt)))
        engine.step()
        found = answer(engine, prompt, most=2)
        assert asked.result(0).cached == found.last.counts.cached, name
        decoded = len(found.token_ids) - 1
        assert sum(runner.passes) <= len(prompt) - known + decoded + PAGE, name
        assert is_greedy(reference, prompt, list(found.token_ids)), name
    engine.close()


def test_a_branch_that_nothing_kept_is_computed_once(path: Path, runner: Counting, reference: NativeRunner) -> None:
    engine = Engine(runner, FakeVocabulary())
    common = text(9, 700)
    answer(engine, common + text(10, 300), most=2)
    computed = []
    for seed in (11, 12, 13):
        runner.passes.clear()
        prompt = common + text(seed, 60)
        found = answer(engine, prompt, most=2)
        computed.append(sum(runner.passes))
        assert is_greedy(reference, prompt, list(found.token_ids))
    look = engine.inspect()
    engine.step()
    shown, stats = look.result(), engine.stats()
    assert (shown.window_pages, shown.kept_window_pages) == (stats.window_pages, stats.kept_window_pages)
    held = int((shown.page_holders > 0).sum()) + shown.window_pages
    assert 0 < shown.window_pages <= held <= stats.pages_total - stats.pages_free <= held + 1
    assert shown.kept_window_pages > 0
    assert computed[0] == (700 % 32 + 61 if is_chunked(path) else 761)
    assert max(computed[1:]) <= 62 + PAGE
    engine.close()


def test_a_chat_continues_after_a_restart(
    path: Path, runner: Counting, reference: NativeRunner, tmp_path: Path
) -> None:
    prompt = text(14, 2 * APART + 500)

    def start(runner: NativeRunner) -> Engine:
        return Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, runner.info.kv_layout, 1 << 30))

    engine = start(runner)
    first = answer(engine, prompt)
    engine.close()
    history = [*prompt, *first.token_ids]
    for asked, known in (
        (history + text(15, 40), len(history) - 1),
        (prompt[: APART + 300] + text(16, 40), APART),
    ):
        again = opened(path)
        engine = start(again)
        expected = engine.expected_counts(GenerationRequest(tuple(asked)))
        engine.step()
        found = answer(engine, asked, most=3)
        counts = found.last.counts
        assert expected.result(0).cached_disk == counts.cached_disk == counts.cached > 0
        assert sum(again.passes) <= len(asked) - known + len(found.token_ids) + PAGE
        assert is_greedy(reference, asked, list(found.token_ids))
        engine.close()


CHATS = """
import os
import sys
import threading
from pathlib import Path
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.localllm.engine.real_runners import answer
from tests.localllm.engine.test_windows_in_engine import APART, text
from tests.models.state_checks import opened
from tests.waiting import eventually

def stuck(*_given, **_more):
    print("writing", flush=True)
    threading.Event().wait()

runner = opened(Path(sys.argv[1]))
disk = DiskCache(Path(sys.argv[2]), runner.info.kv_layout, 1 << 30)
engine = Engine(runner, FakeVocabulary(), disk=disk)
for seed in (30, 31):
    prompt = text(seed, APART + 300)
    answer(engine, prompt, most=3)
    eventually(lambda: not engine.step() and any(one.useful == len(prompt) for one in disk.find(prompt)))
os.replace = stuck
answer(engine, text(32, APART + 300), most=3)
threading.Event().wait()
"""


def test_a_process_killed_while_it_writes_windows_loses_no_answer(
    path: Path, runner: Counting, reference: NativeRunner, tmp_path: Path
) -> None:
    """Two chats are on the disk by then; the third is being written."""
    command = [sys.executable, "-c", CHATS, str(path), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        writer.kill()
    engine = Engine(runner, FakeVocabulary(), disk=DiskCache(tmp_path, runner.info.kv_layout, 1 << 30))
    restored = 0
    for seed in (30, 31, 32):
        asked = [*text(seed, APART + 300), *text(seed + 1, 20)]
        found = answer(engine, asked, most=3)
        restored += found.last.counts.cached_disk
        assert is_greedy(reference, asked, list(found.token_ids))
    assert restored >= 2 * APART
    engine.close()


def test_memory_for_one_chat_serves_many_in_turn(path: Path, reference: NativeRunner, tmp_path: Path) -> None:
    """Kept windows and cached chats go when room is needed, and restarts read what is on disk; no answer changes."""
    with open_model(path) as file:
        budget = native_needs(file).kv(1200)

    def start() -> Engine:
        runner = opened(path, budget)
        disk = DiskCache(tmp_path, runner.info.kv_layout, 16 << 20)
        return Engine(runner, FakeVocabulary(), max_running=3, disk=disk)

    engine, random = start(), np.random.default_rng(20)
    chats: list[list[int]] = [text(20 + at, 150 + 100 * at) for at in range(4)]
    restored = 0
    for turn in range(25):
        if turn % 5 == 4:
            restored += engine.stats().reused_disk_tokens
            engine.close()
            engine = start()
        streams = []
        for at in random.choice(4, size=int(random.integers(1, 4)), replace=False).tolist():
            kept = int(random.integers(1, len(chats[at]) + 1)) if random.random() < 0.4 else len(chats[at])
            prompt = chats[at][:kept][: int(random.integers(200, 900))] + text(int(random.integers(1000)), 30)
            sampling = SamplingParams(temperature=0)
            request = GenerationRequest(tuple(prompt), sampling=sampling, max_tokens=int(random.integers(1, 30)))
            streams.append((at, prompt, engine.submit(request)))
        while engine.step():
            engine.check_integrity()
        for at, prompt, stream in streams:
            found = stream.collect()
            assert is_greedy(reference, prompt, list(found.token_ids))
            chats[at] = [*prompt, *found.token_ids]
    assert restored + engine.stats().reused_disk_tokens > 0
    engine.close()


def test_memory_of_freed_windows_goes_to_other_layers(path: Path) -> None:
    """What was a kept window is given back before other layers grow: the pool never takes more than its budget."""
    with open_model(path) as file:
        budget = native_needs(file).kv(3000)
    runner = opened(path, budget)
    store, largest = runner.store, 0
    arrays = (store.arrays, store.windows.arrays)
    group = max(each.resident_bytes for each in arrays)
    for seed in range(6):
        sequence = runner.create_sequence()
        for start in range(0, 1000 if seed < 5 else 2900, 100):
            read(runner, sequence, text(seed, 3000)[start : start + 100])
            if seed < 5:
                runner.keep_window(sequence, runner.sequence_length(sequence))
            group = max(group, *(each.group_bytes for each in arrays))
            largest = max(largest, sum(each.resident_bytes for each in arrays))
        if seed == 5:
            assert store.windows.used <= store.total
        runner.free_sequence(sequence)
    assert budget // 2 < largest <= budget + 2 * group
    runner.close()


def test_requests_do_not_wait_for_an_answer_past_the_common_prefix(runner: Counting, reference: NativeRunner) -> None:
    engine = Engine(runner, FakeVocabulary())
    greedy = SamplingParams(temperature=0)
    long = engine.submit(GenerationRequest(tuple(text(30, 900)), sampling=greedy, max_tokens=300, ignore_eos=True))
    for _ in range(40):
        engine.step()
    prompt = text(30, 500) + text(31, 40)
    short = engine.submit(GenerationRequest(tuple(prompt), sampling=greedy, max_tokens=2))
    for _ in range(40):
        engine.step()
        engine.check_integrity()
    assert is_greedy(reference, prompt, list(short.collect().token_ids))
    long.cancel()
    while engine.step():
        pass
    engine.close()
