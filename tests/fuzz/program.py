"""Programs that run on two sides, torch's and ours, and are compared after every step.

A step is a few lines of Python. Ours runs it first. Where it is refused with an error that
`refusals.py` lists, torch's side is left out, and nothing may have changed on ours. Otherwise both
return, or both raise; and every tensor that either can read is equal, bit by bit; but for rounding,
once a graph was cut into tiles and `stats` has told so.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fuzz.refusals import ends, is_refusal
from fuzz.setting import close, names
from torch import Tensor, nn

from zcompile import stats
from zcompile.errors import ZinfError

Names = dict[str, Any]

ROUNDED = 1e-3
"""How far what was computed in tiles may be apart after some steps, of the largest number; lost
writes and old values are further off."""


class Different(AssertionError):
    """The two sides of a program are not equal any more."""

    def __init__(self, program: "Program", reason: str) -> None:
        super().__init__(program.text(reason))
        self.budget, self.looks, self.steps = program.budget, program.looks, list(program.steps)


class Program:
    """The steps so far, and both sides as they stand.

    budget  one of `setting.BUDGETS`
    looks   False: compared at the end only, since looking at a tensor does what was deferred of it
    over    nothing can be compared any more
    """

    def __init__(self, budget: str, looks: bool = True) -> None:
        self.budget, self.looks = budget, looks
        self.steps: list[str] = []
        self.was_refused = self.over = False
        torch._dynamo.reset()  # its guards do not see the hooks of modules, so nothing is left over
        self._disk = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.plain: Names = names(None)
        self.tiered: Names = names(budget, self._disk)
        self._begin = set(self.plain)

    def run(self, step: str) -> None:
        """One more step, unless the program is over. raises  Different"""
        if self.over:
            return
        self.steps.append(step)
        called = any("c(x)" in said for said in self.steps)
        ours = self._on(self.tiered, step)
        self.over = ours is not None and ends(ours, called)
        self.was_refused = self.over or (ours is not None and is_refusal(ours))
        if not self.was_refused:
            self._agree(ours, self._on(self.plain, step))
            # A compiled backward has brought other gradients home by then than torch's.
            self.over = ours is not None and called and "backward(" in step
        if self.looks:
            self.compare()

    def _on(self, side: Names, step: str) -> Exception | None:
        torch.manual_seed(len(self.steps))
        try:
            exec(compile(step, "<step>", "exec"), side)
        except Exception as error:  # noqa: BLE001  # on purpose: both sides are to raise alike
            return error
        finally:
            self._with_memory(side)
        return None

    def _with_memory(self, side: Names) -> None:
        """Gradients that torch makes without memory, as that of `sgn`, get some: until then torch
        refuses to write to them, and a tiered one never was without."""
        for _, tensor in readable(self._own(side)):
            grad = None if tensor is None or not is_leaf(tensor) else tensor.grad
            if grad is not None and torch._is_zerotensor(grad):
                tensor.grad = grad.clone()

    def _agree(self, ours: Exception | None, torchs: Exception | None) -> None:
        if (ours is None) != (torchs is None):
            raise self.failure(f"torch: {_said(torchs)}\n# ours:  {_said(ours)}") from ours

    def compare(self) -> None:
        """raises  Different, if a tensor that either side can read is not equal to the other's"""
        if self.over:
            return
        ours, torchs = dict(readable(self._own(self.tiered))), dict(readable(self._own(self.plain)))
        if list(ours) != list(torchs):
            only = sorted(set(ours) ^ set(torchs))
            raise self.failure(f"only one side has {', '.join(only)}")
        exact = not stats(self.tiered["m"])["inexact"]
        for path, tensor in torchs.items():
            try:
                reason = difference(ours[path], tensor, path, exact)
            except ZinfError as error:
                if not ends(error, called=False):
                    raise self.failure(f"{path}: {_said(error)}") from error
                self.over = True
                return
            if reason is not None:
                raise self.failure(f"{path}: {reason}")

    def _own(self, side: Names) -> Names:
        return {
            k: v for k, v in side.items() if k not in self._begin or k in ("m", "opt", "log", "x")
        }

    def failure(self, reason: str) -> Different:
        return Different(self, reason)

    def text(self, reason: str) -> str:
        """The program as Python that runs by itself."""
        lines = "\n".join(self.steps)
        return f"""
# {reason}
import tempfile, torch
from fuzz.setting import names  # with PYTHONPATH=.:tests:tests/helpers
globals().update(names({self.budget!r}, tempfile.mkdtemp()))  # names(None): what torch does
{lines}
"""

    def close(self) -> None:
        close(self.tiered["m"])
        self.tiered.clear()
        shutil.rmtree(self._disk, ignore_errors=True)


