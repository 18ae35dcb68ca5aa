"""The compiled choice of a token (cpu_kernels.choosing): its rules, and the memory that it works in."""

import math
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.choosing import Choice, Choose, Rule, choose, kept_places, memory_bytes
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.program import operation_of
from cpu_kernels.records import Op, Step
from cpu_kernels.simd.vectors import view
from localllm.engine.request import SamplingParams
from localllm.errors import LocalLLMError, RequestError

# No sound model computes a logit this high; below it, bias and penalties cannot overflow float32.
HIGHEST_LOGIT = 1e30
# XTC drops no token above it.
_HIGHEST_THRESHOLD = 0.5
# Plain integers, because a member of an enumeration takes longer as an index than what it is used for.
_LOGITS, _ALLOWED = int(Op.ARGUMENTS), int(Op.ARGUMENTS + 2)
_XTC, _UNIFORM, _MIROSTAT = int(Rule.XTC), int(Rule.UNIFORM), int(Rule.MIROSTAT)
_TOKEN, _HIGHEST = int(Choice.TOKEN), int(Choice.HIGHEST)


class LogitsError(LocalLLMError):
    """Logits that no token can be chosen from, NaN or absurdly high: a fault of the model."""


def check_model(highest: float) -> None:
    """Raise LogitsError if the model's own logits are invalid. highest: NumPy's maximum of them, NaN if any is NaN."""
    if not highest < HIGHEST_LOGIT:
        raise LogitsError(
            f"The model computed a logit that is {highest}. The model file may be damaged or its quantisation "
            "unsuitable; check the file's hash or try another quantisation."
        )


def no_choice() -> RequestError:
    """The error where no token is left to choose."""
    return RequestError(
        "No token is allowed next: the constraint, the logit bias and the model together exclude all of them. "
        "Loosen the constraint or the bias."
    )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that a token was drawn from: ids int64[n], ascending, and probabilities float64[n]."""

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float64]


class Chooser:
    """Chooses tokens by the same rules. Not thread-safe; choosers on one thread share its memory.

    operation: address of the operation that `run` runs. total: log_total is needed, which takes a pass over all logits.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, total: bool = False) -> None:
        self.vocab_size = vocab_size
        self._params = params
        self._rules = np.zeros(int(Rule.SIZE))
        self._choice = np.zeros(int(Choice.SIZE))
        rules: dict[Rule, float] = {
            Rule.TEMPERATURE: params.temperature,
            Rule.DYNATEMP_RANGE: params.dynatemp_range,
            Rule.DYNATEMP_EXPONENT: params.dynatemp_exponent,
            Rule.TOP_N_SIGMA: params.top_n_sigma,
            Rule.TOP_K: params.top_k,
            Rule.TYPICAL_P: params.typical_p,
            Rule.TOP_P: params.top_p,
            Rule.MIN_P: float(np.log(params.min_p)) if params.min_p > 0 else -math.inf,
            Rule.MIN_KEEP: params.min_keep,
            Rule.TOTAL: total,
        }
        for rule, value in rules.items():
            self._rules[rule] = value
        arguments = Choose(
            logits=0, count=vocab_size, allowed=0, rules=self._rules.ctypes.data, choice=self._choice.ctypes.data
        )
        self._operation = operation_of(choose, arguments)
        self.operation = self._operation.ctypes.data

    def choose(
        self,
        logits: NDArray[np.float32],
        allowed: NDArray[np.bool_] | None,
        uniform: float,
        coin: float,
        mu: float | None = None,
        adjusted: bool = False,
    ) -> int:
        """Return a token. uniform, coin: random numbers in [0, 1), for the draw and for XTC. mu: Mirostat's bound.

        adjusted: the logits are no longer the model's own, and may be higher than a sound model's. Raises LogitsError
        on NaN or absurdly high logits, RequestError if no token is possible.
        """
        contiguous = np.ascontiguousarray(logits)
        self.prepare(contiguous, allowed, uniform, coin, mu)
        self.run()
        return self.chosen(adjusted)

    def prepare(
        self,
        logits: NDArray[np.float32] | None,
        allowed: NDArray[np.bool_] | None,
        uniform: float,
        coin: float,
        mu: float | None = None,
    ) -> None:
        """Set what `run` chooses by; both arrays must live until then, contiguous.

        logits: None if whoever runs the operation tells where they are.
        """
        params, rules, operation = self._params, self._rules, self._operation
        applies = params.xtc_threshold <= _HIGHEST_THRESHOLD and coin < params.xtc_probability
        rules[_XTC] = params.xtc_threshold if applies else math.inf
        rules[_UNIFORM] = uniform
        rules[_MIROSTAT] = 0.0 if mu is None else mu
        operation[_LOGITS] = 0 if logits is None else logits.ctypes.data
        operation[_ALLOWED] = 0 if allowed is None else allowed.ctypes.data

    def run(self) -> None:
        """Choose, on any thread, without the GIL."""
        choose(self.operation, _memory(self.vocab_size), 0, 1)

    def chosen(self, adjusted: bool = False) -> int:
        """The token that `run` chose. Raises as `choose` does."""
        if not adjusted:
            check_model(self._choice.item(_HIGHEST))
        token_id = int(self._choice.item(_TOKEN))
        if token_id < 0:
            raise no_choice()
        return token_id

    @property
    def log_total(self) -> float:
        """The logarithm of the sum of the exponentials of all logits of the last choice, in which none was masked."""
        return float(self._choice[Choice.HIGHEST]) + math.log(self._choice[Choice.TOTAL])

    def candidates(self, logits: NDArray[np.float32]) -> Candidates:
        """What the last token was drawn from, above temperature 0. logits: those it was chosen by.

        For the thread that chose it, until its next choice.
        """
        count = int(self._choice[Choice.KEPT])
        ids: NDArray[np.int64] = np.arange(count)
        if count < self.vocab_size:
            places = kept_places(_memories.scratch.ctypes.data, self.vocab_size)
            logits, ids = view(places[0], np.float32, count), view(places[1], np.int32, count).astype(np.int64)
        weights = np.exp2((logits.astype(np.float64) - self._choice[Choice.TOP]) * self._choice[Choice.FACTOR])
        return Candidates(ids, weights / weights.sum())


class _Memory(threading.local):
    """A step record with scratch memory for the largest vocabulary so far, for each thread."""

    vocab_size = 0
    address = 0  # of the record
    record: NDArray[np.generic] = np.empty(0)
    scratch: NDArray[np.generic] = np.empty(0)


_memories = _Memory()


def _memory(vocab_size: int) -> int:
    """Address of this thread's step record."""
    memory = _memories
    if memory.vocab_size < vocab_size:
        memory.scratch = aligned_zeros((memory_bytes(vocab_size),), np.uint8)
        memory.record = aligned_zeros((int(Step.SIZE),), np.int64)
        memory.record[Step.SCRATCH] = memory.scratch.ctypes.data
        memory.vocab_size, memory.address = vocab_size, memory.record.ctypes.data
    return memory.address
