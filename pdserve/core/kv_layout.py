"""The shape of a model's KV: groups of layers, and the blocks of each group, as they lie in memory and travel in tickets.

The ranks of a gang may share blocks: each has some layers, those of its stage, and some heads (`KvShare`). Its part of a block
is a block of a KV group that has nothing else. So a head of a layer has one place among all ranks: the rank whose share has it,
and an offset in that rank's part of the block. A reader with other shares joins the places of both sides: `join` tells which
bytes of which rank of the lender go where in which rank of the reader. Each head of each layer is in exactly one overlap of two
shares, so it is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from pdserve.core.errors import ConfigError

DTYPE_BITS: Final = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}
QUANTISED: Final = ("fp8_e4m3", "int8", "int4")
"""The quantised dtypes. A block of such a dtype has one float32 scale for each (layer, plane, head)."""
SCALE_BYTES: Final = 4
MAX_KV_GROUPS: Final = 16
"""The most groups of a model. Known models have at most three: full attention, a sliding window, and shared KV."""


def ceil_div(a: int, b: int) -> int:
    """Divide two integers and round up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV has one shape, and the layout of one of their blocks. A block is contiguous: for each layer of `layers`
    and each plane of `planes`, [heads, block_size, dim] of `dtype`. The scales of a quantised dtype follow all numbers: for
    each layer and plane, [heads] float32.

    A plane is (heads, dim), the shape of what one token stores in it; all planes have the same heads. K and V are two planes. A
    layer with one latent vector for each token has one plane.

    Where both sides of a read store whole blocks, a block is one descriptor: large ones move several times faster than small.
    SmolLM2-135M in bf16: 30 * 2 * 3 * 16 * 64 * 2 B = 360 KiB for 16 tokens; in int8 180 KiB and 720 B of scales.
    """

    layers: tuple[int, ...]
    """The indices of the group's layers in the model, ascending."""
    planes: tuple[tuple[int, int], ...]
    block_size: int
    dtype: str
    window: int | None = None
    """The most tokens that a token attends to, itself included. None: there is no limit."""

    def __post_init__(self) -> None:
        if not self.layers or not self.planes or any(a >= b for a, b in pairwise(self.layers)):
            raise ConfigError(f"a KV group needs planes, and layers in ascending order, got {self.layers} and {self.planes}")
        if len({heads for heads, _ in self.planes}) > 1:
            raise ConfigError(f"the planes of a KV group need equal heads, since ranks share them by heads, got {self.planes}")
        if self.quantised and (any(dim % 2 for _, dim in self.planes) or self.data_bytes % SCALE_BYTES):
            raise ConfigError(f"a KV block of {self._numbers} numbers in {self.dtype} is not a whole number of words")

    @property
    def num_layers(self) -> int:
        """The number of the group's layers."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """The heads of each plane."""
        return self.planes[0][0]

    @property
    def head_dim(self) -> int:
        """The dimension of the first plane's heads."""
        return self.planes[0][1]

    @property
    def alike(self) -> bool:
        """True when all planes have one shape."""
        return len(set(self.planes)) == 1

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The planes as (heads, dim), where neighbouring planes of equal dim are joined.

        K and V of a usual model are joined into twice the heads, so a computation takes a layer of a block as one tensor.
        """
        runs = groupby(self.planes, key=lambda plane: plane[1])
        return tuple((sum(heads for heads, _ in run), dim) for dim, run in runs)

    @property
    def quantised(self) -> bool:
        """True when the blocks carry scales."""
        return self.dtype in QUANTISED

    @property
    def data_bytes(self) -> int:
        """The bytes of a block without its scales. The scales begin at this offset."""
        return self._numbers * DTYPE_BITS[self.dtype] // 8

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scales of a block; 0 when the dtype is not quantised."""
        return self.num_layers * sum(heads for heads, _ in self.planes) * SCALE_BYTES if self.quantised else 0

    @property
    def block_bytes(self) -> int:
        """The bytes of a block with its scales."""
        return self.data_bytes + self.scale_bytes

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a block divided by its tokens, rounded up."""
        return ceil_div(self.block_bytes, self.block_size)

    @property
    def _numbers(self) -> int:
        return self.num_layers * sum(heads * dim for heads, dim in self.planes) * self.block_size

    @property
    def _shape(self) -> tuple[object, ...]:
        return self.layers, self.planes, self.block_size, self.window

    def holds_the_same_as(self, other: KvGroup) -> bool:
        """Tell whether a block of one group can be converted to a block of the other by converting each number.

        Layers, planes, block size and window must be equal, so that a block keeps its place in a block table. Only `dtype`
        may differ, and with it the scales and the bytes.
        """
        return self._shape == other._shape

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens. The last block may be partly filled."""
        return ceil_div(tokens, self.block_size)

    def first_live(self, computed: int) -> int:
        """Return the index of the first block that a token at position `computed` or after it can see.

        The blocks before it are dead: nothing ever reads them again. A token at position p sees the keys of the positions
        p - window + 1 to p. Without a window every block stays live.
        """
        return 0 if self.window is None else max(0, computed - self.window + 1) // self.block_size

    def next_death(self, computed: int) -> int | None:
        """Return the number of computed tokens at which the first block dies that is live at `computed`. None: none dies."""
        return None if self.window is None else (self.first_live(computed) + 1) * self.block_size + self.window - 1

    def most_held(self, first: int, end: int, chunk: int) -> int:
        """Return the most blocks that a sequence holds at once while it computes the blocks [first, end) of its table.

        A step computes at most `chunk` tokens, and the blocks that are dead after the step are freed. Blocks before `first` do
        not count. In a long table the result is the window, a chunk, and one block more because neither begins at a block's
        first token. It is exact: a step from `start` on holds the blocks from `first_live(start)` to its end, so the most
        blocks are held by the first step that ends with the table, or by the last step before it that begins just before a
        block dies.
        """
        if self.window is None or first >= end:
            return max(0, end - first)
        begin, stop = first * self.block_size, end * self.block_size
        start = max(begin, stop - chunk)
        starts = (start, start - (start - self.window + 2) % self.block_size)
        ends = ((at, self.blocks_for(min(at + chunk, stop))) for at in starts if at >= begin)
        return max(held - max(self.first_live(at), first) for at, held in ends)

    @property
    def least_promise(self) -> int:
        """The most blocks of a long table that a sequence holds at once when each step computes one block, and the last step
        holds one more block to grow into. With this number of promised blocks, a prompt always goes on."""
        assert self.window is not None
        return ceil_div(self.window + self.block_size - 1, self.block_size) + 1

    @property
    def least_pool(self) -> int:
        """The blocks of the smallest pool that takes tables of any length while it is empty: the blocks that a prompt has
        found, the blocks that it computes, and the blocks that its lease keeps."""
        assert self.window is not None
        found = ceil_div(self.window - 1, self.block_size)
        kept = ceil_div(self.window + self.block_size - 2, self.block_size)
        return found + self.least_promise + kept

    def longest_table(self, num_blocks: int) -> int | None:
        """Return the blocks of the longest table that an empty pool of `num_blocks` blocks always takes. None: no limit."""
        return None if self.window is not None and num_blocks >= self.least_pool else num_blocks

    def most_useful(self, sequences: int, step_tokens: int) -> int | None:
        """Return the most blocks that this number of sequences can use at once while a step computes at most `step_tokens`
        tokens. All share the step, and each has its own promised blocks. None: there is no limit."""
        if self.window is None:
            return None
        return max(self.least_pool, sequences * self.least_promise + ceil_div(step_tokens, self.block_size))


