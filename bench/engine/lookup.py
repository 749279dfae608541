"""Measures drafts by lookup: how many tokens a step gives, how often drafts are right, and what a proposal costs.

    python -m bench.engine.lookup [--model default] [--tokens 256] [--file FILE] [--all]

The model answers chats greedily: questions, summaries of a text, edits of code, data as JSON, copies of a text, and earlier
answers that are to be written anew. `--file` keeps the answers, or brings those of an earlier run. A replay then walks
through each answer, asks the drafter before each step, and accepts the drafts that equal the answer, as a step would.
Requests run one after the other, in an order that mixes all kinds. Every second request of a kind was used to choose the
drafter's constants; the table shows the others unless `--all` is given.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics  # type: ignore[import-untyped, unused-ignore]
from typing import Final

from rich.console import Console
from rich.table import Table

from pdserve.core.ids import SeqId

REQUESTS: Final = 24
"""Requests of each kind."""
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
class Answered:
    """One request: its kind, the token ids of its prompt, and those of its answer."""

    kind: str
    prompt: list[int]
    answer: list[int] = field(default_factory=list)


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


def answers(model: str, tokens: int) -> list[Answered]:
    """Let the model answer all chats greedily, with at most `tokens` tokens each; then let it write the answers to the
    questions anew."""
    from pdserve.checkpoint.card import ModelCard
    from pdserve.checkpoint.resolve import resolve
    from pdserve.config import MIB, EngineConfig
    from pdserve.core.block_pools import BlockPools
    from pdserve.core.request_spec import RequestSpec
    from pdserve.core.sampling import SamplingParams
    from pdserve.engine.runner import ModelRunner
    from pdserve.engine.schedule.scheduler import Scheduler
    from pdserve.engine.schedule.sequence import SequenceKind
    from pdserve.text.tokenizer import Tokenizer

    directory = resolve(model)
    card, tokenizer = ModelCard.load(directory), Tokenizer.load(directory)
    template = tokenizer.chat_template
    assert template is not None, "the model must have a chat template"
    runner = ModelRunner.load(directory, card, EngineConfig(model=model, dtype="bfloat16", kv_cache_memory=512 * MIB))
    params = SamplingParams(temperature=0.0, max_tokens=tokens)

    def serve(requests: list[Answered]) -> None:
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
    requests = [Answered(kind, encoded(messages)) for kind, messages in first]
    serve(requests)
    again = []
    for (kind, messages), request in zip(first, requests, strict=True):
        if kind == "chat":
            said = ("assistant", tokenizer.decode(request.answer))
            again.append(Answered("rewrite", encoded([*messages, said, ("user", "Write this again, a bit shorter.")])))
    serve(again)
    return requests + again
