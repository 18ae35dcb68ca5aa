"""Writes a model's packed weights to a file tensor by tensor, for models that do not fit into memory."""

import numpy as np

from cpu_kernels.threads import ThreadTeam
from gguf_io import ModelFile
from gguf_io.runner_info import LoadProgress
from models.config import read_config
from models.decoder_program import DecoderProgram
from models.packed_file import PackedWriter
from models.steps import usable_threads
from models.weights import PORTION_BYTES, pack_groups


def pack_to(file: ModelFile, writer: PackedWriter, progress: LoadProgress | None) -> None:
    """Pack everything that NativeRunner packs, and write it; the caller finishes the file.

    Needs memory for a few pieces of a tensor only. Raises what NativeRunner raises for the model's file, and OSError.
    """
    threads = usable_threads(None)
    loader = DecoderProgram(file, read_config(file), ("f16", "f16"), threads, True, ()).loader
    whole, done = loader.packed_bytes, 0
    team = ThreadTeam(threads)
    try:
        for packing in loader.packings.values():
            room = np.empty(max(PORTION_BYTES, packing.group_bytes), np.uint8)
            portions = (room[: pack_groups(team, packing, rows, room)] for rows in packing.portions)
            writer.put(packing.identity, portions)
            done += packing.size
            if progress is not None:
                progress("loading weights", done / whole)
    finally:
        team.close()
