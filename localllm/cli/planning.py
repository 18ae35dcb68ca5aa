"""What `localllm plan` does: reads a model's header and shows what the model needs."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gguf_io import ModelFile, open_model
from gguf_io.pictures import Budget
from gpu_offload.devices import Device
from gpu_offload.known_gpus import imagined_gpu
from localllm.advice import Advice, advise, best_of
from localllm.errors import LocalLLMError, RequestError
from localllm.front.terminal import StatusLine, answer
from localllm.library.errors import LibraryError, ModelNotFoundError
from localllm.library.lookup import find
from localllm.library.places import Places
from localllm.library.preview import Preview, every_preview, previewed
from localllm.placement.backends import named_projector
from localllm.placement.placement import Placement
from localllm.settings import Settings, load_settings
from localllm.speed.kept import kept_limits
from localllm.speed.work import work_in_header
from localllm.text import human_bytes, human_speed, table
from localllm.wings.lab.explain import Explanation, machine_here, machine_named
from models.vision.encoder import header_layout

COMPARED_TOKENS = 4096  # context with which every quantisation is planned
HEADINGS = ("", "QUANTISATION", "DOWNLOAD", "NEEDED", "FITS", "LONGEST CONTEXT", "DECODE", "PREFILL")
_PICTURES = re.compile(r"(\d{1,4})(?:x(\d{1,5})x(\d{1,5}))?")


def show_plan(
    model: str,
    flags: Mapping[str, object],
    gpu_memory: Sequence[str],
    *,
    images: str | None,
    every: bool,
    explain: bool,
    as_json: bool,
) -> bool:
    """Print the plan of a model, or of every quantisation; return whether it, or one, fits. Raises RequestError.

    flags: settings by flag. The others are those of the command.
    """
    settings = load_settings(flags)
    if gpu_memory and settings.backend == "native":
        raise RequestError("The native engine has no GPUs to plan for. Leave out --gpu-memory, or --backend native.")
    if every and explain:
        raise RequestError("--explain and --all exclude each other.")
    if every and images:
        raise RequestError("--images and --all exclude each other.")
    pictures = _pictures(images) if images else None
    imagined = [imagined_gpu(text) for text in gpu_memory]
    if every:
        return _compare(model, settings, imagined, as_json)
    return _one(model, settings, imagined, as_json, explain, pictures)


def _pictures(text: str) -> tuple[int, int, int]:
    """How many pictures, and their width and height, from --images. Raises RequestError."""
    found = _PICTURES.fullmatch(text)
    count, width, height = (int(number) for number in found.groups("0")) if found else (0, 0, 0)
    if not count or (found and found[2] and not (width and height)):
        raise RequestError(f"--images is {text!r}; use a number of pictures, and their size, such as 4 or 4x1920x1080.")
    return count, width or 1280, height or 720


def _picture_tokens(placed: Placement, width: int, height: int) -> int | None:
    """The tokens of a picture, without the marks around it; None if only llama.cpp knows. Raises RequestError."""
    if placed.options.mmproj is None:
        raise RequestError(
            "This model has no projector, so it reads no pictures. Leave out --images, or name --mmproj."
        )
    if placed.backend != "native":
        return None
    budget = Budget(placed.settings.image_min_tokens, placed.settings.image_max_tokens)
    with open_model(placed.options.mmproj) as file:
        return header_layout(file)(width, height, budget).tokens


def _one(
    name: str,
    settings: Settings,
    imagined: list[Device],
    as_json: bool,
    explain: bool,
    pictures: tuple[int, int, int] | None,
) -> bool:
    """Show the plan of one model; return whether it fits, with its pictures in its context."""
    with _opened(name, settings) as (file, preview, stored):
        settings = replace(settings, mmproj=named_projector(settings.mmproj, stored))
        found = advise(file, settings, imagined)
        explanation = _explanation(file, found, imagined) if explain else None
    told, fit = {}, True
    if pictures:
        count, width, height = pictures
        each, context = _picture_tokens(found.placement, width, height), found.placement.options.context_tokens
        told = {"images": {"count": count, "width": width, "height": height, "tokens": each}}
        fit = each is None or count * each < context
    if as_json:
        more = told | ({} if explanation is None else {"explained": asdict(explanation)})
        answer(json.dumps(_data(found, preview) | more, default=str) + "\n")
    else:
        rows = found.placement.rows()
        answer(table(rows, right=range(1, len(rows[0]))))
        answer("".join(f"{line}\n" for line in _lines(found, preview)))
        if pictures:
            what = (
                f"{each:,} tokens each, {each * count:,} of {context:,}"
                if each
                else "only llama.cpp knows their tokens"
            )
            answer(f"pictures of {width:,} x {height:,}: {what}{'' if fit else ', which is too many'}\n")
        if explanation is not None:
            answer(f"\n{explanation}")
    return found.placement.fits and fit


def _explanation(file: ModelFile, found: Advice, imagined: list[Device]) -> Explanation:
    """The formulas for the device that holds most of the weights. Raises UnsupportedModelError."""
    placed, options = found.placement, found.placement.options
    use = max(placed.uses, key=lambda each: each.weights)
    if use is not placed.uses[0]:
        machine = machine_named(use.place, use.available) if options.gpu_layers in (None, placed.layers) else None
    elif not imagined and (kept := kept_limits(placed.settings.threads)) is not None:
        machine = machine_here(kept, work_in_header(file), use.available)
    else:
        machine = None
    return Explanation.of(file, use, options.context_tokens, (options.type_k, options.type_v), machine, found.expected)


@contextmanager
def _opened(name: str, where: Places) -> Iterator[tuple[ModelFile, Preview | None, Sequence[Path]]]:
    """A local model's file and stored projectors; for any other model, a file with its header, and its preview.

    Raises what `find` and a pull raise.
    """
    try:
        found = find(name, where)
    except ModelNotFoundError as missing:
        with ExitStack() as stack:
            status = stack.enter_context(StatusLine())
            try:
                preview = stack.enter_context(previewed(name, status.show))
            except LibraryError as error:
                raise missing.cannot_be_pulled(error) from error
            status.clear()
            yield stack.enter_context(open_model(preview.path)), preview, ()
        return
    with open_model(found.path) as file:
        yield file, None, found.projectors()


def _lines(found: Advice, preview: Preview | None) -> Iterator[str]:
    """The lines below the table."""
    yield from found.placement.notes
    yield f"longest context that fits: {found.longest_context:,} of {found.trained_context:,} tokens"
    if found.expected is not None:
        yield str(found.expected)
    elif found.placement.backend == "native" and not found.measured:
        yield "the expected speed is not known: `localllm bench` measures this machine in seconds"
    if preview is not None:
        projector = f", and {human_bytes(preview.projector)} of its projector" if preview.projector else ""
        yield f"not on this machine: {human_bytes(preview.size)} to pull{projector}"
    if found.here:
        yield f"{found.placement.name}: {found.placement.reason}"


def _data(found: Advice, preview: Preview | None) -> dict[str, Any]:
    """The plan as plain data for --json."""
    placed = found.placement
    here = {"backend": placed.name, "backend_reason": placed.reason} if found.here else {}
    return {
        "model": found.model,
        "layers": placed.layers,
        "options": asdict(placed.options),
        "uses": [asdict(use) for use in placed.uses],
        "notes": placed.notes,
        "measured": placed.measured,
        "fits": placed.fits,
        "trained_context": found.trained_context,
        "longest_context": found.longest_context,
        "expected": found.expected and asdict(found.expected),
        "download": preview and {"bytes": preview.size, "projector_bytes": preview.projector},
        **here,
    }


def _compare(name: str, settings: Settings, imagined: list[Device], as_json: bool) -> bool:
    """Show all quantisations of a repository; return whether one fits."""
    settings = settings if settings.ctx else replace(settings, ctx=COMPARED_TOKENS)
    compared: list[tuple[Preview, Advice | None, str | None]] = []  # the last: why there is no advice
    with StatusLine() as status:
        for preview in every_preview(name, status.show):
            try:
                with open_model(preview.path) as file:
                    compared.append((preview, advise(file, settings, imagined), None))
            except LocalLLMError as error:
                compared.append((preview, None, str(error)))
        status.clear()
    best = best_of([found for _, found, _ in compared])
    if as_json:
        rows = [
            {"name": preview.name, "best": number == best, "problem": problem}
            | (_data(found, preview) if found else {})
            for number, (preview, found, problem) in enumerate(compared)
        ]
        answer(json.dumps(rows, default=str) + "\n")
        return best is not None
    cells = [_cells(preview, found, number == best) for number, (preview, found, _) in enumerate(compared)]
    answer(table([HEADINGS, *cells], right=(2, 3, 5, 6, 7)))
    answer("".join(f"{preview.name}: {problem}\n" for preview, _, problem in compared if problem))
    if best is None:
        answer(f"None fits with {settings.ctx:,} tokens of context.\n")
    else:
        answer(f"Choose {compared[best][0].name}: the best that fits with {settings.ctx:,} tokens of context.\n")
    return best is not None


def _cells(preview: Preview, found: Advice | None, best: bool) -> tuple[str, ...]:
    """A row of the comparison. Speeds are in tokens per second."""
    first = "*" if best else "", preview.name.rpartition(":")[2], human_bytes(preview.size)
    if found is None:
        return *first, "-", "unknown", "-", "-", "-"
    expected = found.expected
    return (
        *first,
        human_bytes(found.placement.main_bytes + found.placement.device_bytes),
        "yes" if found.placement.fits else "no",
        f"{found.longest_context:,}",
        human_speed(expected.decode) if expected else "-",
        human_speed(expected.prefill) if expected else "-",
    )
