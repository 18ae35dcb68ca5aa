"""Tools that a model may call: files and commands of one folder, and MCP servers. Nothing is changed unasked."""
