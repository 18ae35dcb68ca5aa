"""Training of the built-in model: its training text, the network, the export. Needs the extra `train`."""
