"""Compiles kernels for GPUs that are not there, and reads what the machine code takes.

    PYTHONPATH=.:tests python -m kernels.ahead_of_time [--target TARGET] [FILE OLD NEW]

Prints JSON: case -> target -> registers of a thread, registers spilled to memory, bytes of shared
memory of a program, bits of the widest load. It is a process of its own, since triton either
interprets or compiles, as the environment says when it is imported. The disassemblers are those
that come with triton.

--target      only for this one, and without the other ways of launching a kernel
FILE OLD NEW  compile the first kernel of a source file after OLD was replaced by NEW in it
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent.parent
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
POINTERS = {"f32": "*fp32", "bf16": "*bf16", "f16": "*fp16"}


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched.

    arguments  name -> type
    constants  name -> value; a text names a constant of the kernel's file
    multiples  arguments that are multiples of 16
    warps      the constant that says how many
    """

    file: str
    kernel: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    multiples: tuple[str, ...]
    warps: str


@dataclass(frozen=True)
class Figures:
    """What the machine code of a kernel takes.

    registers    of a thread: 32 bits each
    spills       registers that are kept in memory for a while
    shared       bytes of shared memory of a program
    widest_load  bits that a thread loads at once, at most
    """

    registers: int
    spills: int
    shared: int
    widest_load: int

    def worse_than(self, other: "Figures") -> list[str]:
        """What has become worse, for people."""
        mine, theirs = asdict(self), asdict(other)
        found = [f"{k} {theirs[k]} -> {mine[k]}" for k in mine if mine[k] > theirs[k]]
        found = [text for text in found if not text.startswith("widest_load")]
        if self.widest_load < other.widest_load:
            found.append(f"widest_load {other.widest_load} -> {self.widest_load}")
        return found


def adamw(grad: str, narrow: str | None, types: Mapping[str, Any]) -> Case:
    numbers = dict.fromkeys(("lr", "beta1", "beta2", "eps", "decay"), "fp32")
    tables = {"rows": "*i64", "pieces": "*i64", "n_pieces": "i32"}
    constants = {
        **{"GRAD": types[grad], "NARROW": None if narrow is None else types[narrow]},
        **dict.fromkeys(("SCALED", "SKIPS", "DECAYS", "LIBRARY"), True),
        **{"MAXIMIZE": False, "ALIGNED": 16, "PIECE": "PIECE", "BLOCK": "BLOCK"},
    }
    arguments = {**tables, "scale": "*fp32", "found_inf": "*fp32", **numbers}
    return Case("adamw", "adamw_rows", arguments, constants, ("rows", "pieces"), "WARPS")


def see_tile(logits: str, with_sum: bool) -> Case:
    seen = ("greatest", "total", "picked", "sum")
    numbers = dict.fromkeys((*seen, *(f"{name}_made" for name in seen)), "*fp32")
    sizes = {"n_classes": "i32", "row_stride": "i32"}
    arguments = {"logits": POINTERS[logits], "target": "*i64", **numbers, **sizes}
    constants = {"WITH_SUM": with_sum, "BLOCK": "SEEN"}
    multiples = ("logits", "n_classes", "row_stride")
    return Case("cross_entropy", "see_tile", arguments, constants, multiples, "SEEN_WARPS")


def tile_gradient(logits: str) -> Case:
    numbers = dict.fromkeys(("log_norm", "loses", "picked", "spread"), "*fp32")
    sizes = {"n_classes": "i32", "row_stride": "i32"}
    arguments = {"logits": POINTERS[logits], "target": "*i64", **numbers, **sizes}
    constants = {"PICKS": True, "SPREADS": False, "BLOCK": "MADE"}
    multiples = ("logits", "n_classes", "row_stride")
    return Case("cross_entropy", "tile_gradient", arguments, constants, multiples, "MADE_WARPS")


def leave(grad: str, packed: str, types: Mapping[str, Any]) -> Case:
    tables = {"rows": "*i64", "pieces": "*i64", "n_pieces": "i32"}
    constants = {"GRAD": types[grad], "PACKED": types[packed]}
    constants |= {"ALIGNED": 16, "BLOCK": "BLOCK"}
    return Case("leave", "leave_rows", tables, constants, ("rows", "pieces"), "WARPS")


def cases() -> dict[str, Case]:
    import triton.language as tl

    types = {"f32": tl.float32, "bf16": tl.bfloat16, "f16": tl.float16}
    return {
        "adamw, f32 gradients": adamw("f32", None, types),
        "adamw, bf16 gradients, bf16 copy": adamw("bf16", "bf16", types),
        "see_tile, bf16": see_tile("bf16", False),
        "see_tile, f32, with the sum": see_tile("f32", True),
        "tile_gradient, bf16": tile_gradient("bf16"),
        "tile_gradient, f32": tile_gradient("f32"),
        "leave, f32": leave("f32", "f32", types),
        "leave, bf16 to f32": leave("bf16", "f32", types),
    }


