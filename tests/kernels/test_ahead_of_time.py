"""What kernels take of a GPU that is not here: registers, spills, shared memory, widest load.

The figures of every kernel are kept in `baseline.json`, for the triton that constraints.txt names;
`pytest --accept` writes it. Of another triton only what holds always is asked.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from kernels.ahead_of_time import TARGETS, Figures, cases, compiled
from sampled import sampled

BASELINE = Path(__file__).parent / "baseline.json"
WIDEST = 128


def faults(name: str, target: str, made: Figures) -> list[str]:
    """What nobody accepts, whatever stands in the baseline."""
    found = [f"{made.spills} registers are spilled"] if made.spills else []
    if made.widest_load < WIDEST:
        found.append(f"loads of {made.widest_load} bits at most")
    return [f"{name} for {target}: {fault}" for fault in found]


@pytest.fixture(
    scope="module", params=["sm_90", pytest.param(None, id="all", marks=pytest.mark.slow)]
)
def target(request):
    """The one that is compiled for; None: all, and every way of launching a kernel."""
    return request.param


@pytest.fixture(scope="module")
def made(target):
    pytest.importorskip("triton", reason="triton is not installed: nothing can be compiled")
    return compiled(target=target)


def test_every_kernel_is_compiled_for_every_target(made, target):
    assert made.cases.keys() == cases().keys()
    assert all(
        tuple(each) == (TARGETS if target is None else (target,)) for each in made.cases.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", [None], indirect=True)
def test_every_way_of_launching_a_kernel_compiles_and_spills_nothing(made):
    assert len(made.variants) >= 10
    assert not {name: f for name, f in made.variants.items() if f.spills}


def test_nothing_spills_and_memory_is_read_in_wide_loads(made):
    each = ((n, t, f) for n, rows in made.cases.items() for t, f in rows.items())
    found = [fault for row in each for fault in faults(*row)]
    assert not found, "\n".join(found)


def test_no_kernel_takes_more_than_it_did(made, target, request):
    if request.config.getoption("--accept") and target is None:
        rows = made.cases.items()
        each = {name: {t: asdict(f) for t, f in found.items()} for name, found in rows}
        text = json.dumps({"triton": made.triton, "cases": each}, indent=1)
        BASELINE.write_text(f"{text}\n", encoding="utf-8")
    kept = json.loads(BASELINE.read_text(encoding="utf-8"))
    if kept["triton"] != made.triton:
        pytest.skip(f"the baseline is of triton {kept['triton']}, and this is {made.triton}")
    assert kept["cases"].keys() == made.cases.keys()
    worse = [
        f"{name} for {target}: {text}"
        for name, found in made.cases.items()
        for target, figures in found.items()
        for text in figures.worse_than(Figures(**kept["cases"][name][target]))
    ]
    assert not worse, "\n".join(["a kernel takes more than baseline.json says:", *worse])


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        (Figures(41, 0, 32, 128), ["registers 40 -> 41"]),
        (Figures(40, 2, 32, 128), ["spills 0 -> 2"]),
        (Figures(40, 0, 64, 128), ["shared 32 -> 64"]),
        (Figures(40, 0, 32, 64), ["widest_load 128 -> 64"]),
        (Figures(39, 0, 0, 128), []),
    ],
)
def test_what_counts_as_worse(figures, told):
    assert figures.worse_than(Figures(40, 0, 32, 128)) == told


@pytest.mark.parametrize("target", sampled(["sm_80", "sm_90", "sm_100"], "sm_90"))
@pytest.mark.slow
def test_a_mask_on_whole_blocks_is_noticed(target):
    """It reads what it should, in the interpreter; a device reads it 32 bits at a time."""
    pytest.importorskip("triton", reason="triton is not installed: nothing can be compiled")
    # On gfx942 addresses are read 128 bits at a time too, so that other loads do not show.
    worse = compiled("leave", "if begin + BLOCK <= end:", "if False:", target=target)
    ((name, each),) = worse.cases.items()
    assert any("bits at most" in fault for fault in faults(name, target, each[target]))
