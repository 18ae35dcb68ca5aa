"""Watermarks: what sampling raises, what overrules it, and what detection finds."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.answer.local import LocalModel
from localllm.answer.request import AnswerRequest
from localllm.cli.main import main
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.sampling import Sampler
from localllm.engine.sampling.watermark import green
from localllm.errors import RequestError, SettingsError
from localllm.library.lookup import built_in_model
from localllm.placement.loaded_model import LoadedModel, load_model
from localllm.remote.ollama import OllamaModel, OllamaServer
from localllm.remote.openai import OpenAIServer
from localllm.settings import Settings, load_settings, setting_sources
from localllm.wings.lab.quality.watermark import detect, significance
from tests.localllm.engine.distribution import distribution

KEY = "sesame street"
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
WORDS = 1003  # no multiple of a vector


def logits_of(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(WORDS).astype(np.float32)


def colours(before: int, key: str = KEY, gamma: float = 0.25) -> np.ndarray:
    return green(np.array([[before, token] for token in range(WORDS)]), key, gamma)


@pytest.mark.parametrize(("delta", "gamma"), [(2.0, 0.25), (0.5, 0.5), (8.0, 0.05)])
def test_green_tokens_are_likelier_by_delta(delta: float, gamma: float) -> None:
    params = SamplingParams(**PLAIN, watermark_key=KEY, watermark_delta=delta, watermark_gamma=gamma)
    sampler, logits = Sampler(params, WORDS, [5]), logits_of()
    for before in (5, 9):
        raised = logits.astype(np.float64) + delta * colours(before, gamma=gamma)
        expected = np.exp(raised) / np.exp(raised).sum()
        assert distribution(sampler, logits) == pytest.approx(expected, rel=1e-5)
        sampler.accept(9)


def test_colours_depend_on_key_and_token_before_and_share_is_gamma() -> None:
    for gamma in (0.25, 0.6):
        shares = [colours(before, key, gamma).mean() for before in range(50) for key in ("a", "b")]
        assert np.mean(shares) == pytest.approx(gamma, abs=4 * (gamma * (1 - gamma) / (100 * WORDS)) ** 0.5)
    assert (colours(1) == colours(2)).mean() == pytest.approx(0.625, abs=0.08)
    assert (colours(1, "a") == colours(1, "b")).mean() == pytest.approx(0.625, abs=0.08)


def test_greedy_answers_prefer_green_tokens_within_delta() -> None:
    logits = np.zeros(WORDS, np.float32)
    isgreen = colours(7)
    red, marked = int(np.flatnonzero(~isgreen)[0]), int(np.flatnonzero(isgreen)[3])
    logits[red], logits[marked] = 5.0, 3.5
    for delta, chosen in ((2.0, marked), (1.0, red)):
        params = SamplingParams(temperature=0, watermark_key=KEY, watermark_delta=delta)
        assert Sampler(params, WORDS, [7]).sample(logits)[0] == chosen


def test_masks_bans_and_bias_overrule_the_watermark() -> None:
    logits, isgreen = logits_of(), colours(7)
    red, marked = np.flatnonzero(~isgreen), np.flatnonzero(isgreen)
    params = SamplingParams(**PLAIN, watermark_key=KEY, watermark_delta=50.0, logit_bias={int(marked[0]): -np.inf})
    allowed = np.zeros(WORDS, np.bool_)
    allowed[red[:3]] = True
    shares = distribution(Sampler(params, WORDS, [7]), logits, allowed)
    assert set(np.flatnonzero(shares)) == set(red[:3])
    assert distribution(Sampler(params, WORDS, [7]), logits)[marked[0]] == 0
    chosen, _ = Sampler(params, WORDS, [7]).sample(logits, None, np.flatnonzero(isgreen))
    assert not isgreen[chosen]


def test_log_probabilities_are_the_models_own_and_its_logits_stay() -> None:
    logits = logits_of()
    before = logits.copy()
    marked = Sampler(SamplingParams(**PLAIN, seed=1, logprobs=2, watermark_key=KEY), WORDS, [7]).sample(logits)[1]
    plain = Sampler(SamplingParams(**PLAIN, seed=1, logprobs=2), WORDS, [7]).sample(logits)[1]
    assert marked is not None and plain is not None and marked.top == plain.top
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("off", ["", None])
def test_without_a_key_there_is_no_watermark(off: str | None) -> None:
    assert np.array_equal(
        distribution(Sampler(SamplingParams(**PLAIN, watermark_key=off), WORDS, [7]), logits_of()),
        distribution(Sampler(SamplingParams(**PLAIN), WORDS, [7]), logits_of()),
    )


def test_significance_is_the_exact_one_for_equal_weights() -> None:
    """Expected: tails of binomial distributions, from R's pbinom."""
    for count, marked, gamma, expected in (
        (100, 40, 0.25, 6.76e-4),
        (100, 35, 0.25, 0.0164),
        (40, 30, 0.5, 1.11e-3),
        (200, 50, 0.25, 0.5257),
    ):
        _, p = significance(np.ones(count), np.arange(count) < marked, gamma)
        # The approximation is continuous: it lies between the tails at this count and the next.
        assert expected / 2.2 < p < expected * 1.1
    assert significance(np.zeros(9), np.ones(9, np.bool_), 0.25) == (0.0, 1.0)
    assert significance(np.ones(30), np.ones(30, np.bool_), 0.25)[1] < 1e-12