def fails(budget: str, steps: Sequence[str], looks: bool) -> Different | None:
    """How a program fails, if it does."""
    program = Program(budget, looks)
    try:
        for step in steps:
            program.run(step)
        program.compare()
    except Different as found:
        return found
    finally:
        program.close()
    return None


def shrunk(found: Different) -> Different:
    """The failure of a program with as few of the same steps as still fail."""
    again = True
    while again:
        again = False
        for at in reversed(range(len(found.steps))):
            rest = found.steps[:at] + found.steps[at + 1 :]
            if (other := fails(found.budget, rest, found.looks)) is not None:
                found, again = other, True
    return found


def _said(error: Exception | None) -> str:
    return (
        "does it"
        if error is None
        else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    )


def readable(value: Any, path: str = "") -> Iterator[tuple[str, Tensor | None]]:
    """Every tensor behind the names of a side, with how one gets there."""
    if isinstance(value, Tensor):
        yield path, value
        if is_leaf(value):
            if value.grad is None:
                yield f"{path}.grad is None", None
            else:
                yield from readable(value.grad, f"{path}.grad")
    elif isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield from readable(tensor, f"{path}.{name}")
    elif isinstance(value, torch.optim.Optimizer):
        params = [p for group in value.param_groups for p in group["params"]]
        for number, param in enumerate(params):
            yield from readable(value.state.get(param, {}), f"{path}[{number}]")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from readable(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from readable(item, f"{path}[{number}]")


def is_leaf(tensor: Tensor) -> bool | None:
    """None for a view without a clear history: made without gradients and written with them, or of
    what was frozen since. Autograd makes up the history of that anew after each write, which fails
    an assertion of torch's where views are replayed, as on tensors without memory."""
    if tensor._base is not None and not tensor._base.requires_grad:
        return None
    try:
        return tensor.is_leaf
    except RuntimeError:
        return None


def difference(ours: Tensor | None, torchs: Tensor | None, path: str, exact: bool) -> str | None:
    """How two tensors differ; None, if they do not.

    exact  no bit may differ. False: a graph was cut into tiles, which `stats` told, so that sums
           are rounded otherwise, that of a norm for one
    """
    if ours is None or torchs is None:
        return None if ours is torchs else "one is None"
    known = None not in (is_leaf(ours), is_leaf(torchs))
    for what in ("dtype", "shape", *["requires_grad", "is_leaf"] * known):
        if getattr(ours, what) != getattr(torchs, what):
            return f"{what} {getattr(ours, what)} instead of {getattr(torchs, what)}"
    if not path.startswith("log.") and ours.stride() != torchs.stride():
        return f"stride {ours.stride()} instead of {torchs.stride()}"
    value = ours.on_host() if hasattr(ours, "on_host") else ours.detach()
    if torch.equal(_bits(value), _bits(torchs.detach())):
        return None
    if exact or not _is_close(value, torchs.detach()):
        wrong = int((value != torchs.detach()).sum())
        return f"{wrong} of {value.numel()} numbers differ"
    return None


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not (other.is_floating_point() or other.is_complex()):
        return torch.equal(one, other)
    most = float(other.nan_to_num().abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=ROUNDED, atol=ROUNDED * most, equal_nan=True)


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.resolve_conj().resolve_neg().reshape(-1)
    return (
        torch.empty_like(plain, memory_format=torch.contiguous_format)
        .copy_(plain)
        .view(torch.uint8)
    )
