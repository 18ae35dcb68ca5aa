"""A model's memory and kernels, from its header alone: its program is recorded without reading any tensor.

Plans use the same code that decides at load how each tensor is packed and which buffers exist, so they need no second
description of the models.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.arguments import indices_of
from cpu_kernels.kernel import Kernel
from cpu_kernels.matmul import Product
from cpu_kernels.program import ProgramBuilder
from cpu_kernels.recorded_step import Products, product_form, row_products
from cpu_kernels.records import Act, Form, Op
from cpu_kernels.threads import lead, work
from gguf_io import ModelFile
from gguf_io.lora import Adapter
from models.config import ModelConfig, read_config, reading_images
from models.decoder_program import DecoderProgram, keep_program
from models.errors import UnsupportedModelError
from models.kv_layout import state_bytes
from models.self_drafts import SelfDrafts
from models.steps import usable_threads
from models.weights import padded

_PACKED = int(Op.ARGUMENTS) + indices_of(Product).packed
_FORMS = {
    Form.BLOCKS_32: (Act.Q32, Act.SCALE32, Act.SUM32),
    Form.BLOCKS_256: (Act.Q256, Act.SCALE256, Act.PAIRS256, Act.SUM16),
    Form.FLOATS: (Act.FLOATS,),
    Form.WORDS: (Act.WORDS, Act.WORD_UNITS),
}


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of main memory that a model takes."""

    weights: int  # as they are stored in memory, which for the native engine is packed
    buffers: int  # everything else of fixed size, all of it used by a step of the most rows
    kv_per_token: int = 0  # keys, values and states of a stored token; without layers of which only the window is kept
    window_per_token: int = 0  # keys and values of those layers, for each of
    window_tokens: int = 0  # the most tokens that a sequence keeps of them
    position_bytes: int = 0  # of tables, for each position of the longest sequence
    fixed_states: int = 0  # states of recurrent layers that take the same with every KV budget, as in llama.cpp

    def states(self, _kv_bytes: int) -> int:
        """What states of recurrent layers take of a KV budget, independent of the number of tokens."""
        return self.fixed_states

    def kv(self, tokens: int) -> int:
        """The least KV budget that holds `tokens` tokens beside the states that a budget of this size has."""
        budget, of_tokens = 0, tokens * self.kv_per_token + min(tokens, self.window_tokens) * self.window_per_token
        while budget < (needed := of_tokens + self.states(budget)):
            budget = needed
        return budget

    def tokens(self, kv_bytes: int) -> int:
        """The tokens of one sequence that a KV budget holds."""
        room = max(0, kv_bytes - self.states(max(kv_bytes, 0)))
        windows = self.window_tokens * self.window_per_token
        if room >= self.window_tokens * self.kv_per_token + windows:
            return (room - windows) // self.kv_per_token
        return room // (self.kv_per_token + self.window_per_token)

    def total(self, tokens: int) -> int:
        """Bytes with one sequence of `tokens` tokens."""
        return self.weights + self.buffers + self.kv(tokens) + tokens * self.position_bytes


@dataclass(frozen=True, kw_only=True)
class NativeNeeds(Needs):
    """Memory of a decoder on the native engine, and its work per token."""

    config: ModelConfig
    # The program's operations, and how many of an expert layer's matrices a row uses: see row_products.
    recorded: Sequence[tuple[str, Sequence[int]]] = field(repr=False, compare=False)
    matrices_of_row: Mapping[int, int] = field(repr=False, compare=False)
    values: int  # of a row's residual stream, summed over the layers: what other operations than products take
    kernels: tuple[Kernel, ...]  # of the program and its threads
    packers: tuple[Kernel, ...]  # that pack its weights
    adapters: int = 0  # bytes of LoRA adapters

    @property
    def operations(self) -> int:
        """How many the program has."""
        return len(self.recorded)

    @property
    def row(self) -> dict[str, Products]:
        """What the matrix products of every row read and compute, by weight format."""
        return self._products[0]

    @property
    def logits(self) -> dict[str, Products]:
        """What those for a row's logits read and compute."""
        return self._products[1]

    @cached_property
    def _products(self) -> tuple[dict[str, Products], dict[str, Products]]:
        return row_products(self.recorded, self.matrices_of_row.__getitem__)

    def states(self, kv_bytes: int) -> int:
        """What states of recurrent layers take of a KV budget, independent of the number of tokens."""
        return state_bytes(self.config, kv_bytes) if self.config.state else 0


