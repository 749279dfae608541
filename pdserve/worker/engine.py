"""The engine of a worker, as the worker's process uses it: what it serves, how it starts and ends, and how its KV moves.

The roles give it `Command`s and get `StepEvents` (see `messages`), whoever computes. `OwnEngine` computes in a thread of this
process. `VllmEngine` gives the work to a server of vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvtransfer.api import KvRegion
from kvtransfer.staging import Staging
from kvtransfer.thread import TransferThread
from pdserve.checkpoint.card import ModelCard
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.kv_layout import KvSpec
from pdserve.core.worker import OWN_ENGINE, EngineTraits
from pdserve.rpc.v1 import common_pb2
from pdserve.structured.compilations import StartGrammar
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.engine_thread import EngineView
from pdserve.worker.start_report import MemoryReport


class WorkerEngine(ABC):
    """One engine. `load` comes first and sets all that is declared here; `open`, `take_role` and `close` run on the worker's
    loop; `stop` comes last, and is needed in any case."""

    transport: str
    """The transport over which KV moves, by its name in the settings. Both workers of a pair have the same."""
    traits: EngineTraits = OWN_ENGINE
    """What differs from pdserve's own engine."""
    card: ModelCard
    tokenizer: Tokenizer
    kv_spec: KvSpec
    regions: tuple[KvRegion, ...]
    """The KV pool: one region for each KV group."""
    model_digest: str
    """The name of the model with every byte of its weights. Empty: they do not come from files."""
    numerics: str = ""
    """The name of the bits that the engine computes. Empty: a token depends on the batch in which it is computed."""
    max_model_len: int
    start_grammar: StartGrammar | None = None
    """Compiles the constraint of a request. None: the engine takes constraints as they are."""
    memory: MemoryReport = MemoryReport()

    @abstractmethod
    def load(self) -> None:
        """Load the model. Blocks until the engine can compute. Raises what went wrong."""

    @abstractmethod
    async def open(self) -> EngineView:
        """Begin to deliver events to the view that is returned."""

    @abstractmethod
    async def take_role(self, role: common_pb2.Role) -> None:
        """Prepare for a life in this role, before anything of it is made. Nothing of another life is left. What is declared
        above may change."""

    @abstractmethod
    async def close(self) -> None:
        """Deliver no events any more. Idempotent."""

    @abstractmethod
    def stop(self, timeout_s: float) -> None:
        """End the engine and release what it holds. Any thread may call it, after `load` has returned or raised. Idempotent."""

    @abstractmethod
    def describe(self) -> str:
        """Describe in words how steps are computed."""

    @abstractmethod
    def make_transfer(self, worker_id: WorkerId, incarnation: Incarnation) -> TransferThread:
        """Make the transfer thread of one life."""

    def make_staging(self, transfer: TransferThread) -> Staging | None:
        """Make the staging of one life, which reads KV of peers that store it in another dtype. None: such peers are
        refused."""
        return None
