"""A row's logits are bit-exact whatever else is computed, however it is chunked, on any number of threads."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from cpu_kernels.records import Barrier, Op
from gguf_io import open_model
from models.native_runner import NativeRunner
from tests.models.architecture_models import MODELS
from tests.models.mixture_models import CHUNKED
from tests.models.synthetic import write

RunnerT = TypeVar("RunnerT", bound=NativeRunner)

LENGTH = 300
# One of each kind of layer: olmo2 has norms of all heads together, hunyuan-dense norms after the rotation, phi2 layer
# norm and parallel sub-layers, qwen2moe a shared expert, gpt-oss sinks and experts with biases, lfm2 short
# convolutions, lfm2moe experts that a bias helps to choose, gemma4 heads of two sizes, shared keys and values, and
# layers that compute only wanted rows, gemma4-moe experts beside a dense network, gemma3n parallel residual streams,
# qwen35 gated delta networks and gated attention, kimi-linear states that forget each value at a rate of its own,
# deepseek2 latents, groups of experts, and 20 heads that share a stored row, smallthinker experts that are chosen
# before attention, apertus activations with factors of a layer's own, laguna gates and other numbers of heads in some
# layers, llama4 chunks and experts whose inputs are weighted, granitehybrid selective scans, falcon-h1 scans beside
# attention, nemotron_h layers of one part each, mamba2 no attention.
NAMES = (
    "llama",
    "qwen3",
    "gemma2",
    "mixtral",
    "olmo2",
    "hunyuan-dense",
    "phi2",
    "qwen2moe",
    "gpt-oss",
    "lfm2",
    "lfm2-odd",
    "lfm2moe",
    "gemma4",
    "gemma4-odd",
    "gemma4-moe",
    "qwen35",
    "qwen35-odd",
    "kimi-linear",
    "kimi-linear-odd",
    "qwen35moe",
    "qwen3next",
    "gemma3n",
    "deepseek2",
    "deepseek2-groups",
    "deepseek2-odd",
    "smallthinker",
    "apertus-odd",
    "laguna",
    "laguna-odd",
    "llama4-chunks-of-40",
    "granitehybrid",
    "granitehybrid-odd",
    "granitehybrid-moe",
    "falcon-h1",
    "falcon-h1-odd",
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_moe-latents",
    "nemotron_h-odd",
    "mamba2",
    "mamba2-odd",
)
KVTypes = tuple[str, str]
KV_TYPES: tuple[KVTypes, ...] = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16"), ("f16", "q8_0"))
FOUR_BITS: KVTypes = ("q4_0", "q4_0")
CASES = (
    [(name, KV_TYPES[0]) for name in NAMES]
    + [("llama", KV_TYPES[1])]
    + [("llama-multi-query", types) for types in KV_TYPES[2:]]
    + [(name, KV_TYPES[1]) for name in ("gemma2", "gemma4", "deepseek2", "llama4-chunks-of-40")]
    + [("llama", FOUR_BITS)]
    + [("llama-multi-query", types) for types in (("q8_0", "q4_0"), ("q4_0", "f16"))]
    + [(name, FOUR_BITS) for name in ("gemma2", "gemma4")]
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'-'.join(case[1])}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KVTypes]:
    name, types = request.param
    return write({**MODELS, **CHUNKED}[name], tmp_path_factory.mktemp("models") / f"{name}.gguf"), types


def open_runner(case: tuple[Path, KVTypes], threads: int | None = None) -> NativeRunner:
    path, types = case
    with open_model(path) as file:
        return NativeRunner(file, kv_bytes=16 << 20, kv_types=types, threads=threads)


@pytest.fixture(scope="module")
def opened(case: tuple[Path, KVTypes]) -> Iterator[NativeRunner]:
    runner = open_runner(case)
    yield runner
    runner.close()


def shared(runner: RunnerT) -> Iterator[RunnerT]:
    """A runner shared by several tests; after each it is checked, and its sequences are freed."""
    yield runner
    runner.check_integrity(set(runner.sequences))
    for sequence in list(runner.sequences):
        runner.free_sequence(sequence)


@pytest.fixture
def runner(opened: NativeRunner) -> Iterator[NativeRunner]:
    yield from shared(opened)


def tokens_of(seed: int, count: int = LENGTH) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 320, count).tolist()
    return tokens


def extend(runner: NativeRunner, sequence: int, tokens: list[int]) -> np.ndarray:
    start = runner.sequence_length(sequence)
    positions = list(range(start, start + len(tokens)))
    return runner.run(tokens, positions, [sequence] * len(tokens), list(range(len(tokens)))).copy()


def whole(runner: NativeRunner, tokens: list[int]) -> np.ndarray:
    sequence = runner.create_sequence()
    rows = extend(runner, sequence, tokens)
    runner.free_sequence(sequence)
    return rows


def test_chunks(runner: NativeRunner) -> None:
    tokens = tokens_of(1)
    expected = whole(runner, tokens)
    for chunk in (1, 7, 16, 129):
        sequence = runner.create_sequence()
        pieces = [extend(runner, sequence, tokens[i : i + chunk]) for i in range(0, LENGTH, chunk)]
        np.testing.assert_array_equal(np.concatenate(pieces), expected, f"in chunks of {chunk}")
        runner.free_sequence(sequence)


def test_threads(case: tuple[Path, KVTypes], runner: NativeRunner) -> None:
    alone = open_runner(case, threads=1)
    np.testing.assert_array_equal(whole(alone, tokens_of(2)), whole(runner, tokens_of(2)))
    alone.close()


def test_threads_that_leave(case: tuple[Path, KVTypes], runner: NativeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """They offer their cores to others between any two operations, and rows packed for themselves are not missing."""
    monkeypatch.setattr("cpu_kernels.threads.OFFERS_EVERY_US", 0)
    monkeypatch.setattr("cpu_kernels.threads.AWAY_US", 0)
    leaving, tokens = open_runner(case, threads=3), tokens_of(2, 20)
    found = [extend(leaving, sequence := leaving.create_sequence(), tokens)]
    found += [extend(leaving, sequence, [token]) for token in tokens[:10]]
    leaving.close()
    np.testing.assert_array_equal(np.concatenate(found), whole(runner, tokens + tokens[:10]))


def reverse_between_barriers(records: np.ndarray) -> None:
    """Reverse each run of operations that no barrier separates, in place."""
    barriers = records[:, Op.BARRIER].copy()
    begin = 0
    for end in np.flatnonzero(barriers != Barrier.NEVER) + 1:
        records[begin:end] = records[begin:end][::-1].copy()
        begin = end
    records[:, Op.BARRIER] = barriers


def test_operations_without_a_barrier_between_them_run_in_any_order(case: tuple[Path, KVTypes]) -> None:
    """Any thread may compute any item, so such operations must not read what another of them writes."""
    runner, tokens = open_runner(case, threads=1), tokens_of(6, 40)
    try:
        expected = np.concatenate([whole(runner, tokens), whole(runner, tokens[:1])])
        reverse_between_barriers(runner.steps.program.records)
        found = np.concatenate([whole(runner, tokens), whole(runner, tokens[:1])])
    finally:
        runner.close()
    np.testing.assert_array_equal(found, expected)


def test_company(runner: NativeRunner) -> None:
    """Eight sequences decoded together, one of them during another's prefill."""
    prompts = [tokens_of(10 + i, 20 + 7 * i) for i in range(8)]
    handles = [runner.create_sequence() for _ in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        extend(runner, handle, prompt[:-1])
    lengths = [len(prompt) - 1 for prompt in prompts]
    batch = runner.run([p[-1] for p in prompts], lengths, handles, list(range(8))).copy()
    for row, prompt in zip(batch, prompts, strict=True):
        np.testing.assert_array_equal(row, whole(runner, prompt)[-1])
    other = tokens_of(30, 100)
    late = runner.create_sequence()
    rows = len(other)
    mixed = runner.run([5, *other], [len(prompts[0]), *range(rows)], [handles[0]] + [late] * rows, [0, rows]).copy()
    np.testing.assert_array_equal(mixed[0], whole(runner, [*prompts[0], 5])[-1])
    np.testing.assert_array_equal(mixed[1], whole(runner, other)[-1])


def test_forks_share_and_diverge(runner: NativeRunner) -> None:
    tokens, other = tokens_of(3, 128), tokens_of(4, 30)
    expected = whole(runner, tokens + other)[128:]
    for length in (1, 16, 40, 127):
        source = runner.create_sequence()
        extend(runner, source, tokens)
        free = runner.pages_free()
        fork = runner.fork_sequence(source, length)
        assert runner.pages_free() == free
        branch = extend(runner, fork, other)
        np.testing.assert_array_equal(branch, whole(runner, tokens[:length] + other)[length:], f"from {length} on")
        np.testing.assert_array_equal(extend(runner, source, other), expected, f"beside a fork of {length}")
        for sequence in (source, fork):
            runner.free_sequence(sequence)


def test_exported_pages_restore(runner: NativeRunner) -> None:
    tokens = tokens_of(5, 120)
    expected = whole(runner, tokens)
    source = runner.create_sequence()
    extend(runner, source, tokens)
    for start, stop in ((0, 100), (0, 16), (5, 77), (64, 65)):
        restored = runner.fork_sequence(source, start)
        data = runner.export_kv(source, start, stop)
        runner.import_kv(restored, start, stop, data)
        if runner.info.window_tokens:  # window layers are stored apart
            until = runner.create_sequence()
            extend(runner, until, tokens[:stop])
            runner.import_state(restored, runner.export_state(until, stop))
            runner.free_sequence(until)
        rows = extend(runner, restored, tokens[stop:])
        np.testing.assert_array_equal(rows, expected[stop:], f"tokens {start} to {stop}")
        empty = runner.create_sequence()
        with pytest.raises(ValueError, match="bytes instead of"):
            runner.import_kv(empty, 0, stop - start, data[:-1])
        for sequence in (restored, empty):
            runner.free_sequence(sequence)
