from calc import add, mean


def test_add():
    assert add(2, 3) == 5


def test_mean_of_nothing():
    assert mean([]) == 0