def native_needs(
    file: ModelFile,
    kv_types: tuple[str, str] = ("f16", "f16"),
    threads: int | None = None,
    drafts: bool | ModelFile = True,
    adapters: Sequence[Adapter] = (),
    together: int | None = None,
) -> NativeNeeds:
    """What NativeRunner would allocate with these KV types and number of threads (None: its default).

    drafts, adapters: as for NativeRunner; `row` and `logits` include neither. together: the most rows of an
    image that see each other; None without a projector.
    Results are kept with the open file, and so is the latest program, for the runner. Raises UnsupportedModelError for
    what NativeRunner would refuse, ModelFileError for incomplete metadata.
    """
    count = usable_threads(threads)
    files = tuple(state for adapter in adapters for state in adapter.file.states)
    key = NativeNeeds, kv_types, count, drafts.path if isinstance(drafts, ModelFile) else drafts, files, together
    if key not in file.derived:
        config = read_config(file)
        if together is not None:
            config = reading_images(file, config, together)
        with addressable(file):
            program = DecoderProgram(file, config, kv_types, count, drafts, adapters)
            file.derived[key] = _needs_of(program)
        keep_program(file, program)
    found: NativeNeeds = file.derived[key]
    return found


@contextmanager
def addressable(file: ModelFile) -> Iterator[None]:
    """Raise UnsupportedModelError instead of MemoryError for sizes that exceed the address space."""
    try:
        yield
    except MemoryError as error:
        raise UnsupportedModelError(
            f"{file.path.name}: its sizes need more memory than this process may address ({error}). Check the "
            "file, and the limit of this process (ulimit -v)."
        ) from error


def _needs_of(program: DecoderProgram) -> NativeNeeds:
    config, loader, store, adapters = program.config, program.loader, program.store, program.adapters
    of_adapters = adapters.bytes if adapters else 0
    beside = adapters.peak_bytes(program.rows) if adapters else 0
    if config.images.are_read:
        # An image's rows in a step.
        beside += 4 * program.rows * (1 + config.images.layers) * padded(config.embedding)
    if layer := program.layer:
        beside += touched_bytes(layer.builder) + layer.stored_bytes + SelfDrafts(layer).kept_bytes
    latest = store.states.latest.nbytes if store.states else 0
    return NativeNeeds(
        config=config,
        weights=loader.packed_bytes,
        buffers=touched_bytes(loader.builder) - of_adapters + latest + 4 * program.logits.width + beside,
        kv_per_token=store.bytes_per_token,
        window_per_token=store.window_bytes_per_token,
        window_tokens=program.windows.kept if program.windows else 0,
        position_bytes=program.ropes.position_bytes,
        recorded=loader.builder.operations,
        matrices_of_row=program.recording.matrices_of_row,
        values=config.layers * config.embedding,
        kernels=(lead, work, *loader.builder.kernels),
        packers=loader.packers,
        adapters=of_adapters,
    )


def touched_bytes(builder: ProgramBuilder) -> int:
    """Bytes of a program's arrays, without packed forms of activations that no product reads."""
    read: dict[int, Form] = {}
    for name, record in builder.operations:
        if (form := product_form(name)) is not None:
            descriptor = record[_PACKED]
            read[descriptor] = read.get(descriptor, Form(0)) | form
    arrays, touched = dict[int, NDArray[np.generic]](), 0
    for array in builder.kept:
        arrays[array.ctypes.data] = array
        touched += array.nbytes
    for descriptor, forms in read.items():
        fields = arrays[descriptor][0]
        for form, indices in _FORMS.items():
            for index in () if forms & form else indices:
                touched -= arrays[int(fields[index])].nbytes
    return touched
