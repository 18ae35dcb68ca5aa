"""The layer behind a model's last one that predicts one more token (multi-token prediction), as its own program.

A row joins a token's embedding with the model's state after the token before it, each normalised. A product turns both
into a row of the residual stream; a layer like the others and the model's output follow (DeepSeek-V3's report, 2.2;
tensors blk.N.nextn.*). In Nemotron-H, whose other layers have either attention or experts, that layer has both, and a
LayerNorm behind them. States are taken after the last norm, the model's or this layer's own, so that the layer can
continue from its own draft.

The caller chooses for how many ids the output is computed. Vocabularies are ordered by how early a token was merged, so
most tokens of a text have low ids, and leaving out the others saves more time than it loses in accepted drafts.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gguf_io import ModelFile
from models.architecture import Architecture
from models.config import ModelConfig
from models.decoder import DecoderRecorder
from models.drafting_layer import VECTOR, DraftingLayer, DraftRows
from models.kv_layout import KVTypes
from models.recording import NOTHING
from models.sizes.feed_forward import ALL_COUNT
from models.sizes.scan import ALONE
from models.weights import WeightLoader

_LEAST_IDS, _SHARES_OF_IDS = 32_768, (4, 2, 1)  # draft from a quarter of all ids, from half, or from all
_JOINS = {"nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight"}
_SECOND_NORM = "post_attention_norm.weight"
_OWN_NORM = "nextn.shared_head_norm.weight"
_OPTIONAL = {"nextn.embed_tokens.weight", "nextn.shared_head_head.weight", _OWN_NORM}


def prediction_config(file: ModelFile, config: ModelConfig) -> ModelConfig | None:
    """A config that computes only the drafting layer, behind empty layers; None if the file has no supported one.

    It is supported if it has the tensors of one of the model's attention layers, and the joining tensors.
    """
    layer, own = config.layers, _shapes(file, config.layers)
    further = {name for name in own if name.startswith("nextn.")}
    needed = _JOINS | ({_OWN_NORM} if config.architecture in ALONE else set())
    if config.narrows or not needed <= further <= _JOINS | _OPTIONAL:
        return None
    own = {name: shape for name, shape in own.items() if name not in further}
    like = _layer_like(file, config, own)
    if like is None or config.embedding % VECTOR:
        return None
    count, sizes, network = layer + 1, config.attention, config.feed_forward
    mixture = config.experts if config.mixes[like] else None
    return replace(
        config,
        layers=count,
        attention=replace(
            sizes,
            attends=(*[False] * layer, True),
            layer_heads=(sizes.layer_heads[like],) * count,
            kv_layers=tuple(range(count)),
        ),
        feed_forward=replace(
            network, widths=() if mixture else (network.widths[like],) * count, sparsity=(ALL_COUNT,) * count
        ),
        experts=replace(mixture, layers=(True,) * count) if mixture else None,
        state=None,
        joins=2 * config.embedding,
    )


def _layer_like(file: ModelFile, config: ModelConfig, own: dict[str, tuple[int, ...]]) -> int | None:
    """The first attention layer with the drafting layer's tensors, `own`: same names and shapes. None if there is none.

    For models whose layers have either attention or experts, the attention tensors must match an attention layer, and
    the others an expert layer.
    """
    attending = [one for one in range(config.layers) if config.attention.attends[one]]
    if config.architecture not in ALONE:
        return next((one for one in attending if _shapes(file, one) == own), None)
    attention = {name: shape for name, shape in own.items() if name.startswith("attn_")}
    network = {name: shape for name, shape in own.items() if name not in attention and name != _SECOND_NORM}
    others = (
        _shapes(file, one)
        for one in range(config.layers)
        if not config.attention.attends[one] and not config.recurs[one]
    )
    if not any({name: shape for name, shape in one.items() if name != "attn_norm.weight"} == network for one in others):
        return None
    return next((one for one in attending if _shapes(file, one) == attention), None)


def _shapes(file: ModelFile, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors, by name without the layer's prefix."""
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): one.shape for name, one in file.tensors.items() if name.startswith(prefix)}


class PredictionLayer(DraftingLayer):
    """The layer's program. Its states are taken after the last norm and have the model's width."""

    def __init__(
        self, config: ModelConfig, architecture: Architecture, loader: WeightLoader, types: KVTypes, threads: int
    ) -> None:
        """Record. config: from prediction_config. Raises UnsupportedModelError for unusable tensors."""
        if architecture.name in ALONE:  # their other layers have a single sub-layer and one norm
            second = replace(architecture.norms, feed_forward=_SECOND_NORM.removesuffix(".weight"))
            architecture = replace(architecture, norms=second)
        super().__init__(config, architecture, loader, types, threads)
        self.width, self._epsilon = config.embedding, config.epsilon
        self._norm = loader.array(f"{architecture.norms.output}.weight", config.embedding)
        self._record(architecture, loader)

    def prepared(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalise rows of the residual stream as the model does before its logits."""
        with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite show in the model's own logits
            squares = np.mean(states * states, axis=1, keepdims=True)
            return np.asarray(states / np.sqrt(squares + self._epsilon) * self._norm, np.float32)

    def _place_states(self, rows: slice, part: DraftRows) -> None:
        self._joined.values[rows, self.width : 2 * self.width] = part.states

    def _record(self, architecture: Architecture, loader: WeightLoader) -> None:
        recording, config, joined = self._recording, self.config, self._joined
        prefix, width = f"blk.{self._layer}.nextn.", config.embedding
        own = prefix + "embed_tokens.weight"
        self._embed(loader.matrix(own if loader.has(own) else "token_embd.weight", config.vocabulary, width))
        self._normalise_joined(prefix + "enorm", prefix + "hnorm")
        joining = loader.matrix(prefix + "eh_proj.weight", width, 2 * width)
        recording.pack(joined.place, joining)
        recording.product(joining, recording.x.place, last=True)
        DecoderRecorder(recording, self.store, self._ropes).record_layer(self._layer)
        own = prefix + "shared_head_norm"
        if architecture.name in ALONE:
            recording.add_and_norm(NOTHING, own)
        else:
            recording.norm(own if loader.has(own + ".weight") else architecture.norms.output)
        names = (prefix + "shared_head_head.weight", "output.weight", "token_embd.weight")
        name = next(name for name in names if loader.has(name))
        self._record_output(loader.matrix(name, config.vocabulary, width), None)
        self.reaches = reaches_of(config.vocabulary)


def reaches_of(vocabulary: int) -> tuple[int, ...]:
    """The numbers of first ids that drafts may be chosen from, ascending."""
    shares = (max(vocabulary // share, _LEAST_IDS) for share in _SHARES_OF_IDS)
    return tuple(dict.fromkeys(min(ids, vocabulary) for ids in shares))
