"""Sizes of mixture-of-experts layers, read from a file's tensors and metadata."""

from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from models.errors import UnsupportedModelError
from models.sizes import scan
from models.sizes.reading import MAX_WIDTH, rows_of, same_in_all_layers, stated_number

_MAX_EXPERTS = 1024
_ROUTER = "ffn_gate_inp.weight"
_EXPERTS, _FUSED_EXPERTS = "ffn_up_exps.weight", "ffn_gate_up_exps.weight"
_SHARED, _LATENT = "ffn_up_shexp.weight", "ffn_latent_down.weight"
# Architectures of which one layer of each few has experts: the key of how many, and which of them.
_SPREAD = {"nomic-bert-moe": ("moe_every_n_layers", 1), "llama4": ("interleave_moe_layer_step", -1)}


@dataclass(frozen=True)
class ExpertSizes:
    """Of all layers with experts."""

    # Whether each layer has experts.
    layers: tuple[bool, ...]
    count: int
    # Experts of a row.
    used: int
    # Width of each expert, and of the shared one, 0 if there is none.
    width: int
    shared: int
    # Values of the latent that experts read and write in place of the row, or 0.
    latent: int
    # groups, groups_used: equal groups that experts are divided into, and from how many of them a row's are chosen.
    groups: int
    groups_used: int
    # gating, normalise, scale: as the file states them.
    gating: int | None
    normalise: bool
    scale: float | None


def read(file: ModelFile, layers: int) -> ExpertSizes | None:
    """The sizes of a file's experts, None if it has none.

    Raises ModelFileError for a missing or out-of-range key, UnsupportedModelError for unusable tensors.
    """
    metadata, name = file.metadata, file.architecture
    if f"{name}.expert_count" not in metadata:
        return None
    first = first_prefix(file, layers)
    count = metadata.get_int(f"{name}.expert_count", maximum=_MAX_EXPERTS) if first + _ROUTER in file.tensors else 0
    if not count:
        return None
    used = same_in_all_layers(file, key, count) if (key := f"{name}.expert_used_count") in metadata else 1
    groups, groups_used = _groups(file, count, used)
    gating = f"{name}.expert_gating_func"
    return ExpertSizes(
        layers=tuple(_mixes(file, layers, layer) for layer in range(layers)),
        count=count,
        used=used,
        width=_width(file, first),
        shared=rows_of(file, first + _SHARED),
        latent=rows_of(file, first + _LATENT),
        groups=groups,
        groups_used=groups_used,
        gating=metadata.get_int(gating) if gating in metadata else None,
        normalise=metadata.get_bool(f"{name}.expert_weights_norm", False),
        scale=stated_number(file, "expert_weights_scale"),
    )


def first_prefix(file: ModelFile, layers: int) -> str:
    """How names of tensors of the first layer that may have experts begin."""
    if file.architecture in scan.ALONE:
        first = next((layer for layer in range(layers) if f"blk.{layer}.{_ROUTER}" in file.tensors), 0)
    else:
        first = next((layer for layer in range(layers) if _mixes(file, layers, layer)), 0)
    return f"blk.{first}."


def _mixes(file: ModelFile, layers: int, layer: int) -> bool:
    """Whether a layer has experts, if any layer has."""
    metadata, name = file.metadata, file.architecture
    dense = metadata.get_int(f"{name}.leading_dense_block_count", 0, maximum=layers)
    if name not in _SPREAD:
        return layer >= dense
    key, which = _SPREAD[name]
    period = metadata.get_int(f"{name}.{key}", 1, minimum=1, maximum=_MAX_EXPERTS)
    return layer >= dense and layer % period == which % period


def _width(file: ModelFile, prefix: str) -> int:
    """Width of an expert's hidden layer, from the tensor, since files state it under different keys or not at all.

    Raises UnsupportedModelError if the tensor is missing or has an unusable shape.
    """
    fused = prefix + _FUSED_EXPERTS in file.tensors
    name = prefix + (_FUSED_EXPERTS if fused else _EXPERTS)
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 3 or not 1 <= tensor.shape[1] <= MAX_WIDTH:
        raise UnsupportedModelError(
            f"{file.path}: the tensor {name} is missing or has an unusable shape. Use another version of the model."
        )
    return tensor.shape[1] // 2 if fused else tensor.shape[1]


def _groups(file: ModelFile, experts: int, used: int) -> tuple[int, int]:
    """The number of expert groups, and from how many of them a row's experts are chosen; 1 and 1 without groups.

    Raises ModelFileError for sizes that do not fit together.
    """
    metadata, key = file.metadata, f"{file.architecture}.expert_group_count"
    groups = metadata.get_int(key, 1, maximum=_MAX_EXPERTS)
    if groups <= 1:
        return 1, 1
    groups_used = metadata.get_int(f"{file.architecture}.expert_group_used_count", minimum=1, maximum=groups)
    if experts % groups or experts // groups < 2 or used > experts // groups * groups_used:
        raise ModelFileError(
            f"{file.path}: {key} is {groups}, of which {groups_used} are used: {experts} experts, {used} of them used, "
            "cannot be grouped like that. Use another version of the model."
        )
    return groups, groups_used
