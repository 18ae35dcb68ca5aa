"""The inspector's charts, rendered as text directly from the engine's data."""

import math
from collections.abc import Sequence

from textual.content import Content

from localllm.answer.event import Logprob
from localllm.engine.inspection import EngineSnapshot, PrefixView, StepRecord, depth_first
from localllm.text import counted, harmless, human_bytes, human_seconds
from tui.status import MUTED

PREFILL, DECODE, DRAFTED = "$primary", "$success", "$warning"
# Symbol and style of a page: free, held by one sequence, by two, by more.
_HELD = (("·", MUTED), ("░", "$primary"), ("▒", "$success"), ("█", "$warning"))
GIGA = 1e9
_EIGHTHS = " ▁▂▃▄▅▆▇█"

Piece = tuple[str, str]


def schedule(steps: Sequence[StepRecord], width: int, height: int = 4, rate: float | None = None) -> Content:
    """One column per step, newest on the right: its prefill, decode and draft rows on a log scale.

    rate: bytes per second read by the last step.
    """
    shown = steps[-width:]
    most = math.log2(1 + max((step.prefill + step.decode + step.drafted for step in shown), default=1))
    lines: list[Piece] = []
    for level in range(height - 1, -1, -1):
        for step in shown:
            rows = step.prefill + step.decode + step.drafted
            filled = math.log2(1 + rows) / most * height - level
            style = PREFILL if step.prefill else DRAFTED if step.drafted else DECODE
            lines.append((_EIGHTHS[min(max(round(filled * 8), 0), 8)], style))
        lines.append(("\n", ""))
    return Content.assemble(*lines, *_schedule_legend(shown, rate))


def _schedule_legend(steps: Sequence[StepRecord], rate: float | None) -> list[Piece]:
    if not steps:
        return [("Nothing has been computed yet.", MUTED)]
    last, most = steps[-1], max(step.prefill + step.decode + step.drafted for step in steps)
    kinds = ((last.prefill, "prefill"), (last.decode, "decode"), (last.drafted, "drafted"))
    rows = ", ".join(f"{count} {kind}" for count, kind in kinds if count)
    return [
        ("█ prefill ", PREFILL),
        ("█ decode ", DECODE),
        ("█ drafts", DRAFTED),
        (f" · up to {counted(most, 'row')} (log)\n", MUTED),
        (f"last: {rows} in {human_seconds(last.seconds)}", MUTED),
        (f", {rate / GIGA:.3g} GB/s" if rate else "", MUTED),
    ]


def pages(snapshot: EngineSnapshot, width: int, height: int = 4, token_bytes: float = 0.0) -> Content:
    """A map of the pool's pages by number of holders: running sequences and cached prefixes.

    Each cell covers adjacent pages and shows the highest holder count among them. Free cells fill the remaining space.
    token_bytes: KV cache bytes per token, 0 if unknown.
    """
    holders = snapshot.page_holders
    extent = int(holders.nonzero()[0][-1]) + 1 if holders.any() else 0
    per_cell = max(math.ceil(extent / (width * height)), 1)
    most = [int(holders[start : min(start + per_cell, extent)].max()) for start in range(0, extent, per_cell)]
    rest = math.ceil((snapshot.pages_total - extent) / per_cell)
    cells = [_HELD[min(count, 3)] for count in most] + [_HELD[0]] * min(rest, width * height - len(most))
    lines = [piece for start in range(0, len(cells), width) for piece in (*cells[start : start + width], ("\n", ""))]
    counts = [int((holders == 1).sum()), int((holders == 2).sum()), int((holders > 2).sum())]
    free = snapshot.pages_total - sum(counts) - snapshot.window_pages
    legend = [
        (f"{sign} {count} {what} ", style)
        for (sign, style), count, what in zip(_HELD, (free, *counts), ("free", "once", "twice", "more"), strict=True)
    ]
    size = counted(snapshot.page_size, "token")
    if token_bytes:
        size += f", {human_bytes(round(token_bytes * snapshot.page_size))}"
    note = f"\n{size} a page · {counted(per_cell, 'page')} a cell"
    if snapshot.window_pages:
        kept = f", and {snapshot.kept_window_pages} for branches" if snapshot.kept_window_pages else ""
        note += f" · windows take {counted(snapshot.window_pages, 'page')} more{kept}"
    return Content.assemble(*lines, *legend, (note, MUTED))


