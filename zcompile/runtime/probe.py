"""The probe measures this machine once, as a `Machine`, and keeps the result between processes.

What is kept are rates of the hardware. Budgets and throttles belong to a run, so they come in
afterwards: a budget is the capacity of its tier, and no link is faster than its throttle.

The files lie in $XDG_CACHE_HOME/zcompile, or ~/.cache/zcompile, one text file per set of facts.
Whatever goes wrong with them costs one more measurement and nothing else.

Links are measured on the paths that transfers take: copies go through a device like that of a
session, files through the I/O engine of the disk tier. Both are opened here for the moment, so that
nobody's meters, arenas or files are touched. A lane is one direction of a link, as a way to start
pieces of a size of its own; how fast two lanes between the same two places are is measured for each
alone, and for both at once, which shows whether they take turns.
"""

import hashlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch

from zcompile.config import Config, at_hand
from zcompile.errors import DiskUnusable, ParameterChanged
from zcompile.ir.units import KiB, MiB, show_size
from zcompile.machine.files import read, write
from zcompile.machine.model import Compute, Link, Machine, MachineInvalid, throttled
from zcompile.runtime.device.base import Device, Direction
from zcompile.runtime.device.cpu import CpuDevice
from zcompile.runtime.device.cuda import CudaDevice
from zcompile.runtime.device.pages import host_pages, machine_bytes
from zcompile.runtime.hardware import cores, cpu_model, filesystem, free_disk_bytes
from zcompile.runtime.io import trial
from zcompile.runtime.io.engine import Engine, Move, Target
from zcompile.runtime.io.files import Directory
from zcompile.runtime.io.trial import direct_granule, nameless_file, supports_direct
from zcompile.runtime.meter import Meter
from zcompile.runtime.progress import working
from zcompile.runtime.tiers.base import Buffer
from zcompile.runtime.transfer.ticket import Promise, Ticket

logger = logging.getLogger(__name__)


# --- The machine of a run ---

NAME = "probed"


def machine_for(
    config: Config, device: Device, capacities: Mapping[str, int] | None = None
) -> Machine:
    """The machine of a run of `config` on `device`: that of the config, or else the probed one.

    The first call on a machine measures for some seconds; later ones read a small file.

    capacities  bytes of each tier, where the caller knows them better than the config: there a
                budget that is not given stands for all that is free
    raises      DiskUnusable
    """
    config_disks = disks_of(config)
    machine = config.machine
    if not isinstance(machine, Machine):  # resolved by Config; None: none was given
        # What the emulated device is measured with is the host's memory, and no part of a budget.
        beside = device.torch_device.type != "cpu"
        most_bytes = config.budgets.get("device") if beside else None
        machine = probed(device.torch_device, config_disks, most_bytes=most_bytes)
        machine = replace(machine, tiers=_free(device, config_disks))
    tiers = {**machine.tiers, **config.budgets} if capacities is None else dict(capacities)
    return paced(replace(machine, tiers=tiers), config, device)


def paced(machine: Machine, config: Config, device: Device) -> Machine:
    """`machine` with links as the throttles of `config` leave them; those that are slowed down
    already stay as they are."""
    rates = {link: float(rate) for link, rate in config.throttle.items()}
    return throttled(machine, rates, _pacing_s(device.torch_device)) if rates else machine


def probed(
    device: torch.device,
    disks: Sequence[Path],
    again: bool = False,
    most_bytes: int | None = None,
) -> Machine:
    """The rates of this machine, as kept or measured now. Without tiers.

    What is measured while the machine is busy is used until it is not, and then measured again.

    again       measure, whatever is kept
    most_bytes  of the device that measuring may take
    raises      DiskUnusable
    """
    measure = partial(probe, device, disks, most_bytes)
    return cached(facts(device, disks, most_bytes), measure, again=again, busy=is_busy())


