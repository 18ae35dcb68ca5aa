"""The chat as an agent of editors: the Agent Client Protocol (https://agentclientprotocol.com) on stdin and stdout."""
