"""Chooses the ranks that train one model together, and refuses what they cannot do yet.

Without a word of the user's these are all ranks of torch.distributed. What each of them holds of a
parameter is a share (`ir/partition.py`); what crosses between them goes through a fabric
(`runtime/ranks/fabric.py`).
"""

import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zcompile.config import PARTITIONS, Config, is_mesh
from zcompile.errors import (
    KEEP_LESS,
    BudgetExceeded,
    ConfigInvalid,
    Unsupported,
    ZinfError,
    more_device_memory,
)
from zcompile.frontend.cards import settled_on_cards
from zcompile.ir.partition import partition_of
from zcompile.ir.rank_mesh import RankMesh, Ring
from zcompile.ir.torch_compat import keys_below, store_of_torchrun
from zcompile.ir.types import Layout
from zcompile.ir.version import VERSION
from zcompile.machine.model import RANK_LINKS, Machine, slowest_way
from zcompile.runtime.device.pages import machine_bytes
from zcompile.runtime.durable.worlds import directory_of_rank
from zcompile.runtime.open import SHARE_OF_MACHINE
from zcompile.runtime.ranks.asking import ANSWER_S, AskedStore, Asker
from zcompile.runtime.ranks.fabric import DIGEST_BYTES, Fabric
from zcompile.runtime.ranks.link import LinksOfMesh, RankLink
from zcompile.runtime.ranks.meeting import meet
from zcompile.runtime.ranks.watch import Keeper, patience

log = logging.getLogger("zcompile.frontend.ranks")

READY, FAILED = bytes(DIGEST_BYTES), b"\1" + bytes(DIGEST_BYTES - 1)
"""What a rank says when it knows whether it can take part."""
LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Environment variables in which torchrun and the like, Open MPI, and MPICH give the number of
processes. SLURM's is not among them: it says the same to a script that runs once."""
FIND_RANKS_S = 1800.0
"""Seconds in which all processes that torchrun starts must come: as long as torch.distributed waits
for them."""
ALIKE = (
    "activations",
    "regions",
    "max_lead",
    "reduction",
    "machine",
    "device",
    "durable",
    "stage",
    "partition",
    "param_dtype",
    "tile_bytes",
    "ranks_per_node",
)
"""Of a config, what decides what crosses between ranks. What `torch.compile(options=)` says instead
is compared with the collectives of each call."""
DERIVED = ("may_keep_wholes", "may_read_copies")
"""What decides it too, and follows from fields of `ALIKE` and from `residency`."""


def open_fabric(config: Config) -> Fabric | None:
    """The ranks that train one model together; None for one process alone.

    Under torchrun, the process group is made here unless the script has made it.
    raises  ConfigInvalid, Unsupported, RanksDiffer, RankFailed
    """
    if config.mesh is False or not (is_mesh(config.mesh) or _several()):
        asked: dict[str, object] = {} if config.stage == "auto" else {"stage": config.stage}
        if config.partition != PARTITIONS[0]:
            asked["partition"] = config.partition
        if config.ranks_per_node:
            asked["ranks_per_node"] = config.ranks_per_node
        asked |= {f"throttle[{link!r}]": rate for link, rate in _between_ranks(config).items()}
        for name, value in asked.items():
            raise ConfigInvalid(
                name,
                value,
                "is of several ranks that train one model, and this process trains alone; leave it "
                "out, or start the ranks with torchrun",
            )
        return None
    if not dist.is_initialized() and dist.is_available() and dist.is_torchelastic_launched():
        _find_ranks()
    if not dist.is_initialized():
        told = next((text for text, size in _sizes() if size > 1), "a mesh is given")
        raise Unsupported(
            f"several ranks were started ({told}), and torch.distributed is not initialised, so "
            "that they cannot train one model together",
            "call torch.distributed.init_process_group('gloo') before zcompile.offload or "
            "zcompile.init; or say mesh=False if a model per rank is what you want, each with a "
            "disk directory of its own",
        )
    ranks = _ranks_of(config.mesh, config.device or "cpu")
    _refuse_unready(config)
    if config.ranks_per_node and len(ranks) % config.ranks_per_node:
        raise ConfigInvalid(
            "ranks_per_node",
            config.ranks_per_node,
            f"does not divide the {len(ranks)} ranks, and every node has as many; give a number "
            "that does, or leave it out",
        )
    whole = len(ranks) == dist.get_world_size()
    replicas = 1 if config.mesh is None or config.mesh.ndim == 1 else config.mesh.size(0)
    group = None if whole else _group_of(config.mesh)
    return Fabric(ranks, group, float(config.rank_timeout), replicas)


