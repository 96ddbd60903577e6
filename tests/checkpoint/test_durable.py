"""Durable training: what a commit holds, that nothing touches it, and that it comes back."""

import errno
import os
import signal

import pytest
import torch
from border import Border, offloaded
from committed import check_all, read_index
from durable_runs import ON_DISK, ON_HOST, WIDTH, Net, Run, after_a_crash, plain, same
from planned_runs import made_on

import zcompile
from zcompile.errors import CommitFailed, NothingCommitted
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import KiB
from zcompile.runtime.durable.commit import CommitLog


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


def test_resuming_takes_over_what_lies_on_disk_and_writes_it_nowhere(tmp_path):
    Run(tmp_path).train(0, 2).close()
    again = after_a_crash(tmp_path)
    store = again.model.up.weight.entry.store
    store.drain()
    before = store.meter.bytes()["disk_write"]
    again.resume()
    store.drain()
    assert store.meter.bytes()["disk_write"] - before < 4 * KiB  # small ones are in the index
    again.close()


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [ON_DISK, ON_HOST], ids=["disk", "host"])
def test_a_run_on_a_gpu_goes_on_as_if_nothing_had_happened(tmp_path, fields):
    expected = [Run(device="cuda").train(0, end).state() for end in (3, 5)]
    fields = {**fields, "device": "cuda"}
    Run(tmp_path, **fields).train(0, 3).close()
    again = after_a_crash(tmp_path, **fields)
    assert again.resume() == {"step": 3}
    assert same(again.state(), expected[0])
    assert same(again.train(3, 5).state(), expected[1])
    again.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [(ON_DISK, ON_HOST), (ON_HOST, ON_DISK)],
    ids=["to the host", "to the disk"],
)
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
    monkeypatch.setattr(CommitLog, "commit", lambda *args, **kwargs: None)
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


@pytest.mark.parametrize("late", [False, True], ids=["before the switch", "after it"])
def test_an_interrupt_during_a_commit_waits_for_its_end(tmp_path, monkeypatch, late):
    expected = Run().train(0, 4).state()
    run = Run(tmp_path).train(0, 2)
    switch = run.commit_log.files.switch

    def interrupted(*content):
        if late:
            switch(*content)
        os.kill(os.getpid(), signal.SIGINT)
        if not late:
            switch(*content)

    with monkeypatch.context() as patch:
        patch.setattr(run.commit_log.files, "switch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.train(2, 3)
    run.optimizer.zero_grad()
    run.train(3, 4).close()
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 4}
    assert same(again.state(), expected)
    again.close()


def test_after_a_commit_that_failed_nothing_is_written_over_it(tmp_path, monkeypatch):
    run = Run(tmp_path).train(0, 2)

    def refused(directory):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("zcompile.runtime.io.files.Directory.sync", refused)  # the rename was well
    with pytest.raises(CommitFailed, match="step 3 may or may not have been committed"):
        run.train(2, 3)
    run.model.up.weight.data.mul_(2)
    with pytest.raises(CommitFailed):
        session_behind(run.model).drain()
    run.close()
    check_all(read_index(tmp_path)[0], [tmp_path])


@pytest.mark.parametrize(("call", "renamed"), [("open", False), ("rename", False), ("late", True)])
@pytest.mark.parametrize("before", [0, 2])
def test_a_commit_that_fails_says_whether_it_may_be_there(tmp_path, call, renamed, before):
    """It was made, or not, as `resume` tells; what was made before is there in any case."""
    failing = False

    def around(made, go):
        if failing and made.of is not None and made.of.name == "zinf.index.new":
            if call == "late" and made.name == "rename":
                go()  # and says that it was not made, as a server does that is asked twice
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if made.name == call:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return go()

    run = Run()
    offloaded(run.model, Border(around), disk=tmp_path, **ON_DISK)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    run.train(0, before)
    failing = True
    told = "may or may not have been" if renamed else "was not"
    with pytest.raises(CommitFailed, match=f"step {before + 1} {told} committed") as caught:
        run.train(before, before + 1)
    assert (caught.value.outcome_unknown, caught.value.last) == (renamed, before)
    run.close()
    again = after_a_crash(tmp_path)
    if step := before + renamed:
        assert again.resume() == {"step": step}
    else:
        with pytest.raises(NothingCommitted):
            again.resume()
    again.close()


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "bytes"])
def test_what_was_written_in_part_is_committed_whole(tmp_path, monkeypatch, blocks):
    if not blocks:
        monkeypatch.setattr("zcompile.runtime.tiers.disk.supports_direct", lambda directory: False)
    expected = Run().train(0, 2)
    run = Run(tmp_path).train(0, 2)
    for model in (expected.model, run.model):
        with torch.no_grad():
            model.up.weight[3].fill_(7)
            model.up.weight[:, 5] = -1
            model.down.weight[100:150].mul_(1 / 3)  # every byte of it is another
    zcompile.save(tmp_path, run.model, run.optimizer)
    run.close()
    check_all(read_index(tmp_path)[0], [tmp_path])
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2}
    assert same(again.state()[:-1], expected.state()[:-1])
    again.close()


