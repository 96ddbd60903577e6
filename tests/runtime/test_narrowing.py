"""Under autocast weights travel in the dtype they are read in; the optimizer's stay wide."""

import pytest
import torch
from pairs import assert_same, batches, mlp, on_disk
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_

import zcompile
from zcompile.errors import ConfigInvalid, ParameterChanged
from zcompile.frontend.offload import session_behind
from zcompile.ir.schedule import Fetch
from zcompile.runtime import foresight
from zcompile.verify.schedule import verify_handover

BF16 = torch.bfloat16


def trained(model, call, steps=4, between=None, micro=1):
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for n, (x, y) in enumerate(batches(steps * micro)):
        with torch.autocast("cpu", BF16):
            loss = nn.functional.cross_entropy(call(x), y)
        loss.backward()
        losses.append(loss.item())
        if (n + 1) % micro == 0:
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if between is not None:
                between(model)
    return losses


def twins(tmp_path, make=mlp, run=trained, **fields):
    torch._dynamo.reset()
    plain, tiered = make(), on_disk(make(), tmp_path, param_dtype=BF16, **fields)
    expected = run(plain, plain)
    assert run(tiered, torch.compile(tiered, backend="zinf")) == expected
    assert_same(plain, tiered)
    return tiered


def copies(model):
    return {p.entry.name: list(p.entry.copies) for p in model.parameters()}


@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({"max_lead": 0}, marks=pytest.mark.slow)],
    ids=["prefetch", "no prefetch"],
)
def test_training_under_autocast_gives_the_same_bits(fields, tmp_path):
    tiered = twins(tmp_path, **fields)
    assert copies(tiered) == {name: [BF16] for name in ("0.weight", "0.bias", "2.weight", "2.bias")}


def test_a_parameter_on_the_host_needs_no_copy(tmp_path):
    assert not any(copies(twins(tmp_path, host_memory="16MiB")).values())


