"""How fast a machine can compute a model at best: the roofline model of Williams, Waterman and Patterson (2009).

A decoding step reads all weights that it uses once, whatever the batch, and the keys and values of every sequence. It
computes two operations, a multiplication and an addition, for each weight and token. It takes at least the larger of
the two times.
"""


def memory_bandwidth(channels: int, transfers_per_s: float, channel_bytes: int = 8) -> float:
    """Bytes a second of main memory: two channels of DDR5-5600 are memory_bandwidth(2, 5600e6)."""
    return channels * transfers_per_s * channel_bytes


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """Operations a second at an arithmetic intensity (operations per byte read): min(peak, intensity * bandwidth)."""
    return min(peak, intensity * bandwidth)


def ridge(peak: float, bandwidth: float) -> float:
    """The intensity, in operations per byte, above which arithmetic, not memory, is the limit."""
    return peak / bandwidth


def operations_per_token(
    parameters: float, layers: int = 0, heads: int = 0, head_size: int = 0, tokens: int = 0
) -> float:
    """Operations for one token: 2 a parameter, and 4 * layers * heads * head_size for each token that it attends to.

    parameters: those that a token uses, without embeddings, which are only looked up. tokens: in its context.
    """
    return 2 * parameters + 4 * layers * heads * head_size * tokens


def step_seconds(
    batch: float, weights: float, kv_per_sequence: float, operations: float, peak: float, bandwidth: float
) -> float:
    """The least time of one decoding step of `batch` sequences, which is also each one's TPOT.

    weights, kv_per_sequence: bytes read. operations: for one token.
    """
    return max((weights + batch * kv_per_sequence) / bandwidth, batch * operations / peak)


def tokens_per_second(
    batch: int, weights: float, kv_per_sequence: float, operations: float, peak: float, bandwidth: float
) -> float:
    """The most tokens a second, of all sequences together."""
    return batch / step_seconds(batch, weights, kv_per_sequence, operations, peak, bandwidth)


def critical_batch(peak: float, bandwidth: float, bytes_per_weight: float) -> float:
    """The batch above which arithmetic is the limit, if keys and values are small beside the weights.

    2 * batch * parameters / peak = parameters * bytes_per_weight / bandwidth.
    """
    return peak * bytes_per_weight / (2 * bandwidth)


def throughput_limit(kv_per_sequence: float, bandwidth: float) -> float:
    """Tokens a second that no batch exceeds if memory is the limit: each token reads its own keys and values."""
    return bandwidth / kv_per_sequence


def prefill_seconds(tokens: int, operations: float, peak: float, used: float = 1.0) -> float:
    """The least time to prefill a prompt, which is limited by arithmetic. used: the share of the peak reached."""
    return tokens * operations / (peak * used)


def experts_read(experts: int, used: int, batch: int) -> float:
    """Distinct experts of a layer that a batch reads on average, if each token uses `used`, chosen uniformly."""
    return experts * (1 - (1 - used / experts) ** batch)
