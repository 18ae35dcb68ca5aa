"""The feed-forward layer of a mixture of experts, as operations."""

import numpy as np

from cpu_kernels import activations, experts
from cpu_kernels.program import ProgramBuilder
from cpu_kernels.records import TILE_WIDTHS, Barrier, Stage
from models.architecture import Architecture
from models.buffers import Rows, packed_activations
from models.config import ModelConfig
from models.weights import Matrix, WeightLoader


class ExpertLayer:
    """Buffers that all expert layers of a model share, and the recording of one layer."""

    def __init__(
        self,
        builder: ProgramBuilder,
        loader: WeightLoader,
        config: ModelConfig,
        architecture: Architecture,
        max_rows: int,
        threads: int,
    ) -> None:
        self._builder, self._loader, self._config = builder, loader, config
        self._normalise = int(architecture.normalise_experts)
        choices = max_rows * config.experts_used
        slots = choices + config.experts * max(TILE_WIDTHS)
        self._scores = Rows(builder, max_rows, config.experts)
        self._gate = Rows(builder, slots, config.feed_forward)
        self._up = Rows(builder, slots, config.feed_forward)
        self._answers = Rows(builder, slots, config.embedding)
        self._packed = packed_activations(builder, slots, max(config.embedding, config.feed_forward), threads)
        self._segments = builder.buffer(3 * config.experts + 1, np.int64)
        self._row_of_slot = builder.buffer(slots, np.int32)
        self._slot_of_choice = builder.buffer(choices, np.int32)
        self._weight_of_choice = builder.buffer(choices)
        self._expert_of_choice = builder.buffer(choices, np.int32)
        self._epsilon = builder.scalar(config.epsilon)
        self._one = builder.scalar(1.0)

    def record(self, prefix: str, x: Rows, packed: int) -> None:
        """Add x += experts(norm(x)). packed: descriptors for the router's input."""
        config, add = self._config, self._builder.add
        norm = self._builder.array(self._loader.vector(prefix + "ffn_norm.weight", config.embedding))
        router = self._loader.matrix(prefix + "ffn_gate_inp.weight", config.experts, config.embedding)
        gate, up, down = (self._expert_matrix(prefix, name) for name in ("gate", "up", "down"))
        source = (x.address, x.stride, norm, config.embedding)
        router_form = int(router.format.form)
        add(activations.norm_pack, *source, router_form, packed, self._epsilon, 0, barrier=Barrier.MANY_ROWS)
        scores = (self._scores.address, self._scores.stride)
        add(router.format.matmul, *router.arguments, *scores, 0, 0, packed, 1, barrier=Barrier.ALWAYS)
        add(
            experts.route,
            *scores,
            config.experts,
            config.experts_used,
            self._normalise,
            self._one,
            self._segments,
            self._row_of_slot,
            self._slot_of_choice,
            self._weight_of_choice,
            self._expert_of_choice,
            barrier=Barrier.ALWAYS,
        )
        forms = int(gate.format.form | up.format.form)
        slots = (forms, self._packed, self._epsilon, self._row_of_slot)
        add(experts.expert_pack, *source, *slots, barrier=Barrier.ALWAYS, stage=Stage.EXPERT)
        self._product(gate, self._gate, last=False)
        self._product(up, self._up, last=True)
        add(
            activations.gate_pack,
            self._gate.address,
            self._up.address,
            self._gate.stride,
            config.feed_forward,
            int(down.format.form),
            self._packed,
            activations.GATE_SILU,
            barrier=Barrier.ALWAYS,
            stage=Stage.EXPERT,
        )
        self._product(down, self._answers, last=True)
        add(
            experts.combine,
            x.address,
            x.stride,
            self._answers.address,
            self._answers.stride,
            config.embedding,
            config.experts_used,
            self._slot_of_choice,
            self._weight_of_choice,
            barrier=Barrier.ALWAYS,
        )

    def _expert_matrix(self, prefix: str, name: str) -> Matrix:
        config = self._config
        rows, k = config.feed_forward, config.embedding
        if name == "down":
            rows, k = k, rows
        return self._loader.matrix(f"{prefix}ffn_{name}_exps.weight", rows, k, experts=config.experts)

    def _product(self, matrix: Matrix, out: Rows, *, last: bool) -> None:
        self._builder.add(
            matrix.format.matmul,
            *matrix.arguments,
            out.address,
            out.stride,
            0,
            0,
            self._packed,
            0,
            self._segments,
            matrix.expert_bytes,
            barrier=Barrier.ALWAYS if last else Barrier.NEVER,
            stage=Stage.EXPERT,
        )
