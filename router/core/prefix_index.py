"""The index of held prefixes: which worker probably holds which blocks of a prompt. Pure.

Workers name their published blocks by keys and report changes as numbered deltas. Each worker has a bit, and each key has a
mask of the workers that hold it, so one walk over the keys of a prompt compares all workers. Work counts as soon as it is sent:
its worker will hold the prompt's keys.

An answer is a hint. It chooses a worker, and the worker itself compares whole hashes.

The arithmetic: a key takes `ENTRY_BYTES` and its mask, and each worker that holds it `HOLDER_BYTES` more. So 256 MiB hold about
a million keys of a few hundred workers.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import xor
from typing import Final

from pdserve.core.block_hash import MAX_TOLD, TOLD_AT_ONCE, PrefixDelta
from pdserve.core.errors import ReplicaLost
from pdserve.core.ids import Handle
from pdserve.core.worker import Role, WorkerHello
from router.core.events import LinkId

# Answers ---------------------------------------------------------------------------------------------------------
#
# The answer of a walk over the index of held prefixes. Pure.


class Held:
    """The answer of one walk: how long a prefix of the walked keys each worker of the role holds. It is valid until the index
    changes."""

    __slots__ = ("_bits", "_links", "_steps")

    def __init__(self, steps: list[tuple[int, int]], bits: dict[LinkId, int], links: dict[int, LinkId]) -> None:
        """`steps` has lengths, each with the mask of the workers that hold exactly that many keys, shortest first."""
        self._steps = steps
        self._bits = bits
        self._links = links

    def __bool__(self) -> bool:
        return bool(self._steps)

    def blocks(self, link: LinkId) -> int:
        """Return how many of the first keys the worker holds."""
        bit = self._bits.get(link, 0)
        for length, mask in self._steps:
            if mask & bit:
                return length
        return 0

    def longest(self, n: int) -> list[LinkId]:
        """Return at most `n` workers that hold at least the first key: the longest prefix first, and equals by their slots."""
        found: list[LinkId] = []
        for _, mask in reversed(self._steps):
            while mask and len(found) < n:
                bit = mask & -mask
                mask ^= bit
                found.append(self._links[bit.bit_length() - 1])
        return found


# Masks -----------------------------------------------------------------------------------------------------------
#
# The mask of workers of each key, by age. Pure.
#
# Keys live in a few dicts, the generations, each of which has keys of about one age. The oldest key is taken from the end of
# the oldest dict, which costs the same at any size. A single dict would have to be walked from its beginning, over the empty
# places of all removed keys, and would stop the loop for 50 to 100 ms each time that it grows or is packed.


GENERATIONS: Final = 4
"""A key that is new is looked for in every generation, up to 0.1 us each where the caches are cold; a dict of a quarter of 1.3
million keys is packed in 10 ms."""
MOVED_KEYS: Final = 2
"""While there is one generation too many, this many keys move out of it for each key that is set. One key would be enough: a
generation has about as many keys as the next generation takes until it is full."""


class KeyMasks:
    """The mask of each key. A key that gets a worker is young again."""

    def __init__(self, generation_keys: int) -> None:
        """A generation has at most about `generation_keys` keys."""
        self.generation_keys = generation_keys
        self._generations: list[dict[int, int]] = [{}]
        """The youngest comes first."""

    def __len__(self) -> int:
        return sum(map(len, self._generations))

    def items(self) -> Iterator[tuple[int, int]]:
        """Yield all keys with their masks."""
        for generation in self._generations:
            yield from generation.items()

    def get(self, key: int) -> int | None:
        """Return the mask of a key. None: no worker holds it."""
        for generation in self._generations:
            mask = generation.get(key)
            if mask is not None:
                return mask
        return None

    def set(self, bit: int, keys: Collection[int]) -> None:
        """Set a worker's bit in the masks of these keys. Keys that are new to the worker become young. Keys with equal masks
        share one object."""
        if not keys:
            return
        self._turn()
        young = self._generations[0]
        known = 0
        shared: dict[int, int] = {}
        for generation in self._generations:
            if generation.keys().isdisjoint(keys):
                continue
            for key in keys:
                mask = generation.get(key)
                if mask is None:
                    continue
                known += 1
                if not mask & bit:
                    if generation is not young:
                        del generation[key]
                    young[key] = shared.setdefault(mask, mask | bit)
        if not known:
            young.update(dict.fromkeys(keys, bit))
        elif known < len(keys):
            for key in keys:
                if self.get(key) is None:
                    young[key] = bit
        self._merge(MOVED_KEYS * len(keys))

    def unset(self, bit: int, keys: Collection[int]) -> None:
        """Remove a worker's bit from the masks of these keys. A key without holders is removed."""
        for generation in self._generations:
            if generation.keys().isdisjoint(keys):
                continue
            shared: dict[int, int] = {}
            for key in keys:
                mask = generation.get(key, 0)
                if mask == bit:
                    del generation[key]
                elif mask & bit:
                    generation[key] = shared.setdefault(mask, mask ^ bit)

    def pop_oldest(self) -> tuple[int, int]:
        """Remove one of the oldest keys and return it with its mask. There must be one."""
        while not self._generations[-1]:
            self._generations.pop()
        return self._generations[-1].popitem()

    def _turn(self) -> None:
        """Open a new generation when the youngest is full."""
        if len(self._generations[0]) >= self.generation_keys:
            self._generations.insert(0, {})

    def _merge(self, count: int) -> None:
        """While there is one generation too many, move up to `count` keys from the second oldest generation to the oldest.
        Removed keys leave nearly empty generations behind."""
        while len(self._generations) > GENERATIONS and count > 0:
            old, oldest = self._generations[-2:]
            while old and count > 0:
                key, oldest[key] = old.popitem()
                count -= 1
            if not old:
                del self._generations[-2]


