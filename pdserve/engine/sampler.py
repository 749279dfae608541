"""Draws tokens from logits: all rows of a step together, on any device, with the same result on each.

Each row goes through these steps. Its log-probabilities are taken where they are asked for. Then bias, penalties, bans and
the mask of its grammar are applied. Then a greedy row takes the largest logit; other rows apply temperature, top-k, top-p and
min-p, each to the renormalised result of the step before. The remaining ids are ordered by id, and the draw `uniform(seed,
output_index)` is inverted through their cumulative sum. So a row's token depends only on its logits and its `SampleSpec`.
When probabilities are equal at the edge of a filter, lower ids are kept first.

Two programs draw the same token for this reason: a weight is float32, made of single multiplications and additions in one
order, and rounded to a multiple of 2^-34. So sums of up to 2^19 weights are exact in float64 in any order, on a GPU and in
native/draw.h alike. Ids that are less than 3e-11 times as likely as the likeliest are never drawn.

When the largest logit of a row is not a finite number, before or after its edits, the row gets no token (`NO_TOKEN`). Other
rows are not affected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import repeat
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pdserve.core.sampling import LogitEdits, SamplingParams, TokenLogprobs, uniform
from pdserve.core.step_plan import GREEDY, NO_TOKEN, Sampled, SampleSpec
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.engine.models.api import Samples

# Masks of grammars ----------------------------------------------------------------------------------------------------
#
# Masks of the tokens that grammars allow: they are computed while the model runs, and applied to the logits before a draw.
#
# A mask depends only on the tokens before the step, so the step does not wait for a mask that takes less time than the model.
# One thread computes the masks of a step, one after the other, without the interpreter lock.


class MaskThread:
    """The thread of one engine, which the first step with a mask starts. It ends with the engine."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def computing(self, specs: Sequence[SampleSpec]) -> AbstractContextManager[None]:
        """Compute the masks of these samples during the body. They are known, and no thread uses a grammar, after it.

        The grammars belong to the engine thread again when the body ends, also with an exception.
        """
        grammars = []
        for spec in specs:
            if spec.grammar is not None:
                grammars.append(spec.grammar)  # noqa: PERF401  a comprehension is a call, and this runs in each step
        return self._computing(grammars) if grammars else nullcontext()

    @contextmanager
    def _computing(self, grammars: Sequence[GrammarState]) -> Iterator[None]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        computed = self._executor.submit(_compute, grammars)
        try:
            yield
        finally:
            computed.result()


def _compute(grammars: Sequence[GrammarState]) -> None:
    for grammar in grammars:
        grammar.mask()


def apply_mask(row: Tensor, mask: bytes) -> None:
    """Set the logits of all tokens that a mask does not allow to minus infinity. row: [vocab] float32, changed in place.

    mask: bit i % 8 of byte i // 8 belongs to token id i. The mask has a bit for each token, and may have more bits.
    """
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=len(row), bitorder="little")
    row.masked_fill_(torch.from_numpy(bits == 0).to(row.device), -torch.inf)


ROWS_AT_ONCE: Final = 32
"""Rows that are computed at once. A row needs about 40 bytes of working memory for each id: 32 rows of 150,000 ids need 200
MiB."""

LEAST_LOGPROB: Final = -9999.0  # vLLM's stand-in for minus infinity, which JSON cannot write
_COARSE: Final = 2.0**-11  # float32 has steps of 2^-34 there
_POLYNOMIAL: Final = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def all_greedy(specs: Sequence[SampleSpec]) -> bool:
    """Tell whether all these draws are plainly greedy: they need only the largest logit of each row."""
    for spec in specs:  # noqa: SIM110  a generator takes twice the time, and this runs in each step
        if spec is not GREEDY and (spec.scored is not None or _needs_logits(spec)):
            return False
    return True


def _needs_logits(spec: SampleSpec) -> bool:
    return bool(not spec.params.plainly_greedy or spec.banned_ids or spec.grammar is not None)


def sample(
    logits: Tensor, specs: Sequence[SampleSpec], best: list[int] | None = None, fast: Samples | None = None
) -> list[Sampled]:
    """Draw a token for each row; a row without a finite largest logit gets `NO_TOKEN`.

    logits: [rows, vocab] float32, a row for each spec; rows with edits or banned ids may be changed in place. best and fast:
    `best` and `sample` of `Logits`, or None. Plainly greedy rows need only `best`.
    """
    assert best is None or len(best) == len(specs)
    others: list[int] = []
    scored: list[int] = []
    for i, spec in enumerate(specs):
        if spec is GREEDY:
            continue
        if spec.scored is not None:
            scored.append(i)
        elif _needs_logits(spec):
            others.append(i)
    if best is None:
        best = best_ids(logits).tolist() if len(others) < len(specs) else [0] * len(specs)
    taken: list[Sampled] = list(zip(best, repeat(None)))
    if others and NO_TOKEN in best:
        others = [i for i in others if best[i] != NO_TOKEN]
    if others:
        take = fast or partial(_take_all, logits)
        for i, result in zip(others, take(others, [specs[i] for i in others]), strict=True):
            taken[i] = result
    if scored and NO_TOKEN in best:
        scored = [i for i in scored if best[i] != NO_TOKEN]
    for start in range(0, len(scored), ROWS_AT_ONCE):
        rows = scored[start : start + ROWS_AT_ONCE]
        ids = [specs[i].scored or 0 for i in rows]  # the prompt token that follows each row
        found = _logprobs(logits[rows], ids, [specs[i].params.prompt_logprobs or 0 for i in rows])
        for i, token, logprobs in zip(rows, ids, found, strict=True):
            taken[i] = token, logprobs
    return taken


