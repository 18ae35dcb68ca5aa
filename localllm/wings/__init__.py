"""What can be left out: each folder with its commands, imported by nothing that run, the chat and serve need."""
