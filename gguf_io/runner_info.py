"""A runner's description of itself. It is defined here because this is the lowest package that both runners import."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gguf_io.model_file import FileState

# Adapters by number, each with its weight; ascending, none with weight 0.
AdapterSet = tuple[tuple[int, float], ...]

# Called with the current activity of a load and the share of it that is done, 0 to 1. An exception ends the load.
LoadProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Describes a loaded model's runner (localllm.engine.runner.Runner). It never changes."""

    # A display name, such as "native" or "llama.cpp".
    backend: str
    # Length of a row of logits.
    vocab_size: int
    # The longest sequence that the model was trained for, in tokens.
    max_context: int
    # Most rows of one run.
    max_rows: int
    # Most sequence handles alive at once.
    max_sequences: int
    # Tokens in a page of KV storage, of which there are pages_total.
    page_size: int
    pages_total: int
    # Of keys and values over all layers.
    kv_bytes_per_token: int
    # What stored KV depends on besides tokens and files, such as types and layout version.
    kv_layout: str
    # The model's files.
    kv_files: tuple[FileState, ...] = ()
    # Whether sequences can be truncated to any length; those of recurrent models cannot.
    can_truncate: bool = True
    # Whether a run can be ended early.
    can_interrupt: bool = False
    # Main memory planned for copies of cached prefixes, for a runner that allocates all its storage at once and slows
    # down as it fills; 0 for others.
    copies_bytes: int = 0
    # Of each LoRA adapter that sequences may be computed with.
    adapter_files: tuple[tuple[FileState, ...], ...] = ()
    # Whether the model has a layer that drafts further tokens.
    can_draft: bool = False
    # Whether a device computes steps, so that the processor is free meanwhile.
    computes_aside: bool = False
    # The most tokens that a sequence keeps of sliding-window layers, 0 if it keeps all tokens of all layers.
    window_tokens: int = 0
    # What 16 tokens of these layers take besides a page of the others, in pages.
    window_pages: float = 0.0
    # Whether keys and values of images are exported and imported like those of text.
    stores_images: bool = False

    @property
    def adapter_count(self) -> int:
        """Number of adapters."""
        return len(self.adapter_files)

    def pages_of(self, tokens: int) -> int:
        """The most pages that a sequence of this many tokens takes."""
        pages = -(-tokens // self.page_size)
        kept = min(pages, -(-self.window_tokens // self.page_size))
        return pages + math.ceil(kept * self.window_pages)

    def tokens_within(self, pages: int) -> int:
        """The longest sequence that `pages` pages surely hold, in tokens."""
        kept = -(-self.window_tokens // self.page_size)
        whole = math.floor(pages / (1 + self.window_pages)) if kept else pages
        if kept and whole > kept:
            whole = pages - math.ceil(kept * self.window_pages)
        return whole * self.page_size
