"""Admission: each error of a client is found here, and the error names the field and the limit.

No request goes to a worker of an older release that would ignore a field of it. The full blocks of a prompt get their keys
here, which name them to the core's index of held prefixes, and a client's grammar is compiled, so that each compiles in time.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from pdserve.config import RouterConfig
from pdserve.core.block_hash import BlockHash, chain_salt, key_of, next_hash, root_hash
from pdserve.core.errors import (
    ContextOverflow,
    DeadlineExceeded,
    InvalidRequest,
    PdserveError,
    Unavailable,
    UnknownModel,
)
from pdserve.core.ids import RequestId
from pdserve.core.limits import IntRange, MaxBytes, check_limits, check_types, limit_of
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import Placement, SamplingParams, check_prompt_logprobs
from pdserve.core.slo import SloClass
from pdserve.core.structured.constraint import FIELD, Constraint
from pdserve.core.worker import newest_field, used_features
from pdserve.structured.checker import GrammarChecker
from router.api.identity import new_request_id, number_of
from router.api.request import SESSION_ID, GenerateInput, is_chat
from router.core import events as ev
from router.core.events import Submit
from router.core.registry import Registry, Worker
from router.service.model import LengthLimit, ServedModel
from router.service.prompts import PromptEncoder

_CORRELATION_ID: Final = MaxBytes(128)
_PRIORITY: Final = limit_of(RequestSpec, "priority", IntRange)


CheckGrammar = Callable[[Constraint], Awaitable[None]]


async def _no_grammars(constraint: Constraint) -> None:
    raise InvalidRequest("is not supported here", field=FIELD)


class Admission:
    """Turns what a client wrote into a checked, tokenised request."""

    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel,
        limit: LengthLimit,
        encoder: PromptEncoder,
        draw_seed: Callable[[], int],
        shared_block_size: Callable[[], int | None] = lambda: None,
        check_grammar: CheckGrammar = _no_grammars,
        model_digest: Callable[[], str] = lambda: "",
    ) -> None:
        """`shared_block_size` returns the tokens of a block of the workers that share blocks. None: no worker shares any.
        `check_grammar` raises the error of a constraint that does not compile. `model_digest` returns that of the workers'
        weights, which is part of the names of their blocks; empty: nobody knows it."""
        self._check_grammar = check_grammar
        self._config = config
        self._model = model
        self._vocab_size = model.card.vocab_size
        self._limit = limit
        self._encoder = encoder
        self._draw_seed = draw_seed
        self._shared_block_size = shared_block_size
        self._keys = PromptKeys(lambda: model_digest() or model.card.fingerprint)
        self._classes = config.classes()

    async def admit(self, request: GenerateInput, *, arrived_s: float, leader: Submit | None = None) -> Submit:
        """Return the checked and tokenised request. Raises `InvalidRequest`, `UnknownModel`, `DeadlineExceeded`, `Overloaded`
        or `Unavailable`.

        `leader` is the admitted request with the same prompt, whose ids, keys and checked constraint are taken over.
        """
        self.check_model(request.model)
        _check_correlation_id(request.correlation_id)
        SESSION_ID.check("session_id", request.session_id)
        slo = self._class_of(request.slo_class)
        deadline_s = self._deadline_s(request.deadline_s, slo)
        check_types(RequestSpec, request.options, "an option")
        check_limits(RequestSpec, request.options)
        self._check_priority(request.options)
        # Types and limits come before tokenising, so that a wrong value does not cost a long encode; a bias
        # of logits gets the form that its limits are for only then.
        check_types(SamplingParams, request.sampling, "a sampling parameter")
        check_limits(SamplingParams, {name: given for name, given in request.sampling.items() if name != "logit_bias"})
        try:
            async with asyncio.timeout(deadline_s):
                return await self._prepared(request, slo, leader, arrived_s=arrived_s, deadline_s=deadline_s)
        except TimeoutError:
            raise DeadlineExceeded(f"deadline_s of {deadline_s:.3g} s passed before the request could be queued") from None

    async def _prepared(
        self, request: GenerateInput, slo: SloClass, leader: Submit | None, *, arrived_s: float, deadline_s: float
    ) -> Submit:
        """Do what takes time: the prompt waits for the threads that tokenise, and a constraint for its check."""
        if leader is None:
            prompt_ids = await self._encoder.encode(
                request.prompt, request.client, add_special_tokens=request.add_special_tokens, must_fit=True
            )
        else:
            prompt_ids = leader.spec.prompt_ids
        prompt_field = "messages" if is_chat(request.prompt) else "prompt"
        if len(prompt_ids) >= (limit := self._limit.max_model_len):
            raise ContextOverflow.of_prompt(f"{len(prompt_ids)} tokens", limit, field=prompt_field)
        self._check_placement(request.placement, len(prompt_ids))
        spec = RequestSpec(
            prompt_ids,
            self._sampling(request.sampling, len(prompt_ids), prompt_field, limit),
            **self._options(request.options, slo),
            tpot_s=slo.tpot_s or 0.0,
            client=number_of(request.client[:-1]),
            constraint=request.constraint,
        )
        if request.constraint is not None and (leader is None or request.constraint != leader.spec.constraint):
            await self._check_grammar(request.constraint)
        return Submit(
            request_id=RequestId(request.request_id or new_request_id()),
            spec=spec,
            arrived_s=arrived_s,
            deadline_s=arrived_s + deadline_s,
            placement=request.placement,
            correlation_id=request.correlation_id,
            slo=slo,
            session_id=request.session_id,
            prefix_keys=await self._prefix_keys(spec, leader),
            leader=RequestId("") if leader is None else leader.request_id,
            client=request.client,
            open_ended="max_tokens" not in request.sampling,
        )

    async def _prefix_keys(self, spec: RequestSpec, leader: Submit | None) -> tuple[int, ...]:
        """Return the keys of the prompt's full blocks. They are none when no worker shares blocks."""
        if leader is not None and leader.spec.cache_salt == spec.cache_salt:
            return leader.prefix_keys
        block_size = self._shared_block_size()
        return () if block_size is None else await self._keys.of(spec.prompt_ids, spec.cache_salt, block_size)

    def check_model(self, name: str | None) -> None:
        """Check that the model is served here. None and empty mean the served one. Raises `UnknownModel`."""
        if name and name != self._model.name:
            raise UnknownModel(f"model {name!r:.100} is not served here; {self._model.name!r} is", field="model")

    def class_name(self, name: str) -> str:
        """Return the name of a request's class. Empty means the default class."""
        return name or self._config.default_class

    def known_class(self, name: str) -> SloClass | None:
        """Return the class of this name, or None for a name that is unknown. Empty means the default class."""
        return self._classes.get(self.class_name(name))

    def _class_of(self, name: str) -> SloClass:
        found = self.known_class(name)
        if found is None or not (found.client or not name):
            may = ", ".join(one.name for one in self._classes.values() if one.client)
            reserved = "" if found is None else " that clients may name (router.slo_classes sets its `client` to false)"
            raise InvalidRequest(f"{name!r:.100} is not a class here{reserved}; {may} are", field="slo_class")
        return found

    def _check_priority(self, options: Mapping[str, Any]) -> None:
        """Refuse a head start that the settings do not grant. It is not cut down in silence."""
        most, asked = self._config.max_client_priority, options.get("priority", 0)
        if asked > most:
            raise InvalidRequest(
                f"asks for a head start of {asked} levels; at most {most} are granted here (router.max_client_priority)",
                field="priority",
            )

    def _check_placement(self, asked: Placement | None, prompt_len: int) -> None:
        """Refuse to let a client put a long prompt on a decode worker, where it would slow all streams down."""
        most = self._config.max_client_colocated_tokens
        is_own = asked is Placement.COLOCATED and self._config.placement != asked.value
        if is_own and most is not None and prompt_len > most:
            raise InvalidRequest(
                f"colocated is allowed for prompts of at most {most} tokens here (router.max_client_colocated_tokens), "
                f"and this one has {prompt_len}",
                field="placement",
            )

    def _options(self, given: Mapping[str, Any], slo: SloClass) -> Mapping[str, Any]:
        """Return the options with the priority of the class added, and its limit of drafts where the request has none. The sum
        stays within the limits of a request's priority."""
        of_class: dict[str, Any] = {}
        if slo.priority:
            of_class["priority"] = min(_PRIORITY.high, max(_PRIORITY.low, given.get("priority", 0) + slo.priority))
        if slo.num_speculative_tokens is not None and "draft_limit" not in given:
            of_class["draft_limit"] = slo.num_speculative_tokens
        return {**given, **of_class} if of_class else given

    def _deadline_s(self, asked: float | None, slo: SloClass) -> float:
        limit_s = min(self._config.max_deadline_s, slo.max_deadline_s or self._config.max_deadline_s)
        if asked is None:
            return min(limit_s, self._config.default_deadline_s)
        if math.isnan(asked):
            raise InvalidRequest("must be a number of seconds, got nan", field="deadline_s")
        if asked <= 0:
            raise DeadlineExceeded(f"deadline_s of {asked:.3g} s had passed when the request arrived")
        if asked > limit_s:
            of_class = "" if limit_s == self._config.max_deadline_s else f" for class {slo.name!r}"
            raise InvalidRequest(f"must be at most {limit_s:g}{of_class}, got {asked:g}", field="deadline_s")
        return asked

    def _sampling(self, fields: Mapping[str, Any], prompt_len: int, prompt_field: str, limit: int) -> SamplingParams:
        values = dict(fields)
        if "max_tokens" not in values:
            values["max_tokens"] = self._limit.open_ended_room(prompt_len, limit)
        if "seed" not in values:
            values["seed"] = self._draw_seed()
        if "logit_bias" in values:
            values["logit_bias"] = tuple(sorted(values["logit_bias"].items()))
        params = SamplingParams(**values)
        if params.max_tokens > limit - prompt_len:
            raise ContextOverflow.of_output(params.max_tokens, prompt_len, limit, prompt=prompt_field)
        check_prompt_logprobs(prompt_len, params.prompt_logprobs)
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids([token_id for token_id, _ in params.logit_bias], "logit_bias")
        return params

    def _check_ids(self, token_ids: Iterable[int], field: str) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(f"token id {token_id} is not in [0, {self._vocab_size - 1}]", field=field)


