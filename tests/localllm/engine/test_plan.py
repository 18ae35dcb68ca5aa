"""Dividing a step's rows, and how many rows it may have."""

from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.scheduler import fair_shares
from localllm.engine.step_costs import ChunkSize


@given(st.lists(st.integers(1, 500), min_size=1, max_size=9), st.integers(0, 600))
def test_shares_are_fair(wants: list[int], budget: int) -> None:
    shares = fair_shares(wants, budget)
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    assert sum(shares) == min(budget, sum(wants))
    # A larger request gets no less, and those that get less than they asked for differ only by rounding.
    short = [share for share, want in zip(shares, wants, strict=True) if share < want]
    assert not short or max(short) - min(short) <= 1
    assert not short or max(shares) - min(short) <= 1


def test_chunks_grow_to_the_target_time() -> None:
    chunk = ChunkSize(largest=512)
    assert chunk.rows == ChunkSize.SMALLEST
    for _ in range(12):
        chunk.observe(chunk.rows, chunk.rows / 1000)
    assert chunk.rows == int(1000 * ChunkSize.TARGET_S)
    assert chunk.rows_alone == int(1000 * ChunkSize.ALONE_S)
    for _ in range(12):
        chunk.observe(chunk.rows, chunk.rows / 20)
    assert chunk.rows == ChunkSize.SMALLEST
    for _ in range(20):
        chunk.observe(chunk.rows, chunk.rows / 1e6)
    assert chunk.rows == 512
    chunk.observe(1, 60.0)
    assert chunk.rows == 512


@given(st.integers(0, 2000), st.integers(10, 1000))
def test_a_patient_prompt_has_no_short_step_at_its_end(ahead: int, rows_per_s: int) -> None:
    chunk = ChunkSize(largest=512)
    chunk.observe(rows_per_s, 1.0)
    most = max(rows_per_s * ChunkSize.PATIENT_S, ChunkSize.LEAST_PATIENT)
    steps = []
    while ahead:
        steps.append(min(chunk.rows_patient(ahead), ahead))
        ahead -= steps[-1]
    assert all(0 < step <= most for step in steps)
    whole = max(min(most, 512) // ChunkSize.WHOLE_TILES * ChunkSize.WHOLE_TILES, ChunkSize.LEAST_PATIENT)
    assert len(steps) == -(-sum(steps) // whole)  # no more than necessary
    assert not steps or max(steps) - min(steps) < len(steps) * ChunkSize.WHOLE_TILES
