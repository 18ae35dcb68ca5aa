"""LlamaCppRunner against plain llama.cpp on real tiny models."""

import inspect
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpu_offload import loading
from gpu_offload.errors import LlamaCppError, LlamaCppMemoryError
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.engine.runner import Runner
from tests.gpu_offload import sparse_models
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

MODEL = "stories260K-F32.gguf"
# The runner's own settings, so that results are bit-exact.
SAME = llama_oracle.Setup(threads=1, flash_attention=True)
OPTIONS = LlamaOptions(context_tokens=512, max_sequences=4, batch_rows=128, threads=1, gpu_layers=0)


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    """Weights as in the file, like the oracle's: repacked ones change the last bits."""
    monkeypatch.setattr(loading, "can_repack", lambda: False)


@pytest.fixture(scope="module")
def path(data_dir) -> Path:
    return data_dir / "models/gguf" / MODEL


@pytest.fixture(scope="module")
def story(path) -> list[int]:
    return llama_oracle.tokenize(path, "Once upon a time, there was a little girl named Lily. She loved to play")


@pytest.fixture
def runner(path, open_runner) -> LlamaCppRunner:
    return open_runner(path, OPTIONS)


@pytest.fixture(scope="module")
def tolerance(path, story) -> float:
    """How much llama.cpp's own logits differ here between rows computed together and one by one, plus a margin."""
    return 2 * llama_oracle.own_difference(path, tuple(story), SAME) + 1e-3


def append(runner: Runner, sequence: int, tokens: list[int], wanted: list[int] | None = None) -> np.ndarray:
    """Append tokens to one sequence; by default the logits of all rows are requested. Returns a copy."""
    start = runner.sequence_length(sequence)
    positions = range(start, start + len(tokens))
    rows = range(len(tokens)) if wanted is None else wanted
    return runner.run(tokens, positions, [sequence] * len(tokens), rows).copy()


def greedy(runner: Runner, sequence: int, logits: np.ndarray, count: int) -> list[int]:
    """Greedily continue a sequence from the last row's logits."""
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        tokens.append(int(append(runner, sequence, tokens[-1:])[-1].argmax()))
    return tokens


def test_it_has_every_member_of_the_protocol_with_the_same_parameters():
    methods = {name: member for name, member in vars(Runner).items() if inspect.isfunction(member) and name[0] != "_"}
    for name, member in methods.items():
        assert inspect.signature(getattr(LlamaCppRunner, name)) == inspect.signature(member), name


@pytest.mark.parametrize(
    "name", ["stories260K-F32.gguf", "tinystories656K-Q8_0.gguf", "stories260K-pad256-Q4_K_M.gguf"]
)
def test_one_sequence_gives_llama_cpps_logits_to_the_bit(data_dir, name, open_runner):
    path = data_dir / "models/gguf" / name
    prompt = llama_oracle.tokenize(path, "Once upon a time, there was a little girl named Lily.")
    runner = open_runner(path, OPTIONS)
    sequence = runner.create_sequence()
    prefill = append(runner, sequence, prompt)
    np.testing.assert_array_equal(prefill, llama_oracle.prefill_logits(path, prompt, SAME))
    assert greedy(runner, sequence, prefill[-1:], 40) == llama_oracle.greedy(path, prompt, 40, SAME)


def test_it_says_what_it_is(runner, path):
    assert runner.info.backend == "llama.cpp"
    assert runner.info.vocab_size == llama_oracle.vocab_size(path)
    assert (runner.info.page_size, runner.info.max_rows, runner.info.max_sequences) == (1, 128, 4)
    assert runner.info.can_truncate
    assert runner.pages_free() == runner.info.pages_total == 512
    assert runner.info.kv_bytes_per_token == 5 * 2 * 4 * 8 * 2  # layers, K and V, KV heads, head length, float16


