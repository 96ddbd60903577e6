"""`from_pretrained` inside `zcompile.init`: values are those of a plain model, and go to the tiers
one at a time."""

import os

import pytest
import torch
import transformers
from e2e.models import gpt2, llama
from pairs import ON_DISK, assert_same
from torch import nn

import zcompile
from zcompile.errors import Unsupported, ValueUnset
from zcompile.frontend import offload
from zcompile.runtime.eager.tensor import TieredTensor


@pytest.fixture(scope="module", params=[gpt2, llama])
def exported(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exported")
    request.param().save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def read(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def test_the_values_are_those_of_a_plain_model_and_rest_in_the_tiers(exported, tmp_path):
    plain = read(exported)
    with zcompile.init(**ON_DISK, disk=tmp_path):
        model = read(exported)
    assert all(isinstance(p, TieredTensor) for p in model.parameters())
    assert [p.entry.name for p in model.parameters()] == [n for n, _ in plain.named_parameters()]
    assert {p.entry.home for p in model.parameters()} == {"disk"}
    assert_same(plain, model)
    tied = [m.lm_head.weight is m.get_input_embeddings().weight for m in (plain, model)]
    assert tied == [plain.config.tie_word_embeddings] * 2
    ids = torch.arange(8).view(1, 8)
    losses = [m(ids, labels=ids).loss for m in (plain, model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.on_host() if isinstance(q.grad, TieredTensor) else q.grad)


def test_a_converted_weight_is_not_kept_in_memory(exported, tmp_path, monkeypatch):
    """Only the last ones may still be held by their maker when the next is put in its place."""
    become, most = offload._become_tiered, []

    def counted(session, name, param, first=None):
        become(session, name, param, first)
        most.append(sum(bool(entry.sources) for entry in session.entries()))

    monkeypatch.setattr(offload, "_become_tiered", counted)
    plain = read(exported, dtype=torch.bfloat16)
    with zcompile.init(**ON_DISK, disk=tmp_path):
        model = read(exported, dtype=torch.bfloat16)
    assert_same(plain, model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert len(most) > 10
    assert max(most) <= 2, most


def test_weights_are_not_read_ahead_by_threads(exported, tmp_path, monkeypatch):
    started = []
    pool = transformers.core_model_loading.ThreadPoolExecutor
    monkeypatch.setattr(
        transformers.core_model_loading,
        "ThreadPoolExecutor",
        lambda *args, **options: started.append(1) or pool(*args, **options),
    )
    read(exported)
    assert started == [1]
    monkeypatch.setenv(offload.ONE_AT_A_TIME, "0")
    with zcompile.init(**ON_DISK, disk=tmp_path):
        read(exported)
    assert started == [1]
    assert os.environ[offload.ONE_AT_A_TIME] == "0"


def test_what_the_file_lacks_is_made_as_transformers_makes_it(exported, tmp_path):
    def classify():
        torch.manual_seed(1)
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            exported, num_labels=3
        )

    plain = classify()
    with zcompile.init(**ON_DISK, disk=tmp_path):
        model = classify()
    assert all(isinstance(p, TieredTensor) for p in model.parameters())
    assert_same(plain, model)


def test_a_model_on_meta_has_no_values_until_it_is_loaded(exported, tmp_path):
    plain = read(exported)
    with zcompile.init(**ON_DISK, disk=tmp_path), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(plain.config)
    name = next(n for n, _ in plain.named_parameters())
    with pytest.raises(ValueUnset, match=f"'{name}' has no value yet: .*zcompile.load"):
        model.get_input_embeddings()(torch.arange(3))
    zcompile.load(model, exported)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q.on_host())


class PastTheDoor(nn.Module):
    """Gives a value past `register_parameter`, as some loaders do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
        self._parameters["weight"] = nn.Parameter(torch.ones(2, 3))


def test_what_was_in_memory_until_the_end_is_moved_and_told(tmp_path, caplog):
    with zcompile.init(**ON_DISK, disk=tmp_path):
        model = PastTheDoor()
    assert torch.equal(model.weight.on_host(), torch.ones(2, 3))
    assert "24 B of parameters were in memory until zcompile.init ended" in caplog.text
    assert "zcompile.load(model, path)" in caplog.text


def test_a_weight_of_another_kind_is_refused_at_once(tmp_path):
    class Packed(nn.Parameter):
        """As those of libraries that quantize."""

    with (
        pytest.raises(Unsupported, match="parameter 'weight' is a Packed"),
        zcompile.init(**ON_DISK, disk=tmp_path),
    ):
        nn.Linear(2, 2).weight = Packed(torch.ones(2, 2))