def probe(device: torch.device, disks: Sequence[Path], most_bytes: int | None = None) -> Machine:
    """Measure now.

    most_bytes  of the device that this may take; at least LEAST_BYTES are taken in any case
    raises      DiskUnusable
    """
    beside = device.type != "cpu"
    with working("measuring this machine, once", total=2 + bool(disks) + beside) as work:
        work.begin("copies to and from the device")
        links = copy_links(device)
        _give_back_unused(device)
        if disks:
            work.add(step="the disk")
            links |= disk_links(disks)
        work.add(step="compute")
        made = Machine(NAME, {}, links, compute_of(device, most_bytes))
        if not beside:  # the host is the device: its updates are timed as they run
            return made
        work.add(step="updates on the host")
        return replace(made, host_update_bytes_per_s=host_update_rate())


def _pacing_s(device: torch.device) -> float:
    """Seconds that a throttle adds to each transfer, as kept or measured now."""

    def measure() -> Machine:
        paced = Link("h2d", PACED_BYTES_PER_S, rounded(pacing_seconds()))
        return Machine("pacing", {}, {"h2d": paced}, Compute({}, PACED_BYTES_PER_S))

    kept = cached({**facts(device, ()), "only": "pacing"}, measure, busy=is_busy())
    return kept.links["h2d"].latency_s


def is_busy() -> bool:
    """Whether more is at work than there are cores, so that measured rates are too low."""
    return os.getloadavg()[0] > cores()


def facts(
    device: torch.device, disks: Sequence[Path], most_bytes: int | None = None
) -> dict[str, str]:
    """The facts that rates depend on. Another directory of the same filesystem is the same disk.

    most_bytes  of the device that measuring may take
    """
    told = {
        "processor": f"{cpu_model()}, {cores()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "device": device.type,
        "disks": ", ".join(sorted(f"{filesystem(path)} {os.stat(path).st_dev}" for path in disks)),
    }
    if device.type == "cuda":
        told["device"] = f"cuda: {torch.cuda.get_device_name(device)}"
        told["float32"] = torch.get_float32_matmul_precision()
    largest, *_ = sides_within(device, most_bytes)
    if largest != SIDES[device.type][0]:
        told["matmuls"] = f"{largest} a side"
    return told


def disks_of(config: Config) -> tuple[Path, ...]:
    """The directories that can be measured now: one that is yet to be made is not made for that."""
    given = config.disk if isinstance(config.disk, tuple) else ()  # a tuple, once it was checked
    return tuple(at_hand(Path(path)) for path in given)


def _free(device: Device, disks: Sequence[Path]) -> dict[str, int]:
    tiers = {"device": device.free_bytes(), "host": machine_bytes()}
    return {**tiers, "disk": free_disk_bytes(disks)} if disks else tiers


# --- Kept between processes ---

FORMAT = 2
"""Part of the key: a machine that was measured in another way is measured again."""


def cached(
    facts: Mapping[str, str],
    measure: Callable[[], Machine],
    *,
    again: bool = False,
    busy: bool = False,
) -> Machine:
    """The machine that was measured when `facts` held, or is measured now.

    again  measure, whatever is there
    busy   the machine is at work on other things: what is measured is kept until it is not
    """
    path = cache_file(facts)
    if path is None:
        return measure()
    passing = path.with_stem(f"{path.stem}-busy")
    for kept in (path, passing) if busy else (path,):
        if not again and (found := _read(kept)) is not None:
            return found
    machine = measure()
    told = "\n".join(
        (
            "Measured by zcompile; may be removed at any time.",
            *(f"{key}: {value}" for key, value in facts.items()),
        )
    )
    _write(passing if busy and not again else path, write(machine, told))
    return machine


def cache_file(facts: Mapping[str, str]) -> Path | None:
    """The file for a set of facts; None if there is no place for it."""
    folder = _folder()
    if folder is None:
        return None
    text = "\n".join((str(FORMAT), *(f"{key}={facts[key]!r}" for key in sorted(facts))))
    return folder / f"machine-{hashlib.sha256(text.encode()).hexdigest()[:16]}.toml"