def _group_of(mesh: Any) -> Any:
    """The process group of a mesh that is a part of the world.

    raises  Unsupported, if nothing that lies on the host can pass it: a group of our own would be
            one that ranks outside of the mesh have no part in, and torch names those by how many
            groups each rank is in, so that ranks which are in different numbers wait for ever
    """
    group = mesh.get_group()
    if "cpu:gloo" not in dist.get_backend_config(group):
        raise Unsupported(
            f"ranks exchange what lies on the host by gloo, and the process group of {mesh} has "
            f"none ({dist.get_backend_config(group)})",
            "call torch.distributed.init_process_group('cpu:gloo,cuda:nccl') before the mesh is "
            "made, or give a mesh of all ranks",
        )
    return group


def _ranks_per_host(hosts: Sequence[str]) -> int:
    """How many ranks, one behind the other, are on one machine, wherever that is. Nodes are as
    large, where some have more than others too.

    hosts  by rank
    """
    return math.gcd(*(len(list(found)) for _, found in groupby(hosts)))


def _between_ranks(config: Config) -> dict[str, float]:
    """Throttles of links between ranks."""
    return {link: float(config.throttle[link]) for link in RANK_LINKS if link in config.throttle}


def _links_of(config: Config, mesh: RankMesh, per_node: int) -> LinksOfMesh:
    """The links that decide how fast collectives are."""
    rings = (mesh.group_ring(per_node), mesh.replica_ring(per_node), mesh.whole_ring(per_node))
    links = [_link_of(config, ring) for ring in rings]
    shared = {link.name: link for link in links}
    throttle = _between_ranks(config)
    if "node_to_node" in throttle and mesh.ranks == per_node:
        log.warning(
            "throttle has 'node_to_node', which paces nothing: all %d ranks are on one node; "
            "ranks_per_node= lets one machine stand in for several",
            mesh.ranks,
        )
    if "rank_to_rank" in throttle and per_node == 1 < mesh.ranks:
        log.warning(
            "throttle has 'rank_to_rank', which paces nothing: each of the %d nodes has one rank; "
            "'node_to_node' paces what crosses between nodes",
            mesh.ranks,
        )
    if 1 < per_node < mesh.ranks and (slack := throttle.keys() - shared.keys()):
        log.warning(
            "throttle has '%s', which paces nothing: all that passes it passes '%s' too, which is "
            "slower",
            *slack,
            *shared,
        )
    return LinksOfMesh(*(shared[link.name] for link in links))


def _link_of(config: Config, ring: Ring) -> RankLink:
    """The slowest link, as far as that is told, of those that a ring passes."""
    throttle = _between_ranks(config)
    described = config.machine.links if isinstance(config.machine, Machine) else {}
    rates = {name: described[name].bytes_per_s for name in RANK_LINKS if name in described}
    rates = {
        name: min(rates.get(name, math.inf), throttle.get(name, math.inf)) for name in RANK_LINKS
    }
    name = slowest_way(rates, *ring)
    # Of a ring of one rank nothing passes, so its link may have the pace of others of its name.
    name = RANK_LINKS[0] if name is None else name
    return RankLink(name, throttle.get(name))


def _find_ranks() -> None:
    """Make the process group of a process that torchrun has started; what the start before a
    restart has left in the store of torchrun is not read. raises  RankFailed"""
    store, rank, size = store_of_torchrun()
    asker = Asker(lambda: keys_below(f"zcompile/start/{size}", store), None)
    try:
        asked = AskedStore(asker, patience(Keeper(None, "torchrun", ""), rank, FIND_RANKS_S))
        start = meet(asked, rank, size, FIND_RANKS_S).name
    finally:
        asker.stop(ANSWER_S)
    dist.init_process_group("gloo", store=keys_below(start, store), rank=rank, world_size=size)


