"""Conversations and their answers, independent of what runs the model.

`request` defines a request, `event` the stream of events that answers it. `local` runs it on an engine in this process,
`localllm.remote` on a remote server. Front ends and protocols translate to and from these types only.
"""