def _check_correlation_id(given: str) -> None:
    """Check the client's id, which is written to the log. The error names the field as clients know it."""
    _CORRELATION_ID.check("request_id", given)
    if not given.isprintable():
        raise InvalidRequest("must be printable", field="request_id")


def check_workers(spec: RequestSpec, registry: Registry) -> None:
    """Raise `Unavailable` while a worker is linked that would ignore a field of the request, since it may be placed there, and
    `InvalidRequest` while the engine of one lacks a feature that the request uses."""
    if not registry.limited:
        return
    for worker in registry:
        if (error := _lacking(spec, worker)) is not None:
            raise error


def unsendable(effect: ev.Command, registry: Registry) -> ev.RequestFailed | None:
    """Return the failure of a request that must not be sent to this worker, which has joined since the check. None: send it."""
    if not registry.limited or not isinstance(effect, ev.SendBind | ev.SendPrefill):
        return None
    worker = registry.get(effect.link)
    error = None if worker is None else _lacking(effect.work.spec, worker)
    return None if error is None else ev.RequestFailed(effect.link, effect.work.handle, error)


def _lacking(spec: RequestSpec, worker: Worker) -> PdserveError | None:
    """Return the error of a request with a field that this worker would ignore, or with a feature that its engine lacks. None:
    the worker can serve it."""
    field, version = newest_field(spec)
    if worker.link_version < version:
        name, link_version = worker.name, worker.link_version
        return Unavailable(f"{field}: {name} speaks link version {link_version}, which lacks it: upgrade the worker")
    for feature in used_features(spec, worker.hello.refuses):
        return InvalidRequest(f"{worker.name} runs {worker.hello.engine}, which cannot do this under pdserve", field=feature)
    return None