@pytest.fixture(scope="module")
def built_in() -> Any:
    with load_model(built_in_model().path, Settings()) as model:
        yield model


def written(model: LoadedModel, count: int, **sampling: Any) -> list[str]:
    bos = model.tokenizer.bos_id
    assert bos is not None
    prompt = (bos, *model.tokenizer.encode("One day a little girl named Lily"))
    streams = [
        model.engine.submit(
            GenerationRequest(
                prompt, SamplingParams(seed=number, **sampling), max_tokens=200, ignore_eos=True, persist=False
            )
        )
        for number in range(count)
    ]
    return ["".join(event.text for event in stream) for stream in streams]


def test_marked_texts_are_found_with_their_key_only(
    built_in: LoadedModel, tmp_path: Path, run_detect: Callable[..., dict[str, Any]]
) -> None:
    for number, text in enumerate(written(built_in, 3, watermark_key=KEY, watermark_delta=5.0)):
        path = tmp_path / f"{number}.txt"
        path.write_text(text, encoding="utf-8")
        found = run_detect(path, KEY, "--delta", "5")
        assert found["marked"] is True and found["p"] < 1e-3 and found["z"] > 3
        assert 0 < found["green"] <= found["pairs"] < found["tokens"]
        assert run_detect(path, "another key", "--delta", "5")["z"] < 3


@pytest.fixture
def run_detect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(path: Path, key: str, *more: str) -> dict[str, Any]:
        monkeypatch.setattr(
            "sys.argv", ["localllm", "detect", str(path), "--key", key, "--model", "builtin", "--json", *more]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        output = capsys.readouterr()
        assert key not in output.out + output.err
        return dict(json.loads(output.out))

    return run


def test_short_texts_give_no_verdict(tmp_path: Path, run_detect: Callable[..., dict[str, Any]]) -> None:
    for text in ("", "Hi", "Once upon a time."):
        (tmp_path / "text").write_text(text, encoding="utf-8")
        assert run_detect(tmp_path / "text", KEY)["marked"] is None


def test_detection_reads_long_texts_in_parts(built_in: LoadedModel) -> None:
    text = " ".join(written(built_in, 4))
    tokens = built_in.tokenizer.encode(text)
    assert len(tokens) > 600
    with load_model(built_in_model().path, Settings()) as other:
        parts: list[int] = []
        found = detect(
            other.engine.runner, tokens, built_in.tokenizer.bos_id, (KEY, 2.0, 0.25), lambda at, _: parts.append(at)
        )
    assert parts == [0, 1] and found.tokens == len(tokens) and found.p > 1e-4


def test_the_setting_marks_every_answer_unless_a_request_overrides_it(built_in: LoadedModel) -> None:
    settings = Settings(watermark_key=KEY, watermark_gamma=0.4)
    with load_model(built_in_model().path, settings) as model:
        local = LocalModel("builtin", model)
        messages = [{"role": "user", "content": "Hi"}]
        for given, key, gamma in (
            ({}, KEY, 0.4),
            ({"watermark_key": ""}, "", 0.4),
            ({"watermark_gamma": 0.3}, KEY, 0.3),
        ):
            sampling = local.prepare(AnswerRequest(messages=messages, sampling=given)).generation.sampling
            assert (sampling.watermark_key, sampling.watermark_gamma) == (key, gamma)


def test_the_key_is_not_revealed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(SettingsError) as refused:
        load_settings({}, {"LOCALLLM_WATERMARK_KEY": f"{KEY}\0"})
    shown = repr(SamplingParams(watermark_key=KEY)) + repr(Settings(watermark_key=KEY)) + str(refused.value)
    assert KEY not in shown + caplog.text
    assert setting_sources({"LOCALLLM_WATERMARK_KEY": KEY})["watermark_key"][0] == KEY


def test_other_servers_are_not_asked_for_a_watermark() -> None:
    with pytest.raises(SettingsError, match="watermark_key marks answers of this machine"):
        OpenAIServer.at("http://127.0.0.1:1", Settings(watermark_key=KEY))
    request = AnswerRequest(messages=[{"role": "user", "content": "Hi"}], sampling={"watermark_key": KEY})
    for model in (OpenAIServer.at("http://127.0.0.1:1", Settings()).model("x"), OllamaModel(OllamaServer("host"), "x")):
        with pytest.raises(RequestError, match="watermark_key marks answers of this machine"):
            model.prepare(request)


def test_detect_asks_for_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("Once", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["localllm", "detect", str(tmp_path / "text"), "--model", "builtin"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "Which key?" in capsys.readouterr().err
