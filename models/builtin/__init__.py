"""The model that comes with localllm: a demonstration that tells short stories and answers questions about its use."""

from pathlib import Path

FILE_NAME = "localllm-demo-Q8_0.gguf"


def path() -> Path:
    """Path of the model's file, in the installed package or in the source tree."""
    return Path(__file__).with_name(FILE_NAME)
