"""Workers that die under requests with a constraint: replays go on inside the text, alone and as choices of one prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import jsonschema
import pytest
from fault_service import Phase, Service, assert_all_equal, load_in, messages, two_pairs

from pdserve.rpc.v1 import common_pb2, inference_pb2
from testkit.client import Answer, generate_all
from testkit.faults import Fault, strike

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

COUNT = 18
CHOICES = 3
PATTERN = "([a-z]{5}-[0-9]{3} ){80}"
SCHEMA = {
    "type": "object",
    "properties": {
        "identification": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 9},
        "kind": {"enum": ["first", "second"]},
    },
    "required": ["identification", "kind"],
    "additionalProperties": False,
}


def constrained() -> list[inference_pb2.GenerateRequest]:
    """A third has a regular expression, a third a schema, and a third a schema and several choices."""
    asked = messages(COUNT, seed=5)
    for i, message in enumerate(asked):
        outputs = common_pb2.StructuredOutputs(regex=PATTERN) if i % 3 == 0 else common_pb2.StructuredOutputs()
        if i % 3:
            outputs.json = json.dumps(SCHEMA)
        message.structured_outputs.CopyFrom(outputs)
        message.n = CHOICES if i % 3 == 2 else 1
    return asked


def others_of(answers: Sequence[Answer]) -> list[list[list[int]]]:
    """The tokens of the choices after the first one, of each answer."""
    return [[answer.others[i].ids for i in sorted(answer.others)] for answer in answers]


class Constrained(Service):
    """A service whose load has constraints."""

    def __init__(self, asked: Sequence[inference_pb2.GenerateRequest], service: Service) -> None:
        self.cluster, self.load, self.expected = service.cluster, service.load, service.expected
        undisturbed = generate_all(self.cluster.grpc, asked)
        assert [answer.ids for answer in undisturbed] == self.expected
        self.others = others_of(undisturbed)
        assert [len(one) for one in self.others] == [CHOICES - 1 if i % 3 == 2 else 0 for i in range(COUNT)]
        for i, answer in enumerate(undisturbed):
            for one in (answer, *answer.others.values()):
                assert_in_its_language(one, is_pattern=i % 3 == 0)


def assert_in_its_language(answer: Answer, is_pattern: bool) -> None:
    """An output that ended is whole, and one that was cut is a beginning."""
    if is_pattern:
        assert re.fullmatch("([a-z]{5}-[0-9]{3} )*[a-z]{0,5}(-[0-9]{0,3})?", answer.text)
    elif answer.finish_reason == common_pb2.FINISH_REASON_STOP:
        jsonschema.validate(json.loads(answer.text), SCHEMA)
    else:
        assert answer.text.lstrip().startswith("{")


@pytest.fixture(scope="module")
def shared() -> Iterator[Constrained]:
    with two_pairs() as cluster:
        asked = constrained()
        yield Constrained(asked, Service(cluster, asked))


@pytest.mark.parametrize(
    ("victim", "phase"),
    [("prefill-0", Phase.PREFILL), ("decode-0", Phase.HANDOFF), ("decode-0", Phase.DECODING)],  # whoever has the constraint
    ids=lambda one: one.value if isinstance(one, Phase) else one,
)
def test_no_client_with_a_constraint_sees_the_loss_of_a_worker(service: Constrained, victim: str, phase: Phase) -> None:
    """(1) Constrained requests, some with several choices; (2) at their phase a worker dies; (3) every choice ends as
    undisturbed; (4) it heals."""
    cluster = service.cluster
    with load_in(phase, cluster, service.load) as (load, held):
        strike(Fault.KILL, cluster.processes[victim])
        for name in held:
            if name != victim:
                cluster.processes[name].resume()
        outcomes = load.finish()
        assert_all_equal(outcomes, service.expected)
        assert others_of([outcome.answer for outcome in outcomes]) == service.others
    service.assert_healed()
