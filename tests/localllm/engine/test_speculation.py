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


def test_what_takes_less_time_counts_more() -> None:
    costs = StepCosts()
    for seconds in (1.5, 1.0, 1.0, 1.0, 2.0):
        costs.observe(2, seconds)
    assert costs.seconds(2) < 1.25


def test_kept_ratios_are_believed_until_measured_and_follow_the_machines_speed() -> None:
    costs = StepCosts([1.0, 1.2, 1.3, 1.9])
    assert (costs.largest, costs.is_known(4), costs.is_known(5)) == (0, True, False)
    costs.observe(1, 0.02)
    assert [costs.remembered(rows) for rows in (1, 2, 3, 4, 5)] == pytest.approx([0.02, 0.024, 0.026, 0.038, 0.04])
    assert costs.largest == 4
    costs.observe(3, 0.06)
    assert 0.026 < costs.remembered(3) < 0.04, "one measurement may be wrong"
    for _ in range(20):
        costs.observe(3, 0.06)
    assert costs.remembered(3) == pytest.approx(0.06, rel=0.15)
    assert StepCosts(costs.ratios).ratios == costs.ratios


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


def expected(drafted: int) -> float:
    """Tokens of a step where each drafted token is accepted with the chance that is assumed at first."""
    return sum(ModelDraftLength().chance(0) ** at for at in range(drafted + 1))


@pytest.mark.parametrize("drafting_s", [0.002, 0.014], ids=["pays", "trial"])
def test_a_draft_may_be_preceded_by_reading_of_exactly_what_is_affordable(drafting_s: float) -> None:
    length, costs = ModelDraftLength(), StepCosts()
    for rows in (1, 2, 3, 4) * 5:
        costs.observe(rows, 0.02 + 0.002 * (rows - 1))
    count = length.choose(8, costs, drafting_s)
    affordable, plain = length.affordable_s, costs.remembered(1)
    best = max(range(1, count + 1), key=lambda at: expected(at) / (costs.remembered(1 + at) + at * drafting_s))
    spent = costs.remembered(1 + best) + best * drafting_s
    if drafting_s == 0.014:  # one token, which costs more than it is expected to gain
        assert count == 1 and spent > 1.75 * plain
        assert affordable == pytest.approx(0.5 * plain - (spent - 1.75 * plain))
    else:  # what an answer may lose, less what the draft may lose
        assert affordable == pytest.approx(ModelDraftLength.FIRST * plain - (spent - plain))
    assert length.choose(8, costs, drafting_s, 0, affordable) == count
    assert length.choose(8, costs, drafting_s, 0, affordable * 1.001) == 0


def test_a_draft_may_lose_a_part_of_what_the_answer_can_afford() -> None:
    length, costs = ModelDraftLength(), StepCosts()
    for rows in (1, 2, 4, 8, 16) * 5:
        costs.observe(rows, 0.02 + 0.006 * (rows - 1))
    plain = costs.remembered(1)
    for _ in range(40):
        length.observe([1.0] * 8, 8)
    lengths = [length.choose(MAX_DRAFT, costs, 0.001)]
    for _ in range(3):
        length.stepped(plain, -2 * plain)
        lengths.append(length.choose(MAX_DRAFT, costs, 0.001))
    assert lengths == sorted(lengths) and lengths[0] < 5 < lengths[-1]
    for steps, count in zip((ModelDraftLength.FIRST, ModelDraftLength.FIRST + 2), lengths, strict=False):
        assert costs.remembered(1 + count) + 0.001 * count - plain <= steps * ModelDraftLength.RISKED * plain
    for _ in range(6):
        length.stepped(plain, 2 * plain)
    assert length.choose(MAX_DRAFT, costs, 0.001) == 0
    length.ended()
    assert length.choose(MAX_DRAFT, costs, 0.001) == lengths[0], "the next answer begins anew"


def test_each_position_of_a_draft_has_a_chance_and_one_never_reached_takes_the_one_before() -> None:
    length = ModelDraftLength()
    for _ in range(50):
        length.observe([0.9, 0.1, 0.9], accepted=1)
    assert length.chance(0) > 0.85
    assert length.chance(1) < 0.2
    assert length.chance(2) == length.chance(7) == length.chance(1), "the third token was never judged"


def test_a_token_is_drafted_where_those_before_it_are_likely_enough_to_pay() -> None:
    costs = StepCosts()
    for rows in (1, 2, 3, 4, 5, 8) * 5:
        costs.observe(rows, 0.02 if rows < 5 else 0.026)
    needed = []
    for drafting_s in (0.002, 0.008):
        length = ModelDraftLength()
        for _ in range(10):
            length.observe([0.9] * 4, 4)
            length.stepped(0.02, -0.04)
        count = length.choose(MAX_DRAFT, costs, drafting_s)
        assert count > 4 and len(length.least) == count and length.least[0] == 0
        needed.append(length.least)
    cheap, dear = needed
    assert 0.1 < cheap[1] < 0.3 < dear[1] < 0.8
    assert cheap[3] > max(cheap[2], cheap[4]) + 0.3, "the fifth row of the step takes time"


def test_probabilities_that_promise_too_much_are_trusted_less() -> None:
    costs, modest, wrong = learned(), ModelDraftLength(), ModelDraftLength()
    for _ in range(12):
        modest.observe([0.5], 1)
        wrong.observe([0.9], 0)
    assert modest.chance(0) > 0.8 and wrong.chance(0) < 0.5
    for length in (modest, wrong):
        length.choose(MAX_DRAFT, costs, 0.0)
    assert ModelDraftLength(modest.learned()).chance(0) == pytest.approx(modest.chance(0), abs=0.01)
    assert ModelDraftLength(wrong.learned()).chance(0) == pytest.approx(wrong.chance(0), abs=0.01)


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
