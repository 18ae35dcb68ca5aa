"""Answers questions from folders of documents: an index of their text, excerpts of it, checked quotations."""
