"""Every weight type that llama.cpp's quantizer makes: our logits against its own, and against the dequantised weights.

Both engines round activations to 8 bits, in blocks of 32 or 256 that need not be the same ones. Each is up to 0.03 of
the logits' range from the result with float activations on this model, so two of them differ by up to 0.045.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_io import open_model
from models.native_runner import NativeRunner
from tests.models.architecture_models import MODELS
from tests.models.synthetic import shapes, write
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

FILE_TYPES = (
    "ALL_F32", "MOSTLY_F16", "MOSTLY_BF16", "MOSTLY_Q4_0", "MOSTLY_Q4_1", "MOSTLY_Q5_0", "MOSTLY_Q5_1", "MOSTLY_Q8_0",
    "MOSTLY_Q2_K", "MOSTLY_Q3_K_M", "MOSTLY_Q4_K_M", "MOSTLY_Q5_K_M", "MOSTLY_Q6_K", "MOSTLY_IQ4_NL", "MOSTLY_IQ4_XS",
    "MOSTLY_IQ3_S", "MOSTLY_TQ1_0", "MOSTLY_TQ2_0",
)  # fmt: skip
LENGTHS = (1, 2, 15, 16, 17, 600)
TOLERANCE = 0.045
MODEL = MODELS["llama"]


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_logits_are_near_llama_cpp(file_type: str, tmp_path: Path) -> None:
    source = write(MODEL, tmp_path / "float.gguf")
    path = quantized(source, file_type)
    tokens = np.random.default_rng(3).integers(0, MODEL.vocabulary, max(LENGTHS)).tolist()
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=32 << 20)
    try:
        for length in LENGTHS:
            expected = llama_oracle.prefill_logits(path, tokens[:length])
            ours = logits(runner, tokens[:length])
            assert np.sqrt(((ours - expected) ** 2).mean()) < TOLERANCE * expected.std()
    finally:
        runner.close()


@pytest.mark.parametrize("file_type", [t for t in FILE_TYPES if not t.endswith(("F32", "F16"))])
def test_logits_are_as_near_the_float_weights(file_type: str, tmp_path: Path) -> None:
    """The same file with its weights written back as floats, which leaves only the rounding of activations."""
    path = quantized(write(MODEL, tmp_path / "float.gguf"), file_type)
    plain = tmp_path / "plain.gguf"
    with open_model(path) as file:
        values = {name: file.dequantize(name) for name in shapes(MODEL)}
        runner = NativeRunner(file, kv_bytes=32 << 20)
    write(MODEL, plain, values=values)
    with open_model(plain) as file:
        exact = NativeRunner(file, kv_bytes=32 << 20)
    tokens = list(range(40))
    theirs = llama_oracle.prefill_logits(path, tokens)
    reference = logits(exact, tokens)
    own_error = np.sqrt(((logits(runner, tokens) - reference) ** 2).mean())
    their_error = np.sqrt(((theirs - reference) ** 2).mean())
    runner.close()
    exact.close()
    assert own_error < max(1.5 * their_error, 2e-3 * reference.std())


def test_gpt_oss_in_mxfp4_is_near_llama_cpp(tmp_path: Path) -> None:
    """Experts in MXFP4. If two of them nearly tie for a row, rounding may choose another one; hence the
    median of rows.
    """
    path = quantized(write(MODELS["gpt-oss"], tmp_path / "float.gguf"), "MOSTLY_MXFP4_MOE")
    tokens = np.random.default_rng(3).integers(0, MODELS["gpt-oss"].vocabulary, 300).tolist()
    expected = llama_oracle.prefill_logits(path, tokens)
    with open_model(path) as file:
        assert file.tensors["blk.0.ffn_up_exps.weight"].type.name == "MXFP4"
        runner = NativeRunner(file, kv_bytes=32 << 20)
    ours = logits(runner, tokens)
    runner.close()
    assert np.median(np.sqrt(((ours - expected) ** 2).mean(1))) < TOLERANCE * expected.std()


def quantized(source: Path, file_type: str) -> Path:
    """Quantise a file with llama.cpp."""
    llama: Any = llama_oracle.api()
    target = source.with_name(f"{file_type}.gguf")
    params = llama.llama_model_quantize_default_params()
    params.ftype = gguf.LlamaFileType[file_type].value
    params.nthread = 1
    assert llama.llama_model_quantize(str(source).encode(), str(target).encode(), params) == 0
    return target


def logits(runner: NativeRunner, tokens: list[int]) -> np.ndarray:
    sequence = runner.create_sequence()
    pieces = []
    for first in range(0, len(tokens), runner.info.max_rows):
        piece = tokens[first : first + runner.info.max_rows]
        positions = list(range(first, first + len(piece)))
        pieces.append(runner.run(piece, positions, [sequence] * len(piece), list(range(len(piece)))).copy())
    runner.free_sequence(sequence)
    return np.concatenate(pieces)
