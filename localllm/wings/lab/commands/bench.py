"""localllm bench: measures a model's speed and compares it with this machine's limits."""

import json
import os
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Annotated

import typer

from gguf_io.interruption import POLL_S
from localllm.front.options import COMPUTING, AsJson, model_names, numbers, setting_flags, with_flags
from localllm.front.pulling import obtain
from localllm.front.terminal import ExitCode, StatusLine, answer, note
from localllm.settings import load_settings

if TYPE_CHECKING:
    from localllm.settings import Settings
    from localllm.wings.lab.roofline.report import BenchReport
    from localllm.wings.lab.roofline.speeds import BenchRequest


@with_flags(COMPUTING, ("backend", "gpu_layers", "rpc"), after="rounds")
def bench(
    given: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Name, path or URL of a model; without it, only this machine's limits are measured.",
            show_default=False,
            autocompletion=model_names,
        ),
    ] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Thread counts to measure, such as 1,2 (one per core).")
    ] = None,
    prompt: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the prompt.")] = 512,
    depth: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Context lengths to decode after, such as 0,4096.")
    ] = "0",
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to decode.")] = 64,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds, after a warm-up round.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Compare a model's speed with this machine's limits.

    Rounds of prefill and decode alternate with the limits: memory reads, and byte and float multiplication, on the same
    threads. The table shows medians; --json has everything. For models that llama.cpp runs, only the speed is measured.
    The results are stored for this machine: `plan`, `list`, `doctor` and the chat derive expected speeds from them.

    Exit status: 0 when done, 2 if it cannot be measured, 130 after Ctrl-C.
    """
    from localllm.wings.lab.roofline.speeds import BenchRequest

    request = BenchRequest(prompt, numbers(depth, "--depth", int, 0), tokens, rounds)
    settings = load_settings({**setting_flags(given), "threads": None})
    counts = (settings.threads,) if threads is None else numbers(threads, "--threads", int, 1)
    with ThreadPoolExecutor(1, "bench") as worker, StatusLine() as status:
        measuring = worker.submit(_measure, model, settings, counts, request, status)
        try:
            while not measuring.done():
                wait([measuring], POLL_S)  # Ctrl-C does not end a longer wait on Windows
            report = measuring.result()
        except KeyboardInterrupt:
            status.clear()
            note("Stopped; nothing was stored.")
            # Running kernels cannot be stopped and may take seconds; they hold nothing that needs saving.
            os._exit(ExitCode.INTERRUPTED)
    from localllm.wings.lab.roofline.report import as_data, as_text

    answer(json.dumps(as_data(report)) + "\n" if as_json else as_text(report))


def _measure(
    model: str | None,
    settings: "Settings",
    counts: "tuple[int | None, ...]",
    request: "BenchRequest",
    status: StatusLine,
) -> "BenchReport":
    from gguf_io import open_model
    from localllm.speed.expected import main_type
    from localllm.speed.kept import kept_path
    from localllm.wings.lab.roofline.bench import bench as run_bench
    from localllm.wings.lab.roofline.bench import bench_limits
    from localllm.wings.lab.roofline.report import keep

    if model is None:
        report, name, weights = bench_limits(counts, request.rounds, status.show), "", ""
    else:
        with open_model(obtain(model, settings).path) as file:
            report, name, weights = run_bench(file, settings, counts, request, status.show), file.name, main_type(file)
    status.clear()
    try:
        keep(report, name, weights)
    except OSError as error:
        note(f"The results were not stored: {kept_path()} cannot be written: {error.strerror}.")
    return report
