"""The widgets of the chat's screens."""
