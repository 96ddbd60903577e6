"""Machines are data: checked when made, read and written as text, found by name."""

import copy
import pickle
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcompile.ir.units import GiB, TiB
from zcompile.machine import files
from zcompile.machine.files import MachineUnknown, MachineUnreadable, find, names, read, write
from zcompile.machine.model import (
    DTYPES,
    LINKS,
    RANK_LINKS,
    TIER_LINKS,
    TIERS,
    Compute,
    Link,
    Machine,
    MachineInvalid,
    scaled,
    throttled,
    with_ranks,
    with_tier,
)

ROOT = Path(__file__).parents[2]


def small(**fields: object) -> Machine:
    links = {
        "h2d": Link("h2d", 10e9, 1e-5),
        "d2h": Link("d2h", 10e9, 1e-5),
        "disk_read": Link("disk_read", 2e9, 1e-4, shares="disk_write"),
        "disk_write": Link("disk_write", 1e9, 1e-4, shares="disk_read"),
    }
    given = {
        "name": "small",
        "tiers": {"device": 8 * GiB, "host": 32 * GiB},
        "links": links,
        "compute": Compute({"float32": 1e12}, 100e9, 1e-6),
        **fields,
    }
    return Machine(**given)


TEXT = """
name = "small"
[tiers]
device = "8GiB"
[links.h2d]
bytes_per_s = "10GB/s"
[compute]
memory_bytes_per_s = "100GB/s"
[compute.flops_per_s]
float32 = "1TFLOP/s"
"""


def test_a_transfer_takes_its_latency_and_its_bytes():
    assert small().links["h2d"].seconds(10**9) == pytest.approx(0.10001)


def test_nothing_in_a_machine_can_change():
    machine = small()
    for mapping in (machine.tiers, machine.links, machine.compute.flops_per_s):
        with pytest.raises(TypeError):
            mapping["device"] = 1


def test_a_machine_does_not_follow_the_mapping_it_was_made_from():
    tiers = {"device": GiB}
    machine = small(tiers=tiers)
    tiers["device"] = 2 * GiB
    assert machine.tiers["device"] == GiB


def test_a_machine_can_be_copied_and_sent_to_another_process():
    links = {"rank_to_rank": Link("rank_to_rank", 1e9)}
    machine = small(ranks=4, ranks_per_node=4, replicas=2, links=links)
    assert pickle.loads(pickle.dumps(machine)) == machine
    assert copy.deepcopy(machine) == machine


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Link("h2e", 1.0), "links: 'h2e' is no link; did you mean 'h2d'"),
        (lambda: Link("h2d", 0.0), "links.h2d: bytes_per_s=0.0 is no rate; give a finite number"),
        (lambda: Link("h2d", float("inf")), "bytes_per_s=inf is no rate"),
        (lambda: Link("h2d", float("nan")), "bytes_per_s=nan is no rate"),
        (lambda: Link("h2d", "3GB/s"), "bytes_per_s='3GB/s' is no rate"),
        (lambda: Link("h2d", 1.0, -1.0), "latency_s=-1.0 is no time"),
        (lambda: Link("h2d", 1.0, True), "latency_s=True is no time"),
        (lambda: Link("h2d", 1.0, shares="h2d"), "shares='h2d' is the link itself"),
        (lambda: Link("h2d", 1.0, shares="d2d"), "shares='d2d' is no link; did you mean"),
        (lambda: Compute({"float33": 1.0}, 1.0), "'float33' is no dtype; did you mean 'float32'"),
        (lambda: Compute({"float32": -1.0}, 1.0), "float32=-1.0 is no rate"),
        (lambda: Compute({}, 0.0), "memory_bytes_per_s=0.0 is no rate"),
        (lambda: small(runs_kernels=1), "runs_kernels=1 is neither true nor false; say one"),
        (lambda: small(name=""), "machine: name='' is no name"),
        (lambda: small(name="a\nb"), "is no name; give it one of printable characters"),
        (lambda: small(tiers={"gpu": 1}), "small: 'gpu' is no tier; known are device, host, disk"),
        (lambda: small(tiers={"host": 0}), "tiers.host=0 is no capacity"),
        (lambda: small(tiers={"host": 1.5}), "tiers.host=1.5 is no capacity"),
        (lambda: small(links={"h2d": Link("d2h", 1.0)}), "links.'h2d'. is called 'd2h'"),
        (
            lambda: small(links={"h2d": Link("h2d", 1.0, shares="d2h")}),
            "does not share in turn; let",
        ),
        (lambda: small(ranks=0), "ranks=0 is no number of ranks"),
        (lambda: small(ranks=6, ranks_per_node=4), "ranks=6 do not fill nodes of ranks_per_node=4"),
        (lambda: small(ranks=4, ranks_per_node=4), "no way between them; add links.rank_to_rank"),
        (
            lambda: small(ranks=4, ranks_per_node=4, replicas=3),
            "ranks=4 are not replicas=3 groups of as many",
        ),
        (lambda: small(ranks=4), "no way between them; add links.node_to_node"),
        (
            lambda: small(slower_way="h2d"),
            "slower_way='h2d' is no link between ranks; name one of rank_to_rank, node_to_node",
        ),
    ],
)
def test_what_cannot_be_a_machine_says_why(make, sentence):
    with pytest.raises(MachineInvalid, match=sentence):
        make()


