"""Coding agents that use this machine's models: how each is set up, and its recorded prompt."""
