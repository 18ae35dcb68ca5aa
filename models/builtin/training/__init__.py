"""How the built-in model was made: its training text, the network, the export. Needs the extra `train`."""
