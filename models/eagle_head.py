"""EAGLE-3: a layer in a file of its own that drafts for one model (Li et al., 2025), in llama.cpp's layout.

Its states are the inputs of three of the model's layers, concatenated and projected to the head's width by `fc`; the
states of its own drafts are the residual stream behind its layer. Attention reads a token's embedding and the state
before it, each normalised; the residual stream starts as that state. Tensors: fc, blk.0.* (attn_norm normalises
embeddings, attn_norm_2 states), output_norm, output. Drafts may be limited to a part of the model's vocabulary: d2t
then holds the token of each output. A head without token_embd or output shares the model's.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from models.architecture import NEIGHBOURS, Architecture
from models.config import ModelConfig, read_config
from models.drafting_layer import VECTOR, DraftingLayer, DraftRows
from models.errors import refusal
from models.kv_layout import KVTypes
from models.layers.attention import AttentionLayers
from models.layers.feed_forward import FeedForwardLayers
from models.prediction_layer import PredictionLayer, prediction_config, reaches_of
from models.recording import Place
from models.weights import WeightLoader

EAGLE = "eagle3"
_ARCHITECTURE = Architecture(EAGLE, NEIGHBOURS)
_LAYERS_READ = 3
_D2T, _EMBEDDING, _OUTPUT, _FEATURE_NORM = "d2t", "token_embd.weight", "output.weight", "enc.output_norm"


def layers_read(head: ModelFile, model: ModelConfig) -> tuple[int, ...]:
    """The layers of the model whose inputs a head reads; the number of layers stands for the last one's output.

    Raises ModelFileError if the head does not fit the model, UnsupportedModelError if
    these layers do not have a single residual stream that holds all rows.
    """
    metadata = head.metadata
    found = tuple(metadata.get_list(f"{EAGLE}.target_layers", int))
    width = metadata.get_int(f"{EAGLE}.target_hidden_size", minimum=1)
    if width != model.embedding or len(found) != _LAYERS_READ or not all(0 <= one <= model.layers for one in found):
        raise ModelFileError(
            f"{head.path} drafts for a model of width {width} and reads the inputs of its layers "
            f"{', '.join(map(str, found))}. This model has width {model.embedding} and {model.layers} layers.",
            remedy="Use the head that was made for this model, or leave out --draft.",
        )
    if (model.narrows and max(found) > model.last_stored) or model.per_layer.streams > 1 or width % VECTOR:
        raise refusal(head, f"it reads layer {max(found)} of this {model.architecture} model")
    return found


class EagleHead(DraftingLayer):
    """The head's program."""

    def __init__(
        self,
        head: ModelFile,
        model: ModelConfig,
        factor: float,
        loader: WeightLoader,
        models_loader: WeightLoader,
        types: KVTypes,
        threads: int,
    ) -> None:
        """Record. factor: what the model's residual stream is divided by. loader: for the head's tensors.

        models_loader: for the model's tensors, which replace those that the head lacks. Raises ModelFileError for a
        head of another model, UnsupportedModelError for unusable tensors.
        """
        self._factor = factor
        self.width = _LAYERS_READ * model.embedding
        config = read_config(head)
        if config.layers != 1 or config.embedding % VECTOR:
            raise refusal(head, f"{EAGLE}.block_count is {config.layers}")
        lacks = [name for name in (_EMBEDDING, _OUTPUT) if not loader.has(name)]
        if lacks and config.embedding != model.embedding:
            raise ModelFileError(
                f"{head.path} has no {lacks[0]} and cannot use the model's, because the widths differ: "
                f"{model.embedding} and {config.embedding}.",
                remedy="Use another version of the head, or leave out --draft.",
            )
        config = replace(config, vocabulary=model.vocabulary, joins=max(2 * config.embedding, self.width))
        super().__init__(config, _ARCHITECTURE, loader, types, threads)
        self._raw = self._recording.rows(self.width)
        self._record(head, models_loader)
        loader.check_all_used(config.layers)

    def prepared(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """The model's rows, multiplied by the factor that its residual stream is divided by."""
        return states if self._factor == 1 else np.asarray(states * self._factor, np.float32)

    def _place_states(self, rows: slice, part: DraftRows) -> None:
        """Set both kinds of states, one of them to zero: the input of `fc`, and the addend of its product."""
        width = self.config.embedding
        self._raw.values[rows, : self.width] = 0 if part.guessed else part.states
        self._recording.x.values[rows, :width] = part.states if part.guessed else 0

    def _record(self, head: ModelFile, models_loader: WeightLoader) -> None:
        recording, config = self._recording, self.config
        loader, joined, x, raw = recording.loader, self._joined, recording.x, self._raw
        width, vocabulary = config.embedding, config.vocabulary
        own = models_loader if not loader.has(_EMBEDDING) else loader
        self._embed(own.matrix(_EMBEDDING, vocabulary, width))
        fusing = loader.matrix("fc.weight", width, self.width)
        if head.metadata.get_bool(f"{EAGLE}.norm_before_fc", False):
            recording.normalise(raw.place, _FEATURE_NORM, self.width)
        recording.pack(raw.place, fusing)
        recording.product(fusing, x.place, addend=x.place, last=True)
        recording.copy_x(Place(joined.address + 4 * width, joined.stride))
        self._normalise_joined("blk.0.attn_norm", "blk.0.attn_norm_2")
        if head.metadata.get_bool(f"{EAGLE}.norm_before_residual", False):
            recording.norm("blk.0.attn_norm_2")
        AttentionLayers(recording, self.store, self._ropes, joined).record(0)
        FeedForwardLayers(recording, config.feed_forward.widths[0]).record(0)
        ids = loader.rows(_D2T) if loader.has(_D2T) else vocabulary
        self.tokens = self._tokens(head, ids) if loader.has(_D2T) else None
        own = loader if loader.has(_OUTPUT) else models_loader
        name = _OUTPUT if own.has(_OUTPUT) else _EMBEDDING
        self._record_output(own.matrix(name, ids, width), "output_norm")
        self.reaches = (ids,) if loader.has(_D2T) else reaches_of(ids)

    def _tokens(self, head: ModelFile, count: int) -> NDArray[np.int64]:
        """The token of each output. Loading it raises ModelFileError for one outside the vocabulary."""
        loader, vocabulary = self._recording.loader, self.config.vocabulary
        read = loader.vector(_D2T, count)

        def make() -> NDArray[np.int64]:
            tokens = read()[:count].astype(np.int64)  # floats hold them exactly
            if tokens.min() < 0 or tokens.max() >= vocabulary:
                raise ModelFileError(
                    f"{head.path}: {_D2T} names a token outside 0..{vocabulary - 1}. Download the head again."
                )
            return tokens

        return np.asarray(loader.later((count,), make, np.int64), np.int64)


def choose_drafts(
    file: ModelFile, model: ModelConfig, architecture: Architecture, drafts: bool | ModelFile
) -> ModelFile | ModelConfig | None:
    """What drafts for a file's model: the given head, or, if drafts is True, the config of the file's own layer.

    None if nothing drafts.
    """
    if isinstance(drafts, ModelFile):
        return drafts
    return prediction_config(file, model) if drafts and architecture.drafts else None


def drafting_layer(
    drafts: ModelFile | ModelConfig,
    model: ModelConfig,
    architecture: Architecture,
    loader: WeightLoader,
    types: KVTypes,
    threads: int,
) -> DraftingLayer:
    """Record the layer of a head's file, or the model's own layer with the config `drafts`. loader: for the model."""
    if isinstance(drafts, ModelConfig):
        return PredictionLayer(drafts, architecture, loader, types, threads)
    factor = architecture.scales.residual(model)
    return EagleHead(drafts, model, factor, loader.of_file(drafts), loader, types, threads)
