"""The block table and dequantisation, against gguf's table and quants, and against ggml itself."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from gguf_io import BLOCK_TYPES, BlockType, dequantize

IN_QUANTS = [t for t in BLOCK_TYPES.values() if t.name in ("F32", "F16") or t.type_id in map(int, quants._type_traits)]
IN_GGML = [t for t in BLOCK_TYPES.values() if t.items > 1 and t.name != "Q8_1"]  # ggml never expands Q8_1


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    llama_cpp = pytest.importorskip("llama_cpp", reason="the llama extra is not installed")
    (library,) = (Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so")
    return ctypes.CDLL(str(library))


def random_rows(block_type: BlockType, rows: int = 33, blocks: int = 3) -> NDArray[np.uint8]:
    """Random bytes in which every float scale is finite, wherever it is in the block."""
    data = np.random.default_rng(7).integers(0, 256, (rows, blocks * block_type.bytes), dtype=np.uint8)
    return data & np.uint8(0xBF)  # clears a bit of each exponent, so that no type gets infinity or NaN


def test_the_table_is_complete_and_equals_ggufs() -> None:
    ours = {t.type_id: (t.name, t.items, t.bytes) for t in BLOCK_TYPES.values()}
    theirs = {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    assert theirs.pop(9) == ("Q8_1", 32, 40)  # gguf's row is from 2023; ggml's own table, below, says 36
    assert ours.pop(9) == ("Q8_1", 32, 36)
    assert ours.pop(42) == ("Q2_0", 64, 18)  # gguf has no row yet, ggml's table does
    assert ours == theirs


@pytest.mark.oracle
def test_the_table_equals_ggmls(ggml: ctypes.CDLL) -> None:
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_type_name.restype = ctypes.c_char_p
    for t in BLOCK_TYPES.values():
        assert ggml.ggml_type_name(t.type_id).decode().upper() == t.name.upper()
        assert (ggml.ggml_blck_size(t.type_id), ggml.ggml_type_size(t.type_id)) == (t.items, t.bytes)


@pytest.mark.parametrize("block_type", IN_QUANTS, ids=lambda t: t.name)
def test_dequantize_equals_gguf(block_type: BlockType) -> None:
    data = random_rows(block_type)
    expected = quants.dequantize(data, GGMLQuantizationType(block_type.type_id))
    values = dequantize(data, block_type)
    assert values.dtype == np.float32
    assert values.shape == (33, 3 * block_type.items)
    assert np.isfinite(expected).all()
    assert np.array_equal(values, expected)
    assert not np.shares_memory(values, data)


@pytest.mark.oracle
@pytest.mark.parametrize("block_type", IN_GGML, ids=lambda t: t.name)
def test_dequantize_agrees_with_ggml(block_type: BlockType, ggml: ctypes.CDLL) -> None:
    data = random_rows(block_type)
    values = dequantize(data, block_type)
    expected = np.empty_like(values)
    name = block_type.name.lower().replace("_k", "_K")
    expand = getattr(ggml, f"dequantize_row_{name}")
    expand(ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(expected.ctypes.data), ctypes.c_int64(values.size))
    # gguf and ggml multiply scales in a different order in a few types: equal except for the last bits.
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_plain_numbers() -> None:
    for name, dtype in {"I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8", "BF16": None}.items():
        (block_type,) = (t for t in BLOCK_TYPES.values() if t.name == name)
        written = np.array([[-3, 0, 100]], dtype or np.float32)
        data = written.view(np.uint8) if dtype else written.view(np.uint8).reshape(3, 4)[:, 2:].copy().reshape(1, 6)
        assert dequantize(data, block_type).tolist() == [[-3, 0, 100]]


def test_q8_1_by_hand() -> None:
    block = np.float16([0.5, 99]).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    values = dequantize(np.frombuffer(block, np.uint8), BLOCK_TYPES[9])
    assert values.tolist() == [quant / 2 for quant in range(-16, 16)]


def test_a_damaged_scale_gives_nan_without_a_warning() -> None:
    for type_id in (8, 12, 15, 41):
        block_type = BLOCK_TYPES[type_id]
        assert not np.isfinite(dequantize(np.full(block_type.bytes, 0xFF, np.uint8), block_type)).all()


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="Q8_0 rows are multiples of 34 bytes, not 35"):
        dequantize(np.zeros((2, 35), np.uint8), BLOCK_TYPES[8])
