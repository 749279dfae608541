"""A worker without an engine whose steps take known times, so that the capacity of a cluster is known in advance.

A step computes at most one whole prompt, and one token of each sequence whose prompt is computed. It takes `prompt_token_s` for
each token of the prompt, and `step_s` if it has such sequences. Steps follow each other on a time line of their own, so a timer
that is late does not make the worker slower.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pdserve.rpc.v1 import common_pb2, link_pb2
from testkit.fake_worker import FakeWorker, _Sequence


@dataclass(slots=True)
class ScriptedWorker(FakeWorker):
    """`async with ScriptedWorker(DECODE, address, step_s=0.01) as worker:` serves as `FakeWorker` does, in known time."""

    prompt_token_s: float = 0.0
    step_s: float = 0.0

    _computed: set[int] = field(default_factory=set)  # handles of sequences whose prompt was computed here
    _prompt_busy_s: float = 0.0
    _decode_busy_s: float = 0.0
    _began_s: float = 0.0

    def heartbeat(self) -> common_pb2.WorkerLoad:
        """Return the heartbeat for the present state, with the time of all steps so far."""
        load = FakeWorker.heartbeat(self)
        load.prompt_busy_s, load.decode_busy_s = self._prompt_busy_s, self._decode_busy_s
        load.uptime_s = asyncio.get_running_loop().time() - self._began_s
        return load

    async def _step_loop(self) -> None:
        loop = asyncio.get_running_loop()
        self._began_s = end_s = loop.time()
        while True:
            if not self._work.is_set():
                await self._work.wait()
                end_s = loop.time()
            prompt, decodes = self._next_step()
            if prompt is None and not decodes:
                self._work.clear()
                continue
            took_s = self.step_s if decodes else 0.0
            if prompt is None:
                self._decode_busy_s += took_s
            else:
                took_s += self.prompt_token_s * len(prompt.prompt_ids)
                self._prompt_busy_s += took_s
            end_s += took_s
            await asyncio.sleep(max(0.0, end_s - loop.time()))
            self._finish_step([*decodes, *([] if prompt is None else [prompt])])

    def _next_step(self) -> tuple[_Sequence | None, list[_Sequence]]:
        """Return the prompt of the next step, and the sequences that get a token in it."""
        runs = [one for one in self._sequences.values() if one.runs]
        ready = [one for one in runs if one.attached or one.handle in self._computed]
        prompt = next((one for one in runs if not one.attached and one.handle not in self._computed), None)
        return prompt, ready[: self.max_num_seqs]

    def _finish_step(self, step: list[_Sequence]) -> None:
        """Send the tokens of a step. Sequences that were cancelled meanwhile get none."""
        live = [one for one in step if one.handle in self._sequences]
        rows = [self._advance(one) for one in live]
        self._computed.update(one.handle for one in live)
        self._computed &= self._sequences.keys()
        if rows:
            self._send(step_batch=link_pb2.StepBatch(rows=rows))
