"""Measures drafts by lookup: how many tokens a step gives, how often drafts are right, and what a proposal costs.

    python -m bench.engine.lookup [--model default] [--tokens 256] [--file FILE] [--whole] [--all]

The model answers chats greedily: questions, summaries of a text, edits of code, data as JSON, copies of a text, and earlier
answers that it writes anew. `--file` keeps the answers, or brings those of an earlier run. A replay walks through each
answer: it asks the drafter before each step, and accepts the drafts that the answer goes on with, as a step would. Beside it
stands the usual search for the last 5, 4, 3 or 2 tokens in the sequence (n-gram).

A small model often repeats itself until it is stopped, which is easy to guess. So an answer ends here where it first repeats
16 tokens of itself; `--whole` keeps the rest. The requests run one after the other, in an order that mixes all kinds. Half of
the requests of each kind served to choose how the drafter works; the tables show the others unless `--all` is given.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data import topics  # type: ignore[import-untyped, unused-ignore]
from typing import Final

from rich.console import Console
from rich.table import Table

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.drafting.api import NO_DRAFT, Draft, Drafter, DraftView
from pdserve.engine.drafting.lookup import LookupDrafter, TokenIndex
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind
from pdserve.text.tokenizer import Tokenizer

REQUESTS: Final = 24
"""Requests of each kind."""
LOOP: Final = 16
MOST: Final = (4, 8, 16)
"""Drafts that a step may verify."""
PLACES: Final = (1, 2, 3, 4, 6, 8)
QUESTIONS: Final = (
    "Why is the sky blue?",
    "How do I bake bread at home?",
    "Explain how a hash table works.",
    "What are the main causes of inflation?",
    "Write a short story about a lighthouse keeper.",
    "Give me five tips for a job interview.",
    "What is the difference between TCP and UDP?",
    "Describe the life cycle of a butterfly.",
    "How does photosynthesis work?",
    "Plan a weekend in Rome for two people.",
    "What did the Romans eat?",
    "Explain recursion to a child.",
    "Write a polite e-mail that asks for a refund.",
    "What are the advantages of electric cars?",
    "How can I sleep better?",
    "Compare cats and dogs as pets.",
    "Who was Marie Curie?",
    "What makes a good password?",
    "Write a poem about autumn.",
    "How do vaccines protect us?",
    "What is machine learning used for?",
    "Explain supply and demand.",
    "How do I learn to play the guitar?",
    "What are the planets of the solar system?",
)
EDITS: Final = (
    "Add type hints to this function. Answer with the whole function.",
    "Rename the first parameter of this function to `value`. Answer with the whole function.",
    "Add a docstring to this function. Answer with the whole function.",
)
DATA: Final = (
    "countries with capital, continent and population",
    "animals with class, habitat and diet",
    "books with title, author and year",
    "chemical elements with symbol, number and state",
    "rivers with length, source and mouth",
    "programming languages with year, designer and purpose",
    "musical instruments with family, range and origin",
    "sports with players, equipment and duration",
    "vegetables with colour, season and vitamins",
    "mountains with height, range and country",
    "inventions with inventor, year and use",
    "cities with country, mayor and landmark",
)


@dataclass(slots=True)
class AnsweredChat:
    """One request: its kind, the token ids of its prompt, and those of its answer."""

    kind: str
    prompt: list[int]
    answer: list[int] = field(default_factory=list)

    def before_loop(self) -> list[int]:
        """Return the answer up to the place where it first repeats `LOOP` tokens of itself."""
        seen = set[tuple[int, ...]]()
        for end in range(LOOP, len(self.answer) + 1):
            last = tuple(self.answer[end - LOOP : end])
            if last in seen:
                return self.answer[: end - LOOP]
            seen.add(last)
        return self.answer


def passages(least: int, most: int) -> Iterator[str]:
    """Yield texts of `least` to `most` characters from the language reference that Python ships."""
    for name in sorted(topics.topics):
        text = textwrap.dedent(topics.topics[name]).strip()
        if len(text) >= least:
            yield text[:most].rsplit("\n\n", 1)[0]


def functions() -> Iterator[str]:
    """Yield the sources of functions of Python's library, 10 to 30 lines each."""
    for module in (textwrap, statistics, random, json.decoder, inspect):
        for _, function in sorted(inspect.getmembers(module, inspect.isfunction)):
            if function.__module__ == module.__name__ and 10 <= len((lines := inspect.getsource(function)).splitlines()) <= 30:
                yield lines


