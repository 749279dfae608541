"""The flags that override the YAML, each beside the setting that it sets. The names are those that users of vLLM know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from pdserve.config import (
    BACKENDS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    QUANTIZATIONS,
    RANK_COLLECTIVES,
    ClusterConfig,
    load,
)
from pdserve.core.sampling import Placement
from pdserve.core.settings.types import parse_bytes
from pdserve.text.calls.registry import AUTO, CALL_FORMS, NONE, REASONING_SIGNS

Command = TypeVar("Command", bound=Callable[..., Any])


class Bytes(click.ParamType[int]):
    """A size in bytes: a number, or a number with a unit such as MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes. click reports a text that is not a size."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


class JsonSection(click.ParamType[dict[str, Any]]):
    """A section of settings as a JSON object, which is vLLM's form."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Return the section. click reports a text that is no JSON object."""
        try:
            section = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            section = None
        if not isinstance(section, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return section


class OptionNames(click.ParamType[list[str]]):
    """A list of names: separated by commas, or as a JSON list, which is vLLM's form."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """Return the names. click reports a text that begins as a JSON list and is none."""
        if not isinstance(value, str):
            return list(value)
        if not value.lstrip().startswith("["):
            return [name for part in value.split(",") if (name := part.strip())]
        try:
            names = json.loads(value)
        except ValueError:
            self.fail(f"{value!r} is not a JSON list", param, ctx)
        return list(names)


class Whole(click.ParamType[int]):
    """A whole number that must fit a field of so many bits. Only errors tell that limit, since hardly anybody comes near it."""

    name = "integer"

    def __init__(self, bits: int, *, least: int = 0) -> None:
        self._range = click.IntRange(least, (1 << bits) - 1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. click reports one that does not fit."""
        return int(self._range.convert(value, param, ctx))


UINT32: Final = Whole(32)
PORT: Final = click.IntRange(0, 65535)
POSITIVE: Final = click.IntRange(min=1)
DEGREE: Final = click.IntRange(1, 64)
SHARE: Final = click.FloatRange(0, 1, min_open=True)
NOT_NEGATIVE: Final = click.IntRange(min=0)
PLACEMENTS: Final = click.Choice([placement.value for placement in Placement])

# (flags, setting, type, help)
FLAGS: Final[tuple[tuple[tuple[str, ...], str, Any, str], ...]] = (
    (("--prefill",), "prefill.replicas", NOT_NEGATIVE, "Number of prefill workers; 0 runs all requests colocated."),
    (("--decode",), "decode.replicas", POSITIVE, "Number of decode workers."),
    (("--model",), "engine.model", str, "default, tiny, a directory, a GGUF file or a Hugging Face id."),
    (
        ("--engine",),
        "engine.backend",
        click.Choice(BACKENDS),
        "pdserve, or vllm to let each worker drive a server of vLLM (`make setup-vllm`).",
    ),
    (
        ("--load-format",),
        "engine.load_format",
        click.Choice(LOAD_FORMATS),
        "dummy makes random weights up instead of reading files, to try a configuration.",
    ),
    (("--served-model-name",), "engine.served_model_name", str, "Name by which clients call the model."),
    (("--host",), "router.host", str, "Address at which clients connect (default 127.0.0.1)."),
    (
        ("--http-port", "--port"),
        "router.http_port",
        PORT,
        "Port for HTTP (default 8000); 0 takes any free port, for gRPC as well.",
    ),
    (
        ("--allowed-origins",),
        "router.allowed_origins",
        OptionNames(),
        "Origins of web pages that may use HTTP from a browser, as a list; * allows all (default: none).",
    ),
    (("--grpc-port",), "router.grpc_port", PORT, "Port for gRPC (default 50051); 0 takes any free port."),
    (
        ("--admin-port",),
        "router.admin_port",
        PORT,
        "Port for `pdserve status`, `drain`, `flip` and `scale` (default 50053); 0 takes any free port.",
    ),
    (("--link-port",), "router.link_port", PORT, "Port at which workers connect to the router (default 0: any free port)."),
    (
        ("--prefill-openengine-port",),
        "prefill.openengine_port",
        PORT,
        "Port at which worker prefill-0 serves OpenEngine; prefill-1 takes the next one (default: none).",
    ),
    (("--decode-openengine-port",), "decode.openengine_port", PORT, "The same of decode workers."),
    (("--max-model-len",), "engine.max_model_len", POSITIVE, "Limit of the tokens of one request, prompt and output."),
    (
        ("--max-num-seqs",),
        "engine.max_num_seqs",
        POSITIVE,
        "Limit of the sequences that one worker runs at a time (default 64; decode on a GPU 256).",
    ),
    (
        ("--max-num-batched-tokens",),
        "engine.max_num_batched_tokens",
        POSITIVE,
        "Limit of the tokens of one step (default: prefill 512 on a CPU and 8192 on a GPU, decode 128 and 2048).",
    ),
    (
        ("--speculative-config",),
        "engine.speculative_config",
        JsonSection(),
        'Drafts of next tokens, such as \'{"method": "suffix"}\': ngram, suffix, self or draft_model (default: none).',
    ),
    (("--block-size",), "engine.block_size", POSITIVE, "Number of tokens in one KV block."),
    (
        ("--kv-cache-memory",),
        "engine.kv_cache_memory",
        Bytes(),
        "Size of each worker's KV pool (default 256MiB on a CPU, measured on a GPU).",
    ),
    (
        ("--gpu-memory-utilization",),
        "engine.gpu_memory_utilization",
        SHARE,
        "Share of a GPU's memory that its worker uses (default 0.9).",
    ),
    (
        ("--kv-cache-dtype",),
        "engine.kv_cache_dtype",
        click.Choice(KV_CACHE_DTYPES),
        "dtype of the KV (default auto: the same as --dtype).",
    ),
    (("--dtype",), "engine.dtype", click.Choice(DTYPES), "dtype of the weights, and of the KV unless --kv-cache-dtype is set."),
    (
        ("--quantization",),
        "engine.quantization",
        click.Choice(QUANTIZATIONS),
        "Quantisation of the weights; int8 also rounds the activations that they multiply. KV stays as it is.",
    ),
    (
        ("--tensor-parallel-size", "--tp", "-tp"),
        "engine.tensor_parallel_size",
        DEGREE,
        "Number of ranks that share each layer of a worker's model (default 1).",
    ),
    (
        ("--pipeline-parallel-size", "--pp", "-pp"),
        "engine.pipeline_parallel_size",
        DEGREE,
        "Number of stages into which the layers of a worker's model are cut (default 1).",
    ),
    (
        ("--rank-collective",),
        "engine.rank_collective",
        click.Choice(RANK_COLLECTIVES),
        "How ranks give each other numbers (default auto: shared_memory on CPUs, nccl on GPUs).",
    ),
    (("--device",), "engine.device", click.Choice(DEVICES), "auto takes a GPU (cuda) where there is one, else the CPU."),
    (("--gpus",), "gpus", NOT_NEGATIVE, "Limit of the GPUs that the workers use (default: all); 0 computes on CPUs."),
    (("--transport",), "transfer.transport", str, "Transport of KV: nixl (default), cma, or module:function of your own."),
    (("--placement",), "router.placement", PLACEMENTS, "Where prompts are computed, unless the request names a placement."),
    (
        ("--prefill-policy",),
        "router.prefill_policy",
        str,
        "Choice of the prefill worker: prefix_aware (default), session_affinity, goodput, least_loaded, power_of_two, "
        "round_robin, random, or module:function of your own.",
    ),
    (
        ("--decode-policy",),
        "router.decode_policy",
        str,
        "Choice of the decode worker: the same names, or module:function of your own.",
    ),
    (
        ("--colocate-below-tokens",),
        "router.colocate_below_tokens",
        NOT_NEGATIVE,
        "With placement auto: prompts with fewer uncached tokens than this are computed on the decode worker.",
    ),
    (
        ("--record",),
        "router.record_file",
        click.Path(dir_okay=False),
        "Record what happens to requests in this file, without prompts, for `pdserve replay`.",
    ),
    (
        ("--chat-template",),
        "router.chat_template",
        click.Path(dir_okay=False),
        "File with the chat template, in Jinja (default: the model's own).",
    ),
    (
        ("--tool-call-parser",),
        "router.tool_call_parser",
        click.Choice([AUTO, NONE, *CALL_FORMS]),
        "Form in which the model writes calls of tools (default auto: by its chat template).",
    ),
    (
        ("--reasoning-parser",),
        "router.reasoning_parser",
        click.Choice([AUTO, NONE, *REASONING_SIGNS]),
        "Form in which the model writes its reasoning (default auto: by its chat template).",
    ),
    (("--max-workers",), "autoscaling.max_workers", POSITIVE, "Limit of the workers of both pools together."),
    (
        ("--log-dir",),
        "log_dir",
        click.Path(file_okay=False),
        "Folder of the logs, or stdout for that of a container (default: a temporary one).",
    ),
    (
        ("--start-timeout-s",),
        "start_timeout_s",
        click.FloatRange(min=0, min_open=True),
        "Seconds that a worker may take to load its model, download included (default 1800).",
    ),
    (
        ("--drain-timeout-s",),
        "drain_timeout_s",
        click.FloatRange(min=0, min_open=True),
        "Seconds that a worker which drains waits for requests that find no room elsewhere (default 300).",
    ),
    (("--address",), "address", str, "Ray cluster: local (a private Ray), auto (this node's cluster), or HOST:PORT."),
)
LACKING: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        ("--data-parallel-size",),
        "--prefill and --decode set the numbers of workers",
    ),
    (("--kv-transfer-config",), "the two pools are built in: --prefill, --decode, --transport"),
    (("--enable-auto-tool-choice", "--enable-chunked-prefill"), "it is always on"),
    (("--api-key", "--ssl-keyfile", "--ssl-certfile"), "put a proxy in front (docs/threat-model.md)"),
    (("--tokenizer", "--revision"), "the tokenizer and all else come from the one directory or file of --model"),
    (("--trust-remote-code",), "code of a checkpoint is never run"),
    (("--generation-config",), "only its ids that end a request are read; a request sets its sampling"),
    (("--seed",), "each request has its own seed"),
    (("--max-logprobs",), "the limit is always 20"),
    (("--structured-outputs-config",), "llguidance compiles all grammars"),
    (("--enable-lora", "--cpu-offload-gb"), "this is not built yet (docs/roadmap.md)"),
)
"""Flags of `vllm serve` that do not exist here, each with what to do or to know instead. docs/vllm.md lists them as well."""
SETTING_OF: Final = {flags[0].removeprefix("--").replace("-", "_"): setting for flags, setting, _, _ in FLAGS}


