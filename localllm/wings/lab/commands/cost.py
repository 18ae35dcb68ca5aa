"""localllm cost: the energy and money that a server's answers cost."""

from typing import Annotated

import typer

from localllm.errors import RequestError
from localllm.front.options import AsJson


def cost(
    url: Annotated[
        str | None, typer.Argument(help="Address of the server (from the settings).", show_default=False)
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(
            "--for", metavar="S", min=0.001, help="Measure for S seconds instead of since the server's start."
        ),
    ] = None,
    watts: Annotated[
        float | None, typer.Option(metavar="W", min=0, help="Average power of the machine during that time.")
    ] = None,
    kwh_price: Annotated[float | None, typer.Option(metavar="P", min=0, help="Price per kWh.")] = None,
    api_prompt: Annotated[
        float | None, typer.Option(metavar="P", min=0, help="An API's price per million prompt tokens.")
    ] = None,
    api_generated: Annotated[
        float | None, typer.Option(metavar="P", min=0, help="Its price per million generated tokens.")
    ] = None,
    api_cached: Annotated[
        float | None, typer.Option(metavar="P", min=0, help="Its price per million cached prompt tokens.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the energy and cost of what a server has served.

    Counts tokens by model from the server's /metrics, which contain no text. With --for, energy is measured with the
    processor's own counters (RAPL) if they are readable; otherwise state the power with --watts. Money is in the
    currency of the given prices.
    """
    from localllm.wings.lab.commands.cost_report import show_cost
    from localllm.wings.lab.served import Prices

    if (api_prompt is None) != (api_generated is None) or (api_cached is not None and api_prompt is None):
        raise RequestError("An API's price needs both --api-prompt and --api-generated.")
    show_cost(url, watch, watts, Prices(kwh_price, api_prompt, api_generated, api_cached), as_json)
