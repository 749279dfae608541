"""The text side of running requests: engine tokens become the rows of a StepBatch.

Runs on the loop thread, off the engine's. One `OutputStream` folds one request's token ids into text; a stop string
found here ends a request that the engine still runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.core.ids import Handle
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.rpc.codec import finish_to_wire, logprobs_to_wire
from pdserve.rpc.v1 import link_pb2
from pdserve.text.output import OutputText
from pdserve.text.tokenizer import Tokenizer


class OutputStream:
    """One request's output, as this worker sees it. Every token is pushed, in order, after those of `earlier`."""

    def __init__(self, handle: Handle, tokenizer: Tokenizer, params: SamplingParams, earlier: Sequence[int] = ()) -> None:
        """`earlier`: output ids that the client has already. Text depends on nothing but all ids, so it goes on from there."""
        self._handle = handle
        self._text = OutputText(tokenizer, stop=params.stop, min_tokens=params.min_tokens)
        self._next_index = 0
        for token_id in earlier:
            self.skip(token_id)

    def skip(self, token_id: int) -> None:
        """The next token, whose row the client has from elsewhere."""
        self._text.push(token_id)
        self._next_index += 1

    def push(
        self, index: int, token_id: int, finish_reason: FinishReason | None, logprobs: TokenLogprobs | None = None
    ) -> link_pb2.StepRow:
        """The row of this token. Its finish reason is STOP also when a stop string was completed by it."""
        assert index == self._next_index, f"token {index} after {self._next_index - 1}"
        self._next_index += 1
        step = self._text.push(token_id)
        text = step.text
        if step.stopped:
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            text += self._text.flush()
        return link_pb2.StepRow(
            handle=self._handle,
            index=index,
            ids=(token_id,),
            text=text.encode(),
            finish_reason=finish_to_wire(finish_reason),
            logprobs=logprobs_to_wire((logprobs,)) if logprobs is not None else None,
        )
