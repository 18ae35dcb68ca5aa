"""Standard streams whose encoding lacks characters."""

import os
import subprocess
import sys

import pytest

SAYS = (
    "from tui.main import _prepare_streams; _prepare_streams(); import sys; sys.stdout.write('a \u2192 \U0001f600'); "
)
SAYS += "sys.stderr.write('\u6f22')"


@pytest.mark.parametrize("encoding", ["cp1252", "cp437", "ascii", "utf-8"])
def test_text_is_written_whatever_the_encoding(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", SAYS], env=environment, capture_output=True, check=True)
    whole = sys.platform == "win32" or encoding == "utf-8"
    assert done.stdout == ("a \u2192 \U0001f600".encode() if whole else b"a ? ?")
    assert done.stderr == ("\u6f22".encode() if whole else b"?")
