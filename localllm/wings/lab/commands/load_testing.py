"""What `localllm loadtest` does: sends a workload, and shows the trials."""

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from localllm.errors import RequestError
from localllm.front.options import numbers
from localllm.front.terminal import ExitCode, StatusLine, answer, note
from localllm.settings import load_settings, read_key
from localllm.slo import Slo
from localllm.text import table
from localllm.wings.lab.charts import Chart, in_terminal
from localllm.wings.lab.charts import svg as as_svg
from localllm.wings.lab.commands.flags import (
    ANSWER,
    MOST_REQUESTS,
    PROMPT,
    OutputFlags,
    TrialFlags,
    WorkloadFlags,
    check_drawing,
    refuse,
)
from localllm.wings.lab.loadtest import report
from localllm.wings.lab.loadtest.server import LoadTarget
from localllm.wings.lab.loadtest.session import LoadTest, RequestSource, TrialPlan
from localllm.wings.lab.loadtest.trial import Bounds, ClosedLoop, Load, OpenLoop
from localllm.wings.lab.workload.requests import Lengths, RequestShape
from localllm.wings.lab.workload.texts import read_prompts
from localllm.wings.lab.workload.traces import read_trace, scaled

LEAST_RATE = 0.001


def measure_load(url: str, test: TrialFlags, workload: WorkloadFlags, output: OutputFlags) -> None:
    """Test a server and print the results. Raises typer.Exit after Ctrl-C, RequestError for conflicting flags."""
    if test.api not in (None, "openai", "ollama"):
        raise RequestError(f"--api must be openai or ollama (got {test.api!r}).")
    if test.knee and test.slo is None:
        raise RequestError("--knee needs --slo: it searches for the highest rate that meets it.")
    check_drawing(output.plot, output.as_json, output.svg)
    wanted = loads(workload, test.knee)
    # A new seed each time: the server may still have the prompts of the last test cached.
    seed = secrets.randbelow(MOST_REQUESTS) if test.seed is None else test.seed
    requests = source(workload, test.requests, seed, test.prompts)
    settings = load_settings({})
    key = read_key(settings.remote_key, settings.remote_key_file, "remote_key_file")
    plan = TrialPlan(
        LoadTarget(url, test.api, test.model, test.raw, _fields(test.body), key),
        wanted,
        Bounds(test.requests, test.duration, test.timeout),
        test.connections,
        None if test.slo is None else Slo.parse(test.slo),
    )
    stopped = False
    with StatusLine() as status:
        session = LoadTest(plan, requests, status.show)
        try:
            asyncio.run(session.run())
        except KeyboardInterrupt:
            stopped = True
    _print(session, output)
    if stopped:
        raise typer.Exit(ExitCode.INTERRUPTED)


def loads(workload: WorkloadFlags, knee: bool = False) -> tuple[Load, ...]:
    """The load of each trial; empty for the search for the knee. Raises RequestError for conflicting options."""
    if sum((workload.rate is not None, workload.concurrency is not None, knee)) > 1:
        raise RequestError("--rate, --concurrency and --knee exclude each other.")
    if workload.speedup is not None and (workload.rate or workload.concurrency or knee):
        raise RequestError(
            "--speedup replays a trace's own times; it cannot be used with --rate, --concurrency, --knee."
        )
    if workload.rate is not None:
        return tuple(OpenLoop(value) for value in numbers(workload.rate, "--rate", float, LEAST_RATE, MOST_REQUESTS))
    if workload.concurrency is not None:
        counts = numbers(workload.concurrency, "--concurrency", int, 1, MOST_REQUESTS)
        return tuple(ClosedLoop(value) for value in counts)
    if knee:
        return ()
    return (ClosedLoop(1),) if workload.trace is None else (OpenLoop(None),)


def source(workload: WorkloadFlags, requests: int, seed: int, prompts: Path | None = None) -> RequestSource:
    """The source of requests. prompts: a file with their texts. Raises RequestError for conflicting options."""
    shape = {name: getattr(workload, name) for name in ("prompt_tokens", "shared_prefix", "prefixes")}
    if workload.trace is not None:
        refuse("--trace", **shape, prompts=prompts, answer_tokens=workload.answer_tokens)
        return _traced(workload, workload.trace, requests, seed)
    refuse("requests that are not a trace's; they need --trace", scale=workload.scale, speedup=workload.speedup)
    if prompts is not None:
        refuse("--prompts", **shape)
    return _made_up(workload, seed, prompts)


def _traced(workload: WorkloadFlags, trace: Path, requests: int, seed: int) -> RequestSource:
    for option, value in (("--scale", workload.scale), ("--speedup", workload.speedup)):
        if value is not None and not 0 < value < float("inf"):
            raise RequestError(f"{option} is {value}; give a number above 0.")
    rows = scaled(read_trace(trace, requests), workload.scale or 1.0, workload.speedup or 1.0)
    return RequestSource(lambda count, _seed: rows[:count], seed)


def _made_up(workload: WorkloadFlags, seed: int, prompts: Path | None) -> RequestSource:
    """Requests of random lengths; with a prompts file, its prompts are sent and only the answer lengths apply."""
    if workload.prefixes is not None and workload.shared_prefix is None:
        raise RequestError("--prefixes needs --shared-prefix, their length.")
    prompt = Lengths.parse(workload.prompt_tokens or PROMPT, "--prompt-tokens")
    answers = Lengths.parse(workload.answer_tokens or ANSWER, "--answer-tokens")
    shape = RequestShape(prompt, answers, workload.shared_prefix or 0, workload.prefixes or 1)
    return RequestSource(shape.requests, seed, read_prompts(prompts) if prompts else ())


def _print(session: LoadTest, output: OutputFlags) -> None:
    if output.as_json:
        answer(json.dumps(report.as_data(session), ensure_ascii=False) + "\n")
    if not any(trial.outcomes for trial in session.trials):
        note("Stopped before any request was answered.")
        return
    if not output.as_json:
        answer(f"{report.head(session)}\n\n{table(report.rows(session.trials, session.plan.slo))}\n")
        answer("".join(f"{line}\n" for line in report.sentences(session)))
    draw(lambda: report.charts(session.model, session.trials), output)


def draw(charts: Callable[[], Sequence[Chart]], output: OutputFlags) -> None:
    """Draw charts in the terminal and to a new file, as the flags say."""
    if output.plot:
        answer("".join(f"\n{in_terminal(chart)}" for chart in charts()))
    if output.svg is not None:
        with output.svg.open("x", encoding="utf-8") as file:
            file.write(as_svg(charts()))
        note(f"Wrote {output.svg}.")


def _fields(body: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(body or "{}")
    except ValueError as error:
        raise RequestError(f"--body is not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise RequestError('--body must be a JSON object, such as {"ignore_eos": true}.')
    if not isinstance(fields.get("options", {}), dict):
        raise RequestError('--body has "options" that are not a JSON object.')
    misplaced: Sequence[str] = [name for name in ("model", "messages", "prompt", "stream") if name in fields]
    if misplaced:
        raise RequestError(f"--body must not set {', '.join(misplaced)}: the load test does.")
    return fields
