"""Kernels that are wrong in one place: what tests of kernels must notice."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

KERNELS = Path(__file__).parent.parent.parent / "triton_kernels"

MUTANTS: dict[str, dict[str, tuple[str, str]]] = {
    "adamw": {
        "a block too many": ("if whole < end:", "if whole <= end:"),
        "no mask at the tail": ("_update(at, lines, at < end,", "_update(at, lines, None,"),
        "a tail that is left out": ("if whole < end:", "if False:"),
        "one program does another's": ("tl.num_programs(0)):", "tl.num_programs(0) + 1):"),
        "pieces that overlap": ("tl.minimum(begin + PIECE,", "tl.minimum(begin + 2 * PIECE,"),
        "no decay": ("old = tl.fma(old, -lr_decay, old)", "old = old"),
        "coupled decay": ("old = tl.fma(old, -lr_decay, old)", "grad = grad + lr_decay * old"),
        "eps in the root": ("tl.sqrt_rn(second), root) + eps", "tl.sqrt_rn(second + eps), root)"),
        "the scale left out": (".to(tl.float32) * scale", ".to(tl.float32)"),
        "the old copy": ("made.to(NARROW)", "old.to(NARROW)"),
        "moments swapped": ("tl.store(m + at, first", "tl.store(m + at, second"),
        "no correction": ("root = tl.sqrt_rn(1.0 - _power(beta2, step, LIBRARY))", "root = 1.0"),
        "a step that is not skipped": ("tl.load(found_inf) != 0", "tl.load(found_inf) != 1"),
    },
    "cross_entropy": {
        "the greatest of this tile only": (
            "more = tl.maximum(most, tl.max(found, 0))",
            "more = tl.max(found, 0)",
        ),
        "sums that are not rescaled": ("exponentials * tl.exp(most - more)", "exponentials"),
        "masked classes count": ('other=float("-inf")', "other=0.0"),
        "one class too many": ("here = (at >= 0) & (at < n_classes)", "here = at >= 0"),
        "targets of tiles before": ("(at >= 0) & (at < n_classes)", "(at < n_classes)"),
        "a target that forgets": ("tl.where(here, now, before)", "now"),
        "a sum of the last block": ("everything += tl.sum(", "everything = tl.sum("),
        "masked classes are summed": (
            "tl.sum(tl.where(i < n_classes, found, 0.0), 0)",
            "tl.sum(tl.maximum(found, -9.0), 0)",
        ),
        "a row of the wrong stride": ("logits + token * row_stride", "logits + token * n_classes"),
        "no mask where it writes": ("element_ty), mask=i < n_classes)", "element_ty))"),
        "no target's gradient": ("i == tl.load(target + token)", "i == -1"),
        "spread at the target": ("made += tl.load(spread + token)", "made -= 0.0"),
    },
    "leave": {
        "no mask at the tail": (".to(PACKED), mask=at < end)", ".to(PACKED))"),
        "a tail that is left out": ("else:", "elif False:"),
        "whole blocks only at the end": ("if begin + BLOCK <= end:", "if begin + BLOCK < end + 9:"),
        "the first row for all": ("tl.load(pieces + 2 * n) * 3", "0"),
    },
}
"""Kernel -> what is wrong -> (what stands there, what is put in its place)."""


def mutants(kernel: str) -> list[object]:
    """As parameters of a test, of which one in three is quick."""
    import pytest

    return [
        pytest.param(old, new, id=name, marks=pytest.mark.slow if at % 3 else ())
        for at, (name, (old, new)) in enumerate(MUTANTS[kernel].items())
    ]


def changed(kernel: str, old: str, new: str, folder: Path) -> ModuleType:
    """The module of a kernel with `old` replaced by `new`, in a file in `folder`."""
    text = (KERNELS / kernel / "kernel.py").read_text(encoding="utf-8")
    assert old in text, f"{kernel} has no {old!r}"
    path = folder / f"changed_{kernel}.py"  # triton reads the source of a kernel again
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
