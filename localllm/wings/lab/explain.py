"""The formulas of docs/inference.md, evaluated for a model and a machine.

Each figure is computed by the function that the page names, from the numbers shown with it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from localllm.text import human_bytes, human_seconds, human_speed, table
from localllm.wings.lab.formulas import memory, speed
from localllm.wings.lab.formulas.hardware import HARDWARE
from localllm.wings.lab.simulate.machines import Machine
from localllm.wings.lab.simulate.shape import StepShape

if TYPE_CHECKING:
    from gguf_io import ModelFile
    from gpu_offload.options import Use
    from localllm.speed.expected import ExpectedSpeed
    from localllm.speed.kept import KeptLimits
    from localllm.speed.work import TokenWork

BATCHES = (1, 2, 4, 8, 16, 32, 64)
PROMPT_TOKENS = 512
_SAME = "(?! (?:Ti|SUPER|D|Laptop|PCIe|NVL)\\b)"
"""No variant of the GPU named before, which has other figures."""
_NAME = re.compile(r"\{(\w+)\}")
_SHOWN: Mapping[str, Callable[[float], str]] = {
    "B": lambda value: human_bytes(round(value)),
    "s": human_seconds,
    "tok/s": lambda value: f"{human_speed(value)} tok/s",
    "operations": lambda value: f"{_number(value)} operations",
    "operations/B": lambda value: f"{value:.3g} operations/B",
    "": lambda value: f"{value:,.3g}",
}


@dataclass(frozen=True, slots=True)
class Explained:
    """A computed figure. formula: Python, with the names of the numbers in braces. unit: see _SHOWN."""

    name: str
    function: str
    formula: str
    numbers: dict[str, float]
    value: float
    unit: str

    @classmethod
    def by(
        cls, name: str, unit: str, function: Callable[..., float], formula: str, values: Mapping[str, float]
    ) -> Self:
        """The result of a function of the formulas. values: its arguments are those that formula names."""
        numbers = {each: values[each] for each in _NAME.findall(formula)}
        module = function.__module__.rpartition(".")[2]
        return cls(name, f"{module}.{function.__name__}", formula, numbers, function(**numbers), unit)

    def __str__(self) -> str:
        formula = self.formula.replace(" * ", " \N{MULTIPLICATION SIGN} ")
        names = _NAME.sub(lambda found: found[1].replace("_", " "), formula)
        numbers = _NAME.sub(lambda found: _number(self.numbers[found[1]]), formula)
        shown = _SHOWN[self.unit](self.value)
        return f"{self.name}: {shown}\n  {names}  [{self.function}]\n  = {numbers} = {shown}\n"


@dataclass(frozen=True, slots=True)
class Explanation:
    """A model on a machine. machine: None if its figures are unknown; then there are no speeds.

    batches: (sequences at once, the most tokens a second with empty contexts, the same with full ones). notes: what
    the formulas leave out.
    """

    memory: tuple[Explained, ...]
    speed: tuple[Explained, ...]
    batches: tuple[tuple[int, float, float], ...]
    machine: Machine | None
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        file: "ModelFile",
        use: "Use",
        context: int,
        kv_types: tuple[str, str],
        machine: Machine | None,
        expected: "ExpectedSpeed | None",
    ) -> Self:
        """From a file's header and its memory plan. use: of the device that computes. Raises UnsupportedModelError."""
        shape = StepShape.of_file(file)
        filled = tuple(_memory(file, shape, use, context, kv_types))
        per_token = filled[1].value
        speeds = () if machine is None else tuple(_speed(shape, machine, per_token, context))
        rates = () if machine is None else tuple(_batches(shape, machine, per_token, context))
        notes = tuple(_notes(shape, use, context, filled, machine, expected))
        return cls(filled, speeds, rates, machine, notes)

    def __str__(self) -> str:
        parts = ["Memory\n", *map(str, self.memory)]
        if self.machine is not None:
            parts += [f"\nSpeed at most, on {self.machine}\n", *map(str, self.speed), "\n", _batch_table(self.batches)]
        return "".join((*parts, "\n", *(f"{note}\n" for note in self.notes)))


