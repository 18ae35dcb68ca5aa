"""The sound encoder of Gemma 4 12B: frames of 40 ms are normalised and projected, without a tower.

Source: Gemma4UnifiedMultimodalEmbedder in transformers, tools/mtmd/models/gemma4ua.cpp in llama.cpp.
"""

import numpy as np

from gguf_io import ModelFile
from gguf_io.sounds import Samples
from models.vision.family import Passes, Rows
from models.vision.recording import VisionRecording
from models.vision.stages import matrix_outputs, record_linear
from models.weights import WeightLoader

KIND = "gemma4ua"
BEGIN, END = "<|audio>", "<audio|>"
RATE, FRAME = 16_000, 640
MOST_SECONDS = 30
"""The longest sound that the model was made for."""
_PROJECTION, _EPSILON = "mm.a.input_projection", 1e-6


class Gemma4Sound:
    """Rows of a sound, one for each frame; the last is filled with silence. width: values of a row."""

    rate, frame, most_seconds = RATE, FRAME, MOST_SECONDS
    begin, end = BEGIN, END

    def __init__(self, file: ModelFile) -> None:
        self.width = matrix_outputs(file, f"{_PROJECTION}.weight")

    def record(self, loader: WeightLoader, recording: VisionRecording) -> None:
        """Record the program's part. Raises what loading a tensor raises."""
        self._stage = record_linear(loader, recording, _PROJECTION, self.width, FRAME, recording.ones(FRAME), _EPSILON)

    def rows(self, samples: int) -> int:
        """How many rows so many samples make."""
        return -(-samples // FRAME)

    def encode(self, samples: Samples, passes: Passes) -> Rows:
        """float32[rows, width]."""
        frames = np.zeros((self.rows(len(samples)), FRAME), np.float32)
        frames.reshape(-1)[: len(samples)] = samples
        passes.begin(self._stage.work * len(frames), None)
        return self._stage.run(frames, passes)
