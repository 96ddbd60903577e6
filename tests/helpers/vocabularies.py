"""Small models that end in a loss over a vocabulary, in the forms that stock code has for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

functional = nn.functional

CLASSES, WIDTH, BATCH, LENGTH = 37, 8, 3, 5
LossOf = Callable[[Tensor, Tensor], Any]


class Head(nn.Module):
    """An embedding, a product with one row per class, and a loss."""

    def __init__(self, loss: LossOf, bias: bool, tied: bool, classes: int = CLASSES) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        return self.loss(self.head(torch.tanh(self.mix(self.embedding(ids)))), targets)


class Autocast(Head):
    """The same under bf16 autocast."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, targets)


def flat(**options: Any) -> LossOf:
    """cross_entropy of all tokens in a row."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        rows = logits.view(-1, logits.shape[-1])
        return functional.cross_entropy(rows, targets.view(-1), **options)

    return loss


def sliced(logits: Tensor, targets: Tensor) -> Tensor:
    """Shifted labels as older transformers have them: no last token, no first target."""
    logits = logits.float()
    logits, targets = logits[..., :-1, :].contiguous(), targets[..., 1:].contiguous()
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def padded(logits: Tensor, targets: Tensor) -> Tensor:
    """Shifted labels as newer transformers have them: a target more, that is ignored."""
    targets = functional.pad(targets, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.float().view(-1, logits.shape[-1])
    return functional.cross_entropy(logits, targets.view(-1), reduction="sum") / 7


def two_calls(logits: Tensor, targets: Tensor) -> Tensor:
    """log_softmax first, of [batch, length, classes], and the likelihood of it in rows."""
    log_probs = functional.log_softmax(logits, -1)
    return functional.nll_loss(log_probs.view(-1, logits.shape[-1]), targets.view(-1))


def sliced_and_two_calls(logits: Tensor, targets: Tensor) -> Tensor:
    """Some of the tokens, and classes that stay the last of three dimensions."""
    return two_calls(logits[:, 1:], targets[:, 1:].contiguous())


def last_token(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, -1], targets[:, -1])


def fairseq(logits: Tensor, targets: Tensor) -> Tensor:
    """Label smoothing by hand: the mean of all log-probabilities beside the target's."""
    rows = functional.log_softmax(logits.view(-1, logits.shape[-1]), -1)
    likelihood = functional.nll_loss(rows, targets.view(-1), reduction="sum")
    return 0.9 * likelihood - 0.1 * rows.sum(-1).sum() / logits.shape[-1]


def as_autocast_on_cuda(smoothing: float = 0.0) -> LossOf:
    """cross_entropy as autocast on CUDA runs it: the log-softmax in the narrow dtype of the logits,
    what follows in float32."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        rows = functional.log_softmax(logits.view(-1, logits.shape[-1]), -1)
        likelihood = functional.nll_loss(rows.float(), targets.view(-1))
        if not smoothing:
            return likelihood
        spread = -rows.sum(1, dtype=torch.float32).mean() / logits.shape[-1]
        return (1 - smoothing) * likelihood + smoothing * spread

    return loss


def of_part(part: Callable[[Tensor], Tensor], cast: bool = False) -> LossOf:
    """A likelihood, weighed by numbers that are computed of a part of the log-probabilities, and
    have no gradient."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        rows = functional.log_softmax(logits.view(-1, logits.shape[-1]), -1)
        likelihood = functional.nll_loss(rows.float() if cast else rows, targets.view(-1))
        found = rows.detach()
        return likelihood * part(found.float() if cast else found).mean()

    return loss


PARTS = {
    "some classes": lambda rows: rows[:, 3:].sum(1),
    "one class": lambda rows: rows.select(1, 3),
    "some tokens": lambda rows: rows[2:].sum(1),
    "all tokens of a class": lambda rows: rows.t().sum(1),
    "twice the tokens": lambda rows: rows.expand(2, -1, -1).flatten(0, 1).sum(1),
    "a narrower dtype": lambda rows: rows.half().to(rows.dtype).sum(1),
    "whole numbers": lambda rows: rows.sum(1, dtype=torch.int64).float(),
}
"""What of the rows of log-probabilities is no sum over all classes of all tokens."""


def returned(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits, flat()(logits, targets)


def with_a_penalty(logits: Tensor, targets: Tensor) -> Tensor:
    return flat()(logits, targets) + 1e-4 * logits.logsumexp(-1).square().mean()


def capped(logits: Tensor, targets: Tensor) -> Tensor:
    return flat()(torch.tanh(logits), targets)


def scaled(logits: Tensor, targets: Tensor) -> Tensor:
    return flat()(logits / 2, targets)


def over_dimension_one(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), targets)


@dataclass(frozen=True)
class Pattern:
    """A loss, the options of the model around it, and a target that it ignores."""

    loss: LossOf
    bias: bool = False
    tied: bool = False
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    ignored: int = -100

    def build(self, classes: int = CLASSES) -> nn.Module:
        torch.manual_seed(0)
        kind = Autocast if self.autocast else Head
        return kind(self.loss, self.bias, self.tied, classes).to(self.dtype)

    def inputs(self, classes: int = CLASSES, length: int = LENGTH) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(1)
        size = (BATCH, length)
        ids, targets = (torch.randint(classes, size, generator=source) for _ in range(2))
        targets[0, 1] = targets[2, 0] = self.ignored
        return ids, targets


TILED = {
    "mean": Pattern(flat()),
    "sum": Pattern(flat(reduction="sum")),
    "none": Pattern(flat(reduction="none")),
    "ignored class": Pattern(flat(ignore_index=3), ignored=3),
    "smoothed": Pattern(flat(label_smoothing=0.1)),
    "smoothed sum": Pattern(flat(label_smoothing=0.1, reduction="sum"), bias=True),
    "smoothed none": Pattern(flat(label_smoothing=0.3, reduction="none")),
    "bias": Pattern(flat(), bias=True),
    "tied": Pattern(flat(), tied=True),
    "tied with bias": Pattern(sliced, bias=True, tied=True),
    "sliced": Pattern(sliced),
    "padded": Pattern(padded, tied=True),
    "last token": Pattern(last_token),
    "two calls": Pattern(two_calls),
    "sliced, two calls": Pattern(sliced_and_two_calls),
    "fairseq": Pattern(fairseq),
    "bf16 autocast": Pattern(sliced, autocast=True),
    "bf16 autocast, smoothed": Pattern(flat(label_smoothing=0.1), bias=True, autocast=True),
    "autocast of CUDA": Pattern(as_autocast_on_cuda(), autocast=True, tied=True),
    "autocast of CUDA, smoothed": Pattern(as_autocast_on_cuda(0.1), autocast=True),
    "bf16": Pattern(flat(), dtype=torch.bfloat16),
    "bf16, upcast": Pattern(sliced, dtype=torch.bfloat16, bias=True),
    "f64": Pattern(flat(), dtype=torch.float64),
}
"""What is cut into tiles."""

KEPT = {
    "returned": (Pattern(returned), "the graph returns the logits"),
    "class weights": (Pattern(flat(weight=torch.rand(CLASSES))), "weighs its classes"),
    "penalty": (Pattern(with_a_penalty), "reads the logits too"),
    "capped": (Pattern(capped), "reads the logits too"),
    "scaled": (Pattern(scaled), "not known to treat every token alike"),
    "classes in dimension one": (Pattern(over_dimension_one), "not its last dimension"),
}
"""What is kept, and the reason that the note gives."""
