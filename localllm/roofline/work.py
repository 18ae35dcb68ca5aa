"""How much reading and computing a token takes, whoever does it how fast."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cpu_kernels.formats.conversions import native_form
from cpu_kernels.recorded_step import Products
from cpu_kernels.records import Form
from gguf_io import ModelFile, TensorInfo
from models.config import ModelConfig, read_config
from models.errors import UnsupportedModelError
from models.kv_pages import layer_bytes_per_token, stored_types
from models.layer_sizes import Heads
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

    row, logits: as RecordedStep.products tells them. looks: for each layer, the most tokens that a row looks back, and
    the bytes that it reads of each.
    """

    row: Products
    logits: Products
    looks: tuple[tuple[float, int], ...]

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
        return sum(min(length, window) * each for window, each in self.looks)


def looks(file: ModelFile, kv_types: tuple[str, str] = ("f16", "f16")) -> tuple[tuple[float, int], ...]:
    """For each layer, how many tokens a row looks back, and the bytes that it reads of each.

    It is infinity, or the width of a window or of a convolution. Layers that share keys and values read them each.
    """
    config, architecture = read_config(file), find_architecture(file.architecture)
    types = stored_types(config, kv_types)
    found = []
    for layer, attends in enumerate(config.attends):
        if attends:
            window = float(architecture.window(config, layer) or "inf")
            found.append((window, layer_bytes_per_token(config.layer_heads[layer], types)))
        else:
            found.append((float(config.convolution), 4 * padded(config.embedding)))
    return tuple(found)


def work_in_header(file: ModelFile, kv_types: tuple[str, str] = ("f16", "f16")) -> ModelWork:
    """What the native engine's tokens cost, from the header alone: nothing is loaded, no tensor is read.

    Raises UnsupportedModelError for what the native engine does not compute, ModelFileError for incomplete metadata.
    """
    config = read_config(file)
    row, narrowed = Products(), Products()
    for name, tensor in file.tensors.items():
        match = _LAYER.fullmatch(name)
        if not match or int(match[1]) >= config.layers or _is_unused(config, int(match[1]), match[2]):
            continue
        products = _products(tensor, match[2], config, config.layer_heads[int(match[1])])
        if config.narrows and int(match[1]) > config.last_stored:
            narrowed += products
        else:
            row += products
    output = file.tensors.get("output.weight", file.tensors.get("token_embd.weight"))
    if output is None:
        raise UnsupportedModelError(f"{file.path}: the tensor token_embd.weight is missing. Get another edition.")
    heads = config.layer_heads[0]
    logits = _products(output, "output", config, heads) + narrowed
    projection = file.tensors.get("per_layer_model_proj.weight")
    if projection is not None:
        of_all = (config.last_stored + 1) / config.layers if config.narrows else 1.0
        products = _products(projection, "projection", config, heads)
        row += _share(products, of_all)
        logits += _share(products, 1.0 - of_all)
    return ModelWork(row, logits, looks(file, kv_types))


def _share(products: Products, share: float) -> Products:
    return Products(
        int(products.weight_bytes * share),
        int(products.int8_operations * share),
        int(products.float_operations * share),
    )


def _is_unused(config: ModelConfig, layer: int, part: str) -> bool:
    """Whether a layer has a tensor for keys and values that it takes from another layer."""
    return part in ("attn_k", "attn_v") and config.kv_layers[layer] != layer


def _products(tensor: TensorInfo, part: str, config: ModelConfig, heads: Heads) -> Products:
    """The products of one row with a layer's tensor, as it is packed; none where it is no matrix."""
    shape = (1, *tensor.shape) if part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1 else tensor.shape
    if len(shape) < 2:
        return Products()
    try:
        packed = native_form(tensor.type.name).weight_format
    except ValueError as error:
        raise UnsupportedModelError(f"{tensor.name}: {error}. The llama.cpp backend may take it.") from error
    k, matrices = shape[-1], config.experts_used if part.endswith("_exps") else 1
    rows = matrices * sum(padded(rows) for rows in _rows(part, shape, config, heads))
    read, operations = rows // packed.group_rows * packed.group_bytes(k), 2 * rows * k
    return Products(read, 0, operations) if packed.form & Form.FLOATS else Products(read, operations, 0)


def _rows(part: str, shape: tuple[int, ...], config: ModelConfig, of: Heads) -> Iterator[int]:
    """Rows of the matrices that a tensor becomes: fused ones are taken apart, heads are padded."""
    heads = {"attn_q": [of.queries], "attn_k": [of.keys], "attn_v": [of.keys]}
    heads["attn_qkv"] = [of.queries, of.keys, of.keys]
    if part in heads:
        yield from (count * of.padded for count in heads[part])
    elif part == "ffn_up" and shape[-2] == 2 * config.feed_forward:
        yield from (config.feed_forward, config.feed_forward)
    else:
        yield shape[-2]