def _ranks_of(mesh: Any, device: str) -> list[int]:
    """The ranks of the world that train together. raises  ConfigInvalid"""
    if mesh is None:
        return list(range(dist.get_world_size()))
    if mesh.ndim not in (1, 2):
        raise ConfigInvalid(
            "mesh",
            mesh,
            f"has {mesh.ndim} dimensions; give the one whose ranks share the parameters, as "
            'mesh["dp"], or two: that of the groups which hold the same, and that whose ranks '
            'share the parameters, as mesh["replicate", "shard"]',
        )
    if mesh.device_type not in ("cpu", torch.device(device).type):
        raise ConfigInvalid(
            "mesh",
            mesh,
            f"is of {mesh.device_type!r}, and the device is {device!r}; give one of that type, or "
            "of 'cpu', whose group carries what ranks agree on",
        )
    # As their process group, and `mesh.get_local_rank()`, number them, whatever their order is.
    ranks = sorted(int(rank) for rank in mesh.mesh.flatten().tolist())
    if dist.get_rank() not in ranks:
        raise ConfigInvalid("mesh", mesh, f"does not contain this rank, {dist.get_rank()}")
    if mesh.ndim == 2:
        _check_groups(mesh, ranks)
    return ranks


def _check_groups(mesh: Any, ranks: Sequence[int]) -> None:
    """Refuse a mesh of two dimensions that nothing carries what all of its ranks agree on for, or
    whose ranks do not stand in their order. raises  ConfigInvalid"""
    if len(ranks) != (world := dist.get_world_size()):
        raise ConfigInvalid(
            "mesh",
            mesh,
            f"has {len(ranks)} of the {world} ranks of torch.distributed, and no process group is "
            "of all of those that a mesh of two dimensions has; give one of all ranks, or of one "
            "dimension",
        )
    if mesh.mesh.flatten().tolist() != list(ranks):
        raise ConfigInvalid(
            "mesh",
            mesh,
            "has its ranks in another order than their numbers'; give that of "
            f"init_device_mesh({mesh.device_type!r}, {tuple(mesh.mesh.shape)})",
        )


def _refuse_unready(config: Config) -> None:
    """Refuse what several ranks cannot do together yet. raises  Unsupported"""
    if config.stage == 2 and config.tile_bytes is not None:
        raise Unsupported(
            f"stage=2 with tile_bytes={config.tile_bytes} is asked for, and several ranks train "
            "one model: that is not there yet together",
            "leave one of them out; or start one process; or give mesh=False for a model per rank",
        )


def refuse_tiles(config: Config, fabric: Fabric | None) -> None:
    """Refuse that the options of one graph cut what is to be kept whole. raises  Unsupported"""
    if fabric is not None and config.stage == 2 and config.tile_bytes is not None:
        raise Unsupported(
            f"torch.compile(options={{'tile_bytes': {config.tile_bytes}}}) is asked for, and "
            "stage=2, which keeps all of each weight on every rank: what comes in tiles is "
            "gathered for every use, as with stage=3",
            "leave tile_bytes out, or give stage=3 to zcompile.offload",
        )


def tell_of_tiles(config: Config, graph: str, tiled: Sequence[str]) -> None:
    """Warn that weights of a graph come in tiles which are to be kept whole: there is no room for
    one beside what the graph holds.

    tiled  names of weights that ranks hold shares of
    """
    if config.stage == 2 and tiled:
        log.warning(
            "stage=2 was asked for, and %s has no room for all of %s at once: what comes in tiles "
            "is gathered for every use, as with stage=3; give more device_memory, or smaller "
            "batches",
            graph,
            ", ".join(map(repr, tiled)),
        )


def config_of_rank(config: Config, fabric: Fabric) -> Config:
    """What this rank opens: directories of its own, and its part of the memory of the machine, and
    of its card, where no budget is given.

    raises  ConfigInvalid, DeviceTooSmall; RanksDiffer, RankFailed
    """
    here = fabric.ranks_on_this_host
    part = machine_bytes() // SHARE_OF_MACHINE // here
    of_device = part
    if torch.device(config.device or "cpu").type == "cuda":
        config, of_device = settled_on_cards(config, fabric)
    disks = config.disk if isinstance(config.disk, tuple) else ()
    for path in disks:
        Path(path).mkdir(mode=0o700, exist_ok=True)
    dump = None if config.dump is None else Path(config.dump) / f"rank-{fabric.rank}"
    own = [
        directory_of_rank(Path(path), fabric.rank, fabric.mesh)
        if config.durable  # what other numbers of ranks have committed stays beside it
        else Path(path) / f"rank-{fabric.rank}"
        for path in disks
    ]
    return replace(
        config,
        device_memory=config.device_memory or of_device,
        host_memory=config.host_memory or part,
        disk=tuple(own) or None,
        dump=dump,
    )


