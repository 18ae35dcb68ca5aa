"""Sizes of mixtures of experts, read from a file's tensors and metadata."""

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from models.errors import UnsupportedModelError
from models.layer_sizes import same_in_all_layers

_MAX_EXPERTS = 1024
_ROUTER = "ffn_gate_inp.weight"
_EXPERTS, _FUSED_EXPERTS = "ffn_up_exps.weight", "ffn_gate_up_exps.weight"
_LATENT = "ffn_latent_down.weight"
_SPREAD = ("nomic-bert-moe",)
_MAX_WIDTH = 1 << 20


def experts(file: ModelFile, prefix: str) -> int:
    """Experts of each layer that has a router, as the one called `prefix`; 0 where that has none."""
    if prefix + _ROUTER not in file.tensors:
        return 0
    return file.metadata.get_int(f"{file.architecture}.expert_count", 0, maximum=_MAX_EXPERTS)


def period(file: ModelFile) -> int:
    """Of how many layers only the second has experts, 0 where that is not how they are spread."""
    key = f"{file.architecture}.moe_every_n_layers"
    return file.metadata.get_int(key, 0, maximum=_MAX_EXPERTS) if file.architecture in _SPREAD else 0


def latent_width(file: ModelFile, prefix: str) -> int:
    """Values of what experts read and give where that is a latent of a row, else 0; as in the layer called `prefix`."""
    tensor = file.tensors.get(prefix + _LATENT)
    if tensor is None:
        return 0
    if len(tensor.shape) != 2 or not 1 <= tensor.shape[0] <= _MAX_WIDTH:
        raise UnsupportedModelError(f"{file.path}: the tensor {prefix}{_LATENT} has an unusable shape.")
    return tensor.shape[0]


def first_experts(file: ModelFile, layers: int) -> int:
    """The first layer that has experts, 0 where none has."""
    return next((layer for layer in range(layers) if f"blk.{layer}.{_ROUTER}" in file.tensors), 0)


def expert_width(file: ModelFile, prefix: str) -> int:
    """Width of an expert's hidden layer, from the tensor: files state it by different keys, or not at all."""
    fused = prefix + _FUSED_EXPERTS in file.tensors
    name = prefix + (_FUSED_EXPERTS if fused else _EXPERTS)
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 3 or not 1 <= tensor.shape[1] <= _MAX_WIDTH:
        raise UnsupportedModelError(
            f"{file.path}: the tensor {name} is missing or has an unusable shape. Get another edition of the model."
        )
    return tensor.shape[1] // 2 if fused else tensor.shape[1]


def experts_used(file: ModelFile, experts: int) -> int:
    """Experts that a row is computed with, 0 where there are none."""
    key = f"{file.architecture}.expert_used_count"
    return same_in_all_layers(file, key, experts) if experts and key in file.metadata else min(experts, 1)


def expert_groups(file: ModelFile, experts: int, used: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a row's experts come from: 1 and 1 where there are no groups."""
    metadata, key = file.metadata, f"{file.architecture}.expert_group_count"
    groups = metadata.get_int(key, 1, maximum=_MAX_EXPERTS)
    if groups <= 1:
        return 1, 1
    groups_used = metadata.get_int(f"{file.architecture}.expert_group_used_count", minimum=1, maximum=groups)
    if experts % groups or experts // groups < 2 or used > experts // groups * groups_used:
        raise ModelFileError(
            f"{file.path}: {key} is {groups}, of which {groups_used} are used: {experts} experts, {used} of them used, "
            "cannot be grouped like that. Get another edition of the model."
        )
    return groups, groups_used
