"""Compiles fusions by Inductor while a graph is compiled, each structure once.

A fusion that was compiled before is not compiled again: not for another block of the model, not for
another graph, nor after a process was killed and its run resumed. Beside a durable directory lie
the artifacts of its run, so that a resumed run computes with the same kernels; torch's own caches
serve everyone else.

    structure ──> session ──> beside the run ──> torch's caches ──> Inductor

Inductor runs on a thread of its own: where a graph is compiled the state of torch's dispatcher is
that of AOTAutograd, in which nothing else can be traced.
"""

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from zcompile.config import Config
from zcompile.errors import CompilerMissing
from zcompile.frontend.own_thread import on_own_thread
from zcompile.ir.fusions import Fused, computes, copied, made_by, read_by, refusal_of
from zcompile.ir.graph import is_subgraph, subgraph_of
from zcompile.ir.regions import structure, structure_of_graph
from zcompile.ir.torch_compat import (
    Compiled,
    CompiledFacts,
    compile_by_inductor,
    compiled_for,
    inductor_folder,
    load_compiled,
    missing_compiler,
    save_compiled,
)
from zcompile.runtime.progress import working
from zcompile.runtime.session import Session

log = logging.getLogger("zcompile.frontend.fusions")

FORMAT = "3"
"""Counts what is said to Inductor, and how artifacts are kept: with another, none is reused."""
FOLDER = "fusions"
"""Of artifacts, in the first directory of a durable run, and in torch's cache."""


def check_compiler(device: torch.device) -> None:
    """Refuse `regions="inductor"` where there is nothing to compile with.

    raises  CompilerMissing
    """
    if missing := missing_compiler(device):
        raise CompilerMissing(device.type, missing)


@dataclass
class Counts:
    """Fusions by what became of them: each structure counts once.

    compiled  by Inductor, or taken from torch's caches
    loaded    from beside the run
    refused   what is run eagerly: its ops -> why, each reason once
    """

    compiled: int = 0
    loaded: int = 0
    refused: dict[str, list[str]] = field(default_factory=dict)

    def refuse(self, ops: str, why: str) -> None:
        reasons = self.refused.setdefault(ops, [])
        if why not in reasons:
            reasons.append(why)
        log.warning("Inductor does not compile %s, which runs eagerly: %s", ops, why)


class FusionCompiler:
    """Compiles the fusions of one model.

    device  that they run on
    folder  where artifacts of the run are kept; None: it is not durable
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self.counts = Counts()
        self._device, self._folder = device, folder
        self._known: dict[str, Fused | str] = {}

    def __call__(self, nodes: Sequence[fx.Node]) -> Fused | str:
        """What these nodes were compiled to; or why not.

        raises  CompilerMissing; KeyboardInterrupt, once Inductor has ended
        """
        check_compiler(self._device)
        made = made_by(nodes)
        read = read_by(nodes, made)
        gm = copied(nodes, made, read)
        body = [node for node in gm.graph.nodes if node.op == "call_function"]
        given = [subgraph_of(node).graph for node in gm.graph.nodes if is_subgraph(node)]
        key = self._key(structure(body), *map(structure_of_graph, given))
        if key not in self._known:
            found = refusal_of(nodes) or self._found(key, gm, made)
            if isinstance(found, str):
                names = sorted({str(n.target).removeprefix("aten.") for n in body if computes(n)})
                self.counts.refuse(" ".join(names), found)
            self._known[key] = found
        return self._known[key]

    def as_stats(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "distinct": counts.compiled + counts.loaded,
            "compiled": counts.compiled,
            "loaded": counts.loaded,
            "refused": {ops: list(reasons) for ops, reasons in counts.refused.items()},
        }

    def _key(self, *structures: str) -> str:
        parts = (FORMAT, torch.__version__, compiled_for(self._device), _threads(self._device))
        return hashlib.sha256("\n".join(map(str, (*structures, *parts))).encode()).hexdigest()[:24]

    def _found(self, key: str, gm: fx.GraphModule, made: Sequence[fx.Node]) -> Fused | str:
        """The fusion from beside the run, or else from Inductor."""
        kept = None if self._folder is None else _Kept(self._folder, key)
        if kept is not None and (loaded := kept.load()) is not None:
            call, facts = loaded
            self.counts.loaded += 1
            return _fused(key, call, facts)
        layouts = [_layout(node) for node in gm.graph.nodes if node.op == "placeholder"]
        for node in gm.graph.nodes:
            node.meta = {}
        threads = _threads(self._device)
        facts_file = _Kept(Path(inductor_folder()) / FOLDER, key)

        def compile_it() -> tuple[Compiled, CompiledFacts]:
            compiled = compile_by_inductor(gm, layouts, threads)
            facts = compiled.facts or facts_file.facts()
            if facts is None:  # torch knows the code, and nobody what it takes
                facts = compile_by_inductor(gm, layouts, threads, cached=False).facts
            assert facts is not None, "without caches it is scheduled"
            return compiled, facts

        with working(f"Inductor compiles fusion {len(self._known) + 1}"):
            done = on_own_thread(compile_it, self._device, "zinf-inductor")
        if isinstance(done, Exception):
            return _first_line(done)
        compiled, facts = done
        if (unlike := _unlike(facts, made)) is not None:
            return unlike
        self.counts.compiled += 1
        facts_file.write_facts(facts)
        if kept is not None:
            kept.write(compiled, facts)
        return _fused(key, compiled.call, facts)


def compiler_of(session: Session, config: Config) -> FusionCompiler | None:
    """The compiler of a model; None, if its regions are eager, or in a dry run, which computes
    nothing."""
    if config.regions != "inductor" or not session.computes:
        return None
    if session.fusions is None:
        disk = session.config.disk
        folder = None
        if session.durable is not None and isinstance(disk, tuple):
            folder = Path(disk[0]) / FOLDER
        session.compile_with(FusionCompiler(session.device.torch_device, folder))
    assert isinstance(session.fusions, FusionCompiler)
    return session.fusions


def _threads(device: torch.device) -> int:
    """Threads that code for the CPU is written for."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value: Tensor = node.meta["val"]
    return tuple(value.size()), tuple(value.stride()), value.dtype, value.device


