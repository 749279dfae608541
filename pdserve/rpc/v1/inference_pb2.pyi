from pdserve.rpc.v1 import common_pb2 as _common_pb2
from pdserve.rpc.v1 import scaling_pb2 as _scaling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "tools", "template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedScalarFieldContainer[str]
    template_kwargs: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[str]] = ..., template_kwargs: _Optional[str] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "function", "at_most_one")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[ToolChoice.Mode]
        MODE_AUTO: _ClassVar[ToolChoice.Mode]
        MODE_NONE: _ClassVar[ToolChoice.Mode]
        MODE_REQUIRED: _ClassVar[ToolChoice.Mode]
    MODE_UNSPECIFIED: ToolChoice.Mode
    MODE_AUTO: ToolChoice.Mode
    MODE_NONE: ToolChoice.Mode
    MODE_REQUIRED: ToolChoice.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    AT_MOST_ONE_FIELD_NUMBER: _ClassVar[int]
    mode: ToolChoice.Mode
    function: str
    at_most_one: bool
    def __init__(self, mode: _Optional[_Union[ToolChoice.Mode, str]] = ..., function: _Optional[str] = ..., at_most_one: _Optional[bool] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "tokens", "chat", "sampling", "deadline_s", "priority", "placement", "cache_salt", "slo_class", "structured_outputs", "tool_choice", "session_id", "n", "best_of", "beam_width", "length_penalty", "speculation", "num_speculative_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    tokens: TokenPrompt
    chat: ChatPrompt
    sampling: _common_pb2.SamplingParams
    deadline_s: float
    priority: int
    placement: _common_pb2.Placement
    cache_salt: str
    slo_class: str
    structured_outputs: _common_pb2.StructuredOutputs
    tool_choice: ToolChoice
    session_id: str
    n: int
    best_of: int
    beam_width: int
    length_penalty: float
    speculation: str
    num_speculative_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ..., priority: _Optional[int] = ..., placement: _Optional[_Union[_common_pb2.Placement, str]] = ..., cache_salt: _Optional[str] = ..., slo_class: _Optional[str] = ..., structured_outputs: _Optional[_Union[_common_pb2.StructuredOutputs, _Mapping]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., session_id: _Optional[str] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., speculation: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "ids", "text", "finish_reason", "usage", "report", "logprobs", "prompt_logprobs", "tool_calls", "reasoning", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: _common_pb2.FinishReason
    usage: Usage
    report: RequestReport
    logprobs: _common_pb2.Logprobs
    prompt_logprobs: _common_pb2.Logprobs
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    reasoning: str
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., report: _Optional[_Union[RequestReport, _Mapping]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., reasoning: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class GenerateBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ...) -> None: ...

class GenerateBatchResponse(_message.Message):
    __slots__ = ("index", "response", "error")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    index: int
    response: GenerateResponse
    error: GenerateError
    def __init__(self, index: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., error: _Optional[_Union[GenerateError, _Mapping]] = ...) -> None: ...

class GenerateError(_message.Message):
    __slots__ = ("reason", "message", "retry_after_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.ErrorReason
    message: str
    retry_after_s: float
    def __init__(self, reason: _Optional[_Union[_common_pb2.ErrorReason, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class RequestReport(_message.Message):
    __slots__ = ("placement", "placement_reason", "prefill_worker", "decode_worker", "queue_s", "reserve_s", "prefill_s", "ttft_s", "tpot_s", "total_s", "kv_bytes", "transfer_s", "commit_s", "exposed_transfer_s", "attempts", "binds", "prefill_start_s", "prefill_end_s", "kv_committed_s", "first_decode_s", "request_id", "correlation_id", "exact", "foreign", "slo_class", "ttft_met", "tpot_met", "predicted_ttft_s", "speculation")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    RESERVE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BINDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_START_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_END_S_FIELD_NUMBER: _ClassVar[int]
    KV_COMMITTED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_DECODE_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MET_FIELD_NUMBER: _ClassVar[int]
    TPOT_MET_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    placement: _common_pb2.Placement
    placement_reason: str
    prefill_worker: str
    decode_worker: str
    queue_s: float
    reserve_s: float
    prefill_s: float
    ttft_s: float
    tpot_s: float
    total_s: float
    kv_bytes: int
    transfer_s: float
    commit_s: float
    exposed_transfer_s: float
    attempts: int
    binds: int
    prefill_start_s: float
    prefill_end_s: float
    kv_committed_s: float
    first_decode_s: float
    request_id: str
    correlation_id: str
    exact: bool
    foreign: bool
    slo_class: str
    ttft_met: bool
    tpot_met: bool
    predicted_ttft_s: float
    speculation: Speculation
    def __init__(self, placement: _Optional[_Union[_common_pb2.Placement, str]] = ..., placement_reason: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., queue_s: _Optional[float] = ..., reserve_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., total_s: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., commit_s: _Optional[float] = ..., exposed_transfer_s: _Optional[float] = ..., attempts: _Optional[int] = ..., binds: _Optional[int] = ..., prefill_start_s: _Optional[float] = ..., prefill_end_s: _Optional[float] = ..., kv_committed_s: _Optional[float] = ..., first_decode_s: _Optional[float] = ..., request_id: _Optional[str] = ..., correlation_id: _Optional[str] = ..., exact: _Optional[bool] = ..., foreign: _Optional[bool] = ..., slo_class: _Optional[str] = ..., ttft_met: _Optional[bool] = ..., tpot_met: _Optional[bool] = ..., predicted_ttft_s: _Optional[float] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_rate", "acceptance_length", "num_accepted_tokens_per_pos")
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float
    acceptance_length: float
    num_accepted_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., acceptance_rate: _Optional[float] = ..., acceptance_length: _Optional[float] = ..., num_accepted_tokens_per_pos: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "cancel_token")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    cancel_token: str
    def __init__(self, request_id: _Optional[str] = ..., cancel_token: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("found", "not_here")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    NOT_HERE_FIELD_NUMBER: _ClassVar[int]
    found: bool
    not_here: bool
    def __init__(self, found: _Optional[bool] = ..., not_here: _Optional[bool] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatPrompt
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "architecture", "vocab_size", "max_model_len", "block_size", "dtype", "kv_bytes_per_token", "eos_token_ids", "has_chat_template", "kv_cache_dtype")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    block_size: int
    dtype: str
    kv_bytes_per_token: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    kv_cache_dtype: str
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ..., kv_cache_dtype: _Optional[str] = ...) -> None: ...

class GetClusterStateRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class GetClusterStateResponse(_message.Message):
    __slots__ = ("router_incarnation", "queued_requests", "running_requests", "workers", "set_aside_pairs", "block_size", "exact", "foreign", "classes", "demand", "scaling", "next_page_token", "num_set_aside_pairs", "set_aside_counts", "poisoned_workers")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_PAIRS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_SET_ASIDE_PAIRS_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    POISONED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: int
    queued_requests: int
    running_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    set_aside_pairs: _containers.RepeatedCompositeFieldContainer[SetAsidePair]
    block_size: int
    exact: bool
    foreign: bool
    classes: _containers.RepeatedCompositeFieldContainer[ClassState]
    demand: Demand
    scaling: _scaling_pb2.ScalingState
    next_page_token: str
    num_set_aside_pairs: int
    set_aside_counts: _containers.RepeatedCompositeFieldContainer[SetAsideCount]
    poisoned_workers: _containers.RepeatedCompositeFieldContainer[PoisonedWorker]
    def __init__(self, router_incarnation: _Optional[int] = ..., queued_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., set_aside_pairs: _Optional[_Iterable[_Union[SetAsidePair, _Mapping]]] = ..., block_size: _Optional[int] = ..., exact: _Optional[bool] = ..., foreign: _Optional[bool] = ..., classes: _Optional[_Iterable[_Union[ClassState, _Mapping]]] = ..., demand: _Optional[_Union[Demand, _Mapping]] = ..., scaling: _Optional[_Union[_scaling_pb2.ScalingState, _Mapping]] = ..., next_page_token: _Optional[str] = ..., num_set_aside_pairs: _Optional[int] = ..., set_aside_counts: _Optional[_Iterable[_Union[SetAsideCount, _Mapping]]] = ..., poisoned_workers: _Optional[_Iterable[_Union[PoisonedWorker, _Mapping]]] = ...) -> None: ...

class PoisonedWorker(_message.Message):
    __slots__ = ("worker_id", "pid")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pid: int
    def __init__(self, worker_id: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class SetAsideCount(_message.Message):
    __slots__ = ("worker_id", "role", "pairs")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _common_pb2.Role
    pairs: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., pairs: _Optional[int] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("uptime_s", "requests", "prompt_tokens", "output_tokens", "refused", "queued_prompt_tokens", "longest_wait_s", "ttft_met", "ttft_missed", "tpot_met", "tpot_missed", "placed_prompt_tokens", "prefill_prompt_tokens", "classes")
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_MET_FIELD_NUMBER: _ClassVar[int]
    TTFT_MISSED_FIELD_NUMBER: _ClassVar[int]
    TPOT_MET_FIELD_NUMBER: _ClassVar[int]
    TPOT_MISSED_FIELD_NUMBER: _ClassVar[int]
    PLACED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    refused: int
    queued_prompt_tokens: int
    longest_wait_s: float
    ttft_met: int
    ttft_missed: int
    tpot_met: int
    tpot_missed: int
    placed_prompt_tokens: int
    prefill_prompt_tokens: int
    classes: _containers.RepeatedCompositeFieldContainer[ClassDemand]
    def __init__(self, uptime_s: _Optional[float] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., refused: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., longest_wait_s: _Optional[float] = ..., ttft_met: _Optional[int] = ..., ttft_missed: _Optional[int] = ..., tpot_met: _Optional[int] = ..., tpot_missed: _Optional[int] = ..., placed_prompt_tokens: _Optional[int] = ..., prefill_prompt_tokens: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassDemand, _Mapping]]] = ...) -> None: ...

class ClassDemand(_message.Message):
    __slots__ = ("slo_class", "ttft_met", "ttft_missed", "tpot_met", "tpot_missed", "late_by_queue", "late_by_prefill_queue", "late_by_prefill", "late_by_colocated", "late_by_failure", "slow_by_transfer", "slow_by_first_decode", "slow_by_steps", "slow_by_failure", "refused", "first_gap_s", "first_gaps")
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MET_FIELD_NUMBER: _ClassVar[int]
    TTFT_MISSED_FIELD_NUMBER: _ClassVar[int]
    TPOT_MET_FIELD_NUMBER: _ClassVar[int]
    TPOT_MISSED_FIELD_NUMBER: _ClassVar[int]
    LATE_BY_QUEUE_FIELD_NUMBER: _ClassVar[int]
    LATE_BY_PREFILL_QUEUE_FIELD_NUMBER: _ClassVar[int]
    LATE_BY_PREFILL_FIELD_NUMBER: _ClassVar[int]
    LATE_BY_COLOCATED_FIELD_NUMBER: _ClassVar[int]
    LATE_BY_FAILURE_FIELD_NUMBER: _ClassVar[int]
    SLOW_BY_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    SLOW_BY_FIRST_DECODE_FIELD_NUMBER: _ClassVar[int]
    SLOW_BY_STEPS_FIELD_NUMBER: _ClassVar[int]
    SLOW_BY_FAILURE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FIRST_GAP_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_GAPS_FIELD_NUMBER: _ClassVar[int]
    slo_class: str
    ttft_met: int
    ttft_missed: int
    tpot_met: int
    tpot_missed: int
    late_by_queue: int
    late_by_prefill_queue: int
    late_by_prefill: int
    late_by_colocated: int
    late_by_failure: int
    slow_by_transfer: int
    slow_by_first_decode: int
    slow_by_steps: int
    slow_by_failure: int
    refused: int
    first_gap_s: float
    first_gaps: int
    def __init__(self, slo_class: _Optional[str] = ..., ttft_met: _Optional[int] = ..., ttft_missed: _Optional[int] = ..., tpot_met: _Optional[int] = ..., tpot_missed: _Optional[int] = ..., late_by_queue: _Optional[int] = ..., late_by_prefill_queue: _Optional[int] = ..., late_by_prefill: _Optional[int] = ..., late_by_colocated: _Optional[int] = ..., late_by_failure: _Optional[int] = ..., slow_by_transfer: _Optional[int] = ..., slow_by_first_decode: _Optional[int] = ..., slow_by_steps: _Optional[int] = ..., slow_by_failure: _Optional[int] = ..., refused: _Optional[int] = ..., first_gap_s: _Optional[float] = ..., first_gaps: _Optional[int] = ...) -> None: ...

class ClassState(_message.Message):
    __slots__ = ("slo_class", "window_s", "requests", "good", "ttft_met", "ttft_missed", "tpot_met", "tpot_missed", "refused", "shed")
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GOOD_FIELD_NUMBER: _ClassVar[int]
    TTFT_MET_FIELD_NUMBER: _ClassVar[int]
    TTFT_MISSED_FIELD_NUMBER: _ClassVar[int]
    TPOT_MET_FIELD_NUMBER: _ClassVar[int]
    TPOT_MISSED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SHED_FIELD_NUMBER: _ClassVar[int]
    slo_class: str
    window_s: float
    requests: int
    good: int
    ttft_met: int
    ttft_missed: int
    tpot_met: int
    tpot_missed: int
    refused: int
    shed: int
    def __init__(self, slo_class: _Optional[str] = ..., window_s: _Optional[float] = ..., requests: _Optional[int] = ..., good: _Optional[int] = ..., ttft_met: _Optional[int] = ..., ttft_missed: _Optional[int] = ..., tpot_met: _Optional[int] = ..., tpot_missed: _Optional[int] = ..., refused: _Optional[int] = ..., shed: _Optional[int] = ...) -> None: ...

class SetAsidePair(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "reason", "remaining_s", "failures")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    reason: str
    remaining_s: float
    failures: int
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., reason: _Optional[str] = ..., remaining_s: _Optional[float] = ..., failures: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("hello", "load", "ready", "not_ready_reason", "draining", "heartbeat_age_s", "requests_placed", "recent", "since_start")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PLACED_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    SINCE_START_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.WorkerHello
    load: _common_pb2.WorkerLoad
    ready: bool
    not_ready_reason: str
    draining: bool
    heartbeat_age_s: float
    requests_placed: int
    recent: Utilisation
    since_start: Utilisation
    def __init__(self, hello: _Optional[_Union[_common_pb2.WorkerHello, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., ready: _Optional[bool] = ..., not_ready_reason: _Optional[str] = ..., draining: _Optional[bool] = ..., heartbeat_age_s: _Optional[float] = ..., requests_placed: _Optional[int] = ..., recent: _Optional[_Union[Utilisation, _Mapping]] = ..., since_start: _Optional[_Union[Utilisation, _Mapping]] = ...) -> None: ...

class Utilisation(_message.Message):
    __slots__ = ("busy", "mfu", "mbu")
    BUSY_FIELD_NUMBER: _ClassVar[int]
    MFU_FIELD_NUMBER: _ClassVar[int]
    MBU_FIELD_NUMBER: _ClassVar[int]
    busy: float
    mfu: float
    mbu: float
    def __init__(self, busy: _Optional[float] = ..., mfu: _Optional[float] = ..., mbu: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "term", "force")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    term: int
    force: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., term: _Optional[int] = ..., force: _Optional[bool] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("requests_placed", "running_sequences", "leases_held", "blocks_held", "elapsed_s", "done", "incarnation")
    REQUESTS_PLACED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LEASES_HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    requests_placed: int
    running_sequences: int
    leases_held: int
    blocks_held: int
    elapsed_s: float
    done: bool
    incarnation: int
    def __init__(self, requests_placed: _Optional[int] = ..., running_sequences: _Optional[int] = ..., leases_held: _Optional[int] = ..., blocks_held: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., done: _Optional[bool] = ..., incarnation: _Optional[int] = ...) -> None: ...
