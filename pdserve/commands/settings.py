"""The flags that override the YAML, each beside the setting it writes. Names are those that vLLM's users know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from pdserve.config import DEVICES, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, ClusterConfig, load
from pdserve.core.sampling import Placement
from pdserve.core.setting_types import parse_bytes

Command = TypeVar("Command", bound=Callable[..., Any])


class Bytes(click.ParamType[int]):
    """A size: bytes, or a number with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


PORT: Final = click.IntRange(0, 65535)
POSITIVE: Final = click.IntRange(min=1)
SHARE: Final = click.FloatRange(0, 1, min_open=True)
NOT_NEGATIVE: Final = click.IntRange(min=0)
PLACEMENTS: Final = click.Choice([placement.value for placement in Placement])

# (flags, setting, type, help)
FLAGS: Final[tuple[tuple[tuple[str, ...], str, Any, str], ...]] = (
    (("--prefill",), "prefill.replicas", NOT_NEGATIVE, "Workers of the prefill pool; 0: all requests run colocated."),
    (("--decode",), "decode.replicas", POSITIVE, "Workers of the decode pool."),
    (("--model",), "engine.model", str, "default, tiny, a directory, a GGUF file or a Hugging Face id."),
    (("--served-model-name",), "engine.served_model_name", str, "What clients call the model."),
    (("--host",), "router.host", str, "Where clients connect (default 127.0.0.1)."),
    (("--http-port", "--port"), "router.http_port", PORT, "HTTP (default 8000); 0: any, and then gRPC takes any as well."),
    (("--grpc-port",), "router.grpc_port", PORT, "gRPC (default 50051); 0: any."),
    (("--admin-port",), "router.admin_port", PORT, "For `pdserve status` and `drain` (default 50053); 0: any."),
    (("--link-port",), "router.link_port", PORT, "Where workers dial the router (default 0: any)."),
    (("--max-model-len",), "engine.max_model_len", POSITIVE, "Prompt and output tokens of one request."),
    (("--max-num-seqs",), "engine.max_num_seqs", POSITIVE, "Sequences that one worker runs at once."),
    (
        ("--max-num-batched-tokens",),
        "engine.max_num_batched_tokens",
        POSITIVE,
        "Token budget of one step (CPU: 512, GPU: 8192).",
    ),
    (("--block-size",), "engine.block_size", POSITIVE, "Tokens in one KV block."),
    (("--kv-cache-memory",), "engine.kv_cache_memory", Bytes(), "KV pool of each worker; CPU: default 256MiB; GPU: measured."),
    (("--gpu-memory-utilization",), "engine.gpu_memory_utilization", SHARE, "Of a GPU for its worker (default 0.9)."),
    (("--kv-cache-dtype",), "engine.kv_cache_dtype", click.Choice(KV_CACHE_DTYPES), "Of KV (default auto: as --dtype)."),
    (("--dtype",), "engine.dtype", click.Choice(DTYPES), "Of weights and, unless set apart, KV."),
    (("--quantization",), "engine.quantization", click.Choice(QUANTIZATIONS), "Of weights and what meets them; KV stays."),
    (("--device",), "engine.device", click.Choice(DEVICES), "auto: cuda where there is one, else cpu."),
    (("--placement",), "router.placement", PLACEMENTS, "Where prompts are computed unless the request says."),
    (("--colocate-below-tokens",), "router.colocate_below_tokens", NOT_NEGATIVE, "auto: shorter prompts stay on decode."),
    (("--log-dir",), "log_dir", click.Path(file_okay=False), "Folder of the logs (default: a temporary one)."),
    (("--address",), "address", str, "Ray cluster: local (its own), auto, or HOST:PORT."),
)
SETTING_OF: Final = {flags[0].removeprefix("--").replace("-", "_"): setting for flags, setting, _, _ in FLAGS}


def cluster_options(command: Command) -> Command:
    """Add --config, --set and every flag of `FLAGS`; the command gets them as keyword arguments."""
    for flags, _, kind, text in reversed(FLAGS):
        name = flags[0].removeprefix("--").replace("-", "_")
        command = click.option(*flags, name, type=kind, default=None, help=text)(command)
    command = click.option(
        "--batch-invariant/--no-batch-invariant",
        default=None,
        help="Same bits in every batch. [default: where it is free: bfloat16 and int8 in compiled steps]",
    )(command)
    command = click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=None,
        help="Prompts that begin alike share KV. [default: enabled]",
    )(command)
    command = click.option(
        "--kv-checksum/--no-kv-checksum",
        default=None,
        help="Use KV only if it was read as it was written. [default: on]",
    )(command)
    command = click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Any setting of the YAML; last word.")(
        command
    )
    file = click.Path(dir_okay=False)
    return click.option("--config", "config_file", type=file, default=None, help="YAML of the whole cluster.")(command)


def cluster_config(
    *,
    config_file: str | None = None,
    overrides: tuple[str, ...] = (),
    batch_invariant: bool | None = None,
    enable_prefix_caching: bool | None = None,
    kv_checksum: bool | None = None,
    **flags: Any,
) -> ClusterConfig:
    """The YAML, then the flags, then --set. Raises `ConfigError` naming the setting."""
    settings = {SETTING_OF[name]: value for name, value in flags.items() if value is not None}
    if batch_invariant is not None:
        settings["engine.batch_invariant"] = batch_invariant
    if enable_prefix_caching is not None:
        settings["engine.enable_prefix_caching"] = enable_prefix_caching
    if kv_checksum is not None:
        settings["lease.kv_checksum"] = kv_checksum
    if settings.get("router.http_port") == 0:
        settings.setdefault("router.grpc_port", 0)
    model = settings.get("engine.model")
    if model and Path(model).expanduser().exists():  # workers may run in another directory
        settings["engine.model"] = str(Path(model).expanduser().absolute())
    return load(ClusterConfig, config_file, overrides, settings)