def machine_here(kept: "KeptLimits", work: "TokenWork", memory_bytes: float) -> Machine:
    """This machine by its stored limits. The peak is for the model's mix of int8 and float products."""
    int8, floats = work.row.int8_operations, work.row.float_operations
    peak = (int8 + floats) / (int8 / kept.int8 + floats / kept.floats)
    return Machine(f"{kept.processor}, {kept.threads} threads, as benchmarked", kept.read, peak, memory_bytes)


def machine_named(label: str, memory_bytes: float) -> Machine | None:
    """The machine from HARDWARE whose name is in a GPU's label; None if it or its peak is not in the table."""
    found = next((each for each in HARDWARE if re.search(rf"\b{re.escape(each.name)}\b{_SAME}", label)), None)
    if found is None or found.f16_peak is None:
        return None
    return Machine(found.name, found.bandwidth, found.f16_peak, memory_bytes)


def _memory(
    file: "ModelFile", shape: StepShape, use: "Use", context: int, kv_types: tuple[str, str]
) -> Iterator[Explained]:
    """What fills a device's memory. use: the plan for the device; context: tokens."""
    values = {
        "parameters": file.parameter_count,
        "bits": 8 * file.weights_bytes / max(file.parameter_count, 1),
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "value_bytes": sum(memory.KV_TYPES.get(name, memory.F16_BYTES) for name in kv_types) / 2,
        "tokens": context,
        "memory": use.available,
        "reserve": use.reserve + use.compute + use.other,
        "weights": use.weights,
    }
    yield Explained.by("weights", "B", memory.weight_bytes, "{parameters} * {bits} / 8", values)
    if shape.latents:
        latents = {"latent_size": shape.head_size, "rope_size": 0, "value_bytes": memory.F16_BYTES}
        formula = "{layers} * ({latent_size} + {rope_size}) * {value_bytes}"
        per_token = Explained.by("KV of a token", "B", memory.latent_kv_bytes_per_token, formula, values | latents)
    else:
        formula = "2 * {layers} * {kv_heads} * {head_size} * {value_bytes}"
        per_token = Explained.by("KV of a token", "B", memory.kv_bytes_per_token, formula, values)
    yield per_token
    values["per_token"] = per_token.value
    whole = Explained.by("KV of a full context", "B", memory.kv_bytes, "{per_token} * {tokens}", values)
    yield whole
    if use.kv:
        values["per_sequence"] = max(whole.value, 1.0)
        formula = "max(0, ({memory} - {reserve} - {weights}) // {per_sequence})"
        yield Explained.by("full contexts that fit", "", memory.sequences_that_fit, formula, values)


