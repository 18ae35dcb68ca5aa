"""Sampling: penalties on logits, then the compiled choice of a token."""

from localllm.engine.sampling.choice import Candidates, LogitsError, check_model
from localllm.engine.sampling.sampler import Sampler, token_logprob

__all__ = ["Candidates", "LogitsError", "Sampler", "check_model", "token_logprob"]