def test_another_capacity_is_another_machine():
    machine = small()
    assert with_tier(machine, "device", GiB).tiers == {"device": GiB, "host": 32 * GiB}
    assert with_tier(machine, "disk", TiB).tiers["disk"] == TiB
    assert "host" not in with_tier(machine, "host", 0).tiers
    assert machine == small()
    with pytest.raises(MachineInvalid, match="'dsik' is no tier; did you mean 'disk'"):
        with_tier(machine, "dsik", GiB)


def test_rates_are_scaled_by_name():
    faster = scaled(small(), {"h2d": 2.0}, flops=10, memory=3)
    assert faster.links["h2d"].bytes_per_s == 20e9
    assert faster.links["d2h"] == small().links["d2h"]
    assert faster.compute == Compute({"float32": 1e13}, 300e9, 1e-6)
    with pytest.raises(MachineInvalid, match="'rank_to_rank' is no link of it"):
        scaled(small(), {"rank_to_rank": 2.0})
    with pytest.raises(MachineInvalid, match="is no rate"):
        scaled(small(), {"h2d": 0.0})


def test_a_throttle_slows_what_is_faster_and_nothing_else():
    slowed = throttled(small(), {"h2d": 1e9, "d2h": 99e9}, latency_s=1e-3)
    assert slowed.links["h2d"].bytes_per_s == 1e9
    assert slowed.links["h2d"].latency_s == pytest.approx(1.01e-3)
    assert slowed.links["d2h"] == small().links["d2h"]
    assert throttled(small(tiers={}, links={}), {"h2d": 1e9}).links == {}


@pytest.mark.parametrize(
    ("rates", "taking_turns"),
    [
        ({}, True),
        ({"disk_read": 1e9, "disk_write": 0.4e9}, False),  # 0.5 + 0.4 of the disk's time
        ({"disk_read": 0.2e9}, False),  # 0.1 + 1
        ({"disk_read": 1.9e9, "disk_write": 0.9e9}, True),
    ],
)
def test_throttled_links_take_turns_only_where_the_disk_below_is_short(rates, taking_turns):
    links = throttled(small(), rates).links
    assert (links["disk_read"].shares == "disk_write") is taking_turns
    assert (links["disk_write"].shares == "disk_read") is taking_turns


def test_a_text_becomes_a_machine():
    assert read(TEXT, "a file") == Machine(
        "small", {"device": 8 * GiB}, {"h2d": Link("h2d", 10e9)}, Compute({"float32": 1e12}, 1e11)
    )


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("name = ", "name : ", "f.toml: the text is not TOML: .*line 2.*; mend it"),
        ('name = "small"', "", "f.toml: 'name' is missing; add it"),
        ("[tiers]", "[tears]", "f.toml: 'tears' is not known here; did you mean 'tiers'"),
        ('"small"', "3", "f.toml: name=3 is no text; put it in quotes"),
        (
            'device = "8GiB"',
            'device = "8 apples"',
            "f.toml: tiers: device='8 apples' cannot be used",
        ),
        ("device", "divice", "f.toml: small: 'divice' is no tier; did you mean 'device'"),
        (
            "bytes_per_s =",
            "bytes_per_sec =",
            "f.toml: links.h2d: 'bytes_per_sec' is not known here",
        ),
        ('bytes_per_s = "10GB/s"', "", "f.toml: links.h2d: 'bytes_per_s' is missing"),
        ('"10GB/s"', '"10GB"', "f.toml: links.h2d: bytes_per_s='10GB' cannot be used; .*'300MB/s'"),
        ('"10GB/s"', "inf", "f.toml: links.h2d: bytes_per_s=inf is no rate"),
        (
            '"10GB/s"',
            f'"{"9" * 400}GB/s"',
            "f.toml: links.h2d: bytes_per_s='9+GB/s' cannot be used",
        ),
        ("[links.h2d]", "[links.h2h]", "f.toml: links: 'h2h' is no link"),
        (
            "[links.h2d]\n",
            "[links]\nh2d = 3\nd2h.",
            "links.h2d=3 is no table; begin it by .links.h2d",
        ),
        ("memory_bytes_per_s", "memory_byte_per_s", "did you mean 'memory_bytes_per_s'"),
        ('"1TFLOP/s"', '"1TB/s"', "compute.flops_per_s: float32='1TB/s' cannot be used; .*TFLOP/s"),
        (
            "float32 =",
            "flaot32 =",
            "f.toml: compute.flops_per_s: 'flaot32' is no dtype; did you mean",
        ),
        ("[tiers]", "note = 3\n[tiers]", "f.toml: note=3 is no text; put it in quotes"),
        ("[tiers]", "ranks = 2.5\n[tiers]", "f.toml: small: ranks=2.5 is no number of ranks"),
    ],
)
def test_a_text_that_is_no_machine_says_where_and_why(old, new, sentence):
    assert old in TEXT
    with pytest.raises(MachineInvalid, match=sentence):
        read(TEXT.replace(old, new, 1), "f.toml")


