"""How a model is placed and run: chosen by the planner, followed by the runner."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SplitMode = Literal["none", "layer", "row"]
# Copies of cached prefixes may take as much main memory as the KV cache divided by this.
COPIES_SHARE = 2


@dataclass(frozen=True, slots=True)
class Use:
    """Use of main memory or of one GPU, in bytes."""

    place: str = ""  # "main memory", or the GPU's name
    weights: int = 0
    kv: int = 0  # keys and values, and states of recurrent layers
    compute: int = 0  # buffers of everything that is computed
    other: int = 0  # a draft model, an image projector, adapters, copies of cached prefixes
    reserve: int = 0  # kept free
    available: int = 0  # free now

    @property
    def needed(self) -> int:
        """Everything except the reserve."""
        return self.weights + self.kv + self.compute + self.other

    @property
    def fits(self) -> bool:
        """Whether it fits with the reserve kept free; a place that holds nothing always fits."""
        return not self.needed or self.needed + self.reserve <= self.available


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """Settings of one llama.cpp model and its context."""

    # Cells of the KV cache, shared by all sequences; llama.cpp rounds up to 256.
    context_tokens: int = 4096
    # Sequences alive at once, at most 255, or 127 for models with sliding windows.
    max_sequences: int = 8
    # Most rows of one run, and of one pass of the computation.
    batch_rows: int = 512
    # None means one per core that this process may use.
    threads: int | None = None
    # Layers on GPUs, counted from the end, beginning with the output layer. None means all, 0 none.
    gpu_layers: int | None = None
    # main_gpu, split_mode, tensor_split: which GPU takes all ("none"), or how layers ("layer") or every layer's
    # matrices ("row") are split across several; tensor_split gives the proportions, empty means by free memory. An
    # image projector is always on main_gpu.
    main_gpu: int = 0
    split_mode: SplitMode = "layer"
    tensor_split: tuple[float, ...] = ()
    # Layers whose mixture-of-experts weights stay in main memory, counted from the first.
    cpu_expert_layers: int = 0
    # type_k, type_v: ggml types of stored keys and values.
    type_k: str = "f16"
    type_v: str = "f16"
    # Files of LoRA adapters; sequences select them by number.
    lora: tuple[Path, ...] = ()
    # File of the projector that turns images into rows for the model.
    mmproj: Path | None = None
    # The least and the most tokens of an image; None for the model's own. Requests can lower the most.
    image_min_tokens: int | None = None
    image_max_tokens: int | None = None
