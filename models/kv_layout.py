"""How keys and values are stored, and how many bytes a token takes: decided by the file's header alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from cpu_kernels.kv_types import PAGE_TOKENS, SCALED_TOGETHER, KVType, PageLayout, key_layout, value_layout
from models.architecture import Architecture
from models.config import ModelConfig
from models.errors import UnsupportedModelError
from models.sizes.attention import Heads
from models.sizes.convolution import ConvolutionSizes
from models.sizes.state import SlotSizes

KVTypes = tuple[KVType, KVType]
"""The types in which keys and values are stored."""
MAX_ROWS = 512
"""The most rows of a step of the native engine, but for images whose rows see each other."""
LEAST_SLOTS = 4
_MOST_SLOTS = 256
# Windows are kept at multiples of this many windows, rounded up to a multiple of tokens.
_WINDOWS_APART, _LEAST_APART = 4, 1024
# Slots may take one _SHARE-th of the KV budget.
_SHARE = 4


def stored_types(config: ModelConfig, names: tuple[str, str]) -> KVTypes:
    """The types of keys and of values by name.

    Raises UnsupportedModelError if there is no such type, or the model's heads or latents do not fit it.
    """
    types = _kv_type(names[0], "keys", config), _kv_type(names[1], "values", config)
    if config.attention.latents and KVType.Q4_0 in types:
        raise UnsupportedModelError(
            "This model stores keys and values as one latent, which q4_0 does not support. Use f16 or q8_0."
        )
    if config.attention.latents and types[0] is not types[1]:
        raise UnsupportedModelError(
            f"This model stores keys and values as one latent, so keys in {types[0]} and values in {types[1]} "
            "are not possible. Use the same type for both."
        )
    return types


@dataclass(frozen=True, slots=True)
class WindowLayers:
    """The layers whose keys and values are only kept as long as a later token may see them.

    layers: their numbers. window: tokens that a row sees of them, its own included; if chunked, those of its chunk of
    `window` tokens. rows: the most of a step.
    """

    layers: frozenset[int]
    window: int
    rows: int
    chunked: bool = False

    @property
    def kept(self) -> int:
        """The most tokens of these layers that a sequence keeps: the window, a step's rows, and three pages.

        A multiple of a page.
        """
        return -(-self.window // PAGE_TOKENS) * PAGE_TOKENS + self.rows + 3 * PAGE_TOKENS

    def first_seen(self, position: int) -> int:
        """The first token that a row at this position sees."""
        return max(0, position // self.window * self.window if self.chunked else position - self.window + 1)

    @property
    def apart(self) -> int:
        """The distance between places of a long text where the window is kept.

        For chunks, their size: a row at a chunk's start needs no other token.
        """
        return -(-self.window * (1 if self.chunked else _WINDOWS_APART) // _LEAST_APART) * _LEAST_APART


def most_rows(config: ModelConfig) -> int:
    """The most rows of a step, those of an image whose rows see each other included."""
    return max(MAX_ROWS, config.images.together)


def window_layers(config: ModelConfig, architecture: Architecture) -> WindowLayers | None:
    """The sliding-window layers of a model; None if it has none, or if its context is hardly longer than a window.

    Models that keep other states than keys and values, or latents, keep all tokens of all layers.
    """
    if (
        config.attention.latents
        or config.state
        or config.attention.causal is False
        or not architecture.attention.causal
    ):
        return None
    reads: dict[int, list[int]] = {}
    for layer, source in enumerate(config.attention.kv_layers):
        reads.setdefault(source, []).append(
            architecture.attention.window(config, layer) if config.attention.attends[layer] else 0
        )
    slides: dict[int, int] = {}
    for layer, widths in reads.items():
        if min(widths) > 0 and config.stores(layer):
            slides[layer] = max(widths)
    if not slides:
        return None
    found = WindowLayers(frozenset(slides), max(slides.values()), most_rows(config), architecture.attention.chunked)
    return found if found.kept < config.context else None


def heads_stored(config: ModelConfig, windows: WindowLayers | None) -> tuple[dict[int, Heads], dict[int, Heads]]:
    """The heads of each layer that stores keys and values: those of window layers are in the second mapping."""
    found: tuple[dict[int, Heads], dict[int, Heads]] = {}, {}
    for layer, heads in enumerate(config.attention.layer_heads):
        if config.stores(layer):
            found[windows is not None and layer in windows.layers][layer] = heads
    return found


def heads_bytes(layer_heads: Iterable[Heads], types: KVTypes) -> int:
    """Bytes of a page over layers with these heads."""
    return PAGE_TOKENS * sum(layer_bytes_per_token(heads, types) for heads in layer_heads)


def kv_bytes_per_token(config: ModelConfig, types: KVTypes) -> int:
    """Bytes that one token's keys and values take over all layers, heads padded as they are stored.

    Includes a token's share of the rows that its page keeps for short convolutions, but not states in slots, see
    state_bytes.
    """
    kept, _ = heads_stored(config, None)
    return page_bytes(config, types, kept) // PAGE_TOKENS


def slots_within(sizes: SlotSizes, budget: int) -> int:
    """Number of slots for a model whose keys, values and states together may take `budget` bytes."""
    return min(max(budget // _SHARE // sizes.slot_bytes, LEAST_SLOTS), _MOST_SLOTS)


def state_bytes(config: ModelConfig, budget: int) -> int:
    """Bytes of the KV budget that states in slots take, whatever the number of tokens."""
    sizes = config.slot_sizes
    return slots_within(sizes, budget) * sizes.slot_bytes if sizes else 0


@cache
def page_layouts(heads: Heads, types: KVTypes) -> tuple[PageLayout, ...]:
    """Layouts of pages of keys and of values; a single one for latents, which are both."""
    keys = key_layout(types[0], heads.padded)
    return (keys,) if heads.latent else (keys, value_layout(types[1], heads.padded))


@cache
def layer_bytes_per_token(heads: Heads, types: KVTypes) -> int:
    """Bytes that one token's keys and values take in a layer with these heads."""
    return heads.keys * sum(layout.page_bytes for layout in page_layouts(heads, types)) // PAGE_TOKENS


