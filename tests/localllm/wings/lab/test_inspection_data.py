"""A snapshot as JSON: trees of any depth."""

import json

import numpy as np

from localllm.engine.inspection import EngineSnapshot, PrefixView, depth_first
from localllm.engine.inspection_data import MOST_LEVELS, snapshot_data, snapshot_of


def test_a_tree_deeper_than_the_recursion_limit_is_cut() -> None:
    prefix = PrefixView(5000, 5001, 1, 1)
    for start in reversed(range(5000)):
        prefix = PrefixView(start, start + 1, 1, 1, (prefix,))
    snapshot = EngineSnapshot((), (), (prefix,), 16, 4, np.array([1, 1, 0, 2], np.int32))
    back = snapshot_of(json.loads(json.dumps(snapshot_data(snapshot))))
    assert [(level, view.start) for level, view in depth_first(back.prefixes)] == [
        (level, level) for level in range(MOST_LEVELS)
    ]
    assert back.page_holders.tolist() == [1, 1, 0, 2]
