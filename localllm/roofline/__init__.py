"""How near a model comes to what this machine can do: limits, speeds, and the share that is reached."""
