"""What one request may ask for. Numbers beyond these are refused with status 400 or 413 before any work is done."""

MAX_BODY_BYTES = 16 * 2**20
MAX_JSON_DEPTH = 128
MAX_JSON_VALUES = 2_000_000  # a prompt of token ids for the longest contexts there are
MAX_JSON_CONTAINERS = 100_000
MAX_PROMPTS = 256
MAX_CALLS = 4096  # tool calls of a whole conversation
MAX_MESSAGES = 1024  # finding where each one stands in the prompt takes time with the square of it
MAX_TOOLS = 256
MAX_STOPS = 32
MAX_STOP_CHARS = 256
MAX_CHOICES = 8
MAX_ADAPTERS = 64
MAX_EMBED_TEXTS = 2048
MAX_RERANK_DOCUMENTS = 1024
MAX_IMAGES = 32
MAX_LOGIT_BIAS = 1024
MAX_NAME_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_INT = 2**31 - 1

HEADER_SECONDS = 15.0  # from a connection's start to the end of its first request's headers
DISCARDED_BYTES = 64 * 2**20  # taken in of a body that is refused for its size, so that its sender reads the refusal
DISCARD_SECONDS = 5.0
BODY_SECONDS = 60.0  # to send a request's body
STALLED_SECONDS = 120.0  # a reader that takes nothing for so long is cut off
IDLE_SECONDS = 30  # a kept-alive connection between requests
