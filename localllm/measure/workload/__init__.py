"""What to ask a server: requests by their sizes and times, from traces, shapes or files of prompts."""
