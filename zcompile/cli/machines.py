"""A machine as text: what `zinf doctor` says of this one, and of one that a file describes."""

from collections.abc import Iterator

from zcompile.cli.answer import Answer
from zcompile.ir.units import show_flops, show_rate, show_size
from zcompile.machine.files import find, names
from zcompile.machine.model import Machine


def described(name_or_path: str) -> Answer:
    """A machine; of no name, the names there are.

    raises  MachineUnknown, MachineUnreadable, MachineInvalid
    """
    if not name_or_path:
        return Answer("\n".join(names()), names())
    machine = find(name_or_path)
    return Answer("\n".join(rows(machine)), machine)


def rows(machine: Machine) -> Iterator[str]:
    """One figure a line, under the names that the file has for them."""
    yield f"{'machine':<12}{machine.name}"
    if machine.ranks > 1:
        per_node = f"{machine.ranks_per_node} on each of {machine.nodes} nodes"
        yield f"{'ranks':<12}{machine.ranks}, {per_node}; figures are those of one rank"
    for tier, nbytes in machine.tiers.items():
        yield f"{'tier':<12}{tier:<12} {show_size(nbytes):>12}"
    for link in machine.links.values():
        turns = f", takes turns with {link.shares}" if link.shares else ""
        after = f"after {link.latency_s * 1e6:.0f} us{turns}"
        yield f"{'link':<12}{link.name:<12} {show_rate(link.bytes_per_s):>12}  {after}"
    for dtype, rate in machine.compute.flops_per_s.items():
        yield f"{'compute':<12}{dtype:<12} {show_flops(rate):>12}"
    memory = show_rate(machine.compute.memory_bytes_per_s)
    yield f"{'compute':<12}{'memory':<12} {memory:>12}  after {_micro(machine.compute.launch_s)}"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us, the least an op costs"
