"""A recorded program and the record of its next step: which rows it computes, and of which sequences they are."""

from collections.abc import Callable
from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import attention, delta_net
from cpu_kernels.formats import panels
from cpu_kernels.loader import release_linker
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.program import ProgramBuilder, choose_width, set_stage
from cpu_kernels.recorded_step import RecordedStep
from cpu_kernels.records import TILE_WIDTHS, Stage, Step
from cpu_kernels.threads import ThreadTeam
from models.config import ModelConfig
from models.rope_tables import Ropes
from models.sequence import Sequence
from models.weights import padded

LoadProgress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is."""

# With fewer tiles of attention than this, threads would wait for the one with the longest.
TILES_A_THREAD = 8
_SEGMENT_FIELDS = 4


class Steps:
    """Runs a program on a team of threads, step by step, for up to max_rows rows each.

    Call `place` before `run` where the program reads tokens, or keys and values of sequences.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        team: ThreadTeam,
        config: ModelConfig,
        max_rows: int,
        progress: LoadProgress | None,
    ) -> None:
        """Compile what the builder's operations need."""

        def compiling(done: int, count: int, name: str) -> None:
            if progress is not None:
                progress("compiling kernels for this CPU, once", done / count)

        self.program = builder.build(compiling)
        release_linker()
        self._team, self._config = team, config
        self._step = aligned_zeros((int(Step.SIZE),), np.int64)
        self._address = self._step.ctypes.data
        self._tokens = self._field(Step.TOKENS, max_rows, np.int32)
        self._positions = self._field(Step.POSITIONS, max_rows, np.int32)
        self._row_tables = self._field(Step.ROW_TABLES, max_rows, np.int64)
        self._segments = self._field(Step.SEGMENTS, max_rows * _SEGMENT_FIELDS, np.int64)
        self._wanted = self._field(Step.WANTED, max_rows, np.int32)
        needs = [4 * padded(config.longest), attention.scratch_bytes(config.padded_head), panels.SCRATCH_BYTES]
        if sizes := config.delta_net:
            needs.append(delta_net.scratch_bytes(sizes.value_heads // sizes.key_heads, padded(sizes.head_size)))
        scratch = max(needs) + 4096
        self._scratch = self._field(Step.SCRATCH, scratch * team.threads, np.uint8)
        self._step[Step.SCRATCH_STRIDE] = scratch // 64 * 64
        self._parts = aligned_zeros((0,), np.uint8)
        self._parts_address = 0
        self._stages = (0, 0)  # rows and wanted rows that the step record was written for

    def _field(self, index: Step, size: int, dtype: type[np.generic]) -> NDArray[np.generic]:
        """A new array whose address stands in the step record."""
        array = aligned_zeros((size,), dtype)
        self._step[index] = array.ctypes.data
        return array

    def place(
        self,
        tokens: Ordered[int],
        positions: Ordered[int],
        segments: Ordered[tuple[Sequence, int, int]],
        ropes: Ropes,
    ) -> None:
        """Say what the rows are.

        segments: a sequence whose pages exist, its first row, and how many rows it has, which follow each other in it.
        """
        rows, step = len(tokens), self._step
        self._tokens[:rows] = tokens
        self._positions[:rows] = positions
        for index, (sequence, first, count) in enumerate(segments):
            table = sequence.table_address
            self._row_tables[first : first + count] = table
            at = index * _SEGMENT_FIELDS
            self._segments[at : at + _SEGMENT_FIELDS] = (first, count, positions[first], table)
        step[Step.SEGMENT_COUNT] = len(segments)
        ropes.cover([(positions[first], positions[first + count - 1]) for _, first, count in segments], step)
        self._share_attention([(count, positions[first] + count) for _, first, count in segments])

    def run(self, rows: int, wanted: Ordered[int] = ()) -> None:
        """Compute the rows, and what is computed of some only for those of these indices."""
        step = self._step
        self._wanted[: len(wanted)] = wanted
        if (rows, len(wanted)) != self._stages:
            self._stages = (rows, len(wanted))
            set_stage(step, Stage.ALL, rows, choose_width(rows))
            set_stage(step, Stage.WANTED, len(wanted), choose_width(len(wanted)))
        if self._config.experts:
            set_stage(step, Stage.EXPERT, 0, self._expert_width(rows))
        self.program.run(self._team, self._address)

    def last_step(self) -> RecordedStep:
        """The latest `run`, to be measured; valid until the next call that changes a sequence."""
        return RecordedStep(self.program, self._team, self._step)

    def _expert_width(self, rows: int) -> int:
        """The tile width for experts' slots: narrow enough that few lanes stay empty."""
        if rows <= 1:
            return 1
        average = rows * self._config.experts_used / self._config.experts
        return next((width for width in TILE_WIDTHS[1:] if width >= average), TILE_WIDTHS[-1])

    def _share_attention(self, segments: list[tuple[int, int]]) -> None:
        """Have a step of few tiles shared out by spans, and make room for their results. segments: (rows, length)."""
        heads, group, padded_head = self._config.kv_heads, self._config.group, self._config.padded_head
        tiles = [heads * attention.tiles_of(count, group) for count, _ in segments]
        self._step[Step.PARTS] = 0
        if self._team.threads == 1 or sum(tiles) >= TILES_A_THREAD * self._team.threads:
            return
        spans = sum(count * attention.spans_of(length) for count, (_, length) in zip(tiles, segments, strict=True))
        room = attention.parts_bytes(spans, padded_head)
        if room > len(self._parts):
            self._parts = aligned_zeros((2 * room,), np.uint8)
            self._parts_address = self._parts.ctypes.data
        self._step[Step.PARTS] = self._parts_address
