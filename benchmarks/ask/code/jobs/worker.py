"""Takes jobs from the queue and runs them, at most three at a time."""

from concurrent.futures import ThreadPoolExecutor

PARALLEL = 3


def work(queue, handlers):
    with ThreadPoolExecutor(PARALLEL) as pool:
        while (job := queue.take()) is not None:
            pool.submit(handlers[job.kind], job.arguments)
