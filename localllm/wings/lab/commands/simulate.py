"""localllm simulate: simulates the engine under load on any machine, in virtual time."""

import json
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.errors import RequestError
from localllm.front.options import AsJson, model_names, with_flags
from localllm.front.terminal import StatusLine, answer
from localllm.library import resolve
from localllm.settings import load_settings
from localllm.text import table
from localllm.wings.lab.commands import loadtest

if TYPE_CHECKING:
    from localllm.slo import Slo
    from localllm.wings.lab.simulate.costs import StepTimes
    from localllm.wings.lab.simulate.experiments import SimulatedServer
    from localllm.wings.lab.simulate.machines import Machine
    from localllm.wings.lab.simulate.shape import StepShape
    from localllm.wings.lab.simulate.simulation import Simulated

_DEFAULT_MACHINE = "RTX 4090"
_ROUNDS = 3
_GIGA = 1e9


@with_flags(loadtest.Given.__annotations__, after="kv_type")
def simulate(  # noqa: PLR0913, PLR0917 - one parameter for each flag
    given: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Name or path of a model (Llama-3-8B's shape).", autocompletion=model_names),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Machine from the table in docs/inference.md ({_DEFAULT_MACHINE})."),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Load the model and time its steps here.")] = False,
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use this machine's figures from localllm bench --json.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(metavar="GB/S", min=0.001, help="Memory bandwidth.")] = None,
    compute: Annotated[
        float | None, typer.Option(metavar="GOP/S", min=0.001, help="Arithmetic rate, such as bench's int8 figure.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GB", min=0.001, help="Memory for weights and KV cache.")
    ] = None,
    overhead: Annotated[float, typer.Option(metavar="MS", min=0, help="Additional time per step.")] = 0.0,
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="Number of equal devices, tensor parallel.")] = 1,
    link: Annotated[
        float, typer.Option(metavar="GB/S", min=0.001, help="Bandwidth of the link between devices.")
    ] = 25.0,
    link_latency: Annotated[
        float, typer.Option(metavar="US", min=0, help="Latency of a message over the link.")
    ] = 10.0,
    slots: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Most concurrent requests.")] = 8,
    max_queue: Annotated[int, typer.Option(metavar="N", min=1, help="Most waiting requests.")] = 64,
    batching: Annotated[str, typer.Option(metavar="HOW", help="continuous, static or none.")] = "continuous",
    chunked_prefill: Annotated[bool, typer.Option(help="Compute long prompts in chunks.")] = True,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse the KV of cached prefixes.")] = True,
    acceptance: Annotated[
        float | None,
        typer.Option(metavar="A", min=0, max=1, help="Use a draft model with this acceptance rate."),
    ] = None,
    draft_cost: Annotated[
        float,
        typer.Option(metavar="C", min=0, max=1, help="Time of a draft model's step as a share of the model's."),
    ] = 0.1,
    kv_type: Annotated[str | None, typer.Option(metavar="TYPE", help="KV type: f16 (default), q8_0 or q4_0.")] = None,
    requests: Annotated[int, typer.Option(metavar="N", min=1, max=loadtest.MOST_REQUESTS, help="Requests.")] = 100,
    slo: loadtest.Bounds = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of lengths, tokens and arrivals.")] = 1,
    experiment: Annotated[
        str | None, typer.Option(metavar="NAME", help="A predefined experiment, or all; see docs/simulate.md.")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw TTFT, TPOT and the queue in the terminal.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them to a new SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a server under load. The real engine runs on a virtual clock.

    Scheduling, batching, prefix cache and speculation are the engine's own; the time of a step comes from a cost model
    with the machine's figures, or from measurements here (--measure, which loads the model).

    Exit status: 0 when done, 2 if it cannot be simulated.
    """
    from localllm.slo import Slo
    from localllm.wings.lab.simulate.costs import scaled, shared_by
    from localllm.wings.lab.simulate.experiments import SimulatedServer
    from localllm.wings.lab.simulate.machines import Link
    from localllm.wings.lab.simulate.runner import PAGE
    from localllm.wings.lab.simulate.simulation import Batching, Setup, SimulatedDraft
    from localllm.wings.lab.simulate.simulation import simulate as play

    if batching not in tuple(Batching):
        raise RequestError(f"--batching is {batching!r}; give {', '.join(Batching)}.")
    loadtest.check_drawing(plot, as_json, svg)
    if sum((machine is not None, measure, bench is not None)) > 1:
        raise RequestError("--machine, --measure and --bench exclude each other.")
    bandwidth, compute, memory = (value and value * _GIGA for value in (bandwidth, compute, memory))
    figures = _Figures(machine, bench, bandwidth, compute, memory, overhead / 1e3)
    with StatusLine() as status:
        shape, computer, times = _costs(model, measure, kv_type, figures, status)
    connection = Link(link * _GIGA, link_latency / 1e6)
    shared = shared_by(times, devices, shape, connection)
    setup = Setup(
        shared,
        shape.pages(computer.memory * devices, PAGE),
        shape.context,
        slots,
        max_queue,
        batching=Batching(batching),
        chunked_prefill=chunked_prefill,
        prefix_cache=prefix_cache,
        draft=None if acceptance is None else SimulatedDraft(scaled(shared, draft_cost), acceptance),
    )
    workload = loadtest.Given.of(given)
    if experiment is not None:
        loadtest.refuse(
            "--experiment, which defines its own load",
            **asdict(workload),
            slo=slo,
            svg=svg,
            plot=plot or None,
            devices=devices if devices > 1 else None,
            acceptance=acceptance,
            batching=None if batching == Batching.CONTINUOUS else batching,
        )
        _experiments(experiment, SimulatedServer(shape, computer, connection, setup, str(seed)), as_json)
        return
    goal = None if slo is None else Slo.parse(slo)
    wanted = workload.loads()
    source = workload.source(requests, seed)
    runs = []
    with StatusLine() as status:
        for number, load in enumerate(wanted, 1):
            status.show(f"simulating {load}")
            asked = source.requests(requests, number, load)
            runs.append(play(setup, asked, load, f"{seed} {number}"))
    head = f"{shape.name} on {computer}" + (f" x {devices}" if devices > 1 else "")
    _print(head, runs, goal, as_json, plot, svg)


@dataclass(frozen=True)
class _Figures:
    """The machine's figures from the flags, in SI units; None for those not given."""

    name: str | None
    bench: Path | None
    bandwidth: float | None
    peak: float | None
    memory: float | None
    overhead: float

    def machine(self) -> "Machine":
        """The machine to simulate. Raises RequestError if figures are missing."""
        from localllm.wings.lab.simulate.machines import from_bench, named, of_figures

        if self.bench is not None:
            loadtest.refuse("--bench", bandwidth=self.bandwidth, compute=self.peak)
            return from_bench(self.bench, self.memory_here(), self.overhead)
        if self.name is None and self.bandwidth is not None:
            return of_figures("a machine", self.bandwidth, self.peak, self.memory_here(), self.overhead)
        return named(self.name or _DEFAULT_MACHINE, self.bandwidth, self.peak, self.memory, self.overhead)

    def memory_here(self) -> float:
        """The given memory, else the free memory of this machine, in bytes."""
        from cpu_kernels.limits import available_memory

        return self.memory or float(available_memory())


def _costs(
    model: str | None, measure: bool, kv_type: str | None, figures: _Figures, status: StatusLine
) -> "tuple[StepShape, Machine, StepTimes]":
    """The model's shape, the machine, and the times of its steps."""
    from gguf_io import open_model
    from localllm.placement.backends import open_runner
    from localllm.wings.lab.formulas.memory import KV_TYPES
    from localllm.wings.lab.simulate.costs import roofline
    from localllm.wings.lab.simulate.fit import machine_of
    from localllm.wings.lab.simulate.fit import measure as measure_steps
    from localllm.wings.lab.simulate.shape import StepShape, llama_3_8b

    if kv_type not in (None, *KV_TYPES):
        raise RequestError(f"--kv-type is {kv_type!r}; give one of {', '.join(KV_TYPES)}.")
    shape = llama_3_8b()
    if model is not None:
        with open_model(resolve(model)) as file:
            shape = StepShape.of_file(file)
            if measure:
                loadtest.refuse("--measure", bandwidth=figures.bandwidth, compute=figures.peak, kv_type=kv_type)
                memory = figures.memory_here()
                with closing(open_runner(file, load_settings({}), status.share)[0]) as runner:
                    times = measure_steps(runner, time.perf_counter, _ROUNDS, figures.overhead, status.show)
                return shape, machine_of(times, shape, memory), times
    elif measure:
        raise RequestError("--measure needs a model to load.")
    shape, machine = replace(shape, value_bytes=KV_TYPES[kv_type or "f16"]), figures.machine()
    return shape, machine, roofline(shape, machine)


def _experiments(name: str, server: "SimulatedServer", as_json: bool) -> None:
    from localllm.wings.lab.simulate.experiments import EXPERIMENTS, as_text

    if name != "all" and name not in EXPERIMENTS:
        raise RequestError(f"--experiment is {name!r}; give all, or one of {', '.join(EXPERIMENTS)}.")
    findings = []
    for one in EXPERIMENTS if name == "all" else (name,):
        with StatusLine() as status:
            status.show(f"simulating {one}")
            findings.append(EXPERIMENTS[one](server))
        if not as_json:
            head = f"{server.shape.name} on {server.machine}\n\n" if len(findings) == 1 else "\n"
            answer(head + as_text(findings[-1]))
    if as_json:
        answer(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False) + "\n")


def _print(head: str, runs: "list[Simulated]", slo: "Slo | None", as_json: bool, plot: bool, svg: Path | None) -> None:
    from localllm.wings.lab.loadtest import report as loads
    from localllm.wings.lab.simulate import report

    if as_json:
        data = {"simulated": head, "trials": [report.as_data(run, slo) for run in runs]}
        answer(json.dumps(data, ensure_ascii=False) + "\n")
    else:
        answer(f"Simulated: {head}\n\n{table(loads.rows([run.trial for run in runs], slo))}\n")
        answer("".join(f"{line}\n" for line in report.sentences(runs, slo)))
        answer(f"\n{table(report.rows(runs))}")
    loadtest.draw(lambda: report.charts(head, runs), plot, svg)