positive = st.floats(min_value=1e-3, max_value=1e18) | st.integers(1, 4000).map(lambda n: n * 1e8)
seconds = st.just(0.0) | st.floats(min_value=0, max_value=10)
texts = st.text(min_size=1, max_size=12).filter(str.isprintable)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    per_node, nodes = draw(st.integers(1, 16)), draw(st.integers(1, 9))
    needed = [link for link, it in zip(RANK_LINKS, (per_node > 1, nodes > 1), strict=True) if it]
    links = {
        name: Link(name, draw(positive), draw(seconds))
        for name in [*draw(st.sets(st.sampled_from(TIER_LINKS))), *needed]
    }
    if {"h2d", "d2h"} <= links.keys() and draw(st.booleans()):
        links["h2d"] = replace(links["h2d"], shares="d2h")
        links["d2h"] = replace(links["d2h"], shares="h2d")
    return Machine(
        draw(texts),
        draw(st.dictionaries(st.sampled_from(TIERS), st.integers(1, 1 << 60))),
        links,
        Compute(
            draw(st.dictionaries(st.sampled_from(DTYPES), positive)), draw(positive), draw(seconds)
        ),
        per_node * nodes,
        per_node,
        draw(st.just("") | texts),
        replicas=draw(st.sampled_from((1, per_node, nodes))),
        slower_way=draw(st.sampled_from((None, *RANK_LINKS))),
        runs_kernels=draw(st.booleans()),
    )


@given(machines())
def test_what_is_written_is_read_back_exactly(machine):
    assert read(write(machine, "some\n\ncomment"), "here") == machine