class ClusterCommand(click.Command):
    """A command with the flags of a cluster. It says of a flag that only vLLM has what to do instead."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. click reports what is wrong with them."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            for flags, instead in LACKING:
                if exc.option_name in flags:
                    raise click.UsageError(f"vLLM's {exc.option_name} does not exist here: {instead}.", ctx) from exc
            raise


def cluster_options(command: Command) -> Command:
    """Add --config, --set and every flag of `FLAGS`; the command gets them as keyword arguments."""
    for flags, _, kind, text in reversed(FLAGS):
        name = flags[0].removeprefix("--").replace("-", "_")
        command = click.option(*flags, name, type=kind, default=None, help=text)(command)
    command = click.option(
        "--batch-invariant/--no-batch-invariant",
        default=None,
        help="A request's output does not depend on its batch. [default: on where it is free: compiled bfloat16 and int8]",
    )(command)
    command = click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=None,
        help="Let prompts that begin alike share KV. [default: enabled]",
    )(command)
    command = click.option(
        "--enable-expert-parallel/--no-enable-expert-parallel",
        "-ep",
        default=None,
        help="Give each rank whole experts of a mixture instead of a part of every expert. [default: off]",
    )(command)
    command = click.option(
        "--kv-checksum/--no-kv-checksum",
        default=None,
        help="Verify by checksum that KV was read as it was written. [default: on]",
    )(command)
    command = click.option(
        "--autoscaling/--no-autoscaling",
        default=None,
        help="Let the planner decide how many workers each pool has. [default: off]",
    )(command)
    command = click.option(
        "--set", "overrides", multiple=True, metavar="A.B=C", help="Set any setting of the YAML; wins over flags."
    )(command)
    file = click.Path(dir_okay=False)
    return click.option("--config", "config_file", type=file, default=None, help="YAML file with all settings.")(command)


def cluster_config(
    *,
    config_file: str | None = None,
    overrides: tuple[str, ...] = (),
    batch_invariant: bool | None = None,
    enable_prefix_caching: bool | None = None,
    enable_expert_parallel: bool | None = None,
    kv_checksum: bool | None = None,
    autoscaling: bool | None = None,
    **flags: Any,
) -> ClusterConfig:
    """Read the YAML, then apply the flags, then each --set. Raises `ConfigError` that names the setting."""
    settings = {SETTING_OF[name]: value for name, value in flags.items() if value is not None}
    if batch_invariant is not None:
        settings["engine.batch_invariant"] = batch_invariant
    if enable_prefix_caching is not None:
        settings["engine.enable_prefix_caching"] = enable_prefix_caching
    if enable_expert_parallel is not None:
        settings["engine.enable_expert_parallel"] = enable_expert_parallel
    if kv_checksum is not None:
        settings["lease.kv_checksum"] = kv_checksum
    if autoscaling is not None:
        settings["autoscaling.enabled"] = autoscaling
    if settings.get("router.http_port") == 0:
        settings.setdefault("router.grpc_port", 0)
    drafts = settings.get("engine.speculative_config") or {}
    for section, name in ((settings, "engine.model"), (drafts, "model")):
        model = section.get(name)
        if isinstance(model, str) and model and Path(model).expanduser().exists():  # workers may run in another directory
            section[name] = str(Path(model).expanduser().absolute())
    for name in ("router.record_file", "router.chat_template"):  # the router may run in another directory
        if file := settings.get(name):
            settings[name] = str(Path(file).expanduser().absolute())
    return load(ClusterConfig, config_file, overrides, settings)
