"""The main memory that a model needs, planned and checked before anything is loaded."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile
from localllm.errors import OutOfMemoryError, RequestError

# Left to the rest of the machine, and the least that a conversation can do with.
RESERVE_BYTES = 512 * 2**20
LEAST_TOKENS = 512


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sums in bytes. available: what this process can take without swapping; kv: the budget of the page pool.

    states: the part of it that a hybrid model's states take, whatever the number of tokens.
    """

    available: int
    weights: int
    kv: int
    kv_bytes_per_token: int
    reserve: int = RESERVE_BYTES
    states: int = 0

    def __str__(self) -> str:
        rows = [
            ("available", self.available),
            ("weights", self.weights),
            ("KV cache", self.kv),
            ("reserve", self.reserve),
        ]
        if self.states:
            rows.insert(3, ("  states", self.states))
        return "\n".join(f"  {name:10}{size / 2**20:10,.0f} MiB" for name, size in rows)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV budget holds."""
        return max(0, self.kv - self.states) // self.kv_bytes_per_token


def no_states(kv_bytes: int) -> int:
    """Bytes of the states of a model that has none."""
    return 0


def plan_memory(
    weights: int,
    kv_bytes_per_token: int,
    kv_bytes: int | None = None,
    available: int | None = None,
    states: Callable[[int], int] = no_states,
) -> MemoryPlan:
    """Decide the KV budget. kv_bytes None takes all that is left beside weights and reserve.

    available None asks the system. states: bytes that states take of a budget. Raises OutOfMemoryError with the sums
    where even LEAST_TOKENS do not fit.
    """
    if available is None:
        available = available_memory()
    left = available - weights - RESERVE_BYTES
    kv = left if kv_bytes is None else kv_bytes
    plan = MemoryPlan(available, weights, kv, kv_bytes_per_token, states=states(max(kv, 0)))
    if plan.kv > left or plan.kv_tokens < LEAST_TOKENS:
        if kv_bytes is None:  # the least that would do
            plan = replace(plan, kv=LEAST_TOKENS * kv_bytes_per_token + states(0), states=states(0))
        raise OutOfMemoryError(
            f"The model does not fit into memory:\n{plan}\n"
            "Close other programs, choose a smaller quantisation, or set the KV budget (kv_mib) lower."
        )
    return plan


def state_bytes_in_file(file: ModelFile) -> int:
    """Bytes of the states of one sequence, 0 for a model without states."""
    from gpu_offload.memory import state_bytes

    return state_bytes(file)


def kv_bytes_in_file(file: ModelFile, types: tuple[str, str]) -> int:
    """Bytes that a token's keys and values take in these types, where heads are stored as long as the file has them.

    Raises RequestError where the model's heads do not fit the types.
    """
    from gpu_offload.memory import kv_bytes_per_token

    try:
        return kv_bytes_per_token(file, *types)
    except ValueError as error:
        raise RequestError(f"{file.path.name}: {error}. Store keys and values as f16: kv_type_k, kv_type_v.") from error
