"""localllm plan for models that are not on this machine, from loopback servers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gguf_io import open_model
from localllm.placement.memory import RESERVE_BYTES
from localllm.speed.expected import main_type
from localllm.speed.work import work_in_header
from localllm.wings.lab.roofline.report import BenchReport, Measure, ThreadReport, keep
from models.kv_layout import MAX_ROWS
from tests.localllm.library.conftest import command, home, server
from tests.localllm.library.model_server import ModelServer
from tests.localllm.wings.lab.roofline.test_expected import LIMITS
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write

__all__ = ["command", "home", "server"]  # fixtures

NAME = "hf.co/user/Small-GGUF"
NATIVE = ("--backend", "native", "--json")


@pytest.fixture
def files(home: Path) -> dict[str, Path]:
    """Two models of the same shape; the second has more layers and represents a better quantisation."""
    made = {}
    for name, layers in (("Q4_K_M", 4), ("Q8_0", 6)):
        made[name] = write(replace(MODELS["qwen3"], layers=layers), home / f"Small-{name}.gguf")
    return made


@pytest.fixture
def repository(server: ModelServer, files: dict[str, Path]) -> ModelServer:
    server.add_hub("user/Small-GGUF", {path.name: path.read_bytes() for path in files.values()})
    return server


@pytest.fixture
def shown(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: str) -> tuple[int, str]:
        code = command(*arguments)
        return code, capsys.readouterr().out

    return run


def sizes(made: str) -> list[dict[str, object]]:
    """The planned bytes, without the currently free memory."""
    return [{name: size for name, size in use.items() if name != "available"} for use in json.loads(made)["uses"]]


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("flags", [NATIVE, ("--gpu-memory", "8GiB", "--json"), (*NATIVE, "--ctx", "300")])
def test_the_plan_before_the_download_is_that_of_the_pulled_file(
    shown: Callable[..., tuple[int, str]], flags: tuple[str, ...]
) -> None:
    code, before = shown("plan", f"{NAME}:Q8_0", *flags)
    assert code == 0
    assert shown("pull", f"{NAME}:Q8_0")[0] == 0
    code, after = shown("plan", f"{NAME}:Q8_0", *flags)
    assert code == 0
    assert sizes(before) == sizes(after)
    early, late = json.loads(before), json.loads(after)
    assert early["download"]["bytes"] > 0 and late["download"] is None
    for key in ("layers", "options", "longest_context", "trained_context"):
        assert early[key] == late[key], key


@pytest.mark.usefixtures("repository")
def test_little_is_fetched_and_nothing_is_kept(
    shown: Callable[..., tuple[int, str]], repository: ModelServer, home: Path
) -> None:
    code, out = shown("plan", NAME, "--backend", "native")
    assert code == 0
    assert "not on this machine: " in out and " to pull" in out
    assert "longest context that fits: 1,024 of 1,024 tokens" in out
    assert "`localllm bench` measures this machine" in out
    assert not (home / "localllm").exists()
    assert all("bytes=0-" in headers["range"] for headers in repository.fetched("/resolve/"))


def test_the_speed_to_expect_is_what_a_bench_found(
    shown: Callable[..., tuple[int, str]], repository: ModelServer, files: dict[str, Path]
) -> None:
    """The other model of the repository was measured at these shares of the limits, which predict this one's."""
    share = 0.5
    with open_model(files["Q4_K_M"]) as file:
        work, weights = work_in_header(file), main_type(file)
    token, prompt = work.decode(0, 64), work.prefill(512, MAX_ROWS)
    least = prompt.int8 / LIMITS.int8.median + prompt.floats / LIMITS.floats.median
    measures = (
        Measure("prefill 512", 512, 0, (512 * least / share,), prompt),
        Measure("decode at 0", 64, 0, (64 * token.read / LIMITS.read.median / share,), token),
    )
    report = BenchReport("m.gguf", "qwen3", "native", "avx2", 1, 0.0, (ThreadReport(1, LIMITS, measures, ()),))
    keep(report, "measured", weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_THREADS", "1")
        patch.setattr("localllm.speed.expected.LEAST_READ", 0)
        code, out = shown("plan", f"{NAME}:Q8_0", *NATIVE)
        assert code == 0
        found = json.loads(out)["expected"]
        text = shown("plan", f"{NAME}:Q8_0", "--backend", "native")[1]
    with open_model(files["Q8_0"]) as file:
        larger = work_in_header(file)
    token, prompt = larger.decode(0, 64), larger.prefill(512, MAX_ROWS)
    least = prompt.int8 / LIMITS.int8.median + prompt.floats / LIMITS.floats.median
    assert found["decode"] == pytest.approx(share * LIMITS.read.median / token.read)
    assert found["prefill"] == pytest.approx(share / least)
    assert "within 15%, from the bench of measured" in text
    assert repository.fetched("/resolve/")


@pytest.mark.usefixtures("repository")
def test_all_quantisations_and_the_one_to_take(
    shown: Callable[..., tuple[int, str]], files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = shown("plan", NAME, "--all", "--backend", "native")
    assert code == 0
    # Both have the same bits per weight, so the smaller one is as good.
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[1:2]] == [["*", "Q4_K_M"]]
    assert lines[2].split()[0] == "Q8_0"
    assert lines[-1] == f"Choose {NAME}:Q4_K_M: the best that fits with 4,096 tokens of context."
    # If only the smaller one fits, it is chosen.
    small, large = (path.stat().st_size for path in files.values())
    rows = json.loads(shown("plan", NAME, "--all", "--ctx", "256", *NATIVE)[1])
    needed = [row["uses"][0]["weights"] + row["uses"][0]["kv"] + row["uses"][0]["compute"] for row in rows]
    assert small < large and needed[0] < needed[1]
    monkeypatch.setattr("localllm.advice.available_memory", lambda: RESERVE_BYTES + sum(needed) // 2)
    code, out = shown("plan", NAME, "--all", "--ctx", "256", *NATIVE)
    rows = json.loads(out)
    assert [(row["name"].rpartition(":")[2], row["fits"], row["best"]) for row in rows] == [
        ("Q4_K_M", True, True),
        ("Q8_0", False, False),
    ]
    monkeypatch.setattr("localllm.advice.available_memory", lambda: 1000)
    code, out = shown("plan", NAME, "--all", "--backend", "native")
    assert code == 2
    assert "None fits with 4,096 tokens of context." in out


def test_what_cannot_be_had_is_refused(
    command: Callable[..., int], server: ModelServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("plan", f"{server.host}/library/nothing:1b") == 2
    assert "cannot be pulled" in capsys.readouterr().err
    assert command("plan", "qwen3:0.6b", "--all") == 2
    assert "not a Hugging Face repository" in capsys.readouterr().err
