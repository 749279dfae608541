"""A stand-in for a server of vLLM: it takes the same command line and speaks the same HTTP, and its "model" is a hash.

    python -m testkit.vllm_stand_in --model DIRECTORY --port N --kv-transfer-config JSON ... [--faults JSON]

The answers have the form of those that a real pair gave (tests/worker/vllm/recorded), and so do its weaknesses: the reader
believes every ticket, and computes from the KV that the ticket names, whatever prompt comes with it; a ticket with too few
blocks ends its process; what no reader fetches stays for `kv_lease_duration`. Each next token is a hash of all tokens before
it, so a wrong KV changes the output.

`--faults` names what goes wrong: see `Faults`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx2
import msgpack
import uvicorn
import zmq
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

BLOCK_SIZE: Final = 16
EOS: Final = 2
GENERATE: Final = "/inference/v1/generate"
LEAVE_S: Final = 0.05
"""The time between the last request of a server that leaves and its end: enough to answer a prompt."""


@dataclasses.dataclass
class Faults:
    """The faults of a server, by name. Each of the counters is of requests to `/inference/v1/generate`, from 1; 0 means
    never."""

    release: str = "0.32.0"
    start_s: float = 0.0  # it loads its model for so long before it listens
    root: str = ""  # the model that it claims to serve
    step_s: float = 0.0  # of each token
    prefill_s: float = 0.0  # of each prompt; they are computed one after the other
    die_at: int = 0  # the process ends when this request has come
    leave_at: int = 0  # the process ends when this request has been answered, before a reader can come
    hang_at: int = 0  # this request is never answered
    error_at: int = 0  # this request gets the status 500
    cut_at: int = 0  # the stream of this request ends after two tokens
    short_at: int = 0  # this request ends by its length one token early
    long_at: int = 0  # this request gets one token more than it asked for
    nonsense_at: int = 0  # this request is answered by what is no answer
    blocks_short_at: int = 0  # the ticket of this request lacks a block
    lease_s: float = 0.0  # its own time for KV without a reader; 0: that of the command line
    no_scale_out: bool = False  # its command lacks --enable-scale-out
    no_connector: bool = False  # it lends no KV, as without a NixlConnector
    bad_metrics: bool = False  # /metrics says what cannot be
    silent_metrics: bool = False  # /metrics does not answer once a request has come


@dataclasses.dataclass
class _Lent:
    """KV that waits for its reader."""

    token_ids: list[int]
    blocks: int
    end_s: float


class StandIn:
    """One server."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.faults = Faults(**json.loads(args.faults))
        transfer = json.loads(args.kv_transfer_config)
        self.lease_s = self.faults.lease_s or float(transfer["kv_connector_extra_config"]["kv_lease_duration"])
        self.engine_id = secrets.token_hex(8)
        self.side_port = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        self.vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
        self.lent: dict[str, _Lent] = {}
        self.computing = asyncio.Lock()
        endpoint = json.loads(args.kv_events_config)["endpoint"] if args.kv_events_config else ""
        self.events = KvEvents(endpoint, args.num_blocks) if endpoint else None
        self.requests = self.running = self.expired = self.tokens = self.used_blocks = 0

    def app(self) -> Starlette:
        """Return its HTTP interface."""
        token_ids = [] if self.faults.no_scale_out else [Route(GENERATE, self.generate, methods=["POST"])]
        return Starlette(
            routes=[
                Route("/health", lambda _: Response()),
                Route("/version", lambda _: JSONResponse({"version": self.faults.release})),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                *token_ids,
                Route("/v1/completions", self.complete, methods=["POST"]),
            ]
        )

    def side_app(self) -> Starlette:
        """Return the interface for readers of its KV, which stands for the side channel and for the reads."""
        return Starlette(routes=[Route("/pull/{request_id}", self.pulled, methods=["POST"])])

    async def models(self, _: Request) -> Response:
        """Name the model that it claims to serve."""
        root = self.faults.root or self.args.model
        model = {"id": self.args.served_model_name, "object": "model", "root": root, "max_model_len": self.args.max_model_len}
        return JSONResponse({"object": "list", "data": [model]})

    async def metrics(self, _: Request) -> Response:
        """Tell its load."""
        if self.faults.silent_metrics and self.requests:
            await asyncio.sleep(3600)
        self._expire()
        usage = 7.5 if self.faults.bad_metrics and self.requests else min(1.0, self.used_blocks / self.args.num_blocks)
        labels = {"block_size": BLOCK_SIZE, "num_gpu_blocks": self.args.num_blocks, "cache_dtype": "auto"}
        info = ",".join(f'{name}="{value}"' for name, value in {**labels, "enable_prefix_caching": "False"}.items())
        lines = [
            f"vllm:cache_config_info{{{info}}} 1.0",
            *(
                f'vllm:{name}{{engine="0"}} {value}'
                for name, value in {
                    "num_requests_running": self.running,
                    "num_requests_waiting": 0,
                    "kv_cache_usage_perc": usage,
                    "prompt_tokens_total": 0,
                    "generation_tokens_total": self.tokens,
                    "nixl_num_kv_expired_reqs_total": self.expired,
                }.items()
            ),
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def pulled(self, request: Request) -> Response:
        """Give KV to a reader, whoever it is. KV that was fetched or has expired is still there, as in the real one's
        memory."""
        self._expire()
        request_id = request.path_params["request_id"]
        if self.faults.leave_at and self.requests >= self.faults.leave_at:
            await asyncio.sleep(3600)  # its end comes first
        lent = self.lent[request_id]
        if lent.blocks:
            self.used_blocks -= lent.blocks
            lent.blocks = 0
        return JSONResponse(lent.token_ids)

    async def generate(self, request: Request) -> Response:
        """Answer as `/inference/v1/generate` does."""
        body = await request.json()
        self.requests += 1
        now, faults = self.requests, self.faults
        if now == faults.die_at:
            os._exit(9)
        if now == faults.leave_at:
            asyncio.get_running_loop().call_later(LEAVE_S, os._exit, 9)
        if now == faults.hang_at:
            await asyncio.sleep(3600)
        if now == faults.error_at:
            return _error(500, "Internal server error")
        if now == faults.nonsense_at:
            return JSONResponse({"choices": [{"finish_reason": "length", "token_ids": ["x"]}]})
        if max(body["token_ids"]) >= self.vocab:
            return _error(400, f"Token id {max(body['token_ids'])} is out of vocabulary")
        params = dict(body["sampling_params"])
        params["max_tokens"] += (now == faults.long_at) - (now == faults.short_at)
        ticket = body.get("kv_transfer_params") or {}
        if ticket.get("do_remote_decode") and not self.faults.no_connector:
            return JSONResponse(await self._prefill(body["token_ids"], params, short=now == faults.blocks_short_at))
        if not body["stream"]:
            return JSONResponse(await self._whole(body["token_ids"], params))
        cut = 2 if now == faults.cut_at else 0
        return StreamingResponse(self._stream(body["token_ids"], params, ticket, cut), media_type="text/event-stream")

    async def complete(self, request: Request) -> Response:
        """Answer as `/v1/completions` does to a prompt of token ids, for the proxies of others. A token's text is its id."""
        body = await request.json()
        prompt, ticket = body["prompt"], body.get("kv_transfer_params") or {}
        params = {"min_tokens": 0, "seed": None, "logprobs": None, "stop_token_ids": [], "max_tokens": body["max_tokens"]}
        if not body["stream"]:
            lent = (await self._prefill(prompt, params, short=False))["kv_transfer_params"]
            return JSONResponse({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "kv_transfer_params": lent})
        return StreamingResponse(self._texts(prompt, params, ticket), media_type="text/event-stream")

    async def _texts(self, prompt: list[int], params: dict[str, Any], ticket: dict[str, Any]) -> AsyncIterator[bytes]:
        kv = await self._fetched(ticket) if ticket.get("do_remote_prefill") else prompt
        async for choice in self._tokens(kv, prompt, params):
            text = {"index": 0, "text": f" {choice['token_ids'][0]}", "finish_reason": choice["finish_reason"]}
            yield _event({"object": "text_completion", "choices": [text]})
        yield _event({"choices": [], "usage": {"completion_tokens": params["max_tokens"]}})
        yield b"data: [DONE]\n\n"

    def _store(self, token_ids: list[int]) -> None:
        """Tell of the full blocks of a prompt that is computed."""
        if self.events is not None:
            self.events.store(token_ids)

    async def _prefill(self, token_ids: list[int], params: dict[str, Any], *, short: bool) -> dict[str, Any]:
        async with self.computing:
            await asyncio.sleep(self.faults.prefill_s)
        answer = await self._whole(token_ids, params)
        if answer["choices"][0]["finish_reason"] != "length":
            return answer  # the real one lends nothing of a request that has ended by itself
        name, blocks = f"generate-tokens-{secrets.token_hex(8)}", -(-len(token_ids) // BLOCK_SIZE)
        self.lent[name] = _Lent(token_ids, blocks, asyncio.get_running_loop().time() + self.lease_s)
        self.used_blocks += blocks
        answer["kv_transfer_params"] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, blocks + 1 - short))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"],
            "remote_port": self.side_port,
            "tp_size": 1,
            "remote_num_tokens": len(token_ids),
            "transfer_mode": "pull",
        }
        return answer

    async def _whole(self, token_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        chosen = [choice async for choice in self._tokens(token_ids, token_ids, params)]
        logprobs = None if params["logprobs"] is None else {"content": [one["logprobs"]["content"][0] for one in chosen]}
        whole = {**chosen[-1], "token_ids": [each for one in chosen for each in one["token_ids"]], "logprobs": logprobs}
        return {"request_id": "x", "prompt_logprobs": None, "kv_transfer_params": None, "choices": [whole]}

    async def _stream(
        self, token_ids: list[int], params: dict[str, Any], ticket: dict[str, Any], cut: int
    ) -> AsyncIterator[bytes]:
        kv = token_ids
        if ticket.get("do_remote_prefill"):
            if len(ticket["remote_block_ids"][0]) < -(-len(token_ids) // BLOCK_SIZE):
                os._exit(1)  # the real one ends by an assertion
            try:
                kv = [*(await self._fetched(ticket)), token_ids[-1]]
            except (httpx2.HTTPError, ValueError):
                yield _event({"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}})
                yield b"data: [DONE]\n\n"
                return
        sent = 0
        async for choice in self._tokens(kv, token_ids, params):
            yield _event({"request_id": "x", "usage": None, "output_mode": "tokens", "choices": [choice]})
            sent += 1
            if sent == cut:
                return
        yield _event({"request_id": "x", "usage": {"completion_tokens": sent}, "choices": []})
        yield b"data: [DONE]\n\n"

    async def _fetched(self, ticket: dict[str, Any]) -> list[int]:
        url = f"http://{ticket['remote_host']}:{ticket['remote_port']}/pull/{ticket['remote_request_id']}"
        async with httpx2.AsyncClient(timeout=None, trust_env=False) as client:
            answer = await client.post(url)
            token_ids: list[int] = answer.raise_for_status().json()
            return token_ids

    async def _tokens(self, kv: list[int], prompt: list[int], params: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the choice of each token. `kv` has the tokens whose KV is there, which may be another prompt's."""
        self._store(prompt)
        seen, drawn = list(kv), 0
        blocks = -(-len(prompt) // BLOCK_SIZE)
        self.running += 1
        self.used_blocks += blocks
        try:
            while True:
                await self._step()
                token_id = next_token(seen, params, drawn, self.vocab)
                seen.append(token_id)
                drawn += 1
                self.tokens += 1
                finish = "length" if drawn >= params["max_tokens"] else None
                if token_id in params["stop_token_ids"] and drawn >= params["min_tokens"]:
                    finish = "stop"
                logprobs = None
                if params["logprobs"] is not None:
                    top = [{"token_id": token_id, "logprob": -0.5, "rank": 1}][: params["logprobs"]]
                    logprobs = {"content": [{"token_id": token_id, "logprob": -0.5, "rank": 1, "top_logprobs": top}]}
                yield {"index": 0, "finish_reason": finish, "token_ids": [token_id], "logprobs": logprobs}
                if finish is not None:
                    return
        finally:
            self.running -= 1
            self.used_blocks -= blocks

    async def _step(self) -> None:
        """Wait for the end of the present step. All sequences of a server get their tokens together, as from an engine."""
        step_s, now_s = self.faults.step_s, asyncio.get_running_loop().time()
        await asyncio.sleep(step_s - now_s % step_s if step_s else 0.0)

    def _expire(self) -> None:
        for lent in self.lent.values():
            if lent.blocks and lent.end_s <= asyncio.get_running_loop().time():
                self.used_blocks -= lent.blocks
                lent.blocks = 0
                self.expired += 1


class KvEvents:
    """The events of the blocks that a server shares, in the form of the recorded one."""

    def __init__(self, endpoint: str, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.connect(endpoint)
        self._number = 0
        self._known: dict[int, None] = {}  # oldest first

    def store(self, token_ids: list[int]) -> None:
        """Tell of all full blocks of a prompt that were not told before."""
        parent, names, first = None, [], 0
        for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
            digest = hashlib.blake2b(json.dumps(token_ids[:end]).encode(), digest_size=8).digest()
            name = int.from_bytes(digest) >> 1
            if name in self._known:
                parent, first = name, end
            else:
                names.append(name)
                self._known[name] = None
        if names:
            gone = list(self._known)[: max(0, len(self._known) - self._num_blocks)]
            for name in gone:
                del self._known[name]
            event = {
                "type": "BlockStored",
                "block_hashes": names,
                "parent_block_hash": parent,
                "token_ids": token_ids[first : first + len(names) * BLOCK_SIZE],
                "block_size": BLOCK_SIZE,
                "extra_keys": [None] * len(names),
                "group_idx": 0,
            }
            removed = {"type": "BlockRemoved", "block_hashes": gone, "group_idx": 0}
            payload = msgpack.packb([0.0, [removed, event] if gone else [event], 0])
            self._socket.send_multipart((b"kv", self._number.to_bytes(8, "big"), payload))
            self._number += 1


def next_token(seen: list[int], params: dict[str, Any], drawn: int, vocab: int) -> int:
    """Return the token after these. A seed and the penalties change it, as they do in a model."""
    marks = [params.get(name, 0.0) for name in ("presence_penalty", "frequency_penalty")]
    seed = params.get("seed")
    text = json.dumps([seen, None if seed is None else [seed, drawn], marks if any(marks) else None])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) % vocab


def outputs(prompt: list[int], max_tokens: int, vocab: int, *, stop: tuple[int, ...] = ()) -> list[int]:
    """Return the greedy output of one server that computes all of it."""
    seen = list(prompt)
    while len(seen) < len(prompt) + max_tokens and not (len(seen) > len(prompt) and seen[-1] in stop):
        seen.append(next_token(seen, {}, 0, vocab))
    return seen[len(prompt) :]


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "Error", "param": None, "code": status}}, status_code=status)


async def _serve(args: argparse.Namespace) -> None:
    stand_in = StandIn(args)
    await asyncio.sleep(stand_in.faults.start_s)
    servers = [
        uvicorn.Server(uvicorn.Config(app, host=args.host, port=port, log_level="warning", lifespan="off"))
        for app, port in ((stand_in.side_app(), stand_in.side_port), (stand_in.app(), args.port))
    ]
    await asyncio.gather(*[server.serve() for server in servers])


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m testkit.vllm_stand_in")
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", default="served")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--kv-transfer-config", required=True)
    parser.add_argument("--kv-events-config", default="")
    parser.add_argument("--faults", default="{}")
    args, _ = parser.parse_known_args()
    asyncio.run(_serve(args))


if __name__ == "__main__":
    main()
