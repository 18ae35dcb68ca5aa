"""Latency, queues, and several devices."""

import math


def utilisation(rate: float, service_seconds: float, servers: int = 1) -> float:
    """The share of time that servers are busy; from 1 on the queue grows without bound."""
    return rate * service_seconds / servers


def wait_seconds(rate: float, service_seconds: float, variation: float = 1.0) -> float:
    """Mean wait in the queue of one server with Poisson arrivals (Pollaczek and Khinchine).

    variation: standard deviation of the service time over its mean: 0 for equal requests, 1 for exponential ones.
    Infinite if the server is overloaded.
    """
    busy = utilisation(rate, service_seconds)
    return busy * service_seconds * (1 + variation**2) / (2 * (1 - busy)) if busy < 1 else math.inf


def ring_allreduce_seconds(size: float, devices: int, link: float, latency: float = 0.0) -> float:
    """Time to sum `size` bytes over a ring of devices. link: bytes a second; latency: seconds of a message."""
    return 2 * (devices - 1) * (size / devices / link + latency)


def tensor_parallel_seconds(
    step: float, devices: int, layers: int, batch: float, hidden: int, link: float, latency: float = 0.0
) -> float:
    """A decoding step split over devices: each one's part of the step, and two sums of f16 activations in each layer.

    step: seconds on one device. hidden: the model's width.
    """
    return step / devices + 2 * layers * ring_allreduce_seconds(batch * hidden * 2, devices, link, latency)
