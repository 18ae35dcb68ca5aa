"""A projector on our own kernels: pictures and sounds as rows of embeddings (localllm.engine.runner.Projector)."""

from gguf_io import ModelFile
from gguf_io.errors import PictureError
from gguf_io.image_rows import ImageRows, SeenPicture, SeenPieces, grid_of, row_ids
from gguf_io.media import DEAF, Size, check_room
from gguf_io.pictures import Budget, Picture
from gguf_io.runner_info import LoadProgress
from gguf_io.sounds import Samples
from models.vision.encoder import open_encoder
from models.vision.gemma4ua import Gemma4Sound
from models.vision.layout import ImageLayout, PictureSizeError, RowRun


class NativeProjector:
    """The image encoder beside a model. Close it after use. For threads, see localllm.engine.runner.Projector."""

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

    @property
    def width(self) -> int:
        """Values of a row."""
        return self._encoder.width

    def see(self, picture: Picture, content: bytes, budget: Budget) -> SeenPicture:
        """See localllm.engine.runner.Projector. Ends early if the work is cancelled (gguf_io.interruption)."""
        layout = self._layout(picture.size, budget)
        check_room("image", layout.tokens, self._context)
        rows = iter(self._encoder.encode(picture.pixels, layout))
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

    @property
    def sound_rate(self) -> int:
        """See localllm.engine.runner.Projector."""
        return self._sound.rate

    def sound_tokens(self, samples: int) -> int:
        """See localllm.engine.runner.Projector."""
        sound, seconds = self._sound, samples / self._sound.rate
        if seconds > sound.most_seconds:
            raise PictureError(
                f"The sound lasts {seconds:,.1f} s; this model hears at most {sound.most_seconds} s. Cut it into parts."
            )
        tokens = sound.rows(samples)
        check_room("sound", tokens, self._context)
        return tokens

    def hear(self, samples: Samples, content: bytes) -> SeenPieces:
        """See localllm.engine.runner.Projector. Ends early if the work is cancelled."""
        tokens, sound = self.sound_tokens(len(samples)), self._sound
        rows = self._encoder.encode_sound(samples)
        return sound.begin, ImageRows(row_ids(content, 0, tokens), rows, sees_all=False), sound.end

    @property
    def _sound(self) -> Gemma4Sound:
        """The encoder of sound. Raises PictureError if there is none."""
        if self._encoder.sound is not None:
            return self._encoder.sound
        if self._encoder.sound_kind:
            raise PictureError(
                f"The model's projector encodes sound as {self._encoder.sound_kind!r}, which the native engine "
                "does not support.",
                remedy="llama.cpp may: use --backend llama.",
            )
        raise PictureError(DEAF)

    def _layout(self, size: Size, budget: Budget) -> ImageLayout:
        try:
            return self._encoder.layout(*size, budget)
        except PictureSizeError as error:
            raise PictureError(error.message) from error

    def close(self) -> None:
        """Free the encoder. Idempotent."""
        self._encoder.close()
