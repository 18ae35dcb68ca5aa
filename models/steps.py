"""Runs a recorded program step by step: writes the step record, which lists the rows and their sequences."""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.attention import scratch_bytes
from cpu_kernels.attention_shape import parts_bytes, shared_spans
from cpu_kernels.compile_children import CompileProgress
from cpu_kernels.cores import usable_cores, usable_processors
from cpu_kernels.kernel import release_linker
from cpu_kernels.matmul import SCRATCH_BYTES
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.program import ProgramBuilder, choose_width, set_stage
from cpu_kernels.recorded_step import RecordedStep
from cpu_kernels.records import TILE_WIDTHS, Ahead, Stage, Step
from cpu_kernels.threads import ThreadTeam
from cpu_kernels.tuning import prefetch
from gguf_io.runner_info import LoadProgress
from models.adapters import Adapters
from models.config import ModelConfig
from models.kv_pages import Sequence
from models.layers.rope import Ropes
from models.sizes.experts import ExpertSizes
from models.sizes.state import SlotSizes
from models.weights import padded

_SEGMENT_FIELDS = 4


def usable_threads(threads: int | None) -> int:
    """That many threads, None for all cores this process may use; capped at the processors it may use."""
    return min(threads or usable_cores(), usable_processors())


def compiling(progress: LoadProgress | None) -> CompileProgress:
    """Report compilation progress as load progress."""

    def report(done: int, count: int) -> None:
        if progress is not None:
            progress("compiling kernels for this CPU, once", done / count)

    return report


class StepSizes(Protocol):
    """The sizes on which a thread's scratch memory depends, as in ModelConfig."""

    @property
    def longest(self) -> int: ...

    @property
    def longest_head(self) -> int: ...

    @property
    def slot_sizes(self) -> SlotSizes | None: ...


def step_fields(
    builder: ProgramBuilder, config: StepSizes, max_rows: int, threads: int, adapters: Adapters | None = None
) -> dict[Step, NDArray[np.generic]]:
    """New arrays for the step record's address fields, kept alive by the program."""
    needs = [4 * padded(config.longest), scratch_bytes(config.longest_head), SCRATCH_BYTES]
    if config.slot_sizes:
        needs.append(config.slot_sizes.scratch_bytes)
    if adapters:
        needs.append(adapters.scratch_bytes)
    sizes: dict[Step, tuple[int, type[np.generic]]] = {
        Step.TOKENS: (max_rows, np.int32),
        Step.POSITIONS: (max_rows, np.int32),
        Step.ROPE_ROWS: (max_rows, np.int32),
        Step.ROW_TABLES: (max_rows, np.int64),
        Step.SEGMENTS: (max_rows * _SEGMENT_FIELDS, np.int64),
        Step.WANTED: (max_rows, np.int32),
        Step.WANTED_ROPE_ROWS: (max_rows, np.int32),
        Step.WANTED_SEGMENTS: (max_rows * _SEGMENT_FIELDS, np.int64),
        Step.SCRATCH: ((max(needs) + 4096) * threads, np.uint8),
    }
    fields: dict[Step, NDArray[np.generic]] = {}
    for index, (size, dtype) in sizes.items():
        fields[index] = aligned_zeros((size,), dtype)
        builder.keep(fields[index])
    return fields