def test_a_parameter_that_is_also_read_wide_has_no_copy(tmp_path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.norm = nn.Linear(16, 4), nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(self.inner(x)) + self.inner.bias.float().sum()

    tiered = twins(tmp_path, Normed)
    found = copies(tiered)
    assert found["inner.weight"] == [BF16]
    assert found["norm.weight"] == found["inner.bias"] == []


def test_accumulation_reads_the_copy_in_every_pass(tmp_path):
    twins(tmp_path, run=lambda model, call: trained(model, call, steps=2, micro=3))


def test_a_parameter_that_is_written_by_hand_is_cast_again(tmp_path):
    def halve(model):
        with torch.no_grad():
            model[0].weight.mul_(0.5)
            model[2].weight[0].fill_(0.25)
            model[2].bias.copy_(torch.ones(4))

    twins(tmp_path, run=lambda model, call: trained(model, call, between=halve))


def test_loading_a_state_dict_casts_again(tmp_path):
    state = {name: value + 1 for name, value in mlp().state_dict().items()}
    twins(
        tmp_path, run=lambda m, call: trained(m, call, between=lambda m: m.load_state_dict(state))
    )


def test_a_copy_is_not_used_once_torch_would_show_something_else(tmp_path):
    tiered = twins(tmp_path)
    kept = {name: value.clone() for name, value in mlp().state_dict().items()}
    tiered.load_state_dict(kept, assign=True)
    call, (x, _) = torch.compile(tiered, backend="zinf"), next(batches(1))
    with torch.autocast("cpu", BF16), torch.no_grad():
        for _ in range(2):
            assert torch.equal(call(x), mlp()(x))
        assert any(copies(tiered).values())
        kept["0.weight"].mul_(2)
        with pytest.raises(ParameterChanged, match=r"'0.weight' took the values"):
            call(x)


@pytest.mark.slow  # tests/e2e/test_narrow_traffic.py
def test_other_optimizers_keep_the_copies_fresh(tmp_path):
    def run(model, call):
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        for x, y in batches(3):
            with torch.autocast("cpu", BF16):
                nn.functional.cross_entropy(call(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu().tolist() for p in model.parameters()]

    twins(tmp_path, run=run)


def test_a_step_that_fails_before_it_writes_leaves_no_blank_copy(tmp_path, monkeypatch):
    tiered = twins(tmp_path)
    call, (x, _) = torch.compile(tiered, backend="zinf"), next(batches(1))
    with torch.autocast("cpu", BF16):
        expected = call(x)
        expected.sum().backward()
    executor = session_behind(tiered).executor
    monkeypatch.setattr(executor, "run", lambda *args: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        optim.SGD(tiered.parameters(), lr=0.1, fused=True).step()
    monkeypatch.undo()
    with torch.autocast("cpu", BF16):
        assert torch.equal(call(x), expected)
    assert expected.abs().sum() > 0


def disk_bytes(tmp_path, **fields):
    """Bytes read and written per parameter and step, everything on disk."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, 512, bias=False)
    )
    model = on_disk(model, tmp_path, device_memory="8MiB", residency=False, **fields)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    call = torch.compile(model, backend="zinf")
    for n in range(4):
        if n == 3:
            zcompile.stats(model, reset=True)
        with torch.autocast("cpu", BF16):
            call(torch.randn(4, 512, requires_grad=True)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = zcompile.stats(model)["bytes"]
    return moved["disk_read"] / 2 / 512**2, moved["disk_write"] / 2 / 512**2


def test_passes_read_half_and_the_step_reads_no_copy(tmp_path):
    # Forward and backward read 4 B each, the step 14 B, gradients included, which rest in bfloat16;
    # it writes 12 B and backward 2 B. The first fetches of the next step are under way when the
    # count is taken.
    wide, narrow = disk_bytes(tmp_path), disk_bytes(tmp_path, param_dtype=BF16)
    assert wide == (22, 14)
    assert narrow == (22 - 4, 14 + 2)


def test_the_wide_parameter_is_what_a_user_sees(tmp_path):
    tiered = twins(tmp_path)
    assert all(p.dtype is torch.float32 for p in tiered.parameters())
    assert set(tiered.state_dict()) == set(mlp().state_dict())


def test_without_autocast_nothing_changes_and_a_note_says_so(tmp_path):
    torch._dynamo.reset()
    dump = tmp_path / "dump"
    tiered = on_disk(mlp(), tmp_path, param_dtype=BF16, dump=dump)
    torch.compile(tiered, backend="zinf")(torch.randn(2, 16)).sum().backward()
    assert copies(tiered)["0.weight"] == []
    told = "".join(path.read_text() for path in dump.rglob("*") if path.is_file())
    assert "(autocast)" in told


def test_copies_die_with_their_model(tmp_path):
    tiered = twins(tmp_path)
    store = session_behind(tiered)
    count = len(store._entries)
    del tiered[2]
    store.enter("a test")
    assert len(store._entries) < count


@pytest.mark.parametrize("dtype", [torch.float32, "bfloat16", torch.int8])
def test_only_narrow_floats_can_be_asked_for(dtype):
    with pytest.raises(ConfigInvalid, match="param_dtype"):
        zcompile.Config(param_dtype=dtype)


def test_the_proof_of_what_is_handed_over_knows_which_copy_a_fetch_brings(tmp_path, monkeypatch):
    proven = []

    def verify(now, then, made):
        proven.append((then, made))
        verify_handover(now, then, made)

    monkeypatch.setattr(foresight, "verify_handover", verify)
    spare = zcompile.offload(mlp(), device="cpu")  # so that keys of entries are no indices
    tiered = twins(tmp_path)
    keys = {copy.key for p in tiered.parameters() for copy, _ in p.entry.copies.values()}
    brought = {
        span.entry
        for then, made in proven
        for x, span in zip(then.schedule.instructions, then.spans(), strict=True)
        if isinstance(x, Fetch) and x.cast and any(x in fetches for fetches in made.starts.values())
    }
    assert brought == keys, "each fetch of a copy is proven about the entry that holds it"
    assert next(spare.parameters()).entry.key not in keys