def chats() -> list[tuple[str, str]]:
    """Return the kind and the first message of each chat, `REQUESTS` of each kind."""
    texts, code = list(passages(1000, 1800)), list(functions())
    found = [("chat", question) for question in QUESTIONS]
    for i in range(REQUESTS):
        found.append(("summary", f"Summarize the following text. Quote its most important sentences.\n\n{texts[i]}"))
        found.append(("code", f"{EDITS[i % len(EDITS)]}\n\n```python\n{code[i]}```"))
        found.append(("copy", f"Repeat the following text word for word.\n\n{texts[REQUESTS + i][:1000]}"))
        if i % 2:
            rows = "\n".join(f"{name}, {len(name)}, {name[0]}" for name in sorted(topics.topics)[3 * i : 3 * i + 10])
            found.append(
                ("json", f"Write these rows as a JSON list of objects with the keys name, length and initial.\n\n{rows}")
            )
        else:
            found.append(("json", f"List eight {DATA[i // 2]}. Answer only with a JSON list of objects."))
    return found


def answers(model: str, tokens: int) -> list[AnsweredChat]:
    """Let the model answer all chats greedily, with at most `tokens` tokens each; then let it write the answers to the
    questions anew."""
    directory = resolve(model)
    card, tokenizer = ModelCard.load(directory), Tokenizer.load(directory)
    template = tokenizer.chat_template
    assert template is not None, "the model must have a chat template"
    runner = ModelRunner.load(directory, card, EngineConfig(model=model, dtype="bfloat16", kv_cache_memory=512 * MIB))
    params = SamplingParams(temperature=0.0, max_tokens=tokens)

    def serve(requests: list[AnsweredChat]) -> None:
        scheduler = Scheduler(
            BlockPools(runner.kv.num_blocks),
            runner.kv.spec.block_size,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=4096,
            eos_token_ids=card.eos_token_ids,
        )
        for number, request in enumerate(requests):
            scheduler.add(SeqId(number), RequestSpec(tuple(request.prompt), params), kind=SequenceKind.LOCAL)
        while scheduler.has_work:
            for token in scheduler.collect(runner.execute(scheduler.plan())).tokens:
                requests[token.seq_id].answer.append(token.token_id)

    def encoded(messages: list[tuple[str, str]]) -> list[int]:
        return tokenizer.encode(template.render(messages), add_special_tokens=False)

    first = [(kind, [("user", message)]) for kind, message in chats()]
    requests = [AnsweredChat(kind, encoded(messages)) for kind, messages in first]
    serve(requests)
    again = []
    for (kind, messages), request in zip(first, requests, strict=True):
        if kind == "chat":
            said = ("assistant", tokenizer.decode(request.answer))
            again.append(AnsweredChat("rewrite", encoded([*messages, said, ("user", "Write this again, a bit shorter.")])))
    serve(again)
    return requests + again


class NgramDrafter:
    """Looks for the last 5, 4, 3 or 2 tokens in the sequence, and guesses what followed them last. It fulfils `Drafter`."""

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        """Return a draft for each of these sequences."""
        return [self._guess(view.tokens, view.most) for view in views]

    def _guess(self, tokens: list[int], most: int) -> Draft:
        for length in (5, 4, 3, 2):
            for place in range(len(tokens) - 1, length - 1, -1):
                if tokens[place - length : place] == tokens[-length:]:
                    return Draft(tuple((tokens[place:] * most)[:most]), f"n-gram {length}")
        return NO_DRAFT

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        """Do nothing."""


