"""Keys and values stored as f16, q8_0 or q4_0 in any combination: sizes, refusals, and llama.cpp with
the same types.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_io import load_tokenizer, open_model
from localllm.wings.lab.quality.perplexity import perplexity, split_chunks
from models.errors import UnsupportedModelError
from models.native_runner import NativeRunner
from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic, write
from tests.oracle import llama_oracle

BYTES = {"f16": 2 * 64 + 4, "q8_0": 64 + 2 * 2, "q4_0": 32 + 2 * 2}  # per key or value of a head of 64
MIXES = [("q8_0", "q8_0"), ("q8_0", "f16"), ("f16", "q8_0")]
FOUR_BITS = [("q4_0", "q4_0"), ("q8_0", "q4_0")]
# Eight query heads share a key: kernels of mixed types are compiled for them alone (test_attention_kernels).
SHARING: dict[str, int] = {"heads": 8, "kv_heads": 1}
SHARED = {name: replace(MODELS[name], **SHARING) for name in ("llama", "qwen3")}
# llama.cpp rounds queries and weights to 8 bits where we use 16, so the difference is as large as the error of q8_0
# itself: a quarter of a percent of a key's or value's largest number.
TOLERANCE = 0.02
NUMBERS = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
)


def open_runner(path: Path, types: tuple[str, str]) -> NativeRunner:
    with open_model(path) as file:
        return NativeRunner(file, kv_bytes=8 << 20, kv_types=types)


def logits(runner: NativeRunner, tokens: list[int]) -> np.ndarray:
    sequence = runner.create_sequence()
    count = len(tokens)
    result = runner.run(tokens, list(range(count)), [sequence] * count, list(range(count))).copy()
    runner.free_sequence(sequence)
    return result


def tokens_of(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(3).integers(0, 320, count).tolist()
    return tokens


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(SHARED["llama"], tmp_path_factory.mktemp("models") / "llama.gguf")


@pytest.mark.parametrize("types", [("f16", "f16"), *MIXES, *FOUR_BITS])
def test_sizes_and_identity_follow_the_types(path: Path, types: tuple[str, str]) -> None:
    model = SHARED["llama"]
    runner = open_runner(path, types)
    per_token = model.layers * model.kv_heads * (BYTES[types[0]] + BYTES[types[1]])
    assert runner.info.kv_bytes_per_token == per_token
    assert runner.info.pages_total == (8 << 20) // (16 * per_token)
    assert runner.info.kv_layout.endswith(f":{types[0]}:{types[1]}".replace("f16", "i16"))
    logits_before = logits(runner, tokens_of(20))
    sequence = runner.create_sequence()
    runner.run(tokens_of(20), list(range(20)), [sequence] * 20, [19])
    data = runner.export_kv(sequence, 3, 19)
    assert len(data) == 2 * 16 * per_token  # whole pages
    copy = runner.fork_sequence(sequence, 3)
    runner.import_kv(copy, 3, 19, data)
    last = runner.run(tokens_of(20)[19:], [19], [copy], [0])
    np.testing.assert_array_equal(last[0], logits_before[-1])
    runner.close()


def test_heads_that_blocks_do_not_fit_are_refused(tmp_path: Path) -> None:
    odd = replace(MODELS["llama"], head=80, extra={"rope.dimension_count": 80})
    path = write(odd, tmp_path / "odd.gguf")
    for types, what in ((("q8_0", "f16"), "keys"), (("f16", "q8_0"), "values"), (("q4_0", "q4_0"), "keys")):
        with pytest.raises(UnsupportedModelError, match=f"^q._0 stores {what} in blocks of 32 numbers.* heads of 80"):
            open_runner(path, types)


@pytest.mark.parametrize(("kind", "size"), [("f16", 2 * 160), ("q8_0", 160 + 2 * 5)])
def test_latents_are_stored_once(kind: str, size: int, tmp_path: Path) -> None:
    path = write(MODELS["deepseek2"], tmp_path / "model.gguf")
    runner = open_runner(path, (kind, kind))
    assert runner.info.kv_bytes_per_token == 3 * size  # layers; a latent of 128 and 32 rotated values
    sequence = runner.create_sequence()
    runner.run(tokens_of(20), list(range(20)), [sequence] * 20, [19])
    assert len(runner.export_kv(sequence, 0, 20)) == 32 * 3 * size  # whole pages
    runner.close()
    with pytest.raises(UnsupportedModelError, match=r"keys in f16 and values in q8_0 are not possible"):
        open_runner(path, ("f16", "q8_0"))
    with pytest.raises(UnsupportedModelError, match=r"one latent, which q4_0 does not support\. Use f16 or q8_0"):
        open_runner(path, ("q4_0", "q4_0"))


def test_the_error_for_an_unknown_type_lists_the_types(path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"cannot store values as 'q5_0'\. Choose one of: f16, q8_0, q4_0"):
        open_runner(path, ("f16", "q5_0"))


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize(("name", "types"), [*product(("llama", "qwen3"), MIXES), ("deepseek2-dense", MIXES[0])])
def test_logits_are_llama_cpp_s_with_the_same_types(name: str, types: tuple[str, str], tmp_path: Path) -> None:
    model: Synthetic = {**MODELS, **SHARED}[name]
    path = write(model, tmp_path / f"{name}.gguf")
    tokens = tokens_of(300)
    runner = open_runner(path, types)
    ours = logits(runner, tokens)
    exact = open_runner(path, ("f16", "f16"))
    plain = logits(exact, tokens)
    for one in (runner, exact):
        one.close()
    setup = llama_oracle.Setup(type_k=types[0], type_v=types[1], flash_attention=True)
    theirs = llama_oracle.prefill_logits(path, tokens, setup)
    spread = plain.std()
    assert np.sqrt(((ours - theirs) ** 2).mean()) < TOLERANCE * spread
    # The requested types are really used: q8_0 differs from f16, by no more than llama.cpp's does.
    assert 0 < np.sqrt(((ours - plain) ** 2).mean()) < 1.1 * np.sqrt(((theirs - plain) ** 2).mean())


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_four_bits_lose_no_more_than_llama_cpp_s(name: str, tmp_path: Path) -> None:
    path = write(MODELS[name], tmp_path / f"{name}.gguf")
    tokens = tokens_of(300)
    found = []
    for types in (("q4_0", "q4_0"), ("f16", "f16")):
        runner = open_runner(path, types)
        found.append(logits(runner, tokens))
        runner.close()
    ours, plain = found
    setup = llama_oracle.Setup(type_k="q4_0", type_v="q4_0", flash_attention=True)
    theirs = llama_oracle.prefill_logits(path, tokens, setup)
    lost = np.sqrt(((ours - plain) ** 2).mean())
    assert 0 < lost < 1.1 * np.sqrt(((theirs - plain) ** 2).mean())
    assert lost < 0.2 * plain.std()


@pytest.fixture(scope="module")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained model whose heads of 16 are padded with zeros to 32, and the two that share a key to eight.

    That changes nothing but their size and number.
    """
    reader = gguf.GGUFReader(data_dir / "models" / "gguf" / "tinystories656K-F32.gguf")
    values = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    numbers = {name: reader.fields[f"llama.{name}"].contents() for name in NUMBERS}
    model = Synthetic(
        "llama",
        layers=numbers["block_count"],
        embedding=numbers["embedding_length"],
        feed_forward=numbers["feed_forward_length"],
        heads=8 * numbers["attention.head_count_kv"],
        kv_heads=numbers["attention.head_count_kv"],
        head=32,
        vocabulary=len(values["token_embd.weight"]),
        tied="output.weight" not in values,
        extra={"rope.dimension_count": 16},
    )
    for layer in range(model.layers):
        for letter, factor in (("q", np.sqrt(np.float32(2))), ("k", np.float32(1)), ("v", np.float32(1))):
            name = f"blk.{layer}.attn_{letter}.weight"
            values[name] = _padded(values[name], 16, 32) * factor
            if letter == "q":
                values[name] = _padded(values[name], 2 * 32, 8 * 32)
        name = f"blk.{layer}.attn_output.weight"
        values[name] = np.ascontiguousarray(_padded(_padded(values[name].T, 16, 32), 2 * 32, 8 * 32).T)
    return write(model, tmp_path_factory.mktemp("trained") / "trained.gguf", values=values)


