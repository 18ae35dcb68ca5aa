"""Which stored tensors make which tensor of a GGUF file, and their values in its format, a piece at a time."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.importing.checkpoint import Checkpoint, StoredTensor
from localllm.importing.errors import CheckpointError
from localllm.importing.families import Config, Family
from localllm.text import shortened

_PIECE = 4 << 20  # values that are held as floats
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_UNUSED = re.compile(r".*(rotary_emb\.inv_freq|\.attention\.(masked_)?bias)$")
_OTHER_PARTS = ("vision_tower.", "visual.", "multi_modal_projector.", "audio_tower.", "mtp.")
_SCALES = ("_scale_inv", "_scale")
_BLOCK = 128  # rows and values that share a scale in FP8, where the configuration does not say

Order = Callable[[int], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Part:
    """A stored matrix, and the scales that FP8 has: one for all, or one a block of rows and values."""

    tensor: StoredTensor
    scale: StoredTensor | None


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write. parts: one, or one an expert. heads: of a permuted one, 0 for others. shift: is added."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    heads: int
    shift: float

    def rows(self, block: int) -> Iterator[NDArray[np.float32]]:
        """All rows as floats, in pieces. block: rows and values that share a scale."""
        for part in self.parts:
            raw = part.tensor.raw()
            if len(part.tensor.shape) == 1 and self.heads:  # a bias: values are permuted
                yield part.tensor.floats(raw[:, _permuted(raw.shape[1], self.heads)]) + np.float32(self.shift)
                continue
            order = _permuted(len(raw), self.heads) if self.heads else None
            step = max(1, _PIECE // raw.shape[1])
            for first in range(0, len(raw), step):
                chosen = np.arange(first, min(first + step, len(raw))) if order is None else order[first : first + step]
                values = part.tensor.floats(raw[chosen] if order is not None else raw[first : first + step])
                if part.scale is not None:
                    values = values * _scales(part.scale, chosen, raw.shape, block)
                yield values + np.float32(self.shift) if self.shift else values


def new_tensors(checkpoint: Checkpoint, family: Family, config: Config) -> tuple[list[NewTensor], list[str]]:
    """The tensors of the GGUF file, and notes on what is not used. Raises CheckpointError for what no rule knows."""
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    architecture = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = get_tensor_name_map(MODEL_ARCH(architecture), config.layers)
    tied = config.flag(
        "tie_word_embeddings", default=family.shifted_norms or family.architecture in ("cohere2", "lfm2")
    )
    found: dict[str, list[tuple[int, Part]]] = {}
    left = 0
    for name, tensor in sorted(checkpoint.tensors.items()):
        plain = name.replace("model.language_model.", "model.").removeprefix("language_model.")
        if name.removeprefix("model.").startswith(_OTHER_PARTS):
            left += 1
            continue
        if _UNUSED.match(plain) or plain.endswith(_SCALES) or (tied and plain == "lm_head.weight"):
            continue
        if _beyond(plain, config.layers):
            left += 1
            continue
        plain, expert = _of_expert(plain)
        for pattern, new_name in family.renamed:
            plain = re.sub(pattern, new_name, plain)
        new = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise CheckpointError(
                f"{tensor.path}: there is no rule for the tensor {shortened(name)} in models of the family "
                f"{checkpoint.model_type}. Get the model as GGUF instead."
            )
        found.setdefault(new, []).append((expert, Part(tensor, _scale_of(checkpoint, name))))
    made = [_new(name, parts, family, config) for name, parts in found.items()]
    return made, [f"{left} tensors of other parts (images, sound, drafts) are left out"] if left else []


def scale_block(config: Config) -> int:
    """Rows and values that share a scale in FP8. Raises CheckpointError for weights that are packed otherwise."""
    stated = config.table("quantization_config")
    method = stated.values.get("quant_method")
    if method not in (None, "fp8", "compressed-tensors", "fbgemm_fp8"):
        raise CheckpointError(
            f"{stated.where}: weights packed by {shortened(str(method))!r} are not imported. "
            "Get the edition in BF16 or FP8."
        )
    if (sizes := stated.values.get("weight_block_size")) is None:
        return _BLOCK
    numbers = stated.numbers("weight_block_size")
    if len(set(numbers)) != 1 or numbers[0] < 1:
        raise CheckpointError(f"{stated.where}: weight_block_size is {sizes}; blocks have to be square.")
    return int(numbers[0])


def _new(name: str, parts: list[tuple[int, Part]], family: Family, config: Config) -> NewTensor:
    parts.sort(key=lambda each: each[0])
    numbers, shapes = [number for number, _ in parts], {part.tensor.shape for _, part in parts}
    if numbers not in ([-1], list(range(len(parts)))) or len(shapes) != 1:
        raise CheckpointError(
            f"{parts[0][1].tensor.path}: {name}: experts are missing, or differ in shape. Download the folder again."
        )
    (shape,) = shapes
    shape = tuple(size for size in shape if size > 1) or (1,) if "shortconv.conv" in name else shape
    heads = 0
    if family.permuted and (match := re.match(r"blk\.\d+\.attn_([qk])\.", name)):
        count = config.whole("num_attention_heads")
        heads = count if match[1] == "q" else config.whole("num_key_value_heads", count)
        if heads < 1 or shape[0] % (2 * heads):
            raise CheckpointError(f"{parts[0][1].tensor.path}: {name}: {shape[0]} rows are no {heads} heads.")
    shift = 1.0 if family.shifted_norms and name.endswith("norm.weight") else 0.0
    whole = shape if numbers == [-1] else (len(parts), *shape)
    return NewTensor(name, whole, tuple(part for _, part in parts), heads, shift)


def _of_expert(name: str) -> tuple[str, int]:
    """The name without the expert's number, and the number; -1 for what belongs to no single expert."""
    match = _EXPERT.fullmatch(name)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else (name, -1)


def _beyond(name: str, layers: int) -> bool:
    """Whether a tensor is of a layer behind the last one, which guesses further tokens."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return bool(match) and int(match[1]) >= layers if match else False


def _scale_of(checkpoint: Checkpoint, name: str) -> StoredTensor | None:
    """The scales of FP8 weights. Raises CheckpointError where they are missing."""
    tensor = checkpoint.tensors[name]
    if not tensor.dtype.startswith("F8"):
        if tensor.dtype.startswith("I"):
            raise CheckpointError(f"{tensor.path}: {shortened(name)} has whole numbers. Get the BF16 or FP8 edition.")
        return None
    scale = next((checkpoint.tensors[name + end] for end in _SCALES if name + end in checkpoint.tensors), None)
    if scale is None:
        raise CheckpointError(f"{tensor.path}: {shortened(name)} is FP8 without its scales. Download it again.")
    return scale


def _scales(scale: StoredTensor, rows: NDArray[np.int64], shape: tuple[int, ...], block: int) -> NDArray[np.float32]:
    """What values of these rows are multiplied by: one number, one a row, or one a block."""
    values = scale.floats(scale.raw())
    if values.size == 1:
        return values.reshape(1, 1)
    if values.size == shape[0]:
        return np.asarray(values.reshape(-1, 1)[rows], np.float32)
    if values.shape != (-(-shape[0] // block), -(-shape[1] // block)):
        raise CheckpointError(f"{scale.path}: {shortened(scale.name)} does not fit its weights.")
    return np.repeat(values[rows // block], block, axis=1)[:, : shape[1]]


def _permuted(rows: int, heads: int) -> NDArray[np.int64]:
    """The order in which pairs that turn together, which lie half a head apart, are neighbours."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
