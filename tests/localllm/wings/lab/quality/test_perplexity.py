import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import RequestError
from localllm.wings.lab.quality.perplexity import divergence, perplexity, split_chunks
from tests.fakes.fake_runner import FakeRunner
from tests.oracle import llama_oracle
from tests.systems import use_own_places

VOCABULARY = 4


class TableRunner:
    """Predicts the same distribution after every token; takes at most three rows at once."""

    def __init__(self, probabilities: Sequence[float], vocab_size: int = VOCABULARY) -> None:
        self.info = FakeRunner(vocab_size=vocab_size, max_rows=3).info
        self.logits = np.log(np.array(probabilities, np.float32)) + 5  # logits are defined up to a constant
        self.rows: list[tuple[int, int]] = []
        self.alive = 0

    def create_sequence(self) -> int:
        self.alive += 1
        return 7

    def free_sequence(self, sequence: int) -> None:
        assert sequence == 7
        self.alive -= 1

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        assert len(tokens) == len(positions) == len(sequences) <= self.info.max_rows
        self.rows += zip(tokens, positions, strict=True)
        return np.tile(self.logits, (len(wanted), 1))


def quiet(_done: int, _count: int) -> None:
    pass


def test_chunks_begin_with_bos_and_the_rest_is_left() -> None:
    assert split_chunks(range(10, 21), 4, None) == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert split_chunks(range(10, 21), 4, 1) == [[1, 11, 12, 13], [1, 15, 16, 17]]
    with pytest.raises(RequestError, match="3 tokens, less than one chunk of 4"):
        split_chunks([1, 2, 3], 4, None)


def test_equal_chances_give_the_number_of_tokens() -> None:
    runner = TableRunner([0.25] * 4)
    found = perplexity(runner, [[0, 1, 2, 3, 0, 1, 2, 3]] * 2, quiet)  # type: ignore[arg-type]
    assert found.value == pytest.approx(4)
    assert found.uncertainty == pytest.approx(0, abs=1e-6)
    # positions 4 to 6 of 8 predict 5 to 7
    assert (found.tokens, found.chunks) == (6, 2)
    assert runner.rows == [(token, token + 4 * high) for _ in range(2) for high in range(2) for token in range(4)]
    assert runner.alive == 0


def test_the_mean_is_geometric() -> None:
    runner = TableRunner([0.5, 0.25, 0.125, 0.125])
    # the second half of each chunk is predicted except for its first token: 0 and 2
    found = perplexity(runner, [[3, 3, 3, 0], [3, 3, 3, 2]], quiet)  # type: ignore[arg-type]
    losses = [math.log(2), math.log(8)]
    assert found.value == pytest.approx(math.sqrt(2 * 8))
    deviation = (losses[1] - losses[0]) / 2
    assert found.uncertainty == pytest.approx(4 * deviation / math.sqrt(1))


def test_divergence_by_hand() -> None:
    model, reference = TableRunner([0.25, 0.25, 0.25, 0.25]), TableRunner([0.5, 0.25, 0.125, 0.125])
    _, found = divergence(model, reference, [[0, 1, 2, 3, 0, 1, 2, 3]], quiet)  # type: ignore[arg-type]
    by_hand = 0.5 * math.log(2) + 0 + 2 * 0.125 * math.log(0.5)
    assert (found.mean, found.median, found.maximum) == pytest.approx((by_hand,) * 3)
    assert found.same_top == 1  # of equal probabilities the first counts
    _, none = divergence(reference, reference, [[0, 1, 2, 3, 0, 1, 2, 3]], quiet)  # type: ignore[arg-type]
    assert none.mean == 0


def test_other_vocabularies_cannot_be_compared() -> None:
    other = TableRunner([0.5, 0.5], vocab_size=2)
    with pytest.raises(RequestError, match="4 tokens and the reference 2"):
        divergence(TableRunner([0.25] * 4), other, [[0, 1, 2, 3]], quiet)  # type: ignore[arg-type]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    from localllm.cli.main import main

    def call(*arguments: str) -> int:
        use_own_places(tmp_path, monkeypatch)
        monkeypatch.setattr("sys.argv", ["localllm", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return call


def llama_cpp_losses(path: Path, text: str, context: int, chunks: int) -> list[float]:
    """Negative log likelihoods summed as llama.cpp's tool does, from llama.cpp's own tokens and logits."""
    tokens = llama_oracle.tokenize(path, text)
    losses = []
    for chunk in range(chunks):
        part = [tokens[0], *tokens[chunk * context + 1 : (chunk + 1) * context]]  # the very first is BOS
        logits = llama_oracle.prefill_logits(path, part).astype(np.float64)
        for position in range(context // 2, context - 1):
            row = logits[position]
            losses.append(float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[part[position + 1]]))
    return losses


@pytest.mark.slow
@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("backend", ["native", "llama"])
@pytest.mark.parametrize("model", ["stories260K-F32.gguf", "stories260K-F16.gguf"])
def test_figures_are_llama_cpps(
    data_dir: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str], backend: str, model: str
) -> None:
    text = data_dir / "text" / "GrimmsFairyTales.txt"
    path = data_dir / "models" / "gguf" / model
    losses = llama_cpp_losses(path, text.read_text(encoding="utf-8"), 128, 6)
    arguments = (str(path), str(text), "--ctx", "128", "--chunks", "6", "--backend", backend)
    assert command("perplexity", *arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected = math.exp(np.mean(losses))
    assert found["value"] == pytest.approx(expected, rel=2e-3)
    assert found["uncertainty"] == pytest.approx(expected * np.std(losses) / math.sqrt(len(losses) - 1), rel=5e-3)
    assert found["tokens"] == len(losses) == 6 * 63


@pytest.mark.slow
def test_a_model_does_not_diverge_from_itself_and_q4_does(
    data_dir: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = data_dir / "models" / "gguf", str(data_dir / "text" / "GrimmsFairyTales.txt")
    full = str(folder / "tinystories656K-pad256-F32.gguf")
    flags = ("--ctx", "128", "--chunks", "4", "--backend", "native", "--json")
    means = []
    for name in (
        full,
        str(folder / "tinystories656K-pad256-Q8_0.gguf"),
        str(folder / "tinystories656K-pad256-Q4_K_M.gguf"),
    ):
        assert command("perplexity", name, text, "--reference", full, *flags) == 0
        means.append(json.loads(capsys.readouterr().out)["divergence"]["mean"])
    assert means[0] == 0
    assert 0 < means[1] < means[2]
    other = str(folder / "stories260K-F32.gguf")
    assert command("perplexity", full, text, "--reference", other, *flags) == 2
    assert "tokenise the text differently" in capsys.readouterr().err
