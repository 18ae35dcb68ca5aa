"""What the front ends that load a model themselves share: run, ask and the chat."""
