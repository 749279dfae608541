"""Prefill workers: how many keep the wait for the first token short.

A prompt waits in a queue with N servers. `load` is the number of workers that the demand keeps busy, S the mean time of a
prompt, v its squared coefficient of variation. The wait of more than t has about the probability

    P(wait > t) = (load / N)^(sqrt(2 (N + 1)) - 1) * exp(-2 (N - load) t / (S (1 + v)))

The first factor is Sakasegawa's approximation of the probability to wait at all (1977; Hopp and Spearman, Factory Physics,
chapter 8). The second one is the tail of a queue with N servers under heavy load (Kingman). N is the smallest number, not
rounded, for which the probability is at most the share of requests that may miss the target, and for which workers are not
busier than `max_utilisation`. One worker may be half busy, and a hundred of them nearly all the time.
"""

from __future__ import annotations

import math
from typing import Final

_BISECTIONS: Final = 40
"""The interval is halved so often: to a millionth of a worker and less."""

SHORTEST_S: Final = 1e-9
"""No prompt is computed faster. It keeps quotients finite."""


def workers_for_wait(load: float, service_s: float, wait_s: float, miss: float, variation: float, most_busy: float) -> float:
    """Return the workers with which at most the share `miss` of the prompts waits longer than `wait_s`.

    `load`: busy workers. `service_s`: the mean time of a prompt. `most_busy`: the largest share of the time in which a worker
    may be busy. The result grows with the load and with the time of a prompt.
    """
    low = load / most_busy
    if load <= 0 or late(low, load, service_s, wait_s, variation) <= miss:
        return low
    high = max(low, load + math.log(1 / miss) * service_s * (1 + variation) / (2 * wait_s))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if late(middle, load, service_s, wait_s, variation) <= miss:
            high = middle
        else:
            low = middle
    return high


def late(workers: float, load: float, service_s: float, wait_s: float, variation: float) -> float:
    """Return the probability that a prompt waits longer than `wait_s`."""
    if workers <= load:
        return 1.0
    service_s = max(service_s, SHORTEST_S)
    waits = (load / workers) ** max(math.sqrt(2 * (workers + 1)) - 1, 0.0)
    return float(waits * math.exp(-2 * (workers - load) * wait_s / (service_s * (1 + variation))))


def wait_within(ttft_s: float, service_s: float) -> float:
    """Return the wait that the target leaves to a prompt.

    It is at least the prompt's own time: a target below twice that time is not reached by many more workers.
    """
    return max(ttft_s - service_s, service_s)
