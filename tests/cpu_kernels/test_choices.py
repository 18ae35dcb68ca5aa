"""Many choices in one call: each is what a chooser of its own would choose, whoever helps."""

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_kernels.choices import ChoosingTeam
from localllm.engine.request import SamplingParams
from localllm.engine.sampling import Sampler

WORDS, MOST = 9000, 12
KINDS = (
    SamplingParams(seed=1),
    SamplingParams(temperature=0),
    SamplingParams(seed=2, top_k=0, top_p=0.9),
    SamplingParams(seed=3, top_k=128),
    SamplingParams(seed=4, top_k=129, xtc_probability=0.5),
)


def logits_of(step: int) -> NDArray[np.float32]:
    """Few distinct values, so that many tokens are equally likely."""
    random = np.random.default_rng(step)
    return np.round(random.normal(0, 3, (MOST, WORDS)) * (1 + step % 5)).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_tokens_are_those_of_single_choices(threads: int) -> None:
    team = ChoosingTeam(threads, MOST, WORDS)
    together = [Sampler(KINDS[at % len(KINDS)], WORDS) for at in range(MOST)]
    alone = [Sampler(KINDS[at % len(KINDS)], WORDS) for at in range(MOST)]
    for one, other in zip(together, alone, strict=True):
        one.seed = other.seed
    try:
        for step in range(40):
            logits, count = logits_of(step), 1 + step % MOST
            known = [one.begin(None if step % 2 else row) for one, row in zip(together, logits[:count], strict=False)]
            found = team.run([choice for choice in known if choice is not None], logits[:count] if step % 2 else None)
            assert len(found) == count
            for at in range(count):
                token, _ = together[at].sample(logits[at])
                assert token == found[at] == alone[at].sample(logits[at])[0]
                together[at].accept(token)
                alone[at].accept(token)
    finally:
        team.close()
        team.close()


def test_logits_without_a_choice_give_no_token() -> None:
    team = ChoosingTeam(2, MOST, WORDS)
    logits, samplers = logits_of(1), [Sampler(SamplingParams(seed=1), WORDS) for _ in range(MOST)]
    logits[1], logits[2, 5] = -np.inf, np.nan
    choices = [sampler.begin(None) for sampler in samplers]
    found = team.run([choice for choice in choices if choice is not None], logits)
    team.close()
    assert found[1] == found[2] == -1 and min(found[:1] + found[3:]) >= 0


def test_calls_that_follow_at_once_do_not_mix() -> None:
    """A helper that still looks for choices of a call begins those of the next one, with its logits."""
    team = ChoosingTeam(9, MOST, 64)
    samplers = [Sampler(SamplingParams(temperature=0), 64) for _ in range(MOST)]
    choices = [choice for sampler in samplers if (choice := sampler.begin(None)) is not None]
    rows = np.zeros((2, MOST, 64), np.float32)
    rows[0, :, 3] = rows[1, :, 7] = 1
    try:
        for _ in range(25_000):
            assert team.run(choices, rows[0]) == [3] * MOST
            assert team.run(choices, rows[1]) == [7] * MOST
    finally:
        team.close()