def _folder() -> Path | None:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # its specification says to ignore any other
        return given / "zcompile"
    try:
        return Path.home() / ".cache" / "zcompile"
    except RuntimeError:
        return None


def _read(path: Path) -> Machine | None:
    try:
        return read(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, MachineInvalid) as error:
        logger.info("%s is of no use, the machine is measured again: %s", path, error)
        return None


def _write(path: Path, text: str) -> None:
    """Write all of a file or nothing; of several processes at once the last one wins."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        logger.info("what was measured is not kept: %s", error)


# --- Links ---

COPY_BYTES = 32 * MiB
"""Of either memory and direction: more than the caches of a core hold, and little to take from a
machine for a moment."""
PIECE_BYTES = 8 * MiB
"""The most bytes of a piece for the disk; several are in flight at once, as they are in a step."""
DISK_PIECES = 16
"""Pieces for each directory, reads and writes together."""
SHORT_BYTES = 256 * KiB
"""More than the emulated device copies without its worker (`INLINE_BYTES` in `device/cpu.py`)."""
_REMEDY = "give a directory that one may write to, with more room"
SHORT_STEP = 2 * MiB
SHORTS = COPY_BYTES // SHORT_STEP
"""Short copies go between places that no cache remembers."""
PACED_BYTES = 16 * KiB
PACED_BYTES_PER_S = 1e9
PACED_COPIES = 8


class _Arrival(Promise):
    """A promise that is finished by a device's copy."""

    __slots__ = ()
    name = "what is probed"

    def enqueued(self, event: object) -> None:
        return

    def landed(self, error: BaseException | None) -> None:
        self.finish(error)


class _InFlight:
    """The transfers that were started; a defect ends all of them, so that nobody waits for ever."""

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
    """Measure "h2d" and "d2h" between host memory and that of the device."""
    in_flight = _InFlight()
    with closing(_device(torch_device, {}, in_flight)) as device:
        host, memory = device.host_block(2 * COPY_BYTES), device.allocate(2 * COPY_BYTES)
        # Touched once, since fresh pages cost more than the copy.
        for tensor in (host, memory):
            tensor.fill_(1)

        def lane(direction: Direction, at: int) -> Lane:
            pieces = COPY_BYTES // device.chunk_bytes

            def start(begin: int, nbytes: int) -> Ticket:
                here, there = host[begin : begin + nbytes], memory[begin : begin + nbytes]
                pair = (there, here) if direction == "h2d" else (here, there)
                device.copy(direction, *pair, (), arrival := in_flight.arrival())
                return arrival

            return Lane(
                direction,
                device.chunk_bytes,
                lambda n: start(at + n % pieces * device.chunk_bytes, device.chunk_bytes),
                SHORT_BYTES,
                lambda n: start(at + n % SHORTS * SHORT_STEP, SHORT_BYTES),
                most=256,
            )

        return measure_lanes(lane("h2d", 0), lane("d2h", COPY_BYTES))


def pacing_seconds() -> float:
    """Seconds that a throttle adds to a transfer beyond its bytes: waking the thread that delays
    it."""
    in_flight = _InFlight()
    with closing(_device(torch.device("cpu"), {"h2d": PACED_BYTES_PER_S}, in_flight)) as device:
        blocks = [host_pages(PACED_BYTES) for _ in range(2)]

        def seconds() -> float:
            since = time.perf_counter()
            arrivals = [in_flight.arrival() for _ in range(PACED_COPIES)]
            for arrival in arrivals:
                device.copy("h2d", blocks[0], blocks[1], (), arrival)
            for arrival in arrivals:
                arrival.wait()
            return (time.perf_counter() - since) / PACED_COPIES

        return max(fastest_round(seconds) - PACED_BYTES / PACED_BYTES_PER_S, 0.0)