def page_bytes(config: ModelConfig, types: KVTypes, heads: Mapping[int, Heads]) -> int:
    """Bytes of a page over the layers in `heads`, see heads_stored.

    Includes rows kept for convolutions, and token ids if any layer has a state.
    """
    state = config.state
    of_rows = sum(state.layers) * state.layer_bytes if isinstance(state, ConvolutionSizes) else 0
    return heads_bytes(heads.values(), types) + of_rows + (4 * PAGE_TOKENS if state else 0)


def bytes_of_tokens(config: ModelConfig, types: KVTypes, tokens: int) -> int:
    """The KV budget in bytes that holds `tokens` tokens beside the states that a pool of that size has."""
    needed = tokens * kv_bytes_per_token(config, types)
    least = state_bytes(config, 0)
    return max(needed + least, needed * 4 // 3 + 1) if least else needed


def _kv_type(name: str, what: str, config: ModelConfig) -> KVType:
    """The type of that name. Raises UnsupportedModelError if there is none, or the model's heads do not fit it."""
    sixteen_bits = KVType.F16 if config.attention.latents else KVType.I16
    kinds = {"f16": sixteen_bits, "q8_0": KVType.Q8_0, "q4_0": KVType.Q4_0}
    if name not in kinds:
        raise UnsupportedModelError(
            f"The native engine cannot store {what} as {name!r}. Choose one of: {', '.join(kinds)}."
        )
    kind = kinds[name]
    for heads in config.attention.layer_heads if kind is not sixteen_bits else ():
        if heads.size % SCALED_TOGETHER:
            raise UnsupportedModelError(
                f"{name} stores {what} in blocks of {SCALED_TOGETHER} numbers, which do not divide this model's heads "
                f"of {heads.size}. Use f16."
            )
    return kind
