"""Writes a model's packed weights to a file tensor by tensor, for models that do not fit into memory.

The program is recorded as for computing, since that decides which rows of which tensors are packed and how, and then
discarded.
"""

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.program import ProgramBuilder
from cpu_kernels.threads import ThreadTeam
from gguf_io import ModelFile
from gguf_io.runner_info import LoadProgress
from models.config import read_config
from models.decoder import DecoderRecorder
from models.eagle_head import choose_drafts, drafting_layer
from models.kv_layout import MAX_ROWS, stored_types, window_layers
from models.kv_pages import PageStore
from models.layers.rope import Ropes
from models.packed_file import PackedWriter
from models.recording import Recording
from models.registry import find_architecture
from models.steps import usable_threads
from models.weights import PORTION_BYTES, Packing, WeightLoader


def pack_to(file: ModelFile, writer: PackedWriter, progress: LoadProgress | None) -> None:
    """Pack everything that NativeRunner packs, and write it; the caller finishes the file.

    Needs memory for a few pieces of a tensor only. Raises what NativeRunner raises for the model's file, and OSError.
    """
    architecture, config = find_architecture(file.architecture), read_config(file)
    team = ThreadTeam(usable_threads(None))
    try:
        builder = ProgramBuilder()
        loader = _WritingLoader(file, team, builder, progress)
        loader.writer = writer
        store = PageStore(config, 0, stored_types(config, ("f16", "f16")), window_layers(config, architecture))
        recording = Recording(builder, loader, config, architecture, MAX_ROWS, team.threads)
        DecoderRecorder(recording, store, Ropes(recording, config.context)).record()
        if predicts := choose_drafts(file, config, architecture, drafts=True):
            drafting_layer(predicts, config, architecture, loader, store.types, team.threads)
    finally:
        team.close()


class _WritingLoader(WeightLoader):
    """Writes packed matrices to a file and keeps none in memory."""

    writer: PackedWriter

    def _stored(self, packing: Packing) -> NDArray[np.generic]:
        room = np.empty(max(PORTION_BYTES, packing.group_bytes), np.uint8)
        portions = (room[: self._pack_groups(room, packing, rows)] for rows in packing.portions)
        self.writer.put(packing.identity, portions)
        return np.broadcast_to(np.zeros(1, np.uint8), (packing.size,))
