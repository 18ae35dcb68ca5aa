"""What a family of image encoders implements, and what it computes with."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.memory import aligned_zeros
from cpu_kernels.program import Program, ProgramBuilder, choose_width, set_stage
from cpu_kernels.records import Ahead, Stage, Step
from cpu_kernels.threads import ThreadTeam
from cpu_kernels.tuning import prefetch
from gguf_io import ModelFile
from gguf_io.interruption import checkpoint
from gguf_io.media import Size
from gguf_io.pictures import Budget
from models.sizes.state import SlotSizes
from models.steps import step_fields
from models.vision.layout import ImageLayout
from models.vision.pixels import Pixels
from models.vision.recording import OperationRange, VisionRecording
from models.weights import WeightLoader

Rows = NDArray[np.float32]
Progress = Callable[[float], None]
"""Called with the part that is done, from 0 to 1."""


class Passes:
    """Runs parts of an encoder's program on up to `most` rows, and ends between two of them if the work is cancelled.

    step: the step record; its address fields for attention are the family's.
    """

    def __init__(self, program: Program, team: ThreadTeam, fields: dict[Step, NDArray[np.generic]], most: int) -> None:
        self.program, self.most = program, most
        self._team = team
        self._fields = fields
        self.step = aligned_zeros((int(Step.SIZE),), np.int64)
        for index, array in fields.items():
            self.step[index] = array.ctypes.data
        self.step[Step.AHEAD : Step.AHEAD + len(Ahead)] = prefetch().distances
        self.step[Step.SCRATCH_STRIDE] = len(fields[Step.SCRATCH]) // team.threads // 64 * 64
        self.progress: Progress | None = None
        self._done = self._total = 0.0

    def begin(self, total: float, progress: Progress | None) -> None:
        """Start a picture. total: the sum of the shares that its passes will have."""
        self.progress, self._done, self._total = progress, 0.0, total

    def field(self, index: Step) -> NDArray[np.generic]:
        """The array behind an address of the step record."""
        return self._fields[index]

    def run(self, part: OperationRange, rows: int, share: float) -> None:
        """Run a part of the program on the first rows of its buffers. share: of the picture's work.

        Raises what gguf_io.interruption.checkpoint raises, before anything is computed.
        """
        checkpoint()
        # A single row would be packed once for each thread, which products of this program do not expect.
        rows = max(rows, 2)
        set_stage(self.step, Stage.ALL, rows, choose_width(rows))
        self.program.run(self._team, self.step.ctypes.data, part.first, part.count)
        self._done += share
        if self.progress is not None:
            self.progress(min(self._done / self._total, 1.0))


class EncoderFamily(ABC):
    """An image encoder of one projector type, read from a file's header.

    width: values of a row that it makes. together: the most rows that see each other. longest, longest_head,
    slot_sizes: see models.steps.StepSizes. pass_rows: of a pass. picture_bytes: of arrays that a picture of the largest
    size takes while it is encoded, beside the program's.
    """

    width: int
    together: int = 0
    longest: int
    pass_rows: int
    picture_bytes: int
    longest_head: int = 32
    slot_sizes: SlotSizes | None = None

    @abstractmethod
    def __init__(self, file: ModelFile) -> None:
        """Read and check the header. Raises ModelFileError, or UnsupportedModelError."""

    @abstractmethod
    def layout(self, source: Size, budget: Budget) -> ImageLayout:
        """What becomes of a picture of this size. Raises PictureSizeError if it cannot be encoded."""

    @abstractmethod
    def record(self, loader: WeightLoader, recording: VisionRecording) -> None:
        """Load the weights and record the program, as a list of parts that the family keeps."""

    @abstractmethod
    def work(self, layout: ImageLayout) -> float:
        """The sum of shares that `encode` gives to its passes."""

    @abstractmethod
    def encode(self, pixels: Pixels, layout: ImageLayout, passes: Passes) -> list[Rows]:
        """The rows of each run of the layout, each float32[count, width]."""

    def new_fields(self, builder: ProgramBuilder, threads: int) -> dict[Step, NDArray[np.generic]]:
        """The arrays of the step record, kept by the program."""
        return step_fields(builder, self, self.pass_rows, threads)
