"""The links of this machine, measured on the paths that transfers take.

Copies go through a device like that of a session, files through the I/O engine of the disk tier;
both are opened here for the moment, so that nobody's meters, arenas or files are touched.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from zcompile.errors import DiskUnusable, ParameterChanged
from zcompile.ir.units import KiB, MiB, show_size
from zcompile.machine.model import Link
from zcompile.runtime.device.base import Device, Direction
from zcompile.runtime.device.cuda import CudaDevice
from zcompile.runtime.device.device_cpu import CpuDevice
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.hardware import free_disk_bytes
from zcompile.runtime.io import ring_choice
from zcompile.runtime.io.directory import Directory
from zcompile.runtime.io.disk_trial import direct_granule, nameless_file, takes_direct
from zcompile.runtime.io.engine import Engine
from zcompile.runtime.io.lanes import Move, Target
from zcompile.runtime.meter import Meter
from zcompile.runtime.probe_lanes import Lane, best_of, measure_lanes
from zcompile.runtime.tiers.tiers import Buffer
from zcompile.runtime.transfer.ticket import Promise, Ticket

COPY_BYTES = 32 * MiB
"""Of either memory and direction: more than the caches of a core hold, and little to take from a
machine for a moment."""
PIECE_BYTES = 8 * MiB
"""Of the disk at most; several are under way at once, as they are in a step."""
DISK_PIECES = 16
"""Of each directory, reads and writes together."""
SHORT_BYTES = 256 * KiB
"""More than what the emulated device copies without its worker (`device_cpu.INLINE_BYTES`)."""
_REMEDY = "give a directory that one may write to, with more room"
SHORT_STEP = 2 * MiB
SHORTS = COPY_BYTES // SHORT_STEP
"""Short copies go between places that no cache remembers."""
PACED_BYTES = 16 * KiB
PACED_BYTES_PER_S = 1e9
PACED_COPIES = 8


class _Arrival(Promise):
    """A promise that a device's copy keeps."""

    __slots__ = ()

    def enqueued(self, event: object) -> None:
        return

    def landed(self, error: BaseException | None) -> None:
        self.finish(error)


class _Underway:
    """What was started; a defect ends all of it, so that nobody waits for ever."""

    def __init__(self) -> None:
        self._started: list[Promise] = []

    def arrival(self) -> _Arrival:
        self._started = [promise for promise in self._started if not promise.done()]
        self._started.append(arrival := _Arrival())
        return arrival

    def crashed(self, error: BaseException) -> None:
        for promise in self._started:
            promise.finish(error)


def copy_links(torch_device: torch.device) -> dict[str, Link]:
    """ "h2d" and "d2h" between host memory and that of the device."""
    underway = _Underway()
    with closing(_device(torch_device, {}, underway)) as device:
        host, memory = device.host_block(2 * COPY_BYTES), device.allocate(2 * COPY_BYTES)
        # Touched once, since fresh pages cost more than the copy.
        for tensor in (host, memory):
            tensor.fill_(1)

        def lane(direction: Direction, at: int) -> Lane:
            pieces = COPY_BYTES // device.chunk_bytes

            def start(begin: int, nbytes: int) -> Ticket:
                here, there = host[begin : begin + nbytes], memory[begin : begin + nbytes]
                pair = (there, here) if direction == "h2d" else (here, there)
                device.copy(direction, *pair, (), arrival := underway.arrival())
                return arrival

            return Lane(direction, device.chunk_bytes,
                        lambda n: start(at + n % pieces * device.chunk_bytes, device.chunk_bytes),
                        SHORT_BYTES, lambda n: start(at + n % SHORTS * SHORT_STEP, SHORT_BYTES),
                        most=256)  # fmt: skip

        return measure_lanes(lane("h2d", 0), lane("d2h", COPY_BYTES))


def pacing_seconds() -> float:
    """What a throttle adds to a transfer beyond its bytes: the waking of who holds it back."""
    underway = _Underway()
    with closing(_device(torch.device("cpu"), {"h2d": PACED_BYTES_PER_S}, underway)) as device:
        blocks = [host_pages(PACED_BYTES) for _ in range(2)]

        def seconds() -> float:
            since = time.perf_counter()
            arrivals = [underway.arrival() for _ in range(PACED_COPIES)]
            for arrival in arrivals:
                device.copy("h2d", blocks[0], blocks[1], (), arrival)
            for arrival in arrivals:
                arrival.wait()
            return (time.perf_counter() - since) / PACED_COPIES

        return max(best_of(seconds) - PACED_BYTES / PACED_BYTES_PER_S, 0.0)


