"""The router's knowledge of the served model: its card, its tokenizer and the length of a request. It has no weights.

Settings bound the length of a request, and so do the KV pools of the workers. The size of a pool that was measured on a GPU is
known only from the worker itself, and pools may differ. A request must fit wherever it may be placed: in both roles, and in
each role on the worker that holds most.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.checkpoint.card import ModelCard, resolve_dtype
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig
from pdserve.core.kv_layout import KvSpec, fit_max_model_len
from pdserve.core.worker import Role
from pdserve.text.tokenizer import Tokenizer
from router.core.registry import Registry


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model that this router serves."""

    name: str  # the name that clients use
    card: ModelCard
    tokenizer: Tokenizer
    dtype: str
    kv_spec: KvSpec
    max_model_len: int  # prompt + output tokens of one request by the settings alone; see `router.service.model`
    directory: Path | None = None  # where the tokenizer is; None: a simulation, which has none on disk

    @classmethod
    def load(cls, engine: EngineConfig, chat_template: str | None = None) -> ServedModel:
        """Resolve and read the model. This blocks, for seconds when the model has to be converted. `chat_template` is a file
        with the template of chats. None: the model's own is taken. Raises `ConfigError`."""
        directory = resolve(engine.model, load_format=engine.load_format)
        foreign = engine.backend != "pdserve"
        card = ModelCard.load(directory, engine.model_family, load_format=engine.load_format, foreign=foreign)
        kv_spec = card.kv_layout(engine.block_size, engine.dtype, engine.kv_cache_dtype)
        # Groups with windows have pools of other sizes, which depend on each worker's settings: only the workers know them.
        windowed = any(group.window is not None for group in kv_spec.groups)
        kv_bytes = None if windowed else engine.known_kv_bytes
        pool_tokens = None if kv_bytes is None else kv_bytes // kv_spec.block_bytes * engine.block_size
        return cls(
            name=engine.served_model_name or card.name,
            card=card,
            tokenizer=Tokenizer.load(directory, None if chat_template is None else Path(chat_template)),
            dtype=resolve_dtype(engine.dtype),
            kv_spec=kv_spec,
            max_model_len=fit_max_model_len(engine.max_model_len, card.max_position, pool_tokens),
            directory=directory,
        )


OPEN_ENDED_SHARE: Final = 0.75
"""A request that names no length must get at least this share of the longest answer. Measured pools differ by a few percent. If
the full length were demanded, all such answers would go to the largest worker and none to the others."""
_ROLES: Final = tuple(Role)


class LengthLimit:
    """Knows the longest request that the linked workers take."""

    def __init__(self, model: ServedModel, registry: Registry) -> None:
        self._model = model
        self._registry = registry

    @property
    def max_model_len(self) -> int:
        """Prompt and output of one request together have at most this many tokens. The present workers can never serve a longer
        one."""
        limit = self._model.max_model_len
        for role in _ROLES:
            limit = min(limit, self._registry.longest.get(role, limit))
        return limit

    def open_ended_room(self, prompt_len: int, limit: int) -> int:
        """Return the output tokens of a request that names no `max_tokens`: as many as fit on every decode worker that is
        nearly as long as the longest one. `limit` is `max_model_len`. The result is at most that less the prompt, and below 1
        when the prompt alone is too long."""
        longest = limit - prompt_len
        lengths = (worker.hello.max_model_len for worker in self._registry.of_role(Role.DECODE) if not worker.draining)
        rooms = [min(length, limit) - prompt_len for length in lengths]
        return min([longest, *(room for room in rooms if room >= OPEN_ENDED_SHARE * longest)])
