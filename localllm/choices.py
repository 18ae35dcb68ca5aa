"""Models to choose from, as `localllm list`, the chat's picker and the page show them: here, and to pull."""

from collections.abc import Iterable
from functools import partial

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile
from localllm.library.entry import LibraryModel
from localllm.library.listing import Listed, describe
from localllm.library.names import plain
from localllm.library.suggestions import Suggestion, ranked
from localllm.placement.backends import loaded_projector
from localllm.placement.memory import conversation_bytes
from localllm.speed.expected import expect_decode, expected_decode
from localllm.speed.kept import kept_limits


def described(models: Iterable[LibraryModel], threads: int | None, mmproj: str | None) -> list[Listed]:
    """What the headers of models say, with memory as a load with these settings counts it.

    See Listed; speeds need a measured machine.
    """
    speed = expect_decode(threads)

    def memory(model: LibraryModel, file: ModelFile, tokens: int) -> tuple[int | None, bool | None]:
        return conversation_bytes(file, tokens, loaded_projector(file, mmproj, model.projectors()))

    return [describe(model, speed=speed, memory=partial(memory, model)) for model in models]


def suggested(models: Iterable[LibraryModel], threads: int | None) -> list[tuple[Suggestion, float | None]]:
    """The suggestions that are not among the models, the best that fits first, each with its expected speed."""
    here = {plain(name) for model in models for name in model.names}
    kept = kept_limits(threads)
    return [
        (one, expected_decode(one.read, one.main_type, kept)[0] if kept else None)
        for one in ranked(available_memory())
        if plain(one.name) not in here
    ]
