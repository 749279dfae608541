"""The need of each pool: its demand divided by the rate of one worker at which requests still meet their targets.

```
prefill = max(workers_for_wait(min(demand / rate, 2 * busy workers)), busy workers / max_utilisation)
decode  = max(demand / (sequences / step(sequences)) + busy with prompts / max_utilisation, used workers, slow workers)
used    = ready * max(held share of the KV / kv_share, running share of the sequences / sequences_share)
slow    = running sequences of all / sequences, while their steps are slower than the target
```
`correction.py` corrects both by the requests that miss their targets.

Busy and used workers are what was measured of the whole pool. They guard against a rate that is learned wrong: from below
always, and from above while prefill workers have time to spare and no request waits in the router or is refused there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from pdserve.planner.demand import NOTHING, PhaseDemand
from pdserve.planner.limits import MOST_WORKERS, Targets
from pdserve.planner.means import NO_MEAN, Mean
from pdserve.planner.observations import Observations
from pdserve.planner.settings import PlannerSettings
from pdserve.planner.steps import FEWEST_SEQUENCES, NO_STEPS, SequenceRoom, StepLine, Steps, room

BUSY_TRUST: Final = 2.0
"""The largest load of prefill workers that is believed, as a multiple of what they were busy with. The mean of the demand runs
ahead of what is computed by a few seconds, and a factor of 2 is more than such a lead makes of a rising load."""
FEWEST_BUSY_S: Final = 1.0
"""A rate is known once so many seconds of it were seen: 20 steps of 50 ms. A probe alone, of a few tokens in a step of its own,
shows a rate that is many times too low."""
FEWEST_WORKERS: Final = 0.05
"""The least need of prefill workers while clients send prompts: one, although decode workers compute all of them for now.
Without it nobody would see that longer ones come."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The planner's memory of the workers of both pools."""

    prompt_rate: Mean = NO_MEAN
    """Prompt tokens that a prefill worker computes in a busy second. It forgets by busy seconds: an interval with few tokens,
    whose steps are slow for each of them, changes little."""
    prefill_busy: Mean = NO_MEAN
    """Prefill workers that are busy."""
    prefill_spare: bool = False
    """The prefill workers had time to spare in the last interval, and no request waited or was refused: what they were busy
    with is all that clients wanted of them."""
    prompts: Mean = NO_MEAN
    """Decode workers that are busy with prompts."""
    steps: Steps = NO_STEPS
    sequences: Mean = NO_MEAN
    """Running sequences of a decode worker, and below the share of its KV blocks that is held: of the same intervals."""
    kv_used: Mean = NO_MEAN
    decode_used: Mean = NO_MEAN
    """The decode workers whose KV is held or whose sequences run, whichever are more, if each is used up to its share."""
    running: Mean = NO_MEAN
    """Running sequences of all decode workers."""
    ready: int = 0
    """Decode workers."""
    first_gap_s: Mean = NO_MEAN
    """The time of a request between its first token and the first decoded one."""
    max_sequences: float | None = None

    def add(self, observed: Observations, settings: PlannerSettings) -> Workers:
        """Return the workers with an interval. Values that an idle pool does not have are left as they were."""
        prefill, decode, dt = observed.prefill, observed.decode, observed.interval_s
        rate, sequences, kv_used = prefill.busy_tokens_per_s, decode.sequences or 0.0, min(decode.kv_used or 0.0, 1.0)
        runs = sequences >= FEWEST_SEQUENCES
        busy = None if prefill.utilisation is None else min(prefill.utilisation, 1.0)
        is_free = not observed.demand.queued_requests and not observed.demand.refused_per_s
        prompts = decode.ready * min(decode.prompt_share or 0.0, 1.0)
        running = min((decode.sequences or 0.0) / decode.max_sequences, 1.0) if decode.max_sequences else 0.0
        # Of what a decode worker may use. Above 1 it uses more KV blocks or sequences than it should.
        used = max(kv_used / settings.kv_share, running / settings.sequences_share)
        return Workers(
            self.prompt_rate.add(rate, dt * min(prefill.ready * busy, 1.0), settings.memory_s)
            if rate and busy is not None
            else self.prompt_rate,
            self._busy(prefill.ready, busy, dt, settings),
            busy is not None and busy < settings.max_utilisation and is_free,
            self.prompts.add(prompts, dt, settings.smoothing_s),
            self.steps.add(decode.step_sequences or sequences, decode.step_s or 0.0, observed.now_s, dt, settings),
            self.sequences.add(sequences, dt, settings.memory_s) if runs else self.sequences,
            self.kv_used.add(kv_used, dt, settings.memory_s) if runs else self.kv_used,
            self.decode_used.add(decode.ready * used, dt, settings.smoothing_s),
            self.running.add(decode.ready * (decode.step_sequences or sequences), dt, settings.smoothing_s),
            decode.ready,
            self.first_gap_s
            if observed.first_gap_s is None
            else self.first_gap_s.add(observed.first_gap_s, dt, settings.memory_s),
            decode.max_sequences or self.max_sequences,
        )

    def _busy(self, ready: int, utilisation: float | None, interval_s: float, settings: PlannerSettings) -> Mean:
        """Return the mean of busy prefill workers with an interval. An unknown share changes nothing."""
        if utilisation is None and ready:
            return self.prefill_busy
        return self.prefill_busy.add(ready * (utilisation or 0.0), interval_s, settings.smoothing_s)

    def tokens_per_s(self, settings: PlannerSettings) -> float | None:
        """Return the prompt tokens that a prefill worker computes in a busy second. None: too few were seen to tell."""
        is_known = self.prompt_rate.weight >= 1 - math.exp(-FEWEST_BUSY_S / settings.memory_s)
        return self.prompt_rate.value if is_known else None

    def for_slow_steps(self, each: SequenceRoom, line: StepLine, tpot_s: float | None) -> float:
        """Return the workers for all sequences that run now, if their steps are slower than the target. 0: they are not.

        Requests whose steps are too slow end later, so their number tells of a shortage before any of them has missed.
        """
        running = self.running.value or 0.0
        is_slow = tpot_s is not None and self.ready > 0 and line.step_s(running / self.ready) > tpot_s
        return running / each.sequences if is_slow else 0.0

    def kv_per_sequence(self) -> float | None:
        """Return the share of a worker's KV blocks that one sequence holds. None: nobody ran yet."""
        sequences, kv_used = self.sequences.value, self.kv_used.value
        return kv_used / sequences if sequences and kv_used is not None else None


