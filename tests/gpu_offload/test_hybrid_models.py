"""Models with attention in some layers and states in others: the engine keeps their states whole, and reuses them."""

from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_io.model_file import open_model
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.engine.disk_cache import DiskCache
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.stream import Completion
from tests.fakes.fake_vocabulary import FakeVocabulary
from tests.gguf_files import finish
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

WIDTH, HEADS, HEAD, FEED_FORWARD, KERNEL, VOCABULARY = 64, 4, 16, 96, 3, 300
KV_HEADS = [0, 2, 0]  # convolution state, attention, convolution state
PROMPT = tuple((at * 13) % 290 + 3 for at in range(600))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in LFM2's shape, with random weights."""
    path = tmp_path_factory.mktemp("models") / "hybrid.gguf"
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_block_count(len(KV_HEADS))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_shortconv_l_cache(KERNEL)
    rng = np.random.default_rng(3)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", (rng.standard_normal(shape) * 0.2).astype(np.float32))

    add("token_embd", VOCABULARY, WIDTH)
    add("token_embd_norm", WIDTH)
    for layer, kv_heads in enumerate(KV_HEADS):
        block = f"blk.{layer}."
        add(block + "attn_norm", WIDTH)
        add(block + "ffn_norm", WIDTH)
        add(block + "ffn_gate", FEED_FORWARD, WIDTH)
        add(block + "ffn_up", FEED_FORWARD, WIDTH)
        add(block + "ffn_down", WIDTH, FEED_FORWARD)
        if kv_heads:
            add(block + "attn_q", WIDTH, WIDTH)
            add(block + "attn_k", kv_heads * HEAD, WIDTH)
            add(block + "attn_v", kv_heads * HEAD, WIDTH)
            add(block + "attn_output", WIDTH, WIDTH)
            add(block + "attn_q_norm", HEAD)
            add(block + "attn_k_norm", HEAD)
        else:
            add(block + "shortconv.conv", WIDTH, KERNEL)
            add(block + "shortconv.in_proj", 3 * WIDTH, WIDTH)
            add(block + "shortconv.out_proj", WIDTH, WIDTH)
    finish(writer)
    return path


def new_engine(path: Path, folder: Path) -> Engine:
    with open_model(path) as model:
        runner = LlamaCppRunner(model, LlamaOptions(context_tokens=4096, max_sequences=12, gpu_layers=0, threads=1))
    assert not runner.info.can_truncate
    return Engine(runner, FakeVocabulary(), max_running=2, disk=DiskCache(folder, runner.info.kv_layout, 2**26))


def answer(engine: Engine, prompt: tuple[int, ...]) -> Completion:
    request = GenerationRequest(prompt, SamplingParams(temperature=0), max_tokens=8, ignore_eos=True)
    stream = engine.submit(request)
    while engine.step():
        engine.check_integrity()
    return stream.collect()


def test_turns_compute_what_is_new_also_after_a_restart(path: Path, tmp_path: Path) -> None:
    with closing(new_engine(path, tmp_path)) as engine:
        first = answer(engine, PROMPT)
        assert list(first.token_ids) == llama_oracle.greedy(path, list(PROMPT), 8)
        turn = (*PROMPT, *first.token_ids, 9, 8, 7)
        second = answer(engine, turn)
        assert second.last.counts.cached_memory == len(PROMPT) + 7
        assert list(second.token_ids) == llama_oracle.greedy(path, list(turn), 8)
    with closing(new_engine(path, tmp_path)) as engine:
        third = answer(engine, (*turn, *second.token_ids, 5))
        assert third.last.counts.cached_disk == len(turn) + 7
        assert list(third.token_ids) == llama_oracle.greedy(path, [*turn, *second.token_ids, 5], 8)


def test_a_prompt_with_another_end_begins_at_a_kept_state(path: Path, tmp_path: Path) -> None:
    with closing(new_engine(path, tmp_path)) as engine:
        answer(engine, PROMPT)
        for kept, branch in ((584, (*PROMPT[:-2], 7, 7)), (512, (*PROMPT[:560], 4, 5, 6))):
            done = answer(engine, branch)
            assert done.last.counts.cached_memory == kept
            assert list(done.token_ids) == llama_oracle.greedy(path, list(branch), 8)