def _padded(rows: np.ndarray, size: int, padded: int) -> np.ndarray:
    """Rows in parts of `size`, each filled with zeros to `padded`."""
    parts = rows.reshape(-1, size, rows.shape[1])
    return np.pad(parts, ((0, 0), (0, padded - size), (0, 0))).reshape(-1, rows.shape[1])


def test_perplexity_of_a_trained_model_hardly_changes(trained: Path, data_dir: Path) -> None:
    with open_model(data_dir / "models" / "gguf" / "tinystories656K-F32.gguf") as file:
        tokenizer = load_tokenizer(file)
    text = (data_dir / "text" / "GrimmsFairyTales.txt").read_text()[20_000:40_000]
    tokens = tokenizer.encode("".join(c for c in text if c.isascii() and (c.isalpha() or c in " .,")))
    chunks = split_chunks(tokens, 256, tokenizer.bos_id)[:6]
    found = {}
    for types in (("f16", "f16"), *MIXES, *FOUR_BITS):
        runner = open_runner(trained, types)
        found[types] = perplexity(runner, chunks, lambda _done, _count: None).value
        runner.close()
    plain = found.pop(("f16", "f16"))
    for types, value in found.items():
        assert value != plain
        assert abs(value / plain - 1) < (2e-2 if "q4_0" in types else 2e-3), found
