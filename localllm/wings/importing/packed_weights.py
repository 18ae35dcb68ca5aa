"""Quantised weights of a checkpoint, dequantised to floats: GPTQ, AWQ, and compressed-tensors.

A weight is (code - zero) * scale, with a zero point and a scale for a group of a row's values. Methods differ in where
codes, zero points and scales are stored. Sources: AutoGPTQ 0.7.1 (nn_modules/qlinear/qlinear_cuda_old.py), AutoAWQ
0.2.9 (utils/packing_utils.py), compressed-tensors 0.20 (compressors/pack_quantized), transformers
(integrations/mxfp4.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.text import shortened
from localllm.wings.importing.checkpoint import StoredTensor
from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.four_bit_floats import Codes, Mxfp4, Nvfp4
from localllm.wings.importing.matrices import CheckpointMatrix, FloatMatrix, Floats, Numbers, Plain

Tensors = Mapping[str, StoredTensor]

_WORD = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # positions in a word of the values of eight neighbouring rows
_GET = "Get the model in BF16, FP8, GPTQ (4 or 8 bits), AWQ (gemm) or as GGUF."
# By method, the values of options that are imported.
_OPTIONS: dict[str, dict[str, tuple[object, ...]]] = {
    "": {},
    "fp8": {},
    "fbgemm_fp8": {},
    "mxfp4": {},
    "gptq": {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "is_marlin_format": (False,)},
    "awq": {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)},
    "compressed-tensors": {"format": ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized",
                                      "nvfp4-pack-quantized", "mixed-precision")},
    "modelopt": {"quant_algo": ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")},
}  # fmt: skip
_COMPANIONS = (".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx",
              ".input_scale", ".k_scale", ".v_scale", ".weight_scale_2", ".weight_global_scale",
              ".input_global_scale")  # fmt: skip
"""Name suffixes of tensors that belong to others."""
_OWNERS = {"_scale_inv": "", "_scale": "", "_scales": "_blocks"}  # more, by owners' suffixes, if an owner exists
_FP8_SCALES = ("_scale_inv", "_scale")
_WORDS_IN = (".qweight", ".qzeros", ".weight_packed")
_CODES = {".qweight": ".weight", ".weight_packed": ".weight", "_blocks": ".weight"}


class CheckpointPacking:
    """How a checkpoint's quantised weights are packed, from its quantization_config.

    Raises CheckpointError for an unsupported method.
    """

    def __init__(self, config: Config) -> None:
        stated = config.table("quantization_config")
        self._method = str(stated.values.get("quant_method") or "")
        if self._method not in _OPTIONS:
            raise CheckpointError(
                f"{stated.where}: weights packed by {shortened(self._method)!r} are not imported. {_GET}"
            )
        for name, known in _OPTIONS[self._method].items():
            if (value := stated.values.get(name)) is not None and value not in known:
                raise CheckpointError(
                    f"{stated.where}: {self._method} with {name} {shortened(repr(value))} is not imported; "
                    f"only {' or '.join(map(str, known))} is. {_GET}"
                )
        self._zero_offset = 0 if stated.values.get("checkpoint_format") == "gptq_v2" else 1
        self._block = _square_block(stated)

    def matrix(self, tensors: Tensors, name: str) -> tuple[str, CheckpointMatrix] | None:
        """A stored tensor's unpacked name and matrix; None for one that belongs to another, or is not used.

        Raises CheckpointError if it is damaged or its companions are missing.
        """
        tensor = tensors[name]
        for end, plain in _CODES.items():
            if name.endswith(end):
                stem = name.removesuffix(end)
                return stem + plain, self._unpacked(tensors, stem, end)
        if name.endswith(_COMPANIONS) or _belongs(tensors, name):
            return None
        packed = name.removesuffix(".bias") + ".qweight"
        if name.endswith(".bias") and packed in tensors and not tensor.raw().any():
            return None  # zeros, which some tools write for models without biases
        return name, self._plain(tensors, tensor)

    def _plain(self, tensors: Tensors, tensor: StoredTensor) -> CheckpointMatrix:
        """An unpacked tensor, with scales if it is FP8 or integers. Raises CheckpointError."""
        name = tensor.name
        if not tensor.dtype.startswith(("F8", "I", "U")):
            return Plain(tensor)
        scale = next((tensors[name + end] for end in _FP8_SCALES if name + end in tensors), None)
        if scale is None:
            what = "is FP8" if tensor.dtype.startswith("F8") else "has whole numbers"
            raise CheckpointError(f"{tensor.path}: {shortened(name)} {what} without its scales. Download it again.")
        if tensor.dtype == "U8" and scale.dtype == "F8_E4M3":
            return _nvfp4(tensors, name, scale, name + "_scale_2", inverse=False)
        return Plain(tensor, scale, self._block)

    def _unpacked(self, tensors: Tensors, stem: str, end: str) -> CheckpointMatrix:
        def part(end: str) -> StoredTensor:
            if stem + end not in tensors:
                raise CheckpointError(
                    f"{tensors[stem + code].path}: {shortened(stem + code)} has no {shortened(stem + end)} beside it. "
                    "Download it again."
                )
            if end in _WORDS_IN and tensors[stem + end].dtype != "I32":
                raise ValueError("words of another type")
            return tensors[stem + end]

        code = end
        try:
            if end == "_blocks":
                return Mxfp4(part(end), part("_scales"))
            if stem + ".weight_global_scale" in tensors:
                return _nvfp4(tensors, stem + end, part(".weight_scale"), stem + ".weight_global_scale", inverse=True)
            if end == ".weight_packed":
                return _pack_quantized(tensors, stem, part)
            if self._method == "awq":
                return _awq(part)
            if self._method == "gptq":
                return _gptq(part, tensors.get(f"{stem}.g_idx"), self._zero_offset)
        except (ValueError, IndexError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"{tensors[stem + end].path}: the tensors of {shortened(stem)} do not fit together. Download it again."
            ) from error
        raise CheckpointError(f"{tensors[stem + end].path}: {shortened(stem + end)} is packed, and config.json has no "
                              "quantization_config that says how. Download the folder again.")  # fmt: skip


def _belongs(tensors: Tensors, name: str) -> bool:
    """Whether a tensor holds another one's scales."""
    return any(name.endswith(end) and name.removesuffix(end) + owner in tensors for end, owner in _OWNERS.items())


