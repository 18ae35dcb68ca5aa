"""localllm loadtest: measures a server's latency, throughput and goodput under load."""

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from localllm.errors import RequestError
from localllm.front.options import AsJson, numbers, with_flags
from localllm.front.terminal import ExitCode, StatusLine, answer, note
from localllm.settings import load_settings, read_key
from localllm.text import table

if TYPE_CHECKING:
    from localllm.wings.lab.charts import Chart
    from localllm.wings.lab.loadtest.session import LoadTest, RequestSource
    from localllm.wings.lab.loadtest.trial import Load

MOST_REQUESTS = 100_000
LEAST_RATE = 0.001
MOST_CONNECTIONS = 4096
MOST_SECONDS = 86_400
_PROMPT, _ANSWER = "256", "64"
Bounds = Annotated[
    str | None, typer.Option(metavar="BOUNDS", help="SLO for goodput, such as ttft=2s,tpot=100ms; also itl, e2e.")
]


@dataclass(frozen=True)
class Given:
    """The flags of `loadtest` and `simulate` that define the requests to send, and the loads."""

    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trace to replay, in Azure's or Mooncake's format.")
    ]
    scale: Annotated[float | None, typer.Option(metavar="X", help="Divide a trace's lengths by X.")]
    speedup: Annotated[float | None, typer.Option(metavar="X", help="Replay a trace X times as fast.")]
    prompt_tokens: Annotated[
        str | None, typer.Option(metavar="N[:M]", help=f"Length of random prompts, uniformly distributed ({_PROMPT}).")
    ]
    answer_tokens: Annotated[
        str | None, typer.Option(metavar="N[:M]", help=f"Most tokens of an answer, uniformly distributed ({_ANSWER}).")
    ]
    shared_prefix: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Length of a prefix that prompts share.")
    ]
    prefixes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of shared prefixes (1).")]
    rate: Annotated[
        str | None,
        typer.Option(metavar="R[,R...]", help="Open loop: Poisson arrivals at R per second; a trial for each."),
    ]
    concurrency: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Closed loop: N clients; a trial for each (1).")
    ]

    @classmethod
    def of(cls, given: typer.Context) -> Self:
        """The values of a command's flags."""
        return cls(**{name: given.params[name] for name in cls.__annotations__})

    def loads(self, knee: bool = False) -> "tuple[Load, ...]":
        """The load of each trial; empty for the search for the knee. Raises RequestError for conflicting options."""
        from localllm.wings.lab.loadtest.trial import ClosedLoop, OpenLoop

        if sum((self.rate is not None, self.concurrency is not None, knee)) > 1:
            raise RequestError("--rate, --concurrency and --knee exclude each other.")
        if self.speedup is not None and (self.rate or self.concurrency or knee):
            raise RequestError(
                "--speedup replays a trace's own times; it cannot be used with --rate, --concurrency, --knee."
            )
        if self.rate is not None:
            return tuple(OpenLoop(value) for value in numbers(self.rate, "--rate", float, LEAST_RATE, MOST_REQUESTS))
        if self.concurrency is not None:
            counts = numbers(self.concurrency, "--concurrency", int, 1, MOST_REQUESTS)
            return tuple(ClosedLoop(value) for value in counts)
        if knee:
            return ()
        return (ClosedLoop(1),) if self.trace is None else (OpenLoop(None),)

    def source(self, requests: int, seed: int, prompts: Path | None = None) -> "RequestSource":
        """The source of requests. prompts: a file with their texts. Raises RequestError for conflicting options."""
        shape = {name: getattr(self, name) for name in ("prompt_tokens", "shared_prefix", "prefixes")}
        if self.trace is not None:
            refuse("--trace", **shape, prompts=prompts, answer_tokens=self.answer_tokens)
            return self._traced(self.trace, requests, seed)
        refuse("requests that are not a trace's; they need --trace", scale=self.scale, speedup=self.speedup)
        if prompts is not None:
            refuse("--prompts", **shape)
        return self._made_up(seed, prompts)

    def _traced(self, trace: Path, requests: int, seed: int) -> "RequestSource":
        from localllm.wings.lab.loadtest.session import RequestSource
        from localllm.wings.lab.workload.traces import read_trace, scaled

        for option, value in (("--scale", self.scale), ("--speedup", self.speedup)):
            if value is not None and not 0 < value < float("inf"):
                raise RequestError(f"{option} is {value}; give a number above 0.")
        rows = scaled(read_trace(trace, requests), self.scale or 1.0, self.speedup or 1.0)
        return RequestSource(lambda count, _seed: rows[:count], seed)

    def _made_up(self, seed: int, prompts: Path | None) -> "RequestSource":
        """Requests of random lengths; with a prompts file, its prompts are sent and only the answer lengths apply."""
        from localllm.wings.lab.loadtest.session import RequestSource
        from localllm.wings.lab.workload.requests import Lengths, RequestShape
        from localllm.wings.lab.workload.texts import read_prompts

        if self.prefixes is not None and self.shared_prefix is None:
            raise RequestError("--prefixes needs --shared-prefix, their length.")
        prompt = Lengths.parse(self.prompt_tokens or _PROMPT, "--prompt-tokens")
        answers = Lengths.parse(self.answer_tokens or _ANSWER, "--answer-tokens")
        shape = RequestShape(prompt, answers, self.shared_prefix or 0, self.prefixes or 1)
        return RequestSource(shape.requests, seed, read_prompts(prompts) if prompts else ())


