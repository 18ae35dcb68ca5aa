"""Names of packed files on the disk: apart for what arranges weights otherwise."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from localllm import packed


def test_the_processor_is_part_of_the_name() -> None:
    """A set that LOCALLLM_ISA forces is packed separately."""
    script = "from localllm.packed import code_digest; print(code_digest())"
    codes = set()
    for isa in ("portable", "avx2"):
        environment = {**os.environ, "LOCALLLM_ISA": isa}
        done = subprocess.run(
            [sys.executable, "-c", script], check=False, env=environment, capture_output=True, text=True
        )
        assert done.stdout or "lacks" in done.stderr, done.stderr  # a processor without AVX2
        codes.add(done.stdout or isa)
    assert len(codes) == 2


def test_the_layout_is_part_of_the_name(tmp_path: Path) -> None:
    """A version that arranges weights otherwise does not read what this one has packed."""
    for package in ("cpu_kernels", "gguf_io", "localllm", "models"):
        shutil.copytree(Path(packed.__file__).parents[1] / package, tmp_path / package)
    codes = [packed.code_digest()]
    for changed in ("cpu_kernels/formats/super_blocks.py", "models/weights.py", "gguf_io/blocks.py"):
        with (tmp_path / changed).open("a") as source:
            source.write("# arranged otherwise\n")
        script = "from localllm import packed; print(packed.__file__, packed.code_digest())"
        done = subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, capture_output=True, text=True)
        file, code = done.stdout.split()
        assert file.startswith(str(tmp_path)), "the sources of the change were not used"
        codes.append(code)
    assert len(set(codes)) == 4