def test_rows_of_several_sequences_in_one_batch(runner, path, story, tolerance):
    prompts = [story[:9], story[:1] + story[5:17], story[:4]]
    handles = [runner.create_sequence() for _ in prompts]
    tokens = [token for prompt in prompts for token in prompt]
    positions = [position for prompt in prompts for position in range(len(prompt))]
    sequences = [handle for handle, prompt in zip(handles, prompts, strict=True) for _ in prompt]
    last = np.cumsum([len(prompt) for prompt in prompts]) - 1
    logits = runner.run(tokens, positions, sequences, list(last))
    alone = np.stack([llama_oracle.prefill_logits(path, prompt, SAME)[-1] for prompt in prompts])
    np.testing.assert_allclose(logits, alone, atol=tolerance)
    together = [[int(row.argmax())] for row in logits]
    for _ in range(19):
        lengths = [runner.sequence_length(handle) for handle in handles]
        step = runner.run([found[-1] for found in together], lengths, handles, [0, 1, 2])
        for found, row in zip(together, step, strict=True):
            found.append(int(row.argmax()))
    assert together == [llama_oracle.greedy(path, prompt, 20, SAME) for prompt in prompts]


def test_rows_that_are_laid_out_ahead_give_the_same_logits(runner, story):
    """Others that are laid out and not begun leave nothing behind, and neither do tokens that are refused."""
    sequence, other = runner.create_sequence(), runner.create_sequence()
    wait = runner.prepare(range(4), [sequence] * 4, [3])(story[:4])
    begin = runner.prepare([4], [sequence], [0])
    found = [wait().copy()]
    for tokens, said in ((story[4:6], "2 tokens for 1 rows"), ([runner.info.vocab_size], "outside 0")):
        with pytest.raises(ValueError, match=said):
            begin(tokens)
    assert runner.sequence_length(sequence) == 4
    wait = begin(story[4:5])
    runner.prepare([5], [sequence], [0])
    found.append(wait().copy())
    found.append(append(runner, sequence, story[5:6]))
    alone = [append(runner, other, story[at:end], [end - at - 1]) for at, end in ((0, 4), (4, 5), (5, 6))]
    np.testing.assert_array_equal(found, alone)
    begin = runner.prepare([6], [sequence], [0])
    runner.close()
    with pytest.raises(ValueError, match="closed"):
        begin(story[6:7])


def test_wanted_rows_may_be_none_some_or_more_than_one_call_returns(runner, path, story):
    tolerance = 2 * llama_oracle.own_difference(path, tuple((story * 8)[:120]), SAME) + 1e-3
    long = (story * 8)[:120]
    expected = llama_oracle.prefill_logits(path, long, SAME)
    assert append(runner, runner.create_sequence(), long, wanted=[]).shape == (0, runner.info.vocab_size)
    some = append(runner, runner.create_sequence(), long, wanted=[3, 119])
    np.testing.assert_allclose(some, expected[[3, 119]], atol=tolerance)
    every = append(runner, runner.create_sequence(), long)
    np.testing.assert_allclose(every, expected, atol=tolerance)


@pytest.mark.parametrize("length", [1, 7, 16])
def test_a_fork_continues_as_if_computed_anew_and_takes_no_cell(runner, path, story, length):
    source = runner.create_sequence()
    append(runner, source, story)
    free = runner.pages_free()
    fork = runner.fork_sequence(source, length)
    assert runner.pages_free() == free
    other = [*story[:length], 300, 301, 302]
    logits = append(runner, fork, other[length:])
    assert runner.pages_free() == free - 3
    assert greedy(runner, fork, logits[-1:], 15) == llama_oracle.greedy(path, other, 15, SAME)
    # The source is unchanged.
    logits = append(runner, source, [320])
    assert greedy(runner, source, logits, 15) == llama_oracle.greedy(path, [*story, 320], 15, SAME)


def test_truncating_and_going_another_way(runner, path, story):
    sequence = runner.create_sequence()
    append(runner, sequence, story)
    runner.truncate_sequence(sequence, 5)
    assert runner.sequence_length(sequence) == 5
    assert runner.pages_free() == 512 - 5
    logits = append(runner, sequence, [300, 301])
    assert greedy(runner, sequence, logits[-1:], 15) == llama_oracle.greedy(path, [*story[:5], 300, 301], 15, SAME)
    runner.truncate_sequence(sequence, 0)
    assert runner.pages_free() == 512


def test_cells_are_shared_until_the_last_sequence_lets_go(runner, story):
    first = runner.create_sequence()
    append(runner, first, story)
    second = runner.fork_sequence(first, len(story))
    third = runner.fork_sequence(second, 4)
    runner.free_sequence(first)
    assert runner.pages_free() == 512 - len(story)
    runner.truncate_sequence(second, 2)
    assert runner.pages_free() == 512 - 4
    runner.free_sequence(second)
    runner.free_sequence(third)
    assert runner.pages_free() == 512


