"""localllm create: creates a model from a Modelfile, or from a folder of safetensors."""

from pathlib import Path
from typing import Annotated

import typer


def create(
    name: Annotated[str, typer.Argument(help="The new model's name.", show_default=False)],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="The Modelfile; by default ./Modelfile.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help="A folder of safetensors, or any model; replaces FROM."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--quantize", "-q", metavar="TYPE", help="Quantise to this type: Q8_0, Q4_K_M, ...")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="PATH", help="Add a LoRA adapter: a GGUF file or PEFT's folder; repeatable."),
    ] = None,
) -> None:
    """Create a model from another one. With your own system text, parameters, template, messages, adapters.

    FROM takes a name, a path or a URL; a missing model is pulled. Weights are not copied. FROM and --from also take a
    folder of safetensors with config.json and tokenizer.json, as on Hugging Face, and convert it to a GGUF file in the
    store. With --from no Modelfile is needed.
    """
    from localllm.wings.importing.creating import create_model

    create_model(name, file, source, kind, adapter or ())
