"""Models with a large vocabulary train without logits: eager's numbers within a tolerance.

The device budget is such that an eighth of it holds less than the logits, so the loss is tiled.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from e2e.models import BATCH, CAUSAL, SEQUENCE
from sampled import sampled
from torch import Tensor, nn
from vocabularies import Head, flat

import zcompile
from zcompile.ir.units import Bytes
from zcompile.passes import tile_loss

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache.")

CLASSES = 2048
STEPS, ACCUMULATE = 3, 2
BUDGETS = {"device": "cpu", "device_memory": "1MiB", "host_memory": "2MiB"}
LOGITS = 4 * BATCH * (SEQUENCE - 1) * CLASSES
TOLERANCE = 1e-5
"""Of a loss, and of a parameter after three steps of SGD, in units of the largest: a gradient is
off by some 1e-6 (tests/passes/test_tile_loss.py), and steps carry that on."""


class LossOnly(nn.Module):
    """A model of transformers that returns its loss alone; it would return the logits too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss


def gpt2() -> nn.Module:
    """Its embedding is tied to its head. Without `loss_type` transformers warns before the loss,
    where Dynamo then breaks the graph in two, and logits go from one to the other."""
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=CLASSES,
            n_positions=32,
            n_embd=32,
            n_layer=1,
            n_head=2,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.loss_type = "ForCausalLM"
    return LossOnly(model)


def llama() -> nn.Module:
    return LossOnly(
        hf.LlamaForCausalLM(
            hf.LlamaConfig(**{**CAUSAL, "vocab_size": CLASSES, "num_hidden_layers": 1})
        )
    )


def t5() -> nn.Module:
    return LossOnly(
        hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=CLASSES,
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
                use_cache=False,
                decoder_start_token_id=0,
            )
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Head(flat(), bias=True, tied=False, classes=CLASSES),
    "smoothed, tied": lambda: Head(
        flat(label_smoothing=0.1), bias=False, tied=True, classes=CLASSES
    ),
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
}


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The losses that were tiled."""
    found: list[object] = []
    original = tile_loss.rewrite_loss

    def keep(graph: torch.fx.Graph, tiles: tile_loss.Tiles, *rest: object) -> None:
        found.append(tiles)
        original(graph, tiles, *rest)

    monkeypatch.setattr(tile_loss, "rewrite_loss", keep)
    return found


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


def train(
    model: nn.Module, called: Callable[..., Tensor], make: Callable[..., torch.optim.Optimizer]
) -> list[float]:
    """The loss of every backward."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # dropout
    optimizer = make(model.parameters())
    losses = []
    for _ in range(STEPS):
        for _ in range(ACCUMULATE):
            ids = torch.randint(3, CLASSES, (BATCH, SEQUENCE), generator=generator)
            labels = ids.clone()
            labels[0, :3] = -100
            loss = called(ids, labels) / ACCUMULATE
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sgd(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, fused=True)


def adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


@pytest.mark.parametrize("name", sampled(MODELS, "smoothed, tied"))
def test_training_by_sgd_is_that_of_eager(name: str, tmp_path: Path, tiled: list[object]) -> None:
    eager = built(name)
    expected = train(eager, eager, sgd)
    model = zcompile.offload(built(name), disk=tmp_path, **BUDGETS)
    losses = train(model, torch.compile(model, backend="zinf"), sgd)
    assert len(tiled) == 1
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    others = dict(eager.named_parameters())
    for key, param in model.named_parameters():
        other = others[key].detach()
        apart = (param.detach() - other).abs().max()
        assert apart <= TOLERANCE * other.abs().max(), key


@pytest.mark.parametrize("name", sampled(["plain", "smoothed, tied", "gpt2", "t5"], "plain"))
def test_a_head_trains_that_is_larger_than_the_device(
    name: str, tmp_path: Path, tiled: list[object]
) -> None:
    """Tiles of the weight are gathered, and their gradients leave, one by one."""
    eager = built(name)
    weight = max(p.numel() * p.element_size() for p in eager.parameters())
    budgets = {**BUDGETS, "device_memory": Bytes(weight * 7 // 8)}
    expected = train(eager, eager, sgd)
    model = zcompile.offload(built(name), disk=tmp_path, **budgets)
    losses = train(model, torch.compile(model, backend="zinf"), sgd)
    assert len(tiled) == 1
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    for (key, param), (_, other) in zip(
        model.named_parameters(), eager.named_parameters(), strict=True
    ):
        apart = (param.detach() - other.detach()).abs().max()
        assert apart <= TOLERANCE * other.abs().max(), key


@pytest.mark.slow  # by SGD above, to more digits
@pytest.mark.parametrize("name", sampled(["smoothed, tied", "gpt2"], "smoothed, tied"))
def test_training_by_adamw_is_that_of_eager(name: str, tmp_path: Path) -> None:
    """Its steps are as large for gradients that are nothing but rounding; the loss tells."""
    eager = built(name)
    expected = train(eager, eager, adamw)
    model = zcompile.offload(built(name), disk=tmp_path, **BUDGETS)
    losses = train(model, torch.compile(model, backend="zinf"), adamw)
    assert losses == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow
def test_a_model_that_returns_its_logits_is_left_alone_to_the_last_bit(
    tmp_path: Path, tiled: list[object]
) -> None:
    def called(model: nn.Module) -> Callable[..., Tensor]:
        return lambda ids, labels: model(input_ids=ids, labels=labels).loss

    eager = built("llama").model
    expected = train(eager, called(eager), sgd)
    model = zcompile.offload(built("llama").model, disk=tmp_path, **BUDGETS)
    assert train(model, called(torch.compile(model, backend="zinf")), sgd) == expected
    assert not tiled


def test_a_model_that_was_not_offloaded_is_tiled_if_asked(tiled: list[object]) -> None:
    eager, model = built("smoothed, tied"), built("smoothed, tied")
    options = {"tile_bytes": LOGITS // 4}
    expected = train(eager, eager, sgd)
    losses = train(model, torch.compile(model, backend="zinf", options=options), sgd)
    assert len(tiled) == 1
    assert losses == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow
def test_sizes_may_be_dynamic(tmp_path: Path, tiled: list[object]) -> None:
    eager = built("plain")
    model = zcompile.offload(built("plain"), disk=tmp_path, **BUDGETS)
    compiled = torch.compile(model, backend="zinf", dynamic=True)
    for tokens in (60, 84, 75):
        ids, labels = torch.randint(CLASSES, (2, 2, tokens))
        found, expected = compiled(ids, labels), eager(ids, labels)
        found.backward()
        expected.backward()
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=0.0)
    assert len(tiled) == 1
    for key, param in model.named_parameters():
        other = dict(eager.named_parameters())[key].grad
        assert (param.grad.detach() - other).abs().max() <= TOLERANCE * other.abs().max(), key


@pytest.mark.slow
def test_evaluation_has_no_logits_either(tmp_path: Path, tiled: list[object]) -> None:
    eager = built("llama").eval()
    model = zcompile.offload(built("llama").eval(), disk=tmp_path, **BUDGETS)
    ids = torch.randint(3, CLASSES, (BATCH, SEQUENCE))
    with torch.no_grad():
        found = torch.compile(model, backend="zinf")(ids, ids)
        torch.testing.assert_close(found, eager(ids, ids), rtol=TOLERANCE, atol=0.0)
    assert len(tiled) == 1
