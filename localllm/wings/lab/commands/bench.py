"""localllm bench: measures a model's speed and compares it with this machine's limits."""

from typing import Annotated

import typer

from localllm.front.options import COMPUTING, AsJson, model_names, numbers, setting_flags, with_flags


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
    from localllm.wings.lab.commands.benching import run_bench
    from localllm.wings.lab.roofline.speeds import BenchRequest

    request = BenchRequest(prompt, numbers(depth, "--depth", int, 0), tokens, rounds)
    counts = None if threads is None else numbers(threads, "--threads", int, 1)
    run_bench(model, {**setting_flags(given), "threads": None}, counts, request, as_json)
