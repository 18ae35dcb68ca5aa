"""localllm bench: what it refuses, and a whole run on a tiny model in its own process."""

import json
import os
import signal
from pathlib import Path

import pytest

from localllm.cli.main import main
from tests.forking import Nursery
from tests.systems import own_places
from tests.waiting import eventually

# The command, which reports when it has begun to measure.
ANNOUNCED = """
from localllm.cli.main import main
from localllm.wings.lab.roofline.speeds import SpeedTest
measure = SpeedTest.round
SpeedTest.round = lambda *given, **named: (print("measuring", flush=True), measure(*given, **named))
main()
"""


@pytest.fixture
def model(data_dir: Path) -> Path:
    return data_dir / "models" / "gguf" / "stories260K-F32.gguf"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Isolated from this user's settings and measurements."""
    return {"LOCALLLM_BACKEND": "native", **own_places(tmp_path)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threads", "1,x"], "--threads is '1,x'; use whole numbers"),
        (["--threads", "0"], "--threads is '0'; use whole numbers of at least 1"),
        (["--depth", "-1"], "--depth is '-1'; use whole numbers of at least 0"),
        (["--depth", ""], "--depth is ''; use whole numbers"),
        ([], "nowhere.gguf"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["localllm", "bench", "./nowhere.gguf", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_a_tiny_model(model: Path, environment: dict[str, str], children: Nursery, tmp_path: Path) -> None:
    arguments = [str(model), "--threads", "2,1", "--prompt", "40", "--depth", "0,20", "--tokens", "4", "--rounds", "1"]
    done = children.run("bench", *arguments, "--json", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["model"], report["backend"], report["rounds"]) == (model.name, "native", 1)
    for run in report["runs"]:
        assert [measure["measure"] for measure in run["measures"]] == ["prefill 40", "decode at 0", "decode at 20"]
        for measure in run["measures"]:
            assert measure["tokens_per_s"]["median"] > 0
            assert measure["of_read_limit"] > 0
            assert measure["of_compute_limit"] > 0
        assert run["measures"][2]["bytes_per_token"] > run["measures"][1]["bytes_per_token"]
        assert [step["depth"] for step in run["decode_steps"]] == [0, 20]
        for step in run["decode_steps"]:
            assert sum(step["shares"].values()) == pytest.approx(1)
    assert report["runs"][-1]["threads"] == 1
    kept = json.loads((tmp_path / "localllm" / "speeds.json").read_text())["machines"]
    assert {machine["threads"] for machine in kept} == {run["threads"] for run in report["runs"]}
    for machine, run in zip(kept, report["runs"], strict=True):
        assert machine["read"] / 1e9 == pytest.approx(run["limits"]["read_gb_s"]["median"])
        assert machine["models"][0]["read_rate"] / 1e9 == pytest.approx(run["measures"][1]["read_gb_s"])


@pytest.mark.slow
def test_the_limits_alone(environment: dict[str, str], children: Nursery, tmp_path: Path) -> None:
    arguments = ["--threads", "1", "--rounds", "1"]
    done = children.run("bench", *arguments, **environment)
    assert done.stdout.startswith("This machine's limits")
    assert "limits, 1 thread: read " in done.stdout
    (machine,) = json.loads((tmp_path / "localllm" / "speeds.json").read_text())["machines"]
    assert (machine["threads"], machine["models"]) == (1, [])


def test_more_than_the_context_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["localllm", "bench", str(model), "--depth", "0,100000"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    said = capsys.readouterr().err
    assert "needs 100064 tokens, but the model's context is" in said
    assert "--depth" in said


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once(model: Path, environment: dict[str, str], children: Nursery) -> None:
    process = children.start(ANNOUNCED, ["bench", str(model), "--rounds", "100000"], {**os.environ, **environment})
    try:
        eventually(process.out.read_bytes)
        process.send_signal(signal.SIGINT)
        out, err = (said.decode() for said in process.communicate())
    finally:
        process.kill()
    assert process.returncode == 130
    assert (out.replace("measuring\n", ""), err) == ("", "Stopped; nothing was stored.\n")
