"""localllm plan: predicts a model's memory and speed without loading or downloading it."""

from typing import Annotated

import typer

from localllm.front.options import COMPUTING, AsJson, Model, setting_flags, with_flags
from localllm.front.terminal import ExitCode


@with_flags(COMPUTING, COMPUTING.keys() - {"ctx", "threads", "gpu_layers"}, after="gpu_layers")
def plan(
    given: typer.Context,
    model: Model,
    ctx: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of context; by default as many as fit.")
    ] = None,
    gpu_memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU", help="Plan for a GPU that is not here: its memory (8GiB) or its name (RTX 4090); repeatable."
        ),
    ] = None,
    gpu_layers: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Layers on the GPUs; by default as many as fit.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Include a draft model, or an EAGLE-3 head.")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(metavar="N[xWxH]", help="Count the tokens of N pictures, of 1280x720 pixels or of W x H."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Compare the quantisations of a Hugging Face repository.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the formulas behind memory and speed, with this model's numbers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a model's memory, GPU layers and speed. It is not loaded.

    For a model that is not here, only the header is fetched, from where `pull` would get it. The speed needs a
    `localllm bench` of this machine. Without --gpu-memory, the last line says which backend would run the model here,
    and why. --all marks the best quantisation that fits with 4096 tokens of context, or --ctx. --explain shows the
    formulas of docs/inference.md with this model's and machine's figures. Exit status: 2 if it does not fit. Sizes in
    the table are MiB.
    """
    from localllm.cli.planning import show_plan

    flags = setting_flags(given)
    if not show_plan(model, flags, gpu_memory or (), images=images, every=every, explain=explain, as_json=as_json):
        raise typer.Exit(ExitCode.REFUSED)
