"""llama.cpp as the oracle: a few functions over llama-cpp-python's low-level API, for every test marked `oracle`.

    from tests.oracle import llama_oracle
    pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

    ids = llama_oracle.tokenize(path, "Once upon a time")
    logits = llama_oracle.prefill_logits(path, ids)      # float32[len(ids), vocabulary]

Everything runs on the CPU and in this process, and nothing is printed. Importing this module does not import llama_cpp.
A few models stay open until the interpreter exits; contexts live for one call.
"""

import atexit
import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs llama.cpp: pip install 'localllm[llama]'"
)

_MODELS_KEPT = 4
_open_models: dict[tuple[str, bool, bool, bool], Any] = {}
_log_lines: list[str] = []
_callbacks: list[object] = []  # C keeps only a pointer to the log callback, so Python must keep the callback alive


@dataclass(frozen=True, slots=True)
class Setup:
    """How llama.cpp computes. The default is the simplest path: one thread, no flash attention, f16 keys and values.

    kv types are ggml names in lower case ("f32", "f16", "bf16", "q8_0", "q4_0", ...); a quantised type_v needs
    flash_attention. repack lets llama.cpp rearrange weights for this processor, which changes the last bits, and on
    some processors with AMX ends the process at the first batch of several tokens.
    ubatch is the most rows computed together.
    """

    threads: int = 1
    flash_attention: bool = False
    type_k: str = "f16"
    type_v: str = "f16"
    repack: bool = False
    ubatch: int = 512


DEFAULT = Setup()


