"""What `localllm cost` does: reads what a server has served, and adds up energy and money."""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, astuple
from typing import Any

import httpx2

from localllm.errors import RequestError, reason
from localllm.front.local_server import LocalServer, server_of
from localllm.front.terminal import StatusLine, answer, note
from localllm.text import table
from localllm.wings.lab.energy import EnergyMeter, EnergyUnknownError
from localllm.wings.lab.served import Prices, Receipt, Tally, Tokens, TokensServed, read_metrics

INTERVAL_S = 5.0


def show_cost(url: str | None, watch: float | None, watts: float | None, prices: Prices, as_json: bool) -> None:
    """Print what a server's answers cost. The arguments are those of the command. Raises RequestError."""
    server = server_of(url)
    models, seconds, joules, unknown = _since_start(server) if watch is None else _watched(server, watch, watts)
    joules = joules if watts is None else watts * seconds
    receipt = Receipt(models, seconds, joules, prices)
    source = None if joules is None else "RAPL" if watts is None else "stated"
    data = _data(receipt, server.url, source)
    answer(json.dumps(data, ensure_ascii=False) + "\n" if as_json else _text(receipt, source))
    if joules is None:
        note(f"The energy is not known: {unknown}. State the machine's power with --watts.")


_Measured = tuple[Mapping[str, Tokens], float, float | None, str]
"""Tokens by model, seconds, joules, and the reason if joules are None."""


def _since_start(server: LocalServer) -> _Measured:
    reading = _read(server)
    if reading.seconds is None:
        raise RequestError(f"{server.url} does not say how long it has run; measure from now on with --for.")
    return reading.models, reading.seconds, None, "RAPL needs --for"


def _watched(server: LocalServer, watch: float, watts: float | None) -> _Measured:
    """Add up what is served for `watch` seconds, or until Ctrl-C."""
    meter, unknown = None, ""
    if watts is None:
        try:
            meter = EnergyMeter()
        except EnergyUnknownError as error:
            unknown = str(error)
    tally, began = Tally(_read(server)), time.monotonic()
    with StatusLine() as status, contextlib.suppress(KeyboardInterrupt):
        while (left := watch - (time.monotonic() - began)) > 0:
            status.show(f"measuring, {left:.0f} s left; Ctrl-C stops")
            time.sleep(min(left, INTERVAL_S))
            tally.add(_read(server))
            if meter is not None:
                meter.joules()  # read often enough to notice when the counters wrap
    tally.add(_read(server))
    return tally.models, time.monotonic() - began, None if meter is None else meter.joules(), unknown


def _read(server: LocalServer) -> TokensServed:
    """Read the server's counters. Raises RequestError."""

    try:
        response = server.send("GET", "/metrics")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise RequestError(f"{server.url} cannot be reached: {reason(error)}. Is `localllm serve` running?") from error
    if response.status_code != httpx2.codes.OK:
        raise RequestError(f"{server.url}/metrics refuses with {response.status_code}.")
    return read_metrics(response.text)


def _text(receipt: Receipt, source: str | None) -> str:
    total = receipt.total
    rows = [(name, *map(str, astuple(tokens))) for name, tokens in sorted(receipt.models.items())]
    if len(rows) > 1:
        rows.append(("all", *map(str, astuple(total))))
    parts = (
        [table([("MODEL", "PROMPT", "CACHED", "GENERATED"), *rows])] if rows else ["No model has served any tokens.\n"]
    )
    hours = receipt.seconds / 3600
    facts = [("time", f"{hours:.2f} h" if hours >= 0.1 else f"{receipt.seconds:.1f} s")]
    figures = (
        ("energy", receipt.kwh, f"{{:.4g}} kWh ({source})"),
        ("", receipt.joules_per_token, "{:.3g} J for each generated token"),
        ("electricity", receipt.electricity, "{:.4g}"),
        ("", receipt.electricity_per_million, "{:.4g} for a million generated tokens"),
        ("API", receipt.api, "{:.4g} for the same tokens"),
    )
    facts += [(label, text.format(value)) for label, value, text in figures if value is not None]
    return "\n".join([*parts, table(facts)])


def _data(receipt: Receipt, address: str, source: str | None) -> dict[str, Any]:
    """Plain data: energy in joules and kWh, money in the prices' currency, None for what is unknown."""
    figures = ("joules", "kwh", "joules_per_token", "electricity", "electricity_per_million", "api")
    return {
        "url": address,
        "seconds": receipt.seconds,
        "models": {name: asdict(tokens) for name, tokens in receipt.models.items()},
        "total": asdict(receipt.total),
        "energy_source": source,
        **{name: getattr(receipt, name) for name in figures},
    }
