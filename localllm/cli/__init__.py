"""The command line. Commands import their dependencies when they run, so that --help stays instant."""
