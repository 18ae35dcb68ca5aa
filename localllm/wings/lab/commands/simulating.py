"""What `localllm simulate` does: simulates a model on a machine under a load, and shows what happened."""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace

from cpu_kernels.limits import available_memory
from gguf_io import open_model
from localllm.errors import RequestError
from localllm.front.terminal import StatusLine, answer
from localllm.library import resolve
from localllm.placement.backends import open_runner
from localllm.settings import load_settings
from localllm.slo import Slo
from localllm.text import table
from localllm.wings.lab.commands.flags import (
    MACHINE,
    EngineFlags,
    MachineFlags,
    OutputFlags,
    WorkloadFlags,
    check_drawing,
    refuse,
)
from localllm.wings.lab.commands.load_testing import draw, loads, source
from localllm.wings.lab.formulas.memory import KV_TYPES
from localllm.wings.lab.loadtest import report as load_report
from localllm.wings.lab.simulate import report
from localllm.wings.lab.simulate.costs import StepTimes, roofline, scaled, shared_by
from localllm.wings.lab.simulate.experiments import EXPERIMENTS, SimulatedServer, as_text
from localllm.wings.lab.simulate.fit import machine_of
from localllm.wings.lab.simulate.fit import measure as measure_steps
from localllm.wings.lab.simulate.machines import Link, Machine, from_bench, named, of_figures
from localllm.wings.lab.simulate.runner import PAGE
from localllm.wings.lab.simulate.shape import StepShape, llama_3_8b
from localllm.wings.lab.simulate.simulation import Batching, Setup, Simulated, SimulatedDraft, simulate

_ROUNDS = 3
_GIGA = 1e9


def simulate_load(
    model: str | None,
    machine: MachineFlags,
    engine: EngineFlags,
    workload: WorkloadFlags,
    requests: int,
    slo: str | None,
    seed: int,
    experiment: str | None,
    output: OutputFlags,
) -> None:
    """Simulate each load of the workload, or an experiment, and print what happened.

    model: its name, None for Llama-3-8B's shape. requests: in each simulation. Raises RequestError for flags that
    conflict.
    """
    if engine.batching not in tuple(Batching):
        raise RequestError(f"--batching is {engine.batching!r}; give {', '.join(Batching)}.")
    check_drawing(output.plot, output.as_json, output.svg)
    if sum((machine.machine is not None, machine.measure, machine.bench is not None)) > 1:
        raise RequestError("--machine, --measure and --bench exclude each other.")
    with StatusLine() as status:
        shape, computer, times = _costs(model, engine.kv_type, machine, status)
    connection = Link(machine.link * _GIGA, machine.link_latency / 1e6)
    setup = _setup(shape, computer, shared_by(times, machine.devices, shape, connection), machine.devices, engine)
    if experiment is not None:
        refuse(
            "--experiment, which defines its own load",
            **asdict(workload),
            slo=slo,
            svg=output.svg,
            plot=output.plot or None,
            devices=machine.devices if machine.devices > 1 else None,
            acceptance=engine.acceptance,
            batching=None if engine.batching == Batching.CONTINUOUS else engine.batching,
        )
        _experiments(experiment, SimulatedServer(shape, computer, connection, setup, str(seed)), output.as_json)
        return
    goal = None if slo is None else Slo.parse(slo)
    wanted = loads(workload)
    asked = source(workload, requests, seed)
    runs = []
    with StatusLine() as status:
        for number, load in enumerate(wanted, 1):
            status.show(f"simulating {load}")
            runs.append(simulate(setup, asked.requests(requests, number, load), load, f"{seed} {number}"))
    head = f"{shape.name} on {computer}" + (f" x {machine.devices}" if machine.devices > 1 else "")
    _print(head, runs, goal, output)


def _setup(shape: StepShape, computer: Machine, times: StepTimes, devices: int, engine: EngineFlags) -> Setup:
    """The engine on `devices` such machines, whose steps take these times."""
    return Setup(
        times,
        shape.pages(computer.memory * devices, PAGE),
        shape.context,
        engine.slots,
        engine.max_queue,
        batching=Batching(engine.batching),
        chunked_prefill=engine.chunked_prefill,
        prefix_cache=engine.prefix_cache,
        draft=None
        if engine.acceptance is None
        else SimulatedDraft(scaled(times, engine.draft_cost), engine.acceptance),
    )


def _costs(
    model: str | None, kv_type: str | None, flags: MachineFlags, status: StatusLine
) -> tuple[StepShape, Machine, StepTimes]:
    """The model's shape, the machine, and the times of its steps."""
    if kv_type not in (None, *KV_TYPES):
        raise RequestError(f"--kv-type is {kv_type!r}; give one of {', '.join(KV_TYPES)}.")
    shape = llama_3_8b()
    if model is not None:
        with open_model(resolve(model)) as file:
            shape = StepShape.of_file(file)
            if flags.measure:
                refuse("--measure", bandwidth=flags.bandwidth, compute=flags.compute, kv_type=kv_type)
                memory = _memory(flags)
                with closing(open_runner(file, load_settings({}), status.share)[0]) as runner:
                    times = measure_steps(runner, time.perf_counter, _ROUNDS, flags.overhead / 1e3, status.show)
                return shape, machine_of(times, shape, memory), times
    elif flags.measure:
        raise RequestError("--measure needs a model to load.")
    shape, machine = replace(shape, value_bytes=KV_TYPES[kv_type or "f16"]), _machine(flags)
    return shape, machine, roofline(shape, machine)


def _machine(flags: MachineFlags) -> Machine:
    """The machine to simulate. Raises RequestError if figures are missing."""
    overhead = flags.overhead / 1e3
    if flags.bench is not None:
        refuse("--bench", bandwidth=flags.bandwidth, compute=flags.compute)
        return from_bench(flags.bench, _memory(flags), overhead)
    bandwidth, compute, memory = (
        figure and figure * _GIGA for figure in (flags.bandwidth, flags.compute, flags.memory)
    )
    if flags.machine is None and bandwidth is not None:
        return of_figures("a machine", bandwidth, compute, _memory(flags), overhead)
    return named(flags.machine or MACHINE, bandwidth, compute, memory, overhead)


def _memory(flags: MachineFlags) -> float:
    """The given memory, else the free memory of this machine, in bytes."""
    return flags.memory * _GIGA if flags.memory else float(available_memory())


def _experiments(name: str, server: SimulatedServer, as_json: bool) -> None:
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


def _print(head: str, runs: Sequence[Simulated], slo: Slo | None, output: OutputFlags) -> None:
    if output.as_json:
        data = {"simulated": head, "trials": [report.as_data(run, slo) for run in runs]}
        answer(json.dumps(data, ensure_ascii=False) + "\n")
    else:
        answer(f"Simulated: {head}\n\n{table(load_report.rows([run.trial for run in runs], slo))}\n")
        answer("".join(f"{line}\n" for line in report.sentences(runs, slo)))
        answer(f"\n{table(report.rows(runs))}")
    draw(lambda: report.charts(head, runs), output)
