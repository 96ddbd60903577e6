"""How a loss over a vocabulary is cut: rows of the weight per tile, tokens per slice of a tile."""

from dataclasses import dataclass

ALIGNED = 64
"""Tiles are multiples of so many classes where they can be: whole vectors of every kernel, and
rows that begin on disk where direct I/O may begin."""
NARROWEST = 256
"""Below so many classes a tile's products run far under the peak of a device; tokens are cut then.
(4096 tokens of width 512 times 256 rows take 5 % longer per row than times 4096 rows, on two cores
of a Xeon; times 32 rows, twice as long.)"""


@dataclass(frozen=True)
class Cut:
    """classes  rows of the weight per tile; the last tile may have fewer
    tokens      rows of the input per slice; the last slice may have fewer
    """

    classes: int
    tokens: int


def choose_cut(
    whole_nbytes: int,
    tokens: int,
    classes: int,
    logit_nbytes: int,
    row_nbytes: int,
    tile_bytes: int,
) -> Cut | None:
    """None if the logits fit `tile_bytes` whole. Otherwise a piece of them fits, and so do two
    tiles of the weight: one in use, the next (or its gradient) beside it.

    whole_nbytes  of the logits as the model makes them, perhaps of more tokens than have targets
    logit_nbytes  working memory per logit of a piece, of all values that exist at once
    row_nbytes    of one row of the weight
    """
    if whole_nbytes <= tile_bytes:
        return None
    most = max(1, min(classes, tile_bytes // (2 * row_nbytes) if row_nbytes else classes))
    wide = tile_bytes // (max(tokens, 1) * logit_nbytes)
    per_tile = even(classes, max(min(most, wide), min(most, NARROWEST)))
    return Cut(per_tile, even(tokens, max(1, tile_bytes // (per_tile * logit_nbytes))))


def even(whole: int, most: int) -> int:
    """The size of equal pieces, none larger than `most`; only the last may be smaller."""
    if most >= whole:
        return whole
    unit = ALIGNED if most >= ALIGNED else 1
    most -= most % unit
    pieces = -(-whole // most)
    size = -(-whole // pieces)
    return min(most, -(-size // unit) * unit)
