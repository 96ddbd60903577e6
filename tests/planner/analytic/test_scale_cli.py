"""`scale_answer`: what a person reads, what a program reads, exit codes, refusals."""

import json
from argparse import Namespace

import pytest

from zcompile.cli.analytic import dgx2, scale_answer
from zcompile.errors import ConfigInvalid, UnknownOption, ZinfError
from zcompile.machine.files import find, names
from zcompile.planner.analytic.paper import FIGURES

TRILLION = "transformer:layers=128,hidden=25600,heads=256,batch=7"


def asked(model=None, machine=None, **given):
    return scale_answer(Namespace(**{"paper": None, "model": model, "machine": machine, **given}))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_printed_with_the_papers_beside(name):
    answer = asked(paper=name)
    assert answer.code == 0
    assert name in answer.text.splitlines()[0]
    rows = json.loads(answer.json())
    assert {"name", "unit", "ours", "paper", "ratio", "agrees", "why"} == set(rows[0])
    assert all(row["name"] in answer.text for row in rows)


def test_a_figure_may_be_named_in_short():
    assert asked(paper="5b") == asked(paper="figure-5b")


def test_an_unknown_figure_names_the_known():
    with pytest.raises(UnknownOption, match="figure-6a"):
        asked(paper="figure-6b")


def test_a_trillion_on_one_node_rests_on_disk():
    answer = asked(TRILLION, "dgx2-v100-1node")
    assert answer.code == 0
    assert "weights on disk" in answer.text
    told = json.loads(answer.json())
    assert told["parameters"] == 12 * 128 * 25600**2
    assert told["job"]["weights"] == "disk"
    assert told["step_seconds"] == pytest.approx(
        told["step"]["passes_s"] + told["step"]["update_s"]
    )


def test_batch_and_seq_may_stand_beside_the_text_which_wins():
    told = json.loads(asked(TRILLION, "dgx2-v100-1node", batch=2, seq=2048).json())
    assert (told["shape"]["batch"], told["shape"]["seq"]) == (7, 2048)


@pytest.mark.parametrize("name", names())
def test_every_machine_that_comes_along_can_be_asked(name):
    answer = asked("transformer:layers=8,hidden=4096,heads=32", name)
    assert answer.code == 0
    assert "TFLOP/s per rank" in answer.text


@pytest.mark.parametrize("nodes", [4, 16, 32, 64, 96])
def test_a_rank_of_any_cluster_of_dgx2_sees_the_same_machine(nodes):
    assert dgx2(nodes) == find(f"dgx2-v100-{nodes}nodes")


def test_what_does_not_fit_is_told_and_exits_with_1():
    answer = asked(TRILLION + ",weights=device", "dgx2-v100-1node")
    assert answer.code == 1
    assert "lacks" in answer.text


def test_a_capacity_given_beside_replaces_the_machines():
    small = asked(TRILLION, "dgx2-v100-1node", disk_bytes="1GiB")
    assert (asked(TRILLION, "dgx2-v100-1node").code, small.code) == (0, 1)


def test_a_group_of_ranks_is_named_where_one_suffices():
    text = "transformer:layers=100,hidden=8192,heads=64"
    assert "MiCS: 64 ranks" in asked(text, "dgx2-v100-32nodes").text
    assert "MiCS" not in asked(TRILLION, "dgx2-v100-1node").text


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        ("transformer:layers", ConfigInvalid, "is not written like layers=128"),
        (TRILLION + ",mp=x", ConfigInvalid, "is not a number of ranks"),
        (TRILLION + ",mp=3", ConfigInvalid, "does not divide"),
        (TRILLION + ",overlap=maybe", ConfigInvalid, "neither on nor off"),
        (TRILLION + ",wights=disk", UnknownOption, "weights"),
    ],
)
def test_a_text_that_is_no_transformer_is_refused(model, error, said):
    with pytest.raises(error, match=said):
        asked(model, "dgx2-v100-1node")


def test_a_shape_needs_a_machine():
    with pytest.raises(ConfigInvalid, match="dgx2-v100-1node"):
        asked(TRILLION)
    with pytest.raises(ZinfError, match="dgx2"):
        asked(TRILLION, "dgx2-v100-2node")
