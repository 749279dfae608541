"""Measure the cost of checksums in prefill: the same prompts pass the engine with and without checksums, in turns.

    python -m bench.transfer.checksums [--tokens 2048] [--rounds 15] [--model default]

One prompt at a time passes scheduler, block pool, model and the sums, as in an engine thread; every prompt is new.
Times are CPU seconds of that one thread, so that other load on the machine matters little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_sums import BlockSums
from pdserve.engine.kv.checksum import stripes_of
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.worker.engine_thread import EngineSteps
from pdserve.worker.messages import AddLent, ReturnLease

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Prefill:
    """The steps of one engine, with checksums or without."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, *, checksums: bool) -> None:
        self.runner = runner
        pool = BlockPools(runner.kv.num_blocks)
        scheduler = Scheduler(
            pool,
            config.block_size,
            **config.largest_limits(runner.kv.device.type)._asdict(),
            max_model_len=runner.max_model_len,
            eos_token_ids=(),
            prefix_salt=b"bench",
        )
        self.steps = EngineSteps(scheduler, pool, [sums_of(runner)] if checksums else None)
        self.count = 0

    def compute(self, prompt: tuple[int, ...]) -> tuple[float, float]:
        """Compute one prompt. Return the CPU seconds of the whole, sums included, and the CPU seconds until token 0 was
        reported."""
        self.count += 1
        began_s = time.thread_time()
        plan, _ = self.steps.begin([AddLent(SeqId(self.count), RequestSpec(prompt, PARAMS))])
        told_s = began_s
        while plan.slices:
            self.steps.finish(self.runner.execute(plan))
            told_s = time.thread_time()
            self.steps.seal()
            plan, _ = self.steps.begin([])
        ended_s = time.thread_time()
        self.steps.begin([ReturnLease(SeqId(self.count))])
        return ended_s - began_s, told_s - began_s


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="default")
    options = parser.parse_args()
    config = EngineConfig(model=options.model, threads=1)
    directory = resolve(config.model)
    card = ModelCard.load(directory)
    runner = ModelRunner.load(directory, card, config)
    ways = [Prefill(runner, config, checksums=on) for on in (False, True)]
    rng = random.Random(1)
    ratios, first_ratios, plain_s = [], [], []
    for number in range(options.rounds + 1):
        prompt = tuple(rng.randrange(card.vocab_size) for _ in range(options.tokens))
        order = (0, 1) if number % 2 else (1, 0)
        took = {way: ways[way].compute(prompt) for way in order}
        if number:
            ratios.append(took[1][0] / took[0][0])
            first_ratios.append(took[1][1] / took[0][1])
            plain_s.append(took[0][0])
    blocks = list(range(runner.kv.spec.blocks_for(options.tokens)))
    sums = sums_of(runner)
    sums_s = []
    for _ in range(options.rounds):
        began_s = time.thread_time()
        sums(blocks)
        sums_s.append(time.thread_time() - began_s)
    gigabytes = len(blocks) * runner.kv.spec.block_bytes / 1e9
    size = f"{options.tokens} tokens, {gigabytes * 1e3:.1f} MB of KV"
    print(f"{runner.describe()}; prompts of {size}; one thread")
    for name, values in (("prefill with / without checksums", ratios), ("until token 0 is told", first_ratios)):
        low, high = interval(values)
        print(f"{name}: {statistics.median(values):.4f} (95 %: {low:.4f} to {high:.4f}, {len(values)} rounds)")
    alone_s = statistics.median(sums_s)
    share = alone_s / statistics.median(plain_s)
    print(f"sums alone: {1e3 * alone_s:.2f} ms, {gigabytes / alone_s:.1f} GB/s of one core, {share:.2%} of prefill")


def sums_of(runner: ModelRunner) -> BlockSums:
    """Return the function that sums the blocks of the runner's first pool, as an engine thread sums them."""
    cache = runner.kv.caches[0]
    return BlockSums(cache.blocks, stripes_of(cache.layout))


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, found by resampling the rounds."""
    rng = random.Random(2)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


if __name__ == "__main__":
    main()
