"""How samples of the machine's limits add up, by a fake clock; no time is measured."""

import itertools

import pytest

from localllm.wings.lab.roofline.limits import LimitProbes


def test_limits_tell_the_samples_since_they_were_last_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(step=0.5)
    monkeypatch.setattr("localllm.wings.lab.roofline.limits._LEAST_BYTES", 4096)
    monkeypatch.setattr("localllm.wings.lab.roofline.limits.largest_cache", lambda: 1024)
    probes = LimitProbes(1, lambda: next(seconds))
    try:
        probes.sample()
        assert probes.limits().read.median == 4096 / 0.5
        probes.forget()
        with pytest.raises(ValueError):
            probes.limits()
        seconds = itertools.count(step=2)
        probes.sample()
        assert probes.limits().read.median == 4096 / 2
    finally:
        probes.close()
