"""What a model's steps cost by the roofline, for other batches, contexts, types and drafts than those at hand."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from localllm.measure.formulas import memory, speculation, speed
from localllm.measure.simulate.shape import ModelShape

if TYPE_CHECKING:
    from gguf_io import ModelFile
    from localllm.engine.inspection import EngineSnapshot
    from localllm.roofline.kept import KeptLimits
    from localllm.settings import Settings

_EXPERTS = "_exps."
_LOOKED = "attention over the context"
# Where the products of a layer's tensors belong, by what their names contain; the rest goes with the feed-forward.
_GROUPS = {
    "attn": "attention's matrices",
    _EXPERTS: "experts",
    "ssm": "state's matrices",
    "ffn": "feed-forward matrices",
}
_LOGITS = "logits"
PREFILL_ROWS = 32  # a step of so many rows and more tells how fast prompts are computed; of fewer, the longest


@dataclass(frozen=True, slots=True)
class Part:
    """Matrices of a step: bytes that it reads, and operations for each row. experts: read as the rows choose them."""

    name: str
    read: float
    operations: float
    experts: bool = False


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model and the limits of the machine that computes it, None where they were not measured.

    bits: of a weight. bandwidth: bytes a second; peak: operations a second for the model's mix of formats.
    """

    shape: ModelShape
    parts: tuple[Part, ...]
    bits: float
    kv_type: str
    bandwidth: float | None = None
    peak: float | None = None

    @classmethod
    def of(cls, file: "ModelFile", kv_types: tuple[str, str], kept: "KeptLimits | None") -> Self:
        """From a header. Raises UnsupportedModelError for what the CPU engine does not compute."""
        from localllm.measure.explain import machine_here
        from localllm.roofline.work import work_in_header

        shape = ModelShape.of_file(file)
        sums: dict[str, list[float]] = {}
        used = shape.experts_used / shape.experts if shape.experts else 1.0
        for name, tensor in file.tensors.items():
            if name.startswith("blk."):
                group = next((group for part, group in _GROUPS.items() if part in name), _GROUPS["ffn"])
                total = sums.setdefault(group, [0.0, 0.0])
                total[0] += tensor.nbytes
                total[1] += speed.operations_per_token(math.prod(tensor.shape)) * (used if _EXPERTS in name else 1.0)
        parts = [Part(name, read, operations, name == _GROUPS[_EXPERTS]) for name, (read, operations) in sums.items()]
        parts.append(Part(_LOGITS, shape.output_bytes, shape.output_operations))
        machine = machine_here(kept, work_in_header(file), 0.0) if kept else None
        bits = 8 * file.weights_bytes / max(file.parameter_count, 1)
        kv_type = kv_types[0] if kv_types[0] in memory.KV_TYPES else "f16"
        limits = (machine.bandwidth, machine.peak) if machine else (None, None)
        return cls(shape, tuple(parts), bits, kv_type, *limits)

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """What as_data gave. Raises TypeError or KeyError for anything else."""
        parts = tuple(Part(**part) for part in data["parts"])
        return cls(**{**data, "shape": ModelShape(**data["shape"]), "parts": parts})


def costs_of(file: "ModelFile", settings: "Settings") -> ModelCosts | None:
    """A loaded model's costs on this machine; None for architectures whose sizes only llama.cpp knows."""
    from localllm.engine.backends import native_kv_types
    from localllm.roofline.kept import kept_limits
    from models.errors import UnsupportedModelError

    try:
        return ModelCosts.of(file, native_kv_types(settings), kept_limits(settings.threads))
    except UnsupportedModelError:
        return None


@dataclass(frozen=True, slots=True)
class Reached:
    """What the last steps reached. decode, prefill: medians of bytes, and of operations, a second; None: none yet.

    rows: of the steps that decode told of. seconds: their median time. compute: operations a second of prompts, or of
    decoding where that is more.
    """

    decode: float | None
    prefill: float | None
    rows: float = 1.0
    seconds: float | None = None
    prefill_rows: float = 0.0
    compute: float | None = None

    @classmethod
    def by(cls, costs: ModelCosts, snapshot: "EngineSnapshot") -> Self:
        """From an engine's steps that only decode, and its requests' chunks of some size, else from the longest."""
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
    """What might be. batch: sequences that decode at once, each of `context` tokens. bits: of a weight.

    draft: tokens that a draft without cost guesses for each, right with chance `acceptance`.
    """

    batch: int
    context: int
    kv_type: str
    bits: float
    draft: int = 0
    acceptance: float = 0.7


@dataclass(frozen=True, slots=True)
class Forecast:
    """seconds: of a step, by its parts; limited: the parts that arithmetic limits. rates: tokens a second.

    weights, kv: bytes.
    """

    parts: tuple[tuple[str, float], ...]
    limited: frozenset[str]
    seconds: float
    each: float
    all: float
    weights: float
    kv: float


def forecast(costs: ModelCosts, setting: Setting, bandwidth: float, peak: float) -> Forecast:
    """A decoding step at these rates: each part takes what its bytes or its operations take, the longer of the two."""
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
    per_token = shape.kv_bytes_per_token * memory.KV_TYPES[setting.kv_type] / memory.F16_BYTES
    kv = memory.kv_bytes(per_token, setting.context, setting.batch)
    add(_LOOKED, kv, rows * setting.context * shape.lookup_operations)
    seconds = sum(each for _, each in times)
    gained = speculation.expected_tokens(setting.acceptance, setting.draft)
    each = gained / seconds
    weights = shape.weights * smaller
    return Forecast(tuple(times), frozenset(limited), seconds, each, setting.batch * each, weights, kv)


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the roofline: operations a byte, and operations a second. measured: or what the roof allows."""

    name: str
    intensity: float
    rate: float
    measured: bool


def points(costs: ModelCosts, reached: Reached, bandwidth: float, peak: float) -> Iterator[Point]:
    """Decoding of 1 to 64 rows on the roof, and what the last steps reached."""
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
