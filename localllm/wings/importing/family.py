"""What an import needs to know about a family of models, and the keys that all families have.

Tensor names come from gguf's own table (gguf.tensor_mapping). A family adds what that table lacks: the architecture,
how its heads are rotated, and its own keys. Keys and their meaning: llama.cpp's gguf-py/gguf/constants.py and
convert_hf_to_gguf.py. What no rule covers is refused, since a model that is nearly right is wrong.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.text import shortened
from localllm.wings.importing.checkpoint import Checkpoint
from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.matrices import CheckpointMatrix, chosen_rows
from localllm.wings.importing.rotation import Keys, scaling_keys

EXACT_GELU = ("gelu", "gelu_pytorch_tanh", "gelu_new")  # GGUF does not distinguish them
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")


_POOLING = "1_Pooling/config.json"
# Values of pooling_type by name: the flag that is true in the file, or the mode in its newer form.
_POOLED = {"mean": 1, "cls": 2, "lasttoken": 3}
Change = Callable[[CheckpointMatrix, Config], CheckpointMatrix]


@dataclass(frozen=True)
class TensorRule:
    """For stored tensors whose names match a pattern: their name in gguf's table, and how they are changed.

    A tensor that several rules match is split. An empty name leaves it out.
    """

    pattern: str
    name: str
    change: Change | None = None


def half(index: int) -> Change:
    """The first or second half of the rows, of each expert if there are several."""
    return lambda matrix, _config: chosen_rows(matrix, lambda rows: rows.reshape(2, -1)[index])


_COMMON = (
    TensorRule(r"(.+)\.e_score_correction_bias", r"\1.e_score_correction.bias"),
    TensorRule(r"(.+)\.expert_bias", r"\1.expert_bias.bias"),
    TensorRule(r"(.+)\.sinks", r"\1.sinks.weight"),
)

_XIELU = {"alpha_n": None, "alpha_p": None, "beta": 0.5, "eps": -1e-6}  # factors and their defaults; None: required
XIELU = (TensorRule(r"model\.layers\.\d+\.mlp\.act_fn\..+", ""),)


@dataclass(frozen=True)
class Family:
    """How checkpoints of one family become GGUF."""

    # GGUF's name of the architecture.
    architecture: str
    # Makes the family's own keys, without the architecture's prefix.
    keys: Callable[[Config], Keys] = lambda _config: {}
    # The only values of the configuration that the engine supports.
    expects: Mapping[str, Any] = field(default_factory=dict)
    # RoPE pairs values half a head apart in the checkpoint, and neighbours in GGUF.
    permuted: bool = False
    # 1 has to be added to stored norms.
    shifted_norms: bool = False
    # Those that the engine supports for this architecture.
    activations: tuple[str, ...] = SILU
    # For tensors that gguf's table has under other names or in another form.
    rules: tuple[TensorRule, ...] = ()
    # The kind of layers that rope.freq_base is for.
    rope: str | None = None
    # The share of a head that is rotated, if the configuration does not say.
    rotary: float = 1.0
    # Every layer has the stated window.
    window_is_context: bool = False
    # Logits are computed from the embeddings, if the configuration does not say.
    tied: bool = False
    # GGUF states YaRN's mscale_all_dim times this; None if models have none.
    sharpening: float | None = None
    # Whether YaRN's limits have to be integers.
    truncated: bool = True
    # Whether there is attention at all.
    attends: bool = True
    # The architecture to take tensor names from, if gguf's table has none for this one.
    table: str | None = None
    # A note on stored values that GGUF has no place for.
    lacks: str | None = None

    def renamed(self, name: str, matrix: CheckpointMatrix, config: Config) -> list[tuple[str, CheckpointMatrix]]:
        """A stored tensor's conversion: (name in gguf's table, matrix). The family's rules precede common ones."""
        found = ([rule for rule in rules if re.fullmatch(rule.pattern, name)] for rules in (self.rules, _COMMON))
        rules = next(filter(None, found), [])
        made = [
            (re.sub(rule.pattern, rule.name, name), rule.change(matrix, config) if rule.change else matrix)
            for rule in rules
            if rule.name
        ]
        return made if rules else [(name, matrix)]


