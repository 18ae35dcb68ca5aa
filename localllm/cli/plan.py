"""localllm plan: where a model's weights, keys and values, and working memory would go, before anything is loaded."""

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.exit_code import ExitCode
from localllm.cli.options import (
    AsJson,
    Backend,
    CpuMoe,
    Debug,
    KVTypeK,
    KVTypeV,
    MainGpu,
    Mmproj,
    Model,
    Rpc,
    SplitMode,
    computing_flags,
)
from localllm.cli.terminal import answer
from localllm.text import table

if TYPE_CHECKING:
    from gpu_offload.devices import Device


def plan(  # noqa: PLR0913, PLR0917 - one parameter for each flag
    given: typer.Context,
    model: Model,
    context: Annotated[
        int | None,
        typer.Option("--ctx", metavar="N", min=1, help="Tokens of context; by default the longest that fits whole."),
    ] = None,
    gpu_memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU", help="Plan for a GPU that is not here: its memory (8GiB) or its name (RTX 4090); once a GPU."
        ),
    ] = None,
    gpu_layers: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Layers on the GPUs; by default as many as fit.")
    ] = None,
    backend: Backend = None,
    main_gpu: MainGpu = None,
    split_mode: SplitMode = None,
    n_cpu_moe: CpuMoe = None,
    rpc: Rpc = None,
    mmproj: Mmproj = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="A small model that runs beside.")] = None,
    kv_type_k: KVTypeK = None,
    kv_type_v: KVTypeV = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the memory and the GPU layers a model would take. It is not loaded.

    Where no GPU is imagined, the last line says which backend would compute the model here, and why.
    Exits with 2 where it does not fit. Sizes in the table are MiB.
    """
    from cpu_kernels.limits import available_memory
    from gguf_io import open_model
    from gpu_offload.known_gpus import imagined_gpu
    from gpu_offload.planner import plan as make_plan
    from localllm.engine.backends import choose_backend, draft_beside, native_kv_types, plan_request
    from localllm.engine.projectors import projector_of
    from localllm.errors import RequestError
    from localllm.library import resolve
    from localllm.settings import load_settings

    settings = load_settings({**computing_flags(given), "ctx": context, "draft": draft})
    if gpu_memory and settings.backend == "native":
        raise RequestError("The native engine has no GPUs to plan for. Leave --gpu-memory out, or the backend native.")
    with open_model(resolve(model)) as file, draft_beside(settings) as beside:
        request = replace(plan_request(settings, projector_of(file, settings)), draft=beside)
        choice = None if gpu_memory else choose_backend(file, settings)  # which makes devices of workers
        gpus = [imagined_gpu(text) for text in gpu_memory] if gpu_memory else _gpus_here()
        if choice and choice.backend == "llama":
            request = replace(request, dry_run=True)
        elif choice:
            request = replace(request, kv_types=native_kv_types(settings), spare=False, copies=False)
        try:
            made = make_plan(file, gpus, available_memory(), request)
        except ValueError as error:
            raise RequestError(f"{error}. Choose f16 with --kv-type-k and --kv-type-v.") from error
        made = replace(made, notes=(*file.notes, *made.notes))
    if as_json:
        here = {"backend": choice.name, "backend_reason": choice.reason} if choice else {}
        answer(json.dumps({**asdict(made), "fits": made.fits, **here}) + "\n")
    else:
        rows = made.rows()
        answer(table(rows, right=range(1, len(rows[0]))))
        answer("".join(f"{note}\n" for note in (*made.notes, *([str(choice)] if choice else ()))))
    if not made.fits:
        raise typer.Exit(ExitCode.REFUSED)


def _gpus_here() -> "list[Device]":
    """This machine's GPUs as llama.cpp sees them; none without the llama extra, which alone could use them."""
    from gpu_offload.devices import gpus
    from gpu_offload.errors import LlamaCppMissingError

    try:
        return gpus()
    except LlamaCppMissingError:
        return []
