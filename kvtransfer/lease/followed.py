"""A lease as its reader follows it: the current state, and the calls on the lender."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.errors import KvCorrupt, KvRotted, LeaseGone, PdserveError, TransferFailed
from pdserve.core.ids import LeaseId, ReaderId
from pdserve.core.lease import CommitAnswer, FirstToken, LeaseView
from pdserve.core.reader import SendCommit


@dataclass(frozen=True, slots=True)
class Committed:
    """The lender's answer to a Commit. If it is CORRUPT, `rotted_blocks` blocks have changed in the lender's memory; None: the
    lender does not know how many."""

    answer: CommitAnswer
    rotted_blocks: int | None = None


class Lender(Protocol):
    """The calls that a followed lease makes on its lender."""

    async def commit(self, lease_id: LeaseId, proof: bytes, reader_id: ReaderId, commit: SendCommit) -> Committed:
        """Send Commit and return the answer. Raises `ReplicaLost` or `LeaseGone` when none came."""

    async def release(self, lease_id: LeaseId, proof: bytes) -> None:
        """Send Release. Never raises a `PdserveError`."""

    def unfollow(self, lease: FollowedLease) -> None:
        """Stop renewing the lease for this follower."""


class FollowedLease:
    """One follower of one lease, which is renewed in the background until `close`. The loop owns it. Each call on the lender
    carries `proof`, which comes from the ticket.

    The state only moves forward: views that arrive late or twice change nothing, and an error is final.
    """

    def __init__(self, lease_id: LeaseId, prompt_len: int, proof: bytes, lender: Lender) -> None:
        self.lease_id = lease_id
        self.proof = proof
        self.prompt_len = prompt_len
        self._lender = lender
        self._watermark = 0
        self._first_token: FirstToken | None = None
        self._error: PdserveError | None = None
        self._committing = False
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def watermark(self) -> int:
        """The KV of prompt tokens [0, watermark) can be read. The watermark never shrinks."""
        return self._watermark

    @property
    def first_token(self) -> FirstToken | None:
        """Token 0. None until the watermark covers the prompt."""
        return self._first_token

    @property
    def error(self) -> PdserveError | None:
        """The final error, after which no more state comes: `LeaseGone`, `ReplicaLost` when the lender fell silent, or another
        error when its answers cannot be used. None: no error yet."""
        return self._error

    @property
    def changed(self) -> asyncio.Future[None]:
        """A future that is done when watermark, token 0 or error change next. Take it before you look at them, and never
        cancel it."""
        return self._changed

    async def commit(self, reader_id: ReaderId, commit: SendCommit) -> None:
        """Commit the lease, and return when the KV that was read may be used. Every read of this bind must be over before.

        Raises `LeaseGone`, `KvCorrupt`, `KvRotted`, or `ReplicaLost` when the lender cannot be reached: the KV that was read
        must then be discarded.
        """
        self._committing = True  # from here on only the answer decides: a pushed GONE may come from our own Commit
        committed = await self._lender.commit(self.lease_id, self.proof, reader_id, commit)
        read = f"{commit.blocks - commit.first} blocks of lease {self.lease_id}"
        if committed.answer is CommitAnswer.GONE:
            raise LeaseGone(f"lease {self.lease_id} was gone when {commit.blocks} blocks had been read")
        if committed.answer is CommitAnswer.CORRUPT and committed.rotted_blocks == 0:
            raise KvCorrupt(f"{read} were not read as they were written, and the lender still holds what it wrote")
        if committed.answer is CommitAnswer.CORRUPT:
            where = f"{committed.rotted_blocks} have changed" if committed.rotted_blocks else "it is not known what has changed"
            raise KvRotted(f"{read} were not read as they were written: {where} in the lender's memory")

    async def release(self) -> None:
        """Give the lease up early, with one bounded try: a lease also expires by itself. Never raises a `PdserveError`."""
        await self._lender.release(self.lease_id, self.proof)

    def close(self) -> None:
        """Stop following and renewing. The lease itself stays as it is. Idempotent."""
        self._lender.unfollow(self)

    def apply(self, view: LeaseView) -> None:
        """Take a state of the lease that the lender has pushed or answered. Only the link to the lender calls this."""
        if self._error is not None or self._committing or view.lease_id != self.lease_id:
            return
        if not view.held:
            self.fail(LeaseGone(f"lease {self.lease_id} is gone"))
        elif view.watermark > self.prompt_len or (view.first_token is None) == (view.watermark == self.prompt_len):
            self.fail(
                TransferFailed(f"lease {self.lease_id}: watermark {view.watermark} of {self.prompt_len}, {view.first_token}")
            )
        else:
            self._advance(view)

    def fail(self, error: PdserveError) -> None:
        """Set the final error, unless one is set. Only the link to the lender calls this from outside."""
        if self._error is None:
            self._error = error
            self._notify()

    def _advance(self, view: LeaseView) -> None:
        if view.watermark <= self._watermark:
            return
        self._watermark = view.watermark
        self._first_token = view.first_token
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)
