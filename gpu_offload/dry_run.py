"""Exact memory sizes: llama.cpp opens a model and a context without allocating memory and reports what they need.

The sizes come from llama_get_memory_breakdown, as for llama.cpp's own --fit (common/fit.cpp). It has no C interface: it
returns a std::map, which is read here in the layout of GNU's C++ library. So this works on Linux only; on other
systems, and if the function changes, there are no sizes, and plans are estimates. A model's header takes up to 60 ms,
mostly for the vocabulary although the tokenizer is left out, and a context 5 to 10 ms.
"""

import ctypes
import functools
import logging
import sys
from collections.abc import Iterator
from ctypes import c_bool, c_int, c_size_t, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf_io.model_file import ModelFile, open_model
from gpu_offload.devices import DeviceKind, device_kind, device_name
from gpu_offload.errors import LlamaCppMissingError
from gpu_offload.estimate import Sizes
from gpu_offload.library import ggml, llama, muted, shared_library
from gpu_offload.loading import context_params, model_params, open_handle
from gpu_offload.options import LlamaOptions

log = logging.getLogger("localllm.gpu_offload")

MAIN = ""  # stands for main memory among device names
_FUNCTION = "_Z26llama_get_memory_breakdownPK13llama_context"  # llama_get_memory_breakdown(llama_context const*)
_LONGEST = 100  # characters of an architecture's name; llama.cpp accepts keys of 128 bytes
_MOST_KINDS = 64  # kinds of memory; there are three or four in practice


class _Map(ctypes.Structure):
    """A std::map of libstdc++: an empty comparator, the header of a red-black tree, its size."""

    _fields_ = (
        ("compare", c_size_t),
        ("color", c_int),  # the header's is always 0, red
        *((name, c_size_t) for name in ("root", "first", "last", "count")),
    )


class _Node(ctypes.Structure):
    """A node of _Map: ggml_backend_buffer_type_t to llama_memory_breakdown_data (src/llama-ext.h)."""

    _fields_ = (
        ("color", c_int),
        *((name, c_size_t) for name in ("parent", "left", "right", "kind", "model", "context", "compute")),
    )


@dataclass(frozen=True, slots=True)
class _File:
    """The properties of a file that the sizes depend on."""

    path: Path
    changed_ns: int
    architecture: str
    vocabulary: int
    tensor_bytes: int
    translated: bool


def dry_run(model: ModelFile, options: LlamaOptions) -> dict[str, Sizes] | None:
    """Return what the model needs with these options, by device name and for MAIN memory; None if unknown.

    It is unknown without llama.cpp, on systems other than Linux, for split mode "row", and if llama.cpp refuses the
    model (loading then says why). Adapters and projector are not counted.
    """
    table = model.tensors.get("token_embd.weight")
    if sys.platform != "linux" or options.split_mode == "row" or table is None or len(model.architecture) > _LONGEST:
        return None
    changed, translated = model.path.stat().st_mtime_ns, bool(model.notes)
    file = _File(model.path, changed, model.architecture, table.shape[0], model.weights_bytes, translated)
    try:
        return _figures(file, replace(options, lora=(), mmproj=None, threads=None))
    except LlamaCppMissingError:
        return None


@functools.lru_cache(maxsize=64)
def _figures(file: _File, options: LlamaOptions) -> dict[str, Sizes] | None:
    library = llama()
    function = getattr(shared_library("llama"), _FUNCTION, None)
    if function is None:
        log.debug("this llama.cpp has no memory breakdown")
        return None
    function.restype, function.argtypes = _Map, [c_void_p]
    params = model_params(options)
    params.no_alloc, params.load_mode = True, library.LLAMA_LOAD_MODE_NONE
    overrides = _without_tokenizer(file)
    params.kv_overrides = overrides
    context = None
    with muted():
        handle = _open(file, params)
        try:
            if handle:
                context = library.llama_init_from_model(handle, context_params(handle, options))
            # The map's nodes, some hundred bytes, leak: no function frees them.
            return _sizes(function(context), file) if context else None
        finally:
            if context:
                library.llama_free(context)
            if handle:
                library.llama_model_free(handle)


def _open(file: _File, params: Any) -> Any:
    """A llama_model pointer, null if llama.cpp refuses the file."""
    if not file.translated:
        return llama().llama_model_load_from_file(str(file.path).encode(), params)
    with open_model(file.path) as model:
        return open_handle(model, params)


def _without_tokenizer(file: _File) -> Any:
    """Metadata overrides that leave the tokenizer out, which takes ten times as long as all the rest."""
    library = llama()
    overrides = (library.llama_model_kv_override * 3)()  # ended by an empty key
    overrides[0].tag = library.LLAMA_KV_OVERRIDE_TYPE_STR
    overrides[0].key, overrides[0].value.val_str = b"tokenizer.ggml.model", b"no_vocab"
    overrides[1].tag = library.LLAMA_KV_OVERRIDE_TYPE_INT
    overrides[1].key, overrides[1].value.val_i64 = f"{file.architecture}.vocab_size".encode(), file.vocabulary
    return overrides


def _sizes(found: _Map, file: _File) -> dict[str, Sizes] | None:
    """The map's sizes summed up by device, None if they are implausible."""
    if not 1 <= found.count <= _MOST_KINDS or found.color or found.root < 2**16 or found.root % 8:
        log.warning("llama.cpp's memory breakdown has an unknown layout; plans are estimates.")
        return None
    sums: dict[str, Sizes] = {}
    for node in _nodes(found.root):
        place = _place(node.kind)
        had = sums.get(place, Sizes())
        sums[place] = Sizes(had.weights + node.model, had.kv + node.context, had.compute + node.compute)
    weights = sum(one.weights for one in sums.values())
    if not 0.9 * file.tensor_bytes <= weights <= 2.5 * file.tensor_bytes:  # tied embeddings count twice on a GPU
        log.warning(
            "llama.cpp reports %d bytes of weights of %d in the file; plans are estimates.", weights, file.tensor_bytes
        )
        return None
    return sums


def _nodes(address: int) -> Iterator[_Node]:
    node = _Node.from_address(address)
    for child in (node.left, node.right):
        if child:
            yield from _nodes(child)
    yield node


def _place(kind: int) -> str:
    """The name of the device that this ggml_backend_buffer_type_t belongs to, or MAIN."""
    if ggml("ggml_backend_buft_is_host", c_bool, c_void_p)(kind):
        return MAIN
    device = ggml("ggml_backend_buft_get_device", c_void_p, c_void_p)(kind)
    if not device or device_kind(device) in (DeviceKind.CPU, DeviceKind.ACCELERATOR):
        return MAIN
    return device_name(device)
