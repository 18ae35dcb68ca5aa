"""The real tiny models: logits against a float32 reference, greedy text, and llama.cpp's logits and perplexity.

A float file rounds only keys, values and their factors in products, to 16 bits. A quantised file also rounds
activations to 8 bits, as llama.cpp does, but in blocks of another shape: two roundings of about 0.6 % each, which these
models' few narrow layers hardly average out. Real texts show whether that costs anything: perplexity must agree within
1 %.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_io import open_model
from models.native_runner import NativeRunner
from tests.oracle import llama_oracle

FILES = [
    f"{model}{kind}.gguf"
    for model in ("stories260K", "tinystories656K")
    for kind in ("-F32", "-F16", "-Q8_0", "-Q4_K_M-fallback", "-pad256-Q8_0", "-pad256-Q4_K_M")
]
FLOAT_TOLERANCE = 2e-3
QUANTISED_TOLERANCE = 0.05
GREEDY_TOKENS = 60
PERPLEXITY_CHUNKS, PERPLEXITY_TOKENS = 6, 256


@pytest.fixture(scope="module", params=FILES)
def loaded(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[tuple[Path, NativeRunner]]:
    path = data_dir / "models" / "gguf" / request.param
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=32 << 20)
    yield path, runner
    runner.close()


def is_float(path: Path) -> bool:
    return path.stem.endswith(("F32", "F16"))


def golden(data_dir: Path, path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((data_dir / "models" / "golden.json").read_text())["files"][path.name]
    return entries


def logits(runner: NativeRunner, tokens: list[int]) -> np.ndarray:
    sequence = runner.create_sequence()
    count = len(tokens)
    result = runner.run(tokens, list(range(count)), [sequence] * count, list(range(count))).copy()
    runner.free_sequence(sequence)
    return result


def greedy(runner: NativeRunner, prompt: list[int], count: int) -> list[int]:
    sequence = runner.create_sequence()
    rows = runner.run(prompt, list(range(len(prompt))), [sequence] * len(prompt), [len(prompt) - 1])
    tokens = [int(rows[0].argmax())]
    while len(tokens) < count:
        position = runner.sequence_length(sequence)
        tokens.append(int(runner.run(tokens[-1:], [position], [sequence], [0])[0].argmax()))
    runner.free_sequence(sequence)
    return tokens


def test_float_files_equal_the_reference(loaded: tuple[Path, NativeRunner], data_dir: Path) -> None:
    path, runner = loaded
    if not is_float(path):
        pytest.skip("a quantised file")
    for entry in golden(data_dir, path):
        last = logits(runner, entry["ids"])[-1]
        assert np.abs(last[:8] - entry["logits8"]).max() < FLOAT_TOLERANCE * last.std()
        assert greedy(runner, entry["ids"], GREEDY_TOKENS) == entry["np_greedy"][:GREEDY_TOKENS]


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_logits_are_near_llama_cpp(loaded: tuple[Path, NativeRunner], data_dir: Path) -> None:
    path, runner = loaded
    tolerance = FLOAT_TOLERANCE if is_float(path) else QUANTISED_TOLERANCE
    for entry in golden(data_dir, path):
        expected = llama_oracle.prefill_logits(path, entry["ids"])[-1]
        difference = logits(runner, entry["ids"])[-1] - expected
        assert np.sqrt((difference**2).mean()) < tolerance * expected.std()


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_perplexity_is_llama_cpp_s(loaded: tuple[Path, NativeRunner], data_dir: Path) -> None:
    path, runner = loaded
    text = (data_dir / "text" / "GrimmsFairyTales.txt").read_text()[20_000:40_000]
    plain = "".join(c for c in text if c.isascii() and (c.isalpha() or c in " .,"))
    tokens = llama_oracle.tokenize(path, plain, add_special=False)
    chunks = [tokens[i * PERPLEXITY_TOKENS : (i + 1) * PERPLEXITY_TOKENS] for i in range(PERPLEXITY_CHUNKS)]
    ours = np.mean([surprise(logits(runner, chunk), chunk) for chunk in chunks])
    theirs = np.mean([surprise(llama_oracle.prefill_logits(path, chunk), chunk) for chunk in chunks])
    assert abs(np.exp(ours - theirs) - 1) < 0.01


def surprise(rows: np.ndarray, tokens: list[int]) -> float:
    """Mean negative log probability of each token after those before it."""
    rows = rows[:-1].astype(np.float64)
    top = rows.max(axis=1, keepdims=True)
    normal = np.log(np.exp(rows - top).sum(axis=1)) + top[:, 0]
    return float((normal - rows[np.arange(len(rows)), tokens[1:]]).mean())
