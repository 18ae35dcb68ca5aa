"""How much reading and computing a token takes, whoever does it how fast."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cpu_kernels.formats.conversions import native_form
from cpu_kernels.recorded_step import Products
from cpu_kernels.records import Form
from gguf_io import ModelFile, TensorInfo
from models.config import ModelConfig, read_config
from models.errors import UnsupportedModelError
from models.kv_pages import layer_bytes_per_token, stored_types
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
        if not match or int(match[1]) >= config.layers:
            continue
        layer, part = int(match[1]), match[2]
        products = _products(tensor, part, _rows(tensor, part, config, layer), config)
        if part == "attn_k" and f"blk.{layer}.attn_v.weight" not in file.tensors:
            products += products  # the same weights make keys and values
        if config.narrows and layer > config.last_stored:
            narrowed += products
        else:
            row += products
    output = file.tensors.get("output.weight", file.tensors.get("token_embd.weight"))
    if output is None:
        raise UnsupportedModelError(f"{file.path}: the tensor token_embd.weight is missing. Get another edition.")
    row += _beside_layers(file, config, wanted=False)
    logits = _products(output, "output", [output.shape[0]], config) + narrowed
    return ModelWork(row, logits + _beside_layers(file, config, wanted=True), looks(file, kv_types))


def _beside_layers(file: ModelFile, config: ModelConfig, *, wanted: bool) -> Products:
    """The products with matrices that serve all layers: of all rows, or of the wanted ones alone."""
    total = Products()
    projection = file.tensors.get("per_layer_model_proj.weight")
    if projection is not None:
        of_all = config.last_stored + 1 if config.narrows else config.layers
        layers = config.layers - of_all if wanted else of_all
        total += _products(projection, "projection", [layers * padded(config.per_layer_width)], config)
    # Streams are spread from all rows, and merged for those that are left.
    merged = wanted == config.narrows
    for name, counts in (("altup_proj.weight", not wanted), ("altup_unembd_proj.weight", merged)):
        tensor = file.tensors.get(name)
        if tensor is not None and counts:
            total += _products(tensor, "streams", [config.embedding] * tensor.shape[0], config)
    return total


def _products(tensor: TensorInfo, part: str, rows: Sequence[int], config: ModelConfig) -> Products:
    """The products of one row with a tensor's matrices of so many rows, as they are packed; none without any."""
    if not rows:
        return Products()
    try:
        packed = native_form(tensor.type.name).weight_format
    except ValueError as error:
        raise UnsupportedModelError(f"{tensor.name}: {error}. The llama.cpp backend may take it.") from error
    k, matrices = tensor.shape[-1], config.experts_used if part.endswith("_exps") else 1
    count = matrices * sum(map(padded, rows))
    read, operations = count // packed.group_rows * packed.group_bytes(k), 2 * count * k
    return Products(read, 0, operations) if packed.form & Form.FLOATS else Products(read, operations, 0)


def _rows(tensor: TensorInfo, part: str, config: ModelConfig, layer: int) -> list[int]:
    """Rows of the matrices that a layer's tensor becomes: fused ones are taken apart, heads are padded."""
    of, shape = config.layer_heads[layer], tensor.shape
    keys = [of.keys] if config.kv_layers[layer] == layer else []
    heads = {"attn_q": [of.queries], "attn_k": keys, "attn_v": keys, "attn_qkv": [of.queries, *keys, *keys]}
    if part in heads:
        return [count * of.padded for count in heads[part]]
    if part == "ffn_gate_inp_shexp" and len(shape) == 1:
        return [1]
    if len(shape) < 2 or part.startswith("altup"):  # these are no matrix products
        return []
    if part == "ffn_gate_up_exps" or (part == "ffn_up" and shape[-2] == 2 * config.feed_forward):
        return [shape[-2] // 2] * 2
    return [shape[-2]]
