"""Runners that are closed after each test, even a failed one."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gguf_io.model_file import open_model
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner


@pytest.fixture
def open_runner() -> Iterator[Callable[[Path, LlamaOptions], LlamaCppRunner]]:
    """Open a file with options."""
    with contextlib.ExitStack() as stack:

        def opened(path: Path, options: LlamaOptions) -> LlamaCppRunner:
            with open_model(path) as model:
                runner = LlamaCppRunner(model, options)
            stack.callback(runner.close)
            return runner

        yield opened
