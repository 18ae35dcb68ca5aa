"""The bytes read and operations computed per token, independent of the hardware."""

from dataclasses import dataclass

from cpu_kernels.recorded_step import Products
from gguf_io import ModelFile
from models.config import read_config
from models.kv_layout import layer_bytes_per_token, stored_types
from models.needs import native_needs
from models.registry import find_architecture
from models.sizes.convolution import ConvolutionSizes


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes read, and int8 and float operations of matrix products. A multiply-add is two operations."""

    read: float
    int8: float
    floats: float


@dataclass(frozen=True, slots=True)
class TokenWork:
    """The cost of a row, of a row's logits, and of reading stored tokens.

    row, logits: as in RecordedStep.products. looks: for each layer, the number of previous tokens that a row reads at
    most, and the bytes that it reads of each.
    """

    row: Products
    logits: Products
    looks: tuple[tuple[float, int], ...]

    def decode(self, depth: int, tokens: int) -> Work:
        """The average work per token when `tokens` tokens are decoded one by one after `depth` others."""
        stored = sum(self._kv(depth + 1 + i) for i in range(tokens)) / tokens
        both = self.row + self.logits
        return Work(both.weight_bytes + stored, both.int8_operations, both.float_operations)

    def prefill(self, tokens: int, max_rows: int) -> Work:
        """The average work per token of a prompt of `tokens` tokens, in batches of max_rows, with logits for the last.

        A lower bound: counts reading the weights, and the keys and values so far, once per batch. A batch may use more
        experts than the single row from which weights were counted.
        """
        passes = -(-tokens // max_rows)
        stored = sum(self._kv(min(tokens, (i + 1) * max_rows)) for i in range(passes))
        read = passes * self.row.weight_bytes + self.logits.weight_bytes + stored
        int8 = tokens * self.row.int8_operations + self.logits.int8_operations
        floats = tokens * self.row.float_operations + self.logits.float_operations
        return Work(read / tokens, int8 / tokens, floats / tokens)

    def _kv(self, length: int) -> float:
        """Bytes of keys and values that the last row of a sequence of `length` tokens reads."""
        return sum(min(length, window) * each for window, each in self.looks)


def looks(file: ModelFile, kv_types: tuple[str, str] = ("f16", "f16")) -> tuple[tuple[float, int], ...]:
    """For each layer, the number of previous tokens that a row reads at most, and the bytes that it reads of each.

    The number is infinity, or the width of a window or convolution. Layers that share keys and values each read them.
    Gated delta networks and selective scans are left out: they store a state, and nothing per token.
    """
    config, architecture = read_config(file), find_architecture(file.architecture)
    types = stored_types(config, kv_types)
    found = []
    for layer, attends in enumerate(config.attention.attends):
        if attends:
            window = float(architecture.attention.window(config, layer) or "inf")
            found.append((window, layer_bytes_per_token(config.attention.layer_heads[layer], types)))
        elif isinstance(config.state, ConvolutionSizes):
            found.append((float(config.state.reach), 4 * config.state.padded))
    return tuple(found)


def attention_operations(file: ModelFile, tokens: int) -> float:
    """Operations of all attention layers for a prompt: a product with each key and each value that a row attends to."""
    config = read_config(file)
    ends = (min(float(tokens), window) for window, _ in looks(file))
    seen = sum(end * (tokens - end / 2) for end in ends)  # over all rows; grows until the window is full
    heads = config.attention.usual
    return 4 * heads.queries * heads.size * seen


def work_in_header(file: ModelFile, kv_types: tuple[str, str] = ("f16", "f16")) -> TokenWork:
    """The native engine's work per token, from the header alone: loads nothing and reads no tensor.

    Raises UnsupportedModelError for models that the native engine does not support, ModelFileError for incomplete
    metadata.
    """
    needs = native_needs(file, kv_types)
    row, logits = (sum(part.values(), Products()) for part in (needs.row, needs.logits))
    return TokenWork(row, logits, looks(file, kv_types))
