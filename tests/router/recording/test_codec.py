"""Every event and every effect of the core can be recorded and read back; what must not be told is not in the file."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.blocks import BlockCounts
from pdserve.core.error_table import CLASSES
from pdserve.core.errors import IllegalTransition, InvalidRequest, Overloaded, PdserveError, ReplicaLost
from pdserve.core.ids import Handle, Incarnation, LeaseId, RequestId, WorkerId
from pdserve.core.report import Report
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, Placement, SamplingParams, TokenLogprobs
from pdserve.core.speculation import DraftCounts
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.core.worker import WorkerLoad
from pdserve.rpc.v1 import common_pb2, link_pb2
from router.api.answer import Delta
from router.core import events as ev
from router.recording.codec import EFFECTS, EVENTS, RecordedRow, effect_from_plain, event_from_plain, to_plain
from router.recording.redact import Redaction, expand

REALS = st.floats(allow_nan=False)
COUNTS = st.integers(0, (1 << 64) - 1)
TEXTS = st.text(max_size=8)
IDS = st.lists(st.integers(0, 1 << 20), max_size=5).map(tuple)
STOPS = st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 99),
    temperature=st.sampled_from([0.0, 0.5, 2.0]),
    seed=COUNTS,
    stop=STOPS,
    logit_bias=st.sampled_from([(), ((1, 2.5), (7, -3.0))]),
    logprobs=st.none() | st.integers(0, 20),
)
CONSTRAINTS = [
    Constraint(ConstraintKind.JSON_OBJECT), Constraint(ConstraintKind.REGEX, "a+"),
    Constraint(ConstraintKind.CHOICE, choices=("a", "b")),
]  # fmt: skip
ERRORS = st.sampled_from(sorted(CLASSES.values(), key=lambda cls: cls.code.value)).flatmap(
    lambda cls: st.builds(
        cls,
        TEXTS,
        **({"field": st.just("field")} if issubclass(cls, InvalidRequest) else {}),
        **({"retry_after_s": REALS} if issubclass(cls, Overloaded) else {}),
    )
)
DRAFTS = st.builds(DraftCounts, COUNTS, COUNTS, COUNTS, st.lists(COUNTS, max_size=3).map(tuple))
ROWS = st.builds(RecordedRow, handle=COUNTS, index=st.integers(0, 99), ids=IDS, text=TEXTS.map(str.encode), speculation=DRAFTS)


def strategy(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Draw a value of a dataclass or struct of the core from the types of its fields."""
    if cls is ev.StepRows:
        return st.builds(ev.StepRows, link=COUNTS, rows=st.lists(ROWS, max_size=3).map(tuple))
    hints = typing.get_type_hints(cls)
    names = cls.__struct_fields__ if is_struct(cls) else [field.name for field in dataclasses.fields(cls) if field.init]
    return st.builds(cls, **{name: of(hints[name]) for name in names})


