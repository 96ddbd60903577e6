"""The commits of one training, by however many ranks, below the directory that a user gives.

    DIR/zinf.index                   of one process
    DIR/rank-0-of-2/zinf.index       of two ranks, each with its shares
    DIR/rank-1-of-2/zinf.index
    DIR/rank-3-of-2x2/zinf.index     of four, of which two groups each hold a whole: of the last

A commit of several ranks is one index per rank. Each writes its own beside its last one, and none
gives it the name of the last before all of them are on their devices. So where one rank has a
commit as its last, every other one has it too, as its last or beside it; who finds it beside gives
it its name (`settle.py`). Commits are numbered through the whole training, whoever makes them: of
all that lie below a directory, the one with the highest number is where the training goes on.

Without torch: `zinf disk` looks here too.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zcompile.errors import DurableDamaged, Unsupported, ZinfError
from zcompile.ir.rank_mesh import RankMesh
from zcompile.runtime.durable.index import (
    INDEX_NAME,
    NEW_INDEX_NAME,
    Index,
    parse,
    read_index,
)
from zcompile.runtime.io.files import (
    Directory,
    is_directory,
    open_directory,
    stat_through_links,
    unusable_error,
)
from zcompile.runtime.io.system_calls import SystemCalls

SHARING = "ranks"
"""Key in the meta of a commit of several ranks."""
_OF_RANK = re.compile("rank-([0-9]{1,6})-of-(?:([0-9]{1,6})x)?([0-9]{1,6})")
Commit = tuple[Index, bytes]
"""An index, and the bytes of its small tensors."""


def directory_of_rank(given: Path, rank: int, mesh: RankMesh) -> Path:
    """Where one of several ranks commits, below the directory that the user gives."""
    return given / f"rank-{rank}-of-{mesh}"


def given_for(home: Path) -> Path:
    """The directory that the user gave, of which `home` is the one that this process commits to."""
    return home.parent if _OF_RANK.fullmatch(home.name) else home


@dataclass(frozen=True)
class Sharing:
    """Whose part of a commit an index is.

    training  the same in the indexes of all ranks, and in none of another training
    shares    names of the tensors of which each rank has a share
    hosts     the machine of each rank; none in a commit of an older version
    owners    of those of which one rank has everything: name -> which one of its group
    replicas  how many groups of the ranks each hold a whole
    """

    rank: int
    ranks: int
    training: str
    shares: frozenset[str]
    hosts: tuple[str, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    replicas: int = 1

    @property
    def mesh(self) -> RankMesh:
        return RankMesh(self.ranks, self.replicas)

    def to_meta(self) -> dict[str, object]:
        """For the meta of an index."""
        told = {"rank": self.rank, "ranks": self.ranks, "training": self.training}
        told |= {"replicas": self.replicas} if self.replicas > 1 else {}
        shares = {"shares": sorted(self.shares), "hosts": [*self.hosts]}
        return {SHARING: {**told, **shares, **({"owners": self.owners} if self.owners else {})}}


def sharing_of(index: Index, path: Path) -> Sharing | None:
    """Whose part a commit is; None: all of it, of one process.

    path    of the index, for errors
    raises  DurableDamaged
    """
    told: Any = index.meta.get(SHARING)
    if told is None:
        return None
    sound = (
        isinstance(told, Mapping)
        and type(told.get("rank")) is int
        and type(told.get("ranks")) is int
        and 0 <= told["rank"] < told["ranks"]
        and isinstance(told.get("training"), str)
        and re.fullmatch("[0-9a-f]{1,64}", told["training"])
        and isinstance(told.get("shares"), list)
        and set(map(str, told["shares"])) <= {tensor.name for tensor in index.tensors}
        and isinstance(hosts := told.get("hosts", []), list)
        and len(hosts) in (0, told["ranks"])
        and all(isinstance(host, str) for host in hosts)
        and isinstance(owners := told.get("owners", {}), dict)
        and set(owners) <= set(told["shares"])
        and type(replicas := told.get("replicas", 1)) is int
        and replicas > 0
        and told["ranks"] % replicas == 0
        and all(type(at) is int and 0 <= at < told["ranks"] // replicas for at in owners.values())
    )
    if not sound:
        raise DurableDamaged(path, "the index", "does not say soundly whose share it is of")
    shares = frozenset(told["shares"])
    rank, ranks, training = told["rank"], told["ranks"], told["training"]
    return Sharing(rank, ranks, training, shares, tuple(hosts), owners, replicas)


@dataclass(frozen=True)
class Held:
    """What a directory holds.

    last      the last commit
    prepared  one beside it, which may count if other ranks have it
    """

    last: Commit | None
    prepared: Commit | None

    def numbered(self, serial: int) -> Commit | None:
        """The commit with this number, wherever it lies."""
        found = (one for one in (self.last, self.prepared) if one and one[0].serial == serial)
        return next(found, None)


def held_in(directory: Directory) -> Held:
    """What a directory holds. raises  DurableDamaged, DiskUnusable, OSError"""
    last = read_index(directory)
    content = directory.read(NEW_INDEX_NAME)
    try:
        beside = None if content is None else parse(directory.path / NEW_INDEX_NAME, content)
    except DurableDamaged:
        beside = None  # not all of it was written: nobody else has given it the name of the last
    if beside is not None and sharing_of(beside[0], directory.path / NEW_INDEX_NAME) is None:
        beside = None  # of one process, which had not come to its end
    return Held(last, beside)


def prepared_in(directory: Directory) -> Index | None:
    """A commit of several ranks that may count, though it is not the last here.

    raises  DurableDamaged, DiskUnusable, OSError
    """
    held = held_in(directory)
    newer = held.prepared and (held.last is None or held.last[0].serial < held.prepared[0].serial)
    return held.prepared[0] if held.prepared and newer else None


@dataclass(frozen=True)
class World:
    """The last commit of the ranks that trained together.

    paths    of their directories, by rank; that of one process alone is the one that was given
    commits  by rank
    """

    paths: Sequence[Path]
    commits: Sequence[Commit]

    @property
    def index(self) -> Index:
        """The part of the first rank."""
        return self.commits[0][0]


def newest_in(given: Path, system: SystemCalls, after: int = -1) -> World | None:
    """The last commit below a directory, of however many ranks; None if there is none.

    after   the number of one of which other ranks are known to have their parts, maybe on other
            machines: only a later one is looked for
    raises  Unsupported, if parts of it are not here; DurableDamaged, DiskUnusable
    """
    try:
        found = list(_worlds_in(given, system))
    except FileNotFoundError:
        return None
    except ZinfError:
        raise
    except OSError as error:
        raise unusable_error(given, error) from error
    serial, paths, commits = max(found, key=lambda row: row[0], default=(-1, (), ()))
    if serial <= after:
        return None
    if missing := [rank for rank, commit in enumerate(commits) if commit is None]:
        lay = _where(given, missing, paths, commits)
        raise Unsupported(
            f"the last commit in {given} is of {len(paths)} ranks, and here it lacks the parts of "
            f"ranks {', '.join(map(str, missing))}",
            f"start {len(paths)} ranks, each where its directory is{lay}; or bring {paths[0].name} "
            "and the others together in one directory that all ranks see; if one of them is lost, "
            "so is the commit: go on from a checkpoint that zcompile.save wrote, in another "
            "directory",
        )
    return World(paths, [commit for commit in commits if commit is not None])


def _where(
    given: Path, missing: Sequence[int], paths: Sequence[Path], commits: Sequence[Commit | None]
) -> str:
    """For people: on which machines the missing parts lay, as those that are here say."""
    path, index = next(
        (path, commit[0]) for path, commit in zip(paths, commits, strict=True) if commit
    )
    sharing = sharing_of(index, path / INDEX_NAME)
    if sharing is None or not sharing.hosts:
        return ""
    told = [f"that of rank {rank} lay on {sharing.hosts[rank]}" for rank in missing]
    return f" ({', '.join(told)}, in {given})"


def _worlds_in(
    given: Path, system: SystemCalls
) -> Iterator[tuple[int, Sequence[Path], Sequence[Commit | None]]]:
    """Of each number of ranks that has a commit here: its number, the directories, the parts."""
    with Directory(given, system) as directory:
        last = read_index(directory)
        if last is not None and sharing_of(last[0], given / INDEX_NAME) is None:
            yield last[0].serial, [given], [last]
        names = [match for name in directory.names() if (match := _OF_RANK.fullmatch(name))]
    shapes: dict[tuple[int, int], set[int]] = defaultdict(set)
    for match in names:
        rank, replicas, shards = int(match[1]), int(match[2] or 1), int(match[3])
        if rank < replicas * shards:
            shapes[replicas, shards].add(rank)
    for (replicas, shards), here in sorted(shapes.items()):
        mesh = RankMesh(replicas * shards, replicas)
        held = {rank: _held_at(directory_of_rank(given, rank, mesh), system) for rank in here}
        serials = [one.last[0].serial for one in held.values() if one and one.last is not None]
        if serials:  # so there were as many ranks, however many the name of a directory tells of
            serial, ranks = max(serials), range(mesh.ranks)
            parts = [one.numbered(serial) if (one := held.get(rank)) else None for rank in ranks]
            yield serial, [directory_of_rank(given, rank, mesh) for rank in ranks], parts


def _held_at(path: Path, system: SystemCalls) -> Held | None:
    """What the directory at `path` holds; None if there is none."""
    if not is_directory(stat_through_links(system, path)):
        return None
    with open_directory(path, system) as directory:
        return held_in(directory)
