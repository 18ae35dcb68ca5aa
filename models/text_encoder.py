"""Embedding models and rerankers on our own CPU kernels: one pooled vector per text."""

from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.kv_types import PAGE_TOKENS, KVType
from cpu_kernels.threads import ThreadTeam
from gguf_io import ModelFile
from gguf_io.lora import Adapter
from gguf_io.pooling import Pooling, averages, pooling_of
from gguf_io.runner_info import AdapterSet, LoadProgress
from models.adapters import Adapters
from models.config import ModelConfig, read_config
from models.decoder import DecoderRecorder
from models.kv_layout import kv_bytes_per_token
from models.kv_pages import PageStore, Sequence
from models.layers.rope import Ropes
from models.needs import Needs, addressable, touched_bytes
from models.pooling_head import PoolingHead
from models.recording import Recording
from models.registry import TEXT_ENCODERS, find_architecture
from models.steps import Steps, step_fields, usable_threads
from models.weights import WeightLoader

MAX_TOKENS = 2048  # per text, which is computed in one pass
# The most tokens of texts batched into one pass, unless a single text is longer: enough rows for matrix products to run
# at full speed, and few enough that intermediate results stay in the caches.
_TOGETHER = 512
_TYPES = (KVType.I16, KVType.I16)


class EncoderProgram:
    """An encoder's program as it is recorded from the header: what a plan counts, and TextEncoder loads."""

    def __init__(self, file: ModelFile, threads: int, adapters: Ordered[Adapter]) -> None:
        """Raises UnsupportedModelError for what TextEncoder refuses, ModelFileError for incomplete metadata."""
        self.architecture = architecture = find_architecture(file.architecture, TEXT_ENCODERS)
        self.config = config = read_config(file)
        self.rows = rows = max(min(config.context, MAX_TOKENS), _TOGETHER)  # of a pass
        # A text takes at least a page, and only one layer uses pages at a time.
        storing = _storing(config)
        self.stored_bytes = kv_bytes_per_token(storing, _TYPES)  # of a token's keys and values in a pass
        self.store = PageStore(storing, rows * PAGE_TOKENS * self.stored_bytes, _TYPES)
        self.loader = loader = WeightLoader(file, words=True)
        self.head = PoolingHead(file, loader, config, architecture, threads)
        self.adapters = Adapters(adapters, config, loader) if adapters else None
        recording = Recording(loader.builder, loader, config, architecture, rows, threads, self.adapters)
        self.ropes = Ropes(recording)
        recorder = DecoderRecorder(recording, self.store, self.ropes)
        self.states = recorder.record_states().values
        self.inputs = recorder.inputs
        loader.check_all_used(config.layers)
        if self.adapters:
            self.adapters.check_all_used(loader.left_out)
        self.fields = step_fields(loader.builder, config, rows, threads, self.adapters)


def encoder_needs(file: ModelFile, threads: int | None = None, adapters: Ordered[Adapter] = ()) -> Needs:
    """What TextEncoder takes; the buffers include everything that its longest text needs, and `adapters`.

    Raises UnsupportedModelError for what TextEncoder would refuse, ModelFileError for incomplete metadata.
    """
    with addressable(file):
        program = EncoderProgram(file, usable_threads(threads), adapters)
    stored = program.rows * (program.stored_bytes + program.ropes.position_bytes)
    beside = touched_bytes(program.loader.builder) + touched_bytes(program.head.builder) + stored
    return Needs(
        program.loader.packed_bytes, beside + (program.adapters.peak_bytes(program.rows) if program.adapters else 0)
    )


