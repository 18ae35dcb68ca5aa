"""The accounting of KV cells, against a model that keeps a set of cells for every sequence."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_offload.cells import CellBook

TOTAL = 40
STEPS = st.lists(st.tuples(st.sampled_from(["append", "fork", "truncate", "remove"]), st.integers(0, 99)), max_size=60)


@given(STEPS)
def test_free_cells_are_those_that_no_sequence_holds(steps):
    book = CellBook(TOTAL)
    held: dict[int, list[int]] = {0: []}
    book.create(0)
    names = iter(range(1, 1000))
    cells = iter(range(10000))
    for step, number in steps:
        chosen = sorted(held)[number % len(held)] if held else None
        if chosen is None or (step == "fork" and not held):
            chosen = next(names)
            book.create(chosen)
            held[chosen] = []
        if step == "append":
            count = min(number % 9, book.free)
            book.append(chosen, count)
            held[chosen] += [next(cells) for _ in range(count)]
        elif step == "fork":
            length, fork = number % (len(held[chosen]) + 1), next(names)
            book.share(chosen, fork, length)
            held[fork] = held[chosen][:length]
        elif step == "truncate":
            length = number % (len(held[chosen]) + 1)
            book.truncate(chosen, length)
            del held[chosen][length:]
        else:
            book.remove(chosen)
            del held[chosen]
        assert book.free == TOTAL - len({cell for cells_of in held.values() for cell in cells_of})
        assert {name: book.length(name) for name in held} == {name: len(of) for name, of in held.items()}
