"""`pdserve models`: which families of models there are, which code computes each, and what one model needs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from pdserve.commands.failures import one_line_errors
from pdserve.config import DTYPES, KV_CACHE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from pdserve.core.model_spec import Attention, Mlp, ModelSpec
    from pdserve.engine.ways import Way

YES = "yes"


@click.command(short_help="List the families of models, or describe one model.")
@click.argument("model", required=False)
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="dtype of the weights.")
@click.option(
    "--kv-cache-dtype", type=click.Choice(KV_CACHE_DTYPES), default="auto", show_default=True, help="dtype of the KV."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@one_line_errors
def models(model: str | None, dtype: str, kv_cache_dtype: str, as_json: bool) -> int:
    """List the families of models with the code that computes each, or tell what MODEL needs and which code runs it here.

    MODEL is what `pdserve up --model` takes, or the name of a published model that `pdserve capacity` knows, such as qwen3-8b.
    Its weights are not read, and need not be there.
    """
    from pdserve.commands.console import make_console

    if model is None:
        rows = families()
        shown: Any = rows
        table = _families_table(rows)
    else:
        shown = describe(model, dtype, kv_cache_dtype)
        table = _model_table(shown)
    if as_json:
        click.echo(json.dumps(shown, indent=2))
    else:
        make_console().print(table)
    return 0


def families() -> list[dict[str, Any]]:
    """Return a row for each architecture of the registry, made from its family and from what each backend computes."""
    from pdserve.checkpoint.families.examples import example
    from pdserve.checkpoint.families.registry import FAMILIES, family_of
    from pdserve.engine.ways import ways_of

    rows = []
    for architecture in FAMILIES:
        spec = family_of(architecture).read(example(architecture))
        rows.append({"architecture": architecture, **_kinds(spec), "backends": _plain(ways_of(spec))})
    return rows


def describe(model: str, dtype: str, kv_cache_dtype: str) -> dict[str, Any]:
    """Return what a model needs, and which backend runs it here. Raises `ConfigError`."""
    from pdserve.checkpoint.card import resolve_dtype, resolve_kv_dtype
    from pdserve.core.kv_layout import DTYPE_BITS
    from pdserve.engine.runner import device_of
    from pdserve.engine.ways import ways_of
    from pdserve.text.calls.registry import AUTO, NONE, call_form, reasoning_form

    name, architecture, spec, refused, template = _find(model)
    computed, kv_dtype, device = resolve_dtype(dtype), resolve_kv_dtype(kv_cache_dtype, dtype), device_of("auto")
    ways = ways_of(spec, device=device, dtype=computed, kv_dtype=kv_dtype)
    block_size = 16
    return {
        "model": name,
        "architecture": architecture,
        **_kinds(spec),
        "layers": len(spec.layers),
        "parameters": spec.numbers,
        "max_position": spec.max_position,
        "dtype": computed,
        "weights_bytes": spec.numbers * DTYPE_BITS[computed] // 8,
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": spec.kv_spec(block_size, kv_dtype).block_bytes / block_size,
        "device": device.type,
        "runs_by": next((way.name for way in ways if way.obstacle is None), None),
        "backends": _plain(ways),
        "checkpoint_refused": refused,
        "tool_call_parser": None if template is None else call_form(AUTO, template) or NONE,
        "reasoning_parser": None if template is None else reasoning_form(AUTO, template) or NONE,
    }


def _find(model: str) -> tuple[str, str, ModelSpec, str | None, str | None]:
    """Return the name, the architecture and the spec of a model, the reason why its published checkpoint is refused, and the
    text of its chat template. None for the template: it has none, or its files are not here.

    Raises `ConfigError`, also for a published model that no family reads.
    """
    from pdserve.capacity.model_source import published_model
    from pdserve.checkpoint.card import ModelCard
    from pdserve.checkpoint.families.registry import family_of
    from pdserve.checkpoint.resolve import resolve
    from pdserve.core.errors import ConfigError
    from pdserve.text.chat import ChatTemplate

    published = published_model(model)
    if published is None:
        directory = resolve(model, load_format="dummy")
        card = ModelCard.load(directory, load_format="dummy")
        template = ChatTemplate.load(directory)
        return card.name, card.architecture, card.spec, None, None if template is None else template.text
    name, refused = model.lower(), published.get("refused")
    config = {key: value for key, value in published["config"].items() if key != "quantization_config"}
    if "architectures" not in config:
        raise ConfigError(f"{name} has no family: {refused}")
    (architecture,) = config["architectures"]
    return name, architecture, family_of(architecture).read(config), refused, None


def _plain(ways: Iterable[Way]) -> dict[str, str]:
    return {way.name: YES if way.obstacle is None else way.obstacle for way in ways}


def _kinds(spec: ModelSpec) -> dict[str, str]:
    """Return the kinds of attention and of MLP that the layers have, with the features that a Llama lacks."""
    layers = spec.layers
    of_parts = {feature for layer in layers for part in (layer.attention, layer.mlp) for feature in part.features}
    return {
        "attention": _joined([_attention(layer.attention) for layer in layers]),
        "mlp": _joined([_mlp(layer.mlp) for layer in layers]),
        "others": _joined([feature for feature in spec.features if feature not in of_parts]),
    }


def _attention(attention: Attention) -> str:
    from pdserve.core.model_spec import MlaSpec

    if isinstance(attention, MlaSpec):
        kind, known = "MLA", {"latent attention"}
    else:
        shared = attention.kv_heads < attention.heads
        kind, known = ("MQA" if attention.kv_heads == 1 else "GQA") if shared else "MHA", set[str]()
    return ", ".join([kind, *(feature for feature in attention.features if feature not in known)])


def _mlp(mlp: Mlp) -> str:
    from pdserve.core.model_spec import MoeSpec

    if not isinstance(mlp, MoeSpec):
        return ", ".join(["dense", *mlp.features])
    shared = " and a shared one" if mlp.shared else ""
    return f"{mlp.experts_per_token} of {mlp.experts} experts{shared}"


def _joined(words: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(words))


def _families_table(rows: Sequence[dict[str, Any]]) -> Table:
    from pdserve.commands.tables import table

    made = table("families of models, by small examples", ("architecture",), ())
    made.add_column("attention, MLP, others")
    made.add_column("computed by")
    for row in rows:
        name = row["architecture"].removesuffix("ForCausalLM").replace("ForConditional", "\nForConditional")
        told = row["backends"]
        by = ", ".join(backend for backend, one in told.items() if one == YES)
        refused = [f"{backend}: no, {one}" for backend, one in told.items() if one != YES]
        made.add_row(name, "\n".join(filter(None, (row["attention"], row["mlp"], row["others"]))), "\n".join([by, *refused]))
    return made


def _model_table(found: dict[str, Any]) -> Table:
    from rich.table import Table

    from pdserve.commands.tables import size

    made = Table.grid(padding=(0, 2, 0, 0))
    runs = found["runs_by"] or "nothing here computes it"
    for name in ("model", "architecture", "attention", "mlp", "others", "layers", "max_position"):
        made.add_row(name.replace("_", " "), str(found[name]) or "none")
    made.add_row("parameters", f"{found['parameters']:,}")
    made.add_row("weights", f"{size(found['weights_bytes'])} in {found['dtype']}")
    if found["checkpoint_refused"]:
        made.add_row("published checkpoint", f"refused: {found['checkpoint_refused']}")
    for name in ("tool_call_parser", "reasoning_parser"):
        made.add_row(name.replace("_", " "), found[name] or "unknown: there is no chat template here")
    made.add_row("KV of a token", f"{size(found['kv_bytes_per_token'])} in {found['kv_dtype']}")
    made.add_row(f"runs here ({found['device']}) by", runs, style="bold")
    for name, told in found["backends"].items():
        made.add_row(f"  {name}", told)
    return made
