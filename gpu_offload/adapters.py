"""LoRA adapters of one model: loaded together, chosen per sequence, each with a weight."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf_io.lora import OF_HEADS, OLD_OF_HEADS, Adapter
from gguf_io.model_file import FileState, ModelFile, open_model
from gguf_io.runner_info import AdapterSet
from gpu_offload.errors import LlamaCppError
from gpu_offload.library import complaints, failure, llama


class Adapters:
    """The adapters loaded for a model; llama.cpp frees them with it. files: the adapters' files, in order."""

    def __init__(self, handle: Any, model: ModelFile, paths: Sequence[Path]) -> None:
        """Load them, before the model's context is opened. Raises ModelFileError or LlamaCppError."""
        self._lib = llama()
        self.files: list[tuple[FileState, ...]] = []
        self._handles = [self._load(handle, model, path) for path in paths]

    def __len__(self) -> int:
        return len(self._handles)

    def check(self, chosen: AdapterSet) -> None:
        """Raise ValueError for an adapter number that is not loaded."""
        if any(not 0 <= number < len(self._handles) for number, _ in chosen):
            raise ValueError(f"there are {len(self._handles)} adapters; {chosen} names others")

    def apply(self, context: Any, chosen: AdapterSet) -> None:
        """Use these adapters from now on. Costs nothing if they are already applied. Raises LlamaCppError."""
        count = len(chosen)
        handles = (ctypes.POINTER(ctypes.c_void_p) * count)(*(self._handles[number] for number, _ in chosen))
        scales = (ctypes.c_float * count)(*(scale for _, scale in chosen))
        if self._lib.llama_set_adapters_lora(context, handles, count, scales):
            raise LlamaCppError(f"llama.cpp cannot apply the adapters {chosen}:\n{complaints()}")

    def _load(self, handle: Any, model: ModelFile, path: Path) -> Any:
        with open_model(path) as file:
            for name in Adapter(file, model).pairs:
                if name.endswith((*OF_HEADS, OLD_OF_HEADS)):
                    raise LlamaCppError(
                        f"{path}: llama.cpp would leave out what the adapter changes in {name}.",
                        remedy="Use --backend native.",
                    )
            self.files.append(file.states)
        adapter = self._lib.llama_adapter_lora_init(handle, str(path).encode())
        if not adapter:
            raise failure(f"llama.cpp cannot apply {path} to {model.path.name}")
        return adapter
