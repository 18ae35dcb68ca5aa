"""Coding agents on this machine's models: how each is set up, and what its prompts are."""
