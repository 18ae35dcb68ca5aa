"""The main memory that a model needs, planned and checked before anything is loaded."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from localllm.errors import OutOfMemoryError, RequestError

# Memory left to the rest of the machine, and the shortest useful conversation.
RESERVE_BYTES = 512 * 2**20
LEAST_TOKENS = 512
# For a model that runs from disk: tokens to plan for, and the share of its weights that memory must hold.
DISK_TOKENS = 4096
LEAST_IN_MEMORY = 0.125
# Context for estimating llama.cpp's compute buffers, which grow with it, where only one figure is shown.
_ESTIMATED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of a model in main memory.

    weights: as stored in memory, which for the native engine is packed. buffers: everything else of constant size.
    kv_per_token: keys, values and states of a stored token. position_bytes: of tables, for each position of the longest
    sequence. states: what states of hybrid models take of a KV budget, independent of the number of tokens.
    """

    weights: int
    buffers: int
    kv_per_token: int
    position_bytes: int = 0
    states: Callable[[int], int] = field(default=lambda _kv_bytes: 0, compare=False)

    def total(self, tokens: int) -> int:
        """Bytes with one sequence of `tokens` tokens."""
        return self.weights + self.buffers + self.kv(tokens) + tokens * self.position_bytes

    def kv(self, tokens: int) -> int:
        """The least KV budget that holds `tokens` tokens beside the states that a budget of this size has."""
        budget = 0
        while budget < (needed := tokens * self.kv_per_token + self.states(budget)):
            budget = needed
        return budget


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sums in bytes. available: what this process can take without swapping; kv: the budget of the page pool.

    states: the part of kv that a hybrid model's states take, independent of the number of tokens. on_disk: weights that
    do not fit into memory, so that they are read again when needed.
    """

    available: int
    weights: int
    buffers: int
    kv: int
    kv_bytes_per_token: int
    reserve: int = RESERVE_BYTES
    states: int = 0
    on_disk: int = 0

    def __str__(self) -> str:
        rows = [
            ("available", self.available),
            ("weights", self.weights),
            ("buffers", self.buffers),
            ("KV cache", self.kv),
            ("reserve", self.reserve),
        ]
        if self.states:
            rows.insert(4, ("  states", self.states))
        if self.on_disk:
            rows.append(("on disk", self.on_disk))
        return "\n".join(f"  {name:10}{size / 2**20:10,.0f} MiB" for name, size in rows)

    @property
    def needed(self) -> int:
        """Everything except the reserve."""
        return self.weights + self.buffers + self.kv

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV budget holds."""
        return max(0, self.kv - self.states) // self.kv_bytes_per_token


