"""localllm plan on a small file, for GPUs that are not here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_io import open_model
from localllm.cli.main import main
from models.needs import native_needs
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run localllm plan on a small llama and return the exit code."""
    path = write(MODELS["llama"], tmp_path / "small.gguf")

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["localllm", "plan", str(path), *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        code = exit_info.value.code
        return code if isinstance(code, int) else 0

    return run


def test_everything_fits_a_large_gpu(plan: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu-memory", "RTX 4090", "--ctx", "512") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["place", "weights", "KV", "compute", "other", "needed", "reserve", "free"]
    assert len({len(line) for line in shown[:3]}) == 1
    assert "3 of 3 layers" in shown[3]
    assert "512 tokens of context" in shown[4]


def test_json_names_every_sum(plan: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu-memory", "8GiB", "--gpu-layers", "1", "--ctx", "256", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["fits"] is True
    assert made["options"]["gpu_layers"] == 1
    # 2 layers x 2 kv heads x 64 values x K and V x 2 bytes x 256 tokens, and as many for other prefixes
    assert sum(use["kv"] for use in made["uses"]) == 2 * 2 * 64 * 2 * 2 * 256 * 2


def test_keys_and_values_are_planned_in_their_own_types(
    plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    # Our own engine adds a scale of 4 bytes to 16-bit values.
    for gpu, spare, factor in ((("--backend", "native"), 1, 4), (("--gpu-memory", "8GiB"), 2, 0)):
        assert plan(*gpu, "--kv-type-k", "q8_0", "--ctx", "256", "--json") == 0
        made = json.loads(capsys.readouterr().out)
        assert (made["options"]["type_k"], made["options"]["type_v"]) == ("q8_0", "f16")
        # 2 layers x 2 kv heads x (64 bytes and 2 scales of 2 bytes, and 64 values of 2 bytes) x 256 tokens
        assert sum(use["kv"] for use in made["uses"]) == 2 * 2 * (64 + 4 + 128 + factor) * 256 * spare


def test_it_says_who_would_compute_here(plan: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--backend", "native", "--ctx", "256") == 0
    assert capsys.readouterr().out.endswith("native: chosen by the backend setting\n")
    assert plan("--backend", "native", "--ctx", "256", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["backend"], [use["other"] for use in made["uses"]]) == ("native", [0])  # it makes no copies
    # A GPU given by flag implies nothing about this machine.
    assert plan("--gpu-memory", "8GiB", "--ctx", "256") == 0
    assert "chosen by" not in capsys.readouterr().out
    assert plan("--gpu-memory", "8GiB", "--backend", "native") == 2
    assert "The native engine has no GPUs to plan for" in capsys.readouterr().err


@pytest.mark.parametrize("place", [("--backend", "native"), ("--gpu-memory", "8GiB")])
def test_no_more_context_is_planned_than_the_model_was_trained_for(
    place: tuple[str, str], plan: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    made, uses = [], []
    for context in ("1024", "1025"):
        assert plan(*place, "--ctx", context, "--json") == 0
        made.append(json.loads(capsys.readouterr().out))
        uses.append([{**use, "available": None} for use in made[-1]["uses"]])
    assert uses[0] == uses[1] and made[1]["trained_context"] == 1024
    told = "was trained for 1,024 tokens of context; the limit of 1,025 is lowered to that"
    assert [note.endswith(told) for note in made[1]["notes"]].count(True) == 1
    assert not any("lowered" in note for note in made[0]["notes"])


def test_one_gpu_of_several_takes_it_all(plan: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    two = ("--gpu-memory", "8GiB", "--gpu-memory", "16GiB", "--ctx", "256", "--json")
    assert plan(*two, "--main-gpu", "0") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["options"]["split_mode"], made["options"]["main_gpu"]) == ("none", 0)
    _, first, second = made["uses"]
    assert first["weights"] > 0 and second["weights"] == 0
    assert plan(*two, "--main-gpu", "2") == 2
    assert "main_gpu is 2; there are 0: " in capsys.readouterr().err
    assert plan(*two, "--split-mode", "row") == 0
    _, first, second = json.loads(capsys.readouterr().out)["uses"]
    assert first["weights"] > 0 and second["weights"] > 0


def test_what_cannot_fit_is_refused(plan: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu-memory", "64MiB", "--gpu-layers", "3") == 2
    assert "lacks" in capsys.readouterr().out
    assert plan("--kv-type-k", "q5_0") == 2
    assert "--kv-type-k must be f16, q8_0 or q4_0 (got 'q5_0')" in capsys.readouterr().err


def test_a_draft_model_has_its_part(
    plan: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = write(MODELS["llama"], tmp_path / "draft.gguf")
    needed = []
    for more in ((), ("--draft", str(draft))):
        assert plan("--gpu-memory", "8GiB", "--ctx", "256", "--json", *more) == 0
        needed.append(json.loads(capsys.readouterr().out)["uses"][1])
    assert needed[0]["other"] == 0 and needed[1]["other"] > needed[1]["weights"] // 2


def test_a_table_that_stays_in_the_file_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(MODELS["gemma4"], tmp_path / "gemma4.gguf")
    monkeypatch.setattr("sys.argv", ["localllm", "plan", str(path), "--ctx", "256", "--json", "--backend", "native"])
    with pytest.raises(SystemExit):
        main()
    made = json.loads(capsys.readouterr().out)
    with open_model(path) as file:
        assert made["uses"][0]["weights"] == native_needs(file).weights
    # 320 tokens, 10 layers, 32 values of four bytes each
    assert "400 KiB of the weights stay in the file and are read row by row" in made["notes"]
