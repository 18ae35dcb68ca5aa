"""Exact memory sizes: llama.cpp opens a model and a context without allocating memory and reports what they need.

The sizes come from llama_get_memory_breakdown, as for llama.cpp's own --fit (common/fit.cpp). It has no C interface: it
returns a std::map, which is read here in the layout of GNU's C++ library. So this works on Linux only; on other
systems, and if the function changes, there are no sizes, and plans are estimates. A model's header takes up to 60 ms,
mostly for the vocabulary although the tokenizer is left out, and a context 5 to 10 ms.
"""

import ctypes
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import c_bool, c_int, c_size_t, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

from gguf_io.model_file import ModelFile
from gpu_offload.devices import DeviceKind, device_kind, device_name
from gpu_offload.errors import LlamaCppMissingError
from gpu_offload.library import ggml, llama, muted, shared_library
from gpu_offload.loading import context_params, model_params, open_handle
from gpu_offload.options import LlamaOptions, Use

log = logging.getLogger("localllm.gpu_offload")

MAIN = ""  # stands for main memory among device names
_FUNCTION = "_Z26llama_get_memory_breakdownPK13llama_context"  # llama_get_memory_breakdown(llama_context const*)
_LONGEST = 100  # characters of an architecture's name; llama.cpp accepts keys of 128 bytes
_MOST_KINDS = 64  # kinds of memory; there are three or four in practice
_MOST_KNOWN = 64
# Earlier results by the file, the time of its last change, and options: a load plans more than once.
_known: dict[tuple[Path, int, LlamaOptions], dict[str, Use]] = {}


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


def dry_run(model: ModelFile, options: LlamaOptions) -> dict[str, Use]:
    """Return what the model needs with these options, by device name and for MAIN memory; empty if unknown.

    It is unknown without llama.cpp, on systems other than Linux, for split mode "row", and if llama.cpp refuses the
    model (loading then says why). Adapters and projector are not counted.
    """
    if sys.platform != "linux" or options.split_mode == "row" or len(model.architecture) > _LONGEST:
        return {}
    options = replace(options, lora=(), mmproj=None, threads=None)
    key = model.path, model.path.stat().st_mtime_ns, options
    if (sizes := _known.get(key)) is None:
        try:
            sizes = _reported(model, options)
        except LlamaCppMissingError:
            return {}
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = sizes
    return sizes


def _reported(model: ModelFile, options: LlamaOptions) -> dict[str, Use]:
    library, table = llama(), model.tensors.get("token_embd.weight")
    function = getattr(shared_library("llama"), _FUNCTION, None)
    if function is None or table is None:
        log.debug("this llama.cpp has no memory breakdown, or the model no embeddings")
        return {}
    function.restype, function.argtypes = _Map, [c_void_p]
    params = model_params(options)
    params.no_alloc, params.load_mode = True, library.LLAMA_LOAD_MODE_NONE
    overrides = _without_tokenizer(model.architecture, table.shape[0])
    params.kv_overrides = overrides
    with muted(), ExitStack() as opened:
        handle = open_handle(model, params)
        if not handle:
            return {}
        opened.callback(library.llama_model_free, handle)
        context = library.llama_init_from_model(handle, context_params(handle, options))
        if not context:
            return {}
        opened.callback(library.llama_free, context)
        # The map's nodes, some hundred bytes, leak: no function frees them.
        return _sizes(function(context), model.weights_bytes)


def _without_tokenizer(architecture: str, vocabulary: int) -> Any:
    """Metadata overrides that leave the tokenizer out, which takes ten times as long as all the rest."""
    library = llama()
    overrides = (library.llama_model_kv_override * 3)()  # ended by an empty key
    overrides[0].tag = library.LLAMA_KV_OVERRIDE_TYPE_STR
    overrides[0].key, overrides[0].value.val_str = b"tokenizer.ggml.model", b"no_vocab"
    overrides[1].tag = library.LLAMA_KV_OVERRIDE_TYPE_INT
    overrides[1].key, overrides[1].value.val_i64 = f"{architecture}.vocab_size".encode(), vocabulary
    return overrides


def _sizes(found: _Map, in_file: int) -> dict[str, Use]:
    """The map's sizes summed up by device, empty if they are implausible. in_file: bytes of the file's weights."""
    if not 1 <= found.count <= _MOST_KINDS or found.color or found.root < 2**16 or found.root % 8:
        log.warning("llama.cpp's memory breakdown has an unknown layout; plans are estimates.")
        return {}
    sums: dict[str, Use] = {}
    for node in _nodes(found.root):
        place = _place(node.kind)
        had = sums.get(place, Use())
        sums[place] = Use(
            weights=had.weights + node.model, kv=had.kv + node.context, compute=had.compute + node.compute
        )
    weights = sum(one.weights for one in sums.values())
    if not 0.9 * in_file <= weights <= 2.5 * in_file:  # tied embeddings count twice on a GPU
        log.warning("llama.cpp reports %d bytes of weights of %d in the file; plans are estimates.", weights, in_file)
        return {}
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
