"""Opens a model and its context with LlamaOptions."""

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_ssize_t, c_void_p
from typing import Any

from cpu_kernels.cores import usable_cores
from gguf_io.layouts import StandardFile
from gguf_io.model_file import ModelFile
from gguf_io.runner_info import LoadProgress
from gpu_offload.errors import LlamaCppError
from gpu_offload.library import failure, ggml, llama, route_log
from gpu_offload.memory import block_type
from gpu_offload.options import LlamaOptions
from gpu_offload.sequences import MAX_NUMBERS, sequence_numbers, window_of

# Rows of logits that one llama_decode may return. The compute buffer holds them all, 4 bytes per vocabulary entry, on
# the device of the output layer; requesting more aborts the process.
OUTPUT_ROWS = 64

# enum llama_split_mode. llama.cpp's own "row" (2) is for SYCL only; all other backends reject it and use "tensor" (3).
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 3}
_READ = ctypes.CFUNCTYPE(c_ssize_t, c_void_p, c_void_p, c_size_t)
_SEEK = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_int64), c_int)
_FAILED = -1
_FULLY_BUFFERED = 0  # _IOFBF
_BUFFER = 1 << 18  # glibc reads no more than this at once; its own 8 KiB took 0.2 s longer for 390 MiB


class _BufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override, which the binding leaves out."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class _Calls(ctypes.Structure):
    """cookie_io_functions_t: null functions are not called."""

    _fields_ = (("read", _READ), ("write", c_void_p), ("seek", _SEEK), ("close", c_void_p))


def output_rows(options: LlamaOptions) -> int:
    """Return how many rows of logits one llama_decode may return in a context with these options."""
    return min(options.batch_rows, max(OUTPUT_ROWS, options.max_sequences))


@functools.cache
def can_repack() -> bool:
    """Return whether llama.cpp may repack weights for this processor.

    Not with AMX kernels: on several processors they end the process at the first batch of two rows
    (ggml-org/llama.cpp#20824), and a build's other repacking cannot be chosen without them.
    """
    return not ggml("ggml_cpu_has_amx_int8", ctypes.c_int)()


def model_params(options: LlamaOptions) -> Any:
    """Return the llama_model_params of these options."""
    params = llama().llama_model_default_params()
    params.use_extra_bufts = can_repack()
    params.n_gpu_layers = -1 if options.gpu_layers is None else options.gpu_layers
    params.main_gpu = options.main_gpu
    params.split_mode = _SPLIT_MODES[options.split_mode]
    if options.gpu_layers == 0:
        # Otherwise llama.cpp would still compute long batches on a GPU, in memory that the plan does not count.
        params.split_mode, params.main_gpu = _SPLIT_MODES["none"], -1
    elif options.tensor_split:
        params.tensor_split = ctypes.cast(_shares(options.tensor_split), ctypes.POINTER(ctypes.c_float))
    if options.cpu_expert_layers:
        params.tensor_buft_overrides = ctypes.cast(_expert_overrides(options.cpu_expert_layers), ctypes.c_void_p)
    return params


def context_params(handle: Any, options: LlamaOptions) -> Any:
    """Return the llama_context_params of these options for a llama_model pointer.

    Raises ValueError for a KV type that does not exist, and for more sequences than it supports.
    """
    numbers = sequence_numbers(options, window_of(handle))
    if numbers > MAX_NUMBERS:
        raise ValueError(
            f"max_sequences is {options.max_sequences}; llama.cpp has {MAX_NUMBERS} of its own, not {numbers}"
        )
    params = llama().llama_context_default_params()
    params.n_ctx = options.context_tokens
    params.n_batch = params.n_ubatch = options.batch_rows
    params.n_seq_max = numbers
    params.n_outputs_max = max(output_rows(options), numbers)  # llama.cpp aborts if there are more sequences than this
    params.kv_unified = True
    params.swa_full = True  # prefixes are truncated and shared far before a sliding window
    params.type_k = block_type(options.type_k).type_id  # GGUF's numbers are ggml's
    params.type_v = block_type(options.type_v).type_id
    params.n_threads = params.n_threads_batch = options.threads or usable_cores()
    return params


