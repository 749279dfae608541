"""Decode steps of the whole engine beside the bytes that they must read, and its prefill beside the operations that it must do.

The goals are decode at 75 % of the memory's rate, and prefill of 2,048 tokens at 55 % of the nominal peak of matrix products.
"""

from __future__ import annotations

from pdserve.core.step_plan import GREEDY, StepPlan
from tools.gpu.machine import machine
from tools.gpu.row import Row, Setup, wall_s
from tools.gpu.shapes import card, make_runner, matrix_bytes, plan

CONTEXT = 2048


def run_decode(setup: Setup) -> None:
    """Time decode steps as the engine's caller sees them: tables, replay, head, drawing, and the wait for the tokens."""
    shape = card("rehearsal" if setup.rehearsed else "8b")
    context, batches = (20, (1, 3)) if setup.rehearsed else (CONTEXT, (1, 8, 32, 128))
    room = context + 16
    runner = make_runner(setup, shape, sequences=max(batches), room=room)
    bytes_s = machine(setup).bytes_s
    for batch in batches:
        step = plan(shape, range(batch), start=context - 1, count=1, room=room)
        took_s = wall_s(lambda step=step: runner.execute(step))
        kv_bytes = batch * context * runner.kv.spec.bytes_per_token
        floor_s = (matrix_bytes(shape, runner) + kv_bytes) / bytes_s
        case = f"{shape.name}, B={batch}, {context} positions"
        beside_floor("decode", case, took_s, floor_s, "bytes", f"{batch / took_s:,.0f} tokens/s; goal 75 %").emit()
        for drafts in (1, 3) if setup.rehearsed else (1, 3, 7):
            if batch * (1 + drafts) > max(batches):
                continue
            verifying = plan(shape, range(batch), start=context - 1, count=1 + drafts, room=room)
            step = StepPlan(tuple([piece._replace(samples=(GREEDY,) * (1 + drafts)) for piece in verifying.slices]))
            verified_s = wall_s(lambda step=step: runner.execute(step))
            alone = f"{took_s * 1e3:.2f} ms without"
            note = "rows of drafts are decodes, so a recording is replayed"
            ratio = f"{verified_s / took_s:.2f}"
            Row("decode", f"{case}, drafts {drafts}", f"{verified_s * 1e3:.2f} ms", alone, ratio, note).emit()


def run_prefill(setup: Setup) -> None:
    """Time the prefill of one prompt."""
    for name in ("rehearsal",) if setup.rehearsed else ("8b", "1b"):
        shape = card(name)
        tokens = 40 if setup.rehearsed else CONTEXT
        runner = make_runner(setup, shape, sequences=1, room=tokens)
        step = plan(shape, range(1), start=0, count=tokens, room=tokens)
        took_s = wall_s(lambda step=step, runner=runner: runner.execute(step), runs=3)
        head = shape.vocab_size * shape.spec.hidden_size
        layers = matrix_bytes(shape, runner) // 2 - head
        scores = 2 * sum(layer.attention.query_width for layer in shape.spec.layers) * tokens * (tokens + 1)
        floor_s = (2 * (layers * tokens + head) + scores) / machine(setup).flops_s
        note = f"{tokens / took_s:,.0f} tokens/s; goal 55 %"
        beside_floor("prefill", f"{shape.name}, {tokens} tokens", took_s, floor_s, "operations", note).emit()
        del runner


def beside_floor(part: str, case: str, took_s: float, floor_s: float, of: str, note: str) -> Row:
    """Return the row that compares a time with its floor."""
    return Row(part, case, f"{took_s * 1e3:.2f} ms", f"{floor_s * 1e3:.2f} of {of}", f"{floor_s / took_s:.0%}", note)
