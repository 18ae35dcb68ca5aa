"""localllm run against a scripted engine: its requests, its output, its exit."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli.main import main
from localllm.engine.request import Counts, FinishReason, GenerationRequest, Progress, Timings, TokenEvent
from localllm.engine.stream import GenerationStream
from localllm.errors import ContextOverflowError, OutOfMemoryError
from localllm.placement.placement import Placement
from localllm.settings import Settings
from tests.systems import FULL, needs_full_device

COUNTS = Counts(prompt=5, cached_memory=2, cached_disk=1, generated=3, drafted=4, accepted=1, recomputed=2)
TIMINGS = Timings(queue_s=0.25, prefill_s=0.5, decode_s=1.0, ttft_s=0.75, restore_s=0.125, drafting_s=0.25)
ANSWER = [
    TokenEvent(progress=Progress(queue_position=0, prefilled=1, total=5)),
    TokenEvent(text="On", token_ids=(7,)),
    TokenEvent(text="ce é", token_ids=(8, 9)),
    TokenEvent(finish_reason=FinishReason.STOP, counts=COUNTS, timings=TIMINGS, seed=42),
]


class ScriptedModel:
    """A loaded model whose engine answers with given events; records the request and whether it was closed."""

    sees_images = False
    see = None

    def __init__(self, events: Sequence[TokenEvent] = ANSWER, has_template: bool = True) -> None:
        self.events = list(events)
        self.template = SimpleNamespace(
            is_default=not has_template,
            reasoning_markers=(),
            shown="",
            source="",
            supports_thinking=False,
            stop_strings=("<end>",),
            render=self.render,
            starts_in_reasoning=lambda _text: False,
        )
        self.tokenizer = SimpleNamespace(
            encode=lambda text, **_options: list(text.encode()),
            markup=lambda _text: [],
            token_bytes=lambda token: bytes([token]),
            add_bos=False,
            bos_id=None,
        )
        self.engine = SimpleNamespace(submit=self.submit, context=512)
        self.placement = Placement("native", "the script says so")
        self.request = GenerationRequest(prompt=())
        self.messages: list[dict[str, str]] = []
        self.settings = Settings()
        self.closed = False
        self.refusal: Exception | None = None

    def __enter__(self) -> "ScriptedModel":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def load(
        self, path: Path, settings: Settings, progress: Callable[[str, float], None], template: str | None
    ) -> "ScriptedModel":
        self.settings = settings
        progress("loading", 0.5)
        return self

    def render(self, messages: list[dict[str, str]], **_options: Any) -> str:
        self.messages = messages
        return "rendered"

    def submit(self, request: GenerationRequest) -> GenerationStream:
        if self.refusal:
            raise self.refusal
        self.request = request
        stream = GenerationStream(lambda: stream.push(TokenEvent(finish_reason=FinishReason.CANCELLED)))
        for event in self.events:
            stream.push(event)
        return stream


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Run the command line on a scripted model and return the exit code."""

    def call(model: ScriptedModel, *arguments: str, stdin: bytes | None = None) -> int:
        monkeypatch.setattr("localllm.front.models.load_model", model.load)
        monkeypatch.setattr("localllm.settings.config_path", lambda: tmp_path / "config.toml")
        monkeypatch.setattr("sys.stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setattr("sys.argv", ["localllm", "run", "model.gguf", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return call


def test_the_answer_is_all_that_goes_to_stdout(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel()
    assert run(model, "Hello") == 0
    assert capsys.readouterr() == ("Once é\n", "")
    assert model.closed
    assert model.messages == [{"role": "user", "content": "Hello"}]
    assert model.request.prompt == tuple(b"rendered")
    assert (model.request.stop, model.request.ends) == ((), ("<end>",))


def test_an_answer_cut_off_by_a_limit_the_user_did_not_give_is_reported(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    cut = [*ANSWER[:-1], replace(ANSWER[-1], finish_reason=FinishReason.LENGTH)]
    assert run(ScriptedModel(cut), "Hello") == 0
    told = "The answer is cut off: with its prompt it reached 8 tokens. Raise --ctx or --max-tokens.\n"
    assert capsys.readouterr() == ("Once é\n", told)
    assert run(ScriptedModel(cut), "Hello", "--max-tokens", "9", "--ctx", "8") == 0
    assert capsys.readouterr().err == told
    assert run(ScriptedModel(cut), "Hello", "--max-tokens", "3") == 0
    assert run(ScriptedModel(cut), "Hello", "--json") == 0
    assert capsys.readouterr().err == ""


def test_what_a_schema_cannot_enforce_is_checked_and_reported(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedModel, "constraint", lambda *_, **_after: None, raising=False)
    assert run(ScriptedModel(), "Hello", "--format", '{"type": "object"}') == 0
    told = "warning: The answer cannot be read as JSON: Expecting value: line 1 column 1 (char 0).\n"
    assert capsys.readouterr() == ("Once é\n", told)
    assert run(ScriptedModel(), "Hello", "--format", "json") == 0
    assert capsys.readouterr().err == ""


def test_every_flag_reaches_the_request(run: Callable[..., int]) -> None:
    model = ScriptedModel()
    flags = "--max-tokens 9 --temperature 0.5 --top-k 3 --top-p 0.6 --min-p 0.1 --repeat-penalty 1.2 --seed 11"
    penalties = ["--presence-penalty", "1.5", "--frequency-penalty", "-0.5"]
    assert (
        run(
            model,
            "Hi",
            *flags.split(),
            *penalties,
            "--stop",
            "A",
            "--stop",
            "B",
            "--ignore-eos",
            "--system",
            "Be brief.",
        )
        == 0
    )
    sampling = model.request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.6, 0.1)
    assert (sampling.repeat_penalty, sampling.seed, model.request.max_tokens) == (1.2, 11, 9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -0.5)
    assert (model.request.stop, model.request.ends) == (("A", "B"), ("<end>",))
    assert model.request.ignore_eos
    assert model.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_ctx_threads_and_backend_reach_the_loader(run: Callable[..., int]) -> None:
    model = ScriptedModel()
    assert run(model, "Hi", "--ctx", "77", "--threads", "3", "--backend", "llama") == 0
    assert (model.settings.ctx, model.settings.threads, model.settings.backend) == (77, 3, "llama")


def test_only_long_prompts_are_kept_on_disk_and_none_with_no_cache(run: Callable[..., int]) -> None:
    for prompt, flags, kept, cached in (("x" * 257, [], True, True), ("x" * 256, ["--no-cache"], False, False)):
        model = ScriptedModel()
        assert run(model, prompt, "--raw", *flags) == 0
        assert (model.request.persist, model.settings.disk_cache) == (kept, cached)


def test_without_a_template_the_prompt_is_continued(run: Callable[..., int]) -> None:
    for model, flags in ((ScriptedModel(has_template=False), []), (ScriptedModel(), ["--raw"])):
        assert run(model, "Hi", *flags) == 0
        assert model.request.prompt == tuple(b"Hi")
        assert model.messages == []


def test_stdin_is_appended(run: Callable[..., int]) -> None:
    model = ScriptedModel()
    assert run(model, "Translate:", stdin=b"Guten Tag\n") == 0
    assert model.messages[0]["content"] == "Translate:\n\nGuten Tag"


def test_json_is_one_object(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ScriptedModel(), "Hi", "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == ""
    assert result["timings"].pop("load_s") >= 0
    assert result == {
        "text": "Once é",
        "token_ids": [7, 8, 9],
        "prompt_tokens": 5,
        "cached_tokens": 3,
        "recomputed_tokens": 2,
        "drafted_tokens": 4,
        "accepted_tokens": 1,
        "completion_tokens": 3,
        "finish_reason": "stop",
        "model": "model.gguf",
        "backend": "native",
        "backend_reason": "the script says so",
        "timings": {
            "queue_s": 0.25,
            "prefill_s": 0.5,
            "decode_s": 1.0,
            "ttft_s": 0.75,
            "restore_s": 0.125,
            "drafting_s": 0.25,
        },
    }


def test_stats_go_to_stderr(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ScriptedModel(), "Hi", "--stats") == 0
    out, err = capsys.readouterr()
    assert out == "Once é\n"
    # 5 - 3 tokens in 0.5 s, 3 - 1 tokens in 1 s
    for words in (
        "TTFT 0.750 s",
        "prefill 4.0 tok/s",
        "decode 2.0 tok/s (1 of 4 drafted tokens accepted, drafted in 0.25 s)",
        "memory ",
        "seed 42",
        "(3 cached, 1 of them read from the disk in 0.125 s; 2 stored tokens computed again, which is faster here)",
        "native: the script says so",
    ):
        assert words in err


class Interrupting:
    """Stdout that triggers Ctrl-C when the first text is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        if not self.text:
            os.kill(os.getpid(), signal.SIGINT)
        self.text += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_ctrl_c_keeps_what_was_written_and_exits_130(run: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGINT)
    model = ScriptedModel(ANSWER[:2])
    out = Interrupting()
    monkeypatch.setattr(sys, "stdout", out)
    assert run(model, "Hi") == 130
    assert out.text == "On\n"
    assert model.closed
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_while_loading_exits_130(run: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel()
    monkeypatch.setattr(model, "load", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert run(model, "Hi") == 130


@pytest.mark.parametrize("refusal", [ContextOverflowError(600, 512), OutOfMemoryError("The model does not fit.")])
def test_a_refused_request_prints_a_sentence_and_exits_2(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], refusal: Exception
) -> None:
    model = ScriptedModel()
    model.refusal = refusal
    assert run(model, "Hi", "--json") == 2
    assert capsys.readouterr() == ("", f"error: {refusal}\n")
    assert model.closed


@pytest.mark.parametrize(
    "arguments",
    [["--raw", "--system", "x"], ["--top-k", "many"], ["--temprature", "1"], ["--ctx", "0"], ["--backend", "gpu"]],
)
def test_impossible_flags_exit_2(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(ScriptedModel(), "Hi", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert arguments[-2].lstrip("-") in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["top_p", "min_p", "temperature", "repeat_penalty", "top_k"])
def test_a_bad_sampling_value_is_refused_before_a_model_is_loaded(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    model = ScriptedModel()
    monkeypatch.setattr(model, "load", lambda *_: pytest.fail("the model was loaded"))
    assert run(model, "Hi", f"--{name.replace('_', '-')}=-7") == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"error: --{name.replace('_', '-')} must be at least ")) == ("", True), err


def test_system_needs_a_template(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ScriptedModel(has_template=False), "Hi", "--system", "x") == 2
    assert "the model has no chat template for system text" in capsys.readouterr().err


def test_an_engine_that_fails_exits_1(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    failed = TokenEvent(finish_reason=FinishReason.ERROR, error="logits are not numbers")
    assert run(ScriptedModel([*ANSWER[:2], failed]), "Hi") == 1
    assert capsys.readouterr() == ("On\n", "error: logits are not numbers\n")
    assert run(ScriptedModel([*ANSWER[:2], failed]), "Hi", "--json") == 1
    assert capsys.readouterr().out == ""


@needs_full_device
def test_a_full_disk_is_reported_and_is_not_a_bug() -> None:
    call = [sys.executable, "-c", "from tui.main import main; main()", "list"]
    with open(FULL, "wb") as full:
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: The disk is full. Free some space: `localllm cache`")


def test_a_defect_shows_its_traceback_with_debug_alone(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ScriptedModel()
    model.refusal = ZeroDivisionError("division by zero")
    for flags, shown in (([], False), (["--debug"], True)):
        assert run(model, "Hi", *flags) == 1
        err = capsys.readouterr().err
        assert err.startswith("error: ZeroDivisionError: division by zero. This is a bug")
        assert ("Traceback" in err) == shown
