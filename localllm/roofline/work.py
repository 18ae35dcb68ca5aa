"""How much reading and computing a token takes, whoever does it how fast."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cpu_kernels.formats.conversions import native_form
from cpu_kernels.recorded_step import Products
from cpu_kernels.records import Form
from gguf_io import ModelFile, TensorInfo
from models.config import ModelConfig, read_config
from models.delta_sizes import DeltaNetSizes
from models.delta_states import padded_head
from models.errors import UnsupportedModelError
from models.kv_pages import kv_bytes_per_token, stored_types
from models.registry import find_architecture
from models.weights import padded

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes read and operations of matrix products (a multiply-add is two), on bytes and on floats."""

    read: float
    int8: float
    floats: float


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a row, the logits of a row, and stored tokens cost.

    row, logits: as RecordedStep.products tells them. windows: for each layer, the most tokens that a row looks back.
    """

    row: Products
    logits: Products
    kv_bytes_per_token: int
    windows: tuple[float, ...]

    def decode(self, depth: int, tokens: int) -> Work:
        """A token of `tokens` that are decoded one by one after `depth` others, on average."""
        stored = sum(self._kv(depth + 1 + i) for i in range(tokens)) / tokens
        both = self.row + self.logits
        return Work(both.weight_bytes + stored, both.int8_operations, both.float_operations)

    def prefill(self, tokens: int, max_rows: int) -> Work:
        """A token of a prompt of `tokens`, computed max_rows at a time, on average; of the last one come logits.

        Read are the weights, and the keys and values so far, once a pass: the least that it takes. A pass may use
        more experts than the one row by which they were counted.
        """
        passes = -(-tokens // max_rows)
        stored = sum(self._kv(min(tokens, (i + 1) * max_rows)) for i in range(passes))
        read = passes * self.row.weight_bytes + self.logits.weight_bytes + stored
        int8 = tokens * self.row.int8_operations + self.logits.int8_operations
        floats = tokens * self.row.float_operations + self.logits.float_operations
        return Work(read / tokens, int8 / tokens, floats / tokens)

    def _kv(self, length: int) -> float:
        """Bytes of keys and values that a row at the end of so many tokens looks at."""
        seen = sum(min(length, window) for window in self.windows) / len(self.windows)
        return self.kv_bytes_per_token * seen


def windows(file: ModelFile) -> tuple[float, ...]:
    """For each layer, how many tokens a row looks back: infinity, or the width of a window or of a convolution.

    Gated delta networks are left out: they store states, and nothing for each token.
    """
    config, architecture = read_config(file), find_architecture(file.architecture)
    return tuple(
        float(architecture.window(config, layer) or "inf") if attends else float(config.convolution)
        for layer, attends in enumerate(config.attends)
        if attends or not config.delta_net
    )


def work_in_header(file: ModelFile, kv_types: tuple[str, str] = ("f16", "f16")) -> ModelWork:
    """What the native engine's tokens cost, from the header alone: nothing is loaded, no tensor is read.

    Raises UnsupportedModelError for what the native engine does not compute, ModelFileError for incomplete metadata.
    """
    config = read_config(file)
    look_back = windows(file)
    row = Products()
    for name, tensor in file.tensors.items():
        match = _LAYER.fullmatch(name)
        if match and int(match[1]) < config.layers:
            row += _products(tensor, match[2], config, attends=config.attends[int(match[1])])
    output = file.tensors.get("output.weight", file.tensors.get("token_embd.weight"))
    if output is None:
        raise UnsupportedModelError(f"{file.path}: the tensor token_embd.weight is missing. Get another edition.")
    logits = _products(output, "output", config)
    return ModelWork(row, logits, kv_bytes_per_token(config, stored_types(config, kv_types)), look_back)


def _products(tensor: TensorInfo, part: str, config: ModelConfig, *, attends: bool = True) -> Products:
    """The products of one row with a layer's tensor, as it is packed; none where it is no matrix."""
    shape = (1, *tensor.shape) if part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1 else tensor.shape
    if len(shape) < 2:
        return Products()
    try:
        packed = native_form(tensor.type.name).weight_format
    except ValueError as error:
        raise UnsupportedModelError(f"{tensor.name}: {error}. The llama.cpp backend may take it.") from error
    k, matrices = shape[-1], config.experts_used if part.endswith("_exps") else 1
    rows = matrices * sum(padded(rows) for rows in _rows(part, shape, config, attends))
    read, operations = rows // packed.group_rows * packed.group_bytes(k), 2 * rows * k
    return Products(read, 0, operations) if packed.form & Form.FLOATS else Products(read, operations, 0)


def _rows(part: str, shape: tuple[int, ...], config: ModelConfig, attends: bool) -> Iterator[int]:
    """Rows of the matrices that a tensor becomes: fused ones are taken apart, heads are padded."""
    if config.delta_net and not attends and part in (of_delta := _delta_rows(config.delta_net)):
        yield from of_delta[part]
        return
    heads = {"attn_q": [config.heads], "attn_k": [config.kv_heads], "attn_v": [config.kv_heads]}
    heads["attn_qkv"] = [config.heads, config.kv_heads, config.kv_heads]
    if part == "attn_q" and shape[-2] == 2 * config.heads * config.head_size:
        yield from (config.heads * config.padded_head, config.heads * config.head_size)
    elif part in heads:
        yield from (count * config.padded_head for count in heads[part])
    elif part == "ffn_up" and shape[-2] == 2 * config.feed_forward:
        yield from (config.feed_forward, config.feed_forward)
    else:
        yield shape[-2]


def _delta_rows(sizes: DeltaNetSizes) -> dict[str, list[int]]:
    """Rows of the matrices of a gated delta network's tensors, as models.delta_layer packs them."""
    head = padded_head(sizes.head_size)
    values, heads = sizes.value_heads * head, sizes.value_heads
    convolved = 2 * sizes.key_heads * head + values
    return {
        "attn_qkv": [convolved],
        "attn_gate": [values],
        "ssm_in": [convolved, values],
        "ssm_ba": [heads, heads],
        "ssm_conv1d": [],
    }
