"""One worker: a production role, link and lease services around a simulated engine, transfer thread and network.

The start and the end repeat those of `pdserve.worker.process`, without threads.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

from decode_worker.role import DecodeRole
from kvtransfer.routed import rank_id
from pdserve.checkpoint.families.llama import llama_spec
from pdserve.config import EngineConfig, LeaseConfig, WorkerConfig
from pdserve.core.block_hash import KEY_BYTES
from pdserve.core.block_pools import BlockPools
from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import Incarnation
from pdserve.core.kv_layout import KvGroup, KvSpec
from pdserve.core.model_spec import RopeSpec
from pdserve.core.shards import Degrees, kv_shares
from pdserve.core.speculation import DraftCounts
from pdserve.core.step_plan import StepPlan
from pdserve.core.worker import OWN_ENGINE
from pdserve.rpc.v1 import common_pb2, link_pb2
from pdserve.worker.engine_thread import EngineView
from pdserve.worker.host import TICKET_SECRET_BYTES, Host, HostedRole, close_role
from pdserve.worker.member import LinkMember
from pdserve.worker.messages import AddLent, Command, Reserve, SetLending, StepEvents
from prefill_worker.role import PrefillRole
from sim.faults.drafts import Drafting
from sim.faults.engine import STEP_S, Poison, SimEngine, SimKv, SimMemory
from sim.faults.foreign import TRAITS, ForeignEngine, Tickets
from sim.faults.grammars import GrammarThread, SimCompiler
from sim.faults.oracle import BLOCK_SIZE, CARD, MAX_MODEL_LEN, TOKENIZER
from sim.faults.staging import SimConverter, make_staging
from sim.faults.transfer import SimPools, SimTransfer, region_of
from sim.world.channel import FakeChannel
from sim.world.network import Network
from sim.world.process import Process
from sim.world.server import FakeServer

GROUPS: Final = (
    KvGroup(layers=(0, 3), planes=((2, 1),), block_size=BLOCK_SIZE, dtype="float32"),
    KvGroup(layers=(1, 2), planes=((2, 2),), block_size=BLOCK_SIZE, dtype="float32"),
)
"""The KV groups of a worker with two groups; other workers have the first group. Ranks share heads or layers of both."""
LAYOUT: Final = GROUPS[0]
MODEL: Final = llama_spec(
    vocab_size=64, hidden_size=64, intermediate_size=64, heads=2, kv_heads=[2] * 4, head_dim=1,
    max_position=MAX_MODEL_LEN, rope=RopeSpec(1.0), eps=1e-5, tied_head=True,
)  # fmt: skip
"""The model whose heads and layers ranks share. Nothing else of it is used."""
MORE_BLOCKS: Final = 3  # how many more blocks the first of two groups has, so that it finds longer prefixes
ONE_RANK: Final = Degrees()
HEARTBEAT_S: Final = 0.5
LOST_S: Final = 2.5
ROLES: Final = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
STUCK_S: Final = 8.0  # a read that takes longer counts as stuck
STEP_TIMEOUT_S: Final = 3.0  # a step takes at most 20 ms


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """The sizes and limits of one worker."""

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    lease: LeaseConfig
    drain_timeout_s: float = 10.0
    prefix_caching: bool = False
    max_model_len: int = MAX_MODEL_LEN
    kv_dtypes: tuple[str, ...] = ("float32",)
    """The dtype of each KV group; their number is the number of groups. A worker with other dtypes converts the groups that it
    reads from this worker and whose dtypes differ."""
    step_s: float = STEP_S
    foreign: bool = False
    """True: a foreign engine computes, as in a server of vLLM."""
    degrees: Degrees = ONE_RANK
    """The ranks, each with memory of its own for some heads or layers of every block. More than one: the worker is a gang."""
    window: int | None = None
    """The sliding window of the second group in tokens, if there is one. None: it has no window."""
    drafting: Drafting | None = None
    """How its engine drafts. None: it does not."""

    @property
    def numerics(self) -> str:
        """The name of its bits: a real engine rounds KV to its dtype. Empty for a foreign engine."""
        return "" if self.foreign else " ".join(self.kv_dtypes)


class SimWorker:
    """One process of a worker, with one life after the other: a role flip ends a life and begins the next one, as in
    `pdserve.worker.process`. The engine and the KV pool stay. `run` runs on the loop of the process."""

    def __init__(
        self,
        process: Process,
        shape: WorkerShape,
        network: Network,
        pools: SimPools,
        rng: random.Random,
        reached: Callable[[str, Process], None],
        *,
        poison: bool,
        check_steps: bool,
        worker_id: str = "",
        flipped: Callable[[], None] = lambda: None,
        poisonous: Poison | None = None,
        tickets: Tickets | None = None,
        told: Callable[[int, int, DraftCounts | None], None] = lambda *_: None,
    ) -> None:
        """Build the worker and make it known to the network. `worker_id` empty: the name of the process. `flipped` is called
        when a life with another role begins. `poisonous` has the requests that end the process. `told` hears of drafts.

        `reached` is called at each step that is not a message, with the step's name and the process.
        """
        self.process = process
        self.worker_id = worker_id or process.name
        self.shape = shape
        self._port = 1
        self.lives = 0
        """The lives that have begun."""
        self.incarnation = Incarnation(rng.getrandbits(64))
        windows = (None, shape.window)
        made = zip(GROUPS, shape.kv_dtypes, windows, strict=False)
        groups = [replace(group, dtype=dtype, window=window) for group, dtype, window in made]
        self.spec = KvSpec(tuple(groups))
        sizes = [shape.num_blocks + more * MORE_BLOCKS for more in reversed(range(len(groups)))]
        for number, group in enumerate(groups):  # too few blocks for all sequences at once, so that they wait for each other
            useful = group.most_useful(shape.max_num_seqs // 2, shape.max_num_batched_tokens)
            sizes[number] = sizes[number] if useful is None else min(sizes[number], useful)
        self.kv = SimKv(
            [
                SimMemory(group, kv_shares(MODEL, shape.degrees, group), size, rng, poison=poison)
                for group, size in zip(groups, sizes, strict=True)
            ],
            shape.degrees.ranks,
            random.Random(self.incarnation),
        )
        self._rng = rng
        self._reached = reached
        self._poison = poison
        self._flipped = flipped
        self._poisonous = poisonous or Poison()
        self._pools = pools
        self._network = network
        self._told = told
        self.engine = self._make_engine(sizes, tickets, check_steps=check_steps)
        self.regions = tuple(region_of(memory, (1 + number) << 20) for number, memory in enumerate(self.kv.groups))
        self._config = self._make_config()
        self._grammars = SimCompiler()
        thread = GrammarThread(process, random.Random(self.incarnation), reached)
        process.loop.in_thread = thread.run
        self.view = EngineView(
            self.engine.snapshot(), self.engine.submit, step_timeout_s=STEP_TIMEOUT_S, prefix_caching=shape.prefix_caching
        )
        self.wrong_delta = ""
        """The fault of the next delta of prefix keys, one of `WRONG_DELTAS`. Empty: it has none."""
        self._begin()

    def _begin(self) -> None:
        """Make the parts that end with a life, and make them known to the network and to readers."""
        self.server = FakeServer()
        memory = dict(zip(self.regions, self.kv.groups, strict=True))
        process, network, rng = self.process, self._network, self._rng
        summed = self.shape.lease.kv_checksum
        self.transfer = SimTransfer(
            process, memory, self._pools, network, rng, self._reached, stuck_after_s=STUCK_S, summed=summed
        )
        converter = SimConverter(process, rng)
        self.staging = make_staging(process, self.transfer, self.spec, self.kv, converter, rng, poison=self._poison)
        self._ticket_secret = rng.randbytes(TICKET_SECRET_BYTES)
        self.member = LinkMember(
            self._config, ROLES[process.role], self.view, flips=self.lives, open_channel=self._open_channel, make_beats=None
        )
        self._tell = self.member.link.send
        self.member.link.send = self._send  # type: ignore[method-assign]  # a fault of this worker, above its link
        network.servers[self.address] = (process, self.server)
        for rank in range(self.shape.degrees.ranks):
            self._pools.add(rank_id(self.incarnation, rank), process, self.transfer.parts.get(rank, {}))
        self.lives += 1

    def lose_rank(self, rank: int) -> None:
        """Let a rank die. Nobody can read its memory any more, its own reads stop, and the step does not end. The rest of the
        worker goes on until it notices."""
        self._pools.forget(rank_id(self.incarnation, rank))
        self.transfer.lost_ranks.add(rank)
        self.process.hang_engine()

    def flip(self) -> None:
        """Drain, and then take the other role. A worker that is about to end refuses."""
        with suppress(InvalidRequest):
            self.member.flip(next(number for name, number in ROLES.items() if name != self.process.role))

    def _begin_again(self, role: common_pb2.Role) -> None:
        """Begin the next life: a new incarnation, and the old address or a new one. A peer that still reads learns a little
        later that the old one has ended, and until then reads the bytes that lie there by now."""
        old_s = self._rng.random()
        for rank in range(self.shape.degrees.ranks):
            self._network.later(old_s, partial(self._pools.forget, rank_id(self.incarnation, rank)))
        self._flipped()
        self.process.role = next(name for name, number in ROLES.items() if number == role)
        self.incarnation = Incarnation(self._rng.getrandbits(64))
        if self._rng.random() < 0.5:
            self._port += 1
        if isinstance(self.engine, ForeignEngine):
            self.engine.restart()
        self._begin()

    def _make_engine(self, sizes: list[int], tickets: Tickets | None, *, check_steps: bool) -> SimEngine | ForeignEngine:
        shape, process, rng = self.shape, self.process, self._rng
        publish: Callable[[StepEvents], None] = lambda events: self.view.on_step(events)  # noqa: E731
        reached: Callable[[str], None] = lambda step: self._reached(f"{step}_{process.role}", process)  # noqa: E731
        if shape.foreign:
            assert tickets is not None
            return ForeignEngine(
                process,
                tickets,
                self._network,
                publish,
                reached,
                rng,
                num_blocks=shape.num_blocks,
                max_num_seqs=shape.max_num_seqs,
                max_model_len=shape.max_model_len,
                step_s=shape.step_s,
            )
        return SimEngine(
            process,
            self.kv,
            BlockPools(*sizes, layouts=self.spec.groups),
            publish,
            reached,
            rng,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_model_len=shape.max_model_len,
            prefix_caching=shape.prefix_caching,
            check_steps=check_steps,
            checksums=shape.lease.kv_checksum,
            step_s=shape.step_s,
            ends=self._ends,
            drafting=shape.drafting,
            told=self._told,
        )

    def _ends(self, plan: StepPlan) -> bool:
        """End the process if the step computes a request that ends its workers."""
        name = self._poisonous.in_step(plan)
        if name:
            self.end_by(name)
        return bool(name)

    def end_by(self, name: str) -> None:
        """End the process as a request of this name does it."""
        self._poisonous.ended_by[self.incarnation] = name
        self.process.kill()

    def _submit(self, command: Command) -> None:
        """Give a command to the engine. A draining worker must begin nothing new."""
        if self.member._drain_asked.is_set() and isinstance(command, AddLent | Reserve):
            self.process.timeline.errors.append(f"{self.worker_id} drains and begins {command}")
        self.view.submit(command)

    def _send(self, message: link_pb2.WorkerMessage) -> None:
        """Send a message to the router. The next delta with added keys may go wrong. Scores go out with token 0 alone."""
        late = [row.index for row in message.step_batch.rows if row.index and row.prompt_logprobs.chosen]
        if late:
            self.process.timeline.errors.append(f"{self.worker_id} sends the scores of a prompt with token {late[0]}")
        delta = message.prefix_delta
        if self.wrong_delta and delta.added and not delta.full:
            wrong, self.wrong_delta = self.wrong_delta, ""
            if wrong == "number":
                delta.number += 1
            elif wrong == "key":
                delta.added = delta.added[KEY_BYTES:]
            else:
                delta.digest ^= 1
        self._tell(message)

    @property
    def address(self) -> str:
        """The address of the services of the present life."""
        return f"{self.process.name}:{self._port}"

    async def run(self, ended: Callable[[], None]) -> None:
        """Run one life after the other, until one has drained or is unhealthy, or its link ends; then call `ended`."""
        while (role := await self._live()) is not None:
            self._begin_again(role)
        ended()

    async def _live(self) -> common_pb2.Role | None:
        """Live one life. Return the role of the next one, or None when the process must end."""
        host = self._make_host(await self.transfer.start())
        is_prefill = self.process.role == "prefill"
        self.member.start(host, PrefillRole if is_prefill else DecodeRole)
        assert self.member.role is not None
        if not self.shape.foreign:
            self.view.submit(SetLending(is_prefill))
        drained = asyncio.create_task(self.member.drained())
        tasks: list[asyncio.Task[Any]] = [drained]
        tasks += [asyncio.create_task(cast(Any, job)) for job in (self.member.link.run(), self.member.broken())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        next_role = drained.result() if done == {drained} and drained.exception() is None else None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        clean = await close_role(self.member.role, self.transfer)
        self.server.stop()
        self.staging.close()
        return next_role if clean and not self.transfer.num_unstopped else None

    @property
    def role(self) -> HostedRole[Any] | None:
        """The worker's role; None before the start."""
        return self.member.role

    def _make_host(self, agent_metadata: bytes) -> Host:
        return Host(
            config=self._config,
            card=CARD,
            model_digest=CARD.fingerprint,
            numerics=self.shape.numerics,
            kv_spec=self.spec,
            regions=self.regions,
            tokenizer=TOKENIZER,
            max_model_len=self.shape.max_model_len,
            incarnation=self.incarnation,
            transport=self._config.transfer.transport,
            transfer=self.transfer,
            agent_metadata=agent_metadata,
            address=self.address,
            server=cast(Any, self.server),
            submit=self._submit,
            send=self.member.link.send,
            open_channel=self._open_channel,
            staging=self.staging,
            ticket_secret=self._ticket_secret,
            seq_ids=self.view.seq_ids,
            start_grammar=self._grammars.start,
            traits=TRAITS if self.shape.foreign else OWN_ENGINE,
        )

    def _make_config(self) -> WorkerConfig:
        shape = self.shape
        return WorkerConfig(
            self.worker_id,
            "router:1",
            EngineConfig(
                block_size=BLOCK_SIZE,
                max_num_seqs=shape.max_num_seqs,
                max_model_len=shape.max_model_len,
                enable_prefix_caching=shape.prefix_caching,
            ),
            shape.lease,
            heartbeat_interval_s=HEARTBEAT_S,
            router_lost_s=LOST_S,
            drain_timeout_s=shape.drain_timeout_s,
        )

    def _open_channel(self, address: str) -> Any:
        return FakeChannel(self._network, self.process, address)
