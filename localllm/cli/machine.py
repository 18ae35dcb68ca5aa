"""localllm config, cache, doctor: the effective settings, the stored caches, and checks of this machine."""

import json
import os
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.errors import RequestError
from localllm.front.options import AsJson
from localllm.front.terminal import ExitCode, answer, fail, note
from localllm.settings import SECRETS, config_path, load_settings, setting_sources
from localllm.text import human_bytes, table

if TYPE_CHECKING:
    from localllm.errors import SettingsError

MARKS = {"good": "  ok  ", "advice": " note ", "bad": " FAIL "}


def config(as_json: AsJson = False) -> None:
    """Show every setting with its value and source. Flags of other commands override all of them.

    Invalid settings are reported, and the exit status is 2.
    """
    errors: list[SettingsError] = []
    sources = setting_sources(report=errors.append)
    found = {name: ("(set)" if name in SECRETS and value else value, where) for name, (value, where) in sources.items()}
    if as_json:
        rows = {name: {"value": value, "source": source} for name, (value, source) in found.items()}
        answer(json.dumps(rows, ensure_ascii=False) + "\n")
    else:
        lines = [
            (name, "not set" if value is None else json.dumps(value, ensure_ascii=False), where)
            for name, (value, where) in found.items()
        ]
        answer(table([("SETTING", "VALUE", "SOURCE"), *lines]))
        path = config_path()
        note(
            f"Settings file: {path}"
            if os.path.isfile(path)
            else f"There is no settings file; create {path} to store settings."
        )
    for error in errors:
        fail(str(error))
    if errors:
        raise typer.Exit(ExitCode.REFUSED)


def cache(
    what: Annotated[
        str | None, typer.Argument(metavar="[semantic]", help="Show the answers that the semantic cache stores.")
    ] = None,
    free: Annotated[
        list[str] | None,
        typer.Option("--free", metavar="WHAT", help="Clear kernels, kv, images, packed or documents; may be repeated."),
    ] = None,
    delete: Annotated[
        str | None, typer.Option(metavar="ID", help="With semantic: delete this stored answer, or all.")
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With semantic: find the threshold for a file of pairs."),
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="With --measure: the embedding model."),
    ] = None,
    rate: Annotated[
        float, typer.Option(metavar="X", min=0, max=1, help="With --measure: share of false hits allowed (0.01).")
    ] = 0.01,
    as_json: AsJson = False,
) -> None:
    """Show or clear caches. Clearing costs time only.

    Afterwards kernels are compiled again, prompts recomputed, weights packed again, and folders indexed again.
    """
    from localllm.stored import cleared, stored_places

    if what is not None or delete is not None or measure is not None:
        from localllm.cli.semantic import semantic_cache

        if what != "semantic" or free:
            raise RequestError("Write `localllm cache semantic`, with --delete ID or --measure FILE, or without.")
        semantic_cache(delete, measure, embedder, rate, as_json)
        return
    for name in free or ():
        note(f"{name}: freed {human_bytes(cleared(name))}.")
    if free:
        return
    settings = load_settings({})
    places = stored_places(settings, settings.packed_mib)
    if as_json:
        rows = [{"what": one.what, "bytes": one.bytes, "bound": one.bound, "path": str(one.path)} for one in places]
        answer(json.dumps(rows, ensure_ascii=False) + "\n")
        return
    rows_of_text = [(one.what, human_bytes(one.bytes), one.bound, str(one.path)) for one in places]
    answer(table([("WHAT", "SIZE", "LIMIT", "WHERE"), *rows_of_text]))


def doctor(as_json: AsJson = False) -> None:
    """Check this machine and give advice. Processor, memory, GPU, folders, settings, disk, models, network.

    Exit status: 2 if something will fail.
    """
    from localllm.doctor import State, examine

    checks = []
    for check in examine():
        checks.append(check)
        if not as_json:
            answer(f"[{MARKS[check.state]}] {check.what}: {check.found}\n")
            answer(textwrap.indent(f"{check.advice}\n", " " * 9) if check.advice else "")
    if as_json:
        answer(json.dumps([asdict(check) for check in checks], ensure_ascii=False) + "\n")
    if any(check.state is State.BAD for check in checks):
        raise typer.Exit(ExitCode.REFUSED)
