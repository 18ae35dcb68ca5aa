"""A layer that drafts the token after the next one: the base of its kinds, each a small program beside the model's.

A row joins a token's embedding with a state of the token before it: one computed by the model, or by the layer itself
with its own draft. The kinds are in models.prediction_layer and models.eagle_head.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.arguments import indices_of
from cpu_kernels.choices import likeliest
from cpu_kernels.matmul import Product
from cpu_kernels.records import Stage
from cpu_kernels.threads import ThreadTeam
from gguf_io.runner_info import LoadProgress
from models.architecture import Architecture
from models.config import ModelConfig
from models.kv_layout import KVTypes, bytes_of_tokens
from models.kv_pages import PageStore, Sequence
from models.layers.rope import Ropes
from models.recording import Place, Recording, Rows
from models.steps import Steps, step_fields
from models.weights import Matrix, WeightLoader

MAX_ROWS = 64
MAX_SEQUENCES = 8
MAX_TOKENS = 512
"""The most tokens of a sequence whose keys and values the layer stores."""
VECTOR = 16
"""The width of each joined part must be a multiple of this many values."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows to append to one of the layer's sequences: tokens, and the state before each: float32[tokens, values].

    guessed: the states are the layer's own, computed with its drafts, not the model's.
    """

    sequence: Sequence
    tokens: Ordered[int]
    states: NDArray[np.float32]
    guessed: bool = False


class DraftingLayer(ABC):
    """The layer's program, and the pages of its keys and values, for MAX_SEQUENCES sequences of MAX_TOKENS tokens.

    Positions are the layer's own and may differ from the text's, since rotation encodes only distances. width: values
    of one of the model's states. config: sizes of the layer. reaches: allowed values of `ids` in `run`, ascending.
    tokens: the token of each output, None for the same number.
    """

    width: int
    reaches: tuple[int, ...]
    tokens: NDArray[np.int64] | None = None

    def __init__(
        self, config: ModelConfig, architecture: Architecture, loader: WeightLoader, types: KVTypes, threads: int
    ) -> None:
        """Prepare to record. config: of a model of which only the last layer is computed. loader: for its weights,
        which must have been loaded before `start`.
        """
        self.config, self._layer = config, config.layers - 1
        self.builder = loader.new_builder()
        self.store = PageStore(config, MAX_SEQUENCES * bytes_of_tokens(config, types, MAX_TOKENS), types)
        self._recording = Recording(self.builder, loader, config, architecture, MAX_ROWS, threads)
        self._ropes = Ropes(self._recording)
        self._fields = step_fields(self.builder, config, MAX_ROWS, threads)
        self._joined = self._recording.rows(2 * config.embedding)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the pages and of the rotation tables."""
        of_pages = MAX_SEQUENCES * MAX_TOKENS * self.store.bytes_per_token
        return of_pages + MAX_TOKENS * self._ropes.position_bytes

    def start(self, team: ThreadTeam, progress: LoadProgress | None) -> None:
        """Compile the program. Call it before the first `run`."""
        self._steps = Steps(self.builder, team, self.config, self._fields, progress)

    def run(self, parts: Ordered[DraftRows], ids: int = 0) -> tuple[list[tuple[int, float]], NDArray[np.float32]]:
        """Append at most MAX_ROWS rows; return the token drafted after each part's last row, and its state.

        ids: draft only from the first `ids` outputs, one of `reaches`; 0 to draft nothing. Returns tokens with their
        probabilities and float32[parts, values], both empty if ids is 0.
        """
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[tuple[Sequence, int, int]] = []
        for part in parts:
            first, count, start = len(tokens), len(part.tokens), part.sequence.length
            self._place_states(slice(first, first + count), part)
            self.store.append(part.sequence, count)
            segments.append((part.sequence, first, count))
            positions += range(start, start + count)
            tokens += part.tokens
        wanted = [first + count - 1 for _, first, count in segments] if ids else []
        self._steps.program.set_argument(self._output, indices_of(Product).groups, -(-ids // self._group_rows))
        self._steps.place(tokens, positions, segments, self._ropes)
        self._steps.run(len(tokens), wanted)
        drafted = likeliest(self.logits.values[: len(wanted), :ids]) if ids else []
        if self.tokens is not None:
            drafted = [(int(self.tokens[output]), probability) for output, probability in drafted]
        return drafted, self._recording.x.values[wanted, : self.config.embedding].astype(np.float32)

    @abstractmethod
    def prepared(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Convert states of the model, float32[tokens, width], to states that `run` takes."""

    @abstractmethod
    def _place_states(self, rows: slice, part: DraftRows) -> None:
        """Copy a part's states to where the program reads them."""

    def _embed(self, table: Matrix) -> None:
        """Record writing the tokens' embeddings into the first half of the joined rows."""
        recording = self._recording
        recording.embed(table, self._joined.place, recording.builder.scalar(1.0))

    def _normalise_joined(self, *names: str) -> None:
        """Record normalising each half of the joined rows by a tensor, named without .weight."""
        joined, width = self._joined, self.config.embedding
        for at, name in enumerate(names):
            self._recording.normalise(Place(joined.address + 4 * width * at, joined.stride), name, width)

    def _record_output(self, output: Matrix, norm: str | None) -> None:
        """Record the logits of the wanted rows. norm: the tensor that normalises them, None if they already are."""
        recording = self._recording
        self.logits, self._group_rows = Rows(self.builder, MAX_SEQUENCES, output.rows), output.format.group_rows
        recording.norm_pack(norm, output, wanted=True)
        self._output = recording.product(output, self.logits.place, last=True, stage=Stage.WANTED)