@dataclass(frozen=True)
class Integers(FloatMatrix):
    """Small integers in groups. codes: of chosen rows, uint8. zeros, scales: groups x rows. group_of: by value."""

    shape: tuple[int, ...]
    exact: str
    codes: Callable[[Numbers], Codes]
    zeros: NDArray[np.int32]
    scales: Floats
    group_of: Numbers

    def __post_init__(self) -> None:
        rows, width = self.shape
        groups = len(self.scales)
        if self.scales.shape != (groups, rows) or self.zeros.shape != (groups, rows) or len(self.group_of) != width:
            raise ValueError("factors of another shape")
        if width and not 0 <= self.group_of.min() <= self.group_of.max() < groups:
            raise ValueError("groups without factors")

    def floats(self, rows: Numbers) -> Floats:
        numbers = self.codes(rows).astype(np.float32)
        numbers -= self.zeros[:, rows][self.group_of].T
        numbers *= self.scales[:, rows][self.group_of].T
        return numbers


def _nvfp4(tensors: Tensors, name: str, scales: StoredTensor, factor: str, *, inverse: bool) -> CheckpointMatrix:
    """NVFP4, with the whole matrix's factor, or its inverse, in a tensor of its own. Raises CheckpointError."""
    packed, found = tensors[name], tensors.get(factor)
    value = 0.0 if found is None or found.shape not in ((), (1,)) else found.floats(found.raw()).item()
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{packed.path}: {shortened(name)} has no usable {shortened(factor)}. Download it again.")
    try:
        return Nvfp4(packed, scales, 1 / value if inverse else value)
    except ValueError as error:
        raise CheckpointError(
            f"{packed.path}: {shortened(name)} and its scales do not fit together. Download it again."
        ) from error


