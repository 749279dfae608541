"""The flags of a request, and the `GenerateRequest` that they make. Flags have the names of the API's fields."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from pdserve.commands.settings import PLACEMENTS, UINT32, Whole
from pdserve.config import ADMIN_PORT
from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import IntRange, RealRange, field_types, limits_of, meanings_of
from pdserve.core.sampling import Placement, SamplingParams

if TYPE_CHECKING:
    from pdserve.rpc.v1 import inference_pb2

Command = TypeVar("Command", bound=Callable[..., Any])
Messages = list[tuple[str, str]]  # (role, content)

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
DEFAULT_ADMIN_ADDRESS: Final = f"127.0.0.1:{ADMIN_PORT}"
SHOWN_CHARS: Final = 20  # of text that is refused
BIAS_HELP: Final = "Add BIAS (-100 to 100) to the logit of the token ID; may be repeated."


def _scalar_options() -> list[Callable[[Command], Command]]:
    """Return the option of each sampling parameter that is one number, as `SamplingParams` declares it."""
    meanings, limits = meanings_of(SamplingParams), limits_of(SamplingParams)
    options = []
    for name, kind in field_types(SamplingParams).items():
        if kind in (int, float):
            wide = kind is int and any(isinstance(one, IntRange) and one.high >> 32 for one in limits.get(name, ()))
            number = float if kind is float else Whole(64) if wide else UINT32
            within = "".join(
                [f" From {one.low:g} to {one.high:g}." for one in limits.get(name, ()) if isinstance(one, RealRange)]
            )
            options.append(click.option(f"--{name.replace('_', '-')}", name, type=number, help=meanings[name] + within))
    return options


def _biases(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, float], ...]:
    """Parse each ID=BIAS to (token id, bias)."""
    biases = []
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            biases.append((int(UINT32(token_id, param, ctx)), float(bias)))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not of the form ID=BIAS", ctx, param) from None
    return tuple(biases)


def address_option(command: Command) -> Command:
    """Add `--address`, the address of the router's gRPC port."""
    text = "gRPC address of the router."
    return click.option("--address", default=DEFAULT_ADDRESS, show_default=True, metavar="HOST:PORT", help=text)(command)


def admin_options(command: Command) -> Command:
    """Add `--address`, the address of the admin port, and `--cluster-token`, which that port wants outside loopback."""
    command = click.option(
        "--cluster-token",
        default="",
        envvar="PDSERVE_CLUSTER_TOKEN",
        show_envvar=True,
        help="Needed where the admin port is not on loopback. Better set the variable: other users can see arguments.",
    )(command)
    text = "Admin address of the router."
    return click.option(
        "--address", "--router", default=DEFAULT_ADMIN_ADDRESS, show_default=True, metavar="HOST:PORT", help=text
    )(command)


def request_options(command: Command) -> Command:
    """Add one option for each field of a request but the prompt. The command gets keyword arguments of the same names."""
    placement = click.option("--placement", type=PLACEMENTS, help="Where the prompt is computed (default: the cluster's).")
    decorators = [
        *_scalar_options(),
        click.option("--stop", multiple=True, help="End the text before this string; may be repeated."),
        click.option("--stop-token-ids", multiple=True, type=UINT32, help="Stop at this token id; may be repeated."),
        click.option("--logit-bias", multiple=True, metavar="ID=BIAS", callback=_biases, help=BIAS_HELP),
        click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token."),
        click.option("--deadline-s", type=float, help="Give the request up after this number of seconds."),
        click.option("--priority", type=click.IntRange(-100, 100), default=0, help="Requests with a larger one go first."),
        click.option("--cache-salt", default="", help="Share KV only with requests that have the same salt."),
        click.option(
            "--slo-class",
            default="",
            help="Class of the request: voice, code, chat, batch, or another one of the cluster's settings.",
        ),
        click.option(
            "--session-id",
            default="",
            help="Name of the conversation, for the policy session_affinity: it sends later turns to the same workers.",
        ),
        click.option(
            "--speculation",
            type=click.Choice(["auto", "off"]),
            help="Speculative decoding, which changes no token: as the workers find it useful, or not at all (default: auto).",
        ),
        click.option(
            "--num-speculative-tokens",
            type=UINT32,
            help="Let a step verify at most so many drafts (0 to 64; default: as the class says).",
        ),
        click.option("--model", default="", help="Fail if the cluster serves another model (default: accept any)."),
        placement,
    ]
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def heed_any_input() -> None:
    """Let bytes on standard input that are no UTF-8 come as lone surrogates, as those of arguments do. `build` refuses them."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _check_utf8(field: str, values: Sequence[str]) -> None:
    """Refuse lone surrogates, which no message can hold."""
    for value in values:
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            shown = ascii(value[exc.start : exc.start + SHOWN_CHARS])
            raise InvalidRequest(f"is not UTF-8 from character {exc.start} on: {shown}", field=field) from exc


def build(
    *,
    text: str | None = None,
    messages: Messages | None = None,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    logit_bias: tuple[tuple[int, float], ...] = (),
    ignore_eos: bool = False,
    deadline_s: float | None = None,
    priority: int = 0,
    cache_salt: str = "",
    slo_class: str = "",
    session_id: str = "",
    speculation: str | None = None,
    num_speculative_tokens: int | None = None,
    model: str = "",
    placement: str | None = None,
    request_id: str = "",
    **scalars: Any,
) -> inference_pb2.GenerateRequest:
    """Build a request with a text prompt, or with a chat prompt when `messages` is given.

    Flags that were not given stay unset, so the server's defaults hold.
    """
    from pdserve.rpc import codec
    from pdserve.rpc.v1 import common_pb2, inference_pb2

    prompts = [text or "", *(content for _, content in messages or ())]
    texts = {"prompt": prompts, "stop": stop, "cache_salt": [cache_salt], "model": [model], "request_id": [request_id]}
    texts |= {"slo_class": [slo_class], "session_id": [session_id]}
    for field, values in texts.items():
        _check_utf8(field, values)
    sampling = common_pb2.SamplingParams(
        stop=stop,
        stop_token_ids=stop_token_ids,
        logit_bias=dict(logit_bias),
        ignore_eos=ignore_eos,
        **{name: value for name, value in scalars.items() if value is not None},
    )
    request = inference_pb2.GenerateRequest(
        request_id=request_id,
        model=model,
        sampling=sampling,
        priority=priority,
        cache_salt=cache_salt,
        slo_class=slo_class,
        session_id=session_id,
        speculation=speculation,
        num_speculative_tokens=num_speculative_tokens,
        placement=codec.placement_to_wire(Placement(placement) if placement else None),
    )
    if deadline_s is not None:
        request.deadline_s = deadline_s
    if messages is not None:
        request.chat.messages.extend(inference_pb2.ChatMessage(role=role, content=content) for role, content in messages)
    else:
        request.text = text or ""
    return request
