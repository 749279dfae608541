"""`pdserve capacity`: what a model needs on named GPUs, by formulas, before anything runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdserve.commands.failures import one_line_errors

if TYPE_CHECKING:
    from pdserve.capacity.answer import CapacityAnswer
    from pdserve.capacity.question import CapacityQuestion


@click.command(short_help="Tell what a model needs on named GPUs, by formulas.")
@click.option("--model", required=True, metavar="NAME", help="Directory, .gguf file, Hugging Face id, or a published name.")
@click.option("--gpu", required=True, metavar="NAME", help="A GPU by name, such as h100-sxm; a wrong name lists all.")
@click.option("--gpus", type=int, default=8, show_default=True, help="GPUs of all workers together.")
@click.option("--tensor-parallel-size", "-tp", "--tp", "tp", type=int, help="GPUs that share a layer.  [default: the best]")
@click.option("--pipeline-parallel-size", "-pp", "--pp", "pp", type=int, default=1, help="Stages of a worker.  [default: 1]")
@click.option("--enable-expert-parallel", "experts", is_flag=True, help="GPUs have whole experts of a mixture.")
@click.option("--prefill-tensor-parallel-size", "--prefill-tp", "prefill_tp", type=int, help="Another one for prefill workers.")
@click.option(
    "--prefill-pipeline-parallel-size", "--prefill-pp", "prefill_pp", type=int, help="Another one for prefill workers."
)
@click.option("--gpus-per-node", type=int, default=8, show_default=True, help="GPUs of one machine.")
@click.option("--node-link", default="400gbe", show_default=True, metavar="NAME|RATE", help="Network of a node, all its cards.")
@click.option("--isl", type=int, default=2048, show_default=True, metavar="TOKENS", help="Prompt tokens.")
@click.option("--osl", type=int, default=256, show_default=True, metavar="TOKENS", help="Output tokens.")
@click.option("--ttft", type=float, default=1.0, show_default=True, metavar="S", help="Target for the first token.")
@click.option("--tpot", type=float, default=0.05, show_default=True, metavar="S", help="Target for each other token.")
@click.option("--attainment", type=float, default=0.9, show_default=True, help="Share of requests within each target.")
@click.option("--users", type=int, help="Find the longest context for so many users at once.")
@click.option("--context", type=int, metavar="TOKENS", help="Find the most users with this context.  [default: isl + osl]")
@click.option("--dtype", default="bfloat16", show_default=True, help="bfloat16, float16 or float32.")
@click.option("--quantization", default="auto", show_default=True, help="Weights: none, fp8, int8, int4, or as published.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="fp32, bf16, fp16, fp8_e4m3, int8 or int4.")
@click.option("--num-kv-heads", type=int, help="What if the model had fewer KV heads.")
@click.option("--link", metavar="NAME|RATE", help="nvlink, pcie, 400gbe, 200gbe, 100gbe, 25gbe, or a rate such as 12.5GB/s.")
@click.option("--price-per-hour", type=float, metavar="DOLLARS", help="Price of one GPU.  [default: an example]")
@click.option("--gpu-memory-utilization", type=float, default=0.9, show_default=True, help="Share that is used.")
@click.option("--max-num-batched-tokens", type=int, default=8192, show_default=True, help="Most tokens of a step.")
@click.option("--compute-share", type=float, default=0.5, show_default=True, help="Share of peak compute that is reached.")
@click.option("--bandwidth-share", type=float, default=0.6, show_default=True, help="Share of memory bandwidth.")
@click.option("--link-share", type=float, default=0.8, show_default=True, help="Share of the link's rate.")
@click.option("--gpu-tflops", type=float, help="Replace the peak of the GPU.")
@click.option("--gpu-bandwidth-gb-s", type=float, help="Replace the bandwidth of the GPU's memory.")
@click.option("--gpu-memory-gb", type=float, help="Replace the size of the GPU's memory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw steps and links.")
@one_line_errors
def capacity(as_json: bool, plot: Path | None, **flags: Any) -> int:
    """Tell what a model needs and serves: memory, batch sizes, pools, links and cost.

    All numbers come from formulas and data sheets; docs/capacity.md says how far to trust them.
    """
    from pdserve.capacity.answer import answer

    question = _question(**flags)
    found = answer(question)
    if plot is not None:
        from pdserve.capacity.plot import draw

        draw(plot, question, found)
    if as_json:
        click.echo(json.dumps(plain(question, found), indent=2, allow_nan=False))
    else:
        from pdserve.commands.capacity.tables import report
        from pdserve.commands.console import make_console

        make_console().print(report(question, found))
    return 0


def plain(question: CapacityQuestion, found: CapacityAnswer) -> dict[str, Any]:
    """Return question and answer as JSON has them. Fields carry their units."""
    asked = {field.name: getattr(question, field.name) for field in dataclasses.fields(question)}
    asked |= {"model": question.model.name, "gpu": question.gpu.name, "gpu_source": question.gpu.source}
    asked["shares"] = dataclasses.asdict(question.shares)
    result = dataclasses.asdict(found)
    result["memory"]["kv_bytes"] = found.memory.kv_bytes
    return {"question": asked, "parameters": question.model.shape.numbers, "answer": result}


def _question(
    *,
    model: str,
    gpu: str,
    num_kv_heads: int | None,
    ttft: float,
    tpot: float,
    compute_share: float,
    bandwidth_share: float,
    link_share: float,
    gpu_tflops: float | None,
    gpu_bandwidth_gb_s: float | None,
    gpu_memory_gb: float | None,
    **rest: Any,
) -> CapacityQuestion:
    from pdserve.capacity.devices import device
    from pdserve.capacity.model_source import find_model
    from pdserve.capacity.question import CapacityQuestion, CapacityShares, changed

    shares = CapacityShares(compute_share, bandwidth_share, link_share)
    own = changed(device(gpu), tflops=gpu_tflops, bandwidth_gb_s=gpu_bandwidth_gb_s, memory_gb=gpu_memory_gb)
    return CapacityQuestion(find_model(model, num_kv_heads), own, shares=shares, ttft_s=ttft, tpot_s=tpot, **rest)
