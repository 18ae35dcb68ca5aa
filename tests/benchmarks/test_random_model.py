from pathlib import Path

import pytest

from benchmarks.random_model import WORDS, write_model
from gguf_io import open_model


def test_the_file_is_a_llama_of_quantised_noise(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", seed=1)
    write_model(tmp_path / "folder" / "b.gguf", seed=2)
    with open_model(tmp_path / "a.gguf") as one, open_model(tmp_path / "folder" / "b.gguf") as other:
        assert one.architecture == "llama"
        assert {tensor.type.name for tensor in one.tensors.values()} == {"F32", "Q8_0"}
        assert one.tensors.keys() == other.tensors.keys()
        assert one.dequantize("output.weight").std() > 0
        assert (one.data("output.weight") != other.data("output.weight")).any()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.gguf"]


@pytest.mark.oracle
def test_llama_cpp_reads_it_and_finds_its_words(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="the llama extra is not installed")
    from tests.oracle import llama_oracle

    path = tmp_path / "m.gguf"
    write_model(path, seed=1)
    prompt = llama_oracle.tokenize(path, "once upon a time the king was sad .", add_special=False)
    assert len(prompt) == 10  # a word each, the space before the point, the point
    answer = llama_oracle.detokenize(path, llama_oracle.greedy(path, prompt, 20)).decode()
    assert set(answer.replace(".", " ").replace(",", " ").replace("!", " ").replace("?", " ").split()) <= set(
        WORDS.split()
    )
