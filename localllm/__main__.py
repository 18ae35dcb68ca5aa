"""The program: `localllm`, or `python -m localllm`."""

import sys
from importlib import import_module
from pathlib import Path

PACKAGES = ("cpu_kernels", "gguf_io", "gpu_offload", "models", "tui")


def main() -> None:
    """Import the packages beside this one, then run the command line.

    Their names are common: a `models` or `tui` of the user's on PYTHONPATH would shadow them. So the folder with our
    packages is first on sys.path while they are imported; their submodules are then found by their parents' paths.
    """
    root = str(Path(__file__).resolve().parents[1])
    sys.path.insert(0, root)
    for name in PACKAGES:
        import_module(name)
    sys.path.remove(root)
    import_module("tui.main").main()


if __name__ == "__main__":
    main()