class TextEncoder:
    """A model that pools the states of a text's tokens into one row. Not thread-safe; close it after use.

    A text's row is bit-exact alone or in a batch, on any number of threads. max_tokens: per text. dimensions: numbers
    in a row; a reranker has one, its score.
    """

    def __init__(
        self,
        file: ModelFile,
        threads: int | None = None,
        progress: LoadProgress | None = None,
        adapters: Ordered[Adapter] = (),
    ) -> None:
        """Load and pack the weights and compile the kernels. The files may be closed afterwards.

        threads: None for all cores this process may use; capped at the processors it may use. adapters: LoRA adapters
        for the model. Raises UnsupportedModelError or ModelFileError before anything large is allocated.
        """
        count = usable_threads(threads)
        program = EncoderProgram(file, count, adapters)
        self._config = config = program.config
        pooling, self._averages = pooling_of(file), averages(file)
        causal = program.architecture.attention.causal if config.attention.causal is None else config.attention.causal
        # In a causal reranker the last state has seen the whole text; otherwise the first is trained to summarize it.
        self._reads_last = pooling is Pooling.LAST or (pooling is Pooling.RANK and causal)
        self.max_tokens = min(config.context, MAX_TOKENS)
        self._store, self._ropes, self._head = program.store, program.ropes, program.head
        self._states, self._inputs = program.states, program.inputs
        team = self._team = ThreadTeam(count)
        try:
            if progress is not None:
                progress("loading weights", 0.0)
            loader = program.loader
            loader.load(team, progress)
            self._head.compile(team, progress)
            self._steps = Steps(loader.builder, team, config, program.fields, progress, program.adapters)
        except BaseException:
            team.close()
            raise
        self.dimensions = self._head.width
        self._closed = False

    def pooled(self, texts: Ordered[Ordered[int]], adapters: AdapterSet = ()) -> NDArray[np.float32]:
        """Return each text's row: float32[len(texts), dimensions]. The caller adds special tokens and normalises rows.

        adapters: number and weight of each that applies. Raises ValueError, before anything is computed, for a text
        that is empty or longer than max_tokens and for ids outside the vocabulary.
        """
        if self._closed:
            raise ValueError("this model is closed")
        for number, text in enumerate(texts):
            if not 1 <= len(text) <= self.max_tokens:
                raise ValueError(f"text {number} has {len(text)} tokens, outside 1..{self.max_tokens}")
            if min(text) < 0 or max(text) >= self._config.vocabulary:
                raise ValueError(f"text {number} has token ids outside 0..{self._config.vocabulary - 1}")
        found = np.empty((len(texts), self._config.embedding), np.float32)
        first = rows = 0
        for number, text in enumerate(texts):
            if rows and rows + len(text) > _TOGETHER:
                self._compute(texts[first:number], found[first:number], adapters)
                first, rows = number, 0
            rows += len(text)
        if rows:
            self._compute(texts[first:], found[first:], adapters)
        return self._head.run(found)

    def close(self) -> None:
        """Stop the threads; memory is released with the last reference. Idempotent."""
        self._closed = True
        self._team.close()
        if self._inputs:
            self._inputs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compute(self, texts: Ordered[Ordered[int]], out: NDArray[np.float32], adapters: AdapterSet) -> None:
        """Compute texts in one pass, each as a sequence, and pool their states."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[tuple[Sequence, int, int]] = []
        try:
            for text in texts:
                sequence = Sequence(adapters=adapters)
                self._store.append(sequence, len(text))
                segments.append((sequence, len(tokens), len(text)))
                tokens += text
                positions += range(len(text))
            if self._inputs:
                self._inputs.fetch(tokens, self._steps.program)
            self._steps.place(tokens, positions, segments, self._ropes)
            self._steps.run(len(tokens))
        finally:
            for sequence, _, _ in segments:
                self._store.truncate(sequence, 0)
        states = np.asarray(self._states[: len(tokens), : self._config.embedding], np.float32)
        for row, (_, first, count) in zip(out, segments, strict=True):
            if self._averages:
                row[:] = np.mean(states[first : first + count], axis=0)
            else:
                row[:] = states[first + count - 1 if self._reads_last else first]


def _storing(config: ModelConfig) -> ModelConfig:
    """The sizes of what is stored: if all layers are alike, one layer's pages, which each overwrites in turn."""
    sizes = config.attention
    own = len(set(sizes.kv_layers)) == config.layers  # no layer reads another's keys and values
    alike = own and all(sizes.attends) and len(set(sizes.layer_heads)) == 1
    return replace(config, attention=replace(sizes, kv_layers=(0,) * config.layers)) if alike else config
