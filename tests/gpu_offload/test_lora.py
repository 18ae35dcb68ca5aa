"""LoRA adapters on llama.cpp: the logits equal those of weights with the adapters merged in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_io.errors import ModelFileError
from gguf_io.runner_info import AdapterSet
from gpu_offload import loading
from gpu_offload.errors import LlamaCppError
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from tests.gpu_offload import lora_files
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

SAME = llama_oracle.Setup(threads=1, flash_attention=True)


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    monkeypatch.setattr(loading, "can_repack", lambda: False)


@pytest.fixture(scope="module")
def path(data_dir) -> Path:
    return data_dir / "models/gguf/stories260K-F32.gguf"


@pytest.fixture(scope="module")
def prompt(path) -> list[int]:
    return llama_oracle.tokenize(path, "Once upon a time, there was a little girl named Lily. She loved to play")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, path) -> Path:
    """Two adapters, and the model with both merged in."""
    made = tmp_path_factory.mktemp("lora")
    one, two = lora_files.factors(path, 1), lora_files.factors(path, 2)
    lora_files.write(made / "one.gguf", one)
    lora_files.write(made / "two.gguf", two)
    lora_files.merge(path, made / "first.gguf", (one, 1.0))
    lora_files.merge(path, made / "both.gguf", (one, 0.5), (two, -0.25))
    return made


@pytest.fixture
def opened(open_runner) -> Callable[..., LlamaCppRunner]:
    """Open a model with adapters."""
    options = LlamaOptions(context_tokens=512, max_sequences=4, threads=1, gpu_layers=0)
    return lambda path, *adapters: open_runner(path, replace(options, lora=adapters))


@pytest.fixture
def runner(path, folder, opened) -> LlamaCppRunner:
    return opened(path, folder / "one.gguf", folder / "two.gguf")


@pytest.fixture(scope="module")
def tolerance(folder, prompt) -> float:
    """Rounding of llama.cpp, and of adapters applied to results instead of merged into weights."""
    return 2 * llama_oracle.own_difference(folder / "both.gguf", tuple(prompt), SAME) + 0.02


FIRST: AdapterSet = ((0, 1.0),)
BOTH: AdapterSet = ((0, 0.5), (1, -0.25))


@pytest.mark.parametrize(("adapters", "merged"), [(FIRST, "first"), (BOTH, "both"), ((), None)])
def test_logits_are_those_of_merged_weights(runner, path, folder, prompt, tolerance, adapters, merged):
    sequence = runner.create_sequence(adapters)
    rows = range(len(prompt))
    found = runner.run(prompt, rows, [sequence] * len(prompt), rows)
    expected = llama_oracle.prefill_logits(folder / f"{merged}.gguf" if merged else path, prompt, SAME)
    np.testing.assert_allclose(found, expected, atol=tolerance)
    if merged:
        plain = llama_oracle.prefill_logits(path, prompt, SAME)
        assert np.abs(expected - plain).max() > 1


def test_one_batch_holds_sequences_of_several_sets(runner, path, folder, prompt, tolerance):
    sets = ((), FIRST, BOTH, FIRST)
    handles = [runner.create_sequence(adapters) for adapters in sets]
    count = len(prompt)
    tokens, positions = prompt * 4, list(range(count)) * 4
    sequences = [handle for handle in handles for _ in prompt]
    wanted = [at * count + count - 1 for at in range(4)]
    found = runner.run(tokens, positions, sequences, wanted)
    names = (path, folder / "first.gguf", folder / "both.gguf", folder / "first.gguf")
    expected = np.stack([llama_oracle.prefill_logits(name, prompt, SAME)[-1] for name in names])
    np.testing.assert_allclose(found, expected, atol=tolerance)


def test_forks_inherit_and_freed_handles_forget(runner, folder, prompt, tolerance):
    sequence = runner.create_sequence(FIRST)
    runner.run(prompt[:-1], range(len(prompt) - 1), [sequence] * (len(prompt) - 1), [])
    fork = runner.fork_sequence(sequence, len(prompt) - 1)
    expected = llama_oracle.prefill_logits(folder / "first.gguf", prompt, SAME)[-1:]
    found = runner.run(prompt[-1:], [len(prompt) - 1], [fork], [0])
    np.testing.assert_allclose(found, expected, atol=tolerance)
    runner.free_sequence(sequence)
    again = runner.create_sequence()
    assert again == sequence
    rows = range(len(prompt))
    plain = runner.run(prompt, rows, [again] * len(prompt), [len(prompt) - 1])
    assert np.abs(plain - expected).max() > 1


def test_stored_keys_and_values_name_the_adapters(runner, path, folder, opened):
    plain, other = opened(path), opened(path, folder / "two.gguf")
    assert len({opened_one.info.adapter_files for opened_one in (runner, plain, other)}) == 3
    assert (plain.info.adapter_count, other.info.adapter_count, runner.info.adapter_count) == (0, 1, 2)
    with pytest.raises(ValueError, match="there are 0 adapters"):
        plain.create_sequence(FIRST)


def test_adapters_for_other_models_are_refused(path, folder, tmp_path, opened):
    made = lora_files.factors(path, 1)
    with pytest.raises(ModelFileError, match="is not a LoRA adapter"):
        opened(path, path)
    with pytest.raises(ModelFileError, match="is not a LoRA adapter in GGUF"):
        opened(path, lora_files.write(tmp_path / "kind.gguf", made, kind="ia3"))
    with pytest.raises(ModelFileError, match="is an adapter for 'qwen2'"):
        opened(path, lora_files.write(tmp_path / "architecture.gguf", made, architecture="qwen2"))
    name, (down, up) = next(iter(made.items()))
    wide = {name: (np.pad(down, ((0, 0), (0, 8))), up)}
    with pytest.raises(ModelFileError, match="which do not fit the model's tensor"):
        opened(path, lora_files.write(tmp_path / "shape.gguf", wide))


def test_what_llama_cpp_would_leave_out_is_refused(tmp_path, opened):
    model = write(MODELS["deepseek2"], tmp_path / "model.gguf")
    for part in ("attn_k_b", "attn_v_b"):
        made = lora_files.factors(model, 1, targets=(part, "attn_output"))
        with pytest.raises(LlamaCppError, match=rf"would leave out what the adapter changes in blk\.0\.{part}"):
            opened(model, lora_files.write(tmp_path / f"{part}.gguf", made, "deepseek2"))