def is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def of(hint: Any) -> st.SearchStrategy[Any]:
    hint = getattr(hint, "__supertype__", hint)
    if hint is PdserveError:
        return ERRORS
    if hint is Exception:
        return ERRORS | st.builds(KeyError, TEXTS)
    if hint is SamplingParams:
        return PARAMS
    if hint is Constraint:
        return st.sampled_from(CONSTRAINTS)
    if hint is TokenLogprobs:
        return st.builds(TokenLogprobs, REALS, st.sampled_from([(), ((1, -0.5), (2, -1.5))]))
    if hasattr(hint, "_fields"):
        return st.builds(hint)
    if dataclasses.is_dataclass(hint) or is_struct(hint):
        return strategy(typing.cast(type[Any], hint))
    if typing.get_origin(hint) is tuple:
        return st.lists(of(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if args := typing.get_args(hint):
        return st.one_of([of(arg) for arg in args])
    simple = {int: COUNTS, float: REALS, str: TEXTS, bytes: st.binary(max_size=9), bool: st.booleans(), type(None): st.none()}
    return simple[hint] if hint in simple else st.sampled_from(hint)


def through_json(plain: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(plain))


@pytest.mark.parametrize("name", [*EVENTS, *EFFECTS])
def test_every_event_and_effect_comes_back_as_it_was(name: str) -> None:
    cls, back = (EVENTS[name], event_from_plain) if name in EVENTS else (EFFECTS[name], effect_from_plain)

    @given(strategy(cls))
    def comes_back(value: Any) -> None:
        plain = through_json(to_plain(value))
        again = back(plain)
        assert type(again) is cls
        assert through_json(to_plain(again)) == plain
        if not hasattr(value, "error") and not hasattr(value, "bug"):  # exceptions compare by identity
            assert again == value
        elif hasattr(value, "error"):
            assert (type(again.error), again.error.message) == (type(value.error), value.error.message)

    comes_back()


def test_the_tables_hold_the_whole_unions() -> None:
    assert set(EVENTS.values()) == set(typing.get_args(ev.Event))
    assert set(EFFECTS.values()) == set(typing.get_args(ev.Effect))


def test_numbers_that_json_lacks_come_back() -> None:
    load = WorkerLoad(BlockCounts(1, 1, 0, 0, 0), loop_lag_ms=math.nan, engine_stalled_s=math.inf)
    again = event_from_plain(through_json(to_plain(ev.HeartbeatSeen(ev.LinkId(1), load))))
    assert isinstance(again, ev.HeartbeatSeen)
    assert math.isnan(again.load.loop_lag_ms)
    assert again.load.engine_stalled_s == math.inf


def test_an_error_of_a_class_without_a_code_of_its_own_keeps_code_and_message() -> None:
    bug = IllegalTransition("m", "A", "B", ())
    again = effect_from_plain(through_json(to_plain(ev.CloseLink(ev.LinkId(1), bug))))
    assert isinstance(again, ev.CloseLink)
    assert (again.error.code, again.error.message) == (bug.code, bug.message)


SECRET, TICKET = "a salt of a tenant", b"a ticket with addresses"
WORDS = "the words of the prompt"
SPEC = RequestSpec((101, 102, 103), SamplingParams(stop=(WORDS,)), cache_salt=SECRET)
WORK = ev.Work(Handle(1), RequestId("r"), SPEC, (104,))
TELLTALE: list[Any] = [
    ev.Submit(RequestId("r"), SPEC, 0.0, 1.0, session_id=SECRET),
    ev.PrefillStarted(ev.LinkId(1), Handle(1), LeaseId(Incarnation(1), 1), TICKET),
    ev.SendAttach(ev.LinkId(1), Handle(1), LeaseId(Incarnation(1), 1), TICKET),
    ev.SendBind(ev.LinkId(1), WORK, 1.0, local_prefill=False),
    ev.EmitDelta(RequestId("r"), Delta(0, (104,), WORDS, None, (TokenLogprobs(-0.25, ((105, -0.75),)),))),
    ev.StepRows(
        ev.LinkId(1),
        [
            link_pb2.StepRow(
                handle=1,
                ids=[104],
                text=WORDS.encode(),
                logprobs=common_pb2.Logprobs(chosen=[-0.25], top_ids=[105], top=[-0.75]),
            )
        ],
    ),
]


@pytest.mark.parametrize("value", TELLTALE, ids=lambda value: type(value).__name__)
def test_nothing_that_must_not_be_told_is_told(value: Any) -> None:
    """Also not in base64, as bytes are written."""
    told = msgspec.json.encode(Redaction(b"k" * 32, prompts=False).hide(to_plain(value))).decode()
    base64 = [msgspec.to_builtins(text) for text in (TICKET, WORDS.encode(), SECRET.encode())]
    for secret in ("101", "102", "104", "105", "0.25", WORDS, SECRET, TICKET.decode(), *base64):
        assert secret not in told
    with_prompts = msgspec.json.encode(Redaction(b"k" * 32, prompts=True).hide(to_plain(value))).decode()
    for secret in (SECRET, TICKET.decode(), base64[0]):
        assert secret not in with_prompts


@pytest.mark.parametrize("name", EVENTS)
def test_what_was_hidden_and_expanded_is_hidden_as_before(name: str) -> None:
    """A replay compares effects of placeholders with effects of the real thing."""

    @given(strategy(EVENTS[name]))
    def hides_alike(value: Any) -> None:
        hidden = through_json(Redaction(b"k" * 32, prompts=False).hide(to_plain(value)))
        again = Redaction(None, prompts=False)
        assert through_json(again.hide(to_plain(event_from_plain(expand(hidden))))) == hidden

    hides_alike()


def test_equal_secrets_stay_equal_and_keys_differ() -> None:
    digests = [Redaction(key * 32, prompts=False).hide(to_plain(WORK))["spec"]["cache_salt"] for key in (b"a", b"a", b"b")]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "plain",
    [{}, {"type": "Nothing"}, {"type": "Reserved"}, {"type": "Reserved", "link": "x", "handle": 1}, {"type": "StepRows"},
     {"type": "Submit", "request_id": 5}, {"type": "RequestFailed", "link": 1, "handle": 1, "error": {"code": "no such"}}],
)  # fmt: skip
def test_what_is_no_event_is_a_value_error(plain: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"none of|Reserved|StepRows|Submit|RequestFailed"):
        event_from_plain(plain)


def test_a_report_and_a_finish_reason_come_back() -> None:
    done = ev.EmitDone(RequestId("r"), Report(Placement.COLOCATED, "default", 1, 2, decode_worker=WorkerId("d")))
    assert effect_from_plain(through_json(to_plain(done))) == done
    delta = ev.EmitDelta(RequestId("r"), Delta(0, (1,), "x", FinishReason.STOP))
    assert effect_from_plain(through_json(to_plain(delta))) == delta
    failed = to_plain(ev.EmitFailed(RequestId("r"), ReplicaLost("gone"), done.report))
    assert failed["error"] == {"code": "replica_lost", "message": "gone"}
