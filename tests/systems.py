"""What tests need to know about the system that they run on."""

import ctypes
import sys

ON_WINE = False
"""Whether this is Windows' API under Wine, which accepts some limits and does not enforce them."""
if sys.platform == "win32":
    ON_WINE = hasattr(ctypes.windll.ntdll, "wine_get_version")
