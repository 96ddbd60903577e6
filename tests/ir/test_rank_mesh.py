"""Which ranks hold shares of one whole, and which hold the same."""

import pytest

from zcompile.ir.rank_mesh import RankMesh, Ring


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1), (2, 3), (3, 2)])
def test_each_share_is_with_one_rank_of_each_group(shape):
    replicas, shards = shape
    mesh = RankMesh(replicas * shards, replicas)
    assert mesh.shards == shards
    for rank in range(mesh.ranks):
        group, same = mesh.group_of(rank), mesh.replicas_of(rank)
        assert [mesh.shard_of(other) for other in group] == [*range(shards)]
        assert {mesh.shard_of(other) for other in same} == {mesh.shard_of(rank)}
        assert len(same) == replicas
        assert set(group) & set(same) == {rank}


@pytest.mark.parametrize(
    ("shape", "per_node", "group", "between"),
    [
        ((2, 4), 8, (4, 4), (2, 2)),
        ((2, 4), 4, (4, 4), (2, 1)),
        ((4, 2), 4, (2, 2), (4, 2)),
        ((2, 4), 2, (4, 2), (2, 1)),
        ((2, 4), 1, (4, 1), (2, 1)),
        ((1, 8), 4, (8, 4), (1, 1)),
        ((8, 1), 4, (1, 1), (8, 4)),
        ((3, 2), 3, (2, 1), (3, 1)),
    ],
)
def test_rings_leave_a_node_where_their_ranks_do(shape, per_node, group, between):
    mesh = RankMesh(shape[0] * shape[1], shape[0])
    assert mesh.group_ring(per_node) == Ring(*group)
    assert mesh.replica_ring(per_node) == Ring(*between)
    assert mesh.whole_ring(per_node) == Ring(mesh.ranks, per_node)
