"""What equal means: sizes, strides, dtypes, autograd's marks, and every bit."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as trees
from torch_tables.tiers import plain


def differences(expected: Any, found: Any, where: str, values: bool = True) -> Iterator[str]:
    """Sentences that say in what two trees of results differ.

    values  False: of tensors that nobody wrote, only the metadata counts
    """
    ours, ours_spec = trees.tree_flatten(found)
    theirs, theirs_spec = trees.tree_flatten(expected)
    if len(ours) != len(theirs) or str(ours_spec) != str(theirs_spec):
        yield f"{where}: made {ours_spec} in place of {theirs_spec}"
        return
    for number, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        at = where if len(theirs) == 1 else f"{where}[{number}]"
        if isinstance(a, Tensor):
            if not isinstance(b, Tensor):
                yield f"{at}: is {type(b).__name__}, not a tensor"
            else:
                yield from tensor_differences(a, b, at, values)
        elif not _same(a, b) and values:
            yield f"{at}: is {b!r}, not {a!r}"


def tensor_differences(a: Tensor, b: Tensor, where: str, values: bool = True) -> Iterator[str]:
    """What differs in `b`, which should be as `a` is."""
    for name in ("dtype", "layout", "requires_grad", "is_leaf", "device"):
        if getattr(a, name) != getattr(b, name):
            yield f"{where}: {name} {getattr(b, name)}, not {getattr(a, name)}"
    if a.size() != b.size():
        yield f"{where}: size {tuple(b.size())}, not {tuple(a.size())}"
        return
    if a.layout is torch.strided and b.layout is torch.strided and a.stride() != b.stride():
        yield f"{where}: strides {b.stride()}, not {a.stride()}"
    if values and a.dtype == b.dtype and not same_bits(a, b):
        x, y = (_dense(t).flatten() for t in (a, b))
        if x.numel() != y.numel():
            yield f"{where}: other values"
            return
        at = int((_bits(x).view(x.numel(), -1) != _bits(y).view(y.numel(), -1)).any(1).nonzero()[0])
        how = "rounded otherwise" if _close(x, y) else "other values"
        yield f"{where}: {how}, at {at} {y[at].item()}, not {x[at].item()}"


def gradient_differences(a: Tensor, b: Tensor, where: str) -> Iterator[str]:
    """As `tensor_differences`. Autograd keeps a gradient as it came, or copies it: what the
    stride of a dimension of one element is then, or of an empty tensor, says nothing."""
    told = list(tensor_differences(a, b, where))
    if a.size() == b.size() and a.layout is b.layout is torch.strided:
        rows = zip(a.size(), a.stride(), b.stride(), strict=True)
        if a.numel() < 2 or all(x == y for n, x, y in rows if n > 1):
            told = [line for line in told if not line.startswith(f"{where}: strides")]
    yield from told


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether the two may be sums of the same terms in another order."""
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return torch.allclose(
        a, b, rtol=1e-5, atol=1e-6 * float(a.abs().nan_to_num(0, 0, 0).max()), equal_nan=True
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Every bit, so that NaN equals NaN and 0 is not -0."""
    x, y = _bits(a), _bits(b)
    return x.size() == y.size() and bool(torch.equal(x, y))


def _dense(tensor: Tensor) -> Tensor:
    value = plain(tensor)
    if value.layout is not torch.strided:
        value = value.to_dense()
    if value.is_quantized:
        value = value.int_repr()
    return value.resolve_conj().resolve_neg()


def _bits(tensor: Tensor) -> Tensor:
    value = _dense(tensor)
    made = torch.empty(value.size(), dtype=value.dtype).copy_(value)
    return made.flatten().view(torch.uint8) if made.numel() else made.flatten()


def _same(a: object, b: object) -> bool:
    if isinstance(a, float | complex) and isinstance(b, type(a)):
        return repr(a) == repr(b)
    return type(a) is type(b) and bool(a == b)
