"""Stages of a request that the stories of recovery reach, and how such a story ends."""

from __future__ import annotations

from pdserve.core.worker import Role
from tests.router.core_peers import Outcome, Peer, Stage


def pools(prefill: int = 2, decode: int = 2, **config: object) -> Stage:
    stage = Stage(**config)
    for n in range(prefill):
        stage.join(f"prefill-{n}", Role.PREFILL)
    for n in range(decode):
        stage.join(f"decode-{n}", Role.DECODE)
    return stage


def sent(stage: Stage, kind: type) -> list:
    return [e for e in stage.effects if isinstance(e, kind)]


def busy(stage: Stage, role: Role) -> Peer:
    """The worker of this role that holds the only request."""
    (peer,) = [p for p in stage.peers.values() if p.hello.role is role and p.jobs]
    return peer


def binding(stage: Stage) -> None:
    """Bind was sent and not answered."""


def prefill_sent(stage: Stage) -> None:
    stage.deliver(busy(stage, Role.DECODE))


def prefilling(stage: Stage) -> None:
    """Attached; no token yet."""
    prefill_sent(stage)
    stage.deliver(busy(stage, Role.PREFILL))


def in_handoff(stage: Stage) -> None:
    """Token 0 is out, KV is not committed."""
    prefilling(stage)
    prefill = busy(stage, Role.PREFILL)
    prefill.progress()
    stage.deliver(prefill)


def decoding(stage: Stage) -> None:
    """Three tokens are out."""
    in_handoff(stage)
    decode = busy(stage, Role.DECODE)
    for _ in range(3):
        decode.progress()
    stage.deliver(decode, 3)


def committed_early(stage: Stage) -> None:
    """Decode has committed and sent tokens; token 0 has not been heard."""
    prefilling(stage)
    decode = busy(stage, Role.DECODE)
    for _ in range(3):
        decode.progress()
    stage.deliver(decode, 3)


def finish(stage: Stage, outcome: Outcome, *, attempts: int, binds: int, tokens: int = 6) -> None:
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.emitted == list(range(tokens))
    assert outcome.report is not None
    assert (outcome.report.attempts, outcome.report.binds) == (attempts, binds)
    stage.assert_empty()
