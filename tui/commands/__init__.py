"""The chat's commands: each is a slash command and a palette entry, and most have a key."""
