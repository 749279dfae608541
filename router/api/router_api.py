"""The interfaces that the front ends call: `RouterApi` for clients, `AdminApi` for operators.

A front end knows nothing else of the router, so a new one needs no change below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.worker import Role
from pdserve.observe.snapshot import ClusterSnapshot, WorkerSnapshot
from router.api.answer import Generation
from router.api.explanation import Explanation
from router.api.identity import CancelTokens, ClientNames
from router.api.request import DetokenizeInput, GenerateInput, TokenizeInput


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model, as clients are told of it. GetModelInfoResponse in inference.proto explains each field."""

    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    block_size: int
    dtype: str
    kv_cache_dtype: str
    kv_bytes_per_token: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip archive, and its SHA-256 in hexadecimal."""

    data: bytes
    sha256: str


class RouterApi(Protocol):
    """The router as clients use it. Implemented by `router.service.service.RouterService`."""

    model_name: str
    max_body_bytes: int
    max_inflight_body_bytes: int
    max_inflight_answer_bytes: int
    max_deadline_s: float
    default_deadline_s: float
    """The deadline of a request that names none."""
    cancel_tokens: CancelTokens
    clients: ClientNames

    async def submit(self, request: GenerateInput) -> Generation:
        """Check, tokenise and queue a request. Raises `InvalidRequest`, `UnknownModel`, `Overloaded`, `DeadlineExceeded` or
        `Unavailable`."""

    def cancel(self, request_id: str) -> bool:
        """Cancel a running request. False: no such request is running."""

    async def tokenize(self, asked: TokenizeInput) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises `InvalidRequest`, `UnknownModel`, `Overloaded` or `Unavailable`."""

    async def detokenize(self, asked: DetokenizeInput) -> str:
        """Return the text of token ids. Raises `InvalidRequest`, `UnknownModel`, `Overloaded` or `Unavailable`."""

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it. The spelling of an id without a token is empty."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, and for a special token the bytes of its written form. They are empty
        for an id without a token."""

    def text_of(self, ids: Sequence[int], *, after: Sequence[int]) -> str:
        """Return the text of output tokens behind the prompt `after`, as the answer to a request has it."""

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt may have at most this many tokens, which leaves room for one token of output."""

    @property
    def streams(self) -> int:
        """The streams that the linked workers can run, and those that may wait: so many connections make sense."""

    def connection_refused(self) -> None:
        """Count a connection that was refused because all places served requests."""

    @property
    def ready(self) -> bool:
        """A request that arrives now would be served."""

    @property
    def not_ready_reason(self) -> str:
        """The reason why a request would not be served now. Empty: the router is ready."""

    async def next_ready(self, known: bool) -> bool:
        """Wait until `ready` differs from `known`, and return it. Only one task may wait."""

    def model_info(self) -> ModelInfo:
        """Return what clients are told of the model."""

    async def tokenizer_files(self) -> Archive:
        """Return the files of the model's tokenizer. Raises `Unavailable`, also when there are none."""

    def snapshot(self) -> ClusterSnapshot:
        """Return the state of the cluster at this moment."""

    def unenforced(self, request: GenerateInput) -> tuple[str, ...]:
        """Return the fields of a chat, as OpenAI names them, that are served and cannot be enforced."""

    def ignored_fields(self, endpoint: str, count: int) -> None:
        """Count fields of a body that no API documents, and that were left out. `endpoint` is one of a few fixed names."""

    async def metrics_page(self, *, per_worker: bool) -> bytes:
        """Return the metrics as Prometheus text, by pool and, on request, by worker. A page is up to a second old."""


class AdminApi(Protocol):
    """The router as operators use it. Implemented by `router.service.service.RouterService`."""

    def model_info(self) -> ModelInfo:
        """Return what clients are told of the model."""

    def snapshot(self) -> ClusterSnapshot:
        """Return the state of the cluster at this moment."""

    def worker(self, worker_id: str) -> WorkerSnapshot | None:
        """Return the state of one worker. None: no worker of this name is linked."""

    def drain(self, worker_id: str, *, force: bool = False) -> None:
        """Take a worker out of service: it gets nothing new, its work moves or ends, and it leaves. Repeatable.

        Raises `UnknownWorker`, and without `force` `CannotDrain` for the last worker of a role that serves."""

    def flip(self, worker_id: str, role: Role, incarnation: int) -> None:
        """Let a worker finish its work and come back in the other role. `incarnation` 0: the worker may have any.

        Raises `UnknownWorker`, `StaleOrder` for a worker of another incarnation, and `CannotFlip`."""

    def set_budget(self, worker_ids: Sequence[str], max_num_batched_tokens: int, max_num_seqs: int = 0) -> None:
        """Let each step of these workers have at most so many tokens, and at most so many of their sequences run, until they
        restart. 0: the limit stays as it is. All of them or, after an error, none. Raises `UnknownWorker`, and
        `InvalidRequest` for a number that one of them cannot have."""

    async def explain(self, name: str) -> Explanation:
        """Explain the newest request with this request id or correlation id. Raises `UnknownRequest` and `Overloaded`."""
