"""Defines `Config`: what the user asked for, one frozen dataclass, checked when it is made.

Of the environment `ZINF_DUMP` and `ZINF_PROGRESS` are read here and nowhere else; they change what
is told, never what is done. Where measurements are kept is up to `runtime/probe.py`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from triton_kernels import missing
from zcompile.errors import ConfigInvalid, DiskUnusable, UnknownOption
from zcompile.ir.units import Share, parse_budget, parse_rate, parse_seconds, parse_size
from zcompile.machine.files import find
from zcompile.machine.model import RANK_LINKS, TIER_LINKS, Machine

LINKS = TIER_LINKS
"""Links between tiers; `throttle` and `stats` use the same names."""
PACED = (*TIER_LINKS, *RANK_LINKS)
"""Links that `throttle` may slow down: those between ranks too."""

PLAN_FIELDS = ("param_dtype", "activations", "regions", "max_lead", "tile_bytes", "dump")
"""Fields that `torch.compile(options=...)` may override: they shape the plan, not the tiers."""

REGIONS = ("auto", "eager", "inductor")
KERNELS = ("auto", "stock", "triton")
UPDATES = ("auto", "device", "fastest")
ACTIVATIONS = ("auto", "keep", "recompute", "offload")
STAGES = ("auto", 1, 2, 3)
PARTITIONS = ("slices", "owner")


def _no_throttle() -> Mapping[str, float]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Config:
    """Budgets and choices. Sizes are ints of bytes or texts such as "20GiB" or "20G" (the same).

    `device_memory` and `host_memory` may be percentages ("80%") of all that the tier has; an int
    below 1 MiB has lost its unit, and is asked about.

    device          where compute happens: "cuda", "cuda:1", "cpu"; None takes CUDA if there is one
    device_memory   bytes of the device, for the arena and for what compiled graphs hold beside it;
                    None: 80 % of what is free on CUDA, an eighth of the memory on the CPU device
    host_memory     bytes of the host tier, staging included; None: an eighth of the memory
    disk            a directory, or several over which entries are striped; None: no disk tier. One
                    that does not exist is made, for its owner alone, where its parent does
    durable         every optimizer step ends in a commit on `disk`, from which a run that was
                    killed resumes (`zcompile.resume`)
    machine         what to plan for, instead of what is measured here: a name (`zinf doctor
                    --machine` lists them), the path of a file, or a `zcompile.machine.Machine`
    param_dtype     keep a copy in this dtype of parameters that compiled graphs only read after a
                    cast to it, as under torch.autocast: of those on disk, and of those that ranks
                    hold shares of; they and the optimizer stay as they are
    throttle        link name -> bytes per second, paces the CPU device's transfers, and what ranks
                    of one node ("rank_to_rank"), or of several ("node_to_node"), gather and
                    exchange: bytes that come to each of them
    activations     what becomes of values that backward needs, where they do not fit: "recompute",
                    "offload" (to the host or to disk), whatever is cheaper for each ("auto");
                    "keep": they are kept all the same
    residency       after two steps, plan what rests on which tier, the device included; False:
                    entries stay where they were put first, and every use fetches
    regions         how compute between transfers is run: "eager" (bit-exact); "inductor": what lies
                    between library calls is compiled by torch's Inductor, and rounds as it does
                    under torch.compile; "auto" means "eager"
    kernels         whether kernels of our own are used on CUDA: "triton"; "stock": torch's; "auto":
                    for tiles of a loss, whose sums are of another order than eager's in any case,
                    where triton is there; steps of an optimizer keep torch's bits
    updates         where an optimizer's updates are computed: "device"; "fastest": those of
                    parameters that rest on the host with gradients and states are computed there by
                    the host's cores, where a plan says that a step is faster so, with the bits of
                    the CPU's kernels; "auto": the same, if those are the bits of the device, as on
                    the CPU device; on CUDA "auto" means "device"
    max_lead        regions a gather may start ahead of its first reader; 0 turns prefetch off
    tile_bytes      a weight with more bytes is gathered, used and given back in tiles, of which two
                    take no more than this; None: only what does not fit `device_memory` is tiled
    mesh            the ranks that train one model together, a `DeviceMesh` of one dimension, or of
                    two: groups, each of which holds all of the model, and the ranks of a group;
                    None: all ranks of torch.distributed; False: each rank trains a model of its own
    ranks_per_node  how many ranks, one behind the other, count as a node, so that one machine may
                    stand in for several; None: those that run on one machine
    rank_timeout    longest that ranks wait for one that does not come: seconds, or "60s", "5min"
    reduction       "ordered": gradients of ranks are summed in the order of ranks, so that results
                    do not depend on how many there are
    stage           of ZeRO, where several ranks train one model. 3: a parameter is gathered for
                    every use; 2: in runs that train, from the third step on, all of each parameter
                    rests on the device of every rank, and is gathered once after each update;
                    "auto": a plan chooses for each parameter
    partition       what a rank holds of each large parameter, its gradient and states: "slices":
                    as much as any other, so that all links bring it; "owner": all of it, or
                    nothing, which is slower, and there to be compared with
    dump            a directory for pass dumps; None: the environment's ZINF_DUMP, if set

    raises  ConfigInvalid, DiskUnusable, MachineUnknown, MachineUnreadable, MachineInvalid
    """

    device: str | None = None
    device_memory: int | str | Share | None = None
    host_memory: int | str | Share | None = None
    disk: str | Path | tuple[str | Path, ...] | None = None
    durable: bool = False
    machine: str | Path | Machine | None = None
    param_dtype: torch.dtype | None = None
    throttle: Mapping[str, float | str] = field(default_factory=_no_throttle)
    activations: str = "auto"
    residency: bool = True
    regions: str = "auto"
    kernels: str = "auto"
    updates: str = "auto"
    max_lead: int = 8
    tile_bytes: int | str | None = None
    mesh: Any = None
    ranks_per_node: int | None = None
    rank_timeout: float | str = "60s"
    reduction: str = "ordered"
    stage: str | int = "auto"
    partition: str = "slices"
    dump: str | Path | None = None

    emulates_unasked: ClassVar[bool] = False
    """Of an object: whether the device is the emulated one for want of another, and not by
    wish."""

    def __post_init__(self) -> None:
        # Sizes and places.
        for name in ("device_memory", "host_memory"):
            if (value := getattr(self, name)) is not None:
                self._set(name, _checked(name, value, parse_budget))
        if self.tile_bytes is not None:
            self._set("tile_bytes", _checked("tile_bytes", self.tile_bytes, parse_size))
        given = self.device
        self._set("device", self._device())
        self._set("emulates_unasked", given is None and self.device == "cpu")
        self._set("disk", self._disks())
        # Choices that are flags.
        if not isinstance(self.durable, bool):
            raise ConfigInvalid("durable", self.durable, "must be True or False")
        if not isinstance(self.residency, bool):
            raise ConfigInvalid("residency", self.residency, "must be True or False")
        self._check_ranks()
        if self.durable and not self.disk:
            raise ConfigInvalid("durable", True, "needs a disk; give a directory as disk")
        # The machine, and links that are slowed down.
        self._set("machine", _machine(self.machine))
        for link in self.throttle:
            if link not in PACED:
                raise UnknownOption(link, PACED, "throttle")
        self._set(
            "throttle",
            MappingProxyType(
                {
                    link: _checked(f"throttle[{link!r}]", rate, parse_rate)
                    for link, rate in self.throttle.items()
                }
            ),
        )
        if self.throttle and torch.device(self.device or "cpu").type != "cpu":
            raise ConfigInvalid("throttle", dict(self.throttle), "paces the CPU device only")
        # What shapes the plan.
        if self.param_dtype is not None and not _is_narrow(self.param_dtype):
            raise ConfigInvalid(
                "param_dtype", self.param_dtype, "must be torch.bfloat16, torch.float16 or None"
            )
        choices = (
            ("regions", REGIONS),
            ("activations", ACTIVATIONS),
            ("kernels", KERNELS),
            ("updates", UPDATES),
        )
        for name, known in choices:
            if (value := getattr(self, name)) not in known:
                raise ConfigInvalid(name, value, f"is not one of {', '.join(known)}")
        if self.kernels == "triton" and (why := missing(self.device or "cpu")):
            raise ConfigInvalid("kernels", self.kernels, f"cannot be had: {why}")
        if (
            isinstance(self.max_lead, bool)
            or not isinstance(self.max_lead, int)
            or self.max_lead < 0
        ):
            raise ConfigInvalid("max_lead", self.max_lead, "must be an int of regions, 0 or more")
        # The dump.
        if self.dump is None and os.environ.get("ZINF_DUMP"):
            self._set("dump", os.environ["ZINF_DUMP"])
        if self.dump is not None:
            self._set("dump", Path(self.dump))

    def _check_ranks(self) -> None:
        """Check what is asked of several ranks. raises  ConfigInvalid"""
        if not (self.mesh is None or self.mesh is False or is_mesh(self.mesh)):
            raise ConfigInvalid(
                "mesh",
                self.mesh,
                "cannot be used: give a DeviceMesh of one dimension or two, or None for all ranks "
                "of torch.distributed, or False for a model per rank",
            )
        per_node = self.ranks_per_node
        if per_node is not None and (
            isinstance(per_node, bool) or not isinstance(per_node, int) or per_node < 1
        ):
            raise ConfigInvalid(
                "ranks_per_node", per_node, "must be an int of ranks, at least 1, or None"
            )
        self._set("rank_timeout", _checked("rank_timeout", self.rank_timeout, parse_seconds))
        if self.reduction != "ordered":
            raise ConfigInvalid(
                "reduction",
                self.reduction,
                "is not there; 'ordered' sums gradients in the order of ranks, and a rank receives "
                "no more bytes for it than for a reduce-scatter; zcompile.no_sync exchanges once "
                "for several micro-batches",
            )
        self._check_stage()
        self._check_partition()

    def _check_partition(self) -> None:
        """raises  ConfigInvalid"""
        if self.partition not in PARTITIONS:
            raise ConfigInvalid(
                "partition", self.partition, f"is not one of {', '.join(PARTITIONS)}"
            )
        if self.partition == "slices":
            return
        if self.mesh is False:
            raise ConfigInvalid(
                "partition",
                self.partition,
                "is of ranks that train one model, and mesh=False lets each train its own; leave "
                "one of them out",
            )
        unready = {
            "stage=2": self.stage == 2,
            f"param_dtype={self.param_dtype}": self.param_dtype is not None,
        }
        if said := [text for text, holds in unready.items() if holds]:
            raise ConfigInvalid(
                "partition",
                self.partition,
                f"is there to be compared with, and not together with {', '.join(said)}; give "
                "partition='slices', or leave that out",
            )

    def _check_stage(self) -> None:
        """raises  ConfigInvalid"""
        stage = self.stage
        if isinstance(stage, bool) or stage not in STAGES:
            known = ", ".join(str(known) for known in STAGES if known != 1)  # 1: refused below
            raise ConfigInvalid("stage", stage, f"is not one of {known}")
        if stage == 1:
            raise ConfigInvalid(
                "stage",
                stage,
                "is not there: a rank would add up the gradients of its micro-batches before those "
                "of other ranks are added, which rounds otherwise than reduction='ordered' does; "
                "stage=2 moves as many bytes, with one micro-batch in a step, or with all but the "
                "last within zcompile.no_sync",
            )
        if stage != "auto" and self.mesh is False:
            raise ConfigInvalid(
                "stage",
                stage,
                "is of ranks that train one model, and mesh=False lets each "
                "train its own; leave one of them out",
            )
        if stage == 2 and self.stays_because:
            raise ConfigInvalid(
                "stage",
                stage,
                f"needs steps that are planned, and with {self.stays_because} they are not; leave "
                "one of them out",
            )

    def __getstate__(self) -> dict[str, object]:
        """Without the read-only mapping, which can be neither pickled nor copied by itself."""
        return {**self.__dict__, "throttle": dict(self.throttle)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, throttle=MappingProxyType(state["throttle"]))

    @property
    def stays_because(self) -> str:
        """Why entries stay where they are put first, for people; "" if whole steps are planned."""
        return "" if self.residency else "residency=False"

    @property
    def may_keep_wholes(self) -> bool:
        """Whether ranks may keep all of a parameter, and not only their shares of it."""
        unkept = self.stays_because or self.partition != "slices"
        return self.stage != 3 and not unkept

    @property
    def may_read_copies(self) -> bool:
        """Whether a plan may keep low-precision copies of parameters, and let graphs read those.

        Fusions of Inductor are compiled for the nodes as they are, so there are none then; and a
        commit holds no copies that a plan makes.
        """
        unread = self.stays_because or self.durable or self.partition != "slices"
        return self.regions != "inductor" and not unread

    def updates_on_host(self, device: str) -> bool:
        """Whether a plan may let the host compute updates, beside a device of type `device`.

        On CUDA its kernels round otherwise than the device's, so there it is asked for. A rank
        holds a share of each parameter, and does not: plans of several have no such updates.
        """
        return self.updates == "fastest" or (self.updates == "auto" and device == "cpu")

    @property
    def tiles_by_kernels(self) -> bool:
        """Whether kernels of our own compute tiles of a loss.

        On a card they are faster than what Inductor makes of the same, and a tiled loss rounds
        otherwise than a whole one whoever computes it.
        """
        unasked = self.kernels == "auto" and not missing(self.device or "cpu")
        return self.kernels == "triton" or unasked

    @property
    def steps_by_kernels(self) -> bool:
        """Whether kernels of our own compute the rows of an optimizer's step: with the bits of one
        release of torch, so that they are asked for."""
        return self.kernels == "triton"

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes asked for of "device" and "host", where any are; after `in_bytes`."""
        given = {"device": self.device_memory, "host": self.host_memory}
        found = {}
        for tier, asked in given.items():
            assert not isinstance(asked, Share), "in_bytes comes first"
            if asked is not None:
                found[tier] = int(asked)
        return found

    def in_bytes(self, totals: Mapping[str, int]) -> "Config":
        """The same, with percentages as bytes.

        totals  bytes that "device" and "host" have in all
        raises  ConfigInvalid, if the tier of a percentage is not among them
        """
        settled = {}
        for tier in ("device", "host"):
            asked = getattr(self, name := f"{tier}_memory")
            if isinstance(asked, Share):
                if tier not in totals:
                    why = f"is a part of what it is not known: the machine has no tier {tier!r}"
                    raise ConfigInvalid(name, str(asked), why)
                settled[name] = asked.of(totals[tier])
        return self._with(settled)

    def _with(self, changes: Mapping[str, object]) -> "Config":
        made = replace(self, **changes)  # type: ignore[arg-type]  # names of fields
        if self.emulates_unasked and changes.get("device") is None:
            made._set("emulates_unasked", True)
        return made

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _device(self) -> str:
        if self.device is None:
            return "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            why = "is not a torch device; use 'cuda' or 'cpu'"
            raise ConfigInvalid("device", self.device, why) from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigInvalid("device", self.device, "is not supported; use 'cuda' or 'cpu'")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigInvalid(
                "device",
                self.device,
                "asks for CUDA, and torch sees no CUDA "
                "device; use device='cpu' for the emulated one",
            )
        return str(device)

    def _disks(self) -> tuple[Path, ...]:
        if self.disk is None:
            return ()
        given: Any = self.disk  # the types are a promise that a caller may not keep
        if isinstance(given, str | Path):
            given = (given,)
        if not isinstance(given, tuple | list) or given == []:
            raise ConfigInvalid("disk", self.disk, "names no directory; leave it out for no disk")
        if not all(isinstance(path, str | Path) and path != "" for path in given):
            raise ConfigInvalid(
                "disk", self.disk, "must name directories, each a text or a pathlib.Path"
            )
        if any("\0" in str(path) for path in given):
            raise ConfigInvalid("disk", self.disk, "has a NUL in it, which no path has")
        paths = tuple(Path(path) for path in given)
        for path in paths:
            if path.is_symlink() and not path.exists():
                why = "is a symbolic link to what does not exist"
                raise DiskUnusable(path, why, "create that or give another directory")
            if not path.exists() and not path.absolute().parent.is_dir():
                why = "does not exist, and neither does the directory that it would be made in"
                raise DiskUnusable(path, why, "create that or give another directory")
            if path.exists() and not path.is_dir():
                raise DiskUnusable(path, "is not a directory", "give a directory")
            if not os.access(at_hand(path), os.W_OK | os.X_OK):
                why = "is not writable" if path.exists() else "may not be made where it would be"
                raise DiskUnusable(path, why, "give a directory one may write to")
        if len({path.resolve() for path in paths}) < len(paths):
            raise ConfigInvalid("disk", self.disk, "names a directory twice")
        return paths


