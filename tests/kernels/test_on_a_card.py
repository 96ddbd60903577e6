"""Kernels on a card: equal to stock, near to what memory allows, and faster than stock by 5 %.

What is timed is `benchmarks/kernels.py`; without a card its comparisons run on the formulas, so
that the benchmark itself is no news when there is one.
"""

import pytest
import torch

from benchmarks import kernels as bench

LEAST_SHARE = {
    "adamw": 0.85,
    "adamw_host": 0.9,
    "cross_entropy": 0.8,
    "cross_entropy_f32": 0.8,
    "leave": 0.3,
}
"""Part -> of the floor, at least; of adamw over host memory for the most programs. `leave` moves
little: its floor is a link that is filled."""

CPU = torch.device("cpu")


def on_cpu():
    yield from bench.adamw_cases(CPU, 1 << 18)
    yield from bench.cross_entropy_cases(CPU, 16, 96, torch.bfloat16)
    yield from bench.cross_entropy_cases(CPU, 16, 96, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cards' own tests do more")
def test_the_comparisons_of_the_benchmark_compare_the_same():
    names = []
    for case in on_cpu():
        assert case.agree()
        for name, call in case.stock.items():
            if name != "Inductor":
                call()
        case.ours()
        assert case.nbytes > 0
        names.append(case.name)
    assert len(set(names)) == 6


def test_the_benchmark_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.kernels.missing", lambda device: f"no {device} here")
    assert bench.main([]) == 1
    assert capsys.readouterr().err == "nothing to measure: no cuda here\n"


def test_the_table_says_which_kernels_stay():
    slow = bench.Row("a", 2e-3, 0.5, "b", 2.05e-3, 1.025, "bit-equal")
    fast = bench.Row("c", 1e-3, 0.9, "d", 2e-3, 2.0, "2e-07 of the largest")
    *_, first, second = bench.table([slow, fast])
    assert first == "| a | 2.000 | 0.50 | b | 2.050 | 1.02 | bit-equal | goes |"
    assert second.endswith("| 2.00 | 2e-07 of the largest | stays |")


@pytest.fixture(scope="module")
def rates():
    return bench.rates(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.slow  # it is timed: nobody else may be on the card
@pytest.mark.parametrize("part", bench.PARTS)
def test_a_kernel_agrees_is_near_its_floor_and_beats_stock(part, rates):
    rows = [bench.measured(c, rates[c.link]) for c in bench.PARTS[part](torch.device("cuda"))]
    told = "\n".join(bench.table(rows))
    if part == "adamw_host":  # what no schedule does: copies of chunks fill the link as well
        assert rows[-1].share >= LEAST_SHARE[part], told
        return
    assert all(row.share >= LEAST_SHARE[part] for row in rows), told
    assert all(row.stays for row in rows), told


@pytest.mark.gpu
def test_adamw_has_the_bits_of_torchs_fused_kernel():
    """Of torch 2.13, whose formula it is; releases before computed in f64."""
    if torch.__version__ < "2.13":
        pytest.skip("torch's kernel computes in f64 before 2.13")
    (first, *_) = bench.adamw_cases(torch.device("cuda"), 1 << 20)
    assert first.agree() == "bit-equal"
