"""What is traced of ops that torch takes apart has the bits of eager PyTorch."""

from collections import Counter
from contextlib import suppress
from itertools import islice

import pytest
import torch
from functorch.compile import aot_function, nop
from offloaded import twins
from sampled import crossed
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as trees

from zcompile.ir import torch_compat as private
from zcompile.ir.eager_formulas import FORMULAS, IMAGE_GRADIENTS, INSTEAD, LEFT_WHOLE


class Headed(nn.Module):
    """A convolution, and on what it gives each of some ops; their results are summed."""

    def __init__(self, heads):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.heads = heads

    def forward(self, x):
        y = self.conv(x)
        return sum(head(y).float().square().mean() for head in self.heads)


NEAREST = {
    f"{mode}, {dims} dimensions": lambda y, mode=mode, dims=dims: F.interpolate(
        {1: y.flatten(2), 2: y, 3: y[:, None]}[dims], scale_factor=1.5, mode=mode
    )
    for mode in ("nearest", "nearest-exact")
    for dims in (1, 2, 3)
}
RESIZED = {
    "linear": lambda y: F.interpolate(y.flatten(2), size=17, mode="linear"),
    "bilinear": lambda y: F.interpolate(y, scale_factor=1.7, mode="bilinear"),
    "bilinear, corners aligned": lambda y: F.interpolate(
        y, size=(13, 11), mode="bilinear", align_corners=True
    ),
    "trilinear": lambda y: F.interpolate(y[:, None], size=(3, 7, 7), mode="trilinear"),
    "bicubic": lambda y: F.interpolate(y, scale_factor=1.7, mode="bicubic"),
}
LOSSES = {
    "multi margin": lambda y: F.multi_margin_loss(y.mean((2, 3)), torch.tensor([1, 2])),
    "multilabel margin": lambda y: F.multilabel_margin_loss(
        y.mean((2, 3)), torch.tensor([[1, 2, -1, 0]] * 2)
    ),
}
DROPPED = {f"dropout {p}": lambda y, p=p: F.dropout(y, p) for p in (0.1, 0.15, 0.5, 0.9)}


def bits(model, run, x, narrow):
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        loss = run(x)
    loss.backward()
    return [loss.item(), *(param.grad.tolist() for param in model.parameters())]


HEADS = {"nearest": NEAREST, "resized": RESIZED, "losses": LOSSES, "dropped": DROPPED}


@pytest.mark.parametrize(("heads", "narrow"), crossed(HEADS, (False, True)))
def test_ops_that_torch_takes_apart_have_the_bits_of_eager_pytorch(heads, narrow):
    torch.manual_seed(0)
    pair = twins(Headed(list(HEADS[heads].values())))
    x = torch.randn(2, 3, 8, 8)
    expected = bits(pair.plain, pair.plain, x, narrow)
    assert bits(pair.model, pair.call, x, narrow) == expected


