"""The gain of speculative decoding, with alpha and gamma as in Leviathan, Kalman and Matias, "Fast Inference from
Transformers via Speculative Decoding" (2023).

alpha is the probability that a drafted token is accepted, assumed equal for all; gamma is the length of a draft.
"""

from collections.abc import Sequence


def acceptance(target: Sequence[float], draft: Sequence[float]) -> float:
    """The probability that a token drawn from `draft` is accepted: the sum of the smaller of both probabilities.

    Both are distributions over the same vocabulary.
    """
    return sum(min(p, q) for p, q in zip(target, draft, strict=True))


def expected_tokens(alpha: float, gamma: int) -> float:
    """Mean tokens per step, tau = 1 + alpha + ... + alpha^gamma = (1 - alpha^(gamma+1)) / (1 - alpha).

    From 1 (alpha = 0) to gamma + 1 (alpha = 1). Raises ValueError unless alpha is a probability.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must be between 0 and 1")
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """How many times faster decoding is; below 1 if speculation costs more than it gains.

    Costs are in units of a step without speculation. draft_cost: of drafting one token. verify_cost: of the step that
    verifies gamma + 1 tokens: 1 if memory is the limit, more if arithmetic is.
    """
    return expected_tokens(alpha, gamma) / (gamma * draft_cost + verify_cost)
