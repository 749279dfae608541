"""Requests a second within both targets: of a prefill worker, of a decode worker, and of a worker that does both. Pure.

**Prefill.** Prompts arrive at random and take D seconds each, one after another: an M/D/1 queue, as in DistServe (Zhong and
others, OSDI 2024, section 3.1). With load x = r D the mean wait is x D / (2 (1 - x)). A prompt waits with probability x, and
then about exponentially long. So the share p of the prompts waits at most D / (2 (1 - x)) * ln(x / (1 - p)), and the rate is
the highest for which D and this wait are within TTFT.

**Decode.** The batch B is the largest whose step, and its share of the exposed transfer, are within TPOT, and whose KV fits.
A request stays for (n - 1) TPOT, so the rate is B / ((n - 1) TPOT) (Little's law).

**Colocated.** A worker computes prompts in chunks beside its decodes. Each prompt delays all B sequences by E = chunks * (mixed
step - step without a chunk). With rate r, the mean gap is step / (1 - r E); Little's law then gives r = B / ((n - 1) step + B
E): B prompts fall into a request's life on average. Their number has a Poisson distribution, so the share p of the requests has
a TPOT of at most step + (B + z sqrt(B)) E / (n - 1), where z is the quantile p of the normal distribution. Prompts wait as
above, with D = chunks * mixed step. The chunk with the highest rate counts.

**Stages.** A worker with stages has a lane for each of them (`WorkerSpeed`). A prompt takes D in any case, and the next one can
begin after D / lanes: an M/D/1 queue with that service, and the rest of D after it. Decodes and colocated work divide the room
among the lanes, and each lane serves the rate above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from pdserve.capacity.worker_speed import WorkerSpeed, last_true

SMALLEST_CHUNK: Final = 128
TRIES: Final = 2
"""Batches that are tried between two powers of two."""
LEAST_BATCH: Final = 1 / 64
"""The least mean number of sequences of a worker that is worth an answer."""
STEPS: Final = 60
"""Halvings of an interval: more than the bits of a float."""


@dataclass(frozen=True, slots=True)
class PlacementRate:
    """The most requests a second of one worker, and its bottleneck: memory, bandwidth, compute or link."""

    requests_per_s: float
    bound: str
    ttft_s: float | None = None
    """The mean time to the first token at this rate. None: the worker gives no first tokens."""
    tpot_s: float | None = None
    """The mean time between two tokens of a request, with its share of the exposed transfer."""
    batch: float | None = None
    chunk: int | None = None


def queue_s(service_s: float, rate: float, share: float) -> float:
    """Return the time within which this share of the prompts is computed. It is infinite when the worker cannot keep up."""
    load = rate * service_s
    if load >= 1:
        return math.inf
    return service_s + service_s / (2 * (1 - load)) * math.log(max(1.0, load / (1 - share)))


def mean_queue_s(service_s: float, rate: float) -> float:
    """Return the mean time in the queue and in service."""
    load = rate * service_s
    return math.inf if load >= 1 else service_s + load * service_s / (2 * (1 - load))


def queue_rate(service_s: float, target_s: float, share: float) -> float:
    """Return the most prompts a second of which this share is within the target."""
    if service_s > target_s:
        return 0.0
    return last_load(lambda load: queue_s(service_s, load / service_s, share) <= target_s, 1.0) / service_s


def last_load(holds: Callable[[float], bool], most: float) -> float:
    """Return the largest number up to `most`, to the precision of a float, for which `holds`. `holds` is true for all smaller
    numbers too."""
    low, high = 0.0, most
    if holds(high):
        return high
    for _ in range(STEPS):
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def transfer_s(worker: WorkerSpeed, link_bytes_per_s: float) -> float:
    """Return the time of one prompt's KV on the link."""
    return worker.kv_bytes(worker.question.isl) / (link_bytes_per_s * worker.question.shares.link)


