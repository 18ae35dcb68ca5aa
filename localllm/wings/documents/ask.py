"""localllm ask: answers a question from the documents of a folder."""

from pathlib import Path
from typing import Annotated

import typer

from localllm.errors import RequestError
from localllm.front.options import COMPUTING, AsJson, Remote, UsualModel, setting_flags, with_flags


@with_flags(COMPUTING, ("ctx", "threads", "backend", "gpu_layers"), after="temperature")
def ask(  # noqa: PLR0913, PLR0917 - one parameter for each flag
    given: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder with the documents.", show_default=False)],
    prompt: Annotated[str | None, typer.Argument(metavar="QUESTION", help="The question.")] = None,
    model: UsualModel = None,
    index_only: Annotated[bool, typer.Option("--index", help="Only index the folder, including embeddings.")] = False,
    embeddings: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Embedding model, or none for word search only (one on this machine)."),
    ] = None,
    excerpts: Annotated[
        int, typer.Option(metavar="N", min=1, max=64, help="Excerpts to use (8).", show_default=False)
    ] = 8,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Stop after N tokens.")] = None,
    temperature: Annotated[
        float, typer.Option(metavar="X", help="Sampling temperature; 0 quotes most faithfully (0).", show_default=False)
    ] = 0.0,
    remote: Remote = None,
    as_json: AsJson = False,
) -> None:
    """Answer a question from a folder's documents. Every quotation comes with file and line.

    Reads Markdown, text, code and HTML; PDF and DOCX with the extra `documents`. Models that read pictures are shown
    pages without text. Only changed files are indexed again; the index is stored in localllm's data folder. Quotations
    are checked word for word before they are shown; those that are not found are marked.
    """
    if prompt is None and not index_only:
        raise RequestError('No question. Try: localllm ask FOLDER "QUESTION". --index alone only indexes.')
    from localllm.wings.documents.asking import ask_folder

    ask_folder(
        folder,
        prompt,
        model,
        setting_flags(given),
        index_only=index_only,
        embeddings=embeddings,
        excerpts=excerpts,
        as_json=as_json,
    )