def agree_on(config: Config, device_bytes: int, fabric: Fabric) -> None:
    """Check that all ranks open the same; from then on the links between them are paced.

    raises  RanksDiffer
    """
    # These first: behind a machine, which takes many words, they would be cut off.
    rows = {"mesh": str(fabric.mesh)} if fabric.mesh.replicas > 1 else {}
    rows |= {f"throttle[{link!r}]": str(rate) for link, rate in _between_ranks(config).items()}
    rows |= {name: str(getattr(config, name)) for name in (*ALIKE, "residency")}
    rows["device"] = torch.device(config.device or "cpu").type  # which card is up to a rank
    rows |= {"zcompile": VERSION, "torch": torch.__version__, "device_memory": str(device_bytes)}
    text = ", ".join(f"{name}={value}" for name, value in rows.items())
    same = {name: value for name, value in rows.items() if name != "residency"}
    derived = [getattr(config, name) for name in DERIVED]
    fabric.agree("offload a model", sorted(same.items()), derived, text=text)
    per_node = config.ranks_per_node or _ranks_per_host(fabric.hosts)
    fabric.over(_links_of(config, fabric.mesh, per_node), per_node)


@contextmanager
def ready_together(fabric: Fabric | None, what: str) -> Iterator[None]:
    """A context in which a rank finds out whether it can take part in `what`; it changes nothing
    that its own failure does not undo. At its end ranks tell each other: what fails on one raises
    on all, and the session lives on.

    fabric  None: this process is alone
    raises  Unsupported, if another rank cannot; RanksDiffer, RankFailed
    """
    if fabric is None:
        yield
        return
    try:
        yield
    except Exception as error:  # on purpose: of any class; the others are told, and it is raised
        with suppress(ZinfError):  # the session has ended, which its ranks know
            fabric.tell(what, FAILED, text=f"{type(error).__name__}: {error}")
        raise
    except BaseException as error:  # an interrupt: this rank may not come to the end
        fabric.failed_here(error)
        raise
    for rank, (said, text) in enumerate(fabric.tell(what, READY)):
        if said == FAILED:
            raise Unsupported(
                f"rank {rank} on {fabric.hosts[rank]} cannot {what}, so that no rank does: {text}",
                "mend that, and call it again on all ranks: nothing has changed",
            )


def check_stage(
    config: Config, params: Iterable[tuple[str, Tensor]], device_bytes: int, fabric: Fabric
) -> None:
    """Check that the device could hold all of each parameter, where that is asked for.

    raises  BudgetExceeded
    """
    if config.stage != 2:
        return
    wholes = []
    for name, param in params:
        layout = Layout.of(param)
        part = partition_of(layout, fabric.shard, fabric.mesh.shards)
        if part is not None:
            itemsize = layout.dtype.itemsize
            if config.param_dtype is not None:  # all of a copy in that may be what is kept
                itemsize = min(itemsize, config.param_dtype.itemsize)
            wholes.append((name, part.padded * itemsize))
    needed = sum(nbytes for _, nbytes in wholes)
    if needed > device_bytes:
        raise BudgetExceeded(
            "device",
            device_bytes,
            needed,
            "a model whose parameters are kept whole on every rank (stage=2)",
            wholes,
            f"{more_device_memory(needed)}: a lower bound, found at once, and a window to stream "
            f"through comes to that; or {KEEP_LESS}",
        )


def refuse_ranks(mesh: Any, fabric: Fabric | None) -> None:
    """Refuse several ranks that train a model of which they do not know together: the process
    group may be younger than the model.

    raises  Unsupported
    """
    if mesh is False or fabric is not None:
        return
    told = next((text for text, size in _sizes() if size > 1), None)
    if told is not None:
        raise Unsupported(
            f"several ranks are there ({told}), and the model was offloaded before they knew of "
            "each other: each would train a model of its own",
            "call torch.distributed.init_process_group before zcompile.offload or zcompile.init; "
            "or say mesh=False there if a model per rank is what you want",
        )


def _several() -> bool:
    return any(size > 1 for _, size in _sizes())


def _sizes() -> Iterator[tuple[str, int]]:
    """Known numbers of ranks, each with a text that says where it comes from."""
    if dist.is_available() and dist.is_initialized():
        size = dist.get_world_size()
        yield f"torch.distributed has a world of {size}", size
    for name in LAUNCHERS:
        text = os.environ.get(name, "")
        if text.isdecimal():
            yield f"{name}={text} in the environment", int(text)
