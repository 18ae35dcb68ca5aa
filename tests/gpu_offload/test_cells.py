"""The accounting of KV cells, against a model that keeps a set of cells for every sequence."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu_offload.cells import CellPool

TOTAL = 40
STEPS = st.lists(st.tuples(st.sampled_from(["append", "fork", "truncate", "remove"]), st.integers(0, 99)), max_size=60)


@given(STEPS)
def test_free_cells_are_those_that_no_sequence_holds(steps):
    pool = CellPool(TOTAL)
    held: dict[int, list[int]] = {0: []}
    names = iter(range(1, 1000))
    for step, number in steps:
        if not held:
            held[next(names)] = []
        chosen = sorted(held)[number % len(held)]
        length = number % (len(held[chosen]) + 1)
        if step == "append":
            taken = pool.take(min(number % 9, pool.free)).tolist()
            assert not set(taken) & {cell for cells in held.values() for cell in cells}
            held[chosen] += taken
        elif step == "fork":
            fork = held[next(names)] = held[chosen][:length]
            pool.share(np.array(fork, dtype=np.int32))
        elif step == "truncate":
            pool.release(np.array(held[chosen][length:], dtype=np.int32))
            del held[chosen][length:]
        else:
            pool.release(np.array(held.pop(chosen), dtype=np.int32))
        sharers = [sum(cell in cells for cells in held.values()) for cell in range(TOTAL)]
        assert pool.free == sharers.count(0)
        assert pool.holders().tolist() == sharers[::-1]