def exposed_s(worker: WorkerSpeed, link_bytes_per_s: float) -> float:
    """Return the part of the transfer that a request waits for after its first token.

    KV of a chunk crosses while the next chunk is computed, so at least the last chunk's part is left, and more if the link is
    slower than the computation.
    """
    question = worker.question
    whole = transfer_s(worker, link_bytes_per_s)
    last = min(1.0, question.max_num_batched_tokens / question.isl)
    return max(whole * last, whole - worker.prefill_s(question.isl) * (1 - last))


def prefill_rate(worker: WorkerSpeed, link_bytes_per_s: float) -> PlacementRate:
    """Return the rate of a prefill worker within TTFT, and within what its link takes away."""
    question = worker.question
    alone = worker.prefill_s(question.isl)
    service = alone / worker.lanes
    rest = alone - service
    by_queue = queue_rate(service, question.ttft_s - rest, question.attainment)
    by_link = 1 / transfer_s(worker, link_bytes_per_s)
    rate = min(by_queue, by_link)
    if not worker.users_at(question.isl):
        return PlacementRate(0.0, "memory", ttft_s=alone)
    bound = "link" if by_link < by_queue else worker.prefill_bound(question.isl)
    return PlacementRate(rate, bound, ttft_s=rest + mean_queue_s(service, rate))


def decode_rate(worker: WorkerSpeed, link_bytes_per_s: float, lender: WorkerSpeed | None = None) -> PlacementRate:
    """Return the rate of a decode worker within TPOT, its memory, and what its link brings.

    lender: the worker that computes the prompts. None: one with the same degrees.
    """
    question, gaps = worker.question, worker.question.osl - 1
    exposed = exposed_s(lender or worker, link_bytes_per_s) / gaps
    context, users = decode_context(worker), worker.users_at(question.isl + question.osl) // worker.lanes
    batch = last_true(users, lambda size: worker.decode_s(size, context) + exposed <= question.tpot_s)
    if batch == 0:
        alone = worker.decode_s(1, context)
        bound = "memory" if users == 0 else "link" if alone <= question.tpot_s else worker.decode_bound(1, context)
        return PlacementRate(0.0, bound, tpot_s=alone + exposed, batch=0)
    tpot = worker.decode_s(batch, context) + exposed
    by_batch, by_link = worker.lanes * batch / (gaps * tpot), 1 / transfer_s(worker, link_bytes_per_s)
    bound = "memory" if batch == users else worker.decode_bound(batch + 1, context)
    if by_link < by_batch or (batch < users and exposed > worker.decode_s(batch, context) - worker.decode_s(1, context)):
        bound = "link"
    return PlacementRate(min(by_batch, by_link), bound, tpot_s=tpot, batch=float(worker.lanes * batch))


def colocated_rate(worker: WorkerSpeed) -> PlacementRate:
    """Return the rate of a worker that computes prompts and decodes, with the best chunk."""
    question = worker.question
    most = min(question.max_num_batched_tokens, question.isl)
    chunks = [most, *(size for size in (SMALLEST_CHUNK << power for power in range(21)) if size < most)]
    return max((_colocated(worker, chunk) for chunk in chunks), key=lambda rate: rate.requests_per_s)


def _colocated(worker: WorkerSpeed, chunk: int) -> PlacementRate:
    """Return the rate with chunks of at most `chunk` tokens: the best batch is searched, and the rate follows from it."""
    users, lanes = worker.users_at(worker.question.isl + worker.question.osl) // worker.lanes, worker.lanes
    if not users:
        return PlacementRate(0.0, "memory", chunk=chunk)
    beside = Beside.of(worker, chunk)
    batch = beside.best(users)
    rate = beside.rate(batch)
    step, delay = beside.times(batch)
    ttft = mean_queue_s(beside.prompt_s(batch), rate)
    tpot = step + batch * delay / (worker.question.osl - 1)
    bound = beside.bound(batch, users)
    return PlacementRate(lanes * rate, bound, ttft_s=ttft, tpot_s=tpot, batch=lanes * batch, chunk=chunk)


