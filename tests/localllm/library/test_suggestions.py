"""The list for users without a model: its content, its order, and its expectations of this machine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.doctor import check_speed
from localllm.library.suggestions import SUGGESTIONS, ranked
from localllm.settings import Settings
from localllm.speed.kept import all_kept, kept_path
from localllm.wings.lab.roofline.report import BenchReport, ThreadReport
from models.registry import ARCHITECTURES
from tests.localllm.library.conftest import write_file
from tests.localllm.wings.lab.roofline.test_expected import LIMITS, keep
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tui.choices import model_choices


def test_the_engine_runs_each_of_them() -> None:
    assert {suggestion.architecture for suggestion in SUGGESTIONS} <= ARCHITECTURES.keys()
    assert len({suggestion.name for suggestion in SUGGESTIONS}) == len(SUGGESTIONS)
    assert all(0 < suggestion.read <= suggestion.loaded <= suggestion.size for suggestion in SUGGESTIONS)


def test_the_best_that_fits_comes_first() -> None:
    assert ranked(1 << 40) == list(SUGGESTIONS)
    best, smallest = SUGGESTIONS[0], min(SUGGESTIONS, key=lambda suggestion: suggestion.memory)
    room = best.memory - 1
    found = ranked(room)
    assert sorted(map(str, found)) == sorted(map(str, SUGGESTIONS))
    assert found[0] == next(suggestion for suggestion in SUGGESTIONS if suggestion.memory <= room)
    assert found[-1] == best
    assert ranked(0)[0] == smallest


@pytest.fixture
def measured(home: Path) -> None:
    """This machine's limits with one thread, as if measured."""
    keep(BenchReport("", "", "native", "avx2", 1, 0.0, (ThreadReport(1, LIMITS, (), ()),)), "", "")


@pytest.mark.usefixtures("home")
def test_without_measurements_no_speed_is_shown_or_measured() -> None:
    choices = model_choices(Settings(threads=1), None, None)
    assert {choice.speed for choice in choices} == {None}
    assert check_speed().found == "not measured"
    assert not kept_path().exists()


@pytest.mark.usefixtures("measured")
def test_the_picker_expects_speeds_by_what_a_token_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.choices.available_memory", lambda: 1 << 40)
    to_pull = [choice for choice in model_choices(Settings(threads=1), None, None) if not choice.here]
    assert [choice.name for choice in to_pull] == [suggestion.name for suggestion in SUGGESTIONS]
    for choice, suggestion in zip(to_pull, SUGGESTIONS, strict=True):
        assert choice.speed == pytest.approx(0.75 * LIMITS.read.median / suggestion.read)


@pytest.mark.usefixtures("measured")
def test_list_and_doctor_tell_what_is_kept(
    home: Path, command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALLLM_THREADS", "1")
    monkeypatch.setattr("localllm.speed.expected.LEAST_READ", 0)
    write_file(
        home / ".lmstudio/models/user/Small-GGUF/Small-F16.gguf", write(MODELS["qwen3"], home / "s.gguf").read_bytes()
    )
    assert command("list", "--json") == 0
    small = next(row for row in json.loads(capsys.readouterr().out) if row["name"].startswith("user/"))
    assert small["speed"] > 0 and small["memory"] > small["size"]
    assert command("list") == 0
    assert f"{small['speed']:,.0f}" in capsys.readouterr().out
    assert len(all_kept()) == 1
    assert "on 1 thread 20.0 GB/s, 200 int8 and 100 f32 GOP/s (" in check_speed().found
