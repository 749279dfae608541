"""The mask of workers of each key, by age. Pure.

Keys live in a few dicts, the generations, each of which has keys of about one age. The oldest key is taken from the end of the
oldest dict, which costs the same at any size. One dict would have to be walked from its beginning, over the places of all keys
that have gone, and would stop the loop for 50 to 100 ms each time that it grows or is packed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

GENERATIONS: Final = 4
"""A key that is new is looked for in every generation, up to 0.1 us each where the caches are cold; a dict of a quarter of 1.3
million keys is packed in 10 ms."""
MOVED_KEYS: Final = 2
"""For each key that is set, so many keys move out of a generation too many. One would do: a generation has about as many keys
as it takes to fill the next one."""


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
        """Return the mask of a key. None: nobody holds it."""
        for generation in self._generations:
            mask = generation.get(key)
            if mask is not None:
                return mask
        return None

    def set(self, bit: int, keys: Collection[int]) -> None:
        """Set a worker's bit in the masks of these keys. Those that are new to the worker become young. Keys with equal masks
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
        """Remove a worker's bit from the masks of these keys. A key that nobody holds any more goes."""
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
        """Move up to `count` keys to the oldest generation from the one after it while there is one too many: keys that go
        leave generations behind that are nearly empty."""
        while len(self._generations) > GENERATIONS and count > 0:
            old, oldest = self._generations[-2:]
            while old and count > 0:
                key, oldest[key] = old.popitem()
                count -= 1
            if not old:
                del self._generations[-2]
