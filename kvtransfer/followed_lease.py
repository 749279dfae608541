"""A lease as its reader follows it: level state, and what can be asked of the lender."""

from __future__ import annotations

import asyncio
from typing import Protocol

from pdserve.core.errors import LeaseGone, PdserveError, TransferFailed
from pdserve.core.ids import LeaseId, ReaderId
from pdserve.core.lease import FirstToken, LeaseView


class Lender(Protocol):
    """The calls that a followed lease makes on its peer."""

    async def commit(self, lease_id: LeaseId, reader_id: ReaderId, blocks: int) -> bool: ...

    async def release(self, lease_id: LeaseId) -> None: ...

    def unfollow(self, lease: FollowedLease) -> None: ...


class FollowedLease:
    """Renewed in the background until `close`. Loop-owned.

    The state only moves forward: views that arrive late or twice change nothing, and an error is final.
    """

    def __init__(self, lease_id: LeaseId, prompt_len: int, lender: Lender) -> None:
        self.lease_id = lease_id
        self.prompt_len = prompt_len
        self._lender = lender
        self._watermark = 0
        self._first_token: FirstToken | None = None
        self._error: PdserveError | None = None
        self._committing = False
        self._changed = asyncio.Event()

    @property
    def watermark(self) -> int:
        """Prompt tokens [0, watermark) can be read; never shrinks."""
        return self._watermark

    async def wait_watermark(self, tokens: int) -> int:
        """The watermark, once it is at least `tokens`. Raises like `first_token`."""
        while self._watermark < tokens or self._error is not None:
            await self._change()
        return self._watermark

    async def first_token(self) -> FirstToken:
        """Once the watermark covers the prompt.

        Raises `LeaseGone`, or `ReplicaLost` when the lender has not answered for longer than the time to live.
        """
        while self._first_token is None or self._error is not None:
            await self._change()
        return self._first_token

    async def commit(self, reader_id: ReaderId, blocks: int) -> None:
        """Returns when what was read may be used. Only after every read of this bind has resolved.

        Raises `LeaseGone`, or `ReplicaLost` when the lender cannot be reached: what was read must be discarded.
        """
        self._committing = True  # from here on the answer decides; a push that says GONE may only mirror our own commit
        if not await self._lender.commit(self.lease_id, reader_id, blocks):
            raise LeaseGone(f"lease {self.lease_id} was gone when {blocks} blocks had been read")

    async def release(self) -> None:
        """Give the lease up early. Best effort and bounded: it would expire by itself. Never raises a `PdserveError`."""
        await self._lender.release(self.lease_id)

    def close(self) -> None:
        """Stop following: no more renewals. Idempotent. The lease itself stays as it is."""
        self._lender.unfollow(self)

    def apply(self, view: LeaseView) -> None:
        """What the lender said, pushed or asked for. Called by the lender's link only."""
        if self._error is not None or self._committing:
            return
        if not view.held:
            self.fail(LeaseGone(f"lease {self.lease_id} is gone"))
        elif view.watermark > self.prompt_len or (view.first_token is not None and view.watermark != self.prompt_len):
            self.fail(
                TransferFailed(f"lease {self.lease_id}: watermark {view.watermark} of {self.prompt_len}, {view.first_token}")
            )
        else:
            self._advance(view)

    def fail(self, error: PdserveError) -> None:
        """Called by the lender's link only."""
        if self._error is None:
            self._error = error
            self._notify()

    def _advance(self, view: LeaseView) -> None:
        if view.watermark < self._watermark:
            return
        self._watermark = view.watermark
        self._first_token = self._first_token or view.first_token
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        await self._changed.wait()