# The index -------------------------------------------------------------------------------------------------------


ENTRY_BYTES: Final = 112
"""The bytes of a key: an int of 36, and a place in a dict, which takes 42 to 84 (measured with a million keys)."""
HOLDER_BYTES: Final = 64
"""The bytes of a key in a worker's own dict, which shares the int: 42 to 84 (measured in the same way)."""
MASK_BYTES: Final = 28
"""The bytes of an int without its digits, each of which takes 4 and holds 30 bits."""
SWEPT_KEYS: Final = 4096
"""The number of keys of departed workers that are removed at a time: this takes 1 to 3 ms, where all keys of a large worker
take 100 ms."""
RESYNC_S: Final = 2.0
"""A worker is asked for all its keys at most once in this time. A worker sends its changes once a second."""
MAX_TELLING: Final = 16
"""The most workers that report all their keys at a time, each one part a second: 0.05 to 0.2 s of CPU in each second, for any
number of workers. 1,000 pools of 49,152 blocks take 7 minutes then."""
TELL_S: Final = 10.0
"""A worker that was asked and reports nothing for this time does not keep the others waiting."""
KEPT_BEATS: Final = 2
"""Credit of work that has ended stays until the worker's next delta, which covers it, or until the second heartbeat: a worker
without changes sends no delta after the first."""


@dataclass(slots=True)
class _Holder:
    """The keys of one linked worker, as the index keeps them."""

    slot: int
    bit: int
    hello: WorkerHello
    held: dict[int, None] = field(default_factory=dict)
    """The keys that the worker has reported, without the keys that were evicted here. Their order is kept, so that the replay
    of a recording, which has other keys, removes them in the same order."""
    number: int = 0
    digest: int = 0
    count: int = 0
    """The number of keys that the worker has reported, including the keys that were evicted here."""
    asked_s: float | None = None
    """The time at which the worker was asked for all its keys. None: it was not, or has sent them since."""
    stale: bool = False
    """A delta did not agree, so deltas mean nothing until all keys come."""
    expected: dict[Handle, Collection[int]] = field(default_factory=dict)
    """The keys that work on the worker will publish."""
    ending: dict[Handle, int] = field(default_factory=dict)
    """Work of `expected` that has ended, and the heartbeats that came since."""

    def counted(self) -> set[int]:
        """Return the keys with the bit of this worker: the keys that it has reported, and the keys of its work."""
        return set(self.held).union(*self.expected.values())


