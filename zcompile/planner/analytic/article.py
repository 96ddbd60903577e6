"""What ZeRO-Infinity (arXiv:2104.07857) printed, as data: shapes, settings, figures.

Texts keep the digits of the print. Where the paper leaves a setting open, `ASSUMED` says what was
taken here.
"""

from dataclasses import dataclass

from zcompile.planner.analytic.rates import Job
from zcompile.planner.analytic.shapes import Transformer

KILO = 1024
"""The paper's "25K" is 25 * 1024: so its Figure 2a follows from its formulas."""


@dataclass(frozen=True)
class Memory:
    """A row of Figure 2a: T parameters, then TiB (states, activations, checkpoints at a batch of
    32), then GiB (working memory; of activations at a batch of 4)."""

    layers: int
    hidden_k: int
    heads: int
    parameters: str
    states: str
    activations: str
    checkpoints: str
    model_working: str
    activation_working: str

    def shape(self, batch: int) -> Transformer:
        return Transformer(self.layers, self.hidden_k * KILO, self.heads, batch)


FIGURE_2A = (
    Memory(80, 10, 128, "0.10", "1.83", "2.03", "0.05", "1.95", "1.63"),
    Memory(100, 20, 160, "0.50", "9.16", "3.91", "0.12", "6.25", "2.50"),
    Memory(128, 25, 256, "1.01", "18.31", "7.13", "0.20", "9.77", "3.56"),
    Memory(195, 64, 512, "10.05", "182.81", "24.38", "0.76", "64.00", "8.00"),
    Memory(315, 160, 1024, "101.47", "1845.70", "88.59", "3.08", "400.00", "18.00"),
)
ODDITY_2A = ("0.10", "1.95", "does not follow from 4·hd·4hd, which gives 1.56; other rows do")
"""Parameters and working memory of a figure that nobody can meet, and why."""

TABLE_3 = (
    (1, "0.07", "3.0", "1.5", "70.0"),
    (10, "0.70", "30.0", "15", "700.0"),
    (100, "7.00", "300.0", "1.5E+2", "7000.0"),
)
"""Times as fast as a V100: PFLOP/s, GB/s from slow memory per device, TB/s in all 512 (two digits,
hence the E), GB/s between devices."""


@dataclass(frozen=True)
class Trained:
    """A row of Table 1. `tflops` per GPU as Figures 5a and 5c show; at_least: "over" it; why: a
    difference explained."""

    nodes: int
    name: str
    job: Job
    tflops: float | None = None
    at_least: bool = False
    why: str = ""


def _trained(
    nodes: int,
    name: str,
    shape: tuple[int, int, int, float],
    mp: int,
    tiers: tuple[str, str],
    tflops: float | None = None,
    at_least: bool = False,
    why: str = "",
) -> Trained:
    layers, hidden_k, heads, batch = shape
    transformer = Transformer(layers, hidden_k * KILO, heads, batch)
    return Trained(nodes, name, Job(transformer, mp, *tiers), tflops, at_least, why)


_GPU, _CPU, _NVME = ("device", "device"), ("host", "disk"), ("disk", "disk")

WHY_20T = (
    "the paper puts it down to the batch of 1.25; simulated, the links between nodes are busy for "
    "half of compute's time and hide behind it, which gives more; without overlap it is less"
)

TABLE_1 = (
    _trained(1, "10B", (50, 4, 32, 8), 1, _GPU, 40, True),
    _trained(1, "50B", (62, 8, 64, 26), 1, _CPU, 40, True),
    _trained(1, "100B", (125, 8, 64, 24), 1, _CPU, 40, True),
    _trained(1, "0.5T", (124, 18, 160, 8), 1, _NVME),
    _trained(1, "1T", (128, 25, 256, 7), 1, _NVME),
    _trained(32, "0.5T", (124, 18, 160, 7), 4, _GPU, 49),
    _trained(32, "1T", (128, 25, 256, 5), 4, _GPU, 49),
    _trained(32, "5T", (174, 48, 512, 3), 4, _NVME),
    _trained(32, "10T", (200, 64, 512, 2), 4, _NVME, 43),
    _trained(32, "20T", (205, 88, 1024, 1.25), 8, _NVME, 34, why=WHY_20T),
)
SCALED = tuple(
    _trained(nodes, "1T", (128, 25, 256, 5), 4, _CPU, 44 if nodes == 4 else None)
    for nodes in (4, 8, 16, 32)
)
"""Figure 5b: the batch per node stays."""


@dataclass(frozen=True)
class Largest:
    """Figure 6a on one DGX-2: billions of parameters; why: where the formulas cannot give it."""

    strategy: str
    billions: float | None
    why: str = ""


FIGURE_6A = (
    Largest("data parallel", 1.4),
    Largest(
        "ZeRO-2",
        13,
        "on 16 GPUs 13B are 26 GB of weights on each and 15 GB of shares of the rest, in 32 GiB; "
        "13B is what more GPUs give",
    ),
    Largest("ZeRO-Offload", 13),
    Largest("3D parallelism", None),
    Largest("ZeRO-3", None),
    Largest("Infinity-CPU", 100),
    Largest(
        "Infinity-NVMe",
        1000,
        "one node holds more at 20 B per parameter; of the paper's models 1T is the last that "
        "fits, and 5T the next",
    ),
)

OVERLAPPED = tuple(
    Job(Transformer(10, 8 * KILO, 64, batch), 1, "host", "host") for batch in (2, 4, 8, 10, 14, 16)
)
OVERLAPPED_NODES = 4
"""Figure 6d: 8B on 64 GPUs, batch per GPU."""

_HEADS = "heads, which Table 1 leaves out: 128 elements each, or as in a near row of Figure 2a"
_CHECKPOINTS = "activation checkpoints go to the host in every run"
ASSUMED = {
    "table-1": (_HEADS, _CHECKPOINTS),
    "figure-5a": (_HEADS, _CHECKPOINTS),
    "figure-5b": (
        "on every number of nodes: batch 5 per GPU, 4 ranks per matrix, weights and gradients on "
        "the host, optimizer state on NVMe",
        _CHECKPOINTS,
    ),
    "figure-5c": (_HEADS, _CHECKPOINTS),
    "figure-6a": ("one sequence per GPU; 4 GiB of each device are not ours to fill",),
    "figure-6d": ("10 layers of 8K; weights, gradients and optimizer state on the host",),
}
"""By figure: settings that the paper leaves open, as they were taken."""
