"""Sizes of mixture-of-experts layers, read from a file's tensors and metadata."""

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from models.errors import UnsupportedModelError
from models.layer_sizes import MAX_WIDTH, same_in_all_layers

_MAX_EXPERTS = 1024
_ROUTER = "ffn_gate_inp.weight"
_EXPERTS, _FUSED_EXPERTS = "ffn_up_exps.weight", "ffn_gate_up_exps.weight"
_SPREAD = ("nomic-bert-moe",)


def experts(file: ModelFile, prefix: str) -> int:
    """Experts per layer with a router, if the layer with this tensor prefix has one, else 0."""
    if prefix + _ROUTER not in file.tensors:
        return 0
    return file.metadata.get_int(f"{file.architecture}.expert_count", 0, maximum=_MAX_EXPERTS)


def period(file: ModelFile) -> int:
    """The number of layers of which only the second has experts, 0 if experts are not distributed that way."""
    key = f"{file.architecture}.moe_every_n_layers"
    return file.metadata.get_int(key, 0, maximum=_MAX_EXPERTS) if file.architecture in _SPREAD else 0


def first_experts(file: ModelFile, layers: int) -> int:
    """The first layer with experts, 0 if no layer has any."""
    return next((layer for layer in range(layers) if f"blk.{layer}.{_ROUTER}" in file.tensors), 0)


def expert_width(file: ModelFile, prefix: str) -> int:
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


def experts_used(file: ModelFile, experts: int) -> int:
    """Experts used per row, 0 if there are none."""
    key = f"{file.architecture}.expert_used_count"
    return same_in_all_layers(file, key, experts) if experts and key in file.metadata else min(experts, 1)


def expert_groups(file: ModelFile, experts: int, used: int) -> tuple[int, int]:
    """The number of expert groups, and from how many of them a row's experts are chosen; 1 and 1 without groups.

    Raises ModelFileError for sizes that do not fit together.
    """
    metadata, key = file.metadata, f"{file.architecture}.expert_group_count"
    groups = metadata.get_int(key, 1, maximum=_MAX_EXPERTS)
    if groups <= 1 or not experts:
        return 1, 1
    groups_used = metadata.get_int(f"{file.architecture}.expert_group_used_count", minimum=1, maximum=groups)
    if experts % groups or experts // groups < 2 or used > experts // groups * groups_used:
        raise ModelFileError(
            f"{file.path}: {key} is {groups}, of which {groups_used} are used: {experts} experts, {used} of them used, "
            "cannot be grouped like that. Use another version of the model."
        )
    return groups, groups_used
