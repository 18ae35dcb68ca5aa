"""A cache of answers by the meaning of questions."""
