"""How much memory weights, keys and values take."""

F16_BYTES, Q8_0_BYTES, Q4_0_BYTES = 2.0, 34 / 32, 18 / 32
KV_TYPES = {"f16": F16_BYTES, "q8_0": Q8_0_BYTES, "q4_0": Q4_0_BYTES}
"""Bytes of a stored number by the type of keys and values, scales included."""


def weight_bytes(parameters: float, bits: float) -> float:
    """Bytes of a model's weights. bits: of one weight on average, scales included."""
    return parameters * bits / 8


def kv_bytes_per_token(layers: int, kv_heads: int, head_size: int, value_bytes: float = F16_BYTES) -> float:
    """Bytes of keys and values for one token: 2 * layers * kv_heads * head_size * value_bytes.

    kv_heads counts the heads of keys, which are fewer than those of queries with grouped-query attention.
    value_bytes: 2 for f16, 34/32 for q8_0, 18/32 for q4_0.
    """
    return 2 * layers * kv_heads * head_size * value_bytes


def latent_kv_bytes_per_token(layers: int, latent_size: int, rope_size: int, value_bytes: float = F16_BYTES) -> float:
    """The same for multi-head latent attention (MLA): one latent vector and one rotated key for each layer."""
    return layers * (latent_size + rope_size) * value_bytes


def kv_bytes(
    per_token: float, tokens: int, sequences: int = 1, *, window: int | None = None, windowed_share: float = 0.0
) -> float:
    """Bytes of keys and values of `sequences` contexts of `tokens` each.

    windowed_share: the part of the layers, 0 to 1, that keeps only the last `window` tokens.
    """
    if not 0 <= windowed_share <= 1:
        raise ValueError(f"windowed_share is {windowed_share}; it must be between 0 and 1")
    seen = min(tokens, window) if window is not None else tokens
    return per_token * sequences * ((1 - windowed_share) * tokens + windowed_share * seen)


def sequences_that_fit(memory: float, weights: float, per_sequence: float, reserve: float = 0.0) -> int:
    """How many sequences' keys and values fit beside the weights; 0 if the weights do not fit.

    Raises ValueError unless per_sequence is positive.
    """
    if per_sequence <= 0:
        raise ValueError(f"per_sequence is {per_sequence}; a sequence takes some bytes")
    return max(0, int((memory - reserve - weights) // per_sequence))
