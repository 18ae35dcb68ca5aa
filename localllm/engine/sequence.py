"""The tokens of one generation, and how far the runner has their keys and values."""

from collections.abc import Mapping, Sequence

from localllm.engine.adapters import KeySpace
from localllm.engine.images import ImageRows, ImageSpans


class TokenSequence:
    """A prompt and what was generated after it.

    The runner's sequence `handle`, None while there is none, stores the first `computed` tokens. Decoding is the case
    of one pending token, prefill that of many. space: with whom keys and values are shared. background, persist and
    trunk are those of the request. from_memory, from_disk: tokens of the prompt whose KV was known in memory, and on
    disk.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        images: Mapping[int, ImageRows],
        space: KeySpace,
        background: bool = False,
        persist: bool = True,
        trunk: int = 0,
    ) -> None:
        self.tokens = list(prompt)
        self.images = ImageSpans(self.tokens, images)
        self.space = space
        self.background = background
        self.persist = persist
        self.trunk = trunk
        self.handle: int | None = None
        self.computed = 0
        self.from_memory: int | None = None
        self.from_disk = 0
        self._prompt = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens whose KV is not stored yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    def attach(self, handle: int, computed: int) -> None:
        """Take a runner's sequence that already stores the first `computed` tokens."""
        self.handle, self.computed = handle, computed
        if self.from_memory is None:
            self.from_memory = computed

    def detach(self) -> int | None:
        """Give the runner's sequence away."""
        handle, self.handle = self.handle, None
        return handle

    def restored(self, length: int, from_disk: bool) -> None:
        """Note that the runner's sequence was filled up to `length` tokens, from the disk or from copies in memory."""
        gained, self.computed = length - self.computed, length
        if len(self.tokens) == self._prompt and from_disk:
            self.from_disk += gained
        elif len(self.tokens) == self._prompt:
            self.from_memory = (self.from_memory or 0) + gained

    def advance(self, rows: int) -> None:
        """Note that the next rows were computed; some may be drafts, which are not among the tokens yet."""
        self.computed += rows

    def cut(self, length: int) -> None:
        """Note that the runner's sequence was cut to `length` tokens."""
        self.computed = length

    def append(self, token_id: int) -> None:
        """Go on with a token, whose KV is not computed yet."""
        self.tokens.append(token_id)

    def replace(self, tokens: list[int]) -> None:
        """Go on with other tokens, of which nothing is computed; the runner's sequence has been given away."""
        self.tokens, self.computed, self.trunk = tokens, 0, 0
