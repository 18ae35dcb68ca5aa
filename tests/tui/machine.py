"""The content of the pictures: questions, answers, a running engine, and its machine."""

import math
import threading
from dataclasses import replace

import numpy as np
from textual.pilot import Pilot

from localllm.answer.event import Logprob, PartKind
from localllm.engine.inspection import EngineSnapshot, PrefixView, RequestView, Span, StepRecord, Timeline
from localllm.library.suggestions import ranked
from localllm.speed.expected import expected_decode
from localllm.speed.kept import KeptLimits
from localllm.wings.lab.laboratory import MachineCosts, StepPart
from localllm.wings.lab.simulate.shape import llama_3_8b
from tests.fakes.fake_backend import FakeBackend, ended, said
from tui.app import ChatApp
from tui.backend import PickerRow
from tui.choices import to_pull

QUESTION = "Why do trees lose their leaves?"
ANSWER = """\
Trees lose their leaves to **save water**: in winter the ground is frozen, and wide leaves would lose what the \
roots cannot replace.

| tree   | leaves in winter |
|--------|------------------|
| beech  | no               |
| spruce | yes              |

```python
def is_bare(month: int) -> bool:
    return month in (12, 1, 2)
```
"""
WIDE = """\
# Three trees

1. First, the *table*, of which the longest cells wrap:

| tree | family | leaves | where it grows best in the open | height |
|------|--------|:------:|---------------------------------|-------:|
| Fagus sylvatica | Fagaceae | broad, thin, shed every autumn | central Europe up to 1,400 m | 40 m |
| Picea abies | Pinaceae | needles, kept for seven years | boreal and alpine forests | 50 m |

2. Then code that is wider than the window:

```python
def heights(trees: dict[str, list[float]], *, unit: str = "m") -> dict[str, float]:  # the mean of each
    return {name: sum(values) / len(values) for name, values in trees.items() if values and unit == "m"}
```

> A quotation: `<div>` and <List<String>> stay as they are, 日本語 and 👩‍🔬 too.
"""
OLD = "def is_bare(month: int) -> bool:\n    return month in (12, 1, 2)\n"
NEW = """\
    winter = (12, 1, 2) if north else (6, 7, 8)
    return month in winter
"""
NOTES = "# Ships\n\nThe harbour was built in 1924.\nIt has three piers, and\na small crane.\n"
QUOTING = """\
The harbour is about a hundred years old:

- "The harbour was built in 1924."
- It has "three piers, and a small crane", and "a red lighthouse".
"""

TIMELINES = (
    Timeline(0.0, [Span(False, 1.0, 2.0, 32), Span(False, 2.0, 3.0, 64), Span(True, 3.0, 8.0, 10)], 16, 10, 8.0),
    Timeline(4.0, [Span(False, 8.0, 9.0, 40)]),
)
SNAPSHOT = EngineSnapshot(
    steps=(*[StepRecord(512, 0, 0, 0.2)] * 3, StepRecord(31, 1, 0, 0.05), *[StepRecord(0, 1, 3, 0.02)] * 40),
    requests=(RequestView(140, 139, 16, 23, waiting=False, background=False),),
    prefixes=(PrefixView(0, 320, 2, 5, (PrefixView(320, 480, 1, 4), PrefixView(320, 400, 1, 5))),),
    page_size=16,
    pages_total=1000,
    page_holders=np.array([3] * 20 + [2] * 9 + [1] * 18, np.int32),
    timelines=TIMELINES,
    now=10.0,
)
# Per weight a byte and two operations: 8 GB of layers, 1 GB of logits, 1 KiB of keys and values per token.
SHAPE = replace(
    llama_3_8b(), layers=1, kv_heads=4, head_size=64, weights=9e9, dense_bytes=8e9, output_bytes=1e9,
    row_operations=16e9, output_operations=2e9,
)  # fmt: skip
COSTS = MachineCosts(SHAPE, (StepPart("layers", 8e9, 16e9), StepPart("logits", 1e9, 2e9)), 8.0, "f16", 90e9, 1800e9)
MEASURED = KeptLimits("a processor", "avx2", 2, "2026-11-23", read=20e9, int8=500e9, floats=100e9)
RIVALS = Logprob(b" water", math.log(0.75), ((b" water", math.log(0.75)), (b" light", math.log(0.2))))


class Machine(FakeBackend):
    """Scripted answers, a built-in model, some to pull; nothing changes by itself."""

    def __init__(self) -> None:
        super().__init__([said("Water, I think.", PartKind.REASONING), said(ANSWER), ended()])
        self.snapshot, self.model_costs = SNAPSHOT, COSTS
        self.painted = threading.Event()

    def memory_bytes(self) -> int | None:
        """The constant result of a periodic query, which pictures must not depend on."""
        return None

    def models(self, near: str | None) -> list[PickerRow]:
        """Listed once the chat behind the list is complete, so that the picture is always the same."""
        assert self.painted.wait(60)
        built_in = PickerRow(
            "builtin", 6_000_000, "Q8_0", "5.6 M", 1024, 30_000_000, source="built-in", suits="small stories"
        )
        speeds = [(one, expected_decode(one.read, one.main_type, MEASURED)[0]) for one in ranked(4 * 2**30)]
        return [built_in, *(to_pull(suggestion, speed) for suggestion, speed in speeds)]


def machine_of(pilot: Pilot[None]) -> Machine:
    app = pilot.app
    assert isinstance(app, ChatApp) and isinstance(app.backend, Machine)
    return app.backend
