"""localllm bench: measures a model's speed and compares it with this machine's limits."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.options import AsJson, Backend, Debug, GpuLayers, Rpc, computing_flags, model_names
from localllm.cli.terminal import ExitCode, StatusLine, answer, note

if TYPE_CHECKING:
    from localllm.roofline.report import Report
    from localllm.roofline.speeds import Wish
    from localllm.settings import Settings


def bench(  # noqa: PLR0913, PLR0917 - one parameter for each flag
    given: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Name, path or URL of a model; without it, the limits alone are measured, in seconds.",
            show_default=False,
            autocompletion=model_names,
        ),
    ] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Numbers of threads, measured one by one (one a core).")
    ] = None,
    prompt: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the prompt.")] = 512,
    depth: Annotated[str, typer.Option(metavar="N[,N...]", help="Decode after so many tokens, such as 0,4096.")] = "0",
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to decode.")] = 64,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds, after one that does not count.")] = 5,
    backend: Backend = None,
    gpu_layers: GpuLayers = None,
    rpc: Rpc = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure a model's speed beside this machine's limits.

    Prompt and decoding are timed in rounds that alternate with the limits: reading memory, and multiplying bytes and
    floats, on the same threads. The table shows medians; --json has everything. Models that llama.cpp computes get
    their speed alone. The limits, and how much of them the model reached, are kept for this machine: `plan`, `list`,
    `doctor` and the chat expect speeds from them.

    Exits with 0 when done, 2 for what cannot be measured, 130 when stopped by Ctrl-C.
    """
    from localllm.roofline.speeds import Wish
    from localllm.settings import load_settings

    wish = Wish(prompt, _numbers(depth, "--depth", 0), tokens, rounds)
    settings = load_settings({**computing_flags(given), "threads": None})
    counts = (settings.threads,) if threads is None else _numbers(threads, "--threads", 1)
    with ThreadPoolExecutor(1, "bench") as worker, StatusLine() as status:
        measuring = worker.submit(_measure, model, settings, counts, wish, status)
        try:
            report = measuring.result()
        except KeyboardInterrupt:
            status.clear()
            note("Stopped; nothing was kept.")
            # Running kernels cannot be stopped and may take seconds; they hold nothing that needs saving.
            os._exit(ExitCode.INTERRUPTED)
    from localllm.roofline.report import as_data, as_text

    answer(json.dumps(as_data(report)) + "\n" if as_json else as_text(report))


def _measure(
    model: str | None, settings: "Settings", counts: "tuple[int | None, ...]", wish: "Wish", status: StatusLine
) -> "Report":
    from gguf_io import open_model
    from localllm.cli.pull import obtain
    from localllm.roofline.bench import bench as run_bench
    from localllm.roofline.bench import bench_limits
    from localllm.roofline.expected import main_type

    if model is None:
        report, name, weights = bench_limits(counts, wish.rounds, status.show), "", ""
    else:
        with open_model(obtain(model, settings).path) as file:
            report, name, weights = run_bench(file, settings, counts, wish, status.show), file.name, main_type(file)
    status.clear()
    _keep(report, name, weights)
    return report


def _keep(report: "Report", name: str, weights: str) -> None:
    from localllm.roofline.kept import keep, kept_path

    try:
        keep(report, name, weights)
    except OSError as error:
        note(f"The figures were not kept: {kept_path()} cannot be written: {error.strerror}.")


def _numbers(text: str, option: str, least: int) -> tuple[int, ...]:
    """The distinct numbers of a comma-separated list, in its order. Raises RequestError."""
    from localllm.errors import RequestError

    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise RequestError(f"{option} is {text!r}; give whole numbers with commas between, such as 1,2.") from None
    if min(numbers) < least:
        raise RequestError(f"{option} is {text!r}; the least is {least}.")
    return numbers
