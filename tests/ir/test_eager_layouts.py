"""What is traced of ops that torch tells a wrong layout of is laid out as in eager PyTorch."""

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from offloaded import twins
from sampled import crossed
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as trees

from zcompile.ir import torch_compat as private
from zcompile.ir.eager_formulas import FORMULAS, INSTEAD, LEFT_WHOLE
from zcompile.ir.eager_layouts import LAID_OUT, LAYOUTS

aten = torch.ops.aten


def drawn(*shape):
    return torch.rand(*shape) * 0.8 + 0.1


PLAIN = drawn(2, 4, 6, 6)
LAST = drawn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
TURNED = drawn(2, 4, 6, 6).mT.contiguous().mT
LAST_3D = drawn(2, 3, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)
SCALES = drawn(4), drawn(4)
SAMPLE = drawn(10, 5)
BATCH = drawn(7, 10, 5).transpose(0, 1).contiguous().transpose(0, 1)

CALLS = {
    aten.mse_loss_backward.default: (torch.ones(()), LAST, PLAIN, 1),
    aten.smooth_l1_loss_backward.default: (torch.ones(()), LAST, LAST, 1, 1.0),
    aten.huber_loss_backward.default: (torch.ones(()), LAST, LAST, 1, 1.0),
    aten._log_softmax_backward_data.default: (LAST, PLAIN, 1, torch.float32),
    aten.native_layer_norm_backward.default: (
        TURNED,
        PLAIN,
        [6],
        drawn(2, 4, 6, 1),
        drawn(2, 4, 6, 1),
        drawn(6),
        drawn(6),
        [True, True, True],
    ),
    aten.glu_backward.default: (drawn(2, 2, 6, 6), LAST, 1),
    aten.log_sigmoid_forward.default: (LAST,),
    aten.log_sigmoid_backward.default: (torch.ones(()).expand(2, 4, 6, 6), LAST, PLAIN),
    aten.im2col.default: (drawn(4, 2, 6, 6).transpose(0, 1), [1, 1], [1, 1], [0, 0], [1, 1]),
    aten.binary_cross_entropy.default: (LAST, PLAIN, None, 0),
    aten.binary_cross_entropy_backward.default: (PLAIN, LAST, PLAIN, None, 0),
    aten.elu_backward.default: (LAST, 1.0, 1.0, 1.0, False, PLAIN),
    aten.hardsigmoid_backward.default: (LAST, PLAIN),
    aten.hardswish_backward.default: (LAST, PLAIN),
    aten.hardtanh_backward.default: (LAST, PLAIN, -1.0, 1.0),
    aten.softplus_backward.default: (LAST, PLAIN, 1.0, 20.0),
    aten.xlogy.Tensor: (LAST, PLAIN),
    aten.special_xlog1py.default: (LAST, PLAIN),
    aten.copysign.Tensor: (BATCH, SAMPLE),
    aten.div.Tensor_mode: (BATCH, SAMPLE, "floor"),
    aten.floor_divide.default: (BATCH, SAMPLE),
    aten.logit_backward.default: (LAST, PLAIN, None),
    aten.pow.Scalar: (2.0, LAST),
    aten.nll_loss2d_forward.default: (
        PLAIN,
        torch.zeros(2, 6, 6, dtype=torch.int64).mT,
        None,
        0,
        -100,
    ),
    aten.native_dropout_backward.default: (TURNED, PLAIN > 0.5, 2.0),
    aten.reflection_pad2d_backward.default: (drawn(2, 4, 8, 8), LAST, [1, 1, 1, 1]),
    aten.replication_pad2d_backward.default: (drawn(2, 4, 8, 8), LAST, [1, 1, 1, 1]),
    aten.reflection_pad3d.default: (LAST_3D, [1] * 6),
    aten.reflection_pad3d_backward.default: (drawn(2, 3, 6, 6, 6), LAST_3D, [1] * 6),
    aten.replication_pad3d.default: (LAST_3D, [1] * 6),
    aten.replication_pad3d_backward.default: (drawn(2, 3, 6, 6, 6), LAST_3D, [1] * 6),
    aten.max_unpool2d.default: (
        *F.max_pool2d(LAST, 2, return_indices=True),
        [6, 6],
    ),
    aten._native_batch_norm_legit_functional.default: (TURNED, *SCALES, *SCALES, True, 0.1, 1e-5),
    aten._native_batch_norm_legit_no_training.default: (TURNED, *SCALES, *SCALES, 0.1, 1e-5),
    aten._native_batch_norm_legit.no_stats: (TURNED, *SCALES, True, 0.1, 1e-5),
    aten.native_batch_norm_backward.default: (
        PLAIN,
        LAST,
        SCALES[0],
        *SCALES,
        *SCALES,
        True,
        1e-5,
        [True, True, True],
    ),
    aten.channel_shuffle.default: (LAST, 2),
    aten.roll.default: (LAST, [1], [1]),
}


