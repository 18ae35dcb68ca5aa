"""The image encoder of Gemma 4 E2B, E4B, 26B and 31B: rotated heads, and squares of patches averaged at the end.

Source: tools/mtmd/models/gemma4v.cpp in llama.cpp; sizes follow Gemma 4's image processor in transformers. Files do not
state the activation, which is GELU's tanh form in Gemma 4.
"""

from dataclasses import replace
from itertools import product

import numpy as np

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.media import Size
from gguf_io.pictures import Budget
from models.vision.config import read_vision_config
from models.vision.family import EncoderFamily, Passes, Rows
from models.vision.gemma4uv import (
    MOST_TOKENS,
    POSITIONS,
    PROJECTION,
    filled_layout,
    projection_width,
    table_positions,
)
from models.vision.layout import ImageLayout
from models.vision.pixels import BICUBIC, Pixels, patch_rows, resized
from models.vision.recording import VisionRecording
from models.vision.stages import record_linear, record_patches
from models.vision.tower import Style, Tower, halves_order, heads_of, rotation
from models.weights import WeightLoader

_ROPE_BASE = 100.0
_CAUSAL_WIDTHS = 1536, 2560
"""Of the language models E2B and E4B, which read pictures like text; others see a whole picture at once."""
_NORMS = "attn_q_norm", "attn_k_norm", "attn_post_norm", "ffn_post_norm"
_BIAS, _SCALE = "v.std_bias", "v.std_scale"


class Gemma4(EncoderFamily):
    """See models.vision.family.EncoderFamily."""

    def __init__(self, file: ModelFile) -> None:
        config = read_vision_config(file, merge=3)
        if config.head_size % 4:
            raise ModelFileError(f"{file.path}: heads of {config.head_size} values have no two rotated parts.")
        self.config = config = replace(config, activation="gelu" if config.activation == "quick" else config.activation)
        self._positions = table_positions(file, config.width)
        self.width = projection_width(file, config.width)
        self.together = 0 if self.width in _CAUSAL_WIDTHS else MOST_TOKENS
        patches = MOST_TOKENS * config.merge**2
        style = Style(rms=True, order=halves_order(2, heads_of(config)), value_norms=True, scale=1.0)
        self._tower = tower = Tower(file, config, patches, style)
        self.longest = max(tower.longest, 3 * config.patch**2)
        self.longest_head, self.pass_rows = tower.longest_head, tower.pass_rows
        of_row = tower.row_bytes + 24 * config.patch**2 + 4 * (3 * config.width + heads_of(config).padded)
        self.picture_bytes = patches * of_row + 4 * MOST_TOKENS * (config.width + self.width)

    def layout(self, source: Size, budget: Budget) -> ImageLayout:
        config = self.config
        unit, longest = config.patch * config.merge, self._positions * config.patch
        return filled_layout(source, budget, unit, longest, sees_all=self.together > 0)

    def record(self, loader: WeightLoader, recording: VisionRecording) -> None:
        width = self.config.width
        for layer, name in product(range(self.config.layers), _NORMS):
            if not loader.has(f"v.blk.{layer}.{name}.weight"):
                loader.refuse_missing(f"v.blk.{layer}.{name}.weight")
        self._table = loader.array(POSITIONS, 2, self._positions, width)
        self._patches = record_patches(loader, recording, self.config)
        self._tower.record(recording)
        self._bias = loader.array(_BIAS, width) if loader.has(_BIAS) else np.zeros(width, np.float32)
        self._scale = loader.array(_SCALE, width) if loader.has(_BIAS) else np.ones(width, np.float32)
        weight = recording.ones(width)
        self._project = record_linear(
            loader, recording, PROJECTION.removesuffix(".weight"), self.width, width, weight, self.config.epsilon
        )

    def work(self, layout: ImageLayout) -> float:
        patches = layout.tokens * self.config.merge**2
        return patches * self._patches.work + self._tower.work(patches) + layout.tokens * self._project.work

    def encode(self, pixels: Pixels, layout: ImageLayout, passes: Passes) -> list[Rows]:
        config, merge = self.config, self.config.merge
        across, down = (side // config.patch for side in layout.resized)
        picture = resized(pixels, layout.resized, BICUBIC)
        lines, columns = np.divmod(np.arange(down * across), across)
        # The encoder reads pixels from -1 to 1.
        x = self._patches.run(2 * patch_rows(picture, config.patch, config) - 1, passes)
        x += self._table[0, columns] + self._table[1, lines]
        pairs = config.head_size // 4
        rates = _ROPE_BASE ** (-np.arange(pairs) / pairs)
        angles = np.concatenate([np.outer(columns, rates), np.outer(lines, rates)], axis=1)
        self._tower.run(x, passes, table=rotation(angles, heads_of(config)))
        pooled = x.reshape(down // merge, merge, across // merge, merge, -1).mean((1, 3)).reshape(layout.tokens, -1)
        states = (pooled * np.float32(config.width**0.5) - self._bias) * self._scale
        return [self._project.run(states, passes)]
