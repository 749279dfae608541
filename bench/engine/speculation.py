"""Measures decode with and without speculative decoding, on texts of several kinds and batches of several sizes.

    python -m bench.engine.speculation [--method suffix] [--quantization int8] [--batches 1 4 16 32] [--kinds chat copy ...]
    python -m bench.engine.speculation --method self --perturb 0.01

The model first answers all texts greedily (`speculation_texts.py`). An answer ends where it begins to repeat itself, since a
small model often does so until it is stopped, which flatters every drafter; and a copy ends where it leaves its text. Then each
round serves each kind at each batch size three times, in an order that changes: without speculation, with a choice of drafts
that knows nothing yet (cold), and with one that has served all rounds before, of all kinds and sizes in mixed order (warm).
Every token is compared with the first answer.

B sequences always decode: where one ends, the next text begins. Only steps that compute no prompt count. Lookups find nothing
in texts that have ended, since the benchmark serves each of them several times. A ratio is that of tokens a second, by rounds,
with its 95 % interval: by the CPU time of the engine's thread, which a busy machine disturbs less, and by wall time.

--perturb adds Gaussian noise to each matrix of weights, of so many of its root mean squares. The default model had 4-bit
weights once, so a copy in int4 drafts better than that of other models; noise takes this away.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from shutil import copytree
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from bench.engine.floors import cpu_name
from bench.engine.lookup import AnsweredChat
from bench.engine.speculation_texts import HALVES, KINDS, Text, copied, of_kind
from bench.ratios import Ratio, ratio
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig, SpeculativeConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.drafting.choice import DraftChoice
from pdserve.engine.drafting.setup import make_choice
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind
from pdserve.structured.compiler import Compiler
from pdserve.structured.vocabulary import Vocabulary
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.engine_thread import EngineSteps
from pdserve.worker.messages import Abort

BATCHES: Final = (1, 4, 16, 32)
METHODS: Final = ("suffix", "ngram", "self", "draft_model")
MOST_TEXTS: Final = 12
LEAST_TOKENS: Final = 24
"""Shorter answers are left out: most of their steps would be those of others' prompts."""
RUN_STEPS: Final = 64
"""So many steps take about a second. Their last part, when fewer sequences decode, does not count."""
MODES: Final = ("off", "cold", "warm")
LEAST_RATIO: Final = 0.97


@dataclass(slots=True)
class Counts:
    """The sums of the steps that count."""

    steps: int = 0
    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    drafted: int = 0
    """The steps with drafts."""
    drafts: int = 0
    accepted: int = 0

    def plus(self, other: Counts) -> Counts:
        """Return the sums of both."""
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


