"""Arguments of kernels by name: what is wrong with them is an error when a program is recorded."""

from typing import Any

import numpy as np
import pytest

from cpu_kernels import activations, choices, norms, sums, threads
from cpu_kernels.activations import NormAdd, NormPack
from cpu_kernels.arguments import Arguments, indices_of, integers_of
from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.kernel import Kernel, _declared
from cpu_kernels.norms import LayerNormPack
from cpu_kernels.program import ProgramBuilder, operation_of
from cpu_kernels.records import Barrier, Form, Op
from cpu_kernels.sums import CopyRows

ROWS: dict[str, Any] = {"x": 64, "x_stride": 256, "y": 4096, "y_stride": 128, "count": 32}


def recorded(kernel: Kernel, arguments: Arguments) -> list[int]:
    builder = ProgramBuilder()
    builder.add(kernel, arguments, barrier=Barrier.NEVER)
    ((_, record),) = builder.operations
    return list(record[Op.ARGUMENTS :])


def test_a_record_holds_arguments_in_the_order_in_which_the_kernel_reads_them() -> None:
    found = recorded(sums.copy_rows, CopyRows(**dict(reversed(ROWS.items()))))
    at = indices_of(CopyRows)
    assert [found[i] for i in (at.x, at.x_stride, at.y, at.y_stride, at.count)] == list(ROWS.values())
    assert found[at.x] == found[0] and not any(found[len(ROWS) :])
    op = operation_of(sums.copy_rows, CopyRows(**ROWS))
    assert op[Op.ARGUMENTS : Op.ARGUMENTS + len(ROWS)].tolist() == list(ROWS.values())


def test_arguments_have_no_order_and_none_is_left_out() -> None:
    with pytest.raises(TypeError, match="positional"):
        CopyRows(*ROWS.values())  # type: ignore[misc]
    with pytest.raises(TypeError, match="'count'"):
        CopyRows(**{name: value for name, value in ROWS.items() if name != "count"})
    with pytest.raises(TypeError, match="'stride'"):
        CopyRows(**ROWS, stride=4)


@pytest.mark.parametrize("wrong", [256.0, None, "256", np.zeros(4, np.float32), np.float32(1.0)])
def test_a_non_integer_argument_is_named(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"CopyRows: y_stride must be an integer, not \w+"):
        recorded(sums.copy_rows, CopyRows(**ROWS | {"y_stride": wrong}))


class Place(Arguments):
    address: int
    stride: int = 0


class Moved(Arguments):
    count: int
    source: Place
    target: Place = Place(address=64)
    last: int


def test_a_group_of_arguments_is_in_its_field_s_place() -> None:
    at = indices_of(Moved)
    assert [at.count, *at.source, *at.target, at.last] == list(range(6))
    assert at.target.stride == 4
    moved = Moved(last=9, count=2, source=Place(stride=4, address=8))
    assert integers_of(moved) == [2, 8, 4, 64, 0, 9]
    with pytest.raises(TypeError, match="Moved: source must be Place, not int"):
        integers_of(Moved(count=2, source=8, last=9))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Place: address must be an integer, not float"):
        integers_of(Moved(count=2, source=Place(address=0.5), last=9))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Moved: count must be an integer, not Place"):
        integers_of(Moved(count=Place(address=8), source=Place(address=8), last=9))  # type: ignore[arg-type]


def test_integers_of_all_kinds_are_recorded() -> None:
    given = {"x_stride": np.int64(256), "y_stride": Form.FLOATS, "count": True}
    assert recorded(sums.copy_rows, CopyRows(**ROWS | given))[:5] == [64, 256, 4096, 4, 1]


def test_a_kernel_takes_no_arguments_of_another() -> None:
    packed = dict.fromkeys(("x", "stride", "weight", "k", "forms", "packed", "epsilon"), 1)
    with pytest.raises(TypeError, match=r"norms\.layer_norm_pack takes LayerNormPack, not NormPack"):
        recorded(norms.layer_norm_pack, NormPack(**packed))
    with pytest.raises(TypeError, match=r"activations\.norm_pack takes NormPack, not LayerNormPack"):
        recorded(activations.norm_pack, LayerNormPack(**packed))
    with pytest.raises(TypeError, match=r"activations\.norm_add takes NormAdd, not CopyRows"):
        operation_of(activations.norm_add, CopyRows(**ROWS))
    with pytest.raises(TypeError, match=r"Q8_0\.matmul_1 takes Product, not NormAdd"):
        recorded(WEIGHT_FORMATS["Q8_0"].matmul, NormAdd(x=1, x_stride=1, y=1, y_stride=1, weight=0, k=1, epsilon=0))


def test_every_kernel_of_programs_says_what_it_takes() -> None:
    own = [one for one in _declared.values() if one.module.startswith("cpu_kernels.")]
    run_by_teams = [threads.lead, threads.work, choices.choose_all, choices.help_choosing]
    assert {one.name for one in own if one.arguments is None} == {one.name for one in run_by_teams}


def test_a_record_has_room_for_all_arguments() -> None:
    with pytest.raises(TypeError, match="Long has more arguments than a record has room for"):
        type("Long", (Arguments,), {"__annotations__": {f"a{i}": int for i in range(33)}})
    with pytest.raises(TypeError, match="Wide has more arguments than a record has room for"):
        type("Wide", (Arguments,), {"__annotations__": {f"a{i}": Place for i in range(17)}})