def test_cells_freed_in_any_order_can_all_be_used_again(runner, story):
    """Holes in llama.cpp's cache must not make it refuse what our accounting allows."""
    rng = np.random.default_rng(1)
    handles = [runner.create_sequence()]
    for _ in range(150):
        chosen = int(rng.integers(len(handles)))
        room = runner.pages_free()
        if rng.random() < 0.6 and room:
            count = int(rng.integers(1, min(room, 120) + 1))
            append(runner, handles[chosen], [int(token) for token in rng.integers(3, 500, count)], wanted=[0])
            assert runner.pages_free() == room - count
        elif rng.random() < 0.6 and len(handles) < 4:
            length = runner.sequence_length(handles[chosen])
            handles.append(runner.fork_sequence(handles[chosen], int(rng.integers(length + 1))))
        elif len(handles) > 1:
            runner.free_sequence(handles.pop(chosen))
    filler = handles[0]
    while runner.pages_free():
        append(runner, filler, [7] * min(runner.pages_free(), 100), wanted=[])
    with pytest.raises(LlamaCppMemoryError, match="0 of 512 cells"):
        append(runner, filler, [7])


@pytest.mark.parametrize(("start", "stop"), [(0, 18), (0, 6), (6, 18), (5, 11)])
def test_exported_keys_and_values_continue_with_the_same_tokens(path, story, start, stop, open_runner):
    runner = open_runner(path, OPTIONS)
    source = runner.create_sequence()
    append(runner, source, story[:18])
    data = runner.export_kv(source, start, stop)
    runner.close()
    other = open_runner(path, OPTIONS)
    append(other, other.create_sequence(), story[3:9])  # the cache is not empty when it arrives
    target = other.create_sequence()
    if start:
        append(other, target, story[:start])
    free = other.pages_free()
    other.import_kv(target, start, stop, data)
    assert other.sequence_length(target) == stop
    assert other.pages_free() == free - (stop - start)
    logits = append(other, target, [300])
    assert greedy(other, target, logits, 15) == llama_oracle.greedy(path, [*story[:stop], 300], 15, SAME)


def test_an_import_of_anything_else_is_refused_and_changes_nothing(runner, path, story, open_runner):
    source = runner.create_sequence()
    append(runner, source, story[:12])
    data = runner.export_kv(source, 0, 8)
    target = runner.create_sequence()
    for start, stop, bad in [(0, 8, data[:-1]), (0, 8, data + b"x"), (0, 8, b""), (0, 7, data), (1, 9, data)]:
        with pytest.raises(ValueError, match="positions"):
            runner.import_kv(target, start, stop, bad)
    quantised = open_runner(path.with_name("tinystories656K-F32.gguf"), OPTIONS)
    foreign = quantised.create_sequence()
    append(quantised, foreign, story[:8])
    with pytest.raises(ValueError, match="positions"):
        runner.import_kv(target, 0, 8, quantised.export_kv(foreign, 0, 8))
    assert runner.sequence_length(target) == 0
    assert runner.pages_free() == 512 - 12
    runner.import_kv(target, 0, 8, data)
    assert runner.sequence_length(target) == 8


def test_identity_tells_models_and_types_apart(runner, path, open_runner):
    other_type = open_runner(path, LlamaOptions(context_tokens=256, type_k="f32", type_v="f32", gpu_layers=0))
    other_model = open_runner(path.with_name("tinystories656K-F32.gguf"), OPTIONS)
    again = open_runner(path, OPTIONS)

    def identity(opened):
        return opened.info.kv_layout, opened.info.kv_files

    assert len({identity(runner), identity(other_type), identity(other_model)}) == 3
    assert identity(again) == identity(runner)


@pytest.mark.parametrize(
    ("tokens", "positions", "wanted", "problem"),
    [
        ([512], [3], [0], "token ids"),
        ([-1], [3], [0], "token ids"),
        ([5], [4], [0], "do not continue"),
        ([5], [2], [0], "do not continue"),
        ([5, 6], [3, 5], [0], "do not continue"),
        ([5, 6], [3, 4], [1, 0], "ascend"),
        ([5, 6], [3, 4], [2], "ascend"),
        ([5, 6], [3, 4], [0, 0], "ascend"),
        ([], [], [], "rows"),
        ([5] * 129, list(range(3, 132)), [0], "rows"),
    ],
)
def test_bad_rows_are_refused_before_anything_changes(runner, tokens, positions, wanted, problem):
    sequence = runner.create_sequence()
    append(runner, sequence, [1, 2, 3])
    with pytest.raises(ValueError, match=problem):
        runner.run(tokens, positions, [sequence] * len(tokens), wanted)
    assert runner.sequence_length(sequence) == 3
    assert runner.pages_free() == 512 - 3


