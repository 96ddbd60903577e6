"""Ranks that start again settle which commit is the last that all of them have.

A rank that was killed before it could give a commit the name of the last has it beside that. If
another rank has it as its last, all have prepared it (`worlds.py`), and it counts: here it gets its
name. What only lies beside, on all ranks, did not happen.
"""

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from zcompile.errors import DurableDamaged
from zcompile.runtime.durable.index import INDEX_NAME, Index, switch_index
from zcompile.runtime.durable.worlds import (
    Commit,
    Held,
    directory_of_rank,
    held_in,
    sharing_of,
)
from zcompile.runtime.io.files import close_or_warn, open_directory
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.tiers.directory_lock import DirectoryLock

logger = logging.getLogger(__name__)


def settle(path: Path, fabric: Fabric, system: SystemCalls = KERNEL) -> None:
    """Make the last commit that all ranks have the last one in the directory of this rank.

    raises  DurableDamaged on every rank, if one of them lacks it; DiskOwned, DiskUnusable, OSError
    """
    with ExitStack() as stack:
        home = stack.enter_context(open_directory(path, system))
        stack.callback(close_or_warn, home.path, DirectoryLock(home, reclaiming=False).release)
        held = held_in(home)
        rows = fabric.rows(torch.tensor([*_told(held.last, path), *_told(held.prepared, path)]))
        serial = int(rows[:, 0].max())
        if serial < 0:
            return
        trainings = [
            row[1] if row[0] == serial else row[3] if row[2] == serial else None
            for row in rows.tolist()
        ]
        first = next(rank for rank, row in enumerate(rows.tolist()) if row[0] == serial)
        if lacking := [rank for rank, told in enumerate(trainings) if told != trainings[first]]:
            raise DurableDamaged(
                directory_of_rank(path.parent, lacking[0], fabric.mesh) / INDEX_NAME,
                f"commit {serial} of this training, which rank {first} has,",
                f"is missing on rank {lacking[0]}: its directory is gone, or of another training"
                f"{_moved(held, serial, lacking[0], fabric, path)}",
            )
        if held.last is None or held.last[0].serial < serial:
            switch_index(home)
            logger.info("%s: commit %d, which all ranks have prepared, counts", path, serial)


def _moved(held: Held, serial: int, rank: int, fabric: Fabric, path: Path) -> str:
    """For people: on which machine a part lay that a rank lacks, if that rank is on another now."""
    own = held.numbered(serial)
    sharing = None if own is None else sharing_of(own[0], path / INDEX_NAME)
    if sharing is None or not sharing.hosts or sharing.hosts[rank] == fabric.hosts[rank]:
        return ""
    return (
        f"; it lay on {sharing.hosts[rank]}, and the rank is on {fabric.hosts[rank]} now: start it "
        "there, or bring the directory here"
    )


def _told(commit: Commit | None, path: Path) -> tuple[int, int]:
    """The number of a commit and its training, as numbers; -1 without one."""
    if commit is None:
        return -1, -1
    sharing = sharing_of(commit[0], path / INDEX_NAME)
    return commit[0].serial, -1 if sharing is None else int(sharing.training[:15], 16)


def agreed_training(fabric: Fabric, index: Index | None, run: str, path: Path) -> str:
    """What the indexes of all ranks call their training: that of the last commit, or a new one's.

    raises  RanksDiffer, RankFailed
    """
    sharing = None if index is None else sharing_of(index, path / INDEX_NAME)
    name = run if sharing is None else sharing.training
    return fabric.compare("name the training", bytes.fromhex(name)[:16].ljust(16, b"\0"))[0].hex()
