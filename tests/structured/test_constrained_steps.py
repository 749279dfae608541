"""Constraints in an engine: scheduler, model, masks and sampler together, on every way of computing on a CPU."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import jsonschema
import pytest
import torch
from vocabularies import tokenizer_of, vocabulary_of

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.step_plan import NO_TOKEN, SampleSpec
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.engine.models import native_decoder as native
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sampler import sample
from pdserve.engine.schedule.collect import OutputToken, StepOutcome
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind
from pdserve.structured.compiler import Compiler
from testkit.random_schemas import UNSUPPORTED, random_schema, random_schema_of_any_kind

K = ConstraintKind
BLOCK = 16
COMPILED = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")
WAYS = [
    pytest.param(("float32", False), id="torch", marks=pytest.mark.slow),
    pytest.param(("bfloat16", True), id="compiled", marks=COMPILED),
]
Request = tuple[tuple[int, ...], SamplingParams, Constraint | None]


@pytest.fixture(scope="module", params=WAYS)
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dtype, compiled = request.param
    directory = resolve("tiny")
    config = EngineConfig(kv_cache_memory=64 * MIB, dtype=dtype, batch_invariant=True)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "supports", lambda *_: False)
        yield ModelRunner.load(directory, ModelCard.load(directory), config)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def grammars() -> Compiler:
    return Compiler(vocabulary_of("tiny"))


class Served:
    """The outputs of requests that one scheduler served together."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[OutputToken]] = [[] for _ in range(count)]
        self.failures: dict[SeqId, str] = {}
        self.preempted = 0
        self.drafted = 0

    def take(self, outcome: StepOutcome) -> None:
        self.preempted += len(outcome.preempted)
        self.failures |= dict(outcome.grammars_failed)
        assert not outcome.failed
        for token in outcome.tokens:
            self.drafted += token.speculation is not None and token.speculation.num_accepted_tokens
            self.tokens[token.seq_id].append(token._replace(speculation=None))

    def ids(self, i: int) -> list[int]:
        return [token.token_id for token in self.tokens[i]]

    def text(self, i: int) -> str:
        return tokenizer_of("tiny").decode(self.ids(i))

    def stopped(self, i: int) -> bool:
        return bool(self.tokens[i]) and self.tokens[i][-1].finish_reason is FinishReason.STOP


def serve(
    runner: ModelRunner, grammars: Compiler, requests: Sequence[Request], *, blocks: int = 512, budget: int = 96,
    resumed: Sequence[tuple[int, ...]] = (), kind: SequenceKind = SequenceKind.LOCAL,
    guess: Callable[[int, int], tuple[int, ...]] = lambda *_: (),
) -> Served:  # fmt: skip
    pool = BlockPools(blocks)
    limit = min(512, blocks * BLOCK)
    scheduler = Scheduler(
        pool, BLOCK, max_num_seqs=24, max_num_batched_tokens=budget, max_model_len=limit,
        eos_token_ids=vocabulary_of("tiny").eos_token_ids,
    )  # fmt: skip
    served = Served(len(requests))
    for i, (prompt, params, constraint) in enumerate(requests):
        grammar = grammars.start(constraint) if constraint is not None else None
        output = resumed[i] if resumed else ()
        scheduler.add(SeqId(i), RequestSpec(prompt, params), kind=kind, resumed=output, grammar=grammar)
    while scheduler.has_work:
        drafts = {SeqId(i): guess(i, len(tokens)) for i, tokens in enumerate(served.tokens)}
        served.take(scheduler.collect(runner.execute(scheduler.plan(drafts))))
    scheduler.check_invariants()
    return served


def mixed_requests(count: int, seed: int) -> tuple[list[Request], list[dict[str, object]]]:
    """Random schemas, greedy and drawn, some with penalties or log-probabilities."""
    rng = random.Random(seed)
    requests: list[Request] = []
    schemas: list[dict[str, object]] = []
    for i in range(count):
        schemas.append(random_schema(rng))
        more: dict[str, object] = [
            {},
            {"logprobs": 2},
            {"repetition_penalty": 1.3, "top_p": 0.9},
            {"logit_bias": ((65, 5.0),)},
        ][i % 4]
        params = SamplingParams(max_tokens=200, temperature=(i % 3) * 0.7, seed=i, **more)  # type: ignore[arg-type]
        prompt = tuple(rng.randrange(3, 256) for _ in range(rng.choice([1, 15, 16, 40])))
        requests.append((prompt, params, Constraint(K.JSON_SCHEMA, json.dumps(schemas[-1]))))
    return requests, schemas


