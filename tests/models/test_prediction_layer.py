"""Multi-token prediction layers: logits equal llama.cpp's, and drafts follow from them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gguf_io import open_model
from models.drafting_layer import MAX_ROWS, DraftingLayer, DraftRows
from models.kv_pages import Sequence
from models.native_runner import NativeRunner
from models.self_drafts import KEPT
from tests.models.prediction_models import PREDICTING, counting, drafts
from tests.models.synthetic import write
from tests.oracle import llama_drafts, llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

TOKENS = np.random.default_rng(11).integers(0, 320, 48).tolist()
ALL = 320  # ids
# As for whole models (test_architectures): keys and values are rounded in different places.
TOLERANCE = 4e-3


@pytest.fixture(scope="module", params=PREDICTING)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(PREDICTING[request.param], tmp_path_factory.mktemp("models") / f"{request.param}.gguf")


@pytest.fixture
def runner(path: Path) -> Iterator[NativeRunner]:
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=64 << 20, threads=2)
    yield runner
    runner.close()


def layer_of(runner: NativeRunner) -> DraftingLayer:
    assert runner.drafts is not None
    return runner.drafts.layer


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(np.abs(ours - theirs).max() < 4 * TOLERANCE * theirs.std())


def test_its_logits_are_those_of_llama_cpp(path: Path, runner: NativeRunner) -> None:
    states = llama_oracle.hidden_states(path, TOKENS)
    expected = llama_drafts.predicted_logits(path, TOKENS[1:], states[:-1])
    layer, single, whole = layer_of(runner), Sequence(), Sequence()
    for at, token in enumerate(TOKENS[1:]):
        layer.run([DraftRows(single, [token], states[at : at + 1])], ALL)
        found = layer.logits.values[0].copy()
        assert close(found, expected[at]), at
    layer.run([DraftRows(whole, TOKENS[1:], states[:-1])], ALL)
    np.testing.assert_array_equal(layer.logits.values[0], found)


def test_drafting_continues_from_the_state_behind_the_logits(path: Path, runner: NativeRunner) -> None:
    states = llama_oracle.hidden_states(path, TOKENS)
    expected = llama_drafts.predicted_logits(path, TOKENS[1:], states[:-1])
    _, found = layer_of(runner).run([DraftRows(Sequence(), TOKENS[1:], states[:-1])], ALL)
    with open_model(path) as file:
        names = (f"blk.{PREDICTING[path.stem].layers - 1}.nextn.shared_head_head", "output", "token_embd")
        name = next(f"{name}.weight" for name in names if f"{name}.weight" in file.tensors)
        output = file.dequantize(name)
    assert close(output @ found[0], expected[-1])


def test_a_draft_begins_with_the_likeliest_token_after_the_text(path: Path, runner: NativeRunner) -> None:
    states = llama_oracle.hidden_states(path, TOKENS)
    expected = llama_drafts.predicted_logits(path, TOKENS[1:], states[:-1])[-1]
    sequence = runner.create_sequence()
    for start, stop in ((0, 20), (20, 21), (21, 47)):
        append(runner, sequence, TOKENS[start:stop])
        if start:
            drafts(runner, [(sequence, TOKENS[stop], 3)])  # whose rejected drafts must leave nothing behind
    (drafted,) = drafts(runner, [(sequence, TOKENS[47], 4)])
    assert len(drafted) == 4
    assert expected[drafted[0]] > expected.max() - 4 * TOLERANCE * expected.std()
    assert drafts(runner, [(sequence, TOKENS[47], 4)]) == [drafted]
    runner.check_integrity({sequence})


def test_drafts_do_not_depend_on_how_the_text_came(path: Path, runner: NativeRunner) -> None:
    whole, pieces, forked = (runner.create_sequence() for _ in range(3))
    append(runner, whole, TOKENS[:47])
    for token in TOKENS[:40]:
        append(runner, pieces, [token])
    append(runner, pieces, [1, 2, 3])
    drafts(runner, [(pieces, 4, 5)])
    runner.truncate_sequence(pieces, 40)
    append(runner, pieces, TOKENS[40:47])
    assert drafts(runner, [(whole, TOKENS[47], 5)]) == drafts(runner, [(pieces, TOKENS[47], 5)])
    together = drafts(runner, [(whole, TOKENS[47], 5), (forked, 1, 5), (pieces, TOKENS[47], 2)])
    assert together[0][:2] == together[2] and together[1] == []
    fork = runner.fork_sequence(whole, 30)
    assert drafts(runner, [(fork, TOKENS[30], 2)]) == [[]], "nothing was computed since"
    append(runner, fork, TOKENS[30:34])
    assert len(drafts(runner, [(fork, TOKENS[34], 2)])[0]) == 2
    for sequence in (whole, pieces, forked, fork):
        runner.free_sequence(sequence)
    runner.check_integrity(set())


def test_a_draft_ends_where_it_is_not_likely_enough(runner: NativeRunner) -> None:
    first, second = runner.create_sequence(), runner.create_sequence()
    append(runner, first, TOKENS[:47])
    append(runner, second, TOKENS[:30])
    (drafted,) = runner.draft([(first, TOKENS[47], (0.0,) * 6)])
    likely = np.cumprod([probability for _, probability in drafted])
    assert np.all((likely > 0) & (likely < 1))
    for count in range(1, 6):
        least = (0.0,) * count + (1.001 * float(likely[count - 1]),) * (6 - count)
        assert runner.draft([(first, TOKENS[47], least)]) == [drafted[:count]]
        least = (0.0,) * count + (0.999 * float(likely[count - 1]),) + (1.0,) * (5 - count)
        assert runner.draft([(first, TOKENS[47], least)]) == [drafted[: count + 1]]
    least = (0.0, *(0.0,) * 3, 0.6 * float(likely[3]))
    found = runner.draft([(first, TOKENS[47], least), (second, TOKENS[30], (0.0,))])
    assert list(map(len, found)) == [4, 1], "a token for one of two must be likelier"


def test_long_texts_and_many_sequences_find_room(runner: NativeRunner) -> None:
    random = np.random.default_rng(3)
    sequences = [runner.create_sequence() for _ in range(10)]
    for _ in range(3):
        for sequence in sequences:
            append(runner, sequence, random.integers(0, 320, 2 * KEPT + MAX_ROWS + 5).tolist())
        found = drafts(runner, [(sequence, 7, 15) for sequence in sequences])
        assert [len(each) for each in found] == [0, 0, *[15] * 8]
        runner.check_integrity(set(sequences))
    for _ in range(20):
        append(runner, sequences[-1], random.integers(0, 320, 25).tolist())
        assert len(drafts(runner, [(sequences[-1], 7, 3)])[0]) == 3
        runner.check_integrity(set(sequences))


def test_rare_ids_are_guessed_in_texts_that_have_them(tmp_path: Path) -> None:
    path = counting(tmp_path / "model.gguf", vocabulary=70_000, embedding=64)
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=64 << 20, threads=2)
    assert layer_of(runner).reaches == (32_768, 35_000, 70_000)
    for first, right in ((100, True), (32_750, False), (34_000, True), (69_000, True)):
        sequence = runner.create_sequence()
        append(runner, sequence, list(range(first - 60, first)))
        (drafted,) = drafts(runner, [(sequence, first, 20)])
        assert (drafted == list(range(first + 1, first + 21))) == right
        runner.free_sequence(sequence)
    runner.close()


def append(runner: NativeRunner, sequence: int, tokens: list[int]) -> None:
    start = runner.sequence_length(sequence)
    runner.run(tokens, range(start, start + len(tokens)), [sequence] * len(tokens), [len(tokens) - 1])
