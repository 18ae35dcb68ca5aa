"""Tools that a model may call: files and commands in one folder, and MCP servers. Changes need approval."""