def test_an_output_that_stops_is_valid_whatever_the_schema(runner, grammars):
    requests, schemas = mixed_requests(200, seed=11)
    served = serve(runner, grammars, requests, blocks=2048)
    stopped = [i for i in range(len(requests)) if served.stopped(i)]
    for i in stopped:
        jsonschema.validate(json.loads(served.text(i)), schemas[i])
    assert len(stopped) > len(requests) // 2
    assert not served.failures


@pytest.mark.slow
def test_a_thousand_schemas_are_followed_or_refused_by_name(runner, grammars, record_property):
    """Each is refused, and names what is not enforced; or it ends and is valid; or it is cut at `max_tokens`, and every token
    so far is one that the grammar of a new state allows. The three are counted apart."""
    rng = random.Random(1000)
    followed: list[tuple[Request, dict[str, object]]] = []
    refused: Counter[str] = Counter()
    for i in range(1000):
        schema, unsupported = random_schema_of_any_kind(rng)
        constraint = Constraint(K.JSON_SCHEMA, json.dumps(schema))
        if unsupported:
            with pytest.raises(InvalidRequest, match=re.escape(unsupported)):
                grammars.start(constraint)
            refused[unsupported] += 1
            continue
        params = SamplingParams(max_tokens=200, temperature=(i % 3) * 0.7, seed=i)
        followed.append((((rng.randrange(3, 256),) * rng.choice([1, 17, 40]), params, constraint), schema))
    served = serve(runner, grammars, [request for request, _ in followed], blocks=2048)
    assert not served.failures
    cut = 0
    for i, ((_, _, constraint), schema) in enumerate(followed):
        if served.stopped(i):
            jsonschema.validate(json.loads(served.text(i)), schema)
            continue
        assert served.tokens[i][-1].finish_reason is FinishReason.LENGTH
        assert len(served.tokens[i]) == 200
        state = grammars.start(constraint)
        state.catch_up(served.ids(i), 0)
        assert state.failure is None
        cut += 1
    counts = {"valid": len(followed) - cut, "cut": cut, "refused": dict(refused)}
    record_property("schemas", counts)
    print(counts)
    assert len(followed) + refused.total() == 1000
    assert cut < len(followed) // 4, counts
    assert len(refused) == len(UNSUPPORTED), counts


def test_constraints_of_one_sequence_change_no_other_one(runner, grammars):
    """(1) Sequences with and without constraints together, (2) each alone, (3) in a pool so small that some are preempted."""
    requests, _ = mixed_requests(8, seed=3)
    free: list[Request] = [(prompt, params, None) for prompt, params, _ in requests[:4]]
    mixed = [*requests, *free]
    together = serve(runner, grammars, mixed)
    alone = [serve(runner, grammars, [request]).tokens[0] for request in mixed]
    assert [[one._replace(seq_id=SeqId(0)) for one in tokens] for tokens in together.tokens] == alone
    squeezed = serve(runner, grammars, mixed, blocks=34, budget=24)
    assert squeezed.preempted > 0
    assert [squeezed.ids(i) for i in range(len(mixed))] == [together.ids(i) for i in range(len(mixed))]


@pytest.mark.parametrize(("wrong", "most"), [(0.0, 9), (0.3, 4), (1.0, 3)])
def test_drafts_change_no_constrained_output(runner, grammars, wrong, most):
    """Guesses of the true output, a share of which is replaced by any id."""
    requests, _ = mixed_requests(12, seed=5)
    plain = serve(runner, grammars, requests)
    rng = random.Random(2)

    def guess(i: int, known: int) -> tuple[int, ...]:
        right = plain.ids(i)[known : known + most]
        return tuple(rng.randrange(256) if rng.random() < wrong else token_id for token_id in right)

    drafted = serve(runner, grammars, requests, guess=guess, budget=128)
    assert drafted.tokens == plain.tokens
    assert drafted.failures == plain.failures
    assert wrong == 1.0 or drafted.drafted > 100


def test_a_replay_goes_on_as_if_nothing_had_happened(runner, grammars):
    """A second worker gets the output so far and nothing else. Its compiler has never seen the grammar."""
    requests, _ = mixed_requests(10, seed=7)
    whole = serve(runner, grammars, requests)
    rng = random.Random(1)
    cut = [tuple(whole.ids(i)[: rng.randrange(len(whole.ids(i)))]) for i in range(len(requests))]
    again = serve(runner, Compiler(vocabulary_of("tiny")), requests, resumed=cut)
    assert [[*known, *again.ids(i)] for i, known in enumerate(cut)] == [whole.ids(i) for i in range(len(requests))]
    assert [again.stopped(i) for i in range(len(requests))] == [whole.stopped(i) for i in range(len(requests))]


