"""States of delta networks and selective scans: exact after every truncation, fork and restore, in few
slots or many.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.errors import LocalLLMError
from models.config import read_config
from models.kv_layout import (
    LEAST_SLOTS,
    bytes_of_tokens,
    kv_bytes_per_token,
    slots_within,
    state_bytes,
    stored_types,
)
from models.native_runner import NativeRunner
from models.sizes.delta_net import DeltaNetSizes
from tests.models.architecture_models import MODELS
from tests.models.state_checks import (
    AFTER_REJECTION,
    Counting,
    check_any_order_of_operations,
    check_rejected_tokens_cost_nothing,
    opened,
)
from tests.models.synthetic import shapes, write
from tests.models.test_determinism import extend, shared, tokens_of, whole

PAGE = 16
AMPLE, LITTLE = 64 << 20, 3 << 20
NAMES = ("qwen35", "qwen35-odd", "qwen3next", "kimi-linear", "granitehybrid", "falcon-h1", "nemotron_h", "mamba2")


@pytest.fixture(scope="module", params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(MODELS[request.param], tmp_path_factory.mktemp("models") / f"{request.param}.gguf")


def few_slots(path: Path) -> int:
    """A KV budget with which a model gets few slots."""
    with open_model(path) as file:
        config = read_config(file)
        return (
            LITTLE
            if isinstance(config.state, DeltaNetSizes)
            else bytes_of_tokens(config, stored_types(config, ("f16", "f16")), 5000)
        )


@pytest.fixture(scope="module")
def ample(path: Path) -> Iterator[Counting]:
    runner = opened(path, AMPLE)
    yield runner
    runner.close()


@pytest.fixture
def runner(ample: Counting) -> Iterator[Counting]:
    yield from shared(ample)


@pytest.mark.parametrize("length", AFTER_REJECTION)
def test_rejected_tokens_cost_nothing(runner: Counting, length: int) -> None:
    check_rejected_tokens_cost_nothing(runner, length)


def test_a_fork_of_what_was_decoded_computes_nothing_again(path: Path) -> None:
    runner = opened(path, 4 * AMPLE)  # slots for everything that all forks add
    tokens, other = tokens_of(1, 100), tokens_of(2, 20)
    sequence = runner.create_sequence()
    for token in tokens:
        extend(runner, sequence, [token])
    for length in (15, 16, 17, 40, 47, 48, 63, 64, 65, 99, 100):
        fork = runner.fork_sequence(sequence, length)
        runner.passes.clear()
        rows = extend(runner, fork, other)
        assert runner.passes == [len(other)], length
        np.testing.assert_array_equal(rows, whole(runner, tokens[:length] + other)[length:])
        runner.free_sequence(fork)
    np.testing.assert_array_equal(extend(runner, sequence, other), whole(runner, tokens + other)[100:])
    runner.close()


@pytest.mark.parametrize(("length", "most"), [(399, 0), (390, 0), (330, 0), (257, 0), (256, 0), (9, 0), (200, 200)])
def test_an_edited_prompt_continues_from_kept_pages(runner: Counting, length: int, most: int) -> None:
    """The last pages of a step keep slots, its first one, and every sixteenth."""
    tokens, other = tokens_of(1, 400), tokens_of(2, 20)
    sequence = runner.create_sequence()
    extend(runner, sequence, tokens)
    fork = runner.fork_sequence(sequence, length)
    runner.passes.clear()
    rows = extend(runner, fork, other)
    assert sum(runner.passes[:-1]) <= most
    assert runner.passes[-1] == len(other)
    np.testing.assert_array_equal(rows, whole(runner, tokens[:length] + other)[length:])


def test_slots_are_thinned_out_with_age(path: Path) -> None:
    """A long conversation in few slots: near its end all pages have slots, far back some."""
    runner = opened(path, few_slots(path))
    assert runner.store.delta is not None
    tokens = tokens_of(7, 800)
    sequence = runner.create_sequence()
    for first in range(0, 800, 8):
        extend(runner, sequence, tokens[first : first + 8])
    again = []
    for length in range(792, 0, -33):
        fork = runner.fork_sequence(sequence, length)
        again.append(length - runner.store.computed(runner.sequences[fork]))
        runner.free_sequence(fork)
    assert again[0] == 0
    assert 0 < max(again) <= 512
    other = tokens_of(8, 5)
    for length in (790, 500, 100, 1):
        fork = runner.fork_sequence(sequence, length)
        rows = extend(runner, fork, other)
        alone = runner.create_sequence()
        for first in range(0, length, 400):
            extend(runner, alone, tokens[first : min(length, first + 400)])
        np.testing.assert_array_equal(rows, extend(runner, alone, other))
        for one in (fork, alone):
            runner.free_sequence(one)
    runner.close()


def test_more_sequences_than_slots(path: Path) -> None:
    runner = opened(path, few_slots(path))
    assert runner.store.delta is not None
    prompts = [tokens_of(20 + i, 5 + 3 * i) for i in range(3 * runner.store.delta.most_segments + 5)]
    handles = [runner.create_sequence() for _ in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        extend(runner, handle, prompt)
    for step in range(3):
        positions = [runner.sequence_length(handle) for handle in handles]
        wanted = list(range(0, len(handles), 2))
        rows = runner.run([step + 1] * len(handles), positions, handles, wanted).copy()
        for row, index in zip(rows, wanted, strict=True):
            prompts_so_far = [*prompts[index], *range(1, step + 2)]
            np.testing.assert_array_equal(row, whole(runner, prompts_so_far)[-1])
    runner.check_integrity(set(handles))
    runner.close()


def test_a_long_prompt_is_computed_again_in_few_slots(path: Path) -> None:
    runner = opened(path, few_slots(path))
    delta = runner.store.delta
    assert delta is not None and len(delta.page_of) == LEAST_SLOTS
    tokens = tokens_of(6, 1700)
    sequence = runner.create_sequence()
    for first in range(0, 1700, 500):
        expected = extend(runner, sequence, tokens[first : first + 500])[-1]
    runner.truncate_sequence(sequence, 1699)
    for page in np.flatnonzero(delta.slot_of_page >= 0).tolist():
        delta.drop(page)
    runner.passes.clear()
    np.testing.assert_array_equal(extend(runner, sequence, tokens[1699:])[-1], expected)
    assert runner.passes == [512, 512, 512, 163, 1]
    runner.close()


def test_forks_compute_again_what_they_share_once(path: Path) -> None:
    """All states are lost: forks that are recomputed together use each other's."""
    runner = opened(path, AMPLE)
    tokens = tokens_of(3, 100)
    sequence = runner.create_sequence()
    extend(runner, sequence, tokens)
    lengths = [90, 60, 48, 33, 100]
    forks = [runner.fork_sequence(sequence, length) for length in lengths]
    delta = runner.store.delta
    assert delta is not None
    for page in np.flatnonzero(delta.slot_of_page >= 0).tolist():
        delta.drop(page)
    rows = runner.run([7] * len(forks), lengths, forks, range(len(forks))).copy()
    for length, row in zip(lengths, rows, strict=True):
        np.testing.assert_array_equal(row, whole(runner, [*tokens[:length], 7])[-1])
    runner.close()


