"""Files in other programs' layouts, read as files in the standard one, which is llama.cpp's.

`translate` uses the header alone and writes nothing. `StandardFile` is the same model as a file that llama.cpp loads.
"""

from gguf_io.layouts.layout import Layout, StandardFile, translate

__all__ = ["Layout", "StandardFile", "translate"]
