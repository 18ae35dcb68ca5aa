"""A projector's planned memory against what llama.cpp reports."""

import logging
import re

import pytest

from gguf_io.model_file import open_model
from gpu_offload.memory import projector_bytes
from tests.gpu_offload.projector_runs import opened
from tests.oracle import llama_oracle
from tests.projector_files import write_projector

MIB = 2**20
SHAPE = {"width": 256, "hidden": 2048, "side": 448, "patch": 14, "layers": 2, "merge": 2}


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("inner", [512, 2048])
def test_scratch_memory_is_what_llama_cpp_reserves(data_dir, tmp_path, caplog, inner):
    path = write_projector(tmp_path / "mmproj.gguf", "gemma3", **{**SHAPE, "hidden": inner})
    with caplog.at_level(logging.DEBUG, "localllm.llama_cpp"):
        opened(data_dir / "models/gguf/stories260K-F32.gguf", path).close()
    (reserved,) = re.findall(r"reserve_compute_meta: +CPU compute buffer size = +([\d.]+) MiB", caplog.text)
    with open_model(path) as file:
        weights = sum(tensor.nbytes for tensor in file.tensors.values())
    assert (projector_bytes(path) - weights) / MIB == pytest.approx(float(reserved), rel=0.1)


def test_images_of_any_size_count_as_the_largest(tmp_path):
    fixed, free = (
        projector_bytes(write_projector(tmp_path / f"{kind}.gguf", kind, **SHAPE)) for kind in ("mlp", "qwen2vl_merger")
    )
    assert free - fixed > 15 * 1024 * 4 * SHAPE["hidden"]