class _Call:
    """What a fusion was compiled to, under a name that FX can write into code."""

    def __init__(self, key: str, call: Callable[..., Sequence[Any]]) -> None:
        self.__name__ = self.__qualname__ = f"fused_{key}"
        self._call = call

    def __call__(self, *values: Any) -> Sequence[Any]:
        return self._call(*values)


def _fused(key: str, call: Callable[..., Sequence[Any]], facts: CompiledFacts) -> Fused:
    return Fused(key, _Call(key, call), facts.nbytes, facts.kernels)


def _unlike(facts: CompiledFacts, made: Sequence[fx.Node]) -> str | None:
    """Why memory of these nodes cannot be counted, or is not what it was for eager ops; None: it
    can, and is."""
    if facts.called:
        return f"Inductor calls {facts.called} for it, whose memory is not known"
    if facts.shared:
        return f"the memory of its result {facts.shared} is not its own"
    for node, stride in zip(made, facts.strides, strict=True):
        if stride is not None and stride != tuple(node.meta["val"].stride()):
            return f"its result %{node.name} would have other strides than eager's"
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


# --- On disk ---


@dataclass(frozen=True)
class _Kept:
    """The artifact of one fusion on disk: `KEY.bin`, as torch writes it, and `KEY.json`.

    An artifact is unpickled, so one that others could have written is not looked at.
    """

    folder: Path
    key: str

    def load(self) -> tuple[Callable[..., Sequence[Any]], CompiledFacts] | None:
        """The fusion; None, if it is not there, or is of no use."""
        facts, path = self.facts(), self._path("bin")
        if facts is None or not path.is_file():
            return None
        if not (_is_own(self.folder) and _is_own(path)):
            log.warning("%s is not used: others than its user may write to it", path)
            return None
        try:
            return load_compiled(str(path)), facts
        except Exception as error:  # noqa: BLE001  # on purpose: of any class; it is made anew
            log.warning("%s is compiled anew: %s", path, _first_line(error))
            return None

    def facts(self) -> CompiledFacts | None:
        try:
            said = json.loads(self._path("json").read_text())
            return CompiledFacts(
                int(said["nbytes"]),
                int(said["kernels"]),
                tuple(None if s is None else tuple(map(int, s)) for s in said["strides"]),
                str(said["called"]),
                str(said["shared"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, compiled: Compiled, facts: CompiledFacts) -> None:
        """Keep what was compiled; a disk that is full leaves it out."""
        if compiled.artifact is None:
            return
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            save_compiled(compiled.artifact, str(self._path("bin")))
        except OSError as error:
            log.warning("%s is not kept: %s", self._path("bin"), error.strerror or error)
            return
        self.write_facts(facts)

    def write_facts(self, facts: CompiledFacts) -> None:
        path = self._path("json")
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            beside.write_text(json.dumps(asdict(facts)))
            beside.replace(path)
        except OSError as error:
            log.warning("%s is not kept: %s", path, error.strerror or error)

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.key}.{suffix}"


def _is_own(path: Path) -> bool:
    """Whether nobody but the user can write to a file or directory."""
    found = path.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid == os.getuid() and not found.st_mode & others
