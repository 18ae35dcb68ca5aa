"""localllm measure needle: whether a model finds a sentence in long contexts."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from localllm.errors import RequestError
from localllm.front.options import COMPUTING, AsJson, Model, numbers, setting_flags, with_flags
from localllm.front.pulling import obtain
from localllm.front.terminal import StatusLine, answer, note
from localllm.settings import load_settings
from localllm.text import table
from localllm.wings.lab.commands.flags import check_drawing

_SHORTEST, _LONGEST_BY_DEFAULT = 256, 8192
_ANSWER = 48  # tokens


@with_flags(COMPUTING, COMPUTING.keys() - {"ctx", "mmproj"}, after="trials")
def needle(
    given: typer.Context,
    model: Model,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,M", help="Tokens of context (512 and its doubles, up to 8192).")
    ] = None,
    depths: Annotated[str, typer.Option(metavar="N,M", help="Depths in per cent.")] = "0,25,50,75,100",
    trials: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Trials for each place.")] = 1,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the result to a new SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure whether a model finds a sentence in long contexts (needle in a haystack).

    The sentence holds a random number and stands at each depth of texts of each length, which are otherwise made of
    unrelated sentences. The model is asked for the number at temperature 0. Only a model that follows instructions can
    answer.
    """
    from localllm.answer.event import Answer
    from localllm.answer.request import AnswerRequest
    from localllm.front.models import FoundModel
    from localllm.wings.lab.needle import picture, search

    check_drawing(False, as_json, svg)
    at = numbers(depths, "--depths", int, 0, 100)
    wanted = None if lengths is None else numbers(lengths, "--lengths", int, _SHORTEST)
    flags = {**setting_flags(given), "ctx": max(wanted) if wanted else None, "disk_cache": False}
    found = FoundModel.of(obtain(model, load_settings(flags)), lambda own: load_settings(flags, model=own))
    with StatusLine() as status, (answering := found.load(model, status.share)).loaded as loaded:
        context = loaded.engine.context
        usual = [512 * 2**power for power in range(5) if 512 * 2**power <= min(context, _LONGEST_BY_DEFAULT)]
        tried = wanted or usual or [context]
        if max(tried) > context:
            raise RequestError(f"{model} has a context of {context} tokens; --lengths asks for {max(tried)}.")

        def ask(prompt: str) -> str:
            request = AnswerRequest(
                messages=[{"role": "user", "content": prompt}],
                continues_text=True,
                think=False,
                may_skip_thinking=True,
                sampling={"temperature": 0},
                max_tokens=_ANSWER,
                persist_from=context + 1,
            )
            told = Answer()
            for event in answering.prepare(request).submit():
                told.add(event)
            if told.last.error:
                raise RequestError(told.last.error)
            return told.content

        cells = []
        for cell in search(tried, at, trials, lambda text: len(loaded.tokenizer.encode(text)), ask):
            cells.append(cell)
            status.share("asking", len(cells) / (len(tried) * len(at)))
    if svg is not None:
        with svg.open("x", encoding="utf-8") as file:
            file.write(picture(f"Needle in a haystack: {model}", cells))
        note(f"Wrote {svg}.")
    if as_json:
        answer(json.dumps([asdict(cell) for cell in cells]) + "\n")
        return
    by_place = {(cell.length, cell.depth): f"{cell.found}/{cell.trials}" for cell in cells}
    rows = [(f"{depth} %", *(by_place[length, depth] for length in tried)) for depth in at]
    answer(table([("DEPTH", *(f"{length:,}" for length in tried)), *rows]))
