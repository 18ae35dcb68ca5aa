"""Records the forward pass of a transformer as a program: from tokens through the layers to logits, or to states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cpu_kernels import activations
from cpu_kernels.activations import SoftCap
from cpu_kernels.records import Stage
from models.kv_pages import PageStore
from models.layers.attention import AttentionLayers
from models.layers.feed_forward import FeedForwardLayers
from models.layers.rope import Ropes
from models.recording import NOTHING, Place, Recording, Rows
from models.weights import padded

if TYPE_CHECKING:
    from models.layers.altup_streams import AltUpStreams
    from models.layers.experts import ExpertLayers
    from models.layers.latents import LatentLayers
    from models.layers.per_layer_inputs import PerLayerInputs


@dataclass(frozen=True)
class LogitsOperations:
    """The operations that write logits, to be changed when their buffer grows, and the padded width of a row.

    change: adds what adapters change.
    """

    product: int
    cap: int | None
    width: int
    change: int | None = None


class RecurrentLayers(Protocol):
    """What `Layers` of each kind of state in models.layers have in common."""

    def __init__(self, recording: Recording, store: PageStore) -> None: ...

    def record(self, layer: int) -> None:
        """Add the layer's output to x, or compute it into `aside` if attention still reads x."""


class DecoderRecorder:
    """Lays out a decoder's weights layer by layer and records the operations that use them."""

    inputs: "PerLayerInputs | None" = None
    _attention: "AttentionLayers | LatentLayers | None" = None
    _recurrent: "RecurrentLayers | None" = None
    _experts: "ExpertLayers | None" = None
    _streams: "AltUpStreams | None" = None

    def __init__(self, recording: Recording, store: PageStore, ropes: Ropes, read: Sequence[int] = ()) -> None:
        """read: layers whose inputs are concatenated in `features`; config.layers stands for the last one's output."""
        self._recording, self._read = recording, read
        self.features = recording.rows(len(read) * recording.config.embedding) if read else None
        config = recording.config
        if any(config.attention.attends) and not config.attention.latents:
            self._attention = AttentionLayers(recording, store, ropes)
        self._dense: dict[int, FeedForwardLayers] = {}
        for width, mixes in zip(config.feed_forward.widths, config.mixes, strict=False):
            if width and not mixes and width not in self._dense:
                self._dense[width] = FeedForwardLayers(recording, width)
        # Most models lack the following layers: their modules and kernels are imported only when needed.
        if config.attention.latents:
            from models.layers.latents import LatentLayers

            self._attention = LatentLayers(recording, store, ropes)
        if config.state:
            kind = import_module(type(config.state).__module__.replace("sizes", "layers"))
            self._recurrent = kind.Layers(recording, store)
        if config.experts:
            from models.layers.experts import ExpertLayers

            self._experts = ExpertLayers(recording)
        if config.per_layer.width:
            from models.layers.per_layer_inputs import PerLayerInputs

            self.inputs = PerLayerInputs(recording)
        if config.per_layer.streams > 1:
            from models.layers.altup_streams import AltUpStreams

            self._streams = AltUpStreams(recording, self.inputs)

    def record(self) -> LogitsOperations:
        """Record the whole pass, from tokens to the requested logits.

        Raises UnsupportedModelError for tensors that are missing from the file, or in it and not used.
        """
        self._layers(narrows=self._recording.config.narrows)
        logits = self._logits()
        self._recording.loader.check_all_used(self._recording.config.layers)
        if self._recording.adapters:
            self._recording.adapters.check_all_used(self._recording.loader.left_out)
        return logits

    def record_states(self) -> Rows:
        """Record the pass up to the last layer's normalised rows, for every token, and return them.

        Raises what `record` raises. Output tensors may be in the file and are not loaded.
        """
        recording = self._recording
        self._layers(narrows=False)
        if not recording.architecture.norms.sums:
            recording.norm("output_norm")
        recording.loader.leave_out("output.weight", "output.bias")
        return recording.x

    def _layers(self, narrows: bool) -> None:
        """Record the layers. narrows: compute layers after the last stored one for rows with requested logits only."""
        recording, config = self._recording, self._recording.config
        self._embed()
        if config.images.are_read:
            recording.image_inputs(0)
        if self.inputs:
            self.inputs.record(narrows)
        if self._streams:
            self._streams.spread()
        for layer in range(config.layers):
            if self.features:
                self._keep_input(layer, self.features)
            self.record_layer(layer)
            if config.images.are_read and layer < config.images.layers:
                recording.image_inputs(1 + layer)
            if narrows and layer == config.last_stored:
                self._narrow(layer + 1)
        if self.features:
            self._keep_input(config.layers, self.features)
        if self._streams:
            self._streams.merge()

    def _keep_input(self, layer: int, features: Rows) -> None:
        """Copy x into `features` if this layer's input is read."""
        recording = self._recording
        for at, read in enumerate(self._read):
            if read == layer:
                recording.copy_x(Place(features.address + 4 * at * recording.config.embedding, features.stride))

    def record_layer(self, layer: int) -> None:
        """Record one layer, from x to x."""
        recording, factor = self._recording, f"blk.{layer}.layer_output_scale.weight"
        if self._streams:
            self._streams.predict(layer)
        if self._experts and recording.config.mixes[layer]:
            self._experts.score_early(f"blk.{layer}.")
        self._mix(layer)
        if self._streams:
            self._streams.add_aside()
        if network := self._feed_forward(layer):
            network.record(layer)
        if self._streams:
            self._streams.correct(layer)
        elif self.inputs:
            self.inputs.add(layer)
        if recording.loader.has(factor):
            recording.scale(recording.vector(factor, 1))

    def _narrow(self, layer: int) -> None:
        """From this layer on, compute only rows with requested logits."""
        recording = self._recording
        planes = self._streams.planes if self._streams else recording.x.values[None]
        recording.keep_wanted(planes, planes)
        recording.builder.stage = Stage.WANTED
        if self.inputs:
            self.inputs.narrow(layer)

    def _mix(self, layer: int) -> None:
        """Record a layer's mixer: attention, a state, or both."""
        config = self._recording.config
        attends, recurs = config.attention.attends[layer], config.recurs[layer]
        if self._recurrent and recurs:
            self._recurrent.record(layer)
        if self._attention and attends:
            self._attention.record(layer)
        if recurs and attends:
            self._recording.add_aside()

    def _feed_forward(self, layer: int) -> "ExpertLayers | FeedForwardLayers | None":
        """A layer's network, which works on each row alone, if it has one."""
        config = self._recording.config
        widths = config.feed_forward.widths
        if widths and not widths[layer]:
            return None
        if not config.mixes[layer]:
            return self._dense[widths[layer]]
        assert self._experts is not None
        return self._experts

    def _embed(self) -> None:
        """Compute x from tokens.

        If the file has these tensors: add an encoder's position embeddings and first token type, and normalise.
        """
        recording, config, loader = self._recording, self._recording.config, self._recording.loader
        table = loader.matrix("token_embd.weight", config.vocabulary, config.embedding)
        recording.embed(table, recording.x.place, recording.builder.scalar(recording.embedding_factor))
        recording.change_embeddings(recording.x.place, recording.embedding_factor)
        # LFM2's norm before logits has this name.
        if not loader.has("token_embd_norm.weight") or recording.architecture.norms.output == "token_embd_norm":
            return
        by_position, rows = loader.has("position_embd.weight"), NOTHING
        reads = [loader.vectors("position_embd.weight", config.context, config.embedding)] if by_position else []
        if loader.has("token_types.weight"):
            of_types = loader.vectors("token_types.weight", loader.rows("token_types.weight"), config.embedding)
            reads.append(lambda: of_types()[:1])
        if reads:
            shape = config.context if by_position else 1, padded(config.embedding)
            stride = 4 * shape[1] if by_position else 0
            rows = Place(recording.later(shape, lambda: reduce(np.add, [read() for read in reads])), stride)
        recording.add_and_norm(rows, "token_embd_norm", by_position=by_position)

    def _logits(self) -> LogitsOperations:
        recording, config, architecture = self._recording, self._recording.config, self._recording.architecture
        builder = recording.builder
        name = "output.weight" if recording.loader.has("output.weight") else "token_embd.weight"
        output = recording.loader.matrix(name, config.vocabulary, config.embedding)
        factor, scale = architecture.scales.logits(config), output.scale
        # Tied embeddings are changed as embeddings only.
        output = replace(output, name="output.weight", scale="")
        gathers = builder.stage is Stage.ALL
        recording.norm_pack(architecture.norms.output, output, wanted=gathers, factor=factor, scale=scale)
        bias, place = recording.bias("output.bias", config.vocabulary), Place(0, 4 * output.rows)
        before = recording.last_change
        product = recording.product(output, place, addend=bias, last=True, stage=Stage.WANTED)
        change = recording.last_change if recording.last_change != before else None
        cap = config.factors.logit_cap if config.factors.logit_cap is not None else architecture.logit_cap
        capped = None
        if cap:
            arguments = SoftCap(y=place.address, stride=place.stride, count=output.rows, cap=builder.scalar(cap))
            capped = recording.add(activations.soft_cap, arguments, stage=Stage.WANTED)
        return LogitsOperations(product, capped, output.rows, change)