NO_WORKERS: Final = Workers()


@dataclass(frozen=True, slots=True)
class Need:
    """The workers that a pool needs, before the correction. None: the rate of a worker is not known."""

    demand: PhaseDemand
    workers: float | None
    worker_tokens_per_s: float | None = None
    """The rate of one worker within the targets."""
    busy_tokens_per_s: float | None = None
    """The rate of a prefill worker that is always busy."""
    measured_workers: float = 0.0
    """The workers that the measured load of the pool needs."""
    prompt_workers: float = 0.0
    """The decode workers that are needed for the prompts that they compute."""
    room: SequenceRoom | None = None
    is_bounded: bool = False
    """Twice the busy prefill workers count as the load, which is less than the demand divided by the rate."""
    present_workers: float = 0.0
    """The workers that the present demand needs: without a forecast and without what waits."""


def prefill_need(workers: Workers, demand: PhaseDemand, targets: Targets, settings: PlannerSettings) -> Need:
    """Return the need of the prefill pool."""
    busy = workers.prefill_busy.value
    measured = (busy or 0.0) / settings.max_utilisation
    fewest = FEWEST_WORKERS if (demand.elsewhere or 0.0) > NOTHING else 0.0
    rate = workers.tokens_per_s(settings)
    if not rate:
        if demand.elsewhere is not None and workers.prefill_spare:
            return Need(demand, max(measured, fewest), measured_workers=measured, present_workers=measured)
        return Need(demand, None if demand.total > 0 or fewest else 0.0, measured_workers=measured)
    load = demanded = min(demand.total / rate, float(MOST_WORKERS))
    if workers.prefill_spare and busy:  # a season may ask for more than is needed now
        load = min(load, max(BUSY_TRUST * busy, demand.season / rate))
    service_s = min(demand.request_tokens / rate, targets.ttft_s) if targets.ttft_s and demand.request_tokens else 0.0

    def workers_of(load: float) -> float:
        if not service_s or targets.ttft_s is None:
            return load / settings.max_utilisation
        wait_s = wait_within(targets.ttft_s, service_s)
        miss, variation = 1 - targets.attainment, settings.prompt_variation
        return workers_for_wait(load, service_s, wait_s, miss, variation, settings.max_utilisation)

    count, present = workers_of(load), max(workers_of(min(load, demand.measured / rate)), measured, fewest)
    allowed = rate * load / count if count > 0 else rate * settings.max_utilisation
    is_bounded = load < demanded
    return Need(demand, max(count, measured, fewest), allowed, rate, measured, is_bounded=is_bounded, present_workers=present)


