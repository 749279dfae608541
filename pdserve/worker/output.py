"""The text of running requests: tokens of the engine become the rows of a StepBatch.

This runs on the loop thread, so that the engine thread does not wait for it. One `OutputStream` turns one request's token ids
into text. A stop string that is found here ends a request that the engine still runs.
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
    """The output of one request on this worker. Every token is pushed in order, after the tokens of `earlier`."""

    def __init__(
        self,
        handle: Handle,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        earlier: Sequence[int] = (),
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Start after `earlier`, the output ids that the client has already. The text depends only on the prompt and the output
        ids, so it goes on from there."""
        self._handle = handle
        self._stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))
        self._stops = params.stop
        self._text = OutputText.of(tokenizer, prompt_ids, params)
        self._next_index = 0
        for token_id in earlier:
            self.skip(token_id)

    def skip(self, token_id: int) -> None:
        """Take the next token without making a row, because the client gets that row from another worker."""
        self._text.push(token_id)
        self._next_index += 1

    def push(
        self,
        index: int,
        token_id: int,
        finish_reason: FinishReason | None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> link_pb2.StepRow:
        """Return the row of this token. Its finish reason is STOP also when the token completes a stop string.

        The engine's STOP is that of a stop token or, for any other token, that of a grammar which has ended.
        """
        assert index == self._next_index, f"token {index} after {self._next_index - 1}"
        self._next_index += 1
        if finish_reason is FinishReason.STOP and token_id in self._stop_ids:
            text = self._text.push_stop(token_id)
        else:
            text = self._text.push(token_id).text
            if finish_reason is not None:
                text += self._text.flush()
        if self._text.stopped:
            finish_reason = FinishReason.STOP
        row = link_pb2.StepRow(
            handle=self._handle,
            index=index,
            ids=(token_id,),
            text=text.encode(),
            finish_reason=finish_to_wire(finish_reason),
            logprobs=logprobs_to_wire((logprobs,)) if logprobs is not None else None,
            prompt_logprobs=logprobs_to_wire(prompt_logprobs),
        )
        if self._text.stopped:
            row.stop_string = 1 + self._stops.index(self._text.stop_string)
        return row
