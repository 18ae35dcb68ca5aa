"""What one step computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from localllm.engine.generation import Generation
from localllm.engine.runner import ImageRows


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The rows of one generation: `count` pending tokens, then drafts; or those of an image, which are no tokens."""

    generation: Generation
    count: int
    drafts: Sequence[int] = ()
    image: ImageRows | None = None

    def __len__(self) -> int:
        return self.count + len(self.drafts)


@dataclass(slots=True)
class Plan:
    """A batch for Runner.run, in the order in which rows were added. Parts that are images are not among its rows.

    logits: the rows of run's result that belong to each part: its last pending token's and its drafts', or none while
    its prompt is unfinished. pages: what all parts take. again: this pass changed what the next can plan, by reading KV
    from the disk or by preempting, so that another is due even if no row was planned. patient: it may take long, if it
    is given up as soon as a request comes or is cancelled. decoded and drafted: rows of answers, and of drafts behind
    them. decodes: all parts are a pending token each. images: some part is one.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    parts: list[PlannedRows] = field(default_factory=list)
    logits: list[slice] = field(default_factory=list)
    pages: int = 0
    decoded: int = 0
    drafted: int = 0
    decodes: bool = True
    images: bool = False
    again: bool = False
    patient: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, part: PlannedRows, pages: int) -> None:
        """Add rows of a generation that has a runner's sequence, which take this many pages; one part a generation."""
        sequence, start = part.generation.sequence, part.generation.sequence.computed
        assert sequence.handle is not None
        self.pages += pages
        self.parts.append(part)
        if part.image is not None:
            self.images = True
            self.logits.append(slice(0, 0))
            return
        self.decoded += part.count if part.generation.generated else 0
        self.drafted += len(part.drafts)
        self.decodes = self.decodes and part.count == 1
        rows = [*sequence.tokens[start : start + part.count], *part.drafts]
        self.tokens += rows
        self.positions += range(start, start + len(rows))
        self.sequences += [sequence.handle] * len(rows)
        wanted = 1 + len(part.drafts) if part.count == sequence.pending else 0
        self.logits.append(slice(len(self.wanted), len(self.wanted) + wanted))
        self.wanted += range(len(self.tokens) - wanted, len(self.tokens))


def fair_shares(wants: Sequence[int], budget: int) -> list[int]:
    """Share a budget of rows evenly; what one does not need goes to the others."""
    shares = [0] * len(wants)
    for served, index in enumerate(sorted(range(len(wants)), key=wants.__getitem__)):
        shares[index] = min(wants[index], budget // (len(wants) - served))
        budget -= shares[index]
    return shares


class ChunkSize:
    """How many rows a step may have so that it takes about TARGET_S; learned from the steps' own times.

    A prompt that is alone may take ALONE_S: only cancelling it, or a new request, waits for the step, and long steps
    read the weights less often. Neither may wait longer than a quarter of a second, unless the step can be given up for
    them: then its work is lost, so that it may take PATIENT_S.
    """

    TARGET_S = 0.15
    ALONE_S = 0.22
    PATIENT_S = 3.0
    SMALLEST = 16
    LEAST_PATIENT = 128
    WHOLE_TILES = 64  # rows whose attention llama.cpp computes together; fewer cost as much as all behind a long prefix

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._rows_per_s = 0.0

    @property
    def rows(self) -> int:
        """Rows of the next step."""
        return self._rows_in(self.TARGET_S)

    @property
    def rows_alone(self) -> int:
        """Rows of the next step where there is no other request."""
        return self._rows_in(self.ALONE_S)

    def rows_patient(self, ahead: int) -> int:
        """Rows of the next step where there is no other request and it can be given up; ahead: rows still to compute.

        They are shared out evenly: a step of the few that are left over would take as long as one of many.
        """
        most = max(self._rows_in(self.PATIENT_S) // self.WHOLE_TILES * self.WHOLE_TILES, self.LEAST_PATIENT)
        share = -(-ahead // max(-(-ahead // most), 1))
        return min(-(-share // self.WHOLE_TILES) * self.WHOLE_TILES, most)

    def _rows_in(self, seconds: float) -> int:
        return min(max(int(self._rows_per_s * seconds), self.SMALLEST), self._largest)

    def seconds(self, rows: int) -> float:
        """How long computing this many rows should take; 0 until anything was measured."""
        return rows / self._rows_per_s if self._rows_per_s else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step. Small ones tell little: their time is that of reading the weights."""
        if rows >= self.SMALLEST:
            measured = rows / max(seconds, 1e-6)
            self._rows_per_s = (self._rows_per_s + measured) / 2 if self._rows_per_s else measured
