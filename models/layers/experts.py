"""Records the feed-forward layer of a mixture of experts."""

from dataclasses import replace

import numpy as np

from cpu_kernels import activations, experts, lora, sums
from cpu_kernels.records import TILE_WIDTHS, Barrier, Form, Stage
from models.architecture import Activation, Gating
from models.errors import UnsupportedModelError
from models.layers.feed_forward import KINDS, FeedForwardLayers, feed_forward_norm
from models.recording import NOTHING, Recording, Rows, forms, packed_activations
from models.weights import Matrix, padded


class ExpertLayers:
    """Buffers that all expert layers of a model share, and the recording of one layer."""

    def __init__(self, recording: Recording) -> None:
        """Raises UnsupportedModelError for an architecture whose experts are not supported."""
        self._recording = recording
        config, builder = recording.config, recording.builder
        assert config.experts is not None
        self._sizes = config.experts
        architecture = recording.architecture
        alone = recording.activation is Activation.XIELU_ALONE
        early_latents = bool(self._sizes.latent) and architecture.experts.early
        norms = architecture.norms
        if architecture.parallel or alone or early_latents or not (norms.before or norms.sums):
            raise UnsupportedModelError(
                f"The native engine does not support experts in models of the architecture {config.architecture}.",
                remedy="The llama.cpp backend may: use --backend llama.",
            )
        choices = recording.max_rows * self._sizes.used
        slots = choices + self._sizes.count * max(TILE_WIDTHS)
        width = self._width = self._sizes.latent or config.embedding
        longest = max(width, self._sizes.width)
        self._latents = recording.rows(width) if self._sizes.latent else None
        shared = self._sizes.shared
        self._shared = FeedForwardLayers(recording, shared) if shared else None
        widths = dict.fromkeys(config.feed_forward.widths if recording.architecture.experts.beside else ())
        self._beside = {width: FeedForwardLayers(recording, width) for width in widths}
        self._found = recording.rows(width) if widths or self._latents else recording.x
        self._scores = recording.rows(self._sizes.count)
        self._gate = Rows(builder, slots, self._sizes.width)
        self._up = Rows(builder, slots, self._sizes.width)
        self._answers = Rows(builder, slots, width)
        self._packed = packed_activations(builder, slots, longest, recording.threads)
        self._segments = builder.buffer(3 * self._sizes.count + 1, np.int64)
        recording.matrices_of_row[self._segments] = self._sizes.used
        self._row_of_slot = builder.buffer(slots, np.int32)
        self._slot_of_choice = builder.buffer(choices, np.int32)
        self._weight_of_choice = builder.buffer(choices)
        self._expert_of_choice = builder.buffer(choices, np.int32)
        adapters, counts = recording.adapters, (self._sizes.used, self._sizes.count)
        self._changes = adapters.table_of_slots(recording.max_rows, *counts) if adapters else 0
        rules = recording.architecture.experts
        self._scale = builder.scalar(rules.scale(config))
        self._normalise = self._sizes.normalise if rules.normalise is None else rules.normalise
        self._ones = builder.array(np.ones(choices, np.float32)) if rules.of_inputs else 0
        self._sigmoid = rules.gating(config) is Gating.SIGMOID

    def score_early(self, prefix: str) -> None:
        """Score the experts before the layer's attention, if the architecture does that."""
        if self._recording.architecture.experts.early:
            self._score(prefix, None)

    def record(self, layer: int) -> None:
        """Add experts(norm(x)) to x, and the output of a shared expert or dense network, which computes all rows."""
        config, prefix = self._recording.config, f"blk.{layer}."
        if self._beside:
            self._beside[config.feed_forward.widths[layer]].leave_aside(layer)
        shared_gates = self._shared.leave_shared_aside(layer) if self._shared else None
        gates = ["gate"] if self._recording.activation.gated else []
        *gate, up, down = (self._expert_matrix(prefix, name) for name in (*gates, "up", "down"))
        if not self._recording.architecture.experts.early:
            self._score(prefix, feed_forward_norm(self._recording, prefix))
        self._route(prefix)
        self._gather(prefix, forms(*gate, up))
        for matrix in gate:
            self._product(matrix, self._gate, last=False)
        self._product(up, self._up, last=True)
        if gate:
            self._add_bias(prefix + "ffn_gate_exps.bias", self._gate, self._sizes.width)
        self._add_bias(prefix + "ffn_up_exps.bias", self._up, self._sizes.width)
        activated = self._gate if gate else self._up
        self._recording.add(
            activations.gate_pack,
            activations.GatePack(
                gate=activated.address,
                up=self._up.address,
                stride=activated.stride,
                k=self._sizes.width,
                forms=down.format.form,
                packed=self._packed,
                kind=KINDS[self._recording.activation],
            ),
            stage=Stage.EXPERT,
        )
        self._product(replace(down, scale=""), self._answers, last=True)  # route applies the scale to the weights
        self._add_bias(prefix + "ffn_down_exps.bias", self._answers, self._width)
        self._combine()
        if self._latents:
            self._add_latents(prefix)
        if self._shared:
            self._recording.add_aside(shared_gates)
        norms = self._recording.architecture.norms
        if norms.sums:
            self._recording.add_and_norm(NOTHING, prefix + norms.feed_forward_sum)
        if self._beside:
            recording, aside = self._recording, self._recording.aside
            recording.normalise(aside.place, prefix + "post_ffw_norm_1", config.embedding)
            recording.norm_add(aside, self._found, prefix + "post_ffw_norm_2")
            recording.norm_add(recording.x, aside, prefix + "post_ffw_norm")

    def _score(self, prefix: str, norm: str | None) -> None:
        """Compute each row's router scores, and its latent if experts read one. norm: its tensor, None for no norm."""
        recording, config = self._recording, self._recording.config
        router = recording.loader.matrix(prefix + "ffn_gate_inp.weight", self._sizes.count, config.embedding)
        latents = []
        if self._latents:
            latents.append(recording.loader.matrix(f"{prefix}ffn_latent_down.weight", self._width, config.embedding))
        if self._beside:
            scale = recording.loader.vector(prefix + "ffn_gate_inp.scale", config.embedding)
            root = np.float32(config.embedding**-0.5)
            weight = recording.later((padded(config.embedding),), lambda: scale() * root)
            recording.pack(recording.x.place, router, weight=weight)
        else:
            recording.norm_pack(norm, router, *latents)
        for matrix in latents:
            assert self._latents is not None
            recording.product(matrix, self._latents.place, last=False)
        bias = recording.bias(prefix + "ffn_gate_inp.bias", self._sizes.count)
        recording.product(router, self._scores.place, addend=bias, last=True)

    def _route(self, prefix: str) -> None:
        """Choose each row's experts, and assign slots to the choices."""
        recording = self._recording
        factors = recording.bias(prefix + "ffn_down_exps.scale", self._sizes.count).address
        if factors and self._ones:
            raise UnsupportedModelError(
                f"{prefix}ffn_down_exps.scale: the native engine does not support factors of experts whose inputs are "
                "weighted.",
                remedy="The llama.cpp backend may: use --backend llama.",
            )
        recording.add(
            experts.route,
            experts.Route(
                scores=self._scores.address,
                stride=self._scores.stride,
                count=self._sizes.count,
                used=self._sizes.used,
                normalise=self._normalise,
                scale=self._scale,
                segments=self._segments,
                row_of_slot=self._row_of_slot,
                slot_of_choice=self._slot_of_choice,
                weight_of_choice=self._weight_of_choice,
                expert_of_choice=self._expert_of_choice,
                sigmoid=self._sigmoid,
                biases=recording.bias(prefix + "exp_probs_b.bias", self._sizes.count).address,
                factors=factors,
                groups=self._sizes.groups,
                groups_used=self._sizes.groups_used,
            ),
        )
        if self._changes:
            slots = lora.TileSlots(
                table=self._changes,
                used=self._sizes.used,
                segments=self._segments,
                slot_of_choice=self._slot_of_choice,
                expert_of_choice=self._expert_of_choice,
            )
            recording.add(lora.tile_slots, slots, barrier=Barrier.NEVER)  # which packing slots does not touch

    def _gather(self, prefix: str, form: Form) -> None:
        """Pack each slot's row."""
        recording = self._recording
        norm = prefix + "pre_ffw_norm_2" if self._beside else feed_forward_norm(recording, prefix)
        rows, plain = self._latents or recording.x, self._latents or norm is None
        recording.add(
            experts.expert_pack,
            experts.ExpertPack(
                x=rows.address,
                stride=rows.stride,
                weight=0 if plain else recording.vector(f"{norm}.weight", self._width),
                k=self._width,
                forms=form,
                packed=self._packed,
                epsilon=recording.epsilon,
                row_of_slot=self._row_of_slot,
                used=self._sizes.used,
                slot_of_choice=self._slot_of_choice,
                weight_of_choice=self._weight_of_choice if self._ones else 0,
            ),
            stage=Stage.EXPERT,
        )

    def _combine(self) -> None:
        """Sum each row's weighted expert outputs: added to x, or into `_found` if the sum is processed further."""
        x = self._found
        self._recording.add(
            experts.combine,
            experts.Combine(
                x=x.address,
                x_stride=x.stride,
                y=self._answers.address,
                y_stride=self._answers.stride,
                k=self._width,
                used=self._sizes.used,
                slot_of_choice=self._slot_of_choice,
                weight_of_choice=self._ones or self._weight_of_choice,
                overwrites=x is not self._recording.x,
            ),
        )

    def _add_latents(self, prefix: str) -> None:
        """x += the up-projection of the sum of a row's expert outputs, which is a latent."""
        recording = self._recording
        matrix = recording.loader.matrix(f"{prefix}ffn_latent_up.weight", recording.config.embedding, self._width)
        recording.pack(self._found.place, matrix)
        recording.product(matrix, recording.x.place, addend=recording.x.place, last=True)

    def _expert_matrix(self, prefix: str, name: str) -> Matrix:
        rows, k = self._sizes.width, self._width
        if name == "down":
            rows, k = k, rows
        elif self._recording.loader.has(prefix + "ffn_gate_up_exps.weight"):
            order = np.arange(rows) + (rows if name == "up" else 0)
            fused = prefix + "ffn_gate_up_exps.weight"
            return self._recording.loader.matrix(fused, 2 * rows, k, order, experts=self._sizes.count)
        return self._recording.loader.matrix(f"{prefix}ffn_{name}_exps.weight", rows, k, experts=self._sizes.count)

    def _product(self, matrix: Matrix, out: Rows, *, last: bool) -> None:
        """out = matrix * packed, each slot with its expert's matrix."""
        slots = (self._packed, self._segments)
        self._recording.products_of_slots(matrix, out, *slots, last=last, stage=Stage.EXPERT, table=self._changes)

    def _add_bias(self, name: str, rows: Rows, size: int) -> None:
        """Add the bias of each slot's expert, if the file has biases."""
        recording = self._recording
        if not recording.loader.has(name):
            return
        read = recording.loader.vectors(name, self._sizes.count, size)
        biases = recording.later((self._sizes.count, padded(size)), read)
        arguments = sums.AddExpertBias(y=rows.address, stride=rows.stride, biases=biases, segments=self._segments)
        recording.add(sums.add_expert_bias, arguments, stage=Stage.EXPERT)
