"""The engine beside transformers' continuous batching: the same shape, prompts and outputs, random weights on both sides.

Our side runs the engine's steps in the scheduler's order, without router and worker; theirs is `generate_batch`.
"""

from __future__ import annotations

import gc
import time

import torch

from pdserve.checkpoint.families.llama import llama_layers
from tools.gpu.row import Row, Setup
from tools.gpu.shapes import card, make_runner, plan

STEP_TOKENS = 4096


def run(setup: Setup) -> None:
    """Measure both sides and show their rates. A rehearsal measures our side alone."""
    name, requests, prompt, output = ("rehearsal", 2, 12, 3) if setup.rehearsed else ("1b", 64, 512, 128)
    case = f"{name}, {requests} x ({prompt} + {output})"
    ours = ours_tokens_s(setup, name, requests, prompt, output)
    note = "generate_batch takes all memory of a CPU: left out" if setup.rehearsed else ""
    Row("peer", case, f"{ours:,.0f} tokens/s", note=note).emit()
    if setup.rehearsed:
        return
    gc.collect()  # frees our graphs and pool: the peer sizes its own by the free memory
    torch.cuda.empty_cache()
    theirs = transformers_tokens_s(setup, name, requests, prompt, output)
    Row("peer", "the same", f"{ours:,.0f} tokens/s", f"{theirs:,.0f} generate_batch", f"{ours / theirs:.2f} x").emit()


def ours_tokens_s(setup: Setup, name: str, requests: int, prompt: int, output: int) -> float:
    """Return the output tokens a second of our engine, in its second run."""
    shape, room = card(name), prompt + output
    runner = make_runner(setup, shape, sequences=requests, room=room)
    a_step = max(1, STEP_TOKENS // prompt)

    def serve() -> None:
        for first in range(0, requests, a_step):
            runner.execute(plan(shape, range(first, min(first + a_step, requests)), start=0, count=prompt, room=room))
        for position in range(prompt, room - 1):
            runner.execute(plan(shape, range(requests), start=position, count=1, room=room))

    serve()
    began_s = time.perf_counter()
    serve()
    return requests * output / (time.perf_counter() - began_s)


def transformers_tokens_s(setup: Setup, name: str, requests: int, prompt: int, output: int) -> float:
    """Return the output tokens a second of transformers, in its second run. Raises `SystemExit` when tokens are missing."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    shape = card(name)
    spec = shape.spec
    attention, mlp = next(llama_layers(spec))
    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=mlp.intermediate,
        num_hidden_layers=len(spec.layers), num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads, head_dim=attention.qk_dim,
        max_position_embeddings=spec.max_position, tie_word_embeddings=spec.tied_head,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    with torch.device(setup.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    settings = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[(7 + 31 * i + j) % shape.vocab_size for j in range(prompt)] for i in range(requests)]

    def serve() -> int:
        done = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
        return sum(len(result.generated_tokens) for result in done.values())

    if serve() != requests * output:
        raise SystemExit("generate_batch gave another number of tokens than asked for")
    began_s = time.perf_counter()
    tokens = serve()
    return tokens / (time.perf_counter() - began_s)
