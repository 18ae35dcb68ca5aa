"""Limits of one request. A request that exceeds them is refused with status 400 or 413 before any work."""

MAX_BODY_BYTES = 16 * 2**20
MAX_JSON_DEPTH = 128
MAX_JSON_VALUES = 2_000_000  # enough for a prompt of token ids in the longest contexts
MAX_JSON_CONTAINERS = 100_000
MAX_JSON_MEMBERS = 100_000  # keys of all objects
MAX_JSON_KEYS = 10_000  # of one object
MAX_BODIES_BYTES = 256 * 2**20  # of all requests that are received or answered
MAX_NAMED = 8  # unknown fields of a request that the log names; the rest is counted
MAX_NOTES = 60  # lines a minute about ignored parts of requests
MAX_PROMPTS = 256
MAX_MESSAGES = 8192
MAX_TOOLS = 256
MAX_STOPS = 32
MAX_STOP_CHARS = 256
MAX_CHOICES = 8
MAX_ADAPTERS = 64
MAX_EMBED_TEXTS = 2048
MAX_RERANK_DOCUMENTS = 1024
MAX_IMAGES = 32
MAX_FILES = 32  # that are read of a request
MAX_LOGIT_BIAS = 1024
MAX_NAME_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_THREADS = 32  # that compute embeddings and the like for one client
MAX_PREPARING = 3  # threads that prepare one client's requests; one fewer than the processes that read grammars
MAX_INT = 2**31 - 1

HEADER_SECONDS = 15.0  # to send a request's headers
DISCARDED_BYTES = 64 * 2**20  # of a body that is too large: read and dropped, so that the client reads the response
DISCARD_SECONDS = 5.0
BODY_SECONDS = 60.0  # to send a request's body
KEEP_ALIVE_SECONDS = 10.0  # of silence before a stream sends a keep-alive line; clients time out after minutes
STALLED_SECONDS = 120.0  # a client that reads nothing for this long is disconnected
PROBE_SECONDS = 0.1  # after a client has sent its end, until it is tested whether it still reads; then twice as long
MAX_PROBE_SECONDS = 10.0
IDLE_SECONDS = 30  # HTTP keep-alive between requests
