"""Durable training: what a commit holds, that nothing touches it, and that it comes back."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zcompile
from zcompile.errors import (
    ConfigInvalid,
    DurableDamaged,
    DurableHeld,
    NothingCommitted,
    TierFull,
    Unsupported,
)
from zcompile.offloading import session_behind
from zcompile.runtime.commit import Ledger
from zcompile.runtime.data_check import check_all
from zcompile.runtime.index import read_index

ON_DISK = {"device": "cpu", "device_memory": "4MiB", "host_memory": "256KiB", "durable": True}
ON_HOST = {**ON_DISK, "host_memory": "64MiB"}
WIDTH = 192


class Net(nn.Module):
    """Large and small parameters, a buffer that changes, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.norm(self.up(x))))


class Run:
    """A training of `Net`, plain or durable."""

    def __init__(self, disk: Path | None = None, make=torch.optim.AdamW, **fields: object) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net()
        if disk is not None:
            zcompile.offload(self.model, disk=disk, **{**ON_DISK, **fields})
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self.call = self.model
        self.disk = disk

    @property
    def ledger(self) -> Ledger:
        found = session_behind(self.model).ledger
        assert found is not None
        return found

    def train(self, begin: int, end: int) -> "Run":
        for number in range(begin, end):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            self.call(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def close(self) -> None:
        session_behind(self.model).close()

    def resume(self) -> dict[str, object]:
        return zcompile.resume(self.disk, self.model, self.optimizer)

    def state(self) -> list[Tensor]:
        """Everything that training goes on from."""
        tensors = list(self.model.state_dict().values())
        for param in self.model.parameters():
            state = self.optimizer.state.get(param, {})
            tensors += [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
        return [plain(t) for t in tensors] + [torch.get_rng_state()]


def plain(tensor: Tensor) -> Tensor:
    value = tensor.on_host() if hasattr(tensor, "on_host") else tensor
    return value.detach().clone()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def after_a_crash(disk: Path, make=torch.optim.AdamW, **fields: object) -> Run:
    """A new run over what an earlier one committed."""
    gc.collect()
    return Run(disk, make, **fields)


def sgd(params, lr):
    return torch.optim.SGD(params, lr, momentum=0.9)


def amsgrad(params, lr):
    return torch.optim.Adam(params, lr, amsgrad=True, fused=True)


@pytest.mark.parametrize("fields", [ON_DISK, ON_HOST], ids=["disk", "host"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, sgd, amsgrad], ids=lambda make: make.__name__)
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path, make, fields):
    expected = [Run(make=make).train(0, end).state() for end in (3, 5)]
    run = Run(tmp_path, make, **fields).train(0, 3)
    run.close()
    again = after_a_crash(tmp_path, make, **fields)
    assert again.resume() == {"step": 3}
    assert same(again.state(), expected[0])
    assert same(again.train(3, 5).state(), expected[1])
    again.close()


@pytest.mark.parametrize(("before", "after"), [(ON_DISK, ON_HOST), (ON_HOST, ON_DISK)],
                         ids=["to the host", "to the disk"])  # fmt: skip
def test_a_run_may_resume_with_another_budget(tmp_path, before, after):
    expected = Run().train(0, 4).state()
    Run(tmp_path, **before).train(0, 2).close()
    again = after_a_crash(tmp_path, **after)
    again.resume()
    assert same(again.train(2, 4).state(), expected)
    again.close()
    last = after_a_crash(tmp_path, **before)
    assert last.resume() == {"step": 4}
    assert same(last.state(), expected)
    last.close()


def test_a_compiled_run_resumes_too(tmp_path):
    expected = Run().train(0, 4).state()
    for begin, end in ((0, 2), (2, 4)):
        torch._dynamo.reset()
        run = after_a_crash(tmp_path)
        if begin:
            run.resume()
        run.call = torch.compile(run.model, backend="zinf")
        run.train(begin, end)
        found = run.state()
        run.close()
    assert same(found, expected)


def test_a_model_on_meta_gets_its_values_from_the_commit(tmp_path):
    expected = Run().train(0, 2).state()[:8]
    Run(tmp_path).train(0, 2).close()
    with torch.device("meta"):
        model = Net()
    model.norm.to_empty(device="cpu")
    zcompile.offload(model, disk=tmp_path, **ON_DISK)
    assert zcompile.resume(tmp_path, model) == {"step": 2}
    assert same([plain(t) for t in model.state_dict().values()][:8], expected)
    session_behind(model).close()


def test_a_model_built_under_init_commits_and_resumes(tmp_path):
    for begin, end in ((0, 1), (1, 2)):
        torch.manual_seed(0)
        with zcompile.init(disk=tmp_path, **ON_DISK):
            model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if begin:
            assert zcompile.resume(tmp_path, model, optimizer) == {"step": begin}
        for number in range(begin, end):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [plain(t) for t in model.state_dict().values()]
        session_behind(model).close()
        del model, optimizer
    assert same(weights, Run().train(0, 2).state()[: len(weights)])


def test_between_commits_nothing_touches_what_the_last_one_names(tmp_path, monkeypatch):
    run = Run(tmp_path).train(0, 2)
    index, _ = read_index(tmp_path)
    monkeypatch.setattr(Ledger, "commit", lambda *args, **kwargs: None)
    run.train(2, 5)
    session_behind(run.model).drain()
    assert read_index(tmp_path)[0] == index
    assert check_all(index, [tmp_path]) > 0
    run.close()
    monkeypatch.undo()
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2}
    assert same(again.state(), Run().train(0, 2).state())
    again.close()


