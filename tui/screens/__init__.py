"""The chat's screens."""