def load_model(model: ModelFile, options: LlamaOptions, progress: LoadProgress | None = None) -> Any:
    """Return a llama_model pointer; free it with llama_model_free.

    progress is called on this thread; an exception in it ends the load and is raised again. Raises LlamaCppMemoryError
    if a device has too little memory, LlamaCppError if llama.cpp cannot load the file for another reason, and
    LlamaCppMissingError without the llama extra.
    """
    library = llama()
    route_log()
    params = model_params(options)
    stopped: list[BaseException] = []

    def report(share: float, _user_data: object) -> bool:
        try:
            if progress is not None:
                progress("loading weights", share)
        except BaseException as error:  # must not propagate through llama.cpp's frames
            stopped.append(error)
        return not stopped

    callback = library.llama_progress_callback(report)
    params.progress_callback = callback
    handle = open_handle(model, params)
    if stopped:
        if handle:
            library.llama_model_free(handle)
        raise stopped[0]
    if not handle:
        raise failure(f"llama.cpp cannot load {model.path}")
    return handle


def open_handle(model: ModelFile, params: Any) -> Any:
    """Return a llama_model pointer, null if llama.cpp refuses the file; free it with llama_model_free.

    A file in another layout is translated to the standard one as it is read. Raises what reading it raises.
    """
    library, standard = llama(), model.standard_file()
    if standard is None:
        return library.llama_model_load_from_file(str(model.path).encode(), params)
    params.load_mode = library.LLAMA_LOAD_MODE_NONE  # there is nothing to map
    with served(standard) as file:
        return library.llama_model_load_from_file_ptr(file, params)


@contextmanager
def served(file: StandardFile) -> Iterator[int]:
    """Yield a FILE* that reads a virtual file from its beginning; it is closed after the block.

    The C libraries of Linux can make a FILE* whose reads are callbacks (fopencookie). So a model in another layout
    needs neither a copy on disk nor a second one in memory.

    An error while reading fails that read, and is raised after the block. Raises LlamaCppError on other systems.
    """
    if sys.platform != "linux":
        raise LlamaCppError("llama.cpp can load files in this layout on Linux only.")
    library = ctypes.CDLL(None)
    position = 0
    errors: list[BaseException] = []

    def read(_cookie: int, buffer: int, length: int) -> int:
        nonlocal position
        try:
            done = file.read_into(memoryview((ctypes.c_ubyte * length).from_address(buffer)).cast("B"), position)
        except BaseException as error:  # must not propagate through C frames
            errors.append(error)
            return _FAILED
        position += done
        return done

    def seek(_cookie: int, offset: "ctypes._Pointer[c_int64]", whence: int) -> int:
        nonlocal position
        wanted: int = (0, position, file.size)[whence] + offset[0]
        if wanted < 0:
            return _FAILED
        position = offset[0] = wanted
        return 0

    calls = _Calls(_READ(read), None, _SEEK(seek), None)
    library.fopencookie.argtypes, library.fopencookie.restype = [c_void_p, c_char_p, _Calls], c_void_p
    library.setvbuf.argtypes = [c_void_p, c_char_p, c_int, c_size_t]
    library.fclose.argtypes = [c_void_p]
    stream: int | None = library.fopencookie(None, b"r", calls)
    if not stream:
        raise LlamaCppError("The C library gave no stream for the model's file: too little memory.")
    buffer = ctypes.create_string_buffer(_BUFFER)
    library.setvbuf(stream, buffer, _FULLY_BUFFERED, _BUFFER)
    try:
        yield stream
    finally:
        library.fclose(stream)
        if errors:
            raise errors[0]


def open_context(handle: Any, options: LlamaOptions) -> Any:
    """Return a llama_context pointer with as many sequences as `Sequences` needs; free it with llama_free.

    Raises LlamaCppMemoryError or LlamaCppError, and what context_params raises.
    """
    context = llama().llama_init_from_model(handle, context_params(handle, options))
    if not context:
        raise failure(
            f"llama.cpp cannot make a context of {options.context_tokens} tokens "
            f"with {options.type_k} keys and {options.type_v} values"
        )
    return context


# C keeps pointers to the results of these two until a context is opened; the caches keep them alive.
@functools.cache
def _expert_overrides(layers: int) -> Any:
    """Return the list of overrides that keeps the experts of the first layers in main memory."""
    pattern = rf"^blk\.({'|'.join(map(str, range(layers)))})\.ffn_\w+_(ch)?exps\b".encode()
    return (_BufferOverride * 2)(_BufferOverride(pattern, ggml("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()))


@functools.cache
def _shares(tensor_split: tuple[float, ...]) -> Any:
    return (ctypes.c_float * llama().llama_max_devices())(*tensor_split)