def gqa_group(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> KvGroup:
    """Return the group of layers 0 to num_layers - 1, which all store K and V of `num_kv_heads` heads.

    Its blocks are [num_layers, 2 (K, V), num_kv_heads, block_size, head_dim].
    """
    return KvGroup(tuple(range(num_layers)), ((num_kv_heads, head_dim),) * 2, block_size, dtype)


@dataclass(frozen=True, slots=True)
class KvSpec:
    """The KV of a model: its groups of layers. Each group has a pool of blocks and a block table of its own.

    All groups have the same block size, so block i of each table holds the same tokens.
    """

    groups: tuple[KvGroup, ...]

    def __post_init__(self) -> None:
        layers = [layer for group in self.groups for layer in group.layers]
        if not 1 <= len(self.groups) <= MAX_KV_GROUPS:
            raise ConfigError(f"a model has 1 to {MAX_KV_GROUPS} KV groups, got {len(self.groups)}")
        if len({group.block_size for group in self.groups}) > 1 or len(set(layers)) < len(layers):
            raise ConfigError(f"KV groups need one block size, and each layer belongs to one of them, got {self.groups}")

    @property
    def block_size(self) -> int:
        """The tokens of a block of any group."""
        return self.groups[0].block_size

    @property
    def block_bytes(self) -> int:
        """The bytes of one block of each group together."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one block of each group together, divided by the tokens of a block, rounded up."""
        return ceil_div(self.block_bytes, self.block_size)

    @property
    def dtype(self) -> str:
        """The name of the groups' dtype. The names are joined by "+", in the order of the groups, when they differ."""
        names = [group.dtype for group in self.groups]
        return names[0] if len(set(names)) == 1 else "+".join(names)

    @property
    def quantised(self) -> bool:
        """True when the blocks of a group carry scales."""
        return any(group.quantised for group in self.groups)

    def holds_the_same_as(self, other: KvSpec) -> bool:
        """Tell whether each group holds the same content as the other layout's group at the same place. Only dtypes may
        differ."""
        same = (ours.holds_the_same_as(theirs) for ours, theirs in zip(self.groups, other.groups, strict=False))
        return len(self.groups) == len(other.groups) and all(same)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks of each group that hold `tokens` tokens. The last block may be partly filled."""
        return ceil_div(tokens, self.block_size)

    def split(self, memory_bytes: int, most: Sequence[int | None] = ()) -> tuple[int, ...]:
        """Return the number of blocks of each group in `memory_bytes`: equally many in all groups, but no more than `most`.

        Groups without a limit get the memory that groups with a limit leave. If all groups have a limit, the limits are
        ignored, because no group could use the rest of the memory.
        """
        limits = most if any(limit is None for limit in most) else (None,) * len(self.groups)

        def sizes(count: int) -> list[int]:
            return [count if limit is None else min(count, limit) for limit in limits]

        low, high = 0, memory_bytes // min(group.block_bytes for group in self.groups)
        while low < high:
            count = (low + high + 1) // 2
            fits = sum(n * group.block_bytes for n, group in zip(sizes(count), self.groups, strict=True)) <= memory_bytes
            low, high = (count, high) if fits else (low, count - 1)
        return tuple(sizes(low))

    def pool_tokens(self, num_blocks: Sequence[int]) -> int:
        """Return the tokens that pools of these sizes hold. The smallest group that keeps all tokens sets the number.

        A group whose pool has room for its window sets no limit, unless all groups are of this sort: then the smallest group
        counts.
        """
        longest = self.longest_tokens(num_blocks)
        return min(num_blocks) * self.block_size if longest is None else longest

    def longest_tokens(self, num_blocks: Sequence[int]) -> int | None:
        """Return the tokens of the longest sequence that empty pools of these sizes always take. None: there is no limit,
        since all layers have windows, and each pool has room for its window."""
        sizes = [group.longest_table(count) for group, count in zip(self.groups, num_blocks, strict=True)]
        longest = min([count for count in sizes if count is not None], default=None)
        return None if longest is None else longest * self.block_size

    def held_tokens(self, num_blocks: Sequence[int]) -> int:
        """Return the most tokens whose blocks a decoding sequence of any length holds, in the group that needs the most. 0:
        there is no such bound, because a group keeps all tokens or its pool is too small for its window."""
        if self.longest_tokens(num_blocks) is not None:
            return 0
        return max(group.least_promise for group in self.groups) * self.block_size


@dataclass(frozen=True, slots=True)
class Shortage:
    """A KV group whose pool has no room for a sequence. Among several such groups, it is the group that lacks the most
    blocks."""

    group: int
    blocks_needed: int
    """The number of free blocks that would be enough: the blocks for the sequence, and the blocks for which other sequences
    wait already."""
    blocks_free: int
    """The blocks that can be allocated there and are not promised."""
    window: int = 0
    """The tokens of the group's sliding window. 0: it keeps all tokens."""

    def __str__(self) -> str:
        kept = f"a window of {self.window:,} tokens" if self.window else "all tokens"
        return f"KV group {self.group} ({kept}) needs {self.blocks_needed:,} blocks and has {self.blocks_free:,}"


def fit_max_model_len(requested: int | None, max_position: int, pool_tokens: int | None) -> int:
    """Return the length of the longest request, prompt and output, that model and KV pool can hold, in tokens.

    `requested` None stands for the longest possible, and `pool_tokens` None for a pool without a limit. Raises
    `ConfigError` when the model (`max_position`) or the KV pool (`pool_tokens`) cannot hold `requested` tokens.
    """
    if requested is None:
        return max_position if pool_tokens is None else min(max_position, pool_tokens)
    if requested > max_position:
        raise ConfigError(f"max_model_len {requested} is over the model's own limit of {max_position} tokens")
    if pool_tokens is not None and requested > pool_tokens:
        raise ConfigError(
            f"max_model_len {requested} does not fit the KV pool of {pool_tokens} tokens: "
            "raise kv_cache_memory or lower max_model_len"
        )
    return requested


class Unit(NamedTuple):
    """The bytes of one head of one plane of one layer in a block: its numbers, or its scale.

    place: the number of the unit among all units of a whole block, all numbers before all scales. It is the same in each
    layout of ranks.
    """

    offset: int
    nbytes: int
    place: int


class ByteRun(NamedTuple):
    """A run of bytes of a block that lies together on both sides of a read."""

    theirs: int
    ours: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class KvShare:
    """The part of each block of a KV group that one rank stores. `layers` are places in `KvGroup.layers`; neither is empty."""

    rank: int
    layers: range
    heads: range

    def of(self, group: KvGroup) -> KvGroup:
        """Return the layout of this part of the group's blocks."""
        planes = tuple((len(self.heads), dim) for _, dim in group.planes)
        return replace(group, layers=group.layers[self.layers.start : self.layers.stop], planes=planes)

    def meets(self, other: KvShare) -> bool:
        """Tell whether both have a head of a layer."""
        layers = self.layers.start < other.layers.stop and other.layers.start < self.layers.stop
        return layers and self.heads.start < other.heads.stop and other.heads.start < self.heads.stop

    def overlap(self, other: KvShare) -> KvShare | None:
        """Return what this rank has of the other share. None: it has nothing."""
        if not self.meets(other):
            return None
        layers = range(max(self.layers.start, other.layers.start), min(self.layers.stop, other.layers.stop))
        heads = range(max(self.heads.start, other.heads.start), min(self.heads.stop, other.heads.stop))
        return KvShare(self.rank, layers, heads)

    def units(self, group: KvGroup, stored: KvShare) -> Iterator[Unit]:
        """Yield the units of this share in the memory of a rank that has stored a share around it. Numbers come first."""
        own = stored.of(group)
        strips = [group.block_size * dim * DTYPE_BITS[group.dtype] // 8 for _, dim in group.planes]
        layer_bytes, all_heads, all_planes = len(stored.heads) * sum(strips), group.num_kv_heads, len(strips)
        places = len(group.layers) * all_planes * all_heads
        for layer in self.layers:
            begin = (layer - stored.layers.start) * layer_bytes
            for plane, strip in enumerate(strips):
                place = (layer * all_planes + plane) * all_heads
                for head in self.heads:
                    yield Unit(begin + (head - stored.heads.start) * strip, strip, place + head)
                begin += len(stored.heads) * strip
        if not group.quantised:
            return
        for layer in self.layers:
            for plane in range(all_planes):
                row = (layer - stored.layers.start) * all_planes + plane
                place = places + (layer * all_planes + plane) * all_heads
                for head in self.heads:
                    scale = row * len(stored.heads) + head - stored.heads.start
                    yield Unit(own.data_bytes + scale * SCALE_BYTES, SCALE_BYTES, place + head)


class Route(NamedTuple):
    """The parts of a block that one rank of a reader reads from one rank of a lender: the shares of both, and the pieces."""

    theirs: KvShare
    ours: KvShare
    pieces: tuple[ByteRun, ...]


def whole_share(group: KvGroup) -> KvShare:
    """Return the share of one rank that has everything."""
    return KvShare(0, range(group.num_layers), range(group.num_kv_heads))


def cover(group: KvGroup, shares: Sequence[KvShare]) -> bool:
    """Tell whether the shares have each head of each layer of a group exactly once, each rank at most one share."""
    count = 0
    for at, one in enumerate(shares):
        if one.layers.start < 0 or one.layers.stop > group.num_layers or one.heads.start < 0:
            return False
        if not one.layers or not one.heads or one.heads.stop > group.num_kv_heads:
            return False
        if any(one.rank == other.rank or one.meets(other) for other in shares[:at]):
            return False
        count += len(one.layers) * len(one.heads)
    return count == group.num_layers * group.num_kv_heads


def join(group: KvGroup, theirs: Sequence[KvShare], ours: Sequence[KvShare]) -> tuple[Route, ...]:
    """Return what each rank of a reader reads of which rank of a lender, so that each head of each layer is read once.

    Both sides store the group in the same dtype and `cover` it.
    """
    routes = []
    for own in ours:
        for their in theirs:
            both = own.overlap(their)
            if both is not None:
                routes.append(Route(their, own, tuple(_pieces(both, group, their, own))))
    return tuple(routes)


def _pieces(both: KvShare, group: KvGroup, theirs: KvShare, ours: KvShare) -> Iterator[ByteRun]:
    """Yield the runs of bytes that lie together in both memories."""
    run: ByteRun | None = None
    for their, our in zip(both.units(group, theirs), both.units(group, ours), strict=True):
        if run is not None and run.theirs + run.nbytes == their.offset and run.ours + run.nbytes == our.offset:
            run = ByteRun(run.theirs, run.ours, run.nbytes + their.nbytes)
            continue
        if run is not None:
            yield run
        run = ByteRun(their.offset, our.offset, their.nbytes)
    if run is not None:
        yield run
