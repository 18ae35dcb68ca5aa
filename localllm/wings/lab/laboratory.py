"""What a model's steps would cost by the roofline with other batches, contexts, types and drafts."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from localllm.placement.backends import native_kv_types
from localllm.speed.kept import kept_limits
from localllm.wings.lab.formulas import memory, speculation, speed
from localllm.wings.lab.simulate.shape import StepShape
from models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gguf_io import ModelFile
    from localllm.engine.inspection import EngineSnapshot
    from localllm.settings import KVType
    from localllm.speed.kept import KeptLimits

KV_TYPES = tuple(memory.KV_TYPES)
_EXPERTS = "_exps."
_LOOKED = "attention over the context"
# The group of a layer's tensor, by what its name contains. All other tensors count as feed-forward.
_GROUPS = {
    "attn": "attention's matrices",
    _EXPERTS: "experts",
    "ssm": "state's matrices",
    "ffn": "feed-forward matrices",
}
_LOGITS = "logits"
PREFILL_ROWS = 32  # chunks with at least this many rows show the speed of prefill; if there are none, the longest do


@dataclass(frozen=True, slots=True)
class StepPart:
    """Matrices of a step: bytes read, and operations for each row. experts: read only as far as the rows use them."""

    name: str
    read: float
    operations: float
    experts: bool = False


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """A model and the limits of the machine that computes it; the limits are None if they were not measured.

    bits: per weight, on average. bandwidth: bytes a second; peak: operations a second for the model's mix of formats.
    """

    shape: StepShape
    parts: tuple[StepPart, ...]
    bits: float
    kv_type: str
    bandwidth: float | None = None
    peak: float | None = None

    @classmethod
    def of(cls, file: "ModelFile", kv_types: tuple[str, str], kept: "KeptLimits | None") -> Self:
        """From a file's header. Raises UnsupportedModelError for models that the CPU engine does not compute."""
        from localllm.speed.work import work_in_header
        from localllm.wings.lab.explain import machine_here

        shape = StepShape.of_file(file)
        sums: dict[str, list[float]] = {}
        used = shape.experts_used / shape.experts if shape.experts else 1.0
        for name, tensor in file.tensors.items():
            if name.startswith("blk."):
                group = next((group for part, group in _GROUPS.items() if part in name), _GROUPS["ffn"])
                total = sums.setdefault(group, [0.0, 0.0])
                total[0] += tensor.nbytes
                total[1] += speed.operations_per_token(math.prod(tensor.shape)) * (used if _EXPERTS in name else 1.0)
        parts = [
            StepPart(name, read, operations, name == _GROUPS[_EXPERTS]) for name, (read, operations) in sums.items()
        ]
        parts.append(StepPart(_LOGITS, shape.output_bytes, shape.output_operations))
        machine = machine_here(kept, work_in_header(file), 0.0) if kept else None
        bits = 8 * file.weights_bytes / max(file.parameter_count, 1)
        kv_type = kv_types[0] if kv_types[0] in KV_TYPES else "f16"
        limits = (machine.bandwidth, machine.peak) if machine else (None, None)
        return cls(shape, tuple(parts), bits, kv_type, *limits)

    def token_bytes(self, kv_type: str) -> float:
        """Bytes of a token's keys and values."""
        return self.shape.kv_bytes_per_token * memory.KV_TYPES[kv_type] / memory.F16_BYTES

    def as_data(self) -> dict[str, Any]:
        """Data for JSON."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """The costs from as_data's result. Raises TypeError or KeyError for anything else."""
        parts = tuple(StepPart(**part) for part in data["parts"])
        return cls(**{**data, "shape": StepShape(**data["shape"]), "parts": parts})


def costs_of(
    file: "ModelFile", kv_types: "tuple[KVType | None, KVType | None]", threads: int | None
) -> MachineCosts | None:
    """A model's costs on this machine with these settings; None for architectures that only llama.cpp supports."""
    try:
        return MachineCosts.of(file, native_kv_types(file, kv_types), kept_limits(threads))
    except UnsupportedModelError:
        return None


