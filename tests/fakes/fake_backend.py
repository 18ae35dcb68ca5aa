"""A chat backend without a model: answers are scripted, and arrive when the test lets them."""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from gguf_io.media import PictureView
from gguf_io.runner_info import LoadProgress
from localllm.answer.event import AnswerEvent, AnswerPart, PartKind
from localllm.answer.request import AnswerRequest
from localllm.engine.inspection import EngineSnapshot
from localllm.engine.request import Counts, FinishReason, Timings
from localllm.errors import LocalLLMError
from localllm.library.modelfile import Modelfile
from localllm.wings.lab.laboratory import MachineCosts
from tui.backend import LoadedInfo, PickerRow
from tui.laboratory import Laboratory


def said(text: str, kind: PartKind = PartKind.CONTENT) -> AnswerEvent:
    """An update with some text."""
    counts = Counts(prompt=12, cached_memory=4, generated=len(text.split()))
    return AnswerEvent((AnswerPart(kind, text),), counts, Timings(0.0, 0.5, 1.0, 0.5))


def ended(reason: FinishReason = FinishReason.STOP, error: str | None = None) -> AnswerEvent:
    """The last update of an answer."""
    counts = Counts(prompt=12, cached_memory=4, generated=41)
    return AnswerEvent((), counts, Timings(0.0, 0.5, 2.0, 0.5), finish_reason=reason, error=error, seed=7)


class FakeAnswer:
    """Yields its updates one by one; a cancelled answer ends at once."""

    def __init__(self, updates: Sequence[AnswerEvent]) -> None:
        self.waiting = deque(updates)
        self.cancelled = False
        self._over = False

    def push(self, *updates: AnswerEvent) -> None:
        self.waiting.extend(updates)

    def poll(self) -> list[AnswerEvent]:
        if self.cancelled and not self._over:
            self._over = True
            return [ended(FinishReason.CANCELLED)]
        if self._over or not self.waiting:
            return []
        event = self.waiting.popleft()
        self._over = event.finish_reason is not None
        return [event]

    def cancel(self) -> None:
        self.cancelled = True


class FakeBackend:
    """Answers with the scripts in turn; for an empty script, the test pushes updates to `answers[-1]`."""

    def __init__(
        self,
        *scripts: Sequence[AnswerEvent],
        converses: bool = False,
        load_error: str | None = None,
        submit_error: str | None = None,
        sees: bool = True,
    ) -> None:
        self.scripts = deque(scripts)
        self.requests: list[AnswerRequest] = []
        self.answers: list[FakeAnswer] = []
        self.asked: list[str] = []
        self.loaded: list[str] = []
        self.closed = False
        self.snapshot: EngineSnapshot | None = None
        self.model_costs: MachineCosts | None = None
        self.converses = converses
        self.load_error = load_error
        self.submit_error = submit_error
        self.sees = sees
        self.known: int | None = None  # of a prompt's tokens; None: unknown
        self.priced: list[AnswerRequest] = []
        self.seen: list[bytes] = []  # pictures whose tokens were counted
        self.saved: list[tuple[str, Modelfile]] = []
        self.info: LoadedInfo | None = None
        self.gate = threading.Event()  # loads last until it is set
        self.gate.set()
        self.unavailable: set[str] = set()

    def load(self, name: str, progress: LoadProgress, pull: bool = True) -> LoadedInfo:
        self.asked.append(name)
        if self.load_error or name in self.unavailable:
            raise LocalLLMError(self.load_error or f"{name} cannot be had.")
        progress("loading weights", 0.5)
        while not self.gate.wait(0.01):
            progress("loading weights", 0.5)
        progress("loading weights", 0.5)  # a load that was stopped while the gate was closed ends here
        self.loaded.append(name)
        self.info = LoadedInfo(name, "fake", 4096, converses=self.converses, sees=self.sees)
        return self.info

    def submit(self, request: AnswerRequest) -> FakeAnswer:
        self.requests.append(request)
        if self.submit_error:
            raise LocalLLMError(self.submit_error)
        answer = FakeAnswer(self.scripts.popleft() if self.scripts else ())
        self.answers.append(answer)
        return answer

    def count_tokens(self, text: str) -> int | None:
        return len(text.split())

    def see_picture(self, data: bytes, least: int | None = None, most: int | None = None) -> PictureView | None:
        if not self.sees:
            raise LocalLLMError("tiny reads text only.")
        self.seen.append(data)
        return PictureView((40, 30), (32, 24), (1, 1), most or 256)

    def expected_counts(self, request: AnswerRequest) -> Counts | None:
        """A word is a token; `known` of the first ones are reused."""
        if self.known is None:
            return None
        self.priced.append(request)
        words = sum(len(str(message["content"]).split()) for message in request.messages)
        return Counts(words, min(self.known, words))

    def models(self, near: str | None) -> Sequence[PickerRow]:
        return (
            PickerRow("alpha.gguf", 4 * 2**30, "Q4_K", "7 B", 32768, 6 * 2**30, loaded=True),
            PickerRow("beta.gguf", 2**30, "Q8_0", "1 B", 8192, 2 * 2**30),
        )

    def save(self, name: str, recipe: Modelfile) -> None:
        self.saved.append((name, recipe))

    def laboratory(self) -> Laboratory | None:
        return Laboratory(self.model_costs) if self.model_costs else None

    def inspect(self) -> "Future[EngineSnapshot] | None":
        if self.snapshot is None:
            return None
        future: Future[EngineSnapshot] = Future()
        future.set_result(self.snapshot)
        return future

    def memory_bytes(self) -> int | None:
        return 3 * 2**30

    def close(self) -> None:
        self.closed = True
