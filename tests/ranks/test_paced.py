"""Throttles between ranks: collectives take the time that they are given, and nothing else changes.

No test asks how long something took at most, but for what a plan says of it.
"""

import functools
import time
from dataclasses import replace

import pytest
import torch
from rank_models import adamw, state_of, train, trained_eagerly, words
from rank_pool import RankRaised

import zcompile
from zcompile.config import Config
from zcompile.errors import ZinfError
from zcompile.frontend import ranks
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import plan_in_force
from zcompile.frontend.session_plan import costs_of
from zcompile.ir.partition import Crossing, Partition, SharedRange, exchanged, gathered
from zcompile.ir.rank_mesh import RankMesh
from zcompile.machine import files
from zcompile.machine.model import Link, slowest_way
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.ranks.lane import Lane
from zcompile.runtime.ranks.link import LinksOfMesh, RankLink

STEPS = 4
"""Two are seen, the third is planned."""
ROOMY = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB", "stage": 3}
RATE = 20e6


@pytest.fixture(scope="module")
def expected():
    return functools.cache(lambda: trained_eagerly(steps=STEPS))


def paced(mesh, throttle, more):
    """Digests after training, what the last step was like, and what a plan takes links for."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    model = words()
    zcompile.offload(model, mesh=mesh, throttle=throttle, **ROOMY, **more)
    optimizer = adamw(model.parameters())
    run = torch.compile(model, backend="zinf")
    train(model, run, optimizer, rank, ranks, steps=range(STEPS - 1))
    zcompile.stats(model, reset=True)
    train(model, run, optimizer, rank, ranks, steps=range(STEPS - 1, STEPS))
    stats, session = zcompile.stats(model), session_behind(model)
    links = costs_of(session).machine.links
    collectives = [c.schedule.collectives for c in plan_in_force(session).step.calls]
    found = {
        "bytes": stats["bytes"],
        "seconds": stats["seconds"],
        "predicted": stats["predicted"],
        "rates": {name: link.bytes_per_s for name, link in links.items()},
        "collectives": collectives,
    }
    state = state_of(model, optimizer)
    zcompile.close(model)
    return state, found


@pytest.mark.parametrize(
    ("link", "more"),
    [
        ("rank_to_rank", {}),
        pytest.param("node_to_node", {"ranks_per_node": 1}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_paced_link_changes_the_time_and_no_bit(pool, expected, link, more):
    rows = pool.run(paced, 2, {link: RATE}, more)
    for state, found in rows:
        assert state == expected()
        nbytes = found["bytes"][link]
        assert nbytes == found["predicted"]["bytes"][link] > 0
        assert found["rates"][link] == RATE, "plans know the throttle"
        busy_s = found["predicted"]["busy"][link]
        most = max(found["bytes"][link] for _, found in rows)
        assert busy_s == pytest.approx(most / RATE), "a ring is as slow as who takes most"
        assert found["seconds"][link] >= busy_s
        assert found["predicted"]["step_s"] >= found["predicted"]["least_s"] >= busy_s
        assert found["collectives"] == rows[0][1]["collectives"]


UNEVEN = (203, 100)
"""A weight that three ranks hold shares of, the last of which is filled up with padding."""


def counted(mesh):
    """Bytes that have come in messages of a planned step, bytes of the link, and those that were
    predicted."""
    rank, came = mesh.get_local_rank(), [0]

    def counts(lane, what, sends, receives):
        paced = "over paced links" in what
        if lane is not session.fabric._lanes["agree"] and not paced:
            came[0] += sum(tensor.nbytes for _, tensor in receives)
        carry(lane, what, sends, receives)

    torch.manual_seed(0)
    model = torch.nn.Linear(*UNEVEN[::-1], bias=False)
    zcompile.offload(model, mesh=mesh, throttle={"rank_to_rank": RATE}, **ROOMY)
    session, carry = session_behind(model), Lane.messages
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torch.compile(model, backend="zinf")
    Lane.messages = counts
    try:
        for step in range(STEPS):
            if step == STEPS - 1:
                zcompile.stats(model, reset=True)
                came[0] = 0
            run(torch.full((2, UNEVEN[1]), float(rank))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = zcompile.stats(model)
    finally:
        Lane.messages = carry
        zcompile.close(model)
    return came[0], stats["bytes"]["rank_to_rank"], stats["predicted"]["bytes"]["rank_to_rank"]


def test_what_comes_is_counted_where_shares_are_padded(pool):
    rows = pool.run(counted, 3)
    for came, nbytes, predicted in rows:
        assert came == nbytes == predicted > 0
    assert len({came for came, *_ in rows}) > 1, "there is padding"


NBYTES, LATE_S = 400_000, 0.2
SLOW = 4e6
"""At which half of NBYTES, which comes from the other rank, takes a twentieth of a second."""


def carried(mesh):
    """When this rank came to a gather, rank 1 late, and when that was over, on the clock of all;
    seconds of a gather and an exchange that share the link, each rank beginning with another; what
    came, and what was counted."""
    rank, link = mesh.get_local_rank(), RankLink("rank_to_rank", SLOW)
    fabric = Fabric([0, 1], mesh.get_group(), 60.0)
    fabric.over(LinksOfMesh.all_one(link), 2)
    try:
        whole = torch.full((NBYTES,), 9, dtype=torch.uint8)
        whole[rank * NBYTES // 2 :][: NBYTES // 2] = rank
        fabric.agree("begin")
        if rank:
            time.sleep(LATE_S)
        came = time.perf_counter()
        fabric.gather(whole, "w", []).wait()
        over = time.perf_counter()
        flat = torch.full((NBYTES // 4,), float(rank))
        again = whole.clone()
        fabric.agree("go on")
        begun = time.perf_counter()
        starts = [
            lambda: fabric.gather(again, "w", []),
            lambda: fabric.exchange(flat, None, "g", []).ticket,
        ]
        for promise in [start() for start in (starts if rank else starts[::-1])]:
            promise.wait()
        both_s = time.perf_counter() - begun
        return (
            came,
            over,
            both_s,
            whole.tolist() == again.tolist(),
            whole.sum().item(),
            link.totals(),
        )
    finally:
        fabric.close(ZinfError("closed"))


def test_a_collective_takes_what_its_bytes_take_on_the_link(pool):
    """From when the last rank comes to it; and two that cross at once share the link."""
    one_s = NBYTES / 2 / SLOW
    rows = pool.run(carried, 2)
    last = max(came for came, *_ in rows)
    for _, over, both_s, same, total, (nbytes, seconds) in rows:
        assert over >= last + one_s
        assert both_s >= 3 * one_s, "the exchange brings all that the other has made"
        assert same
        assert total == NBYTES // 2
        assert nbytes == 2 * NBYTES
        assert seconds >= 4 * one_s


def held(mesh):
    """Fail while the link holds a gather back, for longer than any test; what was held, and what
    still is."""
    fabric = Fabric([0, 1], mesh.get_group(), 60.0)
    fabric.over(LinksOfMesh.all_one(RankLink("rank_to_rank", 1.0)), 2)
    promise = fabric.gather(torch.zeros(NBYTES, dtype=torch.uint8), "w", [])
    while not (told := fabric.links.of_all.holding()):
        time.sleep(0.01)
    fabric.fail(ZinfError("enough"))
    for _ in range(1000):
        if not (still := fabric.links.of_all.holding()):
            break
        time.sleep(0.01)
    fabric.close(ZinfError("closed"))
    return told, still, str(promise.error)


def held_for_longer(mesh):
    """Hold a gather back on rank 1 for longer than rank 0 waits for one that does nothing; what has
    become of it."""
    fabric = Fabric([0, 1], mesh.get_group(), 60.0)
    fabric._watch._timeout_s = 0.0  # when all are there
    link = RankLink("rank_to_rank", (1e9, NBYTES / 2 / 2.5)[mesh.get_local_rank()])
    fabric.over(LinksOfMesh.all_one(link), 2)
    promise = fabric.gather(torch.zeros(NBYTES, dtype=torch.uint8), "w", [])
    promise.wait_finished()
    fabric.agree("have it")
    fabric.close(ZinfError("closed"))
    return str(promise.error)


@pytest.mark.slow
def test_a_rank_that_holds_back_is_not_taken_for_one_that_does_not_come(pool):
    assert pool.run(held_for_longer, 2) == ["None"] * 2


def test_what_is_held_back_is_let_go_when_ranks_fail(pool):
    assert pool.run(held, 2) == [("paces gather 'w' by its throttle", "", "enough")] * 2


def offloaded(mesh, throttles, more):
    fields = {**ROOMY, **more, "throttle": throttles[mesh.get_local_rank()]}
    zcompile.close(zcompile.offload(words(), mesh=mesh, **fields))


def test_ranks_have_one_throttle(pool):
    """Who paces its link tells the others when bytes are there, and they wait for that."""
    with pytest.raises(RankRaised, match=r"RanksDiffer: the ranks differ in how they of"):
        pool.run(offloaded, 2, [{"rank_to_rank": RATE}, {}], {})


@pytest.mark.parametrize("link", ["rank_to_rank", "node_to_node"])
def test_ranks_that_differ_in_a_throttle_are_told_its_link(pool, link):
    """Beside a machine that takes more words than are told."""
    more = {"machine": "dgx2-v100-4nodes"}
    with pytest.raises(RankRaised, match=rf"RanksDiffer: .*\s+rank 0: .* throttle\['{link}'\]"):
        pool.run(offloaded, 2, [{link: RATE}, {}], more)


def test_nodes_have_as_many_ranks(pool):
    says = r"ranks_per_node=2 does not divide the 3 ranks"
    with pytest.raises(RankRaised, match=says):
        pool.run(offloaded, 3, [{}] * 3, {"ranks_per_node": 2})


def test_one_process_has_no_nodes():
    with pytest.raises(zcompile.errors.ConfigInvalid, match=r"ranks_per_node=1 is of several ra"):
        zcompile.offload(words(), ranks_per_node=1, mesh=False, **{**ROOMY, "stage": "auto"})


@pytest.mark.parametrize("link", ["rank_to_rank", "node_to_node"])
def test_one_process_has_no_links_to_others(link):
    says = rf"throttle\['{link}'\]=4000000.0 is of several ranks"
    with pytest.raises(zcompile.errors.ConfigInvalid, match=says):
        zcompile.offload(words(), throttle={link: SLOW}, mesh=False, **{**ROOMY, "stage": "auto"})


@pytest.mark.parametrize(
    ("link", "per_node", "says"),
    [
        ("rank_to_rank", 1, "each of the 4 nodes has one rank"),
        ("node_to_node", 4, "all 4 ranks are on one node"),
        ("rank_to_rank", 2, ""),
        ("rank_to_rank", 4, ""),
        ("node_to_node", 1, ""),
    ],
)
def test_a_throttle_that_paces_nothing_is_told(caplog, link, per_node, says):
    config = Config(device="cpu", throttle={link: SLOW})
    found = ranks._links_of(config, RankMesh(4), per_node).of_all
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(says)
    assert found.bytes_per_s == (None if says else SLOW)
    for message in told:
        assert f"'{link}', which paces nothing" in message
        assert says in message


@pytest.mark.parametrize("link", ["rank_to_rank", "node_to_node"])
def test_a_throttle_paces_the_rings_of_which_its_link_is_the_slowest(link):
    """Also where a machine says that the other one is slower, which all rings but one pass."""
    machine = files.find("h200-node")
    rates = {"rank_to_rank": 1e9, "node_to_node": 10e9}
    links = machine.links | {name: Link(name, rate) for name, rate in rates.items()}
    config = Config(device="cpu", machine=replace(machine, links=links), throttle={link: 2e9})
    found = ranks._links_of(config, RankMesh(4, 2), 2)
    names = ["rank_to_rank", "node_to_node", "rank_to_rank"]
    assert [one.name for one in found] == names
    assert [one.bytes_per_s for one in found] == [2e9 if name == link else None for name in names]
    assert found.of_group is found.of_all


def test_a_throttle_that_a_slower_link_makes_useless_is_told(caplog):
    config = Config(device="cpu", throttle={"rank_to_rank": 1e9, "node_to_node": 2e9})
    assert ranks._links_of(config, RankMesh(4), 2).of_all.bytes_per_s == 1e9
    (told,) = [record.getMessage() for record in caplog.records]
    assert "'node_to_node', which paces nothing" in told
    assert "passes 'rank_to_rank' too" in told


def test_time_in_which_two_collectives_cross_counts_once():
    link = RankLink()
    for since, until in ((0.0, 10.0), (20.0, 21.0)):
        link.begins(since)
        link.begins(since + 0.25)
        link.ends(Crossing(3, 5), since + 0.25, since + 0.5)
        link.ends(Crossing(4, 5), since, until)
    assert link.totals(reset=True) == (14, 11.0)
    assert link.totals() == (0, 0.0)
    assert link.mean_bytes_per_s == 20 / 11.0, "of the rank that waits for most, at all times"


def test_what_was_on_its_way_at_a_reset_counts_once_in_the_rate_of_a_link():
    link = RankLink()
    assert not link.mean_bytes_per_s
    link.begins(0.0)
    link.begins(2.0)
    link.ends(Crossing(4, 4), 0.0, 3.0)
    link.totals(reset=True)
    link.ends(Crossing(4, 4), 2.0, 4.0)
    assert link.totals() == (4, 2.0)
    assert link.mean_bytes_per_s == 8 / 4.0


@pytest.mark.parametrize("given", [0, True, 1.5, "2"])
def test_a_number_of_ranks_is_one(given):
    with pytest.raises(zcompile.errors.ConfigInvalid, match=r"must be an int of ranks, at least 1"):
        Config(device="cpu", ranks_per_node=given)


@pytest.mark.parametrize(
    ("rates", "ranks", "per_node", "way"),
    [
        ({}, 1, 1, None),
        ({"node_to_node": 1.0}, 4, 4, "rank_to_rank"),
        ({"rank_to_rank": 1.0}, 4, 1, "node_to_node"),
        ({}, 4, 2, "node_to_node"),
        ({"rank_to_rank": 1.0}, 4, 2, "rank_to_rank"),
        ({"rank_to_rank": 2.0, "node_to_node": 1.0}, 4, 2, "node_to_node"),
        ({"rank_to_rank": 1.0, "node_to_node": 2.0}, 4, 2, "rank_to_rank"),
    ],
)
def test_a_ring_is_as_fast_as_the_slowest_link_that_it_passes(rates, ranks, per_node, way):
    assert slowest_way(rates, ranks, per_node) == way


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("begin", "nbytes"), [(0, 4096), (1024, 4096), (0, 12288)])
def test_what_crosses_of_a_tile_is_what_each_lacks(ranks, begin, nbytes):
    """As if the ranks passed bytes on in a ring: each step brings a rank the part of another."""
    tiles = [SharedRange(begin, nbytes, 4096, rank, ranks) for rank in range(ranks)]
    brought = [
        sum(
            last - first
            for other in range(ranks)
            if other != rank
            for first, last in [tiles[rank].of_rank(other)]
        )
        for rank in range(ranks)
    ]
    held = [tile.own_nbytes for tile in tiles]
    if sum(held) == nbytes:  # else it goes beyond the last share
        found = [gathered(nbytes, ranks, tile) for tile in tiles]
        assert [x.arrives for x in found] == brought
        assert {x.slowest for x in found} == {max(brought)}
    summed = [exchanged(nbytes, ranks, tile=tile) for tile in tiles]
    assert [x.arrives for x in summed] == [n * (ranks - 1) for n in held]
    assert {x.slowest for x in summed} == {max(held) * (ranks - 1)}


@pytest.mark.parametrize("numel", [1, 5000, 20300, 6144])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_of_a_gradient_no_padding_crosses(numel, ranks):
    for itemsize in (2, 4):
        parts = [Partition(numel, rank, ranks) for rank in range(ranks)]
        whole = [part.range_of(itemsize) for part in parts]
        brought = [part.own_count * itemsize * (ranks - 1) for part in parts]
        found = [exchanged(numel * itemsize, ranks, x) for x in whole]
        assert [x.arrives for x in found] == brought
        assert {x.slowest for x in found} == {max(brought)}
        assert [x.in_nbytes(numel * 8) for x in whole] == [part.range_of(8) for part in parts]
