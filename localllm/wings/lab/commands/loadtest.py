"""localllm loadtest: measures a server's latency, throughput and goodput under load."""

from typing import Annotated

import typer

from localllm.front.options import with_flags
from localllm.wings.lab.commands.flags import OutputFlags, TrialFlags, WorkloadFlags


@with_flags(OutputFlags)
@with_flags(WorkloadFlags, after="prompts")
@with_flags(TrialFlags)
def loadtest(
    given: typer.Context,
    url: Annotated[str, typer.Argument(help="Address of the server, http://host:port.", show_default=False)],
) -> None:
    """Measure a server under load. TTFT, ITL, TPOT, E2E, throughput, goodput.

    Works with any server of Ollama's or OpenAI's protocol; contacts no other address. The API key comes from
    LOCALLLM_REMOTE_KEY or remote_key_file. Ctrl-C stops the test and shows the results so far.

    Exit status: 0 when done, 2 if it cannot be measured, 130 after Ctrl-C.
    """
    from localllm.wings.lab.commands.load_testing import measure_load

    measure_load(url, TrialFlags.of(given), WorkloadFlags.of(given), OutputFlags.of(given))
