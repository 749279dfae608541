"""Every error says what the caller should do, and what it carries survives in the message."""

import pytest

from pdserve.core import errors
from pdserve.core.errors import ErrorCode, IllegalTransition, InvalidRequest, Overloaded, PdserveError


def subclasses(cls: type) -> list[type]:
    return [each for child in cls.__subclasses__() for each in (child, *subclasses(child))]


def test_every_code_has_a_class_that_raises_it():
    ours = [cls for cls in subclasses(PdserveError) if cls.__module__ == errors.__name__]
    assert {cls.code for cls in ours} == set(ErrorCode)


def test_every_class_says_what_to_do():
    for cls in subclasses(PdserveError):
        assert cls.__doc__, cls.__name__


@pytest.mark.parametrize(
    ("message", "field", "shown"),
    [("must be positive", "top_k", "top_k: must be positive"), ("top_k must be positive", "top_k", "top_k must be positive")],
)
def test_an_invalid_request_names_its_field_once(message, field, shown):
    error = InvalidRequest(message, field=field)
    assert (str(error), error.message, error.field) == (shown, shown, field)


def test_an_overload_says_when_to_come_back():
    assert Overloaded("queue is full", retry_after_s=2.5).retry_after_s == 2.5


def test_an_illegal_transition_tells_its_story():
    error = IllegalTransition("lease l1", "RELEASED", "Renew", ("Grant", "Release"))
    assert error.code is ErrorCode.INTERNAL_BUG
    assert str(error) == "lease l1: Renew is illegal in RELEASED; history: Grant -> Release"
    assert str(IllegalTransition("m", "A", "E", ())).endswith("history: (empty)")
