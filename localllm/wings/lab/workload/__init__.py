"""Workloads for servers: requests with sizes and times, from traces, shapes or files of prompts."""