@with_flags(Given.__annotations__, after="prompts")
def loadtest(  # noqa: PLR0913, PLR0917 - one parameter for each flag
    given: typer.Context,
    url: Annotated[str, typer.Argument(help="Address of the server, http://host:port.", show_default=False)],
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model to test (the server's only one).")] = None,
    api: Annotated[str | None, typer.Option(metavar="NAME", help="openai or ollama (detected).")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send prompts without the chat template.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts to send: one per line, or .jsonl.")
    ] = None,
    knee: Annotated[bool, typer.Option("--knee", help="Search for the highest rate that meets the SLO.")] = False,
    slo: Bounds = None,
    requests: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_REQUESTS, help="Most requests in a trial.")
    ] = 32,
    duration: Annotated[
        float,
        typer.Option(metavar="S", min=0.001, max=MOST_SECONDS, help="Seconds during which a trial sends requests."),
    ] = 120,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=0.001, max=MOST_SECONDS, help="Time limit of a request in seconds.")
    ] = 120,
    connections: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_CONNECTIONS, help="Most concurrent connections.")
    ] = 256,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Seed, to repeat an earlier test's lengths, texts and arrivals.")
    ] = None,
    body: Annotated[
        str | None, typer.Option(metavar="JSON", help='Fields for every request, such as {"ignore_eos": true}.')
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw TTFT and TPOT in the terminal.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them to a new SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a server under load. TTFT, ITL, TPOT, E2E, throughput, goodput.

    Works with any server of Ollama's or OpenAI's protocol; contacts no other address. The API key comes from
    LOCALLLM_REMOTE_KEY or remote_key_file. Ctrl-C stops the test and shows the results so far.

    Exit status: 0 when done, 2 if it cannot be measured, 130 after Ctrl-C.
    """
    from localllm.slo import Slo
    from localllm.wings.lab.loadtest.server import LoadTarget
    from localllm.wings.lab.loadtest.session import LoadTest, TrialPlan
    from localllm.wings.lab.loadtest.trial import Bounds

    if api not in (None, "openai", "ollama"):
        raise RequestError(f"--api must be openai or ollama (got {api!r}).")
    if knee and slo is None:
        raise RequestError("--knee needs --slo: it searches for the highest rate that meets it.")
    check_drawing(plot, as_json, svg)
    workload = Given.of(given)
    wanted = workload.loads(knee)
    # A new seed each time: the server may still have the prompts of the last test cached.
    seed = secrets.randbelow(MOST_REQUESTS) if seed is None else seed
    source = workload.source(requests, seed, prompts)
    settings = load_settings({})
    key = read_key(settings.remote_key, settings.remote_key_file, "remote_key_file")
    plan = TrialPlan(
        LoadTarget(url, api, model, raw, _fields(body), key),
        wanted,
        Bounds(requests, duration, timeout),
        connections,
        None if slo is None else Slo.parse(slo),
    )
    stopped = False
    with StatusLine() as status:
        session = LoadTest(plan, source, status.show)
        try:
            asyncio.run(session.run())
        except KeyboardInterrupt:
            stopped = True
    _print(session, as_json, plot, svg)
    if stopped:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _print(session: "LoadTest", as_json: bool, plot: bool, svg: Path | None) -> None:
    from localllm.wings.lab.loadtest import report

    if as_json:
        answer(json.dumps(report.as_data(session), ensure_ascii=False) + "\n")
    if not any(trial.outcomes for trial in session.trials):
        note("Stopped before any request was answered.")
        return
    if not as_json:
        answer(f"{report.head(session)}\n\n{table(report.rows(session.trials, session.plan.slo))}\n")
        answer("".join(f"{line}\n" for line in report.sentences(session)))
    draw(lambda: report.charts(session.model, session.trials), plot, svg)


def draw(charts: "Callable[[], Sequence[Chart]]", plot: bool, svg: Path | None) -> None:
    """Draw charts in the terminal if plot is set, and to a new file if svg is given."""
    from localllm.wings.lab.charts import in_terminal
    from localllm.wings.lab.charts import svg as as_svg

    if plot:
        answer("".join(f"\n{in_terminal(chart)}" for chart in charts()))
    if svg is not None:
        with svg.open("x", encoding="utf-8") as file:
            file.write(as_svg(charts()))
        note(f"Wrote {svg}.")


def refuse(other: str, **flags: object) -> None:
    """Raise RequestError if any of the flags is given (not None), because it cannot be combined with `other`."""
    given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None]
    if given:
        raise RequestError(f"{', '.join(given)} cannot be used with {other}.")


def check_drawing(plot: bool, as_json: bool, svg: Path | None) -> None:
    """Raise RequestError if charts cannot be drawn with these options."""
    if plot and as_json:
        raise RequestError("--plot cannot be used with --json; --svg draws to a file.")
    if svg is not None and os.path.exists(svg):
        raise RequestError(f"{svg} exists already; choose another file for --svg.")
    if svg is not None and not os.access(svg.parent, os.W_OK):
        raise RequestError(f"{svg} cannot be written: its folder does not exist, or is not yours to write to.")


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