def model_keys(family: Family, config: Config) -> tuple[Keys, dict[str, NDArray[np.float32]]]:
    """A model's metadata, with keys without the architecture's prefix, and its tensors of RoPE factors.

    Raises CheckpointError for values that are missing or not supported.
    """
    for name in ("hidden_act", "hidden_activation"):
        config.expect(name, *family.activations)
    config.expect_all(**family.expects)
    if not family.attends:
        return {**_sizes(config), "attention.head_count": 0, **family.keys(config)}, {}
    heads, size = config.whole("num_attention_heads"), config.head_size
    turning = int(size * config.rope().number("partial_rotary_factor", config.number("partial_rotary_factor",
                                                                                     family.rotary)))  # fmt: skip
    context = config.whole("max_position_embeddings")
    if family.window_is_context and config.values.get("sliding_window") is not None:
        context = min(context, config.whole("sliding_window"))  # up to this length, a window hides nothing
    keys: Keys = {
        **_sizes(config),
        "context_length": context,
        "attention.head_count": heads,
        "attention.head_count_kv": config.whole("num_key_value_heads", heads),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": turning,
        "rope.freq_base": config.rope(family.rope).number("rope_theta", 10_000.0),
    }
    if config.values.get("rms_norm_eps") is not None:
        keys["attention.layer_norm_rms_epsilon"] = config.number("rms_norm_eps")
    for name in ("layer_norm_eps", "norm_epsilon"):
        if config.values.get(name) is not None:
            keys["attention.layer_norm_epsilon"] = config.number(name)
    keys |= family.keys(config)
    scaling, factors = scaling_keys(config.rope(family.rope), keys, family.sharpening, truncated=family.truncated)
    return {**keys, **scaling}, factors


def _sizes(config: Config) -> Keys:
    return {
        "block_count": config.layers,
        "embedding_length": config.whole("hidden_size"),
        "feed_forward_length": config.alike("intermediate_size", 0),
        "vocab_size": config.whole("vocab_size"),
    }


def pooling_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    """How an embedding model pools its rows, from sentence-transformers' file; empty if there is none.

    Raises CheckpointError for an unsupported mode.
    """
    stated = checkpoint.optional_json(_POOLING)
    if stated is None:
        return {}
    names = [name for name, value in stated.items() if name.startswith("pooling_mode_") and value is True]
    ways = [name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for name in names]
    if isinstance(mode := stated.get("pooling_mode"), str):
        ways = [mode]
    if len(ways) != 1 or ways[0] not in _POOLED:
        raise CheckpointError(
            f"{checkpoint.folder / _POOLING}: pools by {shortened(' and '.join(ways) or 'nothing')}; one of "
            f"{', '.join(_POOLED)} can be imported."
        )
    return {"pooling_type": _POOLED[ways[0]]}


def xielu_keys(checkpoint: Checkpoint, layers: int) -> dict[str, Any]:
    """Each layer's factors of xIELU, which are tensors in a checkpoint and keys in GGUF; empty for other activations.

    Raises CheckpointError for a missing factor.
    """
    if checkpoint.config.get("hidden_act") != "xielu":
        return {}
    return {
        f"xielu.{name}": [_xielu_factor(checkpoint, f"model.layers.{layer}.mlp.act_fn.{name}", default)
                          for layer in range(layers)]
        for name, default in _XIELU.items()
    }  # fmt: skip


def _xielu_factor(checkpoint: Checkpoint, name: str, default: float | None) -> float:
    tensor = checkpoint.tensors.get(name)
    if tensor is not None and tensor.row_shape == (1, 1):
        return float(tensor.floats(tensor.raw())[0, 0])
    if tensor is not None or default is None:
        raise CheckpointError(f"{checkpoint.folder}: {name} is missing or no single number. Download the folder again.")
    return default