def decode_need(workers: Workers, demand: PhaseDemand, targets: Targets, settings: PlannerSettings) -> Need:
    """Return the need of the decode pool."""
    measured = workers.decode_used.value or 0.0
    prompts = (workers.prompts.value or 0.0) / settings.max_utilisation
    line = workers.steps.line()
    if line is None:  # no step without a prompt was seen: where prompts run, their time alone is the load
        if prompts > NOTHING:
            most = max(prompts, measured)
            return Need(demand, most, measured_workers=measured, prompt_workers=prompts, present_workers=most)
        return Need(demand, None if demand.total > 0 else 0.0, measured_workers=measured)
    tpot_s = _tpot_of_steps(targets.tpot_s, demand.request_tokens, workers.first_gap_s.value)
    spread = max(0.0, NormalDist().inv_cdf(targets.attainment))
    each = room(line, workers.steps.trusted(), tpot_s, workers.max_sequences, workers.kv_per_sequence(), settings, spread)
    count, present = (min(rate / each.tokens_per_s, float(MOST_WORKERS)) + prompts for rate in (demand.total, demand.measured))
    return Need(
        demand,
        max(count, measured, workers.for_slow_steps(each, line, tpot_s)),
        each.tokens_per_s,
        None,
        measured,
        prompts,
        each,
        present_workers=max(present, measured),
    )


def _tpot_of_steps(tpot_s: float | None, output_tokens: float | None, first_gap_s: float | None) -> float | None:
    """Return the time that a step may take so that a mean output meets the target, although its first decoded token is late."""
    if tpot_s is None or output_tokens is None or first_gap_s is None or output_tokens < 3:
        return tpot_s
    steps_s = (tpot_s * (output_tokens - 1) - first_gap_s) / (output_tokens - 2)
    return min(tpot_s, max(steps_s, tpot_s / 2))


# Prefill workers: how many keep the wait for the first token short.
#
# A prompt waits in a queue with N servers. `load` is the number of workers that the demand keeps busy, S the mean time of a
# prompt, v its squared coefficient of variation. The wait of more than t has about the probability
#
#     P(wait > t) = (load / N)^(sqrt(2 (N + 1)) - 1) * exp(-2 (N - load) t / (S (1 + v)))
#
# The first factor is Sakasegawa's approximation of the probability to wait at all (1977; Hopp and Spearman, Factory Physics,
# chapter 8). The second one is the tail of a queue with N servers under heavy load (Kingman). N is the smallest number, not
# rounded, for which the probability is at most the share of requests that may miss the target, and for which workers are not
# busier than `max_utilisation`. One worker may be half busy, and a hundred of them nearly all the time.

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