def plan_memory(
    memory: ModelMemory, context: int, kv_bytes: int | None = None, available: int | None = None
) -> MemoryPlan:
    """Decide the KV budget. kv_bytes: None means all that weights, buffers and reserve leave.

    context: tokens of the longest sequence. available: None means ask the system. Raises OutOfMemoryError with the sums
    if even LEAST_TOKENS do not fit.
    """
    if available is None:
        available = available_memory()
    left = available - memory.weights - memory.buffers - RESERVE_BYTES
    if kv_bytes is None:
        positions = min(context, max(left, 0) // (memory.kv_per_token + memory.position_bytes))
    else:
        positions = min(context, kv_bytes // memory.kv_per_token)
    tables = positions * memory.position_bytes
    kv = left - tables if kv_bytes is None else kv_bytes
    states = memory.states(max(kv, 0))
    plan = MemoryPlan(available, memory.weights, memory.buffers + tables, kv, memory.kv_per_token, states=states)
    if plan.kv > left - tables or plan.kv_tokens < LEAST_TOKENS:
        if kv_bytes is None:  # show the least that would be enough
            least = memory.kv(LEAST_TOKENS)
            plan = replace(plan, kv=least, states=memory.states(least))
        raise OutOfMemoryError(
            f"The model does not fit into memory:\n{plan}\n"
            "Close other programs, choose a smaller quantisation, or set the KV budget (kv_mib) lower."
        )
    return plan


def plan_from_disk(
    memory: ModelMemory, context: int, kv_bytes: int | None = None, available: int | None = None
) -> MemoryPlan:
    """Plan a model whose packed weights stay in memory only in part; the arguments are those of plan_memory.

    kv_bytes: None means what DISK_TOKENS tokens need. Raises OutOfMemoryError with the sums if less than
    LEAST_IN_MEMORY of the weights would stay in memory.
    """
    available = available_memory() if available is None else available
    positions = min(context, DISK_TOKENS if kv_bytes is None else kv_bytes // memory.kv_per_token)
    kv = memory.kv(positions) if kv_bytes is None else kv_bytes
    buffers = memory.buffers + positions * memory.position_bytes
    inside = min(memory.weights, available - RESERVE_BYTES - buffers - kv)
    states, outside = memory.states(kv), memory.weights - max(inside, 0)
    plan = MemoryPlan(available, max(inside, 0), buffers, kv, memory.kv_per_token, states=states, on_disk=outside)
    if inside < LEAST_IN_MEMORY * memory.weights or plan.kv_tokens < min(LEAST_TOKENS, context):
        raise OutOfMemoryError(
            f"The model cannot run from disk either: too little of it fits into memory:\n{plan}\n"
            "Close other programs, or choose a smaller quantisation."
        )
    return plan


def disk_notes(file: ModelFile, plan: MemoryPlan) -> tuple[str, ...]:
    """Notes for the user about a model that runs from disk; none for other models."""
    from models.needs import native_needs

    if not plan.on_disk:
        return ()
    needs, whole = native_needs(file), plan.weights + plan.on_disk
    read = sum(each.weight_bytes for products in (needs.row, needs.logits) for each in products.values())
    # A mixture of experts reads the missing share. Other models read all: the weights needed next were evicted first.
    missing = int(read * plan.on_disk / whole) if read < whole / 2 else read
    return (
        f"from disk: memory has room for {plan.weights >> 20:,} of {whole >> 20:,} MiB of weights",
        f"a token may read {missing >> 20:,} MiB, which takes {1000 * missing / 2**30:,.0f} ms from a disk of 1 GiB/s",
    )


def trained_context(file: ModelFile) -> int:
    """The tokens of context that the model was trained for; 0 if its file does not say."""
    return file.metadata.get_int(f"{file.architecture}.context_length", 0)


def context_limit(file: ModelFile, ctx: int | None) -> int | None:
    """The setting ctx, at most the model's trained context; None without the setting."""
    return ctx and min(ctx, trained_context(file) or ctx)


def context_note(file: ModelFile, ctx: int | None) -> str | None:
    """What to tell the user if the setting ctx is more than the model's trained context."""
    limit = context_limit(file, ctx)
    if limit == ctx:
        return None
    return f"{file.name} was trained for {limit:,} tokens of context; the limit of {ctx:,} is lowered to that"


def native_memory(
    file: ModelFile, kv_types: tuple[str, str], threads: int | None = None, drafts: bool | ModelFile = True
) -> ModelMemory:
    """The memory that a model takes on the native engine, from its header. Raises UnsupportedModelError.

    drafts: whether to include its multi-token prediction layers, if any, or a file with a draft head.
    """
    from models.kv_layout import state_bytes
    from models.needs import native_needs

    needs = native_needs(file, kv_types, threads, drafts)
    sizes = needs.weights, needs.buffers, needs.kv_per_token, needs.position_bytes
    return ModelMemory(*sizes, lambda budget: state_bytes(needs.config, budget))


def model_memory(
    file: ModelFile, kv_types: tuple[str, str] = ("f16", "f16"), projector: Path | None = None
) -> ModelMemory:
    """The memory that a model takes on the native engine, or if that cannot run it, an estimate for llama.cpp.

    projector: loaded too, in which case llama.cpp runs the model. Embedding models and rerankers store nothing between
    texts. Raises RequestError if the heads do not fit the types.
    """
    from gpu_offload.estimate import Estimate
    from gpu_offload.memory import ModelNeeds, projector_bytes, state_bytes
    from gpu_offload.options import LlamaOptions
    from models.errors import UnsupportedModelError
    from models.needs import encoder_needs
    from models.registry import ARCHITECTURES, TEXT_ENCODERS

    per_token = kv_bytes_in_file(file, kv_types)
    if projector is None:
        with suppress(ModelFileError, UnsupportedModelError):  # only llama.cpp accepts the architecture or the header
            if file.architecture in TEXT_ENCODERS and file.architecture not in ARCHITECTURES:
                return ModelMemory(*encoder_needs(file), 0)
            return native_memory(file, kv_types)
    options = LlamaOptions(context_tokens=_ESTIMATED_TOKENS, type_k=kv_types[0], type_v=kv_types[1])
    sizes = Estimate(ModelNeeds(file), options, ()).in_main_memory()
    beside = projector_bytes(projector) if projector else 0
    states = state_bytes(file)
    return ModelMemory(sizes.weights, sizes.compute + beside, per_token, states=lambda _: states)


def kv_bytes_in_file(file: ModelFile, types: tuple[str, str]) -> int:
    """Bytes of a token's keys and values in these types, with heads stored at the length that the file states.

    Raises RequestError if the model's heads do not fit the types.
    """
    from gpu_offload.memory import kv_bytes_per_token

    try:
        return kv_bytes_per_token(file, *types)
    except ValueError as error:
        raise RequestError(f"{file.path.name}: {error}. Store keys and values as f16: kv_type_k, kv_type_v.") from error
