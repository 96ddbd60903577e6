"""Ranks find each other, through a store that may hold what an earlier start of them has left.

torchrun keeps one store over its restarts (https://github.com/pytorch/pytorch/issues/135712). In
what is read there by a name that each start uses again, a rank may take the address of a dead one
for that of its successor, or believe that a rank has failed which failed before the restart. So the
ranks agree on a name that no start before has used, and keep everything else below it: each says a
token that it has just drawn, rank 0 writes the tokens of all into one list, each says which list it
has found its own token in, and once all have said the last one, nothing in that is of another
start. A digest of it is the name.
"""

import hashlib
import json
import secrets
import socket
import time
from typing import NamedTuple

from zcompile.errors import RankFailed
from zcompile.runtime.ranks.asking import Store
from zcompile.runtime.ranks.watch import MESH

POLL_S = 0.005
"""Seconds between two looks at the store."""


class Met(NamedTuple):
    """All ranks are here.

    name   of this start: the same on all ranks, and of no other start
    hosts  of each rank
    """

    name: str
    hosts: list[str]


def meet(store: Store, rank: int, ranks: int, timeout_s: float) -> Met:
    """Wait until all `ranks` have come.

    raises  RankFailed, if one does not come
    """
    mine = [secrets.token_hex(8), socket.gethostname()]
    store.set(f"token/{rank}", json.dumps(mine))
    until, seen = time.monotonic() + timeout_s, ""
    while True:
        if rank == 0 and (listed := _tokens(store, ranks)) != _read(store, "list"):
            store.set("list", listed)
        listed = _read(store, "list")
        if listed != seen and json.loads(listed)[rank] == mine:
            store.set(f"seen/{rank}", listed)
            seen = listed
        if rank == 0 and _unseen(store, ranks, seen) is None:
            store.set("complete", seen)
        if seen and _read(store, "complete") == seen:
            name = hashlib.blake2b(seen.encode(), digest_size=16).hexdigest()
            return Met(name, [host for _, host in json.loads(seen)])
        if time.monotonic() > until:
            raise _missing(store, ranks, seen, timeout_s)
        time.sleep(POLL_S)


def _read(store: Store, key: str) -> str:
    """ "" if there is none."""
    return store.get(key).decode() if store.check([key]) else ""


def _tokens(store: Store, ranks: int) -> str:
    """What the ranks have said of themselves, as the JSON of a list; None of one that has not."""
    return json.dumps([json.loads(_read(store, f"token/{at}") or "null") for at in range(ranks)])


def _unseen(store: Store, ranks: int, listed: str) -> int | None:
    """The first rank that has not found itself in this list."""
    return next((at for at in range(ranks) if _read(store, f"seen/{at}") != listed), None)


def _missing(store: Store, ranks: int, seen: str, timeout_s: float) -> RankFailed:
    """The error about a rank that has not come; rank 0, if not even that has found this one."""
    rank = (_unseen(store, ranks, seen) or 0) if seen else 0
    why = f"did not come within {timeout_s:g} s to offload the model"
    return RankFailed(rank, "a host that is not known yet", why, MESH)
