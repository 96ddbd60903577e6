"""Which ranks hold shares of one whole, and which ones hold the same share.

    replicas=2, ranks=6:    share 0   share 1   share 2
                  group 0   rank 0    rank 1    rank 2
                  group 1   rank 3    rank 4    rank 5

The ranks of a group hold a whole together, and gather it among themselves. Those of a column hold
the same share, and the same states of it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Ring(NamedTuple):
    """Ranks that pass bytes on to each other, in a ring.

    per_node  of the `ranks`, on each node, next to each other
    """

    ranks: int
    per_node: int


@dataclass(frozen=True)
class RankMesh:
    """The ranks that train one model, of which several groups may each hold a whole.

    ranks     in all
    replicas  how many groups there are
    """

    ranks: int
    replicas: int = 1

    @property
    def shards(self) -> int:
        """How many ranks hold one whole together."""
        return self.ranks // self.replicas

    def shard_of(self, rank: int) -> int:
        """Which share a rank holds."""
        return rank % self.shards

    def group_of(self, rank: int) -> range:
        """The ranks that hold one whole together with this one, in the order of their shares."""
        first = rank - self.shard_of(rank)
        return range(first, first + self.shards)

    def replicas_of(self, rank: int) -> range:
        """The ranks that hold the same share as this one, in the order of their groups."""
        return range(self.shard_of(rank), self.ranks, self.shards)

    def group_ring(self, per_node: int) -> Ring:
        """Of the ranks of a group.

        per_node  ranks on a node, one behind the other; every node has as many
        """
        return Ring(self.shards, math.gcd(self.shards, per_node))

    def replica_ring(self, per_node: int) -> Ring:
        """Of the ranks that hold the same share."""
        beside, left = divmod(per_node, self.shards)
        return Ring(self.replicas, 1 if left else math.gcd(self.replicas, max(1, beside)))

    def whole_ring(self, per_node: int) -> Ring:
        """Of all ranks."""
        return Ring(self.ranks, per_node)

    def __str__(self) -> str:
        return str(self.ranks) if self.replicas == 1 else f"{self.replicas}x{self.shards}"