def called(op, args):
    """All results of a call, in a list."""
    if op is aten.div.Tensor_mode:
        return [op(*args[:2], rounding_mode=args[2])]
    return trees.tree_leaves(op(*args))


def strides(values):
    return [t.stride() for t in values]


def told_of(op, args):
    """Strides of what a call gives, as torch tells them and as we do."""
    leaves, spec = trees.tree_flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors):
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return called(op, trees.tree_unflatten(filled, spec))

    tensors = [leaves[place] for place in places]
    given = function(*tensors)
    told, ours = [], []
    for formulas, found in (({}, told), (LAID_OUT, ours)):
        with enable_python_dispatcher():
            graph = make_fx(function, formulas, tracing_mode="fake")(*tensors)
        (output,) = graph.graph.find_nodes(op="output")
        found += [node.meta["val"].stride() for node in trees.tree_leaves(output.args)]
        assert all(map(torch.equal, graph(*tensors), given))
    return given, told, ours


@pytest.mark.parametrize("op", LAYOUTS, ids=str)
def test_torch_tells_another_layout_than_the_kernel_gives_and_we_trace_that_of_the_kernel(op):
    given, told, ours = told_of(op, CALLS[op])
    assert told != strides(given), "torch tells the true layout by now: no row is needed"
    assert ours == strides(given)


def laid_out(value, turn):
    """A tensor of two or more dimensions with these in another order in memory."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    order = TURNS[turn](list(range(value.dim())))
    return value.permute(order).contiguous().permute([order.index(d) for d in range(value.dim())])


TURNS = {
    "plain": lambda dims: dims,
    "channels last": lambda dims: [dims[0], *dims[2:], dims[1]],
    "last two exchanged": lambda dims: [*dims[:-2], dims[-1], dims[-2]],
    "channels first": lambda dims: [dims[1], dims[0], *dims[2:]],
    "the other way round": lambda dims: dims[::-1],
}
WITH_NUMBERS = {
    aten.floor_divide.default: (drawn(2, 4, 6, 6), 2),
    aten.pow.Scalar: (2, drawn(2, 4, 6, 6)),
}


@pytest.mark.parametrize(("op", "turn"), crossed(LAYOUTS, TURNS), ids=str)
def test_what_torch_tells_truly_stays_true(op, turn):
    calls = [CALLS[op], *([WITH_NUMBERS[op]] if op in WITH_NUMBERS else [])]
    for call in calls:
        tensors = [n for n, value in enumerate(call) if isinstance(value, torch.Tensor)]
        for turned in (tensors, tensors[:1], tensors[1:]):
            args = [laid_out(v, turn) if n in turned else v for n, v in enumerate(call)]
            given, told, ours = told_of(op, tuple(args))
            for true, one, other in zip(strides(given), told, ours, strict=True):
                assert other == true or one != true


def graphs_of(function, args, formulas):
    """The code of the forward and the backward that are traced of a function."""
    codes = []

    def compiler(gm, inputs):
        codes.append(gm.code)
        return make_boxed_func(gm)

    with private.without_python_kernels(LEFT_WHOLE, INSTEAD):
        traced = aot_function(function, compiler, compiler, decompositions=dict(formulas))
        traced(*(t.detach().requires_grad_() for t in args)).backward()
    return codes


def test_nothing_else_is_traced_where_all_is_contiguous():
    def function(x, target):
        hidden = F.layer_norm(x, [6]) * F.elu(x) + F.hardswish(x) + F.softplus(x) + F.logsigmoid(x)
        hidden = F.pad(hidden, (1, 1, 1, 1), mode="reflect").roll(1, 1)[..., 1:-1, 1:-1]
        hidden = hidden.contiguous()
        losses = F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.cross_entropy
        bce = F.binary_cross_entropy(hidden.sigmoid(), target.sigmoid())
        return sum(loss(hidden, target) for loss in losses) + bce + F.glu(hidden, 1).sum()

    before = {op: formula for op, formula in FORMULAS.items() if op not in LAID_OUT}
    args = PLAIN, drawn(2, 4, 6, 6)
    assert graphs_of(function, args, FORMULAS) == graphs_of(function, args, before)


class LastNorm(nn.LayerNorm):
    """A LayerNorm over channels, which come last while it computes."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


