"""`zinf explain` tells what became of values that backward needs."""

from zcompile.cli.explain import ALL, fate_text, fates_of
from zcompile.ir.memory_curve import Activation
from zcompile.ir.serialize import PlanRecord

ROWS = (
    Activation("relu", "relu of 1", 1 << 20, "host", 0.002, "moving it costs least"),
    Activation("gelu", "gelu of 2", 1 << 19, "again", 0.001, "making it again costs least"),
    Activation("mm", "mm of 3", 1 << 18, "keep", 0.0, "there is room for it"),
)


class Run:
    """A graph whose plan is known."""

    index = 0

    def plan(self):
        return PlanRecord("graph0", 1 << 20, (), 1, 1, activations=ROWS)


def test_all_are_told_and_summed_up():
    text = fate_text(list(fates_of(Run(), ALL)))
    assert "relu of 1" in text
    assert "1 moved to the host: 1.00 MiB, 2.000 ms" in text
    assert "1 made again in backward: 512 KiB, 1.000 ms" in text
    assert "there is room for it" in text


def test_one_is_found_by_its_node_and_by_its_name():
    for asked in ("gelu", "gelu of 2"):
        (fate,) = fates_of(Run(), asked)
        assert fate.activation.action == "again"
    assert not list(fates_of(Run(), "nothing like it"))
