"""llama.cpp as the oracle of drafting layers: multi-token prediction, and EAGLE-3 heads.

Functions that llama.cpp's binding lacks are called by their C++ symbol names.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracle.llama_oracle import api, compute, context, decode, load, log


def predicted_logits(path: Path | str, tokens: Sequence[int], states: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the logits of the file's multi-token prediction layer: float32[len(tokens), vocabulary].

    states: float32[len(tokens), embedding], the state combined with each token.
    """
    llama = api()
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = len(tokens)
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0
    params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
    handle = llama.llama_init_from_model(load(path, drafts=True), params)
    if not handle:
        raise ValueError(f"llama.cpp cannot make a context for drafts:\n{log()[-2000:]}")
    try:
        return decode(handle, tokens, 0, np.ascontiguousarray(states, np.float32))
    finally:
        llama.llama_free(handle)


def layer_inputs(path: Path | str, tokens: Sequence[int], layers: Sequence[int]) -> NDArray[np.float32]:
    """Return the inputs of these layers, concatenated: float32[len(tokens), layers * embedding]."""
    llama = api()
    width = llama.llama_model_n_embd(load(path))
    with context(path, len(tokens)) as handle:
        for layer in layers:
            _exported("_Z30llama_set_embeddings_layer_inpP13llama_contextjb")(handle, layer, True)
        compute(handle, tokens, 0)
        get = _exported("_Z30llama_get_embeddings_layer_inpP13llama_contextj", ctypes.POINTER(ctypes.c_float))
        parts = [np.ctypeslib.as_array(get(handle, layer), (len(tokens), width)) for layer in layers]
        return np.concatenate(parts, axis=1, dtype=np.float32)


def guessed_by_head(
    path: Path | str, model: Path | str, tokens: Sequence[int], features: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return an EAGLE-3 head's states before its layer, its logits over the model's tokens, and its states after.

    path: the head. features: the result of layer_inputs for the token before each.
    """
    llama, count = api(), len(tokens)
    width = llama.llama_model_n_embd(load(path))
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = count
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0
    params.pooling_type = llama.LLAMA_POOLING_TYPE_NONE
    with context(model, count) as other:
        params.ctx_other = other
        handle = llama.llama_init_from_model(load(path), params)
        if not handle:
            raise ValueError(f"llama.cpp cannot make a context for the head:\n{log()[-2000:]}")
        get = _exported("_Z26llama_get_embeddings_nextnP13llama_context", ctypes.POINTER(ctypes.c_float))
        try:
            _exported("_Z26llama_set_embeddings_nextnP13llama_contextbb")(handle, True, False)
            _encode(handle, features)
            states = np.array(np.ctypeslib.as_array(get(handle), (count, width)), np.float32)
            logits = decode(handle, tokens, 0, states)
            return states, logits, np.array(np.ctypeslib.as_array(get(handle), (count, width)), np.float32)
        finally:
            llama.llama_free(handle)


def _exported(name: str, result: Any = None) -> Any:
    """A function of the library without a binding, whose first argument is a context."""
    found = getattr(api()._lib, name)
    arguments = {"j": ctypes.c_uint32, "b": ctypes.c_bool}
    found.argtypes = [ctypes.c_void_p, *(arguments[letter] for letter in name.partition("P13llama_context")[2])]
    found.restype = result
    return found


def _encode(handle: Any, rows: NDArray[np.float32]) -> None:
    """Run the encoder on rows of floats."""
    llama, values = api(), np.ascontiguousarray(rows, np.float32)
    batch = llama.llama_batch_init(len(values), values.shape[1], 1)
    ctypes.memmove(batch.embd, values.ctypes.data, values.nbytes)
    batch.n_tokens = len(values)
    for row in range(len(values)):
        batch.pos[row], batch.n_seq_id[row], batch.logits[row] = row, 1, 1
        batch.seq_id[row][0] = 0
    status = llama.llama_encode(handle, batch)
    llama.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama.cpp returned {status}:\n{log()[-2000:]}")
