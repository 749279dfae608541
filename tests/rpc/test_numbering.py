"""Numbers of a link: a loss is seen at the next message, a repeat is ignored."""

import pytest

from pdserve.core.errors import ReplicaLost
from pdserve.rpc.bundle import Incoming, Outgoing


def test_numbers_begin_at_one_and_are_new_once():
    outgoing, incoming = Outgoing(), Incoming()
    numbers = [outgoing.next() for _ in range(3)]
    assert numbers == [1, 2, 3]
    assert [incoming.is_new(n) for n in (1, 1, 2, 1, 2, 3)] == [True, False, True, False, False, True]


def test_a_gap_is_a_lost_message_also_before_the_first():
    with pytest.raises(ReplicaLost, match=r"message 1 .* lost"):
        Incoming().is_new(2)
    incoming = Incoming()
    incoming.is_new(1)
    with pytest.raises(ReplicaLost, match=r"message 2 .* lost"):
        incoming.is_new(3)


def test_a_peer_that_does_not_number_is_heard():
    incoming = Incoming()
    assert incoming.is_new(0)
    assert incoming.is_new(0)
