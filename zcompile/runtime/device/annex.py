"""Device memory beside the arena, while no graph holds it: chunks of an optimizer's step lie there.

Between backward and the next forward, activations are gone. What they took is as good for streaming
as the arena's window is, and larger by far where that is small.
"""

from torch import Tensor

from zcompile.ir.optimizer_step import NO_ROOM, StepRoom
from zcompile.runtime.device.base import Device


def lies_in(tensor: Tensor, memory: Tensor | None) -> bool:
    """Whether a tensor begins in this memory: uint8 [n]; None: there is none."""
    if memory is None or tensor.device != memory.device:
        return False
    return 0 <= tensor.data_ptr() - memory.data_ptr() < memory.numel()


class Annex:
    """Its addresses go on beyond the arena's.

    room    what may be used; no bytes: nothing
    memory  while somebody may use it
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.room = NO_ROOM
        self.memory: Tensor | None = None
        self._needed = 0

    def plan(self, room: StepRoom) -> None:
        """From here on this may be used."""
        assert self.memory is None, "somebody is in it"
        self.room, self._needed = room, 0

    def need(self, end: int) -> bool:
        """Slots of a schedule end at this address. False, if that is more than is allocated."""
        self._needed = max(self._needed, end - self.room.begin)
        return self.memory is None or self._needed <= self.memory.numel()

    def open(self) -> None:
        """Allocate what schedules need. raises  DeviceTooSmall"""
        if self.memory is None:
            self.memory = self._device.allocate(self._needed)

    def slot(self, address: int, nbytes: int) -> Tensor | None:
        """The bytes of a planned slot: uint8 [nbytes]; None, if they do not lie in what is open."""
        memory, at = self.memory, address - self.room.begin
        if memory is None or at < 0 or at + nbytes > memory.numel():
            return None
        return memory[at : at + nbytes]

    def close(self) -> None:
        """Give the memory back; for who knows that nothing uses it."""
        self.memory = None
