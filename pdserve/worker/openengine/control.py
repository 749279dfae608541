"""The service Control: what the worker is, how it is, and aborts. It tells the worker's own state, as heartbeats do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

import pdserve
from kvtransfer.ticket import VERSION
from pdserve.core.errors import DeadlineExceeded, InvalidRequest, PdserveError
from pdserve.core.limits import IntRange, limit_of
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from pdserve.rpc import status
from pdserve.rpc.v1 import decode_pb2, link_pb2, openengine_pb2, openengine_pb2_grpc, prefill_pb2
from pdserve.worker.host import Host
from pdserve.worker.member import LinkMember
from pdserve.worker.openengine.direct import DirectRequests
from pdserve.worker.openengine.request import check_model

SCHEMA_REVISION: Final = 1
SCHEMA_RELEASE: Final = "4def7c50b05e0674a0c3b26917399155535966e4"
"""The commit of ai-dynamo/openengine whose fields proto/pdserve/rpc/v1/openengine.proto has. It has no releases or tags."""
PROBE_S: Final = 30.0
"""The longest time of an inference probe, which waits behind the prompts that are there."""
PROBE_ID: Final = "health probe {}"
Handler = Callable[[Any, Any, Any], Awaitable[None]]
_Health = openengine_pb2.HealthState
_READY, _NOT_READY = _Health.HEALTH_STATE_READY, _Health.HEALTH_STATE_NOT_READY
_ROLES: Final = {Role.PREFILL: openengine_pb2.ENGINE_ROLE_PREFILL, Role.DECODE: openengine_pb2.ENGINE_ROLE_DECODE}
_MODES: Final = (
    openengine_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA,
    openengine_pb2.GUIDED_DECODING_MODE_REGEX,
    openengine_pb2.GUIDED_DECODING_MODE_CHOICE,
    openengine_pb2.GUIDED_DECODING_MODE_JSON_OBJECT,
)


def _not_served(method: str, why: str) -> Handler:
    async def refuse(self: ControlService, request: Any, context: Any) -> None:
        await self.authorise(context)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served: {why}")

    return refuse


class ControlService(openengine_pb2_grpc.ControlServicer):
    """The service for control planes."""

    def __init__(
        self,
        host: Host,
        member: LinkMember,
        role: Role,
        model: str,
        directs: DirectRequests,
        authorise: Callable[[Any], Awaitable[None]],
    ) -> None:
        """The arguments are those of `GenerateService`, and the worker as its router knows it."""
        self.authorise = authorise
        self._host = host
        self._member = member
        self._role = role
        self._model = model
        self._directs = directs
        self._probes = 0

    async def GetServerInfo(self, request: openengine_pb2.GetServerInfoRequest, context: Any) -> openengine_pb2.ServerInfo:
        await self.authorise(context)
        hello, host = self._member.hello(), self._host
        address, _, port = host.address.rpartition(":")
        engine = host.config.engine
        transport, lends = host.config.transfer.transport, self._role is Role.PREFILL
        info = openengine_pb2.ServerInfo(
            engine_name="pdserve",
            engine_version=pdserve.__version__,
            engine_role=_ROLES[self._role],
            instance_id=self._life_name,
            supported_models=[self._model],
            parallelism=openengine_pb2.ParallelismInfo(
                tensor_parallel_size=engine.tensor_parallel_size,
                pipeline_parallel_size=engine.pipeline_parallel_size,
                data_parallel_size=1,
                data_parallel_rank=0,
                data_parallel_start_rank=0,
                decode_context_parallel_size=1,
            ),
            kv_connector=openengine_pb2.KvConnectorInfo(
                enabled=True,
                transfer_backend=transport,
                local_endpoints=[openengine_pb2.KvEndpoint(host=address, port=int(port), protocol="grpc")] if lends else [],
                supported_protocols=[transport],
                supports_remote_prefill=True,
                supports_decode_pull=True,
                supports_abort_cleanup=True,
                supports_drain=True,
                schema_version=VERSION,
            ),
            schema_revision=SCHEMA_REVISION,
            minimum_client_revision=SCHEMA_REVISION,
            schema_release=SCHEMA_RELEASE,
            capacity=openengine_pb2.DeploymentCapacity(
                kv_block_size=hello.block_size,
                total_kv_blocks=self._member.load().blocks.total,
                max_running_requests=hello.max_num_seqs,
                max_batched_tokens=hello.max_num_batched_tokens,
                max_loras=0,
            ),
        )
        info.extra["worker_id"] = host.config.worker_id
        info.extra["model_digest"] = host.model_digest
        info.extra["numerics"] = host.numerics
        info.extra["takes_requests_without_session"] = not lends
        return info

    async def GetModelInfo(self, request: openengine_pb2.GetModelInfoRequest, context: Any) -> openengine_pb2.ModelInfo:
        await self.authorise(context)
        try:
            if not request.model:
                raise InvalidRequest(f"is missing; {self._model!r} is served here", field="model")
            check_model(request.model, self._model)
        except PdserveError as exc:
            await status.abort(context, exc)
        host = self._host
        most = limit_of(SamplingParams, "logprobs", IntRange).high
        logprobs = openengine_pb2.LogprobCapabilities(
            supported=True, candidate_selection_modes=[openengine_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N], max_top_n=most
        )
        info = openengine_pb2.ModelInfo(
            model_id=host.card.name,
            served_model_name=self._model,
            max_context_length=host.max_model_len,
            max_output_tokens=host.max_model_len - 1,
            supports_text_input=True,
            supports_token_ids_input=True,
            generation=openengine_pb2.GenerationCapabilities(
                prompt_logprobs=logprobs,
                output_logprobs=logprobs,
                guided_decoding=openengine_pb2.GuidedDecodingCapabilities(supported=True, modes=_MODES),
                max_num_sequences=1,
                supports_priority=True,
                supports_stop_in_output=True,
                supports_cache_salt=True,
                supports_prefix_cache_bypass=False,
            ),
            supports_lora=False,
            supports_multimodal=False,
        )
        info.extra["kv_cache_dtype"] = host.kv_spec.dtype
        info.extra["quantization"] = host.config.engine.quantization or ""
        return info

    async def GetLoad(self, request: openengine_pb2.GetLoadRequest, context: Any) -> openengine_pb2.LoadInfo:
        await self.authorise(context)
        load = self._member.load()
        used = load.blocks.held + load.blocks.quarantined
        counts: dict[str, Any] = {
            "running_requests": load.running_sequences,
            "queued_requests": load.queued_requests,
            "used_kv_blocks": used,
            "total_kv_blocks": load.blocks.total,
        }
        return openengine_pb2.LoadInfo(
            instance_id=self._life_name,
            timestamp_unix_nanos=time.time_ns(),
            active_kv_sessions=load.leases_held,
            waiting_tokens=load.queued_tokens,
            ranks=[openengine_pb2.RankLoadInfo(data_parallel_rank=0, **counts)] if request.include_per_rank else [],
            **counts,
        )

    async def Health(self, request: openengine_pb2.HealthRequest, context: Any) -> openengine_pb2.HealthResponse:
        await self.authorise(context)
        try:
            if request.model:
                check_model(request.model, self._model)
        except PdserveError as exc:
            await status.abort(context, exc)
        host, load = self._host, self._member.load()
        broken = host.transfer.unhealthy_reason if host.transfer.unhealthy.is_set() else ""
        asked, here = request.role, _ROLES[self._role]
        is_other = asked not in (openengine_pb2.ENGINE_ROLE_UNSPECIFIED, here)
        stalled = f"no step for {load.engine_stalled_s:.1f} s" if load.engine_stalled_s else ""
        checks = [
            _check("grpc"),
            _check("scheduler", stalled, _Health.HEALTH_STATE_DEGRADED),
            _check("model"),
            _check("kv_connector", broken),
            _check("role", f"this is a {self._role.value} worker" if is_other else ""),
        ]
        if request.include_inference_probe and not host.draining:
            checks.append(_check("inference_probe", await self._probe(context.time_remaining())))
        worst = max((one.state for one in checks), key=_SEVERITY.index)
        state = _Health.HEALTH_STATE_DRAINING if host.draining and worst is not _NOT_READY else worst
        return openengine_pb2.HealthResponse(state=state, checks=checks)

    async def Abort(self, request: openengine_pb2.AbortRequest, context: Any) -> openengine_pb2.AbortResponse:
        await self.authorise(context)
        directs, target = self._directs, request.WhichOneof("target")
        if target is None:
            missing = "is missing: set request_id, kv_session or all_requests"
            await status.abort(context, InvalidRequest(missing, field="target"))
        if target == "all_requests":
            message = f"{directs.abort_all()} requests and sessions"
            return openengine_pb2.AbortResponse(status=openengine_pb2.ABORT_STATUS_ABORTED, message=message)
        if target == "request_id":
            aborted = directs.abort(request.request_id)
        else:
            aborted = directs.abort_session(request.kv_session.session_id)
        if aborted is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{target}: it is not known here")
        done = openengine_pb2.ABORT_STATUS_ABORTED if aborted else openengine_pb2.ABORT_STATUS_ALREADY_FINISHED
        return openengine_pb2.AbortResponse(status=done)

    LoadLora = _not_served("LoadLora", "adapters are not served")
    UnloadLora = _not_served("UnloadLora", "adapters are not served")
    ListLoras = _not_served("ListLoras", "adapters are not served")
    GetKvEventSources = _not_served("GetKvEventSources", "changes of the cache are told to pdserve's router alone")
    SubscribeKvEvents = _not_served("SubscribeKvEvents", "changes of the cache are told to pdserve's router alone")

    @property
    def _life_name(self) -> str:
        return f"{self._host.config.worker_id}-{self._host.incarnation:016x}"

    async def _probe(self, remaining_s: float | None) -> str:
        """Compute one token, and return why that failed. Empty: it did not. A prefill worker lends its KV for a moment."""
        limit_s = PROBE_S if remaining_s is None else min(remaining_s, PROBE_S)
        self._probes += 1
        request = None
        try:
            end_s = asyncio.get_running_loop().time() + limit_s
            request = self._directs.open(PROBE_ID.format(self._probes), end_s)
            if request is None:
                return "another request has the name of the probe"
            spec = RequestSpec((0,), SamplingParams(max_tokens=1, temperature=0.0))
            if self._role is Role.PREFILL:
                self._directs.prefill(request, spec)
            else:
                self._directs.bind(request, spec, limit_s, local_prefill=True)
            while isinstance(told := await request.next(), prefill_pb2.PrefillStarted | decode_pb2.Reserved):
                pass
        except TimeoutError:
            return DeadlineExceeded(f"no token within {limit_s:.1f} s").message
        except PdserveError as exc:
            return exc.message
        finally:
            if request is not None:
                self._directs.end(request, cancel=True)
        match told:
            case link_pb2.StepRow():
                return ""
            case link_pb2.RequestFailed():
                return told.message
            case _:
                return "the worker has no room, or it ends"


_SEVERITY: Final = (_READY, _Health.HEALTH_STATE_DEGRADED, _NOT_READY)


def _check(name: str, fault: str = "", worse: openengine_pb2.HealthState = _NOT_READY) -> openengine_pb2.HealthCheck:
    """Return one check. `worse` is its state if there is a fault."""
    return openengine_pb2.HealthCheck(name=name, state=worse if fault else _READY, message=fault)
