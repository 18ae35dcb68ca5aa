"""The layer behind a model's last one that predicts a token further (multi-token prediction): a program of its own.

A row joins the embedding of a token with the model's state after the token before it, each normalised; a product makes
a row of the residual stream of both, and a layer like the others and the model's output follow (DeepSeek-V3's report,
2.2; tensors blk.N.nextn.*). In Nemotron-H that layer has attention and experts, which the others have apart, and a
LayerNorm behind them. States are those behind the last norm, the model's or this layer's own, so that the layer
can go on from its own guess.

The output is computed for as many ids as the caller wants: vocabularies are ordered by how early a token was merged, so
that most of a text has low ones, and a draft that cannot have the others costs less than it loses.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gguf_io import ModelFile
from models.architecture import Architecture
from models.config import ModelConfig
from models.decoder import DecoderRecorder
from models.drafting_layer import VECTOR, DraftingLayer, Part
from models.kv_layout import KVTypes
from models.layer_sizes import ALL_COUNT
from models.scan_sizes import ALONE
from models.weights import WeightLoader

_LEAST_IDS, _SHARES_OF_IDS = 32_768, (4, 2, 1)  # what is guessed from: a quarter of all ids, half of them, all
_JOINS = {f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")}
_SECOND_NORM = "post_attention_norm.weight"
_OWN_NORM = "nextn.shared_head_norm.weight"
_OPTIONAL = {"nextn.embed_tokens.weight", "nextn.shared_head_head.weight", _OWN_NORM}


def prediction_config(file: ModelFile, config: ModelConfig, architecture: Architecture) -> ModelConfig | None:
    """Sizes for the layer alone, which comes behind layers that have nothing; None where there is none of a known kind.

    It is of a known kind where it has the tensors of a layer with attention, and those that join.
    """
    layer, own = config.layers, _shapes(file, config.layers)
    further = {name for name in own if name.startswith("nextn.")}
    needed = _JOINS | ({_OWN_NORM} if config.architecture in ALONE else set())
    if not architecture.drafts or config.narrows or not needed <= further <= _JOINS | _OPTIONAL:
        return None
    own = {name: shape for name, shape in own.items() if name not in further}
    like = _layer_like(file, config, own)
    if like is None or config.embedding % VECTOR:
        return None
    count, dense = layer + 1, config.architecture not in ALONE and like < config.dense_layers
    return replace(
        config,
        layers=count,
        attends=(*[False] * layer, True),
        recurs=(False,) * count,
        layer_heads=(config.layer_heads[like],) * count,
        kv_layers=tuple(range(count)),
        dense_layers=count if dense else 0,
        dense_feed_forwards=(config.dense_feed_forwards[like],) * count if dense else (),
        sparsity=(ALL_COUNT,) * count,
        experts=0 if dense else config.experts,
        delta_net=None,
        scan=None,
        convolution=0,
        joins=2 * config.embedding,
    )


def _layer_like(file: ModelFile, config: ModelConfig, own: dict[str, tuple[int, ...]]) -> int | None:
    """A layer with attention that has these tensors; where others have either, one that has those of attention.

    Then one of the others must have those of experts.
    """
    attending = [one for one in range(config.layers) if config.attends[one]]
    if config.architecture not in ALONE:
        return next((one for one in attending if _shapes(file, one) == own), None)
    attention = {name: shape for name, shape in own.items() if name.startswith("attn_")}
    network = {name: shape for name, shape in own.items() if name not in attention and name != _SECOND_NORM}
    others = (_shapes(file, one) for one in range(config.layers) if not config.attends[one] and not config.recurs[one])
    if not any({name: shape for name, shape in one.items() if name != "attn_norm.weight"} == network for one in others):
        return None
    return next((one for one in attending if _shapes(file, one) == attention), None)


def _shapes(file: ModelFile, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors, by their names in it."""
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): one.shape for name, one in file.tensors.items() if name.startswith(prefix)}


class PredictionLayer(DraftingLayer):
    """The layer's program. Its states are those behind a last norm, of the model's width."""

    def __init__(
        self, config: ModelConfig, architecture: Architecture, loader: WeightLoader, types: KVTypes, threads: int
    ) -> None:
        """Load and record. config: what prediction_config gave. Raises UnsupportedModelError for unusable tensors."""
        if architecture.name in ALONE:  # which have one norm a layer elsewhere, of what is one of two parts here
            second = replace(architecture.norms, feed_forward=_SECOND_NORM.removesuffix(".weight"))
            architecture = replace(architecture, norms=second)
        super().__init__(config, architecture, loader, types, threads)
        self.width, self._epsilon = config.embedding, config.epsilon
        self._norm = loader.vector(f"{architecture.norms.output}.weight", config.embedding)[: config.embedding]
        self._record(architecture, loader)

    def prepared(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalise rows of the residual stream as the model does before its logits."""
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite shows in the model's own logits
            squares = np.mean(states * states, axis=1, keepdims=True)
            return np.asarray(states / np.sqrt(squares + self._epsilon) * self._norm, np.float32)

    def _place_states(self, rows: slice, part: Part) -> None:
        self._joined.values[rows, self.width : 2 * self.width] = part.states

    def _record(self, architecture: Architecture, loader: WeightLoader) -> None:
        recording, config, joined = self._recording, self.config, self._joined
        prefix, width = f"blk.{self._layer}.nextn.", config.embedding
        own = prefix + "embed_tokens.weight"
        self._embed(loader.matrix(own if loader.has(own) else "token_embd.weight", config.vocabulary, width))
        self._normalise_joined(prefix + "enorm", prefix + "hnorm")
        joining = loader.matrix(prefix + "eh_proj.weight", width, 2 * width)
        recording.pack(joined, 2 * width, joining.format.form, stride=joined.stride)
        recording.product(joining, recording.x, last=True)
        DecoderRecorder(recording, self.store, self._ropes).record_layer(self._layer)
        own = prefix + "shared_head_norm"
        if architecture.name in ALONE:
            recording.add_and_norm(0, 0, own)
        else:
            recording.norm(own if loader.has(own + ".weight") else architecture.norms.output)
        names = (prefix + "shared_head_head.weight", "output.weight", "token_embd.weight")
        name = next(name for name in names if loader.has(name))
        self._record_output(loader.matrix(name, config.vocabulary, width), None)
        self.reaches = reaches_of(config.vocabulary)


def reaches_of(vocabulary: int) -> tuple[int, ...]:
    """How many of the first ids may be guessed from, fewest first."""
    shares = (max(vocabulary // share, _LEAST_IDS) for share in _SHARES_OF_IDS)
    return tuple(dict.fromkeys(min(ids, vocabulary) for ids in shares))