def test_the_first_token_of_a_lent_sequence_is_that_of_a_local_one(runner, grammars):
    requests, _ = mixed_requests(8, seed=5)
    local = serve(runner, grammars, requests)
    lent = serve(runner, grammars, requests, kind=SequenceKind.LENT)
    assert [lent.tokens[i] for i in range(8)] == [local.tokens[i][:1] for i in range(8)]


def test_an_output_stops_where_its_grammar_ends(runner, grammars):
    """It stops without an end-of-sequence token, and also where that token is ignored."""
    choices = Constraint(K.CHOICE, choices=("north", "south"))
    pattern = Constraint(K.REGEX, "[0-9]{4}-[0-9]{2}")
    params = [SamplingParams(max_tokens=64, temperature=1.0, seed=i, ignore_eos=i % 2 == 1) for i in range(6)]
    served = serve(runner, grammars, [((7, 8, 9), one, (choices, pattern)[i % 2]) for i, one in enumerate(params)])
    for i in range(6):
        assert served.stopped(i)
        assert served.text(i) in choices.choices or re.fullmatch("[0-9]{4}-[0-9]{2}", served.text(i))
    cut = serve(runner, grammars, [((7, 8), SamplingParams(max_tokens=3), pattern)])
    assert cut.tokens[0][-1].finish_reason is FinishReason.LENGTH


def test_log_probabilities_are_those_without_the_mask(runner, grammars):
    asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
    prompt = (5, 6, 7)
    free = serve(runner, grammars, [(prompt, asked, None)]).tokens[0][0]
    bound = serve(runner, grammars, [(prompt, asked, Constraint(K.REGEX, "[0-9]+x"))]).tokens[0][0]
    assert free.logprobs is not None
    assert bound.logprobs is not None
    assert bound.logprobs.top == free.logprobs.top
    assert bound.token_id != free.token_id
    assert bound.logprobs.logprob < free.logprobs.logprob


class Broken:
    """A grammar that fails when it is asked for its third mask."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.ended = False
        self.known = 0

    def catch_up(self, tokens: Sequence[int], prompt_len: int) -> None:
        self.known = len(tokens) - prompt_len

    def mask(self) -> bytes | None:
        if self.known >= 2:
            self.failure = "too much work"
        return None if self.failure else b"\xff" * 64


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_grammar_that_fails_ends_its_own_sequence_with_its_reason(runner, logprobs):
    pool = BlockPools(16)
    scheduler = Scheduler(pool, BLOCK, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, eos_token_ids=())
    for seq_id in (1, 2):
        spec = RequestSpec((3,) * 20, SamplingParams(max_tokens=5, temperature=0.0, logprobs=logprobs))
        scheduler.add(SeqId(seq_id), spec, kind=SequenceKind.LOCAL, grammar=Broken() if seq_id == 1 else None)
    outcomes = []
    while scheduler.has_work:
        outcomes.append(scheduler.collect(runner.execute(scheduler.plan())))
    assert [one.grammars_failed for one in outcomes if one.grammars_failed] == [((SeqId(1), "too much work"),)]
    assert not any(one.failed for one in outcomes)
    counts = [sum(token.seq_id == seq_id for one in outcomes for token in one.tokens) for seq_id in (1, 2)]
    assert counts == [2, 5]
    scheduler.check_invariants()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_only_allowed_tokens_are_drawn_and_the_rest_as_before(temperature):
    """An independent definition: the draw from the logits whose forbidden ids are minus infinity."""

    class Fixed(Broken):
        def __init__(self, mask: bytes) -> None:
            super().__init__()
            self.bits = mask

        def mask(self) -> bytes | None:
            return self.bits

    rng = random.Random(2)
    logits = torch.randn(20, 77, generator=torch.Generator().manual_seed(1)) * 4
    masks = [bytes(rng.randrange(256) for _ in range(12)) for _ in range(20)]
    params = [SamplingParams(temperature=temperature, seed=i, top_k=9, top_p=0.9) for i in range(20)]
    forbidden = logits.clone()
    for row, mask in zip(forbidden, masks, strict=True):
        for token_id in range(77):
            if not mask[token_id // 8] >> token_id % 8 & 1:
                row[token_id] = -torch.inf
    specs = [SampleSpec(one, 3, (), None, Fixed(mask)) for one, mask in zip(params, masks, strict=True)]
    assert sample(logits.clone(), specs) == sample(forbidden, [SampleSpec(one, 3) for one in params])
    nothing = SampleSpec(params[0], 0, (), None, Fixed(b"\x00" * 12))
    assert sample(logits[:1].clone(), [nothing]) == [(NO_TOKEN, None)]
