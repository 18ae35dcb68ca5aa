"""What the chat's screen is made of."""
