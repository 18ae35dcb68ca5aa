"""Memory needs from a model file's header: bytes of weights per layer, of KV per token, and of a projector.

The geometry of the KV cache follows llama.cpp (src/llama-hparams.cpp, src/llama-kv-cache.cpp).
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gguf_io.blocks import BLOCK_TYPES, BlockType
from gguf_io.errors import ModelFileError
from gguf_io.metadata import MetadataArray
from gguf_io.model_file import ModelFile, open_model

MAX_LAYERS = 1024  # far above any real model; bounds the work that a hostile file can cause

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"ffn_\w+_(ch)?exps\b")
_BY_NAME = {block.name.lower(): block for block in BLOCK_TYPES.values()}

# Models like Qwen-VL accept images of any size, up to 4096 rows of 2 x 2 patches (llama.cpp's clip.cpp).
_ANY_SIZE = frozenset({"qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"})
_MOST_PATCHES = 4 * 4096


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Bytes of one repeating layer. experts: expert matrices, which may stay in main memory; rest: all others.

    largest: the largest matrix, an expert's if there are any.
    """

    rest: int = 0
    experts: int = 0
    largest: int = 0


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer stores per token: `heads` keys of `key_length` numbers and values of `value_length`, 0 for none.

    state_bytes: float32 state of a recurrent layer, per sequence.
    """

    heads: int = 0
    key_length: int = 0
    value_length: int = 0
    state_bytes: int = 0

    def token_bytes(self, type_k: str, type_v: str) -> int:
        """Bytes of one token in lower-case ggml types. Raises ValueError if a head does not fit their blocks."""
        return self.heads * (_stored_bytes(self.key_length, type_k) + _stored_bytes(self.value_length, type_v))


class FileSizes:
    """Sizes of one model, from its header. If layers differ, a width is the widest layer's."""

    def __init__(self, model: ModelFile) -> None:
        """Raises ModelFileError for incomplete metadata."""
        self.model = model
        self.name = model.name
        self.layer_count = model.metadata.get_int(f"{model.architecture}.block_count", maximum=MAX_LAYERS)
        self.trained_context = self.number("context_length")
        self.embedding = self.number("embedding_length")
        self.heads = max(self._per_layer("attention.head_count", 0), default=0)
        table = model.tensors.get("token_embd.weight")
        self.vocabulary = 0 if table is None else table.shape[0]

    def number(self, key: str, default: int | None = None) -> int:
        """Return the architecture's metadata integer `key`. Raises ModelFileError if missing without a default."""
        return self.model.metadata.get_int(f"{self.model.architecture}.{key}", default)

    @cached_property
    def feed_forward(self) -> int:
        """Width of the feed-forward network."""
        return max(self._per_layer("feed_forward_length", 0), default=0)

    @cached_property
    def layers(self) -> list[LayerWeights]:
        """Weights of each repeating layer."""
        sums = [[0, 0, 0] for _ in range(self.layer_count)]
        for name, tensor in self.model.tensors.items():
            match = _BLOCK.match(name)
            if match is None:
                continue
            if int(match[1]) >= self.layer_count:
                raise ModelFileError(f"{self.model.path}: {name}: beyond the {self.layer_count} layers of the model.")
            layer = sums[int(match[1])]
            layer[1 if _EXPERTS.match(match[2]) else 0] += tensor.nbytes
            layer[2] = max(layer[2], tensor.nbytes)
        return [LayerWeights(*layer) for layer in sums]

    @cached_property
    def embedding_bytes(self) -> int:
        """Bytes of the input layer, which llama.cpp always keeps in main memory."""
        return sum(
            tensor.nbytes
            for name, tensor in self.model.tensors.items()
            if name.startswith(("token_embd", "per_layer_token_embd", "token_types", "position_embd"))
        )

    @cached_property
    def tied_bytes(self) -> int:
        """Bytes of the input embeddings if the output layer shares them, so that a GPU needs a copy; else 0."""
        tensors = self.model.tensors
        tied = "output.weight" not in tensors and "token_embd.weight" in tensors
        return tensors["token_embd.weight"].nbytes if tied else 0

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of the output layer, including a copy of tied embeddings."""
        rest = sum(tensor.nbytes for name, tensor in self.model.tensors.items() if not _BLOCK.match(name))
        return rest - self.embedding_bytes + self.tied_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(tensor.nbytes for tensor in self.model.tensors.values())

    @cached_property
    def caches(self) -> list[LayerCache]:
        """What each repeating layer stores."""
        return [self._cache(layer) for layer in range(self.layer_count)]

    def _per_layer(self, key: str, default: int) -> list[int]:
        """A number for every layer; files have an array or one number for all."""
        full = f"{self.model.architecture}.{key}"
        if isinstance(self.model.metadata.get(full), MetadataArray):
            return self.model.metadata.get_list(full, int, length=self.layer_count)
        return [self.model.metadata.get_int(full, default)] * self.layer_count

    def _has(self, key: str) -> bool:
        return f"{self.model.architecture}.{key}" in self.model.metadata

    @cached_property
    def _kv_heads(self) -> list[int]:
        key = "attention.head_count_kv" if self._has("attention.head_count_kv") else "attention.head_count"
        return self._per_layer(key, 0)

    @cached_property
    def _windowed(self) -> list[bool]:
        """Which layers have a sliding window, if the file says so per layer."""
        pattern = self.model.metadata.get(f"{self.model.architecture}.attention.sliding_window_pattern")
        flags = [bool(flag) for flag in pattern] if isinstance(pattern, MetadataArray) else []
        return [*flags, *[False] * self.layer_count][: self.layer_count]

    def _cache(self, layer: int) -> LayerCache:
        tensors = self.model.tensors
        recurrent = f"blk.{layer}.ssm_conv1d.weight" in tensors
        attends = any(f"blk.{layer}.{name}.weight" in tensors for name in ("attn_k", "attn_kv_a_mqa")) or (
            f"blk.{layer}.attn_qkv.weight" in tensors and not recurrent
        )
        state = self._state_bytes if recurrent else 0
        if not attends or layer >= self.layer_count - self.number("attention.shared_kv_layers", 0):
            return LayerCache(state_bytes=state)
        usual = self.embedding // max(self.heads, 1)
        keys, values = (self.number(f"attention.{name}_length", usual) for name in ("key", "value"))
        if self._windowed[layer]:
            keys = self.number("attention.key_length_swa", keys)
            values = self.number("attention.value_length_swa", values)
        # Multi-head latent attention stores one compressed row, which includes the values.
        latent = self._has("attention.key_length_mla") and self._has("attention.value_length_mla")
        return LayerCache(self._kv_heads[layer], keys, 0 if latent else values, state)

    @cached_property
    def _state_bytes(self) -> int:
        """Bytes of a state-space layer's convolution and scan state for one sequence (float32)."""
        inner, state = self.number("ssm.inner_size", 0), self.number("ssm.state_size", 0)
        convolution = max(self.number("ssm.conv_kernel", 1) - 1, 0) * (
            inner + 2 * self.number("ssm.group_count", 0) * state
        )
        return 4 * (convolution + inner * state)