def test_two_sequences_go_on_from_one_page(runner: Counting) -> None:
    tokens = tokens_of(3, 64)
    sequence = runner.create_sequence()
    extend(runner, sequence, tokens)
    lengths = list(range(48, 65))
    forks = [runner.fork_sequence(sequence, length) for length in lengths]
    runner.passes.clear()
    rows = runner.run([7] * len(forks), lengths, forks, range(len(forks))).copy()
    assert sum(runner.passes) == len(forks)
    for length, row in zip(lengths, rows, strict=True):
        np.testing.assert_array_equal(row, whole(runner, [*tokens[:length], 7])[-1])


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_operations(path: Path, seed: int, few: bool) -> None:
    runner, fresh = opened(path, few_slots(path) if few else AMPLE), opened(path, AMPLE)
    check_any_order_of_operations(runner, fresh, seed, most_new=60)
    for one in (runner, fresh):
        one.close()


@pytest.mark.parametrize("stop", [64, 70])
def test_a_restored_sequence_continues_at_once(path: Path, runner: Counting, stop: int) -> None:
    """In another process too, from the bytes alone."""
    tokens = tokens_of(5, 120)
    source = runner.create_sequence()
    extend(runner, source, tokens[:stop])
    data = [runner.export_kv(source, *span) for span in ((0, 32), (32, stop))]
    state = runner.export_state(source, stop)
    other = opened(path, AMPLE)
    restored = other.create_sequence()
    other.import_kv(restored, 0, 32, data[0])
    other.import_kv(restored, 32, stop, data[1])
    with pytest.raises(ValueError, match="bytes"):
        other.import_state(restored, state[1:])
    other.import_state(restored, state)
    rows = extend(other, restored, tokens[stop:])
    assert other.passes == [120 - stop]
    np.testing.assert_array_equal(rows, whole(runner, tokens)[stop:])
    other.close()