def best_ids(logits: Tensor) -> Tensor:
    """Return the lowest id of each row's largest logit: [rows]; `NO_TOKEN` where this logit is not a finite number.

    Torch's argmax takes NaN for the largest, so a row with a NaN gets `NO_TOKEN`.
    """
    ids = logits.argmax(dim=-1, keepdim=True)
    return torch.where(logits.gather(-1, ids).isfinite(), ids, NO_TOKEN)[:, 0]


def _take_all(logits: Tensor, rows: list[int], specs: list[SampleSpec]) -> list[Sampled]:
    taken: list[Sampled] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        end = start + ROWS_AT_ONCE
        taken += _take(logits[rows[start:end]], specs[start:end])
    return taken


def _take(logits: Tensor, specs: list[SampleSpec]) -> list[Sampled]:
    """Draw a token for each row. logits: a copy, [rows, vocab], which is changed in place."""
    asking = [i for i, spec in enumerate(specs) if spec.params.logprobs is not None]
    raw = logits[asking]
    edited = any(spec.edits is not None or spec.banned_ids or spec.grammar is not None for spec in specs)
    usable = logits.amax(dim=1).isfinite() if edited else None  # an edit could hide that they are not finite
    for row, spec in zip(logits, specs, strict=True):
        _edit(row, spec)
    best = best_ids(logits)
    if usable is not None:
        best = torch.where(usable, best, NO_TOKEN)
    ids: list[int] = best.tolist()
    drawn = [i for i, spec in enumerate(specs) if not spec.params.greedy and ids[i] != NO_TOKEN]
    if drawn:
        for i, token_id in zip(drawn, _draw(logits[drawn], [specs[i] for i in drawn]), strict=True):
            ids[i] = token_id
    if NO_TOKEN in ids:
        raw = raw[[k for k, i in enumerate(asking) if ids[i] != NO_TOKEN]]
        asking = [i for i in asking if ids[i] != NO_TOKEN]
    found = _logprobs(raw, [ids[i] for i in asking], [specs[i].params.logprobs or 0 for i in asking])
    by_row = dict(zip(asking, found, strict=True))
    return [(token_id, by_row.get(i)) for i, token_id in enumerate(ids)]


# Log-probabilities