def is_mesh(value: object) -> bool:
    """Whether a value is a `DeviceMesh` of torch.distributed."""
    return isinstance(value, DeviceMesh)


def shows_progress() -> bool:
    """Whether long work is shown: unless the environment's ZINF_PROGRESS is 0."""
    return os.environ.get("ZINF_PROGRESS") != "0"


def at_hand(path: Path) -> Path:
    """A directory on the disk that `path` is on, or will be made on."""
    return path if path.exists() else path.absolute().parent


def _machine(given: Any) -> Machine | None:
    """The machine of a name, file or object.

    raises  ConfigInvalid, and as `find`
    """
    if given is None or isinstance(given, Machine):
        return given
    if not isinstance(given, str | Path) or given == "":
        raise ConfigInvalid("machine", given, "must be a name, a path or a Machine")
    return find(given)


def _is_narrow(dtype: object) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _checked(name: str, value: Any, parse: Any) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigInvalid(name, value, f"cannot be used: {error}") from error


def build(config: Config | None, options: Mapping[str, object], where: str) -> Config:
    """The `Config` of a call that takes one or its fields.

    raises  UnknownOption, ConfigInvalid, DiskUnusable
    """
    known = [f.name for f in fields(Config)]
    for key in options:
        if key not in known:
            raise UnknownOption(key, known, where)
    if config is not None and not isinstance(config, Config):
        raise ConfigInvalid("config", config, "is not a zcompile.Config; pass fields by name")
    return (config or Config())._with(options)


def with_plan_options(config: Config, options: Mapping[str, object]) -> Config:
    """`config` changed by the `options` of `torch.compile`; only plan-level fields may change.

    raises  UnknownOption, ConfigInvalid
    """
    for key in options:
        if key not in PLAN_FIELDS:
            if key in {f.name for f in fields(Config)}:
                raise ConfigInvalid(
                    key,
                    options[key],
                    "belongs to zcompile.offload(), not to the options of torch.compile",
                )
            raise UnknownOption(key, PLAN_FIELDS, "torch.compile(backend='zinf', options=...)")
    return replace(config, **options)  # type: ignore[arg-type]  # names checked above