def variants() -> dict[str, Case]:
    """The other ways in which kernels are launched: the interpreter accepts what the compiler may
    not."""
    from itertools import product

    import triton.language as tl

    plain = cases()

    def of(name: str, **constants: Any) -> Case:
        return replace(plain[name], constants={**plain[name].constants, **constants})

    off = dict.fromkeys(("SCALED", "SKIPS", "DECAYS"), False)
    found = {
        "adamw, bare": of("adamw, f32 gradients", **off, MAXIMIZE=True, ALIGNED=1),
        "adamw, scaled": of("adamw, f32 gradients", **{**off, "SCALED": True}),
        "adamw, f16": of("adamw, f32 gradients", GRAD=tl.float16, NARROW=tl.float16),
        "see_tile, f32": of("see_tile, f32, with the sum", WITH_SUM=False),
        "see_tile, f16": see_tile("f16", True),
        "leave, not aligned": of("leave, f32", ALIGNED=1),
        "leave, f32 to bf16": of("leave, f32", PACKED=tl.bfloat16),
    }
    for picks, spreads in product((False, True), repeat=2):
        made = of("tile_gradient, bf16", PICKS=picks, SPREADS=spreads)
        found[f"tile_gradient, {picks}, {spreads}"] = made
    for name in ("see_tile, f32", "tile_gradient, f32"):
        case = found.get(name) or plain[name]
        types = {k: "*fp64" if v == "*fp32" else v for k, v in case.arguments.items()}
        found[f"{name} as f64"] = replace(case, arguments=types)
    return found


def figures(case: Case, module: ModuleType, target: str) -> Figures:
    """Compile for a target; what its machine code takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(module, case.kernel)
    cuda = target.startswith("sm_")
    chip = GPUTarget("cuda", int(target[3:]), 32) if cuda else GPUTarget("hip", target, 64)
    signature = {
        name: "constexpr" if name in case.constants else case.arguments[name]
        for name in kernel.arg_names
    }
    attributes = {(kernel.arg_names.index(m),): [["tt.divisibility", 16]] for m in case.multiples}
    rows = case.constants.items()
    constants = {k: getattr(module, v) if isinstance(v, str) else v for k, v in rows}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": getattr(module, case.warps)}
    made = triton.compile(source, target=chip, options=options)
    shared = made.metadata.shared
    return of_cuda(made.asm["cubin"], shared) if cuda else of_hip(made.asm["amdgcn"], shared)


def of_cuda(cubin: bytes, shared: int) -> Figures:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = [
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for command in (
                [tools / "cuobjdump", "--dump-resource-usage", file.name],
                [tools / "nvdisasm", "-c", file.name],
            )
        ]
    usage, code = found
    (registers,) = re.findall(r"REG:(\d+)", usage)
    loads = [int(bits or 32) for bits in re.findall(r"\bLDG(?:\.E)?(?:\.(64|128))?", code)]
    # What is spilled goes to local memory, and nothing else of these kernels does.
    return Figures(int(registers), len(re.findall(r"\bSTL\b", code)), shared, max(loads, default=0))


def of_hip(code: str, shared: int) -> Figures:
    def number(name: str) -> int:
        (found,) = re.findall(rf"\.{name}:\s+(\d+)", code)
        return int(found)

    loads = re.findall(r"(?:global|buffer|flat)_load_(?:dword|b)(x\d|\d+)?", code)
    bits = [int(n[1:]) * 32 if n[:1] == "x" else int(n or 32) for n in loads]
    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    return Figures(number("vgpr_count"), spills, shared, max(bits, default=0))


def module_of(file: str, changed: tuple[str, str] | None = None) -> ModuleType:
    """The module of a kernel; from a file of its own, if something is changed."""
    path = ROOT / "triton_kernels" / file / "kernel.py"
    if changed is not None:
        text = path.read_text(encoding="utf-8")
        old, new = changed
        assert text.count(old) >= 1, f"{path} has no {old!r}"
        # Triton reads the source of a kernel again, from its file.
        path = Path(tempfile.mkdtemp(prefix="kernel-")) / f"changed_{file}.py"
        path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Compiled:
    """What a run of this file printed: case -> target -> figures, variant -> figures for sm_90, and
    the version of triton."""

    triton: str
    cases: dict[str, dict[str, Figures]] = field(default_factory=dict)
    variants: dict[str, Figures] = field(default_factory=dict)


def compiled(*changed: str, target: str | None = None) -> Compiled:
    """Run this file in a process of its own; `changed` is FILE OLD NEW, or nothing.

    target  the only one, without variants; None: all of both
    """
    only = [] if target is None else ["--target", target]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache  # nothing that was compiled before is believed
        told = subprocess.run(
            [sys.executable, __file__, *only, *changed],
            capture_output=True,
            text=True,
            env=environment,
        )
    assert told.returncode == 0, told.stderr[-2000:]
    found = json.loads(told.stdout)
    rows = found["cases"].items()
    each = {name: {t: Figures(**f) for t, f in made.items()} for name, made in rows}
    more = {name: Figures(**figures) for name, figures in found["variants"].items()}
    return Compiled(found["triton"], each, more)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, help="the only one; else all")
    parser.add_argument("change", nargs="*", metavar="FILE OLD NEW", help="what is changed before")
    given = parser.parse_args()
    file, *change = given.change or ("",)
    targets = TARGETS if given.target is None else (given.target,)
    import triton

    found: dict[str, dict[str, Any]] = {}
    for name, case in cases().items():
        if file and case.file != file:
            continue
        module = module_of(case.file, (change[0], change[1]) if change else None)
        found[name] = {target: asdict(figures(case, module, target)) for target in targets}
        if change:
            break
    others = {
        name: asdict(figures(case, module_of(case.file), "sm_90"))
        for name, case in ({} if change or given.target else variants()).items()
    }
    told = {"triton": triton.__version__, "cases": found, "variants": others}
    json.dump(told, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
