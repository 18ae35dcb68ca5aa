"""The benchmark of one model: alternates limits and speeds, for each thread count."""

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import cast

import psutil

from cpu_kernels import tuning
from cpu_kernels.compile_children import KernelError
from cpu_kernels.cores import usable_cores, usable_processors
from cpu_kernels.isa import ISA
from gguf_io import ModelFile, load_tokenizer
from localllm.engine.backends import choose_backend, native_kv_types, open_runner
from localllm.engine.runner import Runner
from localllm.errors import RequestError
from localllm.roofline.decode_step import DecodeStep, MeasuredRunner, measure_steps
from localllm.roofline.formats import FormatRates, measure_formats
from localllm.roofline.limits import LimitProbes
from localllm.roofline.report import Measure, Report, ThreadReport
from localllm.roofline.speeds import BenchRequest, Seconds, SpeedTest
from localllm.roofline.work import ModelWork, looks
from localllm.settings import Settings
from models.errors import kernels_needed
from models.needs import native_needs

# Maximum decoded steps profiled by part: enough for a median.
_MOST_STEPS = 32

Tell = Callable[[str], None]
Clock = Callable[[], float]


def bench(
    file: ModelFile,
    settings: Settings,
    threads: Sequence[int | None],
    request: BenchRequest,
    tell: Tell,
    clock: Clock = time.perf_counter,
) -> Report:
    """Measure a model with each thread count (None: the runner's choice). tell: called with the current activity.

    Raises RequestError if the request exceeds the model's context, and what open_runner raises.
    """
    context = file.metadata.get_int(f"{file.architecture}.context_length", request.longest)
    if request.longest > context:
        raise RequestError(
            f"The measurement needs {request.longest} tokens, but the model's context is {context}. "
            "Choose a smaller --prompt, --depth or --tokens."
        )
    others = OthersTime(clock)
    if not tuning.is_measured() and choose_backend(file, settings).backend == "native":
        with contextlib.suppress(KernelError):  # ignored here; the model's own kernels decide whether it loads
            _tune(tell)
    reports, backend = [], ""
    for count in threads:
        report, backend = _bench_threads(file, replace(settings, threads=count), request, tell, clock)
        reports.append(report)
    return Report(
        model=file.path.name,
        architecture=file.architecture,
        backend=backend,
        instruction_set=str(ISA),
        rounds=request.rounds,
        others_cores=others.cores(),
        threads=tuple(reports),
    )


def bench_limits(threads: Sequence[int | None], rounds: int, tell: Tell, clock: Clock = time.perf_counter) -> Report:
    """Measure this machine's limits without a model, with each thread count (None: the default of models)."""
    others, reports = OthersTime(clock), []
    with kernels_needed():
        _tune(tell)
    for count in threads:
        with closing(LimitProbes(min(count or usable_cores(), usable_processors()), clock)) as probes:
            for number in range(rounds + 1):
                tell(f"round {number} of {rounds}: the limits of this machine")
                probes.sample()
                if not number:  # the warm-up round
                    probes.forget()
            reports.append(ThreadReport(probes.threads, probes.limits(), (), ()))
    return Report("", "", "native", str(ISA), rounds, others.cores(), tuple(reports))


def _tune(tell: Tell) -> None:
    tell("prefetch distance of weights")
    tuning.measure()


class OthersTime:
    """Measures how many cores other programs keep busy, from its creation on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start = self._now()

    def cores(self) -> float:
        """Busy cores on average, not counting this process."""
        at, busy = (now - before for now, before in zip(self._now(), self._start, strict=True))
        return max(0.0, busy / at) if at else 0.0

    def _now(self) -> tuple[float, float]:
        times = psutil.cpu_times()
        own = psutil.Process().cpu_times()
        return self._clock(), times.user + times.system - own.user - own.system


def _bench_threads(
    file: ModelFile, settings: Settings, request: BenchRequest, tell: Tell, clock: Clock
) -> tuple[ThreadReport, str]:
    settings = replace(settings, ctx=request.kv_tokens)
    with ExitStack() as stack:
        runner, choice = open_runner(file, settings, lambda what, share: tell(f"{what}: {share:.0%}"))
        stack.callback(runner.close)
        native = choice.backend == "native"
        count = cast("MeasuredRunner", runner).last_step().threads if native else settings.threads or usable_cores()
        probes = LimitProbes(count, clock) if native else None
        if probes is not None:
            stack.callback(probes.close)
        test = _rounds(runner, probes, request, tell, clock)
        work = _work(file, cast("MeasuredRunner", runner), settings) if native else None
        steps: tuple[DecodeStep, ...] = ()
        rates: FormatRates | None = None
        if native:
            tell("where a token's time goes")
            prompts = [(depth, test.tokens[: max(1, depth)]) for depth in request.depths]
            count_steps = min(request.tokens, _MOST_STEPS)
            measured = cast("MeasuredRunner", runner)
            tell("the rates of the weight formats")
            needs = native_needs(file, native_kv_types(settings), count)
            rates = measure_formats(measured, needs, request.rounds, clock)
            steps = tuple(measure_steps(measured, load_tokenizer(file), prompts, count_steps, clock))
        limits = None if probes is None else probes.limits()
        return ThreadReport(
            count, limits, _measures(test.seconds, request, work, runner.info.max_rows), steps, rates
        ), choice.name


def _rounds(runner: Runner, probes: LimitProbes | None, request: BenchRequest, tell: Tell, clock: Clock) -> SpeedTest:
    """Run a warm-up round, then all rounds, sampling the limits before each."""
    number = 0
    test = SpeedTest(runner, request, clock, lambda what: tell(f"round {number} of {request.rounds}: {what}"))
    for number in range(request.rounds + 1):
        if probes is not None and number:
            probes.sample()
        test.round(counts=number > 0)
    test.close()
    return test


def _work(file: ModelFile, runner: MeasuredRunner, settings: Settings) -> ModelWork:
    """What a token costs, from a recorded step of one row."""
    sequence = runner.create_sequence()
    runner.run([0], [0], [sequence], [0])
    row, logits = runner.last_step().products()
    runner.free_sequence(sequence)
    return ModelWork(row, logits, looks(file, native_kv_types(settings)))


def _measures(seconds: Seconds, request: BenchRequest, work: ModelWork | None, max_rows: int) -> tuple[Measure, ...]:
    """The timed measures, with the work of each."""
    prompt = None if work is None else work.prefill(request.prompt, max_rows)
    found = [Measure(f"prefill {request.prompt}", request.prompt, 0, tuple(seconds.prefill), prompt)]
    for depth, times in seconds.decode.items():
        token = None if work is None else work.decode(depth, request.tokens)
        found.append(Measure(f"decode at {depth}", request.tokens, depth, tuple(times), token))
    return tuple(found)
