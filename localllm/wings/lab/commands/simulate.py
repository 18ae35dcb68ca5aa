"""localllm simulate: simulates the engine under load on any machine, in virtual time."""

from typing import Annotated

import typer

from localllm.front.options import model_names, with_flags
from localllm.wings.lab.commands.flags import (
    MOST_REQUESTS,
    EngineFlags,
    MachineFlags,
    Objective,
    OutputFlags,
    WorkloadFlags,
)


@with_flags(OutputFlags)
@with_flags(WorkloadFlags, after="kv_type")
@with_flags(EngineFlags, after="link_latency")
@with_flags(MachineFlags, after="model")
def simulate(
    given: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Name or path of a model (Llama-3-8B's shape).", autocompletion=model_names),
    ] = None,
    requests: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_REQUESTS, help="Requests.")] = 100,
    slo: Objective = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of lengths, tokens and arrivals.")] = 1,
    experiment: Annotated[
        str | None, typer.Option(metavar="NAME", help="A predefined experiment, or all; see docs/simulate.md.")
    ] = None,
) -> None:
    """Simulate a server under load. The real engine runs on a virtual clock.

    Scheduling, batching, prefix cache and speculation are the engine's own; the time of a step comes from a cost model
    with the machine's figures, or from measurements here (--measure, which loads the model).

    Exit status: 0 when done, 2 if it cannot be simulated.
    """
    from localllm.wings.lab.commands.simulating import simulate_load

    machine, engine = MachineFlags.of(given), EngineFlags.of(given)
    workload, output = WorkloadFlags.of(given), OutputFlags.of(given)
    simulate_load(model, machine, engine, workload, requests, slo, seed, experiment, output)