@dataclass(slots=True)
class Replayed:
    """The sums of a replay of some answers."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    """The steps with drafts."""
    drafts: int = 0
    right: int = 0
    proposals_us: list[float] = field(default_factory=list)
    """The time of each proposal but the first one of a sequence, which also indexes the prompt."""


def replay(
    drafter: Drafter, chats: list[tuple[AnsweredChat, list[int], bool]], most: int
) -> tuple[dict[str, Replayed], dict[str, list[int]]]:
    """Replay answers with at most `most` drafts a step.

    chats: each with the answer that is replayed, and with whether it counts.
    Returns the results by the kind of chat, and by the kind of draft how many there were, and how many of these were right in
    their first place, in their first two, and so on.
    """
    found: dict[str, Replayed] = defaultdict(Replayed)
    odds: dict[str, list[int]] = defaultdict(lambda: [0] * (most + 1))
    for number, (chat, answer, counts) in enumerate(chats):
        tokens, end = list(chat.prompt), len(chat.prompt) + len(answer)
        while len(tokens) < end:
            view = DraftView(SeqId(number), tokens, len(chat.prompt), b"", most)
            began_s = time.perf_counter()
            (draft,) = drafter.propose([view])
            took_s = time.perf_counter() - began_s
            rest, right = answer[len(tokens) - len(chat.prompt) :], 0
            while right < min(len(draft.token_ids), len(rest)) and draft.token_ids[right] == rest[right]:
                right += 1
            if counts:
                sums = found[chat.kind]
                sums.tokens += min(right + 1, len(rest))
                sums.steps += 1
                sums.drafted += bool(draft.token_ids)
                sums.drafts += len(draft.token_ids)
                sums.right += right
                if len(tokens) > len(chat.prompt):
                    sums.proposals_us.append(1e6 * took_s)
                if draft.token_ids:
                    for place in range(right + 1):
                        odds[draft.kind][place] += 1
            tokens += rest[: right + 1]
        drafter.forget(SeqId(number), tokens, b"")
    return found, odds


def in_mixed_order(requests: list[AnsweredChat], whole: bool, all_count: bool) -> list[tuple[AnsweredChat, list[int], bool]]:
    """Return the chats with their answers, and with whether they count: every second one of its kind does, or all do. An answer
    that is written anew comes after the first one."""
    seen = Counter[str]()
    chats = []
    for request in requests:
        seen[request.kind] += 1
        chats.append((request, request.answer if whole else request.before_loop(), all_count or seen[request.kind] % 2 == 0))
    random.Random(1).shuffle(chats)
    return sorted(chats, key=lambda chat: chat[0].kind == "rewrite")


def tables(requests: list[AnsweredChat], whole: bool, all_count: bool) -> Iterator[Table]:
    """Replay all answers, and yield the tables of results."""
    chats = in_mixed_order(requests, whole, all_count)
    ngram, _ = replay(NgramDrafter(), chats, 8)
    by_most = {most: replay(LookupDrafter(), chats, most) for most in MOST}
    table = Table(title="tokens a step; with at most 8 drafts: steps with a draft, drafts that are right, time of a proposal")
    lookups = [f"lookup {most}" for most in MOST]
    names = ("chats", "tokens", "n-gram 8", "steps", *lookups, "steps", "right", "us, p50", "p99", "us a token")
    for name in names:
        table.add_column(name, justify="right")
    for kind in (*sorted(ngram), "all"):
        rows = [
            sums_of([found[kind]] if kind in found else list(found.values()))
            for found in (ngram, *(found for found, _ in by_most.values()))
        ]
        eight = rows[1 + MOST.index(8)]
        times = sorted(eight.proposals_us)
        table.add_row(
            kind,
            f"{eight.tokens:,}",
            f"{rows[0].tokens / rows[0].steps:.2f}",
            f"{rows[0].drafted / rows[0].steps:.0%}",
            *(f"{row.tokens / row.steps:.2f}" for row in rows[1:]),
            f"{eight.drafted / eight.steps:.0%}",
            f"{eight.right / eight.drafts:.0%}",
            f"{statistics.median(times):.1f}",
            f"{times[int(0.99 * len(times))]:.1f}",
            f"{statistics.median(times) * eight.steps / eight.tokens:.1f}",
        )
    yield table
    table = Table(title="share of drafts that are right up to a place, with at most 8 drafts")
    for name in ("kind of draft", "drafts", *map(str, PLACES)):
        table.add_column(name, justify="right")
    for kind, right in sorted(by_most[8][1].items()):
        table.add_row(kind, f"{right[0]:,}", *(f"{right[place] / right[0]:.2f}" for place in PLACES))
    yield table


def sums_of(parts: list[Replayed]) -> Replayed:
    """Return the sum of results."""
    total = Replayed()
    for part in parts:
        for name in ("tokens", "steps", "drafted", "drafts", "right", "proposals_us"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
    return total


def build_times() -> Table:
    """Measure how long it takes to index prompts, as the best of five, and return the table."""
    table = Table(title="time to index a prompt, ms")
    cells = []
    for tokens in (1024, 4096, 32_768, 131_072):
        table.add_column(f"{tokens:,} tokens", justify="right")
        best_s = float("inf")
        for seed in range(5):
            rng = random.Random(seed)
            index = TokenIndex([min(int(rng.paretovariate(0.5)), 49_000) for _ in range(tokens)])
            began_s = time.perf_counter()
            index.catch_up()
            best_s = min(best_s, time.perf_counter() - began_s)
        cells.append(f"{1e3 * best_s:.2f}")
    table.add_row(*cells)
    return table


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    file: Path | None = options.file
    if file is not None and file.exists():
        requests = [AnsweredChat(**chat) for chat in json.loads(file.read_text())]
    else:
        requests = answers(options.model, options.tokens)
        if file is not None:
            file.write_text(json.dumps([asdict(request) for request in requests]))
    console = Console(width=150)
    for table in (*tables(requests, options.whole, options.all), build_times()):
        console.print(table)


if __name__ == "__main__":
    main()
