"""Flags of loadtest and simulate, by what they describe."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from localllm.errors import RequestError
from localllm.front.options import AsJson, Flags

MOST_REQUESTS = 100_000
MOST_CONNECTIONS = 4096
MOST_SECONDS = 86_400
PROMPT, ANSWER = "256", "64"
MACHINE = "RTX 4090"
Objective = Annotated[
    str | None, typer.Option(metavar="BOUNDS", help="SLO for goodput, such as ttft=2s,tpot=100ms; also itl, e2e.")
]


@dataclass(frozen=True)
class WorkloadFlags(Flags):
    """The requests to send, and the loads."""

    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trace to replay, in Azure's or Mooncake's format.")
    ] = None
    scale: Annotated[float | None, typer.Option(metavar="X", help="Divide a trace's lengths by X.")] = None
    speedup: Annotated[float | None, typer.Option(metavar="X", help="Replay a trace X times as fast.")] = None
    prompt_tokens: Annotated[
        str | None, typer.Option(metavar="N[:M]", help=f"Length of random prompts, uniformly distributed ({PROMPT}).")
    ] = None
    answer_tokens: Annotated[
        str | None, typer.Option(metavar="N[:M]", help=f"Most tokens of an answer, uniformly distributed ({ANSWER}).")
    ] = None
    shared_prefix: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Length of a prefix that prompts share.")
    ] = None
    prefixes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of shared prefixes (1).")] = None
    rate: Annotated[
        str | None,
        typer.Option(metavar="R[,R...]", help="Open loop: Poisson arrivals at R per second; a trial for each."),
    ] = None
    concurrency: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Closed loop: N clients; a trial for each (1).")
    ] = None


@dataclass(frozen=True)
class TrialFlags(Flags):
    """The server to test, and the trials."""

    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model to test (the server's only one).")] = None
    api: Annotated[str | None, typer.Option(metavar="NAME", help="openai or ollama (detected).")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Send prompts without the chat template.")] = False
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts to send: one per line, or .jsonl.")] = (
        None
    )
    knee: Annotated[bool, typer.Option("--knee", help="Search for the highest rate that meets the SLO.")] = False
    slo: Objective = None
    requests: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_REQUESTS, help="Most requests in a trial.")] = 32
    duration: Annotated[
        float,
        typer.Option(metavar="S", min=0.001, max=MOST_SECONDS, help="Seconds during which a trial sends requests."),
    ] = 120
    timeout: Annotated[
        float, typer.Option(metavar="S", min=0.001, max=MOST_SECONDS, help="Time limit of a request in seconds.")
    ] = 120
    connections: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_CONNECTIONS, help="Most concurrent connections.")
    ] = 256
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Seed, to repeat an earlier test's lengths, texts and arrivals.")
    ] = None
    body: Annotated[
        str | None, typer.Option(metavar="JSON", help='Fields for every request, such as {"ignore_eos": true}.')
    ] = None


@dataclass(frozen=True)
class MachineFlags(Flags):
    """The machine to simulate."""

    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Machine from the table in docs/inference.md ({MACHINE})."),
    ] = None
    measure: Annotated[bool, typer.Option("--measure", help="Load the model and time its steps here.")] = False
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use this machine's figures from localllm bench --json.")
    ] = None
    bandwidth: Annotated[float | None, typer.Option(metavar="GB/S", min=0.001, help="Memory bandwidth.")] = None
    compute: Annotated[
        float | None, typer.Option(metavar="GOP/S", min=0.001, help="Arithmetic rate, such as bench's int8 figure.")
    ] = None
    memory: Annotated[float | None, typer.Option(metavar="GB", min=0.001, help="Memory for weights and KV cache.")] = (
        None
    )
    overhead: Annotated[float, typer.Option(metavar="MS", min=0, help="Additional time per step.")] = 0.0
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="Number of equal devices, tensor parallel.")] = 1
    link: Annotated[float, typer.Option(metavar="GB/S", min=0.001, help="Bandwidth of the link between devices.")] = (
        25.0
    )
    link_latency: Annotated[float, typer.Option(metavar="US", min=0, help="Latency of a message over the link.")] = 10.0


@dataclass(frozen=True)
class EngineFlags(Flags):
    """The engine to simulate."""

    slots: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Most concurrent requests.")] = 8
    max_queue: Annotated[int, typer.Option(metavar="N", min=1, help="Most waiting requests.")] = 64
    batching: Annotated[str, typer.Option(metavar="HOW", help="continuous, static or none.")] = "continuous"
    chunked_prefill: Annotated[bool, typer.Option(help="Compute long prompts in chunks.")] = True
    prefix_cache: Annotated[bool, typer.Option(help="Reuse the KV of cached prefixes.")] = True
    acceptance: Annotated[
        float | None,
        typer.Option(metavar="A", min=0, max=1, help="Use a draft model with this acceptance rate."),
    ] = None
    draft_cost: Annotated[
        float,
        typer.Option(metavar="C", min=0, max=1, help="Time of a draft model's step as a share of the model's."),
    ] = 0.1
    kv_type: Annotated[str | None, typer.Option(metavar="TYPE", help="KV type: f16 (default), q8_0 or q4_0.")] = None


@dataclass(frozen=True)
class OutputFlags(Flags):
    """How results are shown."""

    plot: Annotated[bool, typer.Option("--plot", help="Draw latencies in the terminal.")] = False
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them to a new SVG file.")] = None
    as_json: AsJson = False


def refuse(other: str, **flags: object) -> None:
    """Raise RequestError if any of the flags is given (not None), because it cannot be combined with `other`."""
    given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None]
    if given:
        raise RequestError(f"{', '.join(given)} cannot be used with {other}.")


def check_drawing(plot: bool, as_json: bool, svg: Path | None) -> None:
    """Raise RequestError if charts cannot be drawn with these options."""
    if plot and as_json:
        raise RequestError("--plot cannot be used with --json; --svg draws to a file.")
    if svg is not None and os.path.exists(svg):
        raise RequestError(f"{svg} exists already; choose another file for --svg.")
    if svg is not None and not os.access(svg.parent, os.W_OK):
        raise RequestError(f"{svg} cannot be written: its folder does not exist, or is not yours to write to.")
