"""The native engine's memory: what a model needs, from its header, and what of it is for keys and values."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile, open_model
from gguf_io.errors import ModelFileError
from gpu_offload.options import LlamaOptions, Use
from localllm.errors import RequestError
from localllm.placement.placement import Placement
from models.errors import UnsupportedModelError
from models.registry import ARCHITECTURES, TEXT_ENCODERS

if TYPE_CHECKING:
    from models.needs import NativeNeeds, Needs

# Memory left to the rest of the machine, and the shortest useful conversation.
RESERVE_BYTES = 512 * 2**20
LEAST_TOKENS = 512
# For a model that runs from disk: tokens to plan for, and the share of its weights that memory must hold.
DISK_TOKENS = 4096
LEAST_IN_MEMORY = 0.125
# Context for estimating llama.cpp's compute buffers, which grow with it, where only one figure is shown.
_ESTIMATED_TOKENS = 4096


def place_in_memory(needs: "Needs", context: int, kv_bytes: int | None, room: int, other: int = 0) -> Placement:
    """A native placement of sizes alone. kv_bytes: the budget of the page pool; None for all that is left.

    context: tokens of the longest sequence. room: bytes of main memory. other: bytes of a draft model. `problem`
    says, with the sums, why the model does not fit: the pool must hold LEAST_TOKENS.
    """
    left = room - needs.weights - needs.buffers - other - RESERVE_BYTES
    if kv_bytes is None:
        positions = min(context, needs.tokens(left), max(left, 0) // (needs.kv_per_token + needs.position_bytes))
        kv = left - positions * needs.position_bytes
    else:
        positions, kv = min(context, needs.tokens(kv_bytes)), kv_bytes
    placed = _native(needs, positions, kv, room, other)
    if placed.uses[0].fits and placed.tokens >= min(LEAST_TOKENS, context):
        return placed
    if kv_bytes is None:  # show the least that would be enough
        placed = _native(needs, positions, needs.kv(LEAST_TOKENS), room, other)
    change = "lower" if not placed.uses[0].fits else f"higher: it holds {placed.tokens} tokens"
    advice = f"Close other programs, choose a smaller quantisation, or set the KV budget (kv_mib) {change}."
    return replace(placed, problem=f"The model does not fit into memory:\n{placed.sums()}\n{advice}")


def place_from_disk(needs: "Needs", context: int, kv_bytes: int | None, room: int, other: int = 0) -> Placement:
    """The same for a model of which a part of the weights stays on the disk. Memory must hold LEAST_IN_MEMORY of them.

    The pool has kv_bytes, or what DISK_TOKENS tokens need.
    """
    positions = min(context, DISK_TOKENS if kv_bytes is None else needs.tokens(kv_bytes))
    kv = needs.kv(positions) if kv_bytes is None else kv_bytes
    fixed = needs.buffers + positions * needs.position_bytes + kv + other
    inside = min(needs.weights, room - RESERVE_BYTES - fixed)
    placed = _native(needs, positions, kv, room, other, on_disk=needs.weights - max(inside, 0))
    if inside >= LEAST_IN_MEMORY * needs.weights and placed.tokens >= min(LEAST_TOKENS, context):
        return placed
    problem = (
        f"The model cannot run from disk either: too little of it fits into memory:\n{placed.sums()}\n"
        "Close other programs, or choose a smaller quantisation."
    )
    return replace(placed, problem=problem)


def _native(needs: "Needs", positions: int, kv: int, room: int, other: int, on_disk: int = 0) -> Placement:
    compute = needs.buffers + positions * needs.position_bytes
    use = Use("main memory", needs.weights - on_disk, kv, compute, other, RESERVE_BYTES, room)
    states = needs.states(max(kv, 0))
    return Placement("native", "", (use,), measured=True, tokens=needs.tokens(kv), states=states, on_disk=on_disk)


def disk_notes(placed: Placement, needs: "NativeNeeds") -> tuple[str, ...]:
    """Notes for the user about a model that runs from disk."""
    inside = placed.uses[0].weights
    whole = inside + placed.on_disk
    read = sum(each.weight_bytes for products in (needs.row, needs.logits) for each in products.values())
    # A mixture of experts reads the missing share. Other models read all: the weights needed next were evicted first.
    missing = int(read * placed.on_disk / whole) if read < whole / 2 else read
    return (
        f"from disk: memory has room for {inside >> 20:,} of {whole >> 20:,} MiB of weights",
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


def memory_of(
    file: ModelFile, kv_types: tuple[str, str] = ("f16", "f16"), projector: Path | None = None
) -> "Needs | None":
    """The memory that a model takes on the native engine, or if that cannot run it, an estimate for llama.cpp.

    None for a file without layers, such as a vocabulary or a projector. projector: loaded too. Embedding models and
    rerankers store nothing between texts. Raises RequestError if the heads do not fit the types.
    """
    from gpu_offload.estimate import Estimate
    from gpu_offload.memory import FileSizes, projector_bytes, state_bytes
    from models.needs import Needs, native_needs
    from models.text_encoder import encoder_needs
    from models.vision.encoder import rows_together, vision_needs

    layers = file.metadata.get(f"{file.architecture}.block_count")
    if not isinstance(layers, int) or not layers:
        return None
    per_token = kv_bytes_in_file(file, kv_types)
    with suppress(ModelFileError, UnsupportedModelError):  # only llama.cpp accepts the architecture or the header
        if file.architecture in TEXT_ENCODERS and file.architecture not in ARCHITECTURES:
            return encoder_needs(file)
        if projector is None:
            return native_needs(file, kv_types)
        with open_model(projector) as other:
            seen, together = vision_needs(other), rows_together(other)
        needs = native_needs(file, kv_types, together=together)
        return replace(needs, buffers=needs.buffers + seen.weights + seen.buffers)
    options = LlamaOptions(context_tokens=_ESTIMATED_TOKENS, type_k=kv_types[0], type_v=kv_types[1])
    sizes = Estimate(FileSizes(file), options, ()).in_main_memory()
    beside = projector_bytes(projector) if projector else 0
    return Needs(sizes.weights, sizes.compute + beside, per_token, fixed_states=state_bytes(file))


def conversation_bytes(file: ModelFile, tokens: int, projector: Path | None = None) -> tuple[int | None, bool | None]:
    """Bytes of a model with a conversation of `tokens` tokens, and whether it fits now with a short one.

    None for both without layers, see memory_of, which raises.
    """
    if (needs := memory_of(file, projector=projector)) is None:
        return None, None
    return needs.total(tokens), needs.total(LEAST_TOKENS) + RESERVE_BYTES <= available_memory()


def kv_bytes_in_file(file: ModelFile, types: tuple[str, str]) -> int:
    """Bytes of a token's keys and values in these types, with heads stored at the length that the file states.

    Raises RequestError if the model's heads do not fit the types.
    """
    from gpu_offload.memory import kv_bytes_per_token

    try:
        return kv_bytes_per_token(file, *types)
    except ValueError as error:
        raise RequestError(f"{file.path.name}: {error}. Store keys and values as f16: kv_type_k, kv_type_v.") from error
