"""Sampling: logits in, one token out. Filters are plain functions in a list; greedy leaves early."""

from localllm.engine.sampling.filters import LogitsError
from localllm.engine.sampling.sampler import Sampler
from localllm.engine.sampling.validation import validate

__all__ = ["LogitsError", "Sampler", "validate"]
