def add(a, b):
    return a + b


def mean(values):
    """The average of some numbers; 0 for none."""
    return sum(values) / len(values) if values else 0