def disk_links(directories: Sequence[Path]) -> dict[str, Link]:
    """Measure "disk_read" and "disk_write" of all `directories` together, as entries are striped.

    raises  DiskUnusable
    """
    in_flight = _InFlight()
    with _files(directories, in_flight) as files:
        piece, half = _piece_bytes(directories), DISK_PIECES // 2
        memory = {write: _random_bytes(len(files) * half * piece) for write in (False, True)}

        def start(write: bool, n: int, nbytes: int = piece) -> Ticket:
            n %= len(files) * half
            engine, target = files[n % len(files)]
            offset = (n // len(files) + write * half) * piece
            buffer = memory[write].part(n * piece, n * piece + nbytes)
            arrival = in_flight.arrival()
            engine.start(
                Move(write, target._replace(offset=offset), buffer, "a measurement", arrival.finish)
            )
            return arrival

        def lane(name: str, write: bool) -> Lane:
            short = partial(start, write, nbytes=SHORT_BYTES)
            least = 4 * len(files)
            return Lane(name, piece, partial(start, write), SHORT_BYTES, short, least)

        _fill(files, memory[True].part(0, piece), in_flight)
        return measure_lanes(lane("disk_read", False), lane("disk_write", True))


def _device(device: torch.device, throttle: Mapping[str, float], in_flight: _InFlight) -> Device:
    if device.type == "cuda":
        return CudaDevice(device, Meter(), in_flight.crashed)
    return CpuDevice(throttle, Meter(), in_flight.crashed)


@contextmanager
def _files(
    directories: Sequence[Path], in_flight: _InFlight
) -> Iterator[list[tuple[Engine, Target]]]:
    """A nameless file per directory and the engine that reaches it."""
    try:
        with ExitStack() as stack:
            opened = [stack.enter_context(Directory(path)) for path in directories]
            direct = [supports_direct(directory) for directory in opened]
            fds = [
                stack.enter_context(nameless_file(directory, is_direct))
                for directory, is_direct in zip(opened, direct, strict=True)
            ]
            rings = trial.choose_rings(list(zip(opened, direct, strict=True)))
            engines = {id(ring): Engine(ring, in_flight.crashed, _closed_error) for ring in rings}
            for engine in engines.values():
                stack.callback(engine.close)
            granules = [
                direct_granule(directory.system, fd) if is_direct else 1
                for directory, fd, is_direct in zip(opened, fds, direct, strict=True)
            ]
            yield [
                (engines[id(ring)], Target(path, fd, 0, granule))
                for ring, path, fd, granule in zip(rings, directories, fds, granules, strict=True)
            ]
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
        raise DiskUnusable(
            directories[0],
            f"is too full to be measured, which takes {show_size(2 * pieces * SHORT_BYTES)}",
            _REMEDY,
        )
    return min(fitting, PIECE_BYTES)


def _fill(files: Sequence[tuple[Engine, Target]], source: Buffer, in_flight: _InFlight) -> None:
    """Write the files once, as a first write also finds a place: a store writes each many times."""
    arrivals = []
    for engine, target in files:
        for piece in range(DISK_PIECES):
            place = target._replace(offset=piece * source.nbytes)
            arrivals.append(in_flight.arrival())
            engine.start(Move(True, place, source, "a measurement", arrivals[-1].finish))
    for arrival in arrivals:
        arrival.wait()


def _random_bytes(nbytes: int) -> Buffer:
    """Memory that no disk writes for less than its size; torch's random numbers stay untouched."""
    memory = host_pages(nbytes)
    drawn = torch.frombuffer(bytearray(os.urandom(SHORT_BYTES)), dtype=torch.uint8)
    memory.view(-1, SHORT_BYTES).copy_(drawn)
    return Buffer.over(memory)


def _closed_error(name: str) -> ParameterChanged:
    return ParameterChanged(name, "was broken off", "measure again")


# --- Lanes ---

LANE_SPAN_S = 0.05
"""Seconds of one batch: a hundred times what starting a batch costs."""
LEAST_ROUNDS, MOST_ROUNDS = 5, 12
ENOUGH_S = 0.5
SETTLED = 1.05
"""The best round counts, since whatever else runs on the machine only ever slows a round. The best
is found when the next best is as good within this factor, after MOST_ROUNDS, or after ENOUGH_S."""
SHORT_ROUNDS = 15
TAKES_TURNS = 1.5
"""Seconds of both lanes at once, each with work for the same time, over seconds of one: 1 if the
lanes are apart, 2 if they take turns."""


@dataclass(frozen=True)
class Lane:
    """One direction of a link, as ways to start transfers.

    start  begins piece number n of `piece_bytes`; any n is allowed
    short  begins a transfer of `short_bytes`, elsewhere for each n
    least, most  pieces of a batch
    """

    name: str
    piece_bytes: int
    start: Callable[[int], Ticket]
    short_bytes: int
    short: Callable[[int], Ticket]
    least: int = 2
    most: int = 64


def measure_lanes(there: Lane, back: Lane) -> dict[str, Link]:
    """Both lanes as links by name, `shares` set where they take turns."""
    pieces = {lane.name: _pieces_per_batch(lane) for lane in (there, back)}
    alone = {
        lane.name: fastest_round(partial(_lane_seconds, (lane, pieces[lane.name])))
        for lane in (there, back)
    }
    both = fastest_round(
        partial(_lane_seconds, *((lane, pieces[lane.name]) for lane in (there, back)))
    )
    turns = both > TAKES_TURNS * max(alone.values())
    links = {}
    for lane, other in ((there, back), (back, there)):
        rate = rounded(pieces[lane.name] * lane.piece_bytes / alone[lane.name])
        shares = other.name if turns else None
        links[lane.name] = Link(lane.name, rate, _latency(lane, rate), shares)
    return links


def _pieces_per_batch(lane: Lane) -> int:
    """Pieces that take about LANE_SPAN_S."""
    once = min(_lane_seconds((lane, 1)) for _ in range(2))  # the first one may find things cold
    return min(max(round(LANE_SPAN_S / once), lane.least), lane.most)


def fastest_round(seconds: Callable[[], float]) -> float:
    """The least seconds that repeated rounds take."""
    rounds: list[float] = []
    while len(rounds) < MOST_ROUNDS and sum(rounds) < ENOUGH_S:
        rounds = sorted((*rounds, seconds()))
        if len(rounds) >= LEAST_ROUNDS and rounds[1] <= SETTLED * rounds[0]:
            break
    return rounds[0]


def _lane_seconds(*batches: tuple[Lane, int]) -> float:
    """Seconds until the pieces of all batches have arrived, started in turn."""
    since = time.perf_counter()
    tickets = [
        lane.start(n)
        for round_ in zip_longest(*([(lane, n) for n in range(pieces)] for lane, pieces in batches))
        for lane, n in filter(None, round_)
    ]
    for ticket in tickets:
        ticket.wait()
    return time.perf_counter() - since


def _latency(lane: Lane, bytes_per_s: float) -> float:
    """Seconds of a transfer beyond its bytes: the lower quartile, since the best may have hit a
    cache."""
    rounds = []
    for n in range(SHORT_ROUNDS):
        since = time.perf_counter()
        lane.short(n).wait()
        rounds.append(time.perf_counter() - since)
    return rounded(max(statistics.quantiles(rounds)[0] - lane.short_bytes / bytes_per_s, 0.0))


def rounded(value: float) -> float:
    """Three digits of `value`: what follows is noise, and nobody wants to read it."""
    return float(f"{value:.3g}")


# --- Compute ---

DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
SIDES = {"cpu": (1024, 512, 256), "cuda": (8192, 4096, 2048, 1024)}
"""Of square matmuls, as large as memory and MOST_ONCE_S allow."""
MOST_ONCE_S = 0.1
SPAN_S = 0.04
ELEMENTWISE_BYTES = 32 * MiB
"""Per operand: more than the caches of a core hold, which would answer instead of memory."""
LEAST_BYTES = max(2 * COPY_BYTES, 3 * ELEMENTWISE_BYTES)
"""Of the device that measuring takes; fewer would say nothing of larger copies and operands."""
LAUNCHES = 500


def sides_within(device: torch.device, most_bytes: int | None) -> Sequence[int]:
    """The SIDES of which three float32 matrices take at most `most_bytes`, or the least."""
    sides = SIDES[device.type]
    fitting = [s for s in sides if most_bytes is None or 3 * 4 * s**2 <= most_bytes]
    return fitting or sides[-1:]


@torch.no_grad()
def compute_of(device: torch.device, most_bytes: int | None = None) -> Compute:
    """Measure what the device computes at. Takes about a second; leaves random numbers alone and
    gives memory back.

    most_bytes  of the device that this may take, if that is more than LEAST_BYTES
    """
    sides = sides_within(device, most_bytes)
    flops = {
        str(dtype).removeprefix("torch."): rounded(_matmul(device, dtype, sides))
        for dtype in DTYPES[device.type]
    }
    compute = Compute(flops, rounded(_elementwise(device)), rounded(_launch(device)))
    _give_back_unused(device)
    return compute


def _give_back_unused(device: torch.device) -> None:
    """Give back what the device's allocator would keep from arenas."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


HOST_UPDATE_BYTES = 64 * MiB
"""Per operand: more than the caches of a server's socket hold of four."""


@torch.no_grad()
def host_update_rate() -> float:
    """Measure at how many bytes per second the host's cores read and write the operands of a step
    of AdamW in its memory."""
    values = torch.full((HOST_UPDATE_BYTES // 4,), 0.5, dtype=torch.float32, device="cpu")
    param = torch.nn.Parameter(values)
    param.grad = torch.full_like(param, 0.5)
    update = torch.optim.AdamW([param], fused=True).step
    passes = 7  # the gradient is read, all others are read and written
    return rounded(passes * HOST_UPDATE_BYTES / _best_seconds(update, torch.device("cpu")))


def _matmul(device: torch.device, dtype: torch.dtype, sides: Sequence[int]) -> float:
    small = sides[-1]
    cubic = _seconds_roughly(_multiply(device, dtype, small), device) / small**3
    for side in sides:
        fits = device.type == "cpu" or side**2 * 16 < torch.cuda.mem_get_info(device)[0]
        if fits and (cubic * side**3 < MOST_ONCE_S or side == small):
            return 2.0 * side**3 / _best_seconds(_multiply(device, dtype, side), device)
    return 2.0 / cubic


def _multiply(device: torch.device, dtype: torch.dtype, side: int) -> Callable[[], object]:
    a, b, c = (torch.full((side, side), 0.5, device=device, dtype=dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


def _elementwise(device: torch.device) -> float:
    n = ELEMENTWISE_BYTES // 4
    a, b, c = (torch.full((n,), 0.5, device=device, dtype=torch.float32) for _ in range(3))
    return 3 * ELEMENTWISE_BYTES / _best_seconds(lambda: torch.add(a, b, out=c), device)


def _launch(device: torch.device) -> float:
    x = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    return _best_seconds(many, device) / LAUNCHES


def _seconds_roughly(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one of a few runs; the first one, which also looks for kernels, does not count."""
    run()
    return min(_seconds(run, 1, device) for _ in range(3))


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, from the best of some batches."""
    times = max(1, round(SPAN_S / _seconds_roughly(run, device)))
    return fastest_round(lambda: _seconds(run, times, device)) / times


def _seconds(run: Callable[[], object], times: int, device: torch.device) -> float:
    _synchronize(device)
    since = time.perf_counter()
    for _ in range(times):
        run()
    _synchronize(device)
    return time.perf_counter() - since


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
