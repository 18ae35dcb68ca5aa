"""Models with a state instead of keys and values: kept whole or not at all, with the same tokens."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_io.model_file import open_model
from gpu_offload.estimate import Estimate
from gpu_offload.memory import FileSizes
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from tests.gguf_files import finish
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

EMBEDDING, INNER, STATE, KERNEL, RANK, LAYERS, VOCABULARY = 64, 128, 16, 4, 8, 2, 300
PROMPT = [1, 40, 7, 250, 99, 3]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A Mamba model with random weights."""
    path = tmp_path_factory.mktemp("models") / "mamba.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(1024)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(LAYERS)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    rng = np.random.default_rng(7)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * 0.3).astype(np.float32))

    add("token_embd.weight", VOCABULARY, EMBEDDING)
    add("output_norm.weight", EMBEDDING)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", EMBEDDING)
        add(block + "ssm_in.weight", 2 * INNER, EMBEDDING)
        add(block + "ssm_conv1d.weight", INNER, KERNEL)
        add(block + "ssm_conv1d.bias", INNER)
        add(block + "ssm_x.weight", RANK + 2 * STATE, INNER)
        add(block + "ssm_dt.weight", INNER, RANK)
        add(block + "ssm_dt.bias", INNER)
        writer.add_tensor(block + "ssm_a", -np.exp(rng.standard_normal((INNER, STATE))).astype(np.float32))
        add(block + "ssm_d", INNER)
        add(block + "ssm_out.weight", EMBEDDING, INNER)
    finish(writer)
    return path


@pytest.fixture
def runner(path, open_runner) -> LlamaCppRunner:
    return open_runner(path, LlamaOptions(context_tokens=256, max_sequences=3, gpu_layers=0, threads=1))


def continued(runner: LlamaCppRunner, sequence: int, token: int, count: int) -> list[int]:
    tokens = [token]
    while len(tokens) <= count:
        position = runner.sequence_length(sequence)
        tokens.append(int(runner.run(tokens[-1:], [position], [sequence], [0]).argmax()))
    return tokens[1:]


def prefilled(runner: LlamaCppRunner, tokens: list[int] = PROMPT) -> int:
    sequence = runner.create_sequence()
    runner.run(tokens, range(len(tokens)), [sequence] * len(tokens), [])
    return sequence


def test_it_says_that_its_sequences_cannot_be_cut(runner):
    assert not runner.info.can_truncate
    sequence = prefilled(runner)
    for attempt in (
        lambda: runner.truncate_sequence(sequence, 3),
        lambda: runner.fork_sequence(sequence, 3),
        lambda: runner.export_kv(sequence, 0, 3),
    ):
        with pytest.raises(ValueError, match="cannot be truncated"):
            attempt()
    assert runner.sequence_length(sequence) == len(PROMPT)


def test_it_continues_as_llama_cpp_does(runner, path):
    sequence = prefilled(runner)
    assert continued(runner, sequence, 5, 20) == llama_oracle.greedy(path, [*PROMPT, 5], 20)


def test_whole_sequences_can_be_forked_and_started_again(runner, path):
    source = prefilled(runner)
    fork = runner.fork_sequence(source, len(PROMPT))
    assert continued(runner, source, 6, 12) == llama_oracle.greedy(path, [*PROMPT, 6], 12)
    assert continued(runner, fork, 5, 12) == llama_oracle.greedy(path, [*PROMPT, 5], 12)
    runner.truncate_sequence(fork, 0)
    runner.run(PROMPT[:3], range(3), [fork] * 3, [])
    assert continued(runner, fork, 9, 12) == llama_oracle.greedy(path, [*PROMPT[:3], 9], 12)


def test_whole_sequences_can_be_saved_and_restored(runner, path):
    source = prefilled(runner)
    data = runner.export_kv(source, 0, len(PROMPT))
    runner.free_sequence(source)
    target = runner.create_sequence()
    runner.import_kv(target, 0, len(PROMPT), data)
    assert continued(runner, target, 5, 20) == llama_oracle.greedy(path, [*PROMPT, 5], 20)
    with pytest.raises(ValueError, match="not KV of positions"):
        runner.import_kv(runner.create_sequence(), 0, len(PROMPT) - 1, data)


def test_the_state_is_counted_a_sequence_not_a_token(runner, path):
    assert runner.info.kv_bytes_per_token == 0
    with open_model(path) as model:
        use = Estimate(FileSizes(model), LlamaOptions(context_tokens=256, max_sequences=3), ()).in_main_memory()
    with llama_oracle.recorded_log() as log, llama_oracle.context(path, 64):
        pass
    line = next(line for line in "".join(log).split("\n") if "llama_memory_recurrent: size" in line)
    one_sequence = float(line.split("=")[1].split("MiB")[0])
    assert use.kv / 2**20 == pytest.approx(4 * one_sequence, abs=0.01)