@functools.cache
def api() -> ModuleType:
    """Return llama_cpp's low-level module, its backend started and its log turned into lines that log() returns."""
    from llama_cpp import llama_cpp  # heavy, and absent without the extra

    @llama_cpp.llama_log_callback
    def record(_level: int, text: bytes | None, _user_data: object) -> None:
        _log_lines.append((text or b"").decode("utf-8", "replace"))

    llama_cpp.llama_log_set(record, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    _callbacks.append(record)
    atexit.register(close_models)
    return llama_cpp


def log() -> str:
    """Return what llama.cpp has logged since clear_log()."""
    return "".join(_log_lines)


def clear_log() -> None:
    """Forget the log so far."""
    _log_lines.clear()


@contextmanager
def recorded_log() -> Iterator[list[str]]:
    """Yield the pieces of text that llama.cpp logs inside the block, even if another handler had its log."""
    llama = api()
    llama.llama_log_set(_callbacks[0], ctypes.c_void_p(0))
    start = len(_log_lines)
    pieces: list[str] = []
    try:
        yield pieces
    finally:
        pieces += _log_lines[start:]


def close_models() -> None:
    """Free every open model."""
    while _open_models:
        api().llama_model_free(_open_models.popitem()[1])


def load(path: Path | str, *, vocab_only: bool = False, repack: bool = False, drafts: bool = False) -> Any:
    """Return the llama_model pointer of a GGUF file on the CPU; the same one while it is among the last few used.

    drafts: with the multi-token prediction layers.
    """
    llama = api()
    key = (str(Path(path).resolve()), vocab_only, repack, drafts)
    model = _open_models.pop(key, None)
    if model is None:
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.vocab_only = vocab_only
        params.use_extra_bufts = repack
        params.load_mtp = drafts
        model = llama.llama_model_load_from_file(key[0].encode(), params)
        if not model:
            raise ValueError(f"llama.cpp cannot load {path}:\n{log()[-2000:]}")
        while len(_open_models) >= _MODELS_KEPT:
            llama.llama_model_free(_open_models.pop(next(iter(_open_models))))
    _open_models[key] = model
    return model


@contextmanager
def context(path: Path | str, tokens: int, setup: Setup = DEFAULT) -> Iterator[Any]:
    """Yield a llama_context that holds this many tokens of one sequence, and takes them in one batch."""
    llama = api()
    model = load(path, repack=setup.repack)
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = tokens
    params.n_ubatch = min(setup.ubatch, tokens)
    params.n_threads = params.n_threads_batch = setup.threads
    params.flash_attn_type = int(setup.flash_attention)
    params.type_k = _type_id(setup.type_k)
    params.type_v = _type_id(setup.type_v)
    params.swa_full = True
    handle = llama.llama_init_from_model(model, params)
    if not handle:
        raise ValueError(f"llama.cpp cannot make a context with {setup}:\n{log()[-2000:]}")
    try:
        yield handle
    finally:
        llama.llama_free(handle)


def prefill_logits(
    path: Path | str, tokens: Sequence[int], setup: Setup = DEFAULT, adapters: Sequence[tuple[Path, float]] = ()
) -> NDArray[np.float32]:
    """Return the logits after every token, all tokens computed as one batch: float32[len(tokens), vocabulary].

    adapters: LoRA adapters, each with its weight.
    """
    llama, count = api(), len(adapters)
    with context(path, len(tokens), setup) as handle:
        model = llama.llama_get_model(handle)
        found = [llama.llama_adapter_lora_init(model, str(adapter).encode()) for adapter, _ in adapters]
        if not all(found):
            raise ValueError(f"llama.cpp cannot load an adapter:\n{log()[-2000:]}")
        scales = (ctypes.c_float * count)(*(scale for _, scale in adapters))
        llama.llama_set_adapters_lora(handle, (ctypes.POINTER(ctypes.c_void_p) * count)(*found), count, scales)
        return decode(handle, tokens, 0)


def decode_logits(path: Path | str, tokens: Sequence[int], setup: Setup = DEFAULT) -> NDArray[np.float32]:
    """Return the logits after every token, computed one token at a time: float32[len(tokens), vocabulary]."""
    with context(path, len(tokens), setup) as handle:
        return np.concatenate([decode(handle, [token], position) for position, token in enumerate(tokens)])


@functools.cache
def own_difference(path: Path | str, tokens: tuple[int, ...], setup: Setup = DEFAULT) -> float:
    """Return the largest difference between logits of one batch and of one token at a time.

    llama.cpp's kernels round differently for other batches, and each processor has its own kernels. Results computed in
    other batches than an expected value may differ by a small multiple of this.
    """
    whole, single = prefill_logits(path, tokens, setup), decode_logits(path, tokens, setup)
    return float(np.abs(whole - single).max())


def hidden_states(path: Path | str, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the last hidden state after every token of one text, unpooled: float32[len(tokens), embedding]."""
    llama = api()
    with _computed(path, tokens, llama.LLAMA_POOLING_TYPE_NONE) as handle:
        shape = (len(tokens), llama.llama_model_n_embd_out(load(path)))
        return np.array(np.ctypeslib.as_array(llama.llama_get_embeddings(handle), shape), dtype=np.float32)


def pooled(path: Path | str, tokens: Sequence[int], width: int) -> NDArray[np.float32]:
    """Return the first `width` numbers of one text's row, pooled as the file says: float32[width]."""
    llama = api()
    with _computed(path, tokens, llama.LLAMA_POOLING_TYPE_UNSPECIFIED) as handle:
        row = llama.llama_get_embeddings_seq(handle, 0)
        return np.array(np.ctypeslib.as_array(row, (width,)), dtype=np.float32)


@contextmanager
def _computed(path: Path | str, tokens: Sequence[int], pooling: int) -> Iterator[Any]:
    """Yield a context that has computed the states of one text."""
    llama = api()
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = len(tokens)
    params.embeddings = True
    params.pooling_type = pooling
    handle = llama.llama_init_from_model(load(path), params)
    if not handle:
        raise ValueError(f"llama.cpp cannot make an embedding context:\n{log()[-2000:]}")
    try:
        compute(handle, tokens, 0)
        yield handle
    finally:
        llama.llama_free(handle)


def greedy(path: Path | str, prompt: Sequence[int], count: int, setup: Setup = DEFAULT) -> list[int]:
    """Return the `count` most likely tokens after the prompt. It does not stop at an end-of-text token."""
    with context(path, len(prompt) + count, setup) as handle:
        generated = [int(decode(handle, prompt, 0)[-1].argmax())]
        while len(generated) < count:
            position = len(prompt) + len(generated) - 1
            generated.append(int(decode(handle, generated[-1:], position)[-1].argmax()))
    return generated


def tokenize(path: Path | str, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
    """Return llama.cpp's token ids of a text; only the file's vocabulary is loaded.

    add_special adds the tokens that the model requires at the beginning and end; parse_special reads "<s>" and the like
    as tokens. Raises ValueError for text on which llama.cpp would abort the process: characters unknown to an SPM
    vocabulary without byte tokens.
    """
    llama = api()
    vocab = llama.llama_model_get_vocab(load(path, vocab_only=True))
    if llama.llama_vocab_type(vocab) == llama.LLAMA_VOCAB_TYPE_SPM:
        characters, has_bytes = _spm_alphabet(str(path))
        unknown = set(text.replace(" ", "\u2581")) - characters
        if unknown and not has_bytes:
            raise ValueError(f"the vocabulary has no byte tokens and does not know {sorted(unknown)}")
    data = text.encode()
    room = len(data) + 16
    ids = (llama.llama_token * room)()
    count = llama.llama_tokenize(vocab, data, len(data), ids, room, add_special, parse_special)
    if count < 0:
        raise ValueError(f"llama.cpp wants {-count} tokens for {len(data)} bytes of text")
    return list(ids[:count])


def detokenize(path: Path | str, tokens: Sequence[int], *, special: bool = False) -> bytes:
    """Return the bytes of token ids; special writes control tokens instead of leaving them out."""
    llama = api()
    vocab = llama.llama_model_get_vocab(load(path, vocab_only=True))
    ids = (llama.llama_token * len(tokens))(*tokens)
    size = 64 + 16 * len(tokens)
    while True:
        text = ctypes.create_string_buffer(size)
        count = llama.llama_detokenize(vocab, ids, len(tokens), text, size, False, special)
        if count >= 0:
            return text.raw[:count]
        size = -count


def piece(path: Path | str, token: int, *, special: bool = False) -> bytes:
    """Return the bytes of one token in the middle of a text; special writes control tokens out."""
    llama = api()
    vocab = llama.llama_model_get_vocab(load(path, vocab_only=True))
    text = ctypes.create_string_buffer(1024)
    count = llama.llama_token_to_piece(vocab, token, text, 1024, 0, special)
    if count < 0:
        raise ValueError(f"token {token} is not in the vocabulary or is longer than 1024 bytes")
    return text.raw[:count]


def pieces(path: Path | str, *, special: bool = False) -> list[bytes]:
    """Return the bytes of every token as `piece` does, in a fraction of the time."""
    llama = api()
    vocab = llama.llama_model_get_vocab(load(path, vocab_only=True))
    text = ctypes.create_string_buffer(1024)
    found = []
    for token in range(llama.llama_vocab_n_tokens(vocab)):
        count = llama.llama_token_to_piece(vocab, token, text, 1024, 0, special)
        if count < 0:
            raise ValueError(f"token {token} is longer than 1024 bytes")
        found.append(ctypes.string_at(text, count))
    return found


def vocab_size(path: Path | str) -> int:
    """Return the number of tokens of the vocabulary."""
    llama = api()
    return int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(load(path, vocab_only=True))))


def decode(
    handle: Any, tokens: Sequence[int], first_position: int, states: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Append tokens to sequence 0, with states, and return the logits of all of them, as a copy."""
    compute(handle, tokens, first_position, states)
    llama = api()
    vocab = llama.llama_model_get_vocab(llama.llama_get_model(handle))
    shape = (len(tokens), llama.llama_vocab_n_tokens(vocab))
    return np.array(np.ctypeslib.as_array(llama.llama_get_logits(handle), shape), dtype=np.float32)


def compute(handle: Any, tokens: Sequence[int], first_position: int, states: NDArray[np.float32] | None = None) -> None:
    """Run tokens of sequence 0, with states, and request the results of all of them."""
    llama = api()
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    floats = ctypes.POINTER(ctypes.c_float)
    try:
        if states is not None:
            batch.embd = states.ctypes.data_as(floats)
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row] = token
            batch.pos[row] = first_position + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = 1
        status = (llama.llama_decode if llama.llama_get_memory(handle) else llama.llama_encode)(handle, batch)
    finally:
        batch.embd = floats()  # which is freed with the batch
        llama.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama.cpp returned {status}:\n{log()[-2000:]}")


def _type_id(name: str) -> int:
    """Number of a ggml type named in lower case."""
    ids = {key.removeprefix("GGML_TYPE_").lower(): value for key, value in vars(api()).items() if "GGML_TYPE_" in key}
    return int(ids[name])


@functools.cache
def _spm_alphabet(path: str) -> tuple[frozenset[str], bool]:
    """Return the tokens that are single characters, and whether byte tokens exist."""
    llama = api()
    vocab = llama.llama_model_get_vocab(load(path, vocab_only=True))
    count = llama.llama_vocab_n_tokens(vocab)
    texts = (llama.llama_vocab_get_text(vocab, token).decode("utf-8", "replace") for token in range(count))
    has_bytes = any(llama.llama_vocab_get_attr(vocab, token) & llama.LLAMA_TOKEN_ATTR_BYTE for token in range(count))
    return frozenset(text for text in texts if len(text) == 1), has_bytes
