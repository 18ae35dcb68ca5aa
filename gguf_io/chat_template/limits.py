"""What a chat template may use. Real ones stay far below: 17 kB of source, 20 ms to compile, under 1 ms to render."""

MAX_SOURCE_CHARS = 128 * 1024
MAX_OUTPUT_CHARS = 8 * 1024 * 1024
MAX_MEMORY_BYTES = 512 * 1024 * 1024  # address space of the worker, the interpreter's own 40 MB included
CPU_SECONDS = 1.0  # per request, in the worker's own CPU time, so that a busy machine fails no honest template
WALL_SECONDS = 10.0  # per request, for what uses no CPU and for systems without CPU timers
EXIT_MEMORY = 77  # the worker's exit status when memory ran out
