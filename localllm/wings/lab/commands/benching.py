"""What `localllm bench` does: measures in a thread, stores the results for this machine and shows them."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from gguf_io import open_model
from gguf_io.interruption import POLL_S
from localllm.front.pulling import obtain
from localllm.front.terminal import ExitCode, StatusLine, answer, note
from localllm.settings import Settings, load_settings
from localllm.speed.expected import main_type
from localllm.speed.kept import kept_path
from localllm.wings.lab.roofline.bench import bench, bench_limits
from localllm.wings.lab.roofline.report import BenchReport, as_data, as_text, keep
from localllm.wings.lab.roofline.speeds import BenchRequest


def run_bench(
    model: str | None,
    flags: Mapping[str, object],
    threads: tuple[int, ...] | None,
    request: BenchRequest,
    as_json: bool,
) -> None:
    """Measure a model, or this machine's limits only, with each number of threads. Ctrl-C ends the process.

    flags: settings by flag. threads: None for the number of the settings.
    """
    settings = load_settings(flags)
    counts = threads or (settings.threads,)
    with ThreadPoolExecutor(1, "bench") as worker, StatusLine() as status:
        measuring = worker.submit(_measure, model, settings, counts, request, status)
        try:
            while not measuring.done():
                wait([measuring], POLL_S)  # Ctrl-C does not end a longer wait on Windows
            report = measuring.result()
        except KeyboardInterrupt:
            status.clear()
            note("Stopped; nothing was stored.")
            # Running kernels cannot be stopped and may take seconds; they hold nothing that needs saving.
            os._exit(ExitCode.INTERRUPTED)
    answer(json.dumps(as_data(report)) + "\n" if as_json else as_text(report))


def _measure(
    model: str | None,
    settings: Settings,
    counts: tuple[int | None, ...],
    request: BenchRequest,
    status: StatusLine,
) -> BenchReport:
    if model is None:
        report, name, weights = bench_limits(counts, request.rounds, status.show), "", ""
    else:
        with open_model(obtain(model, settings).path) as file:
            report, name, weights = bench(file, settings, counts, request, status.show), file.name, main_type(file)
    status.clear()
    try:
        keep(report, name, weights)
    except OSError as error:
        note(f"The results were not stored: {kept_path()} cannot be written: {error.strerror}.")
    return report
