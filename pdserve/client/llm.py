"""Offline batches on a cluster of one's own, which starts and ends with the program."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, Unpack

from rich.console import Console
from rich.progress import Progress

from pdserve.client.asynchronous import AsyncClient
from pdserve.client.loop_thread import LoopThread
from pdserve.client.own_cluster import OwnCluster
from pdserve.client.params import Message, Options, Prompt, SamplingParams, Unset, chat_request, text_request
from pdserve.client.results import RequestOutput
from pdserve.client.retries import Retries
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.rpc.v1 import inference_pb2

MAX_CONCURRENT: Final = 128
"""The most requests that run at once. It is several times what the workers of one machine run, so no worker waits for this
program."""
CHECK_S: Final = 0.5
"""The time between two looks at whether the cluster still lives."""
MAX_TOKENS: Final = 16
"""The longest output of a batch whose parameters say nothing of it. vLLM's `SamplingParams` has the same default."""
Ask = Callable[[AsyncClient, int], Awaitable[RequestOutput]]


class LLM:
    """A model for batches, which a cluster of child processes serves. Close it, or use `with`. The cluster ends with the
    program, also when the program is killed.

    ```
    with LLM("default") as llm:
        for answer in llm.generate(["The sky is", "The sea is"], SamplingParams(temperature=0.8)):
            print(answer.outputs[0].text)
    ```
    """

    def __init__(self, model: str = "default", *, prefill: int = 1, decode: int = 1, **settings: Any) -> None:
        """Start a cluster and wait until it is ready. Raises `ConfigError` or `Unavailable` with the reason.

        `settings` are flags of `pdserve up`, with underscores: max_model_len=2048, enable_prefix_caching=False."""
        flags = ["--model", model, *_flags(settings)]
        self._retries = Retries(attempts=20, wait_for_server=True)  # a lost process is started again within this time
        with contextlib.ExitStack() as stack:
            with Console(stderr=True).status(f"starting {prefill} prefill and {decode} decode workers for {model}"):
                self._cluster = stack.enter_context(OwnCluster(prefill, decode, None, flags=flags))
            self._loop = stack.enter_context(LoopThread())
            self._open = stack.pop_all()
        self.address = self._cluster.address
        """host:port of the gRPC port, for clients of other kinds."""
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs, stop the cluster and wait until nothing of it is left. Idempotent."""
        atexit.unregister(self.close)
        self._open.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[Options],
    ) -> list[RequestOutput]:
        """Continue each prompt, and return the answers in the order of the prompts.

        A single `sampling_params` holds for all prompts; a list has one for each prompt. An output whose `max_tokens` is not
        set ends after `MAX_TOKENS` tokens, as in vLLM. `use_tqdm` shows the progress. Raises the first error that is not tried
        again; the requests that still run are then cancelled.
        """
        alone = isinstance(prompts, str | Mapping) or (bool(prompts) and all(isinstance(one, int) for one in prompts))
        asked: Sequence[Any] = [prompts] if alone else list(prompts)
        params = _each(sampling_params, len(asked))
        return self._run(len(asked), lambda i: text_request(asked[i], params[i], options), use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[Options],
    ) -> list[RequestOutput]:
        """Ask for the next message of each conversation, otherwise like `generate`. One conversation may stand alone."""
        alone = bool(conversations) and isinstance(conversations[0], Mapping)
        asked: Sequence[Any] = [conversations] if alone else list(conversations)
        params = _each(sampling_params, len(asked))
        return self._run(len(asked), lambda i: chat_request(asked[i], params[i], options), use_tqdm)

    def _run(self, count: int, made: Callable[[int], inference_pb2.GenerateRequest], show: bool) -> list[RequestOutput]:
        """Run all requests on a loop of a thread of their own, because a notebook has a loop that runs already."""

        async def ask(client: AsyncClient, i: int) -> RequestOutput:
            request = made(i)
            return await client.with_prompt(await client.run(request), request)

        self._cluster.check()
        batch = _Batch(self._loop, self.address, self._retries, count, ask)
        with Progress(console=Console(stderr=True), disable=not show, transient=True) as progress:
            task = progress.add_task("requests", total=count)
            return batch.run(lambda: progress.advance(task), self._cluster.check)


class _Batch:
    """The requests of one call."""

    def __init__(self, loop: LoopThread, address: str, retries: Retries, count: int, ask: Ask) -> None:
        self._loop = loop
        self._address = address
        self._retries = retries
        self._count = count
        self._ask = ask
        self._ended = threading.Event()
        self._task: asyncio.Task[list[RequestOutput]] | None = None

    def run(self, advance: Callable[[], None], check: Callable[[], None]) -> list[RequestOutput]:
        """Return the answers. A KeyboardInterrupt, and an error that `check` raises because the cluster is gone, cancels all
        requests before it is raised."""
        try:
            self._loop.call(lambda: self._start(advance))
            while not self._ended.wait(CHECK_S):
                check()
        except BaseException:
            with contextlib.suppress(Unavailable):  # a closed loop has cancelled it already
                self._loop.call(self._cancel)
                self._ended.wait()
            raise
        try:
            return self._task.result() if self._task is not None else []
        except asyncio.CancelledError:
            raise Unavailable("the batch was cancelled, because this LLM was closed") from None
        except BaseExceptionGroup as group:
            check()  # the end of the cluster explains the error of a request
            raise group.exceptions[0] from None

    def _start(self, advance: Callable[[], None]) -> None:
        self._task = self._loop.loop.create_task(self._all(advance))
        self._task.add_done_callback(lambda _: self._ended.set())

    def _cancel(self) -> None:
        if self._task is None:  # interrupted before it was started
            self._ended.set()
        else:
            self._task.cancel()

    async def _all(self, advance: Callable[[], None]) -> list[RequestOutput]:
        gate = asyncio.Semaphore(MAX_CONCURRENT)
        async with AsyncClient(self._address, retries=self._retries) as client:

            async def one(i: int) -> RequestOutput:
                async with gate:
                    answer = await self._ask(client, i)
                advance()
                return answer

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(i)) for i in range(self._count)]
        return [task.result() for task in tasks]


def _each(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    """Return the parameters of each prompt."""
    if given is None or isinstance(given, SamplingParams):
        given = [given or SamplingParams()] * count
    if len(given) != count:
        raise ConfigError(f"sampling_params: {len(given)} are given for {count} prompts")
    return [replace(one, max_tokens=MAX_TOKENS) if one.max_tokens is Unset.UNSET else one for one in given]


def _flags(settings: Mapping[str, Any]) -> Iterable[str]:
    """Return settings as flags of the command line."""
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", str(value))