def tree(prefixes: Sequence[PrefixView], most: int = 12) -> Content:
    """The prefix tree, indented by depth; the bar shows the edge's length in tokens on a log scale."""
    nodes = list(depth_first(prefixes))
    if not nodes:
        return Content.styled("No prefix is kept yet.", MUTED)
    newest = max(node.last_used for _, node in nodes)
    lines: list[Piece] = []
    for level, node in nodes[:most]:
        tokens = node.stop - node.start
        lines += [
            ("  " * level + ("└ " if level else ""), MUTED),
            ("━" * max(round(math.log2(1 + tokens)), 1), "$accent" if node.sharers > 1 else "$primary"),
            (f" {counted(tokens, 'token')}", ""),
            (f" · {node.sharers} share" if node.sharers > 1 else "", "$accent"),
            ("  ← used last" if node.last_used == newest and not node.children else "", "$success"),
            ("\n", ""),
        ]
    if len(nodes) > most:
        lines.append((f"and {len(nodes) - most} more", MUTED))
    return Content.assemble(*lines)


def histogram(name: str, seconds: Sequence[float], width: int) -> Content:
    """A histogram with power-of-two buckets; median and 95th percentile are exact."""
    if not seconds:
        return Content.styled(f"{name}: nothing measured yet", MUTED)
    buckets: dict[int, int] = {}
    for value in seconds:
        place = math.floor(math.log2(max(value, 1e-6)))
        buckets[place] = buckets.get(place, 0) + 1
    ordered = sorted(seconds)
    middle, late = ordered[len(ordered) // 2], ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)]
    lines: list[Piece] = [
        (name, "bold"),
        (f"  p50 {human_seconds(middle)}  p95 {human_seconds(late)}  n={len(seconds)}\n", MUTED),
    ]
    room = max(width - 22, 4)
    for place in range(min(buckets), max(buckets) + 1):
        count = buckets.get(place, 0)
        length = math.ceil(count / max(buckets.values()) * room)
        lines += [
            (f"{human_seconds(2.0**place):>8} ", MUTED),
            ("█" * length, "$secondary"),
            (f" {count or ''}\n", MUTED),
        ]
    return Content.assemble(*lines)


def choices(tokens: Sequence[Logprob], most: int = 10) -> Content:
    """The last tokens with their probabilities before sampling filters, and their alternatives."""
    if not tokens:
        return Content.styled("Press p: the next answers note each token's alternatives.", MUTED)
    lines: list[Piece] = []
    for token in tokens[-most:]:
        probability = math.exp(token.logprob)
        style = "$success" if probability > 0.5 else "$warning" if probability > 0.1 else "$error"
        lines += [(f"{_visible(token.text):<12}", "bold"), (f"{probability:6.1%}  ", style)]
        for other, logprob in token.top[:4]:
            if other != token.token:
                lines.append((f"{_visible(other.decode(errors='replace'))} {math.exp(logprob):.0%}  ", MUTED))
        lines.append(("\n", ""))
    return Content.assemble(*lines)


def speculation(drafted: int, accepted: int) -> Content:
    if not drafted:
        return Content.styled("No token was drafted yet.", MUTED)
    share = accepted / drafted
    return Content.assemble(
        ("Speculation", "bold"),
        (f"  {accepted} of {drafted} accepted ({share:.0%})", "$success" if share > 0.5 else "$warning"),
    )


def requests(snapshot: EngineSnapshot, most: int = 8) -> Content:
    """Running and waiting requests, and the last finished ones."""
    lines: list[Piece] = []
    for request in snapshot.requests[:most]:
        decodes = request.generated and request.tokens - request.computed <= 1  # else it reads text, perhaps again
        state = "waits" if request.waiting else "decodes" if decodes else "prefills"
        lines += [
            (f"{state:<9}", "$warning" if request.waiting else "$success"),
            (f"{request.computed}/{request.tokens} computed · {request.cached} cached · {request.generated} new", ""),
            ("  background" if request.background else "", MUTED),
            ("\n", ""),
        ]
    if not snapshot.requests:
        lines.append(("Idle\n", MUTED))
    ended = [each for each in snapshot.timelines if each.ended is not None]
    for each in ended[::-1][: max(most - len(snapshot.requests) - 1, 0)]:
        took = human_seconds((each.ended or 0.0) - each.came)
        computed = sum(span.rows for span in each.spans if not span.decodes)
        what = f"{computed} computed · {each.cached} cached · {each.generated} new in {took}\n"
        lines += [(f"{'ended':<9}", MUTED), (what, MUTED)]
    return Content.assemble(*lines)


def _visible(text: str) -> str:
    """A token's text on one line with visible whitespace."""
    return harmless(text).replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")[:12] or "∅"