def _gptq(part: Callable[[str], StoredTensor], order: StoredTensor | None, offset: int) -> CheckpointMatrix:
    """Words pack a column of the transposed weights. Zero points are packed by rows, minus one in the first version."""
    words, zeros, scales = part(".qweight").raw(), part(".qzeros").raw(), part(".scales")
    rows = words.shape[1]
    bits = _WORD * zeros.shape[1] // rows
    width = len(words) * _WORD // bits
    groups = scales.row_shape[0]
    group_of = np.arange(width) // -(-width // groups) if order is None else order.raw().reshape(-1).astype(np.int64)
    return Integers(
        (rows, width),
        _half(scales),
        lambda chosen: _along(np.ascontiguousarray(words[:, chosen].T), bits),
        _along(zeros, bits).astype(np.int32) + offset,
        scales.floats(scales.raw()),
        group_of,
    )


def _awq(part: Callable[[str], StoredTensor]) -> CheckpointMatrix:
    """Words pack a row of the transposed weights, eight values each in AWQ's own order."""
    words, zeros, scales = part(".qweight").raw(), part(".qzeros").raw(), part(".scales")
    width, rows = len(words), words.shape[1] * 8
    places = np.array(_AWQ_PLACES)

    def codes(chosen: Numbers) -> Codes:
        shifts = (4 * places[chosen % 8]).astype(np.int32)
        return np.ascontiguousarray((words[:, chosen // 8] >> shifts & 15).T.astype(np.uint8))

    at = np.arange(rows)
    return Integers(
        (rows, width),
        _half(scales),
        codes,
        zeros[:, at // 8] >> (4 * places[at % 8]).astype(np.int32) & 15,
        scales.floats(scales.raw()),
        np.arange(width) // -(-width // scales.row_shape[0]),
    )


def _pack_quantized(tensors: Tensors, stem: str, part: Callable[[str], StoredTensor]) -> CheckpointMatrix:
    """Words pack a row. Codes and zero points are signed, stored with half of their range added."""
    packed, scale = part(".weight_packed"), part(".weight_scale")
    words, scales = packed.raw(), scale.floats(scale.raw())
    rows, width = (int(size) for size in part(".weight_shape").raw().reshape(-1))
    bits = _WORD * words.shape[1] // width
    if len(words) != rows:
        raise ValueError("words of another shape")
    if bits not in (4, 8):
        raise CheckpointError(f"{packed.path}: {shortened(packed.name)} has {bits} bits; only 4 and 8 are imported.")
    scales = np.ascontiguousarray(scales.reshape(rows, -1).T)
    zero, order = tensors.get(f"{stem}.weight_zero_point"), tensors.get(f"{stem}.weight_g_idx")
    zeros = np.full(scales.shape, 1 << (bits - 1), np.int32)
    if zero is not None:
        if zero.dtype != "I32":
            raise ValueError("words of another type")
        columns = np.ascontiguousarray(zero.raw().T)
        zeros = _along(columns, bits)[:, :rows].astype(np.int32)
    group_of = np.arange(width) // -(-width // len(scales))
    if order is not None and order.raw().min() >= 0:
        group_of = order.raw().reshape(-1).astype(np.int64)
    return Integers((rows, width), _half(scale), lambda chosen: _along(words[chosen], bits)[:, :width], zeros, scales,
                    group_of)  # fmt: skip


def _along(words: NDArray[np.int32], bits: int) -> Codes:
    """Unpack 32-bit words to codes, lowest first: rows x values. Raises ValueError unless bits is 4 or 8."""
    codes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return codes
    if bits != 4:
        raise ValueError("bits that no word holds evenly")
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)


def _half(scales: StoredTensor) -> str:
    """The type of unpacked weights: that of their scales."""
    return "F16" if scales.dtype == "F16" else "BF16"


def _square_block(stated: Config) -> int:
    """Side of the square that shares a scale in FP8; 128 if the configuration does not say. Raises CheckpointError."""
    if (sizes := stated.values.get("weight_block_size")) is None:
        return 128
    numbers = stated.numbers("weight_block_size")
    if len(set(numbers)) != 1 or numbers[0] < 1:
        raise CheckpointError(f"{stated.where}: weight_block_size is {sizes}; blocks have to be square.")
    return int(numbers[0])