class PrefixIndex:
    """The keys of all linked workers, and the credit of work that was sent to them."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds all keys of all workers; the oldest keys are evicted. 0 turns the index off."""
        self._max_bytes = 0
        self._holders: dict[LinkId, _Holder] = {}
        self._bits: dict[LinkId, int] = {}
        self._links: dict[int, LinkId] = {}
        """The link of each slot that a linked worker has."""
        self._leaving: dict[int, _Holder] = {}
        """Workers that have left and whose bits are still in masks, by slot. Their `held` has the keys that are left."""
        self._by_bit: dict[int, _Holder] = {}
        """All of them, linked and leaving, by their bits."""
        self._free: list[int] = []
        self._slots = 0
        self._of_role = dict.fromkeys(Role, 0)
        self._masks = KeyMasks(0)
        """The workers of each key, by their bits."""
        self._pairs = 0
        self._waiting: dict[LinkId, None] = {}
        """Workers that are to be asked for all their keys, in the order of their turns."""
        self._telling: dict[LinkId, float] = {}
        """Workers that are reporting all their keys, with the times of their last parts."""
        self.block_size: int | None = None
        """The tokens of a block of the workers that share blocks. None: no worker has reported yet that it shares blocks."""
        self.changes = 0
        """The number of times that the answer of a walk may have changed."""
        self.resyncs = 0
        """The number of times that a worker was asked for all its keys."""
        self.evicted = 0
        """The number of keys that were evicted because the index was full."""
        self.set_max_bytes(max_bytes)

    def set_max_bytes(self, max_bytes: int) -> None:
        """Bound the keys anew. Fewer bytes evict the oldest keys with the next change."""
        self._max_bytes = max_bytes
        self._masks.generation_keys = 1 + max_bytes // (ENTRY_BYTES + MASK_BYTES + HOLDER_BYTES) // GENERATIONS

    @property
    def max_bytes(self) -> int:
        """The memory that all keys may take, estimated."""
        return self._max_bytes

    # Workers -------------------------------------------------------------------------------------------------------------

    def join(self, link: LinkId, hello: WorkerHello) -> None:
        """Add a worker on a new link. It starts without keys: the keys of an earlier process say nothing about this process."""
        if not self._max_bytes:
            return
        slot = self._free.pop() if self._free else self._slots
        self._slots = max(self._slots, slot + 1)
        self._holders[link] = holder = _Holder(slot, 1 << slot, hello)
        self._bits[link] = holder.bit
        self._by_bit[holder.bit] = holder
        self._links[slot] = link
        self._of_role[hello.role] |= holder.bit
        self.changes += 1

    def leave(self, link: LinkId) -> None:
        """Forget a worker with all its keys and credit. An unknown link is no error.

        No walk finds it from now on. Its keys are removed a few at a time, and its slot is free after that.
        """
        holder = self._holders.pop(link, None)
        if holder is None:
            return
        self._waiting.pop(link, None)
        self._telling.pop(link, None)
        self._of_role[holder.hello.role] ^= holder.bit
        self.changes += 1
        del self._links[holder.slot], self._bits[link]
        self._pairs -= len(holder.held)
        holder.held.update(dict.fromkeys(chain.from_iterable(holder.expected.values())))
        self._pairs += len(holder.held)
        self._leaving[holder.slot] = holder
        self._sweep()

    def _sweep(self) -> None:
        """Remove up to `SWEPT_KEYS` keys of the worker that left first."""
        for slot, holder in self._leaving.items():
            swept = [holder.held.popitem()[0] for _ in range(min(SWEPT_KEYS, len(holder.held)))]
            self._pairs -= len(swept)
            self._unset(holder.bit, swept)
            if not holder.held:
                del self._leaving[slot], self._by_bit[holder.bit]
                self._free.append(slot)
            return

    def shares(self, link: LinkId) -> bool:
        """Tell whether a worker is known to share blocks. A worker that shares blocks reports so with its first heartbeats."""
        holder = self._holders.get(link)
        return holder is not None and holder.number > 0

    # Deltas --------------------------------------------------------------------------------------------------------------

    def apply(self, link: LinkId, delta: PrefixDelta, *, now_s: float) -> LinkId | None:
        """Take the changes that a worker reports. Return a worker that is to be asked for all its keys now, as `turn` does.

        Raises `ReplicaLost` when the worker names more keys than it has blocks, or removes keys that it does not have.
        """
        holder = self._holders.get(link)
        if holder is None:
            return None
        self.block_size = holder.hello.block_size
        if delta.full and len(delta.added) > TOLD_AT_ONCE and not self._may_tell(link, now_s):
            holder.number, holder.stale, holder.asked_s = delta.number, True, None
        elif delta.full:
            self._replace(holder, delta)
        elif not holder.stale:
            self._change(holder, delta)
        if not holder.stale:
            holder.asked_s = None
            self._settle(holder)
            self._waiting.pop(link, None)
            if link in self._telling:
                self._telling[link] = now_s
                if len(delta.added) < MAX_TOLD:  # the last part
                    del self._telling[link]
        elif holder.asked_s is None or now_s - holder.asked_s >= RESYNC_S:
            self._telling.pop(link, None)
            self._waiting[link] = None
        return self.turn(now_s)

    def turn(self, now_s: float) -> LinkId | None:
        """Return the next worker that is to be asked for all its keys, because its reports did not agree. None: no worker waits
        for this, or `MAX_TELLING` workers are reporting all their keys."""
        if not self._waiting or not self._has_room(now_s):
            return None
        link = next(iter(self._waiting))
        del self._waiting[link]
        self._telling[link] = self._holders[link].asked_s = now_s
        self.resyncs += 1
        return link

    def _may_tell(self, link: LinkId, now_s: float) -> bool:
        """Tell whether a worker may report all its keys now. A worker of an earlier release does so without being asked."""
        if link not in self._telling and self._has_room(now_s):
            self._telling[link] = now_s
        return link in self._telling

    def _has_room(self, now_s: float) -> bool:
        if len(self._telling) >= MAX_TELLING:
            for link in [link for link, at_s in self._telling.items() if now_s - at_s > TELL_S]:
                del self._telling[link]
        return len(self._telling) < MAX_TELLING

    def _replace(self, holder: _Holder, delta: PrefixDelta) -> None:
        _check_count(holder, len(delta.added))
        holder.number, holder.count = delta.number, len(delta.added)
        holder.digest = reduce(xor, delta.added, 0)
        holder.stale = holder.digest != delta.digest
        reported = () if holder.stale else delta.added
        before, holder.held = holder.held, dict.fromkeys(reported)
        self._pairs += len(holder.held) - len(before)
        self._clear(holder, before)
        self._set(holder.bit, reported)
        self._evict()

    def _change(self, holder: _Holder, delta: PrefixDelta) -> None:
        digest = reduce(xor, delta.removed, reduce(xor, delta.added, holder.digest))
        if delta.number != holder.number + 1 or digest != delta.digest:
            holder.stale = True
            return
        count = holder.count + len(delta.added) - len(delta.removed)
        _check_count(holder, count)
        holder.number, holder.digest, holder.count = delta.number, digest, count
        known = len(holder.held)
        for key in delta.removed:
            holder.held.pop(key, None)
        self._clear(holder, delta.removed)
        holder.held.update(dict.fromkeys(delta.added))
        self._pairs += len(holder.held) - known
        self._set(holder.bit, delta.added)
        self._evict()
        if len(holder.held) > count:
            raise ReplicaLost(f"{_name(holder)} has removed keys that it had not added")

    # Credit --------------------------------------------------------------------------------------------------------------

    def expect(self, link: LinkId, handle: Handle, keys: Collection[int]) -> None:
        """Count the keys of work that was sent to a worker as held there, until `ended` and the delta that follows.

        Nothing happens for a worker that has not sent a delta yet, because it may share no blocks.
        """
        holder = self._holders.get(link)
        if holder is not None and holder.number and keys:
            assert handle not in holder.expected, "a handle names one work"
            holder.expected[handle] = keys
            self._set(holder.bit, keys)
            self._evict()

    def ended(self, link: LinkId, handle: Handle) -> None:
        """Let the credit of work end with the worker's next delta. An unknown link or handle is no error.

        A worker publishes a block before it reports the work's end, and a link keeps its order. So the next delta that comes
        has what this work published, and there is no time in between at which the router knows of neither.
        """
        holder = self._holders.get(link)
        if holder is not None and handle in holder.expected:
            holder.ending.setdefault(handle, 0)

    def beat(self, link: LinkId) -> None:
        """Take note of a worker's heartbeat. Work that ended `KEPT_BEATS` heartbeats ago published nothing more."""
        self._sweep()
        holder = self._holders.get(link)
        if holder is None or not holder.ending:
            return
        for handle in holder.ending:
            holder.ending[handle] += 1
        self._drop(holder, [handle for handle, beats in holder.ending.items() if beats >= KEPT_BEATS])

    def _settle(self, holder: _Holder) -> None:
        if holder.ending:
            self._drop(holder, list(holder.ending))

    def _drop(self, holder: _Holder, handles: Iterable[Handle]) -> None:
        for handle in handles:
            del holder.ending[handle]
            self._clear(holder, holder.expected.pop(handle))

    # Look-ups ------------------------------------------------------------------------------------------------------------

    def walk(self, keys: Sequence[int], role: Role) -> Held:
        """Find how long a prefix of `keys` each worker of the role holds. The walk stops at the first key that no worker holds
        together with all keys before it."""
        masks, alive = self._masks, self._of_role[role]
        steps: list[tuple[int, int]] = []
        if not len(masks) or not alive:
            return Held(steps, self._bits, self._links)
        last: int | None = 0
        length = -1
        for length, key in enumerate(keys):
            mask = masks.get(key)
            if mask is last:  # neighbouring keys mostly share the mask object, so most keys cost one look-up
                continue
            still = 0 if mask is None else alive & mask
            if still != alive:
                if length:
                    steps.append((length, alive ^ still))
                if not still:
                    break
                alive = still
            last = mask
        else:
            if alive and length >= 0:
                steps.append((length + 1, alive))
        return Held(steps, self._bits, self._links)

    def held(self, link: LinkId) -> frozenset[int]:
        """Return the keys that a worker has reported and that were not evicted here, without credit."""
        holder = self._holders.get(link)
        return frozenset() if holder is None else frozenset(holder.held)

    @property
    def keys(self) -> int:
        """The number of keys that the index holds, credit keys included."""
        return len(self._masks)

    @property
    def bytes(self) -> int:
        """The memory of all keys, estimated."""
        return len(self._masks) * (ENTRY_BYTES + self._mask_bytes) + self._pairs * HOLDER_BYTES

    @property
    def _mask_bytes(self) -> int:
        return MASK_BYTES + 4 * (self._slots // 30 + 1)

    # Inside --------------------------------------------------------------------------------------------------------------

    def _set(self, bit: int, keys: Collection[int]) -> None:
        """Set a worker's bit in the masks of these keys, which become the youngest if they are new to the worker."""
        self.changes += 1
        self._masks.set(bit, keys)

    def _clear(self, holder: _Holder, keys: Iterable[int]) -> None:
        """Remove keys of a worker, except the keys that it has reported and the keys that its work will publish."""
        held = holder.held
        left = {key for key in keys if key not in held}
        for expected in holder.expected.values():
            if not left:
                return
            left.difference_update(expected)
        self._unset(holder.bit, left)

    def _unset(self, bit: int, keys: Collection[int]) -> None:
        self.changes += 1
        self._masks.unset(bit, keys)

    def _evict(self) -> None:
        """Evict the oldest keys while the index is full. Digests and counts stay: they describe the keys that the workers
        reported."""
        masks, each = self._masks, ENTRY_BYTES + self._mask_bytes + HOLDER_BYTES
        by_bit = self._by_bit
        while (excess := self.bytes - self._max_bytes) > 0 and len(masks):
            self.changes += 1
            count = min(len(masks), -(-excess // each))
            self.evicted += count
            for _ in range(count):
                key, mask = masks.pop_oldest()
                while mask:
                    bit = mask & -mask
                    mask ^= bit
                    if by_bit[bit].held.pop(key, 0) is None:  # 0: the bit was of credit
                        self._pairs -= 1

    def check_invariants(self) -> None:
        """Assert that masks, sets and counts agree. This walks over all keys."""
        holders = [*self._holders.values(), *self._leaving.values()]
        assert self._pairs == sum(len(holder.held) for holder in holders)
        assert not len(self._masks) or self.bytes <= self._max_bytes
        masks: dict[int, int] = {}
        masks_now = dict(self._masks.items())
        assert len(masks_now) == len(self._masks)
        for holder in self._holders.values():
            assert holder.ending.keys() <= holder.expected.keys()
            assert holder.count >= len(holder.held)
        for holder in holders:
            for key in holder.held:
                assert masks_now[key] & holder.bit
            for key in holder.counted():
                masks[key] = masks.get(key, 0) | holder.bit
        for key, mask in masks_now.items():
            assert mask
            assert mask & ~masks.get(key, 0) == 0
        assert {link: holder.slot for link, holder in self._holders.items()} == {v: k for k, v in self._links.items()}
        assert len(self._telling) <= MAX_TELLING
        assert {*self._waiting, *self._telling} <= self._holders.keys()
        assert all(self._holders[link].stale for link in self._waiting)
        assert self._by_bit == {holder.bit: holder for holder in holders}
        assert sorted([*self._links, *self._leaving, *self._free]) == list(range(self._slots))

    def check_credit(self, link: LinkId, running: Container[Handle]) -> None:
        """Assert that all credit of a worker is of work that runs there, or is about to end."""
        holder = self._holders.get(link)
        if holder is not None:
            assert all(handle in running or handle in holder.ending for handle in holder.expected)


def _check_count(holder: _Holder, count: int) -> None:
    hello = holder.hello
    if not 0 <= count <= hello.num_blocks:
        raise ReplicaLost(f"{_name(holder)} shares {count} blocks by its own deltas; its num_blocks is {hello.num_blocks}")


def _name(holder: _Holder) -> str:
    return f"{holder.hello.role.value} worker {holder.hello.worker_id}"
