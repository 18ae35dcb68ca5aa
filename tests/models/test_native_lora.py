"""LoRA adapters on the native engine: logits against llama.cpp's, and the same bits alone, batched and in chunks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_io import open_model
from gguf_io.errors import ModelFileError
from gguf_io.lora import Adapter
from gguf_io.runner_info import AdapterSet
from models.errors import UnsupportedModelError
from models.native_runner import NativeRunner
from tests.gpu_offload import lora_files
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.oracle import llama_oracle

NAME = "blk.1.attn_q.weight"
EXACT = llama_oracle.Setup(type_k="f32", type_v="f32")
TOLERANCE = 1e-3  # of the logits' spread
EVERYTHING = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_qkv")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp", "ffn_up_shexp", "ffn_down_shexp")
HEADS = ("attn_k_b", "attn_v_b", "attn_kv_b")
BLOCKS = {"F32": 1, "Q8_0": 32, "TQ2_0": 256}
SETS: tuple[AdapterSet, ...] = ((), ((0, 1.0),), ((1, -0.5),), ((0, 0.5), (1, 1.5)), ((0, 1.0),))

Opened = Callable[..., NativeRunner]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Open a model with adapters."""
    made = []

    def open_one(path: Path, *adapters: Path, threads: int = 2) -> NativeRunner:
        with ExitStack() as files:
            file = files.enter_context(open_model(path))
            loaded = [Adapter(files.enter_context(open_model(adapter)), file) for adapter in adapters]
            made.append(NativeRunner(file, kv_bytes=32 << 20, threads=threads, adapters=loaded))
        return made[-1]

    yield open_one
    for runner in made:
        runner.close()


def adapters_of(path: Path, architecture: str, targets: Sequence[str]) -> list[Path]:
    """Two adapters for a model, of different ranks."""
    made = [lora_files.factors(path, seed, 0.06, targets, rank) for seed, rank in ((1, 8), (2, 20))]
    names = (path.with_name(f"adapter-{number}.gguf") for number in range(2))
    return [lora_files.write(name, one, architecture) for name, one in zip(names, made, strict=True)]


