"""Layout of the records of 64-bit integers that kernels read: one per step, one per operation.

STEP  changes from step to step: number of rows, addresses of their tokens, positions and pages.
OP    is fixed when a program is recorded: kernels, weights, buffers, sizes.
"""

from enum import IntEnum, IntFlag

from llvmlite import ir

from cpu_kernels.declarations import address, define, inner, int64
from cpu_kernels.isa import POLICY
from cpu_kernels.simd.vectors import I64, get_i64, load

TILE_WIDTHS = POLICY.tile_widths
"""The numbers of tokens that a register tile may hold, at most five widths."""


class Step(IntEnum):
    """Indices into the step record. SEGMENTS, SEGMENT_COUNT and PARTS are for all rows; 16 higher, the wanted ones."""

    ROWS = 0  # ROWS, WIDTH and WIDTH_INDEX have a field per stage
    WIDTH = 3
    WIDTH_INDEX = 6  # selects one of the operation's kernels
    TOKENS = 9
    POSITIONS = 10  # places of rows in pages
    ROW_TABLES = 11
    SEGMENTS = 12
    SEGMENT_COUNT = 13
    WANTED = 14
    ROPE_TABLES = 15
    SCRATCH = 19
    SCRATCH_STRIDE = 20
    TURN = 21  # a number of the program's run, set by it; see cpu_kernels.sharing
    PARTS = 22
    AHEAD = 23  # prefetch distances of products in bytes, one field per kind of `Ahead`
    ROPE_ROWS = 26  # the rows' places in rope tables, which differ from POSITIONS after an image
    LOOK_AHEAD = 27  # how many tokens after its own a row of an image sees
    WANTED_SEGMENTS = 28
    WANTED_SEGMENT_COUNT = 29
    IMAGE_ROWS = 30  # an image's embeddings, which replace those of tokens; 0 for none
    IMAGE_STRIDE = 31
    WANTED_PARTS = 38
    ADAPTERS = 40  # tables of the rows that LoRA adapters change (cpu_kernels.lora); 0 in a step without adapters
    WANTED_ADAPTERS = 41
    WANTED_ROPE_ROWS = 42
    SIZE = 44


class Ahead(IntEnum):
    """Kinds of products with separate prefetch distances: one token, by form of activations, and several tokens."""

    BLOCKS_32 = 0
    BLOCKS_256 = 1
    TILES = 2


class Stage(IntEnum):
    """Which rows an operation computes: all, those with requested logits, or experts' slots."""

    ALL = 0
    WANTED = 1
    EXPERT = 2


class Op(IntEnum):
    """Indices into an operation's record: a kernel per tile width, when a barrier follows, the stage, arguments.

    LINES is the address of a cache line for each thread, or 0; see cpu_kernels.sharing.
    """

    KERNELS = 0
    BARRIER = 5
    STAGE = 6
    LINES = 7
    ARGUMENTS = 8
    SIZE = 40


class Barrier(IntEnum):
    """When threads wait for each other after an operation.

    Without a barrier the next operation must not touch what this one writes: any thread may compute any item, so it
    does not help that both divide the same rows or heads. MANY_ROWS: a single row is packed by each thread for itself.
    ADAPTERS: only in steps with adapters.
    """

    NEVER = 0
    ALWAYS = 1
    MANY_ROWS = 2
    ADAPTERS = 3


class Act(IntEnum):
    """Indices into a descriptor of packed activations: addresses of the forms that weight formats use.

    Blocks of 32 (int8, f32 scale, int32 -128 * sum), blocks of 256 (int8, f32 scale, paired int16 sums of 32,
    -32 * sum of 16 as a short sum: see cpu_kernels.simd.bytes), plain f32, and words (int16, f32 unit per 128: see
    cpu_kernels.words). The layouts are [tile][k / 4][token][4] for int8, [tile][block][token] for scales, units and
    sums, [tile][k][token] for f32, and [tile][k / 2][token][2] for int16.
    """

    Q32 = 0
    SCALE32 = 1
    SUM32 = 2
    Q256 = 3
    SCALE256 = 4
    PAIRS256 = 5
    SUM16 = 6
    FLOATS = 7
    WORDS = 8
    WORD_UNITS = 9
    SIZE = 10


class Form(IntFlag):
    """Flags for the forms of packed activations that an operation's consumers need."""

    BLOCKS_32 = 1
    BLOCKS_256 = 2
    FLOATS = 4
    WORDS = 8


def _field(builder: ir.IRBuilder, record: ir.Value, index: ir.Value) -> ir.Value:
    return load(builder, builder.add(record, builder.shl(index, I64(3))), I64, 8)


def _argument(builder: ir.IRBuilder, op: ir.Value, index: ir.Value) -> ir.Value:
    return _field(builder, op, builder.add(index, I64(Op.ARGUMENTS)))


# field(record, index): the record's integer at an index.
field = define("field", [address, int64], int64, _field, lambda record, index: get_i64(record + 8 * index))
# argument(op, index): the operation's argument at an index.
argument = define(
    "argument", [address, int64], int64, _argument, lambda op, index: get_i64(op + 8 * (Op.ARGUMENTS + index))
)
# share(count, thread, threads): the first of a thread's items, of `count`; the thread's end is share of thread + 1.
share = define(
    "share",
    [int64, int64, int64],
    int64,
    lambda b, count, thread, threads: b.sdiv(b.mul(count, thread), threads),
    lambda count, thread, threads: count * thread // threads,
)


@inner
def stage_rows(op: int, step: int) -> int:
    """Rows of the operation's stage in this step."""
    return field(step, Step.ROWS + field(op, Op.STAGE))


@inner
def stage_width(op: int, step: int) -> int:
    """Tile width of the operation's stage in this step."""
    return field(step, Step.WIDTH + field(op, Op.STAGE))


@inner
def page_table(table: int, of_window: int) -> int:
    """A sequence's page table at an address, or that of its window layers, whose address precedes it in memory."""
    if of_window != 0:
        return field(table, -1)
    return table


@inner
def scratch(step: int, thread: int) -> int:
    """Address of this thread's scratch memory."""
    return field(step, Step.SCRATCH) + thread * field(step, Step.SCRATCH_STRIDE)


@inner
def activation(descriptors: int, private: int, rows: int, thread: int) -> int:
    """The descriptor to use: a single row packed privately is in each thread's own, everything else in the first."""
    if private != 0 and rows == 1:
        return descriptors + 8 * Act.SIZE * (1 + thread)
    return descriptors
