"""Slots of the arena that are written to disk: by the staging ring, or straight.

    python -m benchmarks.written_slots --disk /mnt/nvme
    python -m benchmarks.written_slots --disk /mnt/nvme --disk-write 1GB/s

So many slots are written at once. Of each way, which take turns, the milliseconds until all slots
are free, until all bytes are on disk, and of the processor: the medians of some rounds. Where the
ring frees them no sooner, its copies are for nothing (`machine/staging.py::behind_bytes`).
"""

import argparse
import statistics
import tempfile
import time

from torch import nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.frontend.session_plan import costs_of
from zcompile.ir.types import EntryKind
from zcompile.ir.units import MiB
from zcompile.machine.staging import lane_bytes

SLOT_BYTES = MiB
WARM_UP = 2
"""Rounds that are not counted: the first ones make the file."""


def measured(args: argparse.Namespace, slots: int, under: str) -> dict[str, list[float]]:
    """Way -> medians of the three times, in milliseconds."""
    model = zcompile.offload(
        nn.Linear(64, 64),
        device="cpu",
        device_memory="64MiB",
        host_memory="128MiB",
        disk=under,
        throttle={"disk_write": args.disk_write} if args.disk_write else {},
    )
    session = session_behind(model)
    ring_bytes, links = session.ways().ring_bytes, costs_of(session).machine.links
    ratio = links["d2h"].bytes_per_s / links["disk_write"].bytes_per_s
    print(f"{slots} x {SLOT_BYTES // MiB} MiB; the disk is {ratio:.1f} times slower than a copy")
    entries = [
        session.create(f"slot{n}", EntryKind.STATE, SLOT_BYTES, tier="disk") for n in range(slots)
    ]
    memory = [session.arena.slot(n * SLOT_BYTES, SLOT_BYTES) for n in range(slots)]
    for slot in memory:
        slot.fill_(1)
    ways = {"ring": lane_bytes(ring_bytes), "straight": 0}
    rounds: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    for _ in range(WARM_UP + args.rounds):
        for way, behind_bytes in ways.items():
            session.write_behind(behind_bytes)
            begin, used = time.perf_counter(), time.process_time()
            puts = [session.put(*pair) for pair in zip(entries, memory, strict=True)]
            for put in puts:
                put.memory_heard().wait()
            free = time.perf_counter() - begin
            for put in puts:
                put.wait()
            home = time.perf_counter() - begin
            rounds[way].append((free, home, time.process_time() - used))
    zcompile.close(model)
    return {
        way: [1e3 * statistics.median(times) for times in zip(*rows[WARM_UP:], strict=True)]
        for way, rows in rounds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--disk", default=None, help="directory for the disk tier")
    parser.add_argument("--disk-write", default=None, help="throttle, such as 1GB/s")
    parser.add_argument("--slots", type=int, nargs="+", default=(1, 4, 16))
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    for slots in args.slots:
        with tempfile.TemporaryDirectory(dir=args.disk) as under:
            for way, (free, home, used) in measured(args, slots, under).items():
                print(f"  {way}: free {free:.2f} ms, on disk {home:.2f}, processor {used:.2f}")


if __name__ == "__main__":
    main()