def run(runner: NativeRunner, sequence: int, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Append tokens to a sequence, and return the logits after each."""
    start, count = runner.sequence_length(sequence), len(tokens)
    return runner.run(tokens, range(start, start + count), [sequence] * count, range(count)).copy()


def batched(runner: NativeRunner, tokens: Sequence[int], sets: Sequence[AdapterSet]) -> list[NDArray[np.float32]]:
    """The logits of the same tokens with several sets of adapters, in one step."""
    handles, count = [runner.create_sequence(chosen) for chosen in sets], len(tokens)
    rows = [handle for handle in handles for _ in tokens]
    found = runner.run([*tokens] * len(sets), [*range(count)] * len(sets), rows, range(len(rows))).copy()
    for handle in handles:
        runner.free_sequence(handle)
    return np.split(found, len(sets))


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", (*EVERYTHING, "output", "token_embd")),
        ("qwen2", EVERYTHING),
        ("phi3", EVERYTHING),
        ("gemma2", EVERYTHING),
        ("cohere2", EVERYTHING),
        ("mixtral", (*EVERYTHING, *EXPERTS)),
        ("qwen3moe", (*EVERYTHING, *EXPERTS)),
        ("glm4moe", (*EVERYTHING, *EXPERTS)),
        ("deepseek2", ("attn_output", *EVERYTHING[4:7], *EXPERTS)),
    ],
)
def test_logits_are_llama_cpps(name: str, targets: tuple[str, ...], tmp_path: Path, opened: Opened) -> None:
    model = MODELS[name]
    path = write(model, tmp_path / "model.gguf")
    made = adapters_of(path, model.architecture, targets)
    runner = opened(path, *made)
    tokens = np.random.default_rng(9).integers(0, model.vocabulary, 40).tolist()
    plain = llama_oracle.prefill_logits(path, tokens, EXACT)
    for chosen, found in zip(SETS, batched(runner, tokens, SETS), strict=True):
        expected = llama_oracle.prefill_logits(path, tokens, EXACT, [(made[one], weight) for one, weight in chosen])
        assert np.sqrt(((found - expected) ** 2).mean()) < TOLERANCE * expected.std()
        if chosen:
            assert np.sqrt(((expected - plain) ** 2).mean()) > 20 * TOLERANCE * expected.std()


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["deepseek2", "deepseek2-odd", "deepseek2-old", "deepseek2-dense"])
def test_logits_of_changed_heads_are_llama_cpps_for_merged_weights(
    name: str, shared: bool, tmp_path: Path, opened: Opened
) -> None:
    """llama.cpp itself leaves such changes out. shared: all heads have the same factor on the side of the latent."""
    model = MODELS[name]
    path, tokens = write(model, tmp_path / "model.gguf"), np.random.default_rng(5).integers(0, 256, 40).tolist()
    made = []
    for seed, rank in ((1, 8), (2, 20)):
        factors = lora_files.factors(path, seed, 0.06, HEADS, rank)
        for changed, (down, up) in list(factors.items()):
            if shared and down.ndim > 2:
                factors[changed] = (down, up[:1]) if "attn_k_b" in changed else (down[:1], up)
        made.append(factors)
    files = [lora_files.write(tmp_path / f"{at}.gguf", one, model.architecture) for at, one in enumerate(made)]
    plain = llama_oracle.prefill_logits(path, tokens, EXACT)
    for chosen, found in zip(SETS, batched(opened(path, *files), tokens, SETS), strict=True):
        merged = lora_files.merge(path, tmp_path / "merged.gguf", *((made[one], weight) for one, weight in chosen))
        expected = llama_oracle.prefill_logits(merged, tokens, EXACT)
        assert np.sqrt(((found - expected) ** 2).mean()) < TOLERANCE * expected.std()
        if chosen:
            assert np.sqrt(((expected - plain) ** 2).mean()) > 20 * TOLERANCE * expected.std()


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "TQ2_0"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek2"])
def test_bits_do_not_depend_on_the_step(name: str, kind: str, tmp_path: Path, opened: Opened) -> None:
    model, targets = MODELS[name], (*EVERYTHING, *EXPERTS, *HEADS, "token_embd")
    path = write(model, tmp_path / "model.gguf")
    made = adapters_of(path, model.architecture, targets)
    if kind != "F32":
        type_ = gguf.GGMLQuantizationType[kind]
        values = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
        whole = [name for name, value in values.items() if value.ndim > 1 and value.shape[-1] % BLOCKS[kind] == 0]
        types = {name: type_ for name in whole if "ffn_gate_inp" not in name}
        values |= {name: gguf.quants.quantize(values[name], type_) for name in types}
        path = write(model, tmp_path / "quantised.gguf", values=values, types=types)
    two, one, plain = opened(path, *made), opened(path, *made, threads=1), opened(path)
    tokens = np.random.default_rng(3).integers(0, model.vocabulary, 70).tolist()
    together = batched(two, tokens, SETS)
    np.testing.assert_array_equal(together[0], run(plain, plain.create_sequence(), tokens))
    for chosen, expected in zip(SETS, together, strict=True):
        for runner, sizes in ((two, [1] * 70), (one, [70]), (one, [3, 1, 16, 50])):
            sequence, parts = runner.create_sequence(chosen), iter(tokens)
            found = [run(runner, sequence, [*islice(parts, size)]) for size in sizes]
            np.testing.assert_array_equal(np.concatenate(found), expected)
            runner.free_sequence(sequence)


def test_forks_inherit_adapters(tmp_path: Path, opened: Opened) -> None:
    path = write(MODELS["llama"], tmp_path / "model.gguf")
    runner = opened(path, *adapters_of(path, "llama", EVERYTHING))
    first = runner.create_sequence(SETS[3])
    expected = run(runner, first, range(20))
    fork = runner.fork_sequence(first, 12)
    np.testing.assert_array_equal(run(runner, fork, range(12, 20)), expected[12:])
    with pytest.raises(ValueError, match="there are 2 adapters"):
        runner.create_sequence(((2, 1.0),))


def test_tied_embeddings_change_as_embeddings_only(tmp_path: Path, opened: Opened) -> None:
    tied = replace(MODELS["llama"], tied=True)
    path = write(tied, tmp_path / "tied.gguf")
    values = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    values["output.weight"] = values["token_embd.weight"]
    apart = write(replace(tied, tied=False), tmp_path / "apart.gguf", values=values)
    made = adapters_of(apart, "llama", ("token_embd", "output"))
    found = [batched(opened(each, *made), range(30), SETS) for each in (path, apart)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            lambda down, up: {NAME: (np.pad(down, ((0, 0), (0, 8))), up)},
            r"shapes \(4, 264\) and \(256, 4\), which do not",
        ),
        (lambda down, up: {NAME: (down[:3], up)}, r"have the shapes \(3, 256\) and \(256, 4\)"),
        (lambda down, up: {NAME: (np.zeros((300, 256)), np.zeros((256, 300)))}, r"shapes \(300, 256\)"),
        (lambda down, up: {"blk.9.attn_q.weight": (down, up)}, r"has no tensor blk\.9\.attn_q\.weight"),
        (lambda down, up: {NAME: (down, None)}, "blk.1.attn_q.weight.lora_a lacks its other factor"),
        (lambda down, up: {NAME: (None, up)}, "blk.1.attn_q.weight.lora_b lacks its other factor"),
        (lambda down, up: {}, "changes no tensor"),
    ],
)
def test_what_does_not_fit_is_refused(
    changed: Callable[..., Any], problem: str, tmp_path: Path, opened: Opened
) -> None:
    path = write(MODELS["llama"], tmp_path / "model.gguf")
    adapter = lora_files.write(tmp_path / "adapter.gguf", changed(*lora_files.factors(path, 1)[NAME]))
    with pytest.raises(ModelFileError, match=problem):
        opened(path, adapter)


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        ({"alpha": float("nan")}, "alpha: is nan, not a finite number"),
        ({"alpha": float("-inf")}, "alpha: is -inf, not a finite number"),
        ({"architecture": "qwen2"}, "is an adapter for 'qwen2'; the model is 'llama'"),
        ({"kind": "ia3"}, "is not a LoRA adapter in GGUF"),
        ({"beside": {"blk.0.attn_q.bias": np.zeros(256, np.float32)}}, "neither a .lora_a nor a .lora_b"),
    ],
)
def test_other_adapters_are_refused(described: dict[str, Any], problem: str, tmp_path: Path, opened: Opened) -> None:
    path = write(MODELS["llama"], tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=problem):
        opened(path, lora_files.write(tmp_path / "adapter.gguf", lora_files.factors(path, 1), **described))


def test_a_tensor_that_is_computed_in_another_way_is_refused(tmp_path: Path, opened: Opened) -> None:
    path = write(MODELS["lfm2"], tmp_path / "model.gguf")
    made = lora_files.write(tmp_path / "a.gguf", lora_files.factors(path, 1, targets=("shortconv.conv",)), "lfm2")
    with pytest.raises(UnsupportedModelError, match=r"cannot apply the adapter to the tensor blk\.\d\.shortconv\.conv"):
        opened(path, made)
