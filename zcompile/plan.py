"""What has been decided so far. A pass takes a plan and returns it, changed or as it came."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from zcompile.schedule import Slot
from zcompile.specs import NodeName, ParamSpec


@dataclass(frozen=True)
class Note:
    """Something a pass left undone, and why; the dump prints it."""

    by: str
    node: NodeName | None
    text: str


def _nothing() -> Mapping[NodeName, Slot]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Plan:
    """The decisions about one graph.

    params        handle placeholder -> what kind of parameter is behind it
    budget_bytes  bytes of the device arena; None without tiered parameters
    slots         fetch node -> its range of the arena
    notes         what was left undone, and why
    """

    params: Mapping[NodeName, ParamSpec]
    budget_bytes: int | None = None
    slots: Mapping[NodeName, Slot] = field(default_factory=_nothing)
    notes: tuple[Note, ...] = ()

    @property
    def arena_bytes(self) -> int:
        """End of the highest slot."""
        return max((slot.end for slot in self.slots.values()), default=0)
