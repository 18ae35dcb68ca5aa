"""The engine's Runner on our own CPU kernels."""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.activations import SoftCap
from cpu_kernels.arguments import indices_of
from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.lora import Expand
from cpu_kernels.matmul import Product
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.recorded_step import RecordedStep
from cpu_kernels.records import TILE_WIDTHS
from cpu_kernels.threads import ThreadTeam
from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.image_rows import ImageRows, ImageSpans
from gguf_io.lora import Adapter
from gguf_io.runner_info import LoadProgress, RunnerInfo
from models.config import ModelConfig, read_config
from models.decoder_program import DecoderProgram, decoder_program
from models.kv_layout import MAX_ROWS
from models.kv_pages import PageStore, Sequence
from models.packed_file import PackedWeights
from models.self_drafts import SelfDrafts
from models.steps import Steps, usable_threads
from models.weights import padded

if TYPE_CHECKING:
    from models.vision.projector import NativeProjector

MAX_SEQUENCES = 1024
# Version of the KV layout; stored KV of another version is not used.
_KV_VERSION = "native-3"
_NO_TOKEN = 0
"""Stands for the rows of an image where layers have inputs of their own for each token, as in llama.cpp."""


class NativeRunner:
    """Sequences of tokens in, logits out; see localllm.engine.runner.Runner, whose contract this fulfils.

    A row's logits are bit-exact alone or in a batch, in one chunk or many, on any number of threads.
    """

    def __init__(
        self,
        file: ModelFile,
        *,
        kv_bytes: int,
        threads: int | None = None,
        context: int | None = None,
        kv_types: tuple[str, str] = ("f16", "f16"),
        progress: LoadProgress | None = None,
        ready: PackedWeights | None = None,
        drafts: bool | ModelFile = True,
        config: ModelConfig | None = None,
        adapters: Ordered[Adapter] = (),
    ) -> None:
        """Load and pack the weights and compile what they need. The file may be closed afterwards.

        kv_bytes: budget of the page pool. threads: None for all cores this process may use; capped at the processors
        it may use. context: the longest sequence that will be used, which some models' rotation depends on; None for
        the trained context. kv_types: how keys and values are stored, "f16", "q8_0" or "q4_0" each. ready: weights
        packed earlier. drafts: whether to load the file's drafting layer, if it has one, or another file with a draft
        head. config: the file's sizes, if they were read already. adapters: LoRA adapters for the model, which
        sequences select by number. Raises UnsupportedModelError or ModelFileError before anything large is allocated.
        """
        self.config = config = config or read_config(file)
        count = usable_threads(threads)
        program = decoder_program(file, config, kv_types, count, drafts, adapters)
        windows, types = program.windows, program.store.types
        self.store = PageStore(config, kv_bytes, types, windows)
        self.sequences: dict[int, Sequence] = {}
        self._latest: dict[int, tuple[int, int, int]] = {}  # by sequence, of the latest step: first row, start, stop
        self._next_handle = 0
        self.info = RunnerInfo(
            backend="native",
            vocab_size=config.vocabulary,
            max_context=config.context,
            max_rows=MAX_ROWS,
            max_sequences=MAX_SEQUENCES,
            page_size=PAGE_TOKENS,
            pages_total=self.store.total,
            kv_bytes_per_token=self.store.bytes_per_token,
            kv_layout=f"{_KV_VERSION}:{types[0]}:{types[1]}" + (f":window {windows.window}" if windows else ""),
            kv_files=file.states,
            adapter_files=tuple(one.file.states for one in adapters),
            can_draft=program.layer is not None,
            window_tokens=windows.kept if windows else 0,
            window_pages=self.store.window_share,
            stores_images=True,
        )
        self._most_rows = program.rows
        self.team = ThreadTeam(count)
        try:
            self._load(program, context or config.context, progress, ready)
        except BaseException:
            self.team.close()
            raise

    def _load(
        self, program: DecoderProgram, context: int, progress: LoadProgress | None, ready: PackedWeights | None
    ) -> None:
        """Load what the program reads, and give it the pages."""
        config, loader = self.config, program.loader
        if progress is not None:
            progress("loading weights", 0.0)
        self._ropes, self._inputs, self._logits_operations = program.ropes, program.recorder.inputs, program.logits
        self._ropes.context = context
        loader.load(self.team, progress, ready, self.store.moves_from(program.store))
        self._image_parts = 1 + config.images.layers if config.images.are_read else 0
        self.drafts: SelfDrafts | None = None
        if program.layer:
            self.drafts = SelfDrafts(program.layer)
            program.layer.start(self.team, progress)
        self.packed = loader.packed
        self.mapped_bytes = ready.bytes if ready else 0
        """Bytes of weights in mapped file pages, which the system counts as free memory."""
        self.projector: NativeProjector | None = None
        """The image encoder of the pictures for append_image; closed with the runner."""
        self.closing: list[Callable[[], None]] = []
        """Callbacks for `close`, called before the weights are released."""
        self.steps = Steps(loader.builder, self.team, config, program.fields, progress, program.adapters)
        states = program.recorder.features or program.recording.x
        self.states = states.values[:, : max(len(program.read), 1) * config.embedding]
        self._logits = aligned_zeros((0, self._logits_operations.width), np.float32)
        self._reserve_logits(1)

    def pages_free(self) -> int:
        """Number of free pages within the budget."""
        return self.store.free

    def page_holders(self) -> NDArray[np.int32]:
        """How many sequences hold each page that was ever allocated."""
        return self.store.holders()

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """Pages that appending this many tokens to the sequence would allocate, copies of shared pages included."""
        return self.store.needed(self.sequences[sequence], tokens)

    def create_sequence(self, adapters: tuple[tuple[int, float], ...] = ()) -> int:
        """Return the handle of a new, empty sequence. Raises ValueError for adapters that are not loaded."""
        if any(not 0 <= number < self.info.adapter_count for number, _ in adapters):
            raise ValueError(f"there are {self.info.adapter_count} adapters; {adapters} names others")
        return self._register(Sequence(adapters=adapters))

    def fork_sequence(self, source: int, length: int) -> int:
        """Return a new sequence that shares the first `length` tokens of `source`."""
        parent = self.sequences[source]
        if not 0 <= length <= parent.length:
            raise ValueError(f"cannot fork {length} tokens of a sequence of {parent.length}")
        return self._register(self.store.fork(parent, length))

    def truncate_sequence(self, sequence: int, length: int) -> None:
        """Forget all positions from `length` on."""
        target = self.sequences[sequence]
        if not 0 <= length <= target.length:
            raise ValueError(f"cannot truncate a sequence of {target.length} tokens to {length}")
        self.store.truncate(target, length)
        if self.drafts:
            self.drafts.truncate(sequence, length)
        first, start, stop = self._latest.get(sequence, (0, 0, 0))
        if start < length < stop:
            self.store.take_back(target, first + length - 1 - start)

    def free_sequence(self, sequence: int) -> None:
        """Release the handle, and the pages that no other sequence shares."""
        self._latest.pop(sequence, None)
        self.store.truncate(self.sequences.pop(sequence), 0)
        if self.drafts:
            self.drafts.free(sequence)

    def sequence_length(self, sequence: int) -> int:
        """Number of positions stored."""
        return self.sequences[sequence].length

    def reusable(self, sequence: int, length: int) -> int:
        """See localllm.engine.runner.KeepsWindows."""
        return self.store.reusable(self.sequences[sequence], length)

    def keep_window(self, sequence: int, length: int) -> None:
        """See localllm.engine.runner.KeepsWindows."""
        self.store.keep(self.sequences[sequence], length)

    def window_use(self) -> tuple[int, int]:
        """See localllm.engine.runner.KeepsWindows."""
        return self.store.window_use

    def run(
        self, tokens: Ordered[int], positions: Ordered[int], sequences: Ordered[int], wanted: Ordered[int]
    ) -> NDArray[np.float32]:
        """Append rows to sequences and return float32[len(wanted), vocab_size], valid until the next call.

        Raises ModelFileError, with nothing appended, if the program reads the model file and it was changed.
        """
        segments = self._check_rows(tokens, positions, sequences, wanted)
        self._latest.clear()
        most = self.store.delta.most_segments if self.store.delta else len(segments)
        if len(segments) <= most:
            return self._run(tokens, positions, segments, wanted)
        found = []
        for at in range(0, len(segments), most):
            some = segments[at : at + most]
            first, last = some[0][1], some[-1][1] + some[-1][2]
            rows = [row - first for row in wanted if first <= row < last]
            moved = [(handle, row - first, count) for handle, row, count in some]
            found.append(self._run(tokens[first:last], positions[first:last], moved, rows).copy())
        return np.concatenate(found)

    def _run(
        self,
        tokens: Ordered[int],
        positions: Ordered[int],
        segments: list[tuple[int, int, int]],
        wanted: Ordered[int],
    ) -> NDArray[np.float32]:
        """Run no more segments than the states allow at once. segments: (handle, first row, rows) each."""
        if self._inputs:
            self._inputs.fetch(tokens, self.steps.program)  # first, because it raises if the file was changed
        begun: list[tuple[Sequence, int, int]] = []
        places: list[int] = []
        if self.store.delta:
            self.store.delta.begin(len(segments))
        for handle, first, count in segments:
            sequence = self.sequences[handle]
            start, computed = sequence.length, self.store.computed(sequence)
            places += range(start, start + count)
            self.store.append(sequence, count)
            self.store.note_tokens(sequence, start, tokens[first : first + count])
            self._latest[handle] = first, start, sequence.length
            if computed < start:
                begun.append((sequence, computed, start))
        self._catch_up(begun)
        placed = [(self.sequences[one], at, n) for one, at, n in segments]
        logits = self._compute(tokens, places, placed, wanted, positions)
        if self.drafts:
            for handle, first, count in segments:
                rows = slice(first, first + count)
                self.drafts.note(handle, places[first], tokens[rows], self.states[rows])
        return logits

    def check_projector(self, path: Path) -> None:
        """Raise ModelFileError unless the projector, of this file, makes rows for this model."""
        width = self._image_parts * self.config.embedding
        if self.projector and self.projector.width != width:
            raise ModelFileError(
                f"{path}: this projector makes rows of {self.projector.width} numbers, and the model reads {width}. "
                "Choose the projector that belongs to the model."
            )

    def append_image(self, sequence: int, image: ImageRows, position: int) -> None:
        """See localllm.engine.runner.SeesImages. An image takes no part in drafts.

        Raises ValueError, before anything is changed, for rows of another width, for more that see each other
        than the projector's images may have, and if pages run out.
        """
        target, count = self.sequences[sequence], len(image.ids)
        width, parts = self.config.embedding, self._image_parts
        if not parts or image.embeddings.shape != (count, parts * width) or not count:
            raise ValueError(f"embeddings of shape {image.embeddings.shape} are not rows of {parts} x {width} numbers")
        if image.sees_all and count > self._most_rows:
            raise ValueError(f"{count} rows see each other, more than {self._most_rows}")
        if (image.grid is None) is bool(self.config.rope.sections):
            raise ValueError("the image has positions of another kind than this model's")
        start = target.length
        if self.store.needed(target, count) > self.store.free:
            raise ValueError(f"no pages left for {count} rows of an image")
        if self.store.reusable(target, start) < start:
            raise ValueError(f"a sequence of {start} tokens has lost the window before its end")
        self._latest.clear()
        for at in range(0, count, self._most_rows):
            stop = min(at + self._most_rows, count)
            if self.store.delta:
                self.store.delta.begin(1)
            computed = self.store.computed(target)
            self.store.append(target, stop - at)
            self.store.note_tokens(target, start + at, [_NO_TOKEN] * (stop - at))
            if computed < start + at:
                self._catch_up([(target, computed, start + at)])
            self._compute_image(target, start, image, position, at, stop)

    def know_images(self, sequence: int, images: ImageSpans | None) -> None:
        """See localllm.engine.runner.RecomputesImages."""
        self.sequences[sequence].images = images

    def _compute_image(
        self, sequence: Sequence, start: int, image: ImageRows, position: int, first: int, stop: int
    ) -> None:
        """Compute rows first..stop-1, no more than of a step, of an image in a sequence, whose pages exist.

        start, position: of the image in the sequence.
        """
        count, width = stop - first, self.config.embedding
        if self._inputs:
            self._inputs.fetch([_NO_TOKEN] * count, self.steps.program)
        rows = aligned_zeros((count, self._image_parts, padded(width)), np.float32)
        rows[:, :, :width] = image.embeddings[first:stop].reshape(count, self._image_parts, width)
        turns = image.positions(position, first, stop).reshape(-1, count)
        of_image = np.asarray(rows.reshape(count, -1), np.float32)
        self.steps.place_image(sequence, start + first, of_image, turns, self._ropes, image.sees_all)
        if self.store.delta:
            self.store.prepare([(sequence, start + first, count)])
        self.steps.run(count)
        if self.store.delta:
            self.store.delta.settle()

    def follow(self, wanted: Ordered[tuple[int, int, Ordered[float]]]) -> None:
        """See localllm.engine.runner.DraftsItself."""
        if self.drafts:
            self.drafts.follow(wanted)

    def draft(self, wanted: Ordered[tuple[int, int, Ordered[float]]]) -> list[list[tuple[int, float]]]:
        """See localllm.engine.runner.DraftsItself."""
        return self.drafts.draft(wanted) if self.drafts else [[] for _ in wanted]

    def _catch_up(self, begun: list[tuple[Sequence, int, int]]) -> None:
        """Compute rows computed..stop-1 of each (sequence, computed, stop) again, so that its state is there."""
        if not self.store.delta and not any(sequence.images for sequence, _, _ in begun):
            self._compute_again(begun)
            return
        for sequence, computed, stop in begun:  # one at a time: sequences may share recomputed states
            start = self.store.computed_of(sequence, stop) if self.store.delta else computed
            images = sequence.images or ImageSpans([], {})
            for first, end, at, image in images.parts(start, stop):
                if image is None:
                    self._compute_again([(sequence, first, end)], images.position(first) - first)
                    continue
                for row in range(first, end, self._most_rows):
                    rows = row - at, min(row + self._most_rows, end) - at
                    self._compute_image(sequence, at, image, images.position(at), *rows)
            if self.store.delta:
                self.store.computed_of(sequence, stop)  # its state is needed from now on

    def _compute_again(self, begun: list[tuple[Sequence, int, int]], moved: int = 0) -> None:
        """Recompute tokens start..stop-1 of each (sequence, start, stop), whose pages exist.

        moved: the difference between their positions and their places in the sequence.
        """
        waiting = [
            (sequence, start, min(stop, start + MAX_ROWS), stop) for sequence, start, stop in begun if start < stop
        ]
        while waiting:
            tokens: list[int] = []
            positions: list[int] = []
            segments, later = [], []
            for sequence, start, stop, end in waiting:
                if len(tokens) + stop - start > MAX_ROWS:
                    later.append((sequence, start, stop, end))
                    continue
                segments.append((sequence, len(tokens), stop - start))
                tokens += self.store.tokens(sequence, start, stop)
                positions += range(start, stop)
                if stop < end:
                    later.append((sequence, stop, min(end, stop + MAX_ROWS), end))
            turns = [position + moved for position in positions] if moved else None
            self._compute(tokens, positions, segments, (), turns)
            waiting = later

    def _compute(
        self,
        tokens: Ordered[int],
        places: Ordered[int],
        segments: list[tuple[Sequence, int, int]],
        wanted: Ordered[int],
        positions: Ordered[int] | None = None,
    ) -> NDArray[np.float32]:
        """Compute rows whose pages exist; segments are (sequence, first row, rows). Returns what `run` returns.

        positions: of the rows, if they differ from their places in the sequence.
        """
        self._reserve_logits(len(wanted))
        self.steps.place(tokens, places, segments, self._ropes, positions)
        if self.store.delta:
            self.store.prepare([(sequence, places[first], count) for sequence, first, count in segments])
        self.steps.run(len(tokens), wanted)
        if self.store.delta:
            self.store.delta.settle()
        return np.asarray(self._logits[: len(wanted), : self.config.vocabulary], np.float32)

    def last_step(self) -> RecordedStep:
        """The latest `run`, for measurements; valid until the next call that changes a sequence.

        Running it again changes the states of its sequences, which may then be used for measurements only.
        """
        if self.store.delta:
            self.store.delta.repeat()
        return self.steps.last_step()

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        """Return the keys and values of positions start..stop-1."""
        source = self.sequences[sequence]
        if not 0 <= start < stop <= source.length:
            raise ValueError(f"cannot export positions {start}..{stop} of a sequence of {source.length}")
        return self.store.read(source, start, stop)

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        """Append what export_kv returned; start must equal the sequence's length. Raises ValueError."""
        target = self.sequences[sequence]
        if start != target.length or stop <= start:
            raise ValueError(f"cannot import positions {start}..{stop} after {target.length}")
        if self.store.needed(target, stop - start) > self.store.free:
            raise ValueError(f"no pages left for {stop - start} tokens")
        self._latest.pop(sequence, None)
        if self.store.delta:
            self.store.delta.begin(1)  # a copied page takes a slot
        self.store.append(target, stop - start, stored=True)
        try:
            self.store.write(target, start, stop, data)
        except ValueError:
            self.store.truncate(target, start)
            raise

    def export_state(self, sequence: int, length: int) -> bytes:
        """See localllm.engine.runner.KeepsStates."""
        source = self.sequences[sequence]
        if not 0 < length <= source.length:
            raise ValueError(f"cannot export the state after {length} positions of a sequence of {source.length}")
        return self.store.read_state(source, length)

    def import_state(self, sequence: int, data: bytes | memoryview) -> None:
        """See localllm.engine.runner.KeepsStates."""
        self.store.write_state(self.sequences[sequence], data)

    def check_integrity(self, sequences: set[int]) -> None:
        """Raise RuntimeError unless exactly these sequences are alive and page references match them."""
        if set(self.sequences) != sequences:
            raise RuntimeError(f"sequences alive: {sorted(self.sequences)}, expected: {sorted(sequences)}")
        self.store.check_integrity(list(self.sequences.values()))
        if self.drafts:
            self.drafts.check_integrity()

    def close(self) -> None:
        """Stop the threads; memory is released with the last reference. Idempotent."""
        while self.closing:
            self.closing.pop()()
        if self.projector:
            self.projector.close()
        self.team.close()
        if self._inputs:
            self._inputs.close()
        self.sequences.clear()

    def _register(self, sequence: Sequence) -> int:
        if len(self.sequences) >= MAX_SEQUENCES:
            self.store.truncate(sequence, 0)
            raise ValueError(f"more than {MAX_SEQUENCES} sequences")
        self._next_handle += 1
        self.sequences[self._next_handle] = sequence
        return self._next_handle

    def _check_rows(
        self, tokens: Ordered[int], positions: Ordered[int], sequences: Ordered[int], wanted: Ordered[int]
    ) -> list[tuple[int, int, int]]:
        """Check a batch before anything changes; return its segments as (handle, first row, rows)."""
        rows = len(tokens)
        if not 1 <= rows <= MAX_ROWS or len(positions) != rows or len(sequences) != rows:
            raise ValueError(f"a step takes 1 to {MAX_ROWS} rows, each with a token, a position and a sequence")
        if min(tokens) < 0 or max(tokens) >= self.config.vocabulary:
            raise ValueError(f"a token is outside 0..{self.config.vocabulary - 1}")
        if (wanted and (wanted[0] < 0 or wanted[-1] >= rows)) or any(a >= b for a, b in pairwise(wanted)):
            raise ValueError("wanted rows must be indices of rows, ascending")
        segments: list[tuple[int, int, int]] = []
        first = 0
        for handle, same in groupby(sequences):
            count = len(list(same))
            segments.append((handle, first, count))
            first += count
        if len({handle for handle, _, _ in segments}) != len(segments):
            raise ValueError("rows of one sequence must be contiguous")
        needed = 0
        for handle, first, count in segments:
            sequence = self.sequences[handle]
            start = positions[first]
            late = start > sequence.length or (start < sequence.length and not self.config.rope.sections)
            if late or list(positions[first : first + count]) != list(range(start, start + count)):
                raise ValueError(f"positions must continue the sequence's length, {sequence.length}")
            if self.store.reusable(sequence, sequence.length) < sequence.length:
                raise ValueError(f"a sequence of {sequence.length} tokens has lost the window before its end")
            needed += self.store.needed(sequence, count)
        if needed > self.store.free:
            raise ValueError(f"{needed} KV pages are needed and {self.store.free} are free")
        return segments

    def _reserve_logits(self, rows: int) -> None:
        """Grow the logits buffer to hold this many rows, in whole tiles."""
        room = rows + TILE_WIDTHS[-1]
        if room <= len(self._logits):
            return
        operations = self._logits_operations
        self._logits = aligned_zeros((room, operations.width), np.float32)
        self.steps.program.set_argument(operations.product, indices_of(Product).y, self._logits.ctypes.data)
        if operations.change is not None:
            self.steps.program.set_argument(operations.change, indices_of(Expand).y, self._logits.ctypes.data)
        if operations.cap is not None:
            self.steps.program.set_argument(operations.cap, indices_of(SoftCap).y, self._logits.ctypes.data)