def disk_links(directories: Sequence[Path]) -> dict[str, Link]:
    """ "disk_read" and "disk_write" of all `directories` together, as entries are striped.

    raises  DiskUnusable
    """
    underway = _Underway()
    with _files(directories, underway) as files:
        piece, half = _piece_bytes(directories), DISK_PIECES // 2
        memory = {write: _noise(len(files) * half * piece) for write in (False, True)}

        def start(write: bool, n: int, nbytes: int = piece) -> Ticket:
            n %= len(files) * half
            engine, target = files[n % len(files)]
            offset = (n // len(files) + write * half) * piece
            buffer = memory[write].part(n * piece, n * piece + nbytes)
            arrival = underway.arrival()
            engine.start(Move(write, target._replace(offset=offset), buffer, "a measurement",
                              arrival.finish))  # fmt: skip
            return arrival

        def lane(name: str, write: bool) -> Lane:
            short = partial(start, write, nbytes=SHORT_BYTES)
            least = 4 * len(files)
            return Lane(name, piece, partial(start, write), SHORT_BYTES, short, least)

        _fill(files, memory[True].part(0, piece), underway)
        return measure_lanes(lane("disk_read", False), lane("disk_write", True))


def _device(device: torch.device, throttle: Mapping[str, float], underway: _Underway) -> Device:
    if device.type == "cuda":
        return CudaDevice(device, Meter(), underway.crashed)
    return CpuDevice(throttle, Meter(), underway.crashed)


@contextmanager
def _files(directories: Sequence[Path],
           underway: _Underway) -> Iterator[list[tuple[Engine, Target]]]:  # fmt: skip
    """A nameless file per directory and the engine that reaches it."""
    try:
        with ExitStack() as stack:
            opened = [stack.enter_context(Directory(path)) for path in directories]
            direct = [takes_direct(directory) for directory in opened]
            fds = [stack.enter_context(nameless_file(directory, is_direct))
                   for directory, is_direct in zip(opened, direct, strict=True)]  # fmt: skip
            rings = ring_choice.choose(list(zip(opened, direct, strict=True)))
            engines = {id(ring): Engine(ring, underway.crashed, _closed) for ring in rings}
            for engine in engines.values():
                stack.callback(engine.close)
            granules = [direct_granule(directory.system, fd) if is_direct else 1
                        for directory, fd, is_direct in zip(opened, fds, direct,
                                                            strict=True)]  # fmt: skip
            yield [(engines[id(ring)], Target(path, fd, 0, granule))
                   for ring, path, fd, granule in zip(rings, directories, fds, granules,
                                                      strict=True)]  # fmt: skip
    except DiskUnusable:
        raise
    except OSError as error:
        why = f"cannot be measured: {error.strerror or error}"
        raise DiskUnusable(directories[0], why, _REMEDY) from error


def _piece_bytes(directories: Sequence[Path]) -> int:
    """PIECE_BYTES, or less where the files would take more than half of the room there is."""
    pieces = len(directories) * DISK_PIECES
    fitting = free_disk_bytes(directories) // (2 * pieces) // SHORT_BYTES * SHORT_BYTES
    if fitting == 0:
        raise DiskUnusable(directories[0], "is too full to be measured, which takes "
                           f"{show_size(2 * pieces * SHORT_BYTES)}", _REMEDY)  # fmt: skip
    return min(fitting, PIECE_BYTES)


def _fill(files: Sequence[tuple[Engine, Target]], source: Buffer, underway: _Underway) -> None:
    """Write the files once, as a first write also finds a place: a store writes each many times."""
    arrivals = []
    for engine, target in files:
        for piece in range(DISK_PIECES):
            place = target._replace(offset=piece * source.nbytes)
            arrivals.append(underway.arrival())
            engine.start(Move(True, place, source, "a measurement", arrivals[-1].finish))
    for arrival in arrivals:
        arrival.wait()


def _noise(nbytes: int) -> Buffer:
    """Memory that no disk writes for less than its size; torch's random numbers stay untouched."""
    memory = host_pages(nbytes)
    drawn = torch.frombuffer(bytearray(os.urandom(SHORT_BYTES)), dtype=torch.uint8)
    memory.view(-1, SHORT_BYTES).copy_(drawn)
    return Buffer.over(memory)


def _closed(name: str) -> ParameterChanged:
    return ParameterChanged(name, "was broken off", "measure again")
