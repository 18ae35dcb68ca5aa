"""What the user can have done: each by a slash command, from the palette, and most by a key."""