@dataclass(frozen=True, slots=True)
class Reached:
    """Speeds of the last steps. decode: median of bytes read a second; prefill: of operations a second; None: none yet.

    rows, seconds: medians of the decoding steps. prefill_rows: median of the prompts' chunks. compute: operations a
    second, of prefill or decoding, whichever is more.
    """

    decode: float | None
    prefill: float | None
    rows: float = 1.0
    seconds: float | None = None
    prefill_rows: float = 0.0
    compute: float | None = None

    @classmethod
    def by(cls, costs: MachineCosts, snapshot: "EngineSnapshot") -> Self:
        """From steps that only decode, and prompts' chunks of at least PREFILL_ROWS rows, or else the longest ones."""
        shape = costs.shape
        decodes = [
            step for step in snapshot.steps if step.decode and not (step.prefill or step.drafted) and step.seconds
        ]
        spans = [span for timeline in snapshot.timelines for span in timeline.spans if not span.decodes]
        least = min(max((span.rows for span in spans), default=0), PREFILL_ROWS)
        chunks = [span for span in spans if span.rows >= least and span.ended > span.began]
        read = [shape.read_bytes(step.decode) / step.seconds for step in decodes]
        computed = [span.rows * shape.row_operations / (span.ended - span.began) for span in chunks]
        decoded = [step.decode * shape.decode_operations / step.seconds for step in decodes]
        most = max(median(each) if each else 0.0 for each in (computed, decoded))
        return cls(
            decode=median(read) if read else None,
            prefill=median(computed) if computed else None,
            rows=median(step.decode for step in decodes) if decodes else 1.0,
            seconds=median(step.seconds for step in decodes) if decodes else None,
            prefill_rows=median(span.rows for span in chunks) if chunks else 0.0,
            compute=most or None,
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration to forecast. batch: sequences that decode at once, each of `context` tokens. bits: per weight.

    draft: tokens drafted per sequence and step, at no cost; each is right with probability `acceptance`.
    """

    batch: int
    context: int
    kv_type: str
    bits: float
    draft: int = 0
    acceptance: float = 0.7


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step's predicted time. parts: names and seconds; limited: names of compute-bound parts.

    each, all: tokens a second of one sequence and of the batch. weights, kv: bytes.
    """

    parts: tuple[tuple[str, float], ...]
    limited: frozenset[str]
    seconds: float
    each: float
    all: float
    weights: float
    kv: float


def forecast(costs: MachineCosts, setting: Setting, bandwidth: float, peak: float) -> Forecast:
    """A decoding step at these rates. Each part takes as long as its bytes or its operations, whichever is longer."""
    shape, rows = costs.shape, setting.batch * (setting.draft + 1)
    smaller = setting.bits / costs.bits
    times: list[tuple[str, float]] = []
    limited = set()

    def add(name: str, read: float, operations: float) -> None:
        reading, computing = read / bandwidth, operations / peak
        times.append((name, max(reading, computing)))
        if computing > reading:
            limited.add(name)

    for part in costs.parts:
        share = shape.experts_share(rows) if part.experts else 1.0
        add(part.name, part.read * share * smaller, rows * part.operations)
    kv = memory.kv_bytes(costs.token_bytes(setting.kv_type), setting.context, setting.batch)
    add(_LOOKED, kv, rows * setting.context * shape.lookup_operations)
    seconds = sum(each for _, each in times)
    gained = speculation.expected_tokens(setting.acceptance, setting.draft)
    each = gained / seconds
    weights = shape.weights * smaller
    return Forecast(tuple(times), frozenset(limited), seconds, each, setting.batch * each, weights, kv)


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the roofline. intensity: operations a byte; rate: operations a second.

    measured: false for the roofline's own upper bounds.
    """

    name: str
    intensity: float
    rate: float
    measured: bool


def points(costs: MachineCosts, reached: Reached, bandwidth: float, peak: float) -> Iterator[Point]:
    """The roof's limits for decoding 1 to 64 rows, and the speeds of the last steps."""
    shape = costs.shape
    for batch in (1, 4, 16, 64):
        intensity = batch * shape.decode_operations / shape.read_bytes(batch)
        yield Point(str(batch), intensity, speed.attainable(intensity, peak, bandwidth), measured=False)
    if reached.decode is not None:
        intensity = reached.rows * shape.decode_operations / shape.read_bytes(reached.rows)
        yield Point("D", intensity, reached.decode * intensity, measured=True)
    if reached.prefill is not None:
        intensity = reached.prefill_rows * shape.row_operations / (shape.dense_bytes + shape.expert_bytes)
        yield Point("P", intensity, reached.prefill, measured=True)