class SpeculationRuns:
    """An engine that serves texts with or without speculation, over one KV pool, which keeps the prompts."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        """directory: the checkpoint."""
        self._card, self._tokenizer = ModelCard.load(directory), Tokenizer.load(directory)
        self._runner = ModelRunner.load(directory, self._card, config)
        self.choice = make_choice(directory, self._card, config, self._runner)
        self._pool = BlockPools(self._runner.kv.num_blocks, layouts=self._runner.kv.spec.groups)
        self._compiler = Compiler(Vocabulary(self._tokenizer, self._card.vocab_size, self._card.eos_token_ids))
        self._limits = config.largest_limits(self._runner.kv.device.type)
        self._ids = itertools.count()

    def cold_choice(self) -> DraftChoice:
        """Return a choice of drafts with the same drafters and the measured costs, which has learned nothing."""
        known = self.choice
        assert known is not None
        return DraftChoice(known._drafters, copy.deepcopy(known.costs), most=known._most, model=known._model)

    def answer(self, texts: Sequence[Text], tokens: int, *, whole: bool = False) -> None:
        """Let the model answer the texts with at most so many tokens each. An answer ends where it repeats itself, unless
        `whole`."""
        template = self._tokenizer.chat_template
        assert template is not None, "the model must have a chat template"
        for text in texts:
            text.prompt = tuple(self._tokenizer.encode(template.render([("user", text.message)]), add_special_tokens=False))
            text.answer = [-1] * tokens
        answers: dict[int, list[int]] = defaultdict(list)
        for number, token_id, _ in self._serve(texts, len(texts), 16, None, Counts()):
            answers[number].append(token_id)
        for number, text in enumerate(texts):
            text.answer = answers[number] if whole else AnsweredChat(text.kind, [], answers[number]).before_loop()
            if text.kind == "copy":
                text.answer = text.answer[: copied(text.answer, text.message, self._tokenizer.decode)]

    def run(self, texts: Sequence[Text], first: int, requests: int, batch: int, choice: DraftChoice | None) -> Counts:
        """Serve `requests` requests, `batch` at a time: the texts in their order from the number `first` on, again and again.
        Stop when fewer are left than `batch`. Raises AssertionError when a token is not that of the first answer."""
        counts, order = Counts(), [texts[(first + i) % len(texts)] for i in range(requests)]
        for number, token_id, index in self._serve(order, requests, batch, choice, counts, until_fewer=True):
            assert token_id == order[number].answer[index], f"{order[number].message[:60]!r}: another token at {index}"
        return counts

    def _serve(
        self,
        texts: Sequence[Text],
        requests: int,
        batch: int,
        choice: DraftChoice | None,
        counts: Counts,
        *,
        until_fewer: bool = False,
    ) -> Iterator[tuple[int, int, int]]:
        """Serve the texts and yield each token: the number of its text, its id, and its index. Add the steps that count."""
        scheduler = Scheduler(
            self._pool, self._runner.kv.spec.block_size, max_num_seqs=self._limits.max_num_seqs,
            max_num_batched_tokens=self._limits.max_num_batched_tokens, max_model_len=self._runner.max_model_len,
            eos_token_ids=self._card.eos_token_ids, prefix_salt=b"bench",
        )  # fmt: skip
        steps = EngineSteps(scheduler, self._pool, choice=choice)
        if choice is not None:  # a later run serves the same text, which lookups must not know
            scheduler.ended = lambda seq_id, tokens, group: choice.forget(seq_id, (), group)
        running: dict[SeqId, int] = {}
        waiting = iter(range(requests))

        def start() -> None:
            for number in itertools.islice(waiting, batch - len(running)):
                seq_id = SeqId(next(self._ids))
                running[seq_id] = number
                self._start(scheduler, seq_id, texts[number])

        start()
        known = (0, 0)
        while running and not (until_fewer and len(running) < batch):
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            plan, _ = steps.begin([])
            drawn = self._runner.collect(self._runner.launch(plan))
            events = steps.finish(drawn, time.perf_counter() - wall_s)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
            told = events.snapshot.load.speculation if events.snapshot is not None else None
            now = (told.num_draft_tokens, told.num_accepted_tokens) if told is not None else known
            if not scheduler.step_tokens[0] and len(plan.slices) == batch:
                counts.steps += 1
                counts.tokens += len(events.tokens)
                counts.wall_s += wall_s
                counts.cpu_s += cpu_s
                counts.drafted += plan.decodes < batch
                counts.drafts += now[0] - known[0]
                counts.accepted += now[1] - known[1]
            known = now
            for token in events.tokens:
                yield running[token.seq_id], token.token_id, token.output_index
                if token.finish_reason is not None:
                    del running[token.seq_id]
            start()
        steps.begin([Abort(seq_id, False) for seq_id in running])

    def _start(self, scheduler: Scheduler, seq_id: SeqId, text: Text) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=len(text.answer))
        spec = RequestSpec(text.prompt, sampling, constraint=text.constraint)
        grammar = None if text.constraint is None else self._compiler.start(text.constraint)
        scheduler.add(seq_id, spec, kind=SequenceKind.LOCAL, grammar=grammar)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A kind of texts at a batch size."""

    kind: str
    batch: int


Found = dict[TextBatch, dict[str, list[Counts]]]
"""The counts of each cell and mode, round by round."""


def rate_ratio(rounds: dict[str, list[Counts]], mode: str, *, cpu: bool) -> Ratio:
    """Return how many times as many tokens a second a mode has as steps without speculation, by rounds."""

    def seconds(one: Counts) -> float:
        return (one.cpu_s if cpu else one.wall_s) / one.tokens

    return ratio([seconds(one) for one in rounds["off"]], [seconds(one) for one in rounds[mode]])


def answered(
    bench: SpeculationRuns, kinds: Sequence[str], half: str, tokens: int, *, whole: bool = False
) -> dict[str, list[Text]]:
    """Return the texts of each kind with their answers, at most `MOST_TEXTS`: those that are long enough."""
    found = {}
    for kind in kinds:
        texts = of_kind(kind, half)
        bench.answer(texts, tokens, whole=whole)
        fitting = [text for text in texts if len(text.answer) >= LEAST_TOKENS]
        random.Random(0).shuffle(fitting)  # copies come in an order of their forms
        found[kind] = fitting[:MOST_TEXTS]
    return found


