"""Keys and values of sequences that rest, moved out of llama.cpp's cells while others are computed.

llama.cpp computes attention over all cells up to the last one in use, whoever they belong to. So what only resting
sequences hold is saved in main memory when a prompt comes that does not use it, and laid into cells again when it is
wanted. In the books its cells stay its own, so that there is always room for it to come back. Both are done in parts:
others who are answered meanwhile would wait for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpu_offload.cells import CellBook
from gpu_offload.image_rows import PositionBook
from gpu_offload.sequences import Sequences
from gpu_offload.state_desk import State, StateDesk

PIECE_TOKENS = 256  # as long as the disk tier's segments, which are then taken as they are
_SHARE = 2  # of all cells, one in so many may be parked
PART_BYTES = 2**27  # moved at once, in whole pieces: some 50 ms
PROMPT_ROWS = 16  # of one sequence at once; fewer may be a token and those speculated behind it
LEAST_TOKENS = 64  # moving fewer gains nothing: llama.cpp counts cells in 256s


def parked_tokens(cells: int) -> int:
    """How many tokens may be parked beside a context of so many cells."""
    return cells // _SHARE


@dataclass(frozen=True, slots=True)
class _Piece:
    """What some cells held: rows from `start` on, at positions from `first` on, of every sequence that has the cells.

    cells are the books' numbers; they name the piece by its first.
    """

    cells: NDArray[np.int32]
    start: int
    first: int
    state: State

    @property
    def stop(self) -> int:
        return self.start + len(self.cells)


class Parking:
    """Which cells are parked. Of a sequence they are its last ones; llama.cpp holds the rows before them.

    A cell is parked for all of its sequences or for none. limit: most tokens parked at once; what is beyond it stays
    in llama.cpp's cells, as do rows before the end of an image whose positions have several dimensions. token_bytes:
    what a token's keys and values take.
    """

    def __init__(
        self,
        sequences: Sequences,
        books: tuple[CellBook, PositionBook],
        desk: StateDesk,
        limit: int,
        token_bytes: int,
    ) -> None:
        self._sequences = sequences
        self._book, self._positions = books
        self._desk = desk
        self.limit = limit
        self._pieces: dict[int, _Piece] = {}
        self._piece_of = np.full(self._book.total, -1, dtype=np.int32)
        self._part = max(PART_BYTES // max(PIECE_TOKENS * token_bytes, 1), 1)  # pieces; states take nothing a token
        self._resting: set[int] = set()
        self._returning: set[int] = set()  # parked in part, and never more of them, since somebody waits for them
        self._settled = True
        self.tokens = 0

    def rest(self, sequence: int) -> None:
        """Let a sequence be parked from now on, until something is appended to it."""
        if self.limit:
            self._returning.discard(sequence)
            self._resting.add(sequence)
            self._settled = False

    def awake(self, sequence: int) -> None:
        """Note a sequence that does not rest, though rows that it has may be parked."""
        if self.in_cells(sequence) < self._book.length(sequence):
            self._returning.add(sequence)

    def prepare(self, sequence: int, rows: int) -> bool:
        """Do a part of what is due before rows are appended to a sequence; False while there is more.

        It is laid into cells again; where the rows are a prompt's, what does not serve it is parked.
        """
        if sequence in self._resting:
            self._resting.remove(sequence)
            self.awake(sequence)
        left = self._part
        if sequence in self._returning:
            left -= self._make_way(left)
            if not self._bring_back(sequence, left):
                return False
            self._returning.remove(sequence)
        if rows >= PROMPT_ROWS:
            self._make_way(left)
            return self._settled
        return True

    def let_go(self, sequence: int, cells: NDArray[np.int32]) -> None:
        """Forget what nobody holds any more after a sequence was cut or freed: these cells of the books."""
        self._settled = not self._resting
        if sequence not in self._book:
            self._resting.discard(sequence)
            self._returning.discard(sequence)
        touched = np.unique(self._piece_of[cells])
        self._piece_of[cells] = -1
        for name in touched[touched >= 0].tolist():
            piece = self._pieces.pop(name)
            kept = piece.cells[self._piece_of[piece.cells] == name]
            self.tokens -= len(piece.cells) - len(kept)
            if len(kept):
                state = self._desk.part(piece.state, piece.first, piece.first, piece.first + len(kept))
                self._pieces[name] = replace(piece, cells=kept, state=state)

    def in_cells(self, sequence: int) -> int:
        """How many leading rows of a sequence lie in llama.cpp's cells."""
        parked = self._piece_of[self._book.cells(sequence)] >= 0
        return int(parked.argmax()) if parked.any() else len(parked)

    def states(self, sequence: int, start: int, stop: int) -> list[State]:
        """What llama.cpp saves of rows start..stop-1, in pieces, from wherever they lie."""
        end = min(self.in_cells(sequence), stop)
        states = []
        for first, last in self._desk.cut(start, end) if start < end else ():
            whole = last == self._book.length(sequence)  # the only range that recurrent models copy
            behind = -1 if whole else self._positions.at(sequence, last)
            states.append(self._desk.take(sequence, self._positions.at(sequence, first), behind))
        for piece in self._parked(sequence):
            begin, behind = max(start, piece.start), min(stop, piece.stop)
            if (begin, behind) == (piece.start, piece.stop):
                states.append(piece.state)
            elif begin < behind:
                offset = piece.first - piece.start
                states.append(self._desk.part(piece.state, piece.first, begin + offset, behind + offset))
        return states

    def check_integrity(self) -> None:
        """Raise RuntimeError where the pieces and llama.cpp's cells are not what the books say."""
        parked = sum(len(piece.cells) for piece in self._pieces.values())
        if not self.tokens == parked == np.count_nonzero(self._piece_of >= 0) <= self.limit:
            raise RuntimeError(f"{self.tokens} tokens are parked, but pieces hold {parked}")
        for sequence in self._book:
            length = self._book.length(sequence)
            here = self.in_cells(sequence)
            last = self._sequences.last(sequence)
            rows = here + sum(len(piece.cells) for piece in self._parked(sequence))
            if here < length and sequence not in self._resting | self._returning:
                raise RuntimeError(f"sequence {sequence} is parked, though it neither rests nor returns")
            if here > self._positions.text_after(sequence) and last != self._positions.at(sequence, here) - 1:
                raise RuntimeError(f"sequence {sequence} has {here} rows in cells, up to position {last}")
            if not length <= rows < length + PIECE_TOKENS:
                raise RuntimeError(f"sequence {sequence} has {length} rows, {rows} of them here or parked")

    def _bring_back(self, sequence: int, most: int) -> bool:
        """Lay pieces of a sequence into cells, in place of what nobody uses; return whether all of it is there."""
        cells = self._book.cells(sequence)
        while (row := self.in_cells(sequence)) < len(cells):
            if not most:
                return False
            piece = self._pieces[int(self._piece_of[cells[row]])]
            self._desk.put(piece.state, piece.first, self._holders(piece))
            del self._pieces[int(piece.cells[0])]
            self._piece_of[piece.cells] = -1
            self.tokens -= len(piece.cells)
            self._settled = False  # others who only rest have it, too
            most -= 1
        return True

    def _make_way(self, most: int) -> int:
        """Park what only resting sequences hold, so many pieces of it at most; return how many."""
        if self._settled:
            return 0
        found = self._parkable()
        room = self.limit - self.tokens
        if sum(stop - start for _, start, stop in found) < LEAST_TOKENS:
            found = []
        part = found[:most]
        moved = 0
        try:
            for sequence, start, stop in part:
                room -= stop - start
                if room < 0:
                    break
                self._park(sequence, start, stop)
                moved += 1
        finally:
            for sequence in self._resting:
                self._sequences.remove(sequence, self._positions.at(sequence, self.in_cells(sequence)))
        self._settled = len(found) == len(part) or moved < len(part)
        return moved

    def _park(self, sequence: int, start: int, stop: int) -> None:
        """Save a piece; llama.cpp's cells are as before."""
        first = self._positions.at(sequence, start)
        cells = self._book.cells(sequence)[start:stop].copy()
        state = self._desk.take(sequence, first, first + stop - start)
        self._pieces[int(cells[0])] = _Piece(cells, start, first, state)
        self._piece_of[cells] = cells[0]
        self.tokens += stop - start

    def _parkable(self) -> list[tuple[int, int, int]]:
        """Rows start..stop-1 of a sequence that may be parked together, a piece each, the last rows first.

        In this order a sequence never has parked rows before others that are not.
        """
        used = self._piece_of >= 0
        for sequence in self._book:
            stop = self._positions.text_after(sequence) if sequence in self._resting else None
            used[self._book.cells(sequence)[:stop]] = True
        found: dict[int, tuple[int, int, int]] = {}
        for sequence in self._resting:
            cells = self._book.cells(sequence)
            free = np.flatnonzero(~used[cells])
            if not len(free):
                continue
            start, stop = int(free[0]), int(free[-1]) + 1
            sharers = self._book.sharers(cells[start:stop])
            forks = (np.flatnonzero(np.diff(sharers)) + start + 1).tolist()
            cuts = {row for piece in self._desk.cut(start, stop, PIECE_TOKENS) for row in piece}
            for first, last in pairwise(sorted(cuts.union(forks))):
                found[int(cells[first])] = sequence, first, last
        return sorted(found.values(), key=lambda piece: piece[1], reverse=True)

    def _parked(self, sequence: int) -> Iterator[_Piece]:
        """The pieces of a sequence in order. The last may be longer than it."""
        cells = self._book.cells(sequence)
        row = self.in_cells(sequence)
        while row < len(cells):
            piece = self._pieces[int(self._piece_of[cells[row]])]
            yield piece
            row += len(piece.cells)

    def _holders(self, piece: _Piece) -> Iterator[tuple[int, int]]:
        """The sequences that have a piece's cells, each with the position where its part of them ends."""
        for sequence in self._book:
            cells = self._book.cells(sequence)[piece.start : piece.start + len(piece.cells)]
            if len(cells) and cells[0] == piece.cells[0]:
                yield sequence, piece.first + len(cells)