def test_bad_handles_and_lengths_are_refused(runner):
    first, second = runner.create_sequence(), runner.create_sequence()
    with pytest.raises(ValueError, match="no sequence 9"):
        runner.run([1], [0], [9], [0])
    with pytest.raises(ValueError, match="are not contiguous"):
        runner.run([1, 1, 1], [0, 0, 1], [first, second, first], [0])
    with pytest.raises(ValueError, match="0 positions, not 1"):
        runner.fork_sequence(first, 1)
    with pytest.raises(ValueError, match="0 positions, not 1"):
        runner.truncate_sequence(first, 1)
    with pytest.raises(ValueError, match="cannot export"):
        runner.export_kv(first, 0, 0)
    runner.create_sequence()
    runner.create_sequence()
    with pytest.raises(LlamaCppError, match="all 4 sequences"):
        runner.create_sequence()
    with pytest.raises(LlamaCppError, match="all 4 sequences"):
        runner.fork_sequence(first, 0)


def test_a_sequence_does_not_outgrow_the_model(path, open_runner):
    runner = open_runner(path, LlamaOptions(context_tokens=4096, batch_rows=512, gpu_layers=0))
    sequence = runner.create_sequence()
    while runner.sequence_length(sequence) < runner.info.max_context:
        append(runner, sequence, [5] * min(512, runner.info.max_context - runner.sequence_length(sequence)), wanted=[])
    with pytest.raises(ValueError, match="grow beyond"):
        append(runner, sequence, [5])


def test_a_closed_runner_refuses_and_closes_again(runner):
    sequence = runner.create_sequence()
    runner.close()
    runner.close()
    with pytest.raises(ValueError, match="closed"):
        runner.create_sequence()
    with pytest.raises(ValueError, match="closed"):
        runner.run([1], [0], [sequence], [0])


def test_quantised_keys_and_values(tmp_path, open_runner):
    path = sparse_models.write(sparse_models.TINY_QWEN3, tmp_path / "model.gguf")
    options = LlamaOptions(context_tokens=256, gpu_layers=0, type_k="q8_0", type_v="q4_0")
    runner = open_runner(path, options)
    sequence = runner.create_sequence()
    append(runner, sequence, [1, 2, 3])
    per_token = 2 * 2 * 128 * (34 + 18) // 32  # layers, KV heads, head length, bytes of blocks
    assert runner.info.kv_bytes_per_token == per_token
    assert abs(len(runner.export_kv(sequence, 0, 3)) - 3 * per_token) < 300  # positions and headers


def test_bad_options_and_files_end_in_errors_not_in_the_process(path, data_dir, open_runner):
    with pytest.raises(ValueError, match="max_sequences"):
        open_runner(path, LlamaOptions(max_sequences=256))
    with pytest.raises(ValueError, match="no tensor type"):
        open_runner(path, LlamaOptions(type_k="f17", gpu_layers=0))
    with pytest.raises(LlamaCppError, match="cannot make a context"):
        open_runner(path, LlamaOptions(type_v="q8_0", gpu_layers=0))
    with pytest.raises(LlamaCppError, match="cannot load"):
        open_runner(data_dir / "vocab/ggml-vocab-llama-spm.gguf", OPTIONS)


def test_an_architecture_that_llama_cpp_does_not_know_is_named(tmp_path, open_runner):
    path = sparse_models.write(replace(sparse_models.TINY_QWEN3, architecture="novel"), tmp_path / "model.gguf")
    with pytest.raises(LlamaCppError, match="unknown model architecture: 'novel'"):
        open_runner(path, OPTIONS)


def test_llama_cpps_log_goes_through_logging(path, caplog, open_runner):
    caplog.set_level(logging.DEBUG, "localllm.llama_cpp")
    open_runner(path, OPTIONS)
    assert any("KV buffer size" in record.message for record in caplog.records)
    assert not any("\n" in record.message for record in caplog.records)