@pytest.mark.parametrize("name", names())
def test_every_machine_that_comes_along_is_sound(name):
    machine = find(name)
    assert machine.name == name
    assert {"device", "host", "disk"} == set(machine.tiers)
    assert set(TIER_LINKS) <= set(machine.links)
    lines = (files.FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    assert all(len(line) <= 120 for line in lines)


FIGURE = re.compile(r"(?!name|note|shares|ranks)\w+ = \S")
UNIFIED = {"dgx-spark-128gb", "mac-m4-32gb"}


@pytest.mark.parametrize("name", names())
def test_every_figure_of_a_machine_says_where_it_is_from(name):
    lines = (files.FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    head = [line for line in lines[: lines.index(f'name = "{name}"')] if line.startswith("#")]
    sources = {found for line in head for found in re.findall(r"^# \[(\w+)\]", line)}
    figures = {line: line.partition("  # ")[2] for line in lines if FIGURE.match(line)}
    assert len(figures) >= 10, "tiers, links, rates"
    assert [line for line, why in figures.items() if not why] == []
    assert any("Figures: " in line for line in head) or sources
    if sources:
        known = [f"[{source}]" for source in sources]
        said = (*known, "assumption", "as h2d", "as disk_read", "as bfloat16")
        unsaid = [line for line, why in figures.items() if not any(word in why for word in said)]
        assert unsaid == []
        named = {found for line in lines[len(head) :] for found in re.findall(r"\[(\w+)\]", line)}
        assert named - {"tiers", "compute"} == sources  # each is used, and what is used is listed


@pytest.mark.parametrize("name", names())
def test_the_figures_of_a_machine_are_plausible(name):
    machine = find(name)
    device, host, disk = (machine.tiers[tier] for tier in TIERS)
    assert GiB <= device < TiB
    assert 2 * GiB <= host < disk
    links, compute = machine.links, machine.compute
    assert 1e9 <= links["disk_write"].bytes_per_s <= links["disk_read"].bytes_per_s
    assert links["disk_read"].bytes_per_s <= links["h2d"].bytes_per_s == links["d2h"].bytes_per_s
    assert links["h2d"].bytes_per_s * 1.5 <= compute.memory_bytes_per_s <= 10e12
    assert all(1e-6 <= link.latency_s <= 1e-3 for link in links.values())
    assert 1e-6 <= compute.launch_s <= 2e-5
    rates = compute.flops_per_s
    half = rates.get("bfloat16", rates["float16"])
    assert 1e12 <= rates["float32"] <= rates.get("tfloat32", half) <= half <= 1e15
    # The number in the name is that of the card's memory, or of the whole where it is shared.
    if found := re.search(r"-(\d+)gb$", name):
        whole = device + host if name in UNIFIED else device
        assert 0.85 < whole / (int(found[1]) * 1e9) <= 1
    assert (name in UNIFIED) == (links["h2d"].shares == "d2h") == bool(machine.note)


def test_a_newer_card_of_a_kind_is_not_slower():
    older, newer = find("rtx3090-24gb"), find("rtx5090-32gb")
    for line in (("rtx3090-24gb", "desktop-24gb", "rtx5090-32gb"), ("a6000-48gb", "l40s-48gb")):
        rates = [find(name).compute.flops_per_s["bfloat16"] for name in line]
        assert rates == sorted(rates)
    assert older.compute.memory_bytes_per_s < newer.compute.memory_bytes_per_s
    servers = [find(f"{n}gb") for n in ("a100-80", "h100-pcie-80", "h200-141")]
    assert [m.compute.flops_per_s["bfloat16"] for m in servers] == sorted(
        m.compute.flops_per_s["bfloat16"] for m in servers
    )


def test_every_machine_is_part_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]["zcompile"]
    assert "machine/*.toml" in data
    assert sorted(path.stem for path in (ROOT / "zcompile").glob("machine/*.toml")) == [*names()]


def test_the_dgx_2_has_the_figures_of_the_paper():
    alone, shared, cluster = map(find, ("dgx2-v100-1gpu", "dgx2-v100-1node", "dgx2-v100-32nodes"))
    assert [m.links["h2d"].bytes_per_s for m in (alone, shared, cluster)] == [12e9, 3e9, 3e9]
    assert [m.links["disk_read"].bytes_per_s for m in (alone, shared)] == [12e9, 1.6e9]
    assert (shared.ranks, cluster.ranks, cluster.nodes) == (16, 512, 32)
    assert shared.tiers["disk"] * 16 == 28 * TiB
    assert shared.tiers["host"] * 16 == 1.5 * TiB
    assert cluster.compute.flops_per_s["float16"] == 70e12
    assert "bfloat16" not in cluster.compute.flops_per_s


def test_a_machine_is_found_by_name_or_by_path(tmp_path):
    (file := tmp_path / "mine.toml").write_text(TEXT)
    (tmp_path / "bare").write_text(TEXT)
    assert find(str(file)) == find(file) == find(tmp_path / "bare") == read(TEXT, "")
    assert find("h200-node").ranks == 8


def test_a_name_that_nobody_knows_lists_those_that_are_known():
    with pytest.raises(MachineUnknown, match="'h20-node' names no machine; did you mean 'h200-no"):
        find("h20-node")
    with pytest.raises(MachineUnknown, match=r"desktop-24gb, .* by its path, as \./desk\.toml"):
        find("desk")
    with pytest.raises(MachineUnknown) as told:
        find("nope")
    assert str(told.value).count("known are") == str(told.value).count("h200-node") == 1


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(MachineUnreadable, match="No such file or directory"):
        find("./nothing.toml")
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(MachineUnreadable, match="not text in UTF-8, byte 0"):
        find(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_text("name = 3")
    with pytest.raises(MachineInvalid, match=r"b\.toml: 'compute' is missing"):
        find(tmp_path / "b.toml")


def test_other_ranks_are_paced_by_the_slowest_link_that_they_pass():
    links = {
        "rank_to_rank": Link("rank_to_rank", 300e9),
        "node_to_node": Link("node_to_node", 10e9),
    }
    one_node = small(ranks=8, ranks_per_node=8, links=links, slower_way="rank_to_rank")
    many = with_ranks(one_node, 16)
    assert one_node.way_of(one_node.mesh.whole_ring(8)).name == "rank_to_rank"
    assert many.way_of(many.mesh.whole_ring(8)).name == "node_to_node"
    told = replace(many, slower_way="rank_to_rank")
    assert told.way_of(told.mesh.whole_ring(8)).name == "rank_to_rank"


def test_every_key_of_a_machines_file_is_told_in_the_documentation():
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    section = page.split("## A machine's file")[1].split("\n## ")[0]
    told = set(re.findall(r"`([a-z0-9_]+)`", section))
    keys = {field.name for kind in (Machine, Link, Compute) for field in fields(kind)}
    tables = {"tiers", "links", "compute", "flops_per_s"}
    assert (keys - tables) | {*TIERS, *LINKS} <= told
    assert all(f"[{table}" in section for table in ("tiers]", "links.", "compute.flops_per_s]"))