class Enlarged(nn.Module):
    """Images that are made larger between convolutions, in channels_last."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.before, self.after = nn.Conv2d(3, 5, 1), nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x):
        larger = F.interpolate(self.before(x), scale_factor=2.0, mode=self.mode)
        return self.after(larger).square().mean()


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_gradient_of_what_is_made_larger_lies_as_in_eager_pytorch(mode, request):
    """That of a bias is a sum in the order of memory."""
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)  # by two the order may be the same
    torch.manual_seed(0)
    pair = twins(Enlarged(mode))
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert bits(pair.model, pair.call, x, False) == bits(pair.plain, pair.plain, x, False)


class Pyramid(nn.Module):
    """An image is resized to another, or by a factor of which the size is computed, in each of some
    ways: of a mode, and by whether corners are aligned, where it asks for that."""

    def __init__(self, ways, by_size):
        super().__init__()
        self.ways, self.by_size = ways, by_size
        self.wide, self.coarse = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, stride=2)

    def forward(self, x):
        return sum(self.resized(self.wide(x), self.coarse(x), *way) for way in self.ways)

    def resized(self, wide, coarse, mode, dims, aligned):
        options = {"mode": mode, "align_corners": aligned}
        if dims != 2:
            wide, coarse = ((y.flatten(2) if dims == 1 else y[:, None]) for y in (wide, coarse))
        if self.by_size:
            return (wide + F.interpolate(coarse, size=wide.shape[2:], **options)).square().mean()
        larger = F.interpolate(wide, scale_factor=1.7, **options).square().mean()
        computed = F.interpolate(
            coarse, scale_factor=2.5, recompute_scale_factor=True, **options
        ).square()
        return larger + computed.mean()


WAYS = {
    "nearest": [(mode, d, None) for mode in ("nearest", "nearest-exact") for d in (1, 2)],
    "linear": [("linear", 1, False), ("bilinear", 2, True), ("bilinear", 2, False)],
    "cubic": [("bicubic", 2, False), ("trilinear", 3, True)],
}


@pytest.mark.parametrize(("ways", "by", "dynamic"), crossed(WAYS, ("size", "factor"), (None, True)))
def test_images_are_resized_to_sizes_that_change_from_call_to_call(ways, by, dynamic):
    torch.manual_seed(0)
    pair = twins(Pyramid(WAYS[ways], by == "size"), device_memory="16MiB", dynamic=dynamic)
    for size in (8, 12, 11):
        x = torch.randn(2, 3, size, size)
        expected = bits(pair.plain, pair.plain, x, False)
        assert bits(pair.model, pair.call, x, False) == expected


@pytest.mark.parametrize("backward", IMAGE_GRADIENTS, ids=str)
def test_the_gradient_of_an_image_is_laid_out_in_tracing_as_by_the_kernel(backward):
    (meta,) = backward.py_kernels.values()
    (dims,) = (n for n in (1, 2, 3) if f"{n}d" in str(backward))
    sizes = [[11] * dims, [2, 3, *[8] * dims], False]
    image = torch.randn(2, 3, *[11] * dims)
    lasts = {2: torch.channels_last, 3: torch.channels_last_3d}
    last = image.to(memory_format=lasts.get(dims, torch.preserve_format))
    for gradient in (image, last, image.mT.contiguous().mT, image[:1, :1].expand_as(image)):
        kernel = backward(gradient, *sizes)
        assert meta(gradient.to("meta"), *sizes).stride() == kernel.stride()
        assert meta(gradient.to("meta"), *sizes).shape == kernel.shape


def test_ops_are_taken_apart_again_once_a_graph_is_compiled():
    torch.compile(nn.Linear(2, 2), backend="zinf")(torch.ones(2))
    assert all(op.py_kernels for op in LEFT_WHOLE)
    for op, ours in INSTEAD.items():
        assert op.py_kernels
        assert ours not in op.py_kernels.values()


LISTED = {"masked_fill", "lu", "qr", "linalg.qr", "ormqr"}
"""What docs/support.md lists: the formulas of their gradients are torch's, in C++."""
DRAWN = {
    "nn.functional.rrelu",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.scaled_dot_product_attention",
}
"""Of these `aot_function`, which is not what `torch.compile` calls, draws random numbers while it
traces."""
SAMPLES = 4


def computed(function, args, leaves):
    """Results and gradients of a function, with random numbers that are the same each time."""
    torch.manual_seed(0)
    found = [t for t in trees.tree_leaves(function(args)) if isinstance(t, torch.Tensor)]
    found = [t for t in found if t.requires_grad and not t.is_complex()]
    drawn = torch.Generator().manual_seed(1)
    given = [torch.randn(t.shape, generator=drawn).to(t.dtype) for t in found]
    return [*found, *torch.autograd.grad(found, leaves, given, allow_unused=True)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_all_ops_of_torchs_table_only_what_is_listed_has_other_bits_when_traced(dtype):
    # Torch's table takes seconds to import.
    from torch.testing._internal.common_methods_invocations import op_db

    differing = Counter()
    for op in op_db:
        if not (op.supports_autograd and op.supports_dtype(dtype, "cpu")):
            continue
        samples = op.sample_inputs("cpu", dtype, requires_grad=True)
        for sample in islice(samples, SAMPLES):
            args, kwargs = (sample.input, *sample.args), sample.kwargs
            leaves = [t for t in trees.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            leaves = [t for t in leaves if t.requires_grad]

            def function(args, op=op, kwargs=kwargs):
                return op(*args, **kwargs)

            with suppress(Exception):  # on purpose: what cannot be computed or traced is not ours
                expected = computed(function, args, leaves)
                with private.without_python_kernels(LEFT_WHOLE, INSTEAD):
                    traced = aot_function(function, nop, nop, decompositions=dict(FORMULAS))
                    found = computed(traced, args, leaves)
                same = all(
                    a is b or torch.equal(a.nan_to_num(), b.nan_to_num())
                    for a, b in zip(expected, found, strict=True)
                )
                differing[op.name] += not same
    assert len(differing) > 300, "the table is torch's own"
    assert {name for name, count in differing.items() if count} <= LISTED | DRAWN