def kv_bytes_per_token(model: ModelFile, type_k: str, type_v: str) -> int:
    """Return the bytes that one token's keys and values take over all layers.

    Raises ValueError for a type that does not exist or whose blocks do not divide a head.
    """
    return sum(cache.token_bytes(type_k, type_v) for cache in FileSizes(model).caches)


def state_bytes(model: ModelFile) -> int:
    """Return the bytes that the states of one sequence take over all layers."""
    return sum(cache.state_bytes for cache in FileSizes(model).caches)


def projector_bytes(path: Path) -> int:
    """Return the bytes of a projector's weights and compute buffer for the largest image. Raises ModelFileError."""
    with open_model(path) as file:
        return sum(tensor.nbytes for tensor in file.tensors.values()) + _projector_compute(file)


def _projector_compute(file: ModelFile) -> int:
    """Peak bytes of attention and feed-forward of one layer, with flash attention; within 10 % of llama.cpp's."""
    width, inner, side, patch = (
        file.metadata.get_int(f"clip.vision.{key}", 0)
        for key in ("embedding_length", "feed_forward_length", "image_size", "patch_size")
    )
    any_size = file.metadata.get_str("clip.projector_type", "") in _ANY_SIZE
    patches = _MOST_PATCHES if any_size else (side // patch) ** 2 if patch else 0
    return patches * 4 * max(2 * width + inner, 5 * width)


def block_type(name: str) -> BlockType:
    """The block format of a lower-case ggml type, such as "q8_0". Raises ValueError if there is none."""
    if name not in _BY_NAME:
        raise ValueError(f"there is no tensor type {name!r}")
    return _BY_NAME[name]


def _stored_bytes(items: int, type_name: str) -> int:
    block = block_type(type_name)
    if items % block.items:
        raise ValueError(f"heads of {items} numbers do not fit {type_name}, which stores {block.items} together")
    return block.row_bytes(items)
