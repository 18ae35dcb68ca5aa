"""What a chat template may use.

Real ones stay far below: 17 kB of source, 40 ms to compile, 0.2 ms for a short conversation and 60 ms for one of 2000
messages. One that looks back over all messages for each of them (Gemma 4's) takes 6 s, hence the time per message.
Memory is bounded on Linux; elsewhere only as far as the time and the output are. Windows has the wall clock alone.
"""

MAX_SOURCE_CHARS = 128 * 1024
MAX_OUTPUT_CHARS = 8 * 1024 * 1024
MAX_MEMORY_BYTES = 512 * 1024 * 1024  # address space of the worker, the interpreter's own 40 MB included
CPU_SECONDS = 1.0  # per request, in the worker's own CPU time, so that a busy machine fails no honest template
CPU_SECONDS_PER_MESSAGE = 0.01
MAX_CPU_SECONDS = 30.0  # however many messages there are
WALL_GRACE_SECONDS = 9.0  # beyond the CPU time, for what waits and for systems without CPU timers
