"""Attention over a few blocks of keys for each block of queries, by torch's `flex_attention`.

    layout = BigBird(shared=1, window=3, random=2, causal=True)
    pattern = Pattern(layout, heads=16, tokens=8192, block=64)
    y = attend(q, k, v, pattern)                # [batch, heads, tokens, width], as q

A layout says which blocks of keys a block of queries reads, head by head. There are four, which
others know from DeepSpeed: `Fixed` (arXiv 1904.10509), `Variable`, `BigBird` (arXiv 2007.14062) and
`Longformer` (arXiv 2004.05150). Every query reads its own block, so that none reads nothing.

No kernel stands here: what computes is `flex_attention`, or attention under a dense mask, which is
the reference and the way to train where `flex_attention` cannot, on the CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from zcompile.errors import LayoutInvalid, Unsupported

TILE = 128
"""Tokens of a tile of `flex_attention`, which skips tiles that nobody reads: what its kernels are
tuned for. Blocks that are smaller are told apart inside of a tile."""


class Layout(Protocol):
    """Which blocks of keys each block of queries reads.

    causal  a token reads none that come after it
    """

    @property
    def causal(self) -> bool: ...

    def reads(self, head: int, blocks: int) -> Tensor:
        """[queries, keys] bool, of `blocks` blocks each; `causal` is applied by who asks."""


@dataclass(frozen=True)
class Fixed:
    """Windows of blocks that read each other, and the last of each window are read by all.

    window    blocks of a window
    shared    blocks at the end of a window that everybody reads
    patterns  heads take turns in which blocks of a window are shared: the last, those before, ..
    both      what is shared reads everybody too
    raises    LayoutInvalid
    """

    window: int = 4
    shared: int = 1
    patterns: int = 1
    both: bool = False
    causal: bool = False

    def __post_init__(self) -> None:
        _positive(self, "window", "shared", "patterns")
        if self.shared * self.patterns > self.window:
            why = f"are more blocks than a window of {self.window} has"
            raise LayoutInvalid("Fixed", f"{self.patterns} patterns of {self.shared} shared", why)

    def reads(self, head: int, blocks: int) -> Tensor:
        at = torch.arange(blocks)
        made = at[:, None] // self.window == at[None] // self.window
        first = self.window - (1 + head % self.patterns) * self.shared
        # Of a last window that is not whole, as many blocks from its end.
        sizes = torch.clamp(blocks - at // self.window * self.window, max=self.window)
        place = at % self.window + self.window - sizes
        shared = (place >= first) & (place < first + self.shared)
        return _with_shared(made, shared, self.both)


@dataclass(frozen=True)
class Variable:
    """Windows of different sizes, blocks that all read, and some that each draws.

    windows  blocks of the first window, of the second, ..; the last size goes on
    shared   numbers of the blocks that everybody reads
    random   blocks that each block of queries reads besides, drawn once
    both     what is shared reads everybody too
    seed     of the draw
    raises   LayoutInvalid
    """

    windows: Sequence[int] = (4,)
    shared: Sequence[int] = (0,)
    random: int = 0
    both: bool = False
    causal: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.windows or min(self.windows) < 1:
            raise LayoutInvalid("Variable", f"windows={self.windows!r}", "must be one or more each")
        _numbers(self)

    def reads(self, head: int, blocks: int) -> Tensor:
        sizes = torch.tensor(self.windows)
        if (left := blocks - int(sizes.sum())) > 0:
            sizes = torch.cat([sizes, sizes[-1].repeat(-(-left // int(sizes[-1])))])
        number = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[:blocks]
        made = number[:, None] == number[None]
        made |= _drawn(self, head, blocks)
        return _with_shared(made, _chosen(self.shared, blocks), self.both)


@dataclass(frozen=True)
class BigBird:
    """A window that slides, the first blocks read all and are read by all, and some are drawn.

    shared  blocks from the first on
    window  blocks around each, itself in the middle: an odd number
    random  blocks that each block of queries reads besides, drawn once for each head
    seed    of the draw
    raises  LayoutInvalid
    """

    shared: int = 1
    window: int = 3
    random: int = 1
    causal: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "shared")
        _odd(self)
        _numbers(self)

    def reads(self, head: int, blocks: int) -> Tensor:
        made = _sliding(self.window, blocks) | _drawn(self, head, blocks)
        return _with_shared(made, torch.arange(blocks) < self.shared, both=True)


@dataclass(frozen=True)
class Longformer:
    """A window that slides, and chosen blocks that read all and are read by all.

    window  blocks around each, itself in the middle: an odd number
    shared  numbers of the chosen blocks
    raises  LayoutInvalid
    """

    window: int = 3
    shared: Sequence[int] = (0,)
    causal: bool = False

    def __post_init__(self) -> None:
        _odd(self)
        _numbers(self)

    def reads(self, head: int, blocks: int) -> Tensor:
        return _with_shared(_sliding(self.window, blocks), _chosen(self.shared, blocks), both=True)


@dataclass(frozen=True)
class Pattern:
    """A layout for so many heads and tokens.

    block   tokens of a block; on CUDA 16 or more
    device  where masks are
    raises  LayoutInvalid
    """

    layout: Layout
    heads: int
    tokens: int
    block: int = 64
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        _positive(self, "heads", "tokens", "block")
        _ = self.blocks  # made once, here: in a forward that is compiled it would be in the graph

    @cached_property
    def reads(self) -> Tensor:
        """[heads, blocks, blocks] bool: whether any token of a block of queries reads any of a
        block of keys."""
        blocks = -(-self.tokens // self.block)
        made = torch.stack([self.layout.reads(head, blocks) for head in range(self.heads)])
        return (made.tril() if self.layout.causal else made).to(self.device)

    @cached_property
    def dense(self) -> Tensor:
        """[heads, tokens, tokens] bool, True where a token reads another."""
        at = torch.arange(self.tokens, device=self.device)
        found = self.reads[:, at[:, None] // self.block, at[None] // self.block]
        return found & (at[:, None] >= at[None]) if self.layout.causal else found

    @cached_property
    def blocks(self) -> BlockMask:
        """The mask of `flex_attention`: tiles that are read, those of them in whole, and the rule
        inside of the others. Nothing of tokens times tokens is made."""
        times = max(1, TILE // self.block)
        n = -(-self.reads.shape[1] // times)
        room = n * times - self.reads.shape[1]
        fine = torch.nn.functional.pad(self.reads, (0, room, 0, room))
        fine = fine.view(self.heads, n, times, n, times)
        some, whole = fine.any(4).any(2), fine.all(4).all(2)
        tile = times * self.block
        if self.layout.causal:
            whole = whole.tril(-1)
        if self.tokens % tile:
            whole[:, -1:, :], whole[:, :, -1:] = False, False
        rule = _rule(self.reads, self.block, self.layout.causal)
        return BlockMask.from_kv_blocks(
            *_listed(some & ~whole),
            *_listed(whole),
            BLOCK_SIZE=(tile, tile),
            mask_mod=rule,
            seq_lengths=(self.tokens, self.tokens),
        )

    @property
    def share(self) -> float:
        """Of all pairs of blocks, those that are read."""
        return float(self.reads.float().mean())


def attend(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, by: str = "flex"
) -> Tensor:
    """Attention [batch, heads, tokens, width] of the pairs of blocks that a pattern has.

    query, key, value  [batch, heads, tokens, width], heads and tokens of the pattern
    by       "flex": torch's `flex_attention`, which skips what is not read where Inductor compiles
             it, and computes all pairs under a mask elsewhere; "dense": the reference, attention
             under a mask of tokens times tokens
    raises   LayoutInvalid for other sizes; Unsupported where `flex_attention` has no backward
    """
    if by not in ("flex", "dense"):
        raise LayoutInvalid("attend", f"by={by!r}", "is not one of flex, dense")
    _check_sizes(query, pattern)
    if by == "dense":
        return scaled_dot_product_attention(query, key, value, attn_mask=pattern.dense)
    if _backward_is_missing(query, key, value):
        raise Unsupported(
            "flex_attention has no backward on the CPU, so that attend(by='flex') computes there "
            "for inference only, under torch.no_grad() from tensors that need no gradient",
            "train on the CPU by attend(..., by='dense'), which gives the same numbers in memory "
            "of tokens times tokens, or on a GPU",
        )
    made = flex_attention(query, key, value, block_mask=pattern.blocks)
    assert isinstance(made, Tensor), "no statistics beside it are asked for"
    return made


def _backward_is_missing(*given: Tensor) -> bool:
    """Whether `flex_attention` refuses these, for want of a backward."""
    return any(t.device.type == "cpu" and t.requires_grad for t in given)


def _rule(reads: Tensor, block: int, causal: bool) -> Callable[..., Tensor]:
    """The `mask_mod` of a pattern: whether a token reads another, by their numbers."""

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = reads[head, query // block, key // block]
        return found & (query >= key) if causal else found

    return rule


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of tiles how many are set and which, these first: as BlockMask takes them."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1).int()[None], order.int()[None]


def _with_shared(made: Tensor, shared: Tensor, both: bool) -> Tensor:
    """`made` [queries, keys], and the columns that are shared; if `both`, their rows too."""
    made = made | shared[None]
    return made | shared[:, None] if both else made


def _chosen(numbers: Sequence[int], blocks: int) -> Tensor:
    """[blocks] bool: whether a block is one of these; those behind the end are not there."""
    made = torch.zeros(blocks, dtype=torch.bool)
    made[[n for n in numbers if n < blocks]] = True
    return made


def _sliding(window: int, blocks: int) -> Tensor:
    at = torch.arange(blocks)
    return (at[:, None] - at[None]).abs() <= window // 2


def _drawn(layout: Variable | BigBird, head: int, blocks: int) -> Tensor:
    """[queries, keys] bool: as many blocks of keys for each block of queries as are drawn, of
    those that it may read; all, if there are no more."""
    source = torch.Generator().manual_seed(1000003 * layout.seed + head)
    rank = torch.rand(blocks, blocks, generator=source)
    if layout.causal:
        rank = rank.masked_fill(~torch.ones(blocks, blocks).tril().bool(), -1.0)
    made = torch.zeros(blocks, blocks, dtype=torch.bool)
    count = min(layout.random, blocks)
    made.scatter_(1, rank.topk(count, 1).indices, True)
    return made & (rank >= 0)


def _positive(given: object, *names: str) -> None:
    for name in names:
        if getattr(given, name) < 1:
            raise LayoutInvalid(
                type(given).__name__, f"{name}={getattr(given, name)}", "must be one or more"
            )


def _odd(given: BigBird | Longformer) -> None:
    if given.window < 1 or given.window % 2 == 0:
        why = "must be odd: as many blocks before as behind"
        raise LayoutInvalid(type(given).__name__, f"window={given.window}", why)


def _numbers(given: Variable | BigBird | Longformer) -> None:
    """What is no count may be zero, and not less."""
    shared = given.shared
    values = {"shared": [0, *shared] if isinstance(shared, Sequence) else [shared]}
    values["random"] = [getattr(given, "random", 0)]
    for name, numbers in values.items():
        if min(numbers) < 0:
            raise LayoutInvalid(
                type(given).__name__, f"{name}={getattr(given, name)}", "must not be negative"
            )


def _check_sizes(query: Tensor, pattern: Pattern) -> None:
    wanted = (pattern.heads, pattern.tokens)
    if query.dim() != 4 or tuple(query.shape[1:3]) != wanted:
        raise LayoutInvalid(
            "attend",
            f"query of size {list(query.shape)}",
            f"is not [batch, {pattern.heads}, {pattern.tokens}, width], as its pattern says; make "
            "a pattern for each length",
        )
