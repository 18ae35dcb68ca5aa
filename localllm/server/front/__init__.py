"""A server elsewhere in the place of an engine here: its models answer the same routes.

catalog names its models; model turns a conversation or a prompt into a request for it, requests has the protocol's
fields for that; stream reads its answer as the events of a generation.
"""
