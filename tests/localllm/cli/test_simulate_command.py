"""localllm simulate: what it refuses, and whole simulations from the command line."""

import json
from pathlib import Path

import pytest

from localllm.cli.main import main
from models.builtin import path as builtin


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["localllm", "simulate", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return int(str(exit_info.value.code))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--experiment", "none"], "--experiment is 'none'; give all, or one of baseline"),
        (["--experiment", "size", "--rate", "1"], "--rate cannot be used with --experiment"),
        (["--batching", "dynamic"], "--batching is 'dynamic'; give continuous, static, none"),
        (["--machine", "Cray"], "--machine 'Cray' names 0 machines"),
        (["--machine", "Apple M4"], "Apple M4 needs --compute"),
        (["--bandwidth", "100"], "needs --compute"),
        (["--memory", "4"], "leaves nothing of 4.0 GB"),
        (["--measure"], "--measure needs a model"),
        (["--machine", "H100", "--measure"], "exclude each other"),
        (["--bench", "./nowhere.json"], "nowhere.json: cannot be read"),
        (["--kv-type", "q5_0"], "--kv-type is 'q5_0'; give one of f16, q8_0, q4_0"),
        ([str(builtin()), "--measure", "--kv-type", "f16"], "--kv-type cannot be used with --measure"),
        (["--plot", "--json"], "--plot cannot be used with --json"),
        (["--svg", "./nowhere/load.svg"], "load.svg cannot be written: its folder does not exist"),
        (["--rate", "0"], "--rate is '0'"),
        (["--trace", "./trace.csv", "--speedup", "2", "--rate", "1"], "--speedup replays a trace's own times"),
        (["--slots", "300"], "'--slots': must be at most 256 (got 300)"),
        (["--acceptance", "1.5"], "'--acceptance': must be at most 1 (got 1.5)"),
    ],
)
def test_what_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, monkeypatch=monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err


def test_json_of_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--concurrency", "1,4", "--requests", "8", "--slo", "ttft=1s", "--json"]
    assert run(str(builtin()), "--machine", "T4", *arguments, monkeypatch=monkeypatch) == 0
    one, four = json.loads(capsys.readouterr().out)["trials"]
    assert (one["clients"], one["answered"], one["good"]) == (1, 8, 8)
    assert four["token_rate"] > one["token_rate"]
    assert four["engine"]["generated_tokens"] == 8 * 64


def test_smaller_keys_and_values_are_read_faster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tpot = []
    for kv_type in ("f16", "q8_0"):
        # 100 requests of 4,000 tokens on a machine that only reads: 8 sequences of 0.5 GB, and 4.9 GB of weights.
        arguments = ["--machine", "H100", "--concurrency", "8", "--prompt-tokens", "4000", "--requests", "16"]
        assert run(*arguments, "--kv-type", kv_type, "--json", monkeypatch=monkeypatch) == 0
        tpot.append(json.loads(capsys.readouterr().out)["trials"][0]["tpot"]["p50"])
    assert tpot[1] < tpot[0]


def test_the_same_seed_gives_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for seed in ("1", "1", "2"):
        arguments = ["--rate", "5", "--requests", "12", "--seed", seed, "--acceptance", "0.8", "--devices", "2"]
        assert run(*arguments, monkeypatch=monkeypatch) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_an_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.svg"
    arguments = ["--rate", "5", "--requests", "6", "--plot", "--svg", str(file)]
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    assert "(waiting)" in capsys.readouterr().out
    assert file.read_text().count("<polyline") == 3
    assert run(*arguments, monkeypatch=monkeypatch) == 2
    assert "exists already" in capsys.readouterr().err


def test_figures_of_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    measures = [{"measure": "prefill 512", "gop_s": 500.0}, {"measure": "decode at 0", "read_gb_s": 20.0}]
    file.write_text(json.dumps({"model": "m", "runs": [{"threads": 2, "measures": measures}]}))
    assert run("--bench", str(file), "--memory", "16", "--requests", "1", monkeypatch=monkeypatch) == 0
    assert "(20 GB/s, 500 GOP/s, 16 GB)" in capsys.readouterr().out
    file.write_text('{"runs": [{"measures": [{"gop_s": null}]}]}')
    assert run("--bench", str(file), monkeypatch=monkeypatch) == 2
    assert "has no figures" in capsys.readouterr().err


@pytest.mark.slow
def test_measured_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--measure", "--prompt-tokens", "64", "--requests", "4", "--json"]
    assert run(str(builtin()), *arguments, monkeypatch=monkeypatch) == 0
    data = json.loads(capsys.readouterr().out)
    assert "as measured" in data["simulated"] and data["trials"][0]["answered"] == 4
