"""Repeats a failed HTTP request with growing pauses."""

import time

ATTEMPTS = 5
FIRST_PAUSE_S = 0.5


def fetch(client, url):
    for attempt in range(ATTEMPTS):
        answer = client.get(url)
        if answer.status_code < 500:
            return answer
        time.sleep(FIRST_PAUSE_S * 2**attempt)
    raise ConnectionError(url)