def test_what_is_blank_on_the_host_stays_so_in_a_commit(tmp_path, monkeypatch):
    """Pieces of any size are written where no disk asks for blocks; each must end where it ends."""
    monkeypatch.setattr("zcompile.runtime.tiers.disk.supports_direct", lambda directory: False)
    plainly = Run().train(0, 1)
    run = Run(tmp_path, **ON_HOST).train(0, 1)
    for one in (plainly, run):
        state = one.optimizer.state[one.model.up.weight]["exp_avg"]
        state.zero_()
        state[1, 3:5].fill_(7)
        state[50:90].fill_(8)
        state[-1, -100:].fill_(9)
    assert not state.entry.place.written.covers(0, state.entry.nbytes)
    zcompile.save(tmp_path, run.model, run.optimizer)
    run.close()
    check_all(read_index(tmp_path)[0], [tmp_path])
    again = after_a_crash(tmp_path, **ON_HOST)
    again.resume()
    assert same(again.state()[:-1], plainly.state()[:-1])
    again.close()


@pytest.mark.parametrize("fields", [ON_DISK, ON_HOST], ids=["disk", "host"])
def test_what_does_not_change_is_not_written_again(tmp_path, fields):
    run = Run(tmp_path, **fields)
    run.model.down.requires_grad_(False)
    run.train(0, 3)
    rows = {tensor.name: tensor.step for tensor in read_index(tmp_path)[0].tensors}
    assert rows["model.up.weight"] == 3
    assert rows["model.down.weight"] == 1
    if fields is ON_DISK:  # what is small and rests on the host goes into each index
        assert rows["model.down.bias"] == 1
    run.close()


def test_what_does_not_change_needs_no_second_place(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.model.up.requires_grad_(False)
    run.train(0, 2)
    small = 64 * KiB
    changing = run.model.down.weight.entry.nbytes * 3 + small  # with both states of AdamW
    used = run.commit_log.tier.usage()[1]
    monkeypatch.setattr(run.commit_log.tier, "usage", lambda: ("disk", used, used + changing))
    run.train(2, 3).close()


def test_a_tensor_with_two_names_that_share_bytes_comes_back_under_both(tmp_path):
    for begin in (0, 1):
        run = Run(tmp_path)
        run.model.register_buffer("head", run.model.up.weight.detach()[:50])
        if begin:
            assert run.resume() == {"step": 1}
            assert torch.equal(plain(run.model.head), plain(run.model.up.weight)[:50])
        run.train(begin, begin + 1).close()


@pytest.mark.parametrize("fields", [ON_DISK, ON_HOST], ids=["disk", "host"])
def test_space_is_twice_what_changes_and_does_not_grow(tmp_path, fields):
    run = Run(tmp_path, **fields).train(0, 2)
    before = (tmp_path / "zinf.tier").stat().st_size
    run.train(2, 9)
    assert (tmp_path / "zinf.tier").stat().st_size == before
    named = read_index(tmp_path)[0].nbytes
    assert run.commit_log.tier.usage()[1] <= 2 * named + 4096
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


@pytest.mark.parametrize("tiered", [False, True], ids=["plain", "offloaded elsewhere"])
def test_a_commit_is_a_checkpoint_for_models_that_rest_elsewhere(tmp_path, tiered):
    disk, other = tmp_path / "disk", tmp_path / "other"
    for path in (disk, other):
        path.mkdir()
    expected = [Run().train(0, end).state() for end in (2, 3)]
    Run(disk).train(0, 2).close()
    run = Run(other if tiered else None, durable=False)
    assert zcompile.resume(disk, run.model, run.optimizer) == {"step": 2}
    assert same(run.state(), expected[0])
    assert same(run.train(2, 3).state(), expected[1])
    assert sorted(path.name for path in disk.iterdir()) == ["zinf.index", "zinf.tier"]
    if tiered:
        run.close()


def test_a_commit_is_read_on_the_host_wherever_new_tensors_are_made(tmp_path):
    expected = Run(tmp_path).train(0, 2)
    state = expected.state()[:-1]
    expected.close()
    other = Run()
    other.disk = tmp_path
    with made_on("meta"):
        other.resume()
    assert same(other.state()[:-1], state)


def test_a_commit_of_a_machine_without_xxhash_is_copied_and_summed_anew(tmp_path, monkeypatch):
    expected = Run().train(0, 3).state()
    with monkeypatch.context() as bare:
        for module in ("index", "commit", "tier"):
            bare.setattr(f"zcompile.runtime.durable.{module}.BEST", "crc32")
        Run(tmp_path).train(0, 2).close()
    assert {tensor.sum for tensor in read_index(tmp_path)[0].tensors} == {"crc32"}
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2}
    assert same(again.train(2, 3).state(), expected)
    again.close()
    index, _ = read_index(tmp_path)
    assert "crc32" not in {tensor.sum for tensor in index.tensors}
    check_all(index, [tmp_path])