MAX_BLOCKS: Final = 2048
"""The most blocks of a prompt that are named. A worker that holds so many is the right one, whatever follows."""
RUN_BLOCKS: Final = 16
"""The blocks of one entry of the memo. Prompts that part within a run share nothing of it: at most 15 hashes more."""
MAX_RUNS: Final = 4096
"""The most entries of the memo: about 8 MB with blocks of 16 tokens."""
AWAY_RUNS: Final = 16
"""The loop may do something else after so many runs, which take 0.3 ms if they are new."""

_Run = tuple[BlockHash, tuple[int, ...]]
"""The hash of the last block, and the keys of all."""


class PromptKeys:
    """Computes the keys of prompts. One loop uses it.

    Keys come from the chain of hashes that the workers compute (`core.block_hash`), so they are computed here once, outside of
    the core. Most prompts begin as an earlier one did: a memo of chains makes 16 blocks cost one look-up instead of 16 hashes.
    """

    def __init__(self, model_name: Callable[[], str], max_runs: int = MAX_RUNS) -> None:
        """`model_name` returns what the workers' salts name their weights by at present: their digest."""
        self._model_name = model_name
        self._max_runs = max_runs
        self._memo: OrderedDict[tuple[BlockHash, bytes], _Run] = OrderedDict()
        self._roots: OrderedDict[tuple[str, str], BlockHash] = OrderedDict()

    async def of(self, prompt_ids: tuple[int, ...], cache_salt: str, block_size: int) -> tuple[int, ...]:
        """Return the keys of the first full blocks of a prompt, at most `MAX_BLOCKS`. Long prompts let the loop do other
        things in between."""
        blocks = min(len(prompt_ids) // block_size, MAX_BLOCKS)
        parent = self._root(cache_salt)
        keys: list[int] = []
        step = RUN_BLOCKS * AWAY_RUNS
        for first in range(0, blocks, step):
            if first:
                await asyncio.sleep(0)
            count = min(step, blocks - first)
            parent = self._extend(keys, parent, prompt_ids[first * block_size : (first + count) * block_size], block_size)
        return tuple(keys)

    def _extend(self, keys: list[int], parent: BlockHash, ids: tuple[int, ...], block_size: int) -> BlockHash:
        packed = struct.pack(f"<{len(ids)}I", *ids)
        block_bytes = 4 * block_size
        memo = self._memo
        for start in range(0, len(packed), RUN_BLOCKS * block_bytes):
            name = parent, packed[start : start + RUN_BLOCKS * block_bytes]
            run = memo.get(name)
            if run is None:
                run = memo[name] = _run(parent, name[1], block_bytes)
                if len(memo) > self._max_runs:
                    memo.popitem(last=False)
            else:
                memo.move_to_end(name)
            parent = run[0]
            keys += run[1]
        return parent

    def _root(self, cache_salt: str) -> BlockHash:
        name = self._model_name(), cache_salt
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = root_hash(chain_salt(name[0].encode(), cache_salt))
            if len(self._roots) > self._max_runs:
                self._roots.popitem(last=False)
        return root


def _run(parent: BlockHash, content: bytes, block_bytes: int) -> _Run:
    """Return the run of the blocks that follow `parent`, of which `content` has the tokens."""
    keys = []
    for start in range(0, len(content), block_bytes):
        parent = next_hash(parent, content[start : start + block_bytes])
        keys.append(key_of(parent))
    return parent, tuple(keys)


class Grammars:
    """The grammars of one router. `close` it."""

    def __init__(self, model: ServedModel) -> None:
        self._checker = None
        if model.directory is not None:
            self._checker = GrammarChecker(model.directory, model.card.vocab_size, model.card.eos_token_ids)

    async def check(self, constraint: Constraint) -> None:
        """Return if the constraint compiles. Raises `InvalidRequest` and `Overloaded`."""
        if self._checker is None:
            raise InvalidRequest("needs the tokenizer of a model", field=FIELD)
        await self._checker.check(constraint)

    async def close(self) -> None:
        """End the process of the checker."""
        if self._checker is not None:
            await self._checker.close()
