"""Keys and values of sequences that rest, moved out of llama.cpp's cells while others are computed.

llama.cpp computes attention over all cells up to the last one in use, whoever they belong to. So what only resting
sequences hold leaves them when a prompt comes that does not use it, and is laid into cells again when it is wanted. It
goes to copies in main memory. They are made when nobody is computed for, so that a prompt need not wait for them, or
else when it comes, and they stay when their rows come back, which do not change. In the books the cells of what is away
stay its own, so that there is always room for it to come back. All is done in parts: others who are answered meanwhile
would wait for it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpu_offload.cells import CellBook
from gpu_offload.image_rows import PositionBook
from gpu_offload.sequences import Sequences
from gpu_offload.state_desk import State, StateDesk

PIECE_TOKENS = 256  # as long as the disk tier's segments, which are then taken from copies as they are
HEAD_TOKENS = 32  # what comes first is a piece of its own: a template's first words are in every chat
_SHARE = 2  # of all cells, one in so many may be copied
PART_BYTES = 2**27  # moved at once, in whole pieces: some 50 ms
PROMPT_ROWS = 16  # of one sequence at once; fewer may be a token and those speculated behind it
LEAST_TOKENS = 64  # moving fewer gains nothing: llama.cpp counts cells in 256s


def parked_tokens(cells: int) -> int:
    """How many tokens may be parked beside a context of so many cells."""
    return cells // _SHARE


@dataclass(frozen=True, slots=True)
class _Piece:
    """A copy of cells: rows from `start` on, at positions from `first` on, of every sequence that has the cells.

    cells are the books' numbers; they name the piece by its first. llama.cpp holds all of them or none.
    """

    cells: NDArray[np.int32]
    start: int
    first: int
    state: State

    @property
    def stop(self) -> int:
        return self.start + len(self.cells)


class Parking:
    """Which cells are copied, and which of them are away: of a sequence its last ones. llama.cpp has those before them.

    A cell is away for all of its sequences or for none. limit: most tokens copied at once; what is beyond it stays in
    llama.cpp's cells, as do rows before the end of an image whose positions have several dimensions. token_bytes: what
    a token's keys and values take.
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
        self._away = np.zeros(self._book.total, dtype=np.bool_)
        self._part = max(PART_BYTES // max(PIECE_TOKENS * token_bytes, 1), 1)  # pieces; states take nothing a token
        self._resting: set[int] = set()
        self._returning: set[int] = set()  # away in part, and never more of them, since somebody waits for them
        self._settled = True
        self.copied = 0  # tokens

    @property
    def away(self) -> int:
        """Tokens that llama.cpp's cells do not hold."""
        return int(np.count_nonzero(self._away))

    def rest(self, sequence: int) -> None:
        """Let a sequence be parked from now on, until something is appended to it."""
        if self.limit:
            self._returning.discard(sequence)
            self._resting.add(sequence)
            self._settled = False

    def awake(self, sequence: int) -> None:
        """Note a sequence that does not rest, though rows that it has may be away."""
        if self.in_cells(sequence) < self._book.length(sequence):
            self._returning.add(sequence)

    def copy(self) -> bool:
        """Copy a piece of what rests, which stays where it is; False where there is none, or no room."""
        if not self._resting:
            return False
        movable = self._movable()
        return bool(np.count_nonzero(movable) >= LEAST_TOKENS) and self._copy(self._uncopied(movable)[:1]) == 1

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
        self._away[cells] = False
        for name in touched[touched >= 0].tolist():
            piece = self._drop(name)
            kept = piece.cells[self._away[piece.cells]]
            if len(kept):
                state = self._desk.part(piece.state, piece.first, piece.first, piece.first + len(kept))
                self._keep(replace(piece, cells=kept, state=state))

    def in_cells(self, sequence: int) -> int:
        """How many leading rows of a sequence lie in llama.cpp's cells."""
        away = self._away[self._book.cells(sequence)]
        return int(away.argmax()) if away.any() else len(away)

    def states(self, sequence: int, start: int, stop: int) -> list[State]:
        """What llama.cpp saves of rows start..stop-1, in pieces, from wherever they lie."""
        cells = self._book.cells(sequence)[start:stop]
        if copies := self._copies(cells):
            return copies
        end = min(self.in_cells(sequence), stop)
        states = []
        for first, last in self._desk.cut(start, end) if start < end else ():
            whole = last == self._book.length(sequence)  # the only range that recurrent models copy
            behind = -1 if whole else self._positions.at(sequence, last)
            states.append(self._desk.take(sequence, self._positions.at(sequence, first), behind))
        for piece, row in self._parked(sequence):
            begin, behind = max(start, piece.start), min(stop, row)
            if (begin, behind) == (piece.start, piece.stop):
                states.append(piece.state)
            elif begin < behind:
                offset = piece.first - piece.start
                states.append(self._desk.part(piece.state, piece.first, begin + offset, behind + offset))
        return states

    def check_integrity(self) -> None:
        """Raise RuntimeError where the pieces and llama.cpp's cells are not what the books say."""
        pieces = sum(len(piece.cells) for piece in self._pieces.values())
        if not self.copied == pieces == np.count_nonzero(self._piece_of >= 0) <= self.limit:
            raise RuntimeError(f"{self.copied} tokens are copied, but pieces hold {pieces}")
        for name, piece in self._pieces.items():
            away = self._away[piece.cells]
            if (self._piece_of[piece.cells] != name).any() or away.any() != away.all():
                raise RuntimeError(f"the piece of cell {name} is away in part, or another's")
        for sequence in self._book:
            length = self._book.length(sequence)
            here = self.in_cells(sequence)
            last = self._sequences.last(sequence)
            rows = [here, *(row for _, row in self._parked(sequence))][-1]
            if here < length and sequence not in self._resting | self._returning:
                raise RuntimeError(f"sequence {sequence} is parked, though it neither rests nor returns")
            if here > self._positions.text_after(sequence) and last != self._positions.at(sequence, here) - 1:
                raise RuntimeError(f"sequence {sequence} has {here} rows in cells, up to position {last}")
            if rows != length:
                raise RuntimeError(f"sequence {sequence} has {length} rows, {rows} of them here or parked")

    def _bring_back(self, sequence: int, most: int) -> bool:
        """Lay pieces of a sequence into cells, in place of what nobody uses; return whether all of it is there."""
        cells = self._book.cells(sequence)
        while (row := self.in_cells(sequence)) < len(cells):
            if not most:
                return False
            piece = self._pieces[int(self._piece_of[cells[row]])]
            self._desk.put(piece.state, piece.first, self._holders(piece))
            self._away[piece.cells] = False
            self._settled = False  # others who only rest have it, too
            most -= 1
        return True

    def _make_way(self, most: int) -> int:
        """Have what only resting sequences hold leave, copying so many pieces of it at most; return how many."""
        if self._settled:
            return 0
        movable = self._movable()
        if np.count_nonzero(movable) < LEAST_TOKENS:
            self._settled = True
            return 0
        found = self._uncopied(movable)
        part = found[:most]
        if self.copied + sum(stop - start for _, start, stop in part) > self.limit:
            self._forget_copies(movable)
        copied = self._copy(part)
        self._send_away(movable)
        self._settled = len(found) == len(part) or copied < len(part)
        return copied

    def _copy(self, part: Iterable[tuple[int, int, int]]) -> int:
        """Copy rows start..stop-1 of sequences while there is room; return how many there was room for."""
        count = 0
        for sequence, start, stop in part:
            if self.copied + stop - start > self.limit:
                break
            first = self._positions.at(sequence, start)
            cells = self._book.cells(sequence)[start:stop].copy()
            self._keep(_Piece(cells, start, first, self._desk.take(sequence, first, first + stop - start)))
            count += 1
        return count

    def _send_away(self, movable: NDArray[np.bool_]) -> None:
        """Take whole pieces out of llama.cpp's cells: of each sequence the last ones, behind all that must stay."""
        stays = ~movable
        for sequence in self._resting:
            cells = self._book.cells(sequence)
            uncopied = np.flatnonzero(self._piece_of[cells] < 0)
            stays[cells[: uncopied[-1] + 1 if len(uncopied) else 0]] = True
        whole = self._piece_of >= 0
        whole &= ~np.isin(self._piece_of, self._piece_of[stays])
        self._away |= whole
        for sequence in self._resting:
            self._sequences.remove(sequence, self._positions.at(sequence, self.in_cells(sequence)))

    def _forget_copies(self, movable: NDArray[np.bool_]) -> None:
        """Make room: what is computed with, and stays in its cells, has less need of a copy than what rests."""
        for name, piece in [*self._pieces.items()]:
            if not (self._away | movable)[piece.cells].any():
                self._drop(name)

    def _keep(self, piece: _Piece) -> None:
        self._pieces[int(piece.cells[0])] = piece
        self._piece_of[piece.cells] = piece.cells[0]
        self.copied += len(piece.cells)

    def _drop(self, name: int) -> _Piece:
        """Forget a copy. Who lets go of cells has taken their piece's name from them before."""
        piece = self._pieces.pop(name)
        self._piece_of[piece.cells[self._piece_of[piece.cells] == name]] = -1
        self.copied -= len(piece.cells)
        return piece

    def _movable(self) -> NDArray[np.bool_]:
        """Which cells llama.cpp holds for resting sequences alone: bool[cells]."""
        movable = np.zeros(self._book.total, dtype=np.bool_)
        for sequence in self._resting:
            movable[self._book.cells(sequence)] = True
        movable &= ~self._away
        for sequence in self._book:
            stop = self._positions.text_after(sequence) if sequence in self._resting else None
            movable[self._book.cells(sequence)[:stop]] = False
        return movable

    def _uncopied(self, movable: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
        """Rows start..stop-1 of a sequence that may be copied together, a piece each, the last rows first.

        In this order a sequence's last rows can leave while others have to wait.
        """
        wanted = movable & (self._piece_of < 0)
        found: dict[int, tuple[int, int, int]] = {}
        for sequence in self._resting:
            cells = self._book.cells(sequence)
            rows = np.flatnonzero(np.diff(wanted[cells], prepend=False, append=False)).tolist()
            for start, stop in zip(rows[::2], rows[1::2], strict=True):
                sharers = self._book.sharers(cells[start:stop])
                forks = (np.flatnonzero(np.diff(sharers)) + start + 1).tolist()
                cuts = {row for piece in self._desk.cut(start, stop, PIECE_TOKENS) for row in piece}
                head = (HEAD_TOKENS,) if start < HEAD_TOKENS < stop else ()
                for first, last in pairwise(sorted(cuts.union(forks, head))):
                    found[int(cells[first])] = sequence, first, last
        return sorted(found.values(), key=lambda piece: piece[1], reverse=True)

    def _parked(self, sequence: int) -> Iterator[tuple[_Piece, int]]:
        """The pieces of a sequence that are away, in order, each with the row behind what the sequence has of it."""
        cells = self._book.cells(sequence)
        row = self.in_cells(sequence)
        while row < len(cells):
            piece = self._pieces[int(self._piece_of[cells[row]])]
            row = piece.start + self._shared(piece, sequence)
            yield piece, row

    def _copies(self, cells: NDArray[np.int32]) -> list[State]:
        """The copies that hold just these cells, in order; none where some have no copy, or share it with others."""
        states, row = [], 0
        while row < len(cells):
            piece = self._pieces.get(int(cells[row]))
            if piece is None or not np.array_equal(piece.cells, cells[row : row + len(piece.cells)]):
                return []
            states.append(piece.state)
            row += len(piece.cells)
        return states

    def _holders(self, piece: _Piece) -> Iterator[tuple[int, int]]:
        """The sequences that have a piece's cells, each with the position where its part of them ends."""
        for sequence in self._book:
            if count := self._shared(piece, sequence):
                yield sequence, piece.first + count

    def _shared(self, piece: _Piece, sequence: int) -> int:
        """How many of a piece's cells a sequence has: the first ones."""
        cells = self._book.cells(sequence)[piece.start : piece.stop]
        return int(np.count_nonzero(cells == piece.cells[: len(cells)]))