NORMS = {
    "group": lambda: nn.GroupNorm(2, 8),
    "layer": lambda: nn.LayerNorm([8, 6, 6]),
    "layer, channels": lambda: LastNorm(8),
    "batch": lambda: nn.BatchNorm2d(8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "group, layer": lambda: nn.Sequential(nn.GroupNorm(2, 8), LastNorm(8)),
}
HEADS = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "cross entropy": lambda x, y: F.cross_entropy(x, y.argmax(1)),
    "cross entropy of probabilities": lambda x, y: F.cross_entropy(x, y.softmax(1)),
    "nll": lambda x, y: F.nll_loss(F.log_softmax(x, 1), y.argmax(1)),
    "kl": lambda x, y: F.kl_div(F.log_softmax(x, 1), y.softmax(1), reduction="sum"),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "bce with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "elu": lambda x, y: (F.elu(x) * y).sum(),
    "hardswish": lambda x, y: (F.hardswish(x) * y).sum(),
    "softplus": lambda x, y: (F.softplus(x) * y).sum(),
    "logsigmoid": lambda x, y: (F.logsigmoid(x) * y).sum(),
    "glu": lambda x, y: (F.glu(x, 1) * y[:, :4]).sum(),
    "reflected": lambda x, y: F.pad(x, (1, 1, 1, 1), mode="reflect").square().mean(),
    "rolled": lambda x, y: (x.roll(1, 1) * y).sum(),
    "dropout": lambda x, y: (F.dropout(x, 0.5) * y).sum(),
}


class Net(nn.Module):
    """A convolution, norms side by side, and on each of them some losses, which are summed."""

    def __init__(self, norms, heads):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(norms)
        self.heads = heads

    def forward(self, x, y):
        found = [norm(self.conv(x)) for norm in self.norms]
        return torch.stack([head(z, y) for z in found for head in self.heads]).sum()


def bits(model, run, x, y):
    torch.manual_seed(1)
    loss = run(x, y)
    loss.backward()
    return [loss.item(), *(param.grad.tolist() for param in model.parameters())]


def gradients_are_those_of_eager(norms, heads):
    torch.manual_seed(0)
    net = Net([NORMS[norm]() for norm in norms], [HEADS[head] for head in heads])
    pair = twins(net.to(memory_format=torch.channels_last))
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    y = torch.randn(2, 8, 6, 6)
    assert bits(pair.model, pair.call, x, y) == bits(pair.plain, pair.plain, x, y)


@pytest.mark.parametrize("head", ["mse", "smooth l1", "huber", "softplus"])
def test_gradients_of_a_group_norm_in_channels_last_are_those_of_eager(head):
    gradients_are_those_of_eager(["group"], [head])


@pytest.mark.slow
def test_layouts_stay_those_of_eager_where_sizes_change_from_call_to_call():
    torch.manual_seed(0)
    heads = [HEADS[name] for name in ("mse", "softplus", "bce", "reflected", "rolled")]
    net = Net([NORMS["group"](), NORMS["layer, channels"]()], heads)
    pair = twins(net.to(memory_format=torch.channels_last), dynamic=True)
    for size in (6, 8, 9):
        x = torch.randn(2, 3, size, size).contiguous(memory_format=torch.channels_last)
        y = torch.randn(2, 8, size, size)
        assert bits(pair.model, pair.call, x, y) == bits(pair.plain, pair.plain, x, y)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_in_channels_last_are_those_of_eager(norm, head):
    gradients_are_those_of_eager([norm], [head])