def test_what_was_written_in_part_is_committed_whole(tmp_path):
    expected = Run().train(0, 2)
    run = Run(tmp_path).train(0, 2)
    for model in (expected.model, run.model):
        with torch.no_grad():
            model.up.weight[3].fill_(7)
            model.up.weight[:, 5] = -1
            model.down.weight[100:200].mul_(2)
    zcompile.save(tmp_path, run.model, run.optimizer)
    run.close()
    check_all(read_index(tmp_path)[0], [tmp_path])
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2}
    assert same(again.state()[:-1], expected.state()[:-1])
    again.close()


def test_what_does_not_change_is_not_written_again(tmp_path):
    run = Run(tmp_path)
    run.model.down.requires_grad_(False)
    run.train(0, 3)
    rows = {tensor.name: tensor.step for tensor in read_index(tmp_path)[0].tensors}
    assert rows["model.up.weight"] == 3
    assert rows["model.down.weight"] == rows["model.down.bias"] == 1
    run.close()


@pytest.mark.parametrize("fields", [ON_DISK, ON_HOST], ids=["disk", "host"])
def test_space_is_twice_what_changes_and_does_not_grow(tmp_path, fields):
    run = Run(tmp_path, **fields).train(0, 2)
    before = (tmp_path / "zinf.tier").stat().st_size
    run.train(2, 9)
    assert (tmp_path / "zinf.tier").stat().st_size == before
    named = read_index(tmp_path)[0].nbytes
    assert run.ledger.tier.usage()[1] <= 2 * named + 4096
    run.close()


def test_gradients_are_not_part_of_a_commit(tmp_path):
    run = Run(tmp_path)
    run.model(torch.ones(8, WIDTH)).sum().backward()
    run.optimizer.step()
    assert not [t.name for t in read_index(tmp_path)[0].tensors if t.kind == "gradient"]
    run.close()


def test_extra_is_kept_until_it_is_given_again(tmp_path):
    run = Run(tmp_path).train(0, 1)
    zcompile.save(tmp_path, run.model, run.optimizer, epoch=3, seen=torch.arange(4))
    run.train(1, 3)
    run.close()
    again = after_a_crash(tmp_path)
    extra = again.resume()
    assert (extra["step"], extra["epoch"], extra["seen"].tolist()) == (3, 3, [0, 1, 2, 3])
    again.train(3, 4).close()
    last = after_a_crash(tmp_path)
    assert last.resume()["epoch"] == 3
    last.close()


def test_a_commit_that_nobody_resumed_is_not_lost_by_a_step(tmp_path):
    Run(tmp_path).train(0, 2).close()
    index = read_index(tmp_path)
    run = after_a_crash(tmp_path)
    with pytest.raises(DurableHeld, match="holds step 2 of an earlier run: continue it with"):
        run.train(0, 1)
    with pytest.raises(DurableHeld):
        zcompile.save(tmp_path, run.model, run.optimizer)
    run.close()
    assert read_index(tmp_path) == index
    check_all(index[0], [tmp_path])


def test_an_empty_directory_has_nothing_to_resume(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(NothingCommitted, match="there is nothing to resume: train on"):
        run.resume()
    run.train(0, 1).close()


def test_a_run_is_resumed_once(tmp_path):
    run = Run(tmp_path).train(0, 1)
    with pytest.raises(Unsupported, match="holds what this very model committed"):
        run.resume()
    run.close()


def test_a_second_optimizer_is_refused(tmp_path):
    run = Run(tmp_path).train(0, 1)
    other = torch.optim.SGD(run.model.up.parameters(), lr=0.1)
    run.model(torch.ones(8, WIDTH)).sum().backward()
    with pytest.raises(Unsupported, match="a second optimizer \\(SGD\\) steps on a durable model"):
        other.step()
    run.close()


def test_durable_needs_a_disk():
    with pytest.raises(ConfigInvalid, match="durable=True needs a disk"):
        zcompile.Config(device="cpu", durable=True)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


@pytest.mark.parametrize("fields", [ON_DISK, ON_HOST], ids=["disk", "host"])
def test_a_flipped_bit_names_file_and_tensor_and_nothing_is_changed(tmp_path, fields):
    Run(tmp_path, **fields).train(0, 2).close()
    tensor = read_index(tmp_path)[0].tensors[-1]
    flip(tmp_path / "zinf.tier", tensor.offset + tensor.nbytes - 1)
    run = after_a_crash(tmp_path, **fields)
    before = run.state()
    with pytest.raises(DurableDamaged) as caught:
        run.resume()
    assert f"{tmp_path / 'zinf.tier'}: {tensor.name!r} is damaged" in str(caught.value)
    assert same(run.state(), before)
    with pytest.raises(DurableHeld):
        run.train(0, 1)
    run.close()
    assert (tmp_path / "zinf.index").exists()


def test_another_model_does_not_fit_and_the_commit_stays(tmp_path):
    Run(tmp_path).train(0, 2).close()
    model = zcompile.offload(nn.Linear(4, 4), disk=tmp_path, **ON_DISK)
    with pytest.raises(zcompile.ZinfError, match=r"up\.weight: float32"):
        zcompile.resume(tmp_path, model)
    session_behind(model).close()
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2}
    again.close()


def test_a_step_that_finds_no_room_is_refused_before_it_writes(tmp_path, monkeypatch):
    run = Run(tmp_path).train(0, 2)
    monkeypatch.setattr(run.ledger.tier, "usage", lambda: ("disk", 100, 100))
    with pytest.raises(TierFull, match="the new version of what this step changes"):
        run.train(2, 3)
    run.close()
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2}
    again.close()


def test_resuming_is_told(tmp_path, caplog):
    Run(tmp_path).train(0, 1).close()
    run = after_a_crash(tmp_path)
    with caplog.at_level(logging.INFO, "zcompile.durable"):
        run.resume()
    assert "resumed at step 1" in caplog.text
    run.close()