def _logprobs(raw: Tensor, ids: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of each row, for its id and for its `counts[i]` most likely ids.

    raw: [rows, vocab], the logits before any edit.
    """
    if not ids:
        return []
    largest = raw.amax(dim=1)
    sums = weigh(raw, [1.0] * len(ids)).double().sum(dim=1).tolist()
    picked = raw.gather(1, torch.tensor(ids, device=raw.device)[:, None])[:, 0]
    below = (picked - largest).tolist()
    return [
        TokenLogprobs(
            _single(below[i] - math.log(sums[i])), _likeliest(raw[i], float(largest[i]), math.log(sums[i]), counts[i])
        )
        for i in range(len(ids))
    ]


def _likeliest(row: Tensor, largest: float, logsum: float, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    edge = row.topk(min(count, len(row))).values[-1]
    ids = (row >= edge).nonzero()[:, 0]
    found = sorted(zip(row[ids].tolist(), ids.tolist(), strict=True), key=lambda one: (-one[0], one[1]))[:count]
    return tuple((token_id, _single(float(np.float32(value) - np.float32(largest)) - logsum)) for value, token_id in found)


def _single(value: float) -> float:
    return float(np.float32(max(value, LEAST_LOGPROB)))


# Edits


def _edit(row: Tensor, spec: SampleSpec) -> None:
    """Apply bias, penalties, bans and the mask to a row [vocab] in place. Ids outside the vocabulary are skipped."""
    assert (spec.edits is not None) == spec.params.edits_logits
    if spec.edits is not None:
        _add_bias(row, spec.edits)
        _penalise(row, spec.edits, spec.params)
    if banned := [token_id for token_id in spec.banned_ids if 0 <= token_id < len(row)]:
        row[banned] = -torch.inf
    if spec.grammar is not None:
        _mask(row, spec)


def _mask(row: Tensor, spec: SampleSpec) -> None:
    """Apply the mask of the spec's grammar to a row [vocab] in place. A grammar that has failed allows no token."""
    assert spec.grammar is not None
    mask = spec.grammar.mask()
    if mask is None:
        row.fill_(-torch.inf)
    else:
        apply_mask(row, mask)


def _add_bias(row: Tensor, edits: LogitEdits) -> None:
    bias = {token_id: value for token_id, value in zip(edits.bias_ids, edits.bias, strict=True) if token_id < len(row)}
    if bias:
        ids = torch.tensor(list(bias), device=row.device)
        row[ids] = row[ids] + torch.tensor(list(bias.values()), device=row.device)


def _penalise(row: Tensor, edits: LogitEdits, params: SamplingParams) -> None:
    """Apply the penalties in place, in float32. Each operation is rounded by itself, in the order of native/src/take.h."""
    seen = torch.tensor([edits.seen_ids.tolist(), edits.output_counts.tolist()], dtype=torch.int64, device=row.device)
    ids, counts = seen[:, seen[0] < len(row)]
    repetition = torch.tensor([params.repetition_penalty], device=row.device)  # CUDA divides by a Python number inexactly
    x = row[ids]
    x = torch.where(x > 0, x / repetition, x * repetition)
    lowered = (x - counts.float() * params.frequency_penalty) - params.presence_penalty
    row[ids] = torch.where(counts > 0, lowered, x)


# Draws


def _draw(logits: Tensor, specs: list[SampleSpec]) -> list[int]:
    """Draw the id of each row. No row is greedy."""
    weights = distribution(logits, [spec.params for spec in specs])
    cumulative = weights.double().cumsum(dim=1)
    total = cumulative[:, -1:].contiguous()
    numbers = [uniform(spec.params.seed, spec.output_index) for spec in specs]
    target = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None] * total
    found = torch.searchsorted(cumulative, target, right=True)  # the first id with cumulative > target: its weight is > 0
    last = torch.searchsorted(cumulative, total)  # the last id with a weight, for a target that was rounded up to the total
    ids: list[int] = torch.minimum(found, last)[:, 0].tolist()
    return ids


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the weights that tokens are drawn with: [rows, vocab] float32. No row is greedy.

    The weights of a row are its probabilities times one factor.
    """
    weights = weigh(logits, [one.temperature for one in params])
    filtered = [i for i, one in enumerate(params) if one.top_k or one.top_p < 1.0 or one.min_p]
    if filtered:
        weights[filtered] = _filtered(weights[filtered], [params[i] for i in filtered])
    return weights


def weigh(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return e^((x - largest) / temperature) of each row, with the bits of `weight_lanes` in native/src/draw.h."""
    inverse = np.float32(1.0) / np.maximum(np.asarray(temperatures, dtype=np.float32), np.float32(1e-30))
    x = (logits - logits.amax(dim=1, keepdim=True)) * torch.from_numpy(inverse).to(logits.device)[:, None]
    counts = x >= -25.0
    x = torch.where(counts, x, 0.0)
    turns = (x * 1.44269504089).round()
    rest = x - turns * 0.693359375
    rest = rest + turns * 2.12194440e-4
    power = torch.full_like(rest, _POLYNOMIAL[0])
    for factor in _POLYNOMIAL[1:]:
        power = power * rest + factor
    power = (rest * rest) * power + (rest + 1.0)
    power = power * ((turns.int() + 127) << 23).view(torch.float32)  # 2^turns
    power = torch.where(power < _COARSE, (power + _COARSE) - _COARSE, power)
    return torch.where(counts, power, 0.0)


def _filtered(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set the weights that top-k, top-p and min-p remove to 0.

    Each filter keeps a number of the largest weights, so all filters together keep the smallest of these numbers.
    """
    vocab = weights.shape[1]
    ordered = weights.sort(dim=1, descending=True).values
    sums = ordered.double().cumsum(dim=1)
    column = partial(torch.tensor, device=weights.device)
    count = column([[one.top_k if 0 < one.top_k < vocab else vocab] for one in params])
    share = column([[one.top_p] for one in params], dtype=torch.float64)
    least = column([[one.min_p] for one in params], dtype=torch.float64)
    reached = (sums < share * sums.gather(1, count - 1)).sum(dim=1, keepdim=True) + 1
    count = torch.minimum(count, torch.where(share < 1.0, reached, vocab))
    count = torch.minimum(count, (ordered.double() >= least).sum(dim=1, keepdim=True))  # the largest is 1
    edge = ordered.gather(1, count - 1)
    above, level = weights > edge, weights == edge
    room = count - above.sum(dim=1, keepdim=True)
    return torch.where(above | (level & (level.cumsum(dim=1) <= room)), weights, 0.0)
