"""How much reading and computing a token takes, whoever does it how fast."""

from dataclasses import dataclass

from cpu_kernels.recorded_step import Products
from gguf_io import ModelFile
from models.config import read_config
from models.kv_layout import layer_bytes_per_token, stored_types
from models.needs import NativeNeeds, native_needs
from models.registry import find_architecture
from models.weights import padded


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
    Gated delta networks and selective scans are left out: they store states, and nothing for each token.
    """
    config, architecture = read_config(file), find_architecture(file.architecture)
    types = stored_types(config, kv_types)
    found = []
    for layer, attends in enumerate(config.attends):
        if attends:
            window = float(architecture.window(config, layer) or "inf")
            found.append((window, layer_bytes_per_token(config.layer_heads[layer], types)))
        elif config.convolution:
            found.append((float(config.convolution), 4 * padded(config.embedding)))
    return tuple(found)


def attention_operations(file: ModelFile, tokens: int) -> float:
    """Operations of all attention in a prompt: a product with each key that a row sees, and one with each value."""
    config = read_config(file)
    ends = (min(float(tokens), window) for window, _ in looks(file))
    seen = sum(end * (tokens - end / 2) for end in ends)  # over all rows: up to the window's end they see ever more
    return 4 * config.heads * config.head_size * seen


def work_in_header(file: ModelFile, kv_types: tuple[str, str] = ("f16", "f16")) -> ModelWork:
    """What the native engine's tokens cost, from the header alone: nothing is loaded, no tensor is read.

    Raises UnsupportedModelError for what the native engine does not compute, ModelFileError for incomplete metadata.
    """
    return work_of(file, native_needs(file, kv_types), kv_types)


def work_of(file: ModelFile, needs: NativeNeeds, kv_types: tuple[str, str] = ("f16", "f16")) -> ModelWork:
    """The same from a file's needs."""
    row, logits = (sum(part.values(), Products()) for part in (needs.row, needs.logits))
    return ModelWork(row, logits, looks(file, kv_types))
