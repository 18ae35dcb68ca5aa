"""A projector on our own kernels: pictures as rows of embeddings (localllm.engine.runner.Projector)."""

import threading

from gguf_io import ModelFile
from gguf_io.errors import PictureError
from gguf_io.image_rows import ImageRows, SeenPicture, grid_of, row_ids
from gguf_io.pictures import Budget, Picture, Size
from gguf_io.runner_info import LoadProgress
from models.kv_layout import MAX_ROWS
from models.vision.encoder import open_encoder
from models.vision.layout import ImageLayout, PictureSizeError, RowRun


class NativeProjector:
    """The image encoder beside a model. Thread-safe; one picture is encoded at a time. Close it after use."""

    def __init__(
        self,
        file: ModelFile,
        threads: int | None = None,
        progress: LoadProgress | None = None,
        *,
        context: int,
    ) -> None:
        """Load it. context: tokens that a picture must fit. Raises what models.vision.encoder.open_encoder raises."""
        self._encoder = open_encoder(file, threads, progress)
        self._context = context
        self._lock = threading.Lock()

    @property
    def width(self) -> int:
        """Values of a row."""
        return self._encoder.width

    def see(self, picture: Picture, content: bytes, budget: Budget) -> SeenPicture:
        """See localllm.engine.runner.Projector. Ends early if the work is cancelled (gguf_io.interruption)."""
        layout = self._layout(picture.size, budget)
        if layout.tokens >= self._context:
            raise PictureError(
                f"The image takes {layout.tokens:,} tokens, more than the context of {self._context:,}. Lower "
                "image_max_tokens, or send a smaller one."
            )
        with self._lock:
            encoded = self._encoder.encode(picture.pixels, layout)
        rows = iter(encoded)
        pieces = tuple(
            ImageRows(
                row_ids(content, number, piece.count), next(rows), piece.sees_all, piece.grid and grid_of(*piece.grid)
            )
            if isinstance(piece, RowRun)
            else piece
            for number, piece in enumerate(layout.pieces)
        )
        return SeenPicture(pieces, layout.resized, layout.tiles)

    def tokens(self, size: Size, budget: Budget) -> int:
        """See localllm.engine.runner.Projector."""
        return self._layout(size, budget).tokens

    def _layout(self, size: Size, budget: Budget) -> ImageLayout:
        """A picture's layout; one whose rows see each other takes at most as many as a step computes."""
        try:
            layout = self._encoder.layout(*size, budget)
            if max((run.count for run in layout.runs if run.sees_all), default=0) > MAX_ROWS:
                layout = self._encoder.layout(*size, Budget(most_tokens=MAX_ROWS))
        except PictureSizeError as error:
            raise PictureError(error.message) from error
        return layout

    def close(self) -> None:
        """Free the encoder. Idempotent."""
        with self._lock:
            self._encoder.close()
