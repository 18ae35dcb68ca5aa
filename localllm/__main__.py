"""The program: `localllm`, or `python -m localllm`."""

import sys
from importlib import import_module
from pathlib import Path

PACKAGES = ("cpu_kernels", "gguf_io", "gpu_offload", "models", "tui")


def main() -> None:
    """Import the packages that lie beside this one, then run the command line.

    Their names are common. A `models` or `tui` of the user's on PYTHONPATH would come first, so the folder that holds
    our packages leads sys.path while they are imported; the modules in them are then found by their parents' paths.
    """
    root = str(Path(__file__).resolve().parents[1])
    sys.path.insert(0, root)
    for name in PACKAGES:
        import_module(name)
    sys.path.remove(root)
    import_module("tui.main").main()


if __name__ == "__main__":
    main()
