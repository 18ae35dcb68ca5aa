"""localllm perplexity, localllm quantize: measures the loss from quantising, and quantises."""

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.errors import RequestError
from localllm.files import read_text
from localllm.front.options import COMPUTING, AsJson, Model, setting_flags, with_flags
from localllm.front.pulling import obtain
from localllm.front.terminal import StatusLine, answer, note
from localllm.settings import load_settings
from localllm.text import human_bytes

if TYPE_CHECKING:
    from gguf_io import ModelFile
    from localllm.engine.runner import Runner
    from localllm.settings import Settings
    from localllm.wings.lab.quality.perplexity import Divergence, Perplexity

# KV cache tokens beyond one chunk, for rounding up to pages and the memory plan's minimum.
SPARE_TOKENS = 1024


@with_flags(COMPUTING, COMPUTING.keys() - {"ctx", "mmproj", "rpc"}, after="chunks")
def perplexity(
    given: typer.Context,
    model: Model,
    text: Annotated[Path, typer.Argument(help="A text file.", show_default=False)],
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Also measure the KL divergence from this model.")
    ] = None,
    ctx: Annotated[int, typer.Option(metavar="N", min=4, help="Tokens per chunk.")] = 512,
    chunks: Annotated[int | None, typer.Option(metavar="N", min=1, help="Measure the first N chunks only.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how well a model predicts a text. Lower is better; figures are comparable with llama.cpp's tool.

    --reference compares with the original model: the Kullback-Leibler divergence of the predictions, in nats.
    """
    from gguf_io import load_tokenizer, open_model
    from localllm.wings.lab.quality import perplexity as measure

    settings = load_settings(setting_flags(given))
    content = read_text(text, pipes=True)
    with ExitStack() as stack, StatusLine() as status:
        file = stack.enter_context(open_model(obtain(model, settings).path))
        tokenizer = load_tokenizer(file)
        tokens = tokenizer.encode(content)
        bos = tokenizer.bos_id if tokenizer.add_bos else None
        parts = measure.split_chunks(tokens, ctx, bos)[:chunks]
        runner = _runner(file, settings, status)
        stack.callback(runner.close)

        def progress(done: int, count: int) -> None:
            status.share("measuring", done / count)

        if reference is None:
            _write(measure.perplexity(runner, parts, progress), None, as_json)
            return
        other = stack.enter_context(open_model(obtain(reference, settings).path))
        if load_tokenizer(other).encode(content) != tokens:
            raise RequestError(f"{reference} and {model} tokenise the text differently, so they cannot be compared.")
        reference_runner = _runner(other, settings, status)
        stack.callback(reference_runner.close)
        _write(*measure.divergence(runner, reference_runner, parts, progress), as_json)


def _runner(file: "ModelFile", settings: "Settings", status: StatusLine) -> "Runner":
    """A runner with room for one chunk, so that two models fit side by side."""
    from localllm.placement.backends import open_runner

    return open_runner(file, settings, status.share, kv_tokens=(settings.ctx or 0) + SPARE_TOKENS)[0]


def _write(found: "Perplexity", divergence: "Divergence | None", as_json: bool) -> None:
    if as_json:
        answer(json.dumps(asdict(found) | {"divergence": divergence and asdict(divergence)}) + "\n")
        return
    answer(
        f"perplexity {found.value:.4f} ± {found.uncertainty:.4f} over {found.tokens} tokens in {found.chunks} chunks\n"
    )
    if divergence is not None:
        base = divergence.reference
        answer(
            f"reference  {base.value:.4f} ± {base.uncertainty:.4f}\n"
            f"KL divergence: mean {divergence.mean:.6f} ± {divergence.uncertainty:.6f}, "
            f"median {divergence.median:.6f}, 99 % below {divergence.percentile_99:.6f}, "
            f"largest {divergence.maximum:.6f} nats\n"
            f"same likeliest token: {divergence.same_top:.2%}\n"
        )


def quantize(
    source: Annotated[str, typer.Argument(help="Name, path or URL of an F16, BF16 or F32 model.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    kind: Annotated[str, typer.Option("--type", metavar="TYPE", help="Q8_0, Q4_K_M, F16 and others (Q8_0).")] = "Q8_0",
    threads: Annotated[int | None, typer.Option(metavar="N", help="Threads for llama.cpp (one per core).")] = None,
) -> None:
    """Write a model in fewer bits. Measure the loss with `localllm perplexity --reference`.

    localllm itself writes Q8_0, F16 and BF16; the other types need the extra `llama`.
    """
    from localllm.wings.lab.quality.quantize import quantize as quantize_model

    path = obtain(source, load_settings({})).path
    with StatusLine() as status:
        quantize_model(path, target, kind, status.share, threads)
    note(f"{target} has {human_bytes(target.stat().st_size)}.")