@pytest.mark.parametrize("stop", [45, 48, 60])
def test_imported_tokens_replace_what_their_page_had(path: Path, runner: Counting, stop: int) -> None:
    """Even without the state after them: that of the tokens before them is used."""
    first, second = tokens_of(5, 43), tokens_of(6, 80)
    sequence, other = runner.create_sequence(), runner.create_sequence()
    extend(runner, sequence, first)
    runner.truncate_sequence(sequence, 35)
    extend(runner, other, first[:35] + second)
    runner.import_kv(sequence, 35, stop, runner.export_kv(other, 35, stop))
    rows = extend(runner, sequence, second[stop - 35 :])
    np.testing.assert_array_equal(rows, whole(runner, first[:35] + second)[stop:])


def test_many_forks_are_restored_in_few_slots(path: Path, runner: Counting) -> None:
    tokens = tokens_of(5, 60)
    source = runner.create_sequence()
    extend(runner, source, tokens)
    data = runner.export_kv(source, 40, 60)
    other = opened(path, few_slots(path))
    assert other.store.delta is not None
    sequence = other.create_sequence()
    extend(other, sequence, tokens[:40])
    forks = [other.fork_sequence(sequence, 40) for _ in range(len(other.store.delta.page_of) + 1)]
    for fork in forks:
        other.import_kv(fork, 40, 60, data)
    expected = whole(runner, [*tokens, 7])[-1]
    for fork in forks:
        np.testing.assert_array_equal(extend(other, fork, [7])[-1], expected)
    other.close()


def test_nan_stays_within_its_sequence(path: Path) -> None:
    """NaN states left by another sequence do not affect later users of their slots."""
    runner = opened(path, AMPLE)
    tokens = tokens_of(9, 70)
    expected = whole(runner, tokens)
    delta = runner.store.delta
    assert delta is not None
    sequence = runner.create_sequence()
    extend(runner, sequence, tokens)
    delta.slots.view(np.float32)[:] = np.nan
    runner.free_sequence(sequence)
    np.testing.assert_array_equal(whole(runner, tokens), expected)
    sequence = runner.create_sequence()
    pieces = [extend(runner, sequence, tokens[i : i + 7]) for i in range(0, 70, 7)]
    np.testing.assert_array_equal(np.concatenate(pieces), expected)
    runner.close()


@pytest.mark.parametrize("name", ["qwen35", "qwen35-odd", "qwen3next"])
def test_plans_count_states(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    keys, values, size = (model.extra[f"ssm.{key}"] for key in ("group_count", "time_step_rank", "state_size"))
    padded, reach = -(-size // 16) * 16, model.extra["ssm.conv_kernel"]
    recurrent = sum(f"blk.{layer}.ssm_a" in shapes(model) for layer in range(model.layers))
    states = values * padded * padded
    added = PAGE * ((keys + values) * padded + values)
    convolved = (reach - 1 + PAGE) * (2 * keys + values) * padded
    with open_model(write(model, tmp_path / "model.gguf")) as file:
        config = read_config(file)
        stated = kv_bytes_per_token(config, stored_types(config, ("f16", "f16")))
        runner = NativeRunner(file, kv_bytes=AMPLE, threads=1)
    runner.close()
    attention = (model.layers - recurrent) * model.kv_heads * 2 * (2 * 64 + 4)  # keys and values in f16, heads padded
    assert stated == runner.info.kv_bytes_per_token == attention + 4  # and a token's id
    assert config.slot_sizes.slot_bytes == 4 * recurrent * (states + added + convolved)
    taken = state_bytes(config, AMPLE)
    assert taken == slots_within(config.slot_sizes, AMPLE) * config.slot_sizes.slot_bytes <= AMPLE // 4
    assert AMPLE - PAGE * stated < runner.info.pages_total * PAGE * stated + taken <= AMPLE
    assert slots_within(config.slot_sizes, 0) == LEAST_SLOTS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.inner_size": 64}, "do not make a gated delta network of 64"),
        ({"ssm.group_count": 3}, "3 heads of keys and 4 of values"),
        ({"ssm.conv_kernel": 1}, r"qwen35\.ssm\.conv_kernel"),
        ({"ssm.conv_kernel": 18}, r"qwen35\.ssm\.conv_kernel"),
        ({"full_attention_interval": 6}, "no layer has attention"),
        ({"full_attention_interval": 0}, r"full_attention_interval"),
        ({"attention.recurrent_layers": [True, False]}, r"recurrent_layers"),
        ({"ssm.conv_kernel": 3}, r"ssm_conv1d\.weight has the shape \(384, 4\) instead of \(384, 3\)"),
    ],
    ids=str,
)
def test_metadata_that_does_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = MODELS["qwen35"]
    path = write(model, tmp_path / "model.gguf", metadata=changes)
    with open_model(path) as file, pytest.raises(LocalLLMError, match=message):
        NativeRunner(file, kv_bytes=1 << 20, threads=1)