def _speed(shape: StepShape, machine: Machine, per_token: float, context: int) -> Iterator[Explained]:
    """The roofline: the least times, and thus the most tokens a second, that a machine's figures allow."""
    parameters = shape.decode_operations / 2
    values = {
        "peak": machine.peak,
        "bandwidth": machine.bandwidth,
        "batch": 1,
        "parameters": parameters,
        "weights": shape.read_bytes(1),
        "bytes_per_weight": shape.read_bytes(1) / parameters,
        "layers": shape.layers,
        "heads": shape.heads,
        "head_size": shape.head_size,
        "kv_per_sequence": per_token * context,
    }
    yield Explained.by(
        "ridge, above which arithmetic limits", "operations/B", speed.ridge, "{peak} / {bandwidth}", values
    )
    if shape.experts:
        yield Explained.by(
            "experts of a layer that one token reads",
            "",
            speed.experts_read,
            "{experts} * (1 - (1 - {used} / {experts}) ** {batch})",
            values | {"experts": shape.experts, "used": shape.experts_used},
        )
    for name, tokens in (("empty", 0), ("full", context)):
        operations = Explained.by(
            f"operations for a token, {name} context",
            "operations",
            speed.operations_per_token,
            "2 * {parameters} + 4 * {layers} * {heads} * {head_size} * {tokens}",
            values | {"tokens": tokens},
        )
        yield operations
        yield Explained.by(
            f"decode at most, {name} context",
            "tok/s",
            speed.tokens_per_second,
            "{batch} / max(({weights} + {batch} * {kv_per_sequence}) / {bandwidth}, {batch} * {operations} / {peak})",
            values | {"kv_per_sequence": per_token * tokens, "operations": operations.value},
        )
    prompt = min(PROMPT_TOKENS, context)
    yield Explained.by(
        f"least time of a prompt of {prompt} tokens",
        "s",
        speed.prefill_seconds,
        "{tokens} * {operations} / ({peak} * {used})",
        values | {"tokens": prompt, "operations": shape.row_operations, "used": 1},
    )
    if not shape.experts:
        yield Explained.by(
            "batch from which on arithmetic limits",
            "",
            speed.critical_batch,
            "{peak} * {bytes_per_weight} / (2 * {bandwidth})",
            values,
        )
    yield Explained.by(
        "no batch exceeds, full context", "tok/s", speed.throughput_limit, "{bandwidth} / {kv_per_sequence}", values
    )


def _batches(shape: StepShape, machine: Machine, per_token: float, context: int) -> list[tuple[int, float, float]]:
    """(batch, most tokens a second with empty contexts, with full ones), from speed.tokens_per_second."""

    def most(batch: int, tokens: int) -> float:
        operations = speed.operations_per_token(
            shape.decode_operations / 2, shape.layers, shape.heads, shape.head_size, tokens
        )
        read, kv = shape.read_bytes(batch), per_token * tokens
        return speed.tokens_per_second(batch, read, kv, operations, machine.peak, machine.bandwidth)

    return [(batch, most(batch, 0), most(batch, context)) for batch in BATCHES]


def _notes(
    shape: StepShape,
    use: "Use",
    context: int,
    filled: Sequence[Explained],
    machine: Machine | None,
    expected: "ExpectedSpeed | None",
) -> Iterator[str]:
    weights, _, kv, *_ = filled
    if use.weights != weights.value:
        yield f"The plan counts {human_bytes(use.weights)} of weights: those that are loaded, in their packed form."
    if use.kv != kv.value:
        yield (
            f"The plan counts {human_bytes(use.kv)} of keys and values for {context:,} tokens: layers that differ, "
            "states, and room for a second context are not in the formula."
        )
    yield f"The plan adds {human_bytes(use.compute)} of buffers and {human_bytes(use.other)} for other things."
    if shape.experts:
        yield "A batch reads more experts than one token does, which the table counts (speed.experts_read)."
    if machine is None:
        yield (
            "What bounds the speed is not known: `localllm bench` measures this machine, and --gpu-memory takes the "
            "name of a GPU whose data sheet states bandwidth and arithmetic, for a model that it holds whole."
        )
    elif expected is not None:
        decode = expected.decode / speed.attainable(1.0, machine.peak, machine.bandwidth / shape.read_bytes(1))
        yield f"Expected: {expected}. Decode is {decode:.0%} of what reading the weights once allows."


def _batch_table(rows: Sequence[tuple[int, float, float]]) -> str:
    """The batches as a table for display: upper bounds of tokens a second."""
    cells = [(str(batch), human_speed(empty), human_speed(full)) for batch, empty, full in rows]
    return table([("BATCH", "TOK/S, EMPTY CONTEXTS", "FULL ONES"), *cells], right=(0, 1, 2))


def _number(value: float) -> str:
    """Digits that can be typed into a calculator: 4096, 4.92e9."""
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:.0f}"
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}")
