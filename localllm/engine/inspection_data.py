"""An engine's snapshot as JSON, so that a chat can draw a server's engine. It has counts and times, no text."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import numpy as np

from localllm.engine.inspection import EngineSnapshot, PrefixView, RequestView, Span, StepRecord, Timeline

MOST_LEVELS = 64  # trees may be deeper than Python's and JSON's recursion allow


def snapshot_data(snapshot: EngineSnapshot) -> dict[str, Any]:
    """Data for JSON, with MOST_LEVELS of the prefix trees.

    page_holders is run-length encoded as [pages, holders], since most neighbours are equal.
    """
    runs = [[len(list(run)), count] for count, run in groupby(snapshot.page_holders.tolist())]
    prefixes = tuple(_shallow(prefix, MOST_LEVELS) for prefix in snapshot.prefixes)
    return {**asdict(replace(snapshot, prefixes=prefixes)), "page_holders": runs}


def snapshot_of(data: Mapping[str, Any]) -> EngineSnapshot:
    """The snapshot from snapshot_data's result. Raises TypeError, KeyError or ValueError for anything else."""
    runs = data["page_holders"]
    return EngineSnapshot(
        steps=tuple(StepRecord(**step) for step in data["steps"]),
        requests=tuple(RequestView(**request) for request in data["requests"]),
        prefixes=tuple(map(_prefix, data["prefixes"])),
        page_size=int(data["page_size"]),
        pages_total=int(data["pages_total"]),
        page_holders=np.repeat([count for _, count in runs], [pages for pages, _ in runs]).astype(np.int32),
        timelines=tuple(
            Timeline(**{**timeline, "spans": [Span(**span) for span in timeline["spans"]]})
            for timeline in data["timelines"]
        ),
        now=float(data["now"]),
        window_pages=int(data.get("window_pages", 0)),
        kept_window_pages=int(data.get("kept_window_pages", 0)),
    )


def _shallow(prefix: PrefixView, levels: int) -> PrefixView:
    children = prefix.children if levels > 1 else ()
    return replace(prefix, children=tuple(_shallow(child, levels - 1) for child in children))


def _prefix(data: Mapping[str, Any]) -> PrefixView:
    return PrefixView(**{**data, "children": tuple(map(_prefix, data["children"]))})
