from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_MODEL: _ClassVar[ErrorReason]
    ERROR_REASON_REQUEST_TOO_LARGE: _ClassVar[ErrorReason]
    ERROR_REASON_OVERLOADED: _ClassVar[ErrorReason]
    ERROR_REASON_DEADLINE_EXCEEDED: _ClassVar[ErrorReason]
    ERROR_REASON_CANCELLED: _ClassVar[ErrorReason]
    ERROR_REASON_LEASE_GONE: _ClassVar[ErrorReason]
    ERROR_REASON_TRANSFER_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_REPLICA_LOST: _ClassVar[ErrorReason]
    ERROR_REASON_UNAVAILABLE: _ClassVar[ErrorReason]
    ERROR_REASON_INCOMPATIBLE_PEER: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL_BUG: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_WORKER: _ClassVar[ErrorReason]
    ERROR_REASON_WORKER_ID_TAKEN: _ClassVar[ErrorReason]
    ERROR_REASON_NUMERICAL_ERROR: _ClassVar[ErrorReason]
    ERROR_REASON_REQUEST_TIMEOUT: _ClassVar[ErrorReason]
    ERROR_REASON_KV_CORRUPT: _ClassVar[ErrorReason]
    ERROR_REASON_KV_ROTTED: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_STALE_ORDER: _ClassVar[ErrorReason]
    ERROR_REASON_CANNOT_FLIP: _ClassVar[ErrorReason]
    ERROR_REASON_CANNOT_DRAIN: _ClassVar[ErrorReason]
    ERROR_REASON_POISON_REQUEST: _ClassVar[ErrorReason]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class Placement(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACEMENT_UNSPECIFIED: _ClassVar[Placement]
    PLACEMENT_AUTO: _ClassVar[Placement]
    PLACEMENT_DISAGGREGATED: _ClassVar[Placement]
    PLACEMENT_COLOCATED: _ClassVar[Placement]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_REQUEST: ErrorReason
ERROR_REASON_UNKNOWN_MODEL: ErrorReason
ERROR_REASON_REQUEST_TOO_LARGE: ErrorReason
ERROR_REASON_OVERLOADED: ErrorReason
ERROR_REASON_DEADLINE_EXCEEDED: ErrorReason
ERROR_REASON_CANCELLED: ErrorReason
ERROR_REASON_LEASE_GONE: ErrorReason
ERROR_REASON_TRANSFER_FAILED: ErrorReason
ERROR_REASON_REPLICA_LOST: ErrorReason
ERROR_REASON_UNAVAILABLE: ErrorReason
ERROR_REASON_INCOMPATIBLE_PEER: ErrorReason
ERROR_REASON_INTERNAL_BUG: ErrorReason
ERROR_REASON_UNKNOWN_WORKER: ErrorReason
ERROR_REASON_WORKER_ID_TAKEN: ErrorReason
ERROR_REASON_NUMERICAL_ERROR: ErrorReason
ERROR_REASON_REQUEST_TIMEOUT: ErrorReason
ERROR_REASON_KV_CORRUPT: ErrorReason
ERROR_REASON_KV_ROTTED: ErrorReason
ERROR_REASON_UNKNOWN_REQUEST: ErrorReason
ERROR_REASON_STALE_ORDER: ErrorReason
ERROR_REASON_CANNOT_FLIP: ErrorReason
ERROR_REASON_CANNOT_DRAIN: ErrorReason
ERROR_REASON_POISON_REQUEST: ErrorReason
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
PLACEMENT_UNSPECIFIED: Placement
PLACEMENT_AUTO: Placement
PLACEMENT_DISAGGREGATED: Placement
PLACEMENT_COLOCATED: Placement

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "prompt_logprobs", "include_stop_str_in_output", "skip_special_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    prompt_logprobs: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json_object", "json", "regex", "grammar", "choice")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json: str
    regex: str
    grammar: str
    choice: Choices
    def __init__(self, json_object: _Optional[bool] = ..., json: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class RequestSpec(_message.Message):
    __slots__ = ("prompt_ids", "sampling", "priority", "cache_salt", "constraint", "tpot_s", "client", "draft_limit")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: bytes
    sampling: SamplingParams
    priority: int
    cache_salt: str
    constraint: StructuredOutputs
    tpot_s: float
    client: int
    draft_limit: int
    def __init__(self, prompt_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., constraint: _Optional[_Union[StructuredOutputs, _Mapping]] = ..., tpot_s: _Optional[float] = ..., client: _Optional[int] = ..., draft_limit: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("chosen", "top_ids", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: _containers.RepeatedScalarFieldContainer[float]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[_Iterable[float]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top: _Optional[_Iterable[float]] = ...) -> None: ...

class LeaseId(_message.Message):
    __slots__ = ("incarnation", "counter")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    counter: int
    def __init__(self, incarnation: _Optional[int] = ..., counter: _Optional[int] = ...) -> None: ...

class ReaderId(_message.Message):
    __slots__ = ("incarnation", "counter")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    counter: int
    def __init__(self, incarnation: _Optional[int] = ..., counter: _Optional[int] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("total", "free", "cached", "held", "quarantined", "unaccounted")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    UNACCOUNTED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    held: int
    quarantined: int
    unaccounted: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., quarantined: _Optional[int] = ..., unaccounted: _Optional[int] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker_id", "role", "incarnation", "address", "model_fingerprint", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "dtype", "kv_bytes_per_token", "pid", "step_timeout_s", "niceness", "quantization", "max_num_batched_tokens", "draining", "flips", "flip_obstacle", "oldest_link_version", "link_version", "oldest_peer_version", "peer_version", "peak_flops_per_s", "peak_bytes_per_s", "model_digest", "numerics", "isa", "engine", "refuses", "undivided", "unresumed", "held_tokens", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "cores")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    NICENESS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FLIPS_FIELD_NUMBER: _ClassVar[int]
    FLIP_OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    OLDEST_LINK_VERSION_FIELD_NUMBER: _ClassVar[int]
    LINK_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PEER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEAK_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    REFUSES_FIELD_NUMBER: _ClassVar[int]
    UNDIVIDED_FIELD_NUMBER: _ClassVar[int]
    UNRESUMED_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_EXPERT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    incarnation: int
    address: str
    model_fingerprint: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    kv_bytes_per_token: int
    pid: int
    step_timeout_s: float
    niceness: int
    quantization: str
    max_num_batched_tokens: int
    draining: bool
    flips: int
    flip_obstacle: str
    oldest_link_version: int
    link_version: int
    oldest_peer_version: int
    peer_version: int
    peak_flops_per_s: float
    peak_bytes_per_s: float
    model_digest: str
    numerics: str
    isa: str
    engine: str
    refuses: _containers.RepeatedScalarFieldContainer[str]
    undivided: _containers.RepeatedScalarFieldContainer[str]
    unresumed: _containers.RepeatedScalarFieldContainer[str]
    held_tokens: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    cores: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., pid: _Optional[int] = ..., step_timeout_s: _Optional[float] = ..., niceness: _Optional[int] = ..., quantization: _Optional[str] = ..., max_num_batched_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., flips: _Optional[int] = ..., flip_obstacle: _Optional[str] = ..., oldest_link_version: _Optional[int] = ..., link_version: _Optional[int] = ..., oldest_peer_version: _Optional[int] = ..., peer_version: _Optional[int] = ..., peak_flops_per_s: _Optional[float] = ..., peak_bytes_per_s: _Optional[float] = ..., model_digest: _Optional[str] = ..., numerics: _Optional[str] = ..., isa: _Optional[str] = ..., engine: _Optional[str] = ..., refuses: _Optional[_Iterable[str]] = ..., undivided: _Optional[_Iterable[str]] = ..., unresumed: _Optional[_Iterable[str]] = ..., held_tokens: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., enable_expert_parallel: _Optional[bool] = ..., cores: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("blocks", "queued_requests", "queued_tokens", "running_sequences", "leases_held", "loop_lag_ms", "draining", "prefix_queried_tokens", "prefix_hit_tokens", "engine_stalled_s", "foreign_blocks", "numerical_errors", "last_handle", "kv_corrupt_blocks", "kv_rotted_blocks", "prompt_tokens_per_s", "decode_step_s", "max_num_batched_tokens", "computed_prompt_tokens", "output_tokens", "prompt_busy_s", "decode_busy_s", "prompt_flops", "decode_read_bytes", "max_num_seqs", "prompt_steps", "decode_steps", "uptime_s", "experts", "speculation")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LEASES_HELD_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STALLED_S_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUMERICAL_ERRORS_FIELD_NUMBER: _ClassVar[int]
    LAST_HANDLE_FIELD_NUMBER: _ClassVar[int]
    KV_CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_ROTTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FLOPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    blocks: BlockCounts
    queued_requests: int
    queued_tokens: int
    running_sequences: int
    leases_held: int
    loop_lag_ms: float
    draining: bool
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    engine_stalled_s: float
    foreign_blocks: int
    numerical_errors: int
    last_handle: int
    kv_corrupt_blocks: int
    kv_rotted_blocks: int
    prompt_tokens_per_s: float
    decode_step_s: float
    max_num_batched_tokens: int
    computed_prompt_tokens: int
    output_tokens: int
    prompt_busy_s: float
    decode_busy_s: float
    prompt_flops: float
    decode_read_bytes: float
    max_num_seqs: int
    prompt_steps: int
    decode_steps: int
    uptime_s: float
    experts: ExpertLoad
    speculation: DraftCounts
    def __init__(self, blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., queued_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., running_sequences: _Optional[int] = ..., leases_held: _Optional[int] = ..., loop_lag_ms: _Optional[float] = ..., draining: _Optional[bool] = ..., prefix_queried_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., engine_stalled_s: _Optional[float] = ..., foreign_blocks: _Optional[int] = ..., numerical_errors: _Optional[int] = ..., last_handle: _Optional[int] = ..., kv_corrupt_blocks: _Optional[int] = ..., kv_rotted_blocks: _Optional[int] = ..., prompt_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., max_num_batched_tokens: _Optional[int] = ..., computed_prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., prompt_busy_s: _Optional[float] = ..., decode_busy_s: _Optional[float] = ..., prompt_flops: _Optional[float] = ..., decode_read_bytes: _Optional[float] = ..., max_num_seqs: _Optional[int] = ..., prompt_steps: _Optional[int] = ..., decode_steps: _Optional[int] = ..., uptime_s: _Optional[float] = ..., experts: _Optional[_Union[ExpertLoad, _Mapping]] = ..., speculation: _Optional[_Union[DraftCounts, _Mapping]] = ...) -> None: ...

class DraftCounts(_message.Message):
    __slots__ = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_accepted_tokens_per_pos: _Optional[_Iterable[int]] = ...) -> None: ...

class ExpertLoad(_message.Message):
    __slots__ = ("choices", "imbalance", "worst_imbalance", "hottest")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    WORST_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_FIELD_NUMBER: _ClassVar[int]
    choices: int
    imbalance: float
    worst_imbalance: float
    hottest: _containers.RepeatedCompositeFieldContainer[HotExpert]
    def __init__(self, choices: _Optional[int] = ..., imbalance: _Optional[float] = ..., worst_imbalance: _Optional[float] = ..., hottest: _Optional[_Iterable[_Union[HotExpert, _Mapping]]] = ...) -> None: ...

class HotExpert(_message.Message):
    __slots__ = ("layer", "expert", "imbalance")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    layer: int
    expert: int
    imbalance: float
    def __init__(self, layer: _Optional[int] = ..., expert: _Optional[int] = ..., imbalance: _Optional[float] = ...) -> None: ...
