"""Which backend computes a model, and which of its bytes lie where: planned once, followed by load and server."""
