"""localllm cost against a server with known counters."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from localllm.cli.main import main
from localllm.wings.lab.commands import cost_report
from localllm.wings.lab.energy import EnergyMeter
from tests.fakes.http_server import Quiet, serving
from tests.localllm.wings.lab.test_cost import METRICS, zone

Call = Callable[..., tuple[object, str, str]]


class Metrics:
    """Responses of /metrics, the last one repeated; status: of all responses."""

    def __init__(self) -> None:
        self.texts = [METRICS]
        self.status = 200
        self.keys: list[str | None] = []
        self.url = ""


@pytest.fixture
def server() -> Iterator[Metrics]:
    with metrics_server() as found:
        yield found


@contextmanager
def metrics_server() -> Iterator[Metrics]:
    script = Metrics()

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            script.keys.append(self.headers.get("Authorization"))
            text = script.texts.pop(0) if len(script.texts) > 1 else script.texts[0]
            self.send_response(script.status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as host:
        script.url = f"http://{host}"
        yield script


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command; return exit code, output and messages."""

    def called(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["localllm", "cost", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return exit_info.value.code, captured.out, captured.err

    return called


def test_since_the_start(server: Metrics, call: Call) -> None:
    arguments = ["--watts", "500", "--kwh-price", "0.30", "--api-prompt", "1000", "--api-generated", "4000"]
    code, out, err = call(server.url, *arguments)
    assert (code, err) == (0, "")
    assert out == (
        "MODEL  PROMPT  CACHED  GENERATED\n"
        "a      100     25      40\n"
        "b      7       0       0\n"
        "all    107     25      40\n"
        "\n"
        "time         2.00 h\n"
        "energy       1 kWh (stated)\n"
        "             9e+04 J for each generated token\n"
        "electricity  0.3\n"
        "             7500 for a million generated tokens\n"
        "API          0.267 for the same tokens\n"
    )


def test_json(server: Metrics, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_REMOTE_KEY", "secret")
    code, out, _ = call(server.url, "--watts", "100", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["models"]["a"] == {"prompt": 100, "cached": 25, "generated": 40}
    assert (report["seconds"], report["kwh"], report["energy_source"], report["api"]) == (7200, 0.2, "stated", None)
    assert server.keys == ["Bearer secret"]


def test_without_watts_the_energy_is_not_known(server: Metrics, call: Call) -> None:
    code, out, err = call(server.url, "--kwh-price", "0.30")
    assert code == 0
    assert "energy" not in out
    assert err == ("The energy is not known: RAPL needs --for. State the machine's power with --watts.\n")


def test_a_measured_time(server: Metrics, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    later = METRICS.replace("} 100.0", "} 150.0").replace("} 40.0", "} 50.0")
    server.texts = [METRICS, later]
    zone(tmp_path, "intel-rapl:0", "package-0", 10)

    class Counting(EnergyMeter):
        def __init__(self) -> None:
            super().__init__(tmp_path)
            zone(tmp_path, "intel-rapl:0", "package-0", 46)

    monkeypatch.setattr(cost_report, "EnergyMeter", Counting)
    code, out, err = call(server.url, "--for", "0.01", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["total"] == {"prompt": 50, "cached": 0, "generated": 10}
    assert (report["joules"], report["joules_per_token"], report["energy_source"]) == (36, 3.6, "RAPL")


def test_a_measured_time_ends_with_ctrl_c(server: Metrics, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    server.texts = [METRICS, METRICS.replace("} 40.0", "} 41.0")]

    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    code, out, _ = call(server.url, "--for", "1000", "--watts", "50", "--json")
    report = json.loads(out)
    assert (code, report["total"]["generated"], report["energy_source"]) == (0, 1, "stated")
    assert report["joules"] == pytest.approx(50 * report["seconds"])


def test_missing_counters_are_explained(
    server: Metrics, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Missing(EnergyMeter):
        def __init__(self) -> None:
            super().__init__(tmp_path)

    monkeypatch.setattr(cost_report, "EnergyMeter", Missing)
    code, _, err = call(server.url, "--for", "0.01")
    assert code == 0
    assert err.startswith("The energy is not known: there are no RAPL counters in ")


@pytest.mark.parametrize(
    ("text", "status", "arguments", "said"),
    [
        (METRICS, 401, [], "/metrics refuses with 401"),
        ("nothing 1.0\n", 200, [], "not those of a localllm server"),
        ("localllm_tasks 1.0\n", 200, [], "does not say how long it has run; measure from now on with --for"),
        (METRICS, 200, ["--api-prompt", "1"], "needs both --api-prompt and --api-generated"),
        (METRICS, 200, ["--api-cached", "1"], "needs both --api-prompt and --api-generated"),
    ],
)
def test_invalid_options_are_refused(
    server: Metrics, call: Call, text: str, status: int, arguments: list[str], said: str
) -> None:
    server.texts, server.status = [text], status
    code, out, err = call(server.url, *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_no_server(call: Call) -> None:
    code, _, err = call("http://127.0.0.1:1")
    assert code == 2
    assert "http://127.0.0.1:1 cannot be reached" in err
