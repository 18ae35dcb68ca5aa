"""localllm cache: what is stored on this machine, how much at most, and how it goes."""

import json
from typing import Annotated

import typer

from localllm.cli.options import AsJson, Debug
from localllm.cli.terminal import answer, note
from localllm.text import human_bytes


def cache(
    free: Annotated[
        list[str] | None, typer.Option("--free", metavar="WHAT", help="Empty kernels or kv; may be repeated.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what is stored, where, and what bounds it; free it.

    Only time is lost: kernels are compiled again, and kv holds prompts that are computed again.
    """
    from localllm.settings import load_settings
    from localllm.stored import emptied, stored_places
    from localllm.text import table

    for what in free or ():
        note(f"{what} is emptied, which frees {human_bytes(emptied(what))}.")
    if free:
        return
    places = stored_places(load_settings({}))
    if as_json:
        rows = [{"what": one.what, "bytes": one.bytes, "bound": one.bound, "path": str(one.path)} for one in places]
        answer(json.dumps(rows, ensure_ascii=False) + "\n")
        return
    rows_of_text = [(one.what, human_bytes(one.bytes), one.bound, str(one.path)) for one in places]
    answer(table([("WHAT", "SIZE", "BOUND", "WHERE"), *rows_of_text]))
