"""Sampling: logits in, one token out. Filters are plain functions in a list; greedy leaves early."""

from localllm.engine.sampling.filters import LogitsError, check_model
from localllm.engine.sampling.sampler import Sampler, token_logprob

__all__ = ["LogitsError", "Sampler", "check_model", "token_logprob"]
