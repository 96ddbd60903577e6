"""Models with one thing that is easily got wrong, plainly called and compiled, against eager."""

import pytest
import torch
from pairs import entries, same_training, train
from sampled import crossed
from torch import nn, optim
from torch.nn import functional, utils

from zcompile.ir.types import EntryKind

MODES = pytest.mark.parametrize("mode", ["eager", "compiled"])


def adamw(model, **options):
    return optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, **options)


def plain_loop(model, call):
    return train(call, adamw(model, fused=True))


def dropout():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.Linear(32, 4))


def parametrized():
    torch.manual_seed(0)
    first = utils.parametrizations.weight_norm(nn.Linear(16, 32))
    return nn.Sequential(first, nn.Tanh(), utils.parametrizations.spectral_norm(nn.Linear(32, 4)))


class Shared(nn.Module):
    """A module called twice, and its weight read by another op."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(self.a(torch.relu(self.a(x))) + x @ self.a.weight)


class Adapted(nn.Module):
    """A frozen layer and a small trainable one beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(16, 32).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(16, 2) * 0.1)
        self.up = nn.Parameter(torch.zeros(2, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(torch.relu(self.base(x) + x @ self.down @ self.up))


class Converting(nn.Module):
    """A layer that is converted to the dtype that it has in each forward, as routers of experts
    are, which breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        self.router = self.router.to(x.dtype)
        return self.head(torch.relu(self.router(x)))


class Words(nn.Module):
    """Mean of embedded words, scored against all; tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 16, padding_idx=0)
        self.head = nn.Linear(16, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


class Pictures(nn.Module):
    """Convolution and batch norm, whose buffers change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@MODES
@pytest.mark.parametrize("make", [dropout, parametrized, Shared, Adapted, Converting])
def test_a_model_with_something_special_trains_alike(make, mode, tmp_path):
    same_training(plain_loop, tmp_path, mode, make)


def words(model, call):
    generator = torch.Generator().manual_seed(1)
    data = [
        (
            torch.randint(10, (8, 5), generator=generator),
            torch.randint(10, (8,), generator=generator),
        )
        for _ in range(3)
    ]
    return train(call, adamw(model, fused=True), data=data)


@pytest.mark.parametrize(("tied", "mode"), crossed([False, True], ["eager", "compiled"]))
def test_embeddings_train_alike(tied, mode, tmp_path):
    _, tiered = same_training(words, tmp_path, mode, lambda: Words(tied))
    assert len(entries(tiered, EntryKind.PARAM)) == (1 if tied else 2)


@MODES
def test_nested_tensors_train_alike(mode, tmp_path):
    """Torch counts their ragged dimension by a symbol that no number stands for."""

    def run(model, call):
        optimizer, losses = adamw(model), []
        for lengths in ((3, 5), (2, 4, 1), (3, 5)):
            rows = [torch.linspace(-1, 1, 16 * n).view(n, 16) for n in lengths]
            out = call(torch.nested.nested_tensor(rows, layout=torch.jagged))
            loss = out.values().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    same_training(run, tmp_path, mode, dropout)


@MODES
def test_weights_may_be_tied_after_offload(mode, tmp_path):
    def run(model, call):
        model.head.weight = model.embed.weight
        return words(model, call)

    _, tiered = same_training(run, tmp_path, mode, lambda: Words(False))
    assert tiered.head.weight is tiered.embed.weight


@pytest.mark.parametrize(
    ("memory_format", "mode"),
    crossed([torch.contiguous_format, torch.channels_last], ["eager", "compiled"]),
)
def test_buffers_change_and_evaluation_reads_them(memory_format, mode, tmp_path):
    def run(model, call):
        generator = torch.Generator().manual_seed(1)
        data = [(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)) for _ in range(3)]
        losses = train(call, optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data=data)
        model.eval()
        with torch.no_grad():
            return losses, call(data[0][0]).tolist()

    same_training(run, tmp_path, mode, lambda: Pictures().to(memory_format=memory_format))


USES = {
    "to a dtype and back": lambda w, x: x @ w.to(x.dtype).float(),
    "to its device": lambda w, x: x @ w.to(x.device).cpu(),
    "narrowed": lambda w, x: (x.bfloat16() @ w.bfloat16()).float(),
    "data": lambda w, x: x @ w.data + w.detach().mean(),
    "a list": lambda w, x: x @ w + w[0].tolist()[0],
    "an item": lambda w, x: x @ w if w[0, 0].item() < 1e9 else x,
    "numpy": lambda w, x: x @ w + float(w.detach().numpy()[0, 0]),
    "metadata": lambda w, x: x @ w + w.shape[0] + w.numel() if w.requires_grad else x,
    "views": lambda w, x: sum(x @ part.repeat(1, 2) for part in w.chunk(2, 1)),
    "new tensors": lambda w, x: x @ w + torch.zeros_like(w).sum() + w.new_ones(1),
    "a checked index": lambda w, x: functional.one_hot(x.argmax(1), 16).float() @ w,
    "normalized": lambda w, x: x @ (w / w.norm(dim=0, keepdim=True)),
}


class Using(nn.Module):
    """Does what `use` says with its parameter."""

    def __init__(self, use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.use = nn.Parameter(torch.randn(16, 8)), use

    def forward(self, x):
        return self.use(self.w, x)


OLD_TORCH = torch.__version__.startswith("2.11.")


@pytest.mark.parametrize(("name", "mode"), crossed(USES, ["compiled", "eager"]))
def test_a_forward_may_use_a_parameter_in_any_way(name, mode, tmp_path):
    if OLD_TORCH and (name, mode) == ("a list", "compiled"):
        # On purpose: our error says so (docs/support.md). Why it needs torch 2.12 is not known yet.
        pytest.skip("refused with torch 2.11, where it is called without gradients")

    def run(model, call):
        x = torch.randn(3, 16)
        out = call(x)
        if out.requires_grad:
            out.sum().backward()
        with torch.no_grad():
            quiet = call(x)
        grad = model.w.grad.tolist() if model.w.grad is not None else None
        return out.tolist(), quiet.tolist(), grad

    same_training(run, tmp_path, mode, lambda: Using(USES[name]))


# On purpose: there is nothing of ours that could keep what torch leaves out.
@pytest.mark.skipif(OLD_TORCH, reason="torch 2.11 drops it from graphs, under aot_eager too")
def test_an_assertion_in_a_graph_is_raised_and_the_training_goes_on(tmp_path):
    """What it asserts is known when it runs, in each call anew; `one_hot` checks its classes so."""

    def run(model, call):
        optimizer, told = adamw(model, fused=True), []
        for largest in (9, 10, 9):  # of a one-hot of ten
            optimizer.zero_grad()
            try:
                call(torch.tensor([0, 3, largest])).square().mean().backward()
            except RuntimeError as error:
                told.append(str(error))
                continue
            optimizer.step()
        with torch.no_grad(), pytest.raises(RuntimeError, match="smaller than num_classes"):
            call(torch.tensor([12]))
        (sentence,) = told
        return "smaller than num_classes" in sentence, call(torch.tensor([4])).tolist()

    same_training(run, tmp_path, "compiled", Chosen)


class Chosen(nn.Module):
    """A linear layer of one-hot vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Linear(10, 4)

    def forward(self, ids):
        return self.rows(functional.one_hot(ids, 10).float())