@dataclass(frozen=True, slots=True)
class Beside:
    """One lane of a worker that computes prompts in `chunks` equal chunks beside its decodes."""

    worker: WorkerSpeed
    chunks: int
    z: float
    """The quantile of the normal distribution for the attainment. It is at least 0."""

    @classmethod
    def of(cls, worker: WorkerSpeed, chunk: int) -> Beside:
        """Return the worker with chunks of at most `chunk` tokens."""
        question = worker.question
        return cls(worker, math.ceil(question.isl / chunk), max(0.0, NormalDist().inv_cdf(question.attainment)))

    def times(self, batch: float) -> tuple[float, float]:
        """Return the step of `batch` decodes alone, and the delay that one whole prompt adds to them."""
        without = self.worker.mixed_s(batch, decode_context(self.worker), 0.0, self.worker.question.isl)
        return self.worker.decode_s(batch, decode_context(self.worker)), self.prompt_s(batch) - self.chunks * without

    def prompt_s(self, batch: float) -> float:
        """Return the time of a prompt, once it is its turn."""
        isl = self.worker.question.isl
        return self.chunks * self.worker.mixed_s(batch, decode_context(self.worker), isl / self.chunks, isl)

    def rate(self, batch: float) -> float:
        """Return the rate of requests at which `batch` requests decode at a time."""
        step, delay = self.times(batch)
        return batch / ((self.worker.question.osl - 1) * step + batch * delay)

    def best(self, users: int) -> float:
        """Return the batch, up to `users`, with the highest rate among the batches that meet both targets; 0: no batch meets
        them.

        A larger batch is not always better: past the ridge of the roofline it serves no more. And a smaller batch does not
        always meet the targets that a larger batch meets: a prompt disturbs a few decodes of a mixture of experts more than
        many, whose steps read most experts anyway. So batches are tried over the whole range, and the step above the best batch
        is bisected.
        """
        powers = range(math.floor(math.log2(LEAST_BATCH) * TRIES), math.ceil(math.log2(users) * TRIES))
        tried = [*(2 ** (power / TRIES) for power in powers), float(users)]
        meeting = [place for place, batch in enumerate(tried) if self.meets(batch)]
        if not meeting:
            return 0.0
        place = max(meeting, key=lambda place: self.rate(tried[place]))
        if place + 1 == len(tried):
            return tried[place]
        low = tried[place]
        more = low + last_load(lambda added: self.meets(low + added), tried[place + 1] - low)
        return max(low, more, key=self.rate)

    def bound(self, batch: float, users: int) -> str:
        """Tell what keeps this batch from being larger: memory, the bottleneck of the prompts, or the bottleneck of the
        decodes.

        The prompts decide where they miss their target first, and where they take most of the time.
        """
        question, (step, delay) = self.worker.question, self.times(batch)
        late = queue_s(self.prompt_s(batch), 1.01 * self.rate(batch), question.attainment) > question.ttft_s
        if batch == users:
            return "memory"
        if late or batch * delay > (question.osl - 1) * step:
            return self.worker.prefill_bound(question.isl)
        return self.worker.decode_bound(max(1.0, batch), decode_context(self.worker))

    def meets(self, batch: float) -> bool:
        """Tell whether the wanted share of the requests is within each target."""
        question, (step, delay) = self.worker.question, self.times(batch)
        tpot = step + (batch + self.z * math.sqrt(batch)) * delay / (question.osl - 1)
        ttft = queue_s(self.prompt_s(batch), self.rate(batch), question.attainment)
        return tpot <= question.tpot_s and ttft <= question.ttft_s


def decode_context(worker: WorkerSpeed) -> int:
    """Return the mean context of a sequence while it decodes: its prompt, and half of its output."""
    return worker.question.isl + worker.question.osl // 2