def run_of(bench: SpeculationRuns, texts: Sequence[Text], batch: int, number: int, choice: DraftChoice | None) -> Counts:
    """Serve about `RUN_STEPS` steps without speculation, or what they give, with `batch` sequences; twice as many if it is one.
    Runs of other numbers begin with other texts."""
    whole = RUN_STEPS * len(texts) / sum(len(text.answer) for text in texts)  # the answers one after the other
    requests = max(1, round(2 * whole)) if batch == 1 else batch + max(1, round(batch * (whole - 1)))
    return bench.run(texts, number * requests, requests, batch, choice)


def measure(bench: SpeculationRuns, texts: dict[str, list[Text]], batches: Sequence[int], rounds: int) -> Iterator[Found]:
    """Measure all cells in each round, in an order that changes. Yield what was found so far after each round."""
    rng = random.Random(1)
    cells = [TextBatch(kind, batch) for kind in texts if texts[kind] for batch in batches]
    found: Found = {cell: {mode: [] for mode in MODES} for cell in cells}
    for number in range(rounds):
        for cell in rng.sample(cells, len(cells)):
            for mode in rng.sample(MODES, len(MODES)):
                choice = {"off": None, "cold": bench.cold_choice(), "warm": bench.choice}[mode]
                found[cell][mode].append(run_of(bench, texts[cell.kind], cell.batch, number, choice))
        yield found


def table_of(found: Found, title: str) -> Table:
    """Return the table of the figures. A ratio whose interval is below `LEAST_RATIO` is marked."""
    table = Table(title=title)
    columns = (
        "texts", "B", "off, tok/s", "cold: CPU", "warm: CPU", "warm: wall", "tokens a step", "steps with drafts", "drafts",
        "accepted",
    )  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right")
    for cell, rounds in found.items():
        off, warm = (reduce(Counts.plus, rounds[mode]) for mode in ("off", "warm"))
        ratios = [rate_ratio(rounds, mode, cpu=cpu) for mode, cpu in (("cold", True), ("warm", True), ("warm", False))]
        table.add_row(
            cell.kind,
            str(cell.batch),
            f"{off.tokens / off.cpu_s:,.0f}",
            *(f"{of}{' !' if of.high < LEAST_RATIO else ''}" for of in ratios),
            f"{warm.tokens / warm.steps / cell.batch:.2f}",
            f"{warm.drafted / warm.steps:.0%}",
            f"{warm.drafts / warm.steps / cell.batch:.1f}",
            f"{warm.accepted / warm.drafts:.0%}" if warm.drafts else "",
        )
    return table


@contextmanager
def perturbed(directory: Path, share: float) -> Iterator[Path]:
    """Make a copy of the checkpoint whose matrices have Gaussian noise of `share` of their root mean square. 0: the checkpoint
    itself."""
    if not share:
        yield directory
        return
    with tempfile.TemporaryDirectory() as place:
        copied = Path(copytree(directory, Path(place) / directory.name))
        generator = torch.Generator().manual_seed(0)
        for file in copied.glob("*.safetensors"):
            save_file({name: _noisy(one, share, generator) for name, one in load_file(file).items()}, file)
        yield copied


def _noisy(tensor: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of the same shape and dtype: a matrix with noise, and a vector as it is."""
    if tensor.dim() < 2:
        return tensor
    exact = tensor.float()
    noise = torch.randn(exact.shape, generator=generator) * (share * exact.square().mean().sqrt())
    return (exact + noise).to(tensor.dtype)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--method", choices=METHODS, default="suffix")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--draft-model", default="default", help="the model of draft_model; its weights get int4")
    parser.add_argument("--perturb", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--half", choices=HALVES, default="report", help="which half of the texts")
    parser.add_argument("--tokens", type=int, default=160, help="the most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    console = Console(width=150)
    with perturbed(resolve(args.model), args.perturb) as directory:
        small = {"model": args.draft_model, "quantization": "int4"} if args.method == "draft_model" else {}
        how = SpeculativeConfig(method=args.method, **small)
        config = EngineConfig(
            model=str(directory), dtype="bfloat16", quantization=args.quantization, threads=args.threads,
            kv_cache_memory=1024 * MIB, speculative_config=how,
        )  # fmt: skip
        bench = SpeculationRuns(directory, config)
        texts = answered(bench, args.kinds, args.half, args.tokens)
        console.print("texts: " + ", ".join(f"{kind} {len(some)}" for kind, some in texts.items()))
        noise = f", noise {args.perturb:g}" if args.perturb else ""
        title = f"{args.method}, {args.quantization or 'bfloat16'}{noise}, {args.threads} thread(s), {args.rounds} rounds"
        found = Found()
        for number, so_far in enumerate(measure(bench, texts, args.batches, args.rounds), 1):
            console.print(f"round {number}")
            found = so_far
        console.print(table_of(found, f"{title}; {cpu_name()}"))


if __name__ == "__main__":
    main()
