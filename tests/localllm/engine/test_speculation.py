"""When and how much prompt lookup speculates, given step costs and what it would have drafted."""

import pytest

from localllm.engine.speculation import MAX_DRAFT, LookupLength, ModelDraftLength, PromptLookup
from localllm.engine.step_costs import StepCosts

# For a processor with tiles of 1, 2 and 4 rows: steps of that many rows, in units of a step of one.
TILES = {1: 1.0, 2: 1.9, 3: 2.6, 4: 2.6, 5: 3.7, 6: 3.7, 7: 3.7, 8: 3.7}


def tiled(rows: int) -> float:
    return TILES.get(rows, 0.9 + 1.4 * -(-rows // 4))


def learned(cost: float = 0.02) -> StepCosts:
    costs = StepCosts()
    for rows in [*range(1, MAX_DRAFT + 2)] * 5:
        costs.observe(rows, cost * tiled(rows))
    return costs


def test_costs_that_jump_are_learned_as_they_are() -> None:
    costs = learned()
    for rows in (1, 2, 4, 5, 8):
        assert costs.seconds(rows) == pytest.approx(0.02 * tiled(rows), rel=0.12)
    assert costs.seconds(8) < 1.05 * costs.seconds(5)


def test_unmeasured_costs_are_interpolated() -> None:
    costs = StepCosts()
    costs.observe(1, 1.0)
    assert costs.seconds(11) == pytest.approx(2.0)
    costs.observe(5, 3.0)
    assert costs.seconds(3) == pytest.approx(2.0)
    assert costs.seconds(5) == pytest.approx((3.0 + StepCosts.TRUST * 1.4) / (1 + StepCosts.TRUST))
    for _ in range(1000):
        costs.observe(1, 1.0)
    assert costs.seconds(5) == pytest.approx(1.4, rel=0.01), "old measures fade"


def test_costs_follow_a_machine_that_slows_down() -> None:
    costs = learned()
    for _ in range(60):
        costs.observe(1, 0.05)
    assert costs.seconds(1) == pytest.approx(0.05, rel=0.03)


def test_lookup_waits_for_evidence_where_rows_are_dear() -> None:
    length, costs = LookupLength(), learned()
    assert length.choose(MAX_DRAFT, costs, 0.0) == 0
    for _ in range(4):
        length.guessed(True)
    assert 1 + length.choose(MAX_DRAFT, costs, 0.0) in (4, 8, 12, 16), "whole tiles"
    for _ in range(3):
        length.guessed(False)
    assert length.choose(MAX_DRAFT, costs, 0.0) == 0
    for _ in range(10):
        for _ in range(30):
            length.guessed(True)
        length.guessed(False)
    assert length.choose(MAX_DRAFT, costs, 0.0) > 0, "this text is copied piece by piece"


def test_lookup_gives_up_where_guesses_fail_and_asks_no_drafts_to_learn_that() -> None:
    length, cheap = LookupLength(), StepCosts()
    assert length.choose(MAX_DRAFT, cheap, 0.0) > 0
    for _ in range(30):
        length.guessed(False)
    assert length.choose(MAX_DRAFT, cheap, 0.0) == 0


def test_chances_of_the_lookup_depend_on_the_streak_of_right_guesses() -> None:
    length = LookupLength()
    first = length.chance(0)
    assert [length.chance(at) for at in (0, 1, 3, 4, 7, 8)] == [0.5, 0.6, 0.6, 0.9, 0.9, 0.95]
    length.guessed(True)
    assert length.chance(0) == 0.6, "a streak of one"
    length.guessed(False)
    assert first < length.chance(0) < 0.7, "no streak, and one of the guesses without one was right"
    assert length.chance(1) < 0.6, "the guess after a streak of one was wrong"
    for _ in range(200):
        length.guessed(True)
    assert 0.99 < length.chance(0) < 1
    for _ in range(200):
        length.guessed(False)
    assert 0 < length.chance(0) < 0.01


@pytest.mark.parametrize("drafting_s", [0.001, 0.005], ids=["pays", "trial"])
def test_a_draft_may_be_preceded_by_reading_of_exactly_what_is_affordable(drafting_s: float) -> None:
    length, costs = ModelDraftLength(), learned()
    assert length.choose(8, costs, drafting_s) > 0
    affordable = length.affordable_s
    plain = costs.remembered(1)
    if drafting_s == 0.005:  # one token, which costs more than it is expected to gain
        loss = costs.remembered(2) + drafting_s - 1.75 * plain
        assert affordable == pytest.approx(0.5 * plain - loss)
    else:  # three tokens
        gain = (1 + 0.75 + 0.75**2 + 0.75**3) * plain / (costs.remembered(4) + 3 * drafting_s)
        assert affordable == pytest.approx(max(0.5, (1 - 1 / gain) * 8 / 6) * plain)
    assert length.choose(8, costs, drafting_s, 0, affordable) > 0
    assert length.choose(8, costs, drafting_s, 0, affordable * 1.001) == 0


def test_each_position_of_a_draft_has_a_chance_and_one_never_reached_takes_the_one_before() -> None:
    length = ModelDraftLength()
    for _ in range(50):
        length.observe(drafted=3, accepted=1)
    assert length.chance(0) > 0.95
    assert length.chance(1) < 0.2
    assert length.chance(2) == length.chance(7) == length.chance(1), "the third token was never judged"


def test_lookup_continues_after_a_match_and_reports_its_draft() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 1, 2, 3])
    assert lookup.draft(3) == [4, 5, 9]
    assert lookup.append(4) is True
    # 2, 3, 4 occurred later before a 6, but 1, 2, 3, 4 only before a 5.
    assert lookup.draft(2) == [5, 9]
    assert lookup.append(6) is False
    assert lookup.draft(2) == [1, 2]
    assert lookup.append(7) is False
    assert not lookup.found and lookup.draft(4) == []
    assert lookup.append(8) is None
