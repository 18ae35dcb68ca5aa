"""localllm detect: whether a text carries the watermark of a key."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from localllm.errors import RequestError
from localllm.files import read_text
from localllm.front.options import COMPUTING, AsJson, UsualModel, setting_flags, with_flags
from localllm.front.pulling import obtain
from localllm.front.terminal import StatusLine, answer
from localllm.settings import load_settings


@with_flags(COMPUTING, ("threads", "backend", "gpu_layers"), after="model")
def detect(
    given: typer.Context,
    text: Annotated[Path, typer.Argument(metavar="FILE", help="A text file.", show_default=False)],
    watermark_key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="The key (LOCALLLM_WATERMARK_KEY).")
    ] = None,
    watermark_delta: Annotated[
        float | None, typer.Option("--delta", metavar="X", help="Added to logits of marked tokens (2).")
    ] = None,
    watermark_gamma: Annotated[
        float | None, typer.Option("--gamma", metavar="X", help="The share of marked tokens (0.25).")
    ] = None,
    model: UsualModel = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether a text was generated with a watermark's key.

    The model reads the text, because tokens that it could not choose freely say little. p is the probability that a
    text without this watermark looks as marked: below 0.01 the text is called marked. Some 200 tokens are enough,
    unless they were edited.
    """
    from gguf_io import load_tokenizer, open_model
    from localllm.front.models import usual_model
    from localllm.placement.backends import open_runner
    from localllm.wings.lab.quality import watermark

    settings = load_settings(setting_flags(given))
    if not settings.watermark_key:
        raise RequestError("Which key? Pass --key KEY or set LOCALLLM_WATERMARK_KEY.")
    content = read_text(text, pipes=True)
    mark = (settings.watermark_key, settings.watermark_delta, settings.watermark_gamma)
    with open_model(obtain(model or usual_model(settings.remote), settings).path) as file, StatusLine() as status:
        tokenizer = load_tokenizer(file)
        runner = open_runner(file, settings, status.share, kv_tokens=2 * watermark.CONTEXT)[0]
        try:
            found = watermark.detect(
                runner,
                tokenizer.encode(content),
                tokenizer.bos_id if tokenizer.add_bos else None,
                mark,
                lambda done, count: status.share("reading", done / count),
            )
        finally:
            runner.close()
    if as_json:
        answer(json.dumps(asdict(found)) + "\n")
        return
    said = {
        True: "Marked with this key",
        False: "No watermark of this key found",
        None: f"Too short to tell: at least {watermark.FEWEST} different pairs of tokens are needed",
    }[found.marked]
    answer(
        f"{said} (z {found.z:.2f}, p {found.p:.2g}).\n"
        f"{found.tokens} tokens, {found.pairs} different pairs of neighbours. The second token of {found.green} is a "
        f"marked one; in other texts of about {found.gamma * found.pairs:.0f}.\n"
    )
