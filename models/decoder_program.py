"""A decoder's program as it is recorded from the header: what a plan counts, and a runner loads.

It is recorded with pages for a single token in place of a runner's, and no weights are read.
"""

from collections.abc import Sequence

from gguf_io import ModelFile
from gguf_io.lora import Adapter
from models.adapters import Adapters
from models.config import ModelConfig
from models.decoder import DecoderRecorder
from models.eagle_head import choose_drafts, drafting_layer, layers_read
from models.errors import refusal
from models.kv_layout import most_rows, stored_types, window_layers
from models.kv_pages import PageStore
from models.layers.rope import Ropes
from models.recording import Recording
from models.registry import find_architecture
from models.steps import step_fields
from models.weights import WeightLoader


class DecoderProgram:
    """The operations of a decoder and of the layer that drafts for it, and the buffers that they have.

    rows: the most of a step. read: layers whose inputs the drafting layer reads, see DecoderRecorder.
    """

    def __init__(
        self,
        file: ModelFile,
        config: ModelConfig,
        kv_types: tuple[str, str],
        threads: int,
        drafts: bool | ModelFile,
        adapters: Sequence[Adapter],
    ) -> None:
        """drafts, adapters: as for NativeRunner. Raises UnsupportedModelError, ModelFileError."""
        architecture = find_architecture(file.architecture)
        if config.attention.causal is False:
            raise refusal(file, f"{file.architecture}.attention.causal is False: it does not generate text")
        self.made_for = config, kv_types, threads, drafts
        self.config, self.rows = config, most_rows(config)
        self.windows, types = window_layers(config, architecture), stored_types(config, kv_types)
        self.store = PageStore(config, 0, types, self.windows)
        self.loader = loader = WeightLoader(file)
        self.adapters = Adapters(adapters, config, loader) if adapters else None
        self.recording = Recording(loader.builder, loader, config, architecture, self.rows, threads, self.adapters)
        self.ropes = Ropes(self.recording)
        chosen = choose_drafts(file, config, architecture, drafts)
        self.read = layers_read(chosen, config) if isinstance(chosen, ModelFile) else ()
        self.recorder = DecoderRecorder(self.recording, self.store, self.ropes, self.read)
        self.logits = self.recorder.record()
        self.fields = step_fields(loader.builder, config, self.rows, threads, self.adapters)
        self.layer = drafting_layer(chosen, config, architecture, loader, types, threads) if chosen else None


def keep_program(file: ModelFile, program: DecoderProgram) -> None:
    """Keep a program that a plan has recorded until `decoder_program` takes it or the file is closed."""
    if not program.adapters:  # their files may be closed before
        file.derived[DecoderProgram] = program


def decoder_program(
    file: ModelFile,
    config: ModelConfig,
    kv_types: tuple[str, str],
    threads: int,
    drafts: bool | ModelFile,
    adapters: Sequence[Adapter],
) -> DecoderProgram:
    """The program that was kept, if it is this one, which is the caller's from now on; else a new one."""
    kept: DecoderProgram | None = file.derived.pop(DecoderProgram, None)
    if not adapters and kept is not None and kept.made_for == (config, kv_types, threads, drafts):
        return kept
    return DecoderProgram(file, config, kv_types, threads, drafts, adapters)
