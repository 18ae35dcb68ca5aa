"""The record of a placed model, which plans, loads and the server's sums of memory read."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

from gpu_offload.options import LlamaOptions, Use
from localllm.errors import OutOfMemoryError
from localllm.settings import Settings

if TYPE_CHECKING:
    from models.needs import NativeNeeds

_DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class Placement:
    """Which backend computes a model, why, and which of its bytes lie where. Made by localllm.placement.backends."""

    backend: Literal["native", "llama", "remote"]  # "remote" is another server, of which only the reason is known
    reason: str
    # Main memory, then every GPU in llama.cpp's order. A draft model beside the model is part of each place's `other`.
    uses: tuple[Use, ...] = ()
    # The context, the types of keys and values, threads; with llama.cpp also how layers are split over devices.
    options: LlamaOptions = field(default_factory=LlamaOptions)
    layers: int = 0  # in all; the output layer is one
    measured: bool = False  # whether the sizes are what the backend reports, not estimates
    notes: tuple[str, ...] = ()  # what was chosen, for the user, one line each
    problem: str = ""  # why a load is refused, "" if it is not
    tokens: int = 0  # that the memory for keys and values holds
    states: int = 0  # bytes of that memory that a hybrid model's states take, independent of the number of tokens
    on_disk: int = 0  # bytes of packed weights that do not fit into memory and are read again when needed
    mapped: int = 0  # bytes of a loaded model's weights that are mapped from a file, which the system counts as free
    settings: Settings = field(default=_DEFAULTS, repr=False)  # those that were followed
    draft: "Placement | None" = None  # of the draft model beside it
    needs: "NativeNeeds | None" = field(default=None, compare=False, repr=False)  # of the native engine

    @property
    def name(self) -> str:
        """The backend's display name."""
        return "llama.cpp" if self.backend == "llama" else self.backend

    @property
    def why(self) -> str:
        """The reason and the notes on one line."""
        return "; ".join([self.reason, *self.notes])

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"

    @property
    def main_bytes(self) -> int:
        """Bytes of main memory, including all memory for keys and values."""
        return self.uses[0].needed

    @property
    def gpu_bytes(self) -> tuple[int, ...]:
        """Bytes on each GPU."""
        return tuple(use.needed for use in self.uses[1:])

    @property
    def device_bytes(self) -> int:
        """Bytes on all GPUs together."""
        return sum(self.gpu_bytes)

    @property
    def fits(self) -> bool:
        """Whether every place has enough memory, and the memory for keys and values holds a conversation."""
        return not self.problem and all(use.fits for use in self.uses)

    def beside(self, draft: "Placement") -> Self:
        """This placement with the draft model where it turned out to lie."""
        before = self.draft.uses if self.draft else ()
        uses = [
            replace(use, other=use.other + sum(one.needed for one in draft.uses[at : at + 1]) - had)
            for at, use in enumerate(self.uses)
            for had in [sum(one.needed for one in before[at : at + 1])]
        ]
        return replace(self, uses=tuple(uses), draft=draft)

    def checked(self) -> Self:
        """This placement. Raises OutOfMemoryError if a load of it is refused."""
        if self.problem:
            raise OutOfMemoryError(self.problem)
        return self

    def rows(self) -> list[tuple[str, ...]]:
        """The sizes as a table of strings in MiB, header row first."""
        head = ("place", "weights", "KV", "compute", "other", "needed", "reserve", "free")
        return [head, *(_row(use) for use in self.uses)]

    def sums(self) -> str:
        """The sizes in main memory as lines for an error message."""
        use = self.uses[0]
        rows = [
            ("available", use.available),
            ("weights", use.weights),
            ("buffers", use.compute),
            ("KV cache", use.kv),
            ("  states", self.states),
            ("draft", use.other),
            ("reserve", use.reserve),
            ("on disk", self.on_disk),
        ]
        needless = {"  states", "draft", "on disk"}
        return "\n".join(f"  {name:10}{_mib(size):>10} MiB" for name, size in rows if size or name not in needless)


def _row(use: Use) -> tuple[str, ...]:
    sizes = (use.weights, use.kv, use.compute, use.other, use.needed, use.reserve, use.available)
    return (use.place, *map(_mib, sizes))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"
