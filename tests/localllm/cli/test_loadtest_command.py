"""localllm loadtest: what it refuses, and whole runs against a server on a real socket."""

import json
import signal
from pathlib import Path

import pytest

from localllm.cli.main import main
from tests.fakes.openai_server import ScriptedOpenAI, openai_server
from tests.forking import PROGRAM, Nursery
from tests.waiting import eventually

QUICK = ["--model", "tiny", "--requests", "4"]


def refused(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["localllm", "loadtest", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--api", "grpc"], "--api must be openai or ollama (got 'grpc')"),
        (["--knee"], "--knee needs --slo"),
        (["--slo", "fast"], "The SLO has 'fast'"),
        (["--rate", "1", "--concurrency", "2"], "--rate, --concurrency and --knee exclude each other"),
        (["--rate", "0"], "--rate is '0'; use numbers from 0.001 to 100,000"),
        (["--rate", "nan"], "--rate is 'nan'"),
        (["--concurrency", "1,2.5"], "--concurrency is '1,2.5'"),
        (["--scale", "8"], "--scale cannot be used with requests that are not a trace's"),
        (["--trace", "x", "--answer-tokens", "5"], "--answer-tokens cannot be used with --trace"),
        (["--trace", "x", "--prompts", "y"], "--prompts cannot be used with --trace"),
        (["--prompts", "y", "--shared-prefix", "5"], "--shared-prefix cannot be used with --prompts"),
        (["--trace", "x", "--speedup", "2", "--rate", "1"], "--speedup replays a trace's own times"),
        (["--trace", "x", "--scale", "0"], "--scale is 0.0; give a number above 0"),
        (["--trace", "./nowhere"], "nowhere: cannot be read"),
        (["--prefixes", "2"], "--prefixes needs --shared-prefix"),
        (["--prompt-tokens", "9:3"], "--prompt-tokens is '9:3'"),
        (["--shared-prefix", "300"], "leaves nothing of a prompt of 256"),
        (["--requests", "1000000"], "'--requests': must be at most 100000 (got 1000000)"),
        (["--connections", "5000"], "'--connections': must be at most 4096 (got 5000)"),
        (["--duration", "inf"], "'--duration': must be at most 86400 (got inf)"),
        (["--timeout", "1e5"], "'--timeout': must be at most 86400 (got 1e5)"),
        (["--plot", "--json"], "--plot cannot be used with --json"),
        (["--body", "{"], "--body is not JSON"),
        (["--body", "[]"], "--body must be a JSON object"),
        (["--body", '{"stream": false}'], "--body must not set stream"),
        (["--body", '{"options": 1}'], "are not a JSON object"),
        ([], "http://127.0.0.1:1 cannot be reached"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = refused("http://127.0.0.1:1", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert said in found.replace("\n", " ")


def test_no_file_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there.svg"
    there.write_text("mine", encoding="utf-8")
    found = refused("http://127.0.0.1:1", "--svg", str(there), monkeypatch=monkeypatch, capsys=capsys)
    assert "there.svg exists already" in found
    assert there.read_text(encoding="utf-8") == "mine"


def answered(server: ScriptedOpenAI) -> None:
    server.says("one ", "two ", "three", prompt_tokens=9, completion_tokens=3)
    server.json_answer = None


def test_prompts_of_a_file(tmp_path: Path, children: Nursery) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\nsecond\n", encoding="utf-8")
    drawn = tmp_path / "load.svg"
    with openai_server() as server:
        answered(server)
        arguments = [server.address, *QUICK, "--prompts", str(prompts), "--concurrency", "1,2", "--slo", "ttft=1000s"]
        done = children.run("loadtest", *arguments, "--svg", str(drawn), "--plot")
        sent = [body["messages"][0]["content"] for body in server.asked]
    assert done.stderr == f"Wrote {drawn}.\n"  # no progress if stderr is not a terminal
    head, _, *table = done.stdout.splitlines()
    assert head.startswith(f"tiny at {server.address} (openai); one request alone: TTFT ")
    assert table[0].split()[:5] == ["LOAD", "ANSWERED", "REQ/S", "TOK/S", "TTFT"]
    assert [line[:20] for line in table[1:3]] == ["1 client   4 of 4   ", "2 clients  4 of 4   "]
    assert "(clients)" in done.stdout
    assert sent[:6] == ["first", "second"] * 3  # of one client; two send at the same time
    assert sorted(sent[6:]) == ["first"] * 2 + ["second"] * 2
    assert drawn.read_text(encoding="utf-8").startswith("<svg")


def test_json_of_an_open_loop(tmp_path: Path, children: Nursery) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["first"]}\n', encoding="utf-8")
    with openai_server() as server:
        answered(server)
        arguments = [server.address, *QUICK, "--prompts", str(prompts), "--rate", "1000", "--seed", "5", "--json"]
        arguments += ["--body", '{"ignore_eos": true}', "--answer-tokens", "3"]
        own = {"LOCALLLM_REMOTE_KEY": "secret", "http_proxy": "http://127.0.0.1:1"}
        done = children.run("loadtest", *arguments, **own)
        assert done.returncode == 0, done.stderr
        assert set(server.keys) == {"Bearer secret"}
        assert set(server.paths) == {"/v1/models", "/v1/chat/completions"}
        assert {(body["max_tokens"], body["ignore_eos"]) for body in server.asked} == {(3, True)}
    report = json.loads(done.stdout)
    assert (report["model"], report["api"], report["seed"], report["knee"]) == ("tiny", "openai", 5, None)
    (trial,) = report["trials"]
    assert (trial["load"], trial["rate"], trial["answered"], trial["complete"]) == ("open", 1000, 4, True)
    assert (trial["prompt_tokens"], trial["generated_tokens"], trial["good"]) == (36, 12, None)
    assert [outcome["error"] for outcome in trial["outcomes"]] == [None] * 4
    assert len({outcome["due"] for outcome in trial["outcomes"]}) == 4


def test_failures_are_counted_and_said(tmp_path: Path, children: Nursery) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\n", encoding="utf-8")
    with openai_server() as server:
        server.pieces, server.ending = [{"content": "half an"}], b""
        done = children.run("loadtest", server.address, *QUICK, "--prompts", str(prompts))
    assert done.returncode == 2
    assert "cannot be measured: the stream ended before the answer did" in done.stderr


def test_ctrl_c_ends_it_with_what_was_measured(tmp_path: Path, children: Nursery) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\n", encoding="utf-8")
    with openai_server() as server:
        answered(server)
        arguments = [server.address, *QUICK, "--prompts", str(prompts), "--requests", "1000"]
        process = children.start(PROGRAM, ["loadtest", *arguments])
        try:
            eventually(lambda: len(server.asked) > 4)
            server.hold.clear()  # from now on answers do not end, so the test cannot finish before the signal
            process.send_signal(signal.SIGINT)
            out, err = (said.decode() for said in process.communicate())
        finally:
            process.kill()
    assert process.returncode == 130
    assert err == ""
    assert "TTFT" in out
    assert "1 client: stopped" in out