class Steps:
    """Runs a program on a team of threads, step by step, for up to the rows that its fields have room for.

    Call `place` before `run` if the program reads tokens, or keys and values of sequences.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        team: ThreadTeam,
        config: ModelConfig,
        fields: Mapping[Step, NDArray[np.generic]],
        progress: LoadProgress | None,
        adapters: Adapters | None = None,
    ) -> None:
        """Compile the builder's kernels. fields: step_fields. adapters: those that the program was recorded with."""
        self._adapters = adapters
        self.program = builder.build(compiling(progress))
        release_linker()
        self._team, self._config = team, config
        self._step = aligned_zeros((int(Step.SIZE),), np.int64)
        self._address = self._step.ctypes.data
        for index, array in fields.items():
            self._step[index] = array.ctypes.data
        self._step[Step.AHEAD : Step.AHEAD + len(Ahead)] = prefetch().distances
        self._tokens, self._positions = fields[Step.TOKENS], fields[Step.POSITIONS]
        self._turns, self._wanted_turns = fields[Step.ROPE_ROWS], fields[Step.WANTED_ROPE_ROWS]
        self._row_tables, self._segments = fields[Step.ROW_TABLES], fields[Step.SEGMENTS]
        self._wanted, self._wanted_segments = fields[Step.WANTED], fields[Step.WANTED_SEGMENTS]
        self._narrows, self._longest_head = config.narrows, config.longest_head
        self._placed: Ordered[tuple[Sequence, int, int]] = ()
        heads = zip(config.attention.layer_heads, config.attention.attends, strict=True)
        self._kinds = {(each.keys, each.group) for each, attends in heads if attends}
        self._step[Step.SCRATCH_STRIDE] = len(fields[Step.SCRATCH]) // team.threads // 64 * 64
        self._parts = dict.fromkeys((Step.PARTS, Step.WANTED_PARTS), aligned_zeros((0,), np.uint8))
        self._stages = (0, 0)  # rows and rows with requested logits that the step record was written for

    def place(
        self,
        tokens: Ordered[int],
        positions: Ordered[int],
        segments: Ordered[tuple[Sequence, int, int]],
        ropes: Ropes,
        turns: Ordered[int] | None = None,
    ) -> None:
        """Write the rows into the step record.

        segments: (sequence, first row, rows) each. The sequence's pages exist, and its rows have consecutive positions.
        turns: positions by which rows are rotated, consecutive in each segment, if they differ from those in pages.
        """
        rows, step = len(tokens), self._step
        self._tokens[:rows] = tokens
        self._positions[:rows] = positions
        turns = positions if turns is None else turns
        self._turns[:rows] = turns
        step[Step.IMAGE_ROWS] = step[Step.LOOK_AHEAD] = 0
        for index, (sequence, first, count) in enumerate(segments):
            table = sequence.table_address
            self._row_tables[first : first + count] = table
            at = index * _SEGMENT_FIELDS
            self._segments[at : at + _SEGMENT_FIELDS] = (first, count, positions[first], table)
        step[Step.SEGMENT_COUNT] = len(segments)
        lengths = [(count, positions[first] + count) for _, first, count in segments]
        self._share_attention(Step.PARTS, lengths)
        ropes.cover([(turns[first], turns[first] + count - 1) for _, first, count in segments], step)
        if self._adapters:
            self._adapters.place(step, [(sequence.adapters, first, count) for sequence, first, count in segments])
        self._placed = segments

    def place_image(
        self,
        sequence: Sequence,
        first: int,
        embeddings: NDArray[np.float32],
        turns: NDArray[np.int32],
        ropes: Ropes,
        sees_all: bool,
    ) -> None:
        """Write rows of an image into the step record, whose pages from position `first` on exist.

        embeddings: float32[rows, parts of the padded width], which must live until `run` returns. turns: the position
        of each row in every component, int32[components, rows]. sees_all: whether rows see those after them.
        """
        rows, step = len(embeddings), self._step
        self.place([0] * rows, range(first, first + rows), [(sequence, 0, rows)], ropes, turns[0].tolist())
        self._turns[:rows] = ropes.rows_of(turns, step)
        step[Step.IMAGE_ROWS], step[Step.IMAGE_STRIDE] = embeddings.ctypes.data, embeddings.strides[0]
        step[Step.LOOK_AHEAD] = rows if sees_all else 0

    def _place_wanted(self, wanted: Ordered[int]) -> None:
        """Write the segments of the rows with requested logits: runs of consecutive positions in one sequence."""
        step, at = self._step, 0
        lengths: list[tuple[int, int]] = []
        for sequence, first, count in self._placed:
            while at < len(wanted) and wanted[at] < first + count:
                begin = at
                at += 1
                while at < len(wanted) and wanted[at] == wanted[at - 1] + 1 and wanted[at] < first + count:
                    at += 1
                position = self._positions.item(wanted[begin])
                place = len(lengths) * _SEGMENT_FIELDS
                entry = (begin, at - begin, position, sequence.table_address)
                self._wanted_segments[place : place + _SEGMENT_FIELDS] = entry
                lengths.append((at - begin, position + at - begin))
        self._wanted_turns[: len(wanted)] = self._turns[list(wanted)]
        step[Step.WANTED_SEGMENT_COUNT] = len(lengths)
        self._share_attention(Step.WANTED_PARTS, lengths)

    def run(self, rows: int, wanted: Ordered[int] = ()) -> None:
        """Compute the rows. wanted: indices of the rows that operations of Stage.WANTED compute."""
        step = self._step
        self._wanted[: len(wanted)] = wanted
        if (rows, len(wanted)) != self._stages:
            self._stages = (rows, len(wanted))
            set_stage(step, Stage.ALL, rows, choose_width(rows))
            set_stage(step, Stage.WANTED, len(wanted), choose_width(len(wanted)))
        if self._narrows:
            self._place_wanted(wanted)
        if self._adapters:
            self._adapters.place_wanted(step, wanted)
        if self._config.experts:
            set_stage(step, Stage.EXPERT, 0, _expert_width(rows, self._config.experts))
        self.program.run(self._team, self._address)

    def last_step(self) -> RecordedStep:
        """The latest `run`, for measurements; valid until the next call that changes a sequence."""
        return RecordedStep(self.program, self._team, self._step)

    def _share_attention(self, field: Step, segments: list[tuple[int, int]]) -> None:
        """If a step has few attention tiles, divide it among threads by spans, and allocate buffers for their results.

        segments: (rows, length) each.
        """
        self._step[field] = 0
        if self._team.threads == 1:
            return
        room = parts_bytes(shared_spans(self._kinds, segments, self._team.threads), self._longest_head)
        if not room:
            return
        if room > len(self._parts[field]):
            self._parts[field] = aligned_zeros((2 * room,), np.uint8)
        self._step[field] = self._parts[field].ctypes.data


def _expert_width(rows: int, mixture: ExpertSizes) -> int:
    """The tile width for experts' slots: narrow enough to leave few lanes empty."""
    if rows <= 1:
        return 1
    average = rows * mixture.used / mixture.count
    return next((width for width in TILE_WIDTHS[1:] if width >= average), TILE_WIDTHS[-1])
