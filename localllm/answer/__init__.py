"""Conversations and their answers: what may be asked of a model, and the one stream of events that comes back.

`request` is what is asked, `event` what comes. `local` asks an engine in this process; `localllm.remote` asks a server
elsewhere. Front ends and protocols translate to and from these, and do not know which one answers.
"""
