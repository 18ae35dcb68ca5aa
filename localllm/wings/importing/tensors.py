"""Maps stored tensors to the tensors of a GGUF file, and reads their values a piece at a time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from localllm.text import shortened
from localllm.wings.importing.checkpoint import Checkpoint
from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.family import Family
from localllm.wings.importing.matrices import (
    CheckpointMatrix,
    Mapped,
    MatrixRows,
    Numbers,
    Padded,
    Turned,
    chosen_rows,
    row_count,
)
from localllm.wings.importing.packed_weights import CheckpointPacking

if TYPE_CHECKING:
    from gguf.tensor_mapping import TensorNameMap

_PIECE = 4 << 20  # values held as floats at a time
_EXPERT = re.compile(r"(.+\.experts|.*altup(?:_unembed)?_projections)\.(\d+)\.(.+)")
_UNUSED = re.compile(r".*(rotary(_emb)?\.inv_freq|\.attention\.(masked_)?bias|\.position_ids)$")
_OTHER_PARTS = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "audio_tower.", "mtp.",
                "embed_vision.", "embed_audio.")  # fmt: skip
_SUFFIXES = (".weight", ".bias", ".scale")
_OF_TOKENS = ("token_embd.weight", "per_layer_token_embd.weight")


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write. parts: one, or one for each expert."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[CheckpointMatrix, ...]

    @property
    def exact(self) -> str:
        """The tensor's format unless it is quantised."""
        return self.parts[0].exact

    def pieces(self) -> Iterator[tuple[CheckpointMatrix, Numbers]]:
        """All rows in pieces: (part, indices of its rows)."""
        for part in self.parts:
            count = row_count(part.shape)
            step = max(1, _PIECE * count // max(int(np.prod(part.shape)), 1))
            for first in range(0, count, step):
                yield part, np.arange(first, min(first + step, count))


def new_tensors(checkpoint: Checkpoint, family: Family, config: Config) -> tuple[list[NewTensor], list[str]]:
    """The tensors of the GGUF file, and notes on unused ones. Raises CheckpointError for a tensor without a rule."""
    names = names_of(family, config.layers)
    tied = config.flag("tie_word_embeddings", default=family.tied)
    packing = CheckpointPacking(config)
    found: dict[str, list[tuple[int, CheckpointMatrix]]] = {}
    left = 0
    for name in sorted(checkpoint.tensors):
        plain = of_text_model(name)
        if name.removeprefix("model.").startswith(_OTHER_PARTS) or _beyond(plain, config.layers):
            left += 1
            continue
        if _UNUSED.match(plain) or (tied and plain == "lm_head.weight"):
            continue
        if (stored := packing.matrix(checkpoint.tensors, name)) is None:
            continue
        plain, expert = of_expert(of_text_model(stored[0]))
        try:
            made = family.renamed(plain, stored[1], config)
        except (ValueError, IndexError) as error:
            raise CheckpointError(
                f"{checkpoint.tensors[name].path}: {shortened(name)} has the shape {list(stored[1].shape)}, which no "
                f"tensor of this name in models of the family {checkpoint.model_type} has. Download the folder again."
            ) from error
        for renamed, matrix in made:
            new = new_name(names, renamed)
            if new is None:
                raise CheckpointError(
                    f"{checkpoint.tensors[name].path}: there is no rule for the tensor {shortened(name)} in models of "
                    f"the family {checkpoint.model_type}. Get the model as GGUF instead."
                )
            found.setdefault(new, []).append((expert, matrix))
    whole = [_new(name, parts, family, config) for name, parts in found.items()]
    notes = [family.lacks] if family.lacks else []
    return whole, [*notes, f"{left} tensors of other parts (images, sound, drafts) are left out"] if left else notes


def names_of(family: Family, layers: int) -> "TensorNameMap":
    """The table of a family's tensor names."""
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    architecture = next(
        arch for arch, name in MODEL_ARCH_NAMES.items() if name == (family.table or family.architecture)
    )
    return get_tensor_name_map(MODEL_ARCH(architecture), layers)


def new_name(names: "TensorNameMap", name: str) -> str | None:
    """The name of a tensor in GGUF; None if the table has none."""
    tried = (names.get_name(each, try_suffixes=_SUFFIXES) for each in (name, f"model.{name}"))
    return next(filter(None, tried), None)


def _new(name: str, parts: list[tuple[int, CheckpointMatrix]], family: Family, config: Config) -> NewTensor:
    parts.sort(key=lambda each: each[0])
    numbers, shapes = [number for number, _ in parts], {part.shape for _, part in parts}
    if (
        numbers not in ([-1], list(range(len(parts))))
        or len(shapes) != 1
        or len({part.exact for _, part in parts}) != 1
    ):
        raise CheckpointError(
            f"{config.where}: {name}: experts are missing, or differ in shape or type. Download the folder again."
        )
    matrices = tuple(fitted(name, part, family, config) for _, part in parts)
    shape = matrices[0].shape
    return NewTensor(name, shape if numbers == [-1] else (len(parts), *shape), matrices)


def fitted(name: str, matrix: CheckpointMatrix, family: Family, config: Config) -> CheckpointMatrix:
    """A matrix as the engine expects it: heads in its order, norms with 1 added, convolutions in two dimensions."""
    if re.search(r"(shortconv\.conv|ssm_conv1d)\.weight", name) and len(matrix.shape) == 3:
        matrix = MatrixRows(matrix, np.arange(row_count(matrix.shape)), (matrix.shape[0], matrix.shape[2]))
    if name in _OF_TOKENS and row_count(matrix.shape) < config.whole("vocab_size"):
        matrix = Padded(matrix, config.whole("vocab_size"))  # tokens of images and sound have no embedding
    if "exp_probs_b" in name and len(matrix.shape) == 2:  # one row
        matrix = MatrixRows(Turned(matrix), np.arange(matrix.shape[1]), matrix.shape[1:])
    if family.permuted and (match := re.match(r"blk\.\d+\.attn_([qk])\.", name)):
        count = config.whole("num_attention_heads")
        heads = count if match[1] == "q" else config.whole("num_key_value_heads", count)
        rows = matrix.shape[0]
        if heads < 1 or rows % (2 * heads):
            raise CheckpointError(f"{config.where}: {name}: {rows} rows cannot be split into {heads} heads.")
        matrix = chosen_rows(matrix, lambda numbers: numbers.reshape(heads, 2, -1).swapaxes(1, 2))
    if family.shifted_norms and name.endswith("norm.weight") and "ssm_norm" not in name:
        matrix = Mapped(matrix, lambda values: values + np.float32(1.0))
    return matrix


def of_text_model(name: str) -> str:
    """The name that a tensor has in a model of text alone."""
    return name.replace("model.language_model.", "model.").removeprefix("language_model.")


def of_expert(name: str) -> tuple[str, int]:
    """The name without the expert's number, and the number; -1 if the tensor is not of a single expert."""
    match = _EXPERT.fullmatch(name)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else (name, -1)


def _beyond(name: str, layers: int) -> bool:
    """Whether a tensor belongs to a layer after the last one, which predicts further tokens."""
    match = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= layers
