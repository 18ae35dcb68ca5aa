"""The benchmark of one model: alternates limits and speeds, for each thread count."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from time import perf_counter

import psutil

from cpu_kernels import tuning
from cpu_kernels.compile_children import KernelError
from cpu_kernels.cores import usable_cores, usable_processors
from cpu_kernels.isa import ISA
from gguf_io import ModelFile, load_tokenizer
from localllm.engine.runner import Runner
from localllm.errors import RequestError
from localllm.placement.backends import choose_backend, native_kv_types, open_runner
from localllm.settings import Settings
from localllm.speed.formats import measure_formats
from localllm.speed.work import TokenWork, work_in_header
from localllm.wings.lab.roofline.decode_step import measure_steps
from localllm.wings.lab.roofline.limits import LimitProbes
from localllm.wings.lab.roofline.report import BenchReport, Measure, ThreadReport
from localllm.wings.lab.roofline.speeds import BenchRequest, SpeedTest
from models.errors import kernels_needed
from models.native_runner import NativeRunner
from models.needs import native_needs

# Maximum decoded steps profiled by part: enough for a median.
_MOST_STEPS = 32

Tell = Callable[[str], None]


def bench(
    file: ModelFile, settings: Settings, threads: Sequence[int | None], request: BenchRequest, tell: Tell
) -> BenchReport:
    """Measure a model with each thread count (None: the runner's choice). tell: called with the current activity.

    Raises RequestError if the request exceeds the model's context, and what open_runner raises.
    """
    context = file.metadata.get_int(f"{file.architecture}.context_length", request.longest)
    if request.longest > context:
        raise RequestError(
            f"The measurement needs {request.longest} tokens, but the model's context is {context}.",
            remedy="Choose a smaller --prompt, --depth or --tokens.",
        )
    others = _others_seconds()
    if not tuning.is_measured() and choose_backend(file, settings).backend == "native":
        with contextlib.suppress(KernelError):  # ignored here; the model's own kernels decide whether it loads
            _tune(tell)
    reports, backend = [], ""
    for count in threads:
        report, backend = _bench_threads(file, replace(settings, threads=count), request, tell)
        reports.append(report)
    return BenchReport(
        model=file.path.name,
        architecture=file.architecture,
        backend=backend,
        instruction_set=str(ISA),
        rounds=request.rounds,
        others_cores=_others_cores(others),
        threads=tuple(reports),
    )


def bench_limits(threads: Sequence[int | None], rounds: int, tell: Tell) -> BenchReport:
    """Measure this machine's limits without a model, with each thread count (None: the default of models)."""
    others, reports = _others_seconds(), []
    with kernels_needed():
        _tune(tell)
    for count in threads:
        with closing(LimitProbes(min(count or usable_cores(), usable_processors()), perf_counter)) as probes:
            for number in range(rounds + 1):
                tell(f"round {number} of {rounds}: the limits of this machine")
                probes.sample()
                if not number:  # the warm-up round
                    probes.forget()
            reports.append(ThreadReport(probes.threads, probes.limits(), (), ()))
    return BenchReport("", "", "native", str(ISA), rounds, _others_cores(others), tuple(reports))


def _tune(tell: Tell) -> None:
    tell("prefetch distance of weights")
    tuning.measure()


def _others_seconds() -> tuple[float, float]:
    """The time, and the processor time that other programs have used so far."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return perf_counter(), times.user + times.system - own.user - own.system


def _others_cores(since: tuple[float, float]) -> float:
    """Cores that other programs kept busy on average since a result of _others_seconds."""
    at, busy = (now - before for now, before in zip(_others_seconds(), since, strict=True))
    return max(0.0, busy / at) if at else 0.0


def _bench_threads(file: ModelFile, settings: Settings, request: BenchRequest, tell: Tell) -> tuple[ThreadReport, str]:
    """The measurements with the settings' thread count, and the backend's name."""
    with ExitStack() as stack:
        settings = replace(settings, ctx=request.kv_tokens)
        runner, placed = open_runner(file, settings, lambda what, share: tell(f"{what}: {share:.0%}"))
        stack.callback(runner.close)
        rows = runner.info.max_rows
        if not isinstance(runner, NativeRunner):
            test = _rounds(runner, None, request, tell)
            count = settings.threads or usable_cores()
            return ThreadReport(count, None, _measures(test, request, None, rows), ()), placed.name
        count = runner.last_step().threads
        probes = stack.enter_context(closing(LimitProbes(count, perf_counter)))
        test = _rounds(runner, probes, request, tell)
        types = native_kv_types(file, settings.kv_types)
        tell("the rates of the weight formats")
        rates = measure_formats(runner, native_needs(file, types, count), request.rounds, perf_counter)
        tell("where a token's time goes")
        prompts = [(depth, test.tokens[: max(1, depth)]) for depth in request.depths]
        steps = measure_steps(runner, load_tokenizer(file), prompts, min(request.tokens, _MOST_STEPS))
        measures = _measures(test, request, work_in_header(file, types), rows)
        return ThreadReport(count, probes.limits(), measures, tuple(steps), rates), placed.name


def _rounds(runner: Runner, probes: LimitProbes | None, request: BenchRequest, tell: Tell) -> SpeedTest:
    """Run a warm-up round, then all rounds, sampling the limits before each."""
    number = 0
    test = SpeedTest(runner, request, perf_counter, lambda what: tell(f"round {number} of {request.rounds}: {what}"))
    for number in range(request.rounds + 1):
        if probes is not None and number:
            probes.sample()
        test.round()
    test.close()
    return test


def _measures(test: SpeedTest, request: BenchRequest, work: TokenWork | None, max_rows: int) -> tuple[Measure, ...]:
    """The timed measures, with the work of each. The first round is a warm-up."""
    prompt = None if work is None else work.prefill(request.prompt, max_rows)
    found = [Measure(f"prefill {request.prompt}", request.prompt, 0, tuple(test.prefill[1:]), prompt)]
    for depth, times in test.decode.items():
        token = None if work is None else work.decode(depth, request.tokens)
        found.append(Measure(f"decode at {depth}", request.tokens, depth, tuple(times[1:]), token))
    return tuple(found)
