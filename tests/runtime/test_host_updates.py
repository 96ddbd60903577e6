"""Updates that the host computes where they rest: nobody can tell but by what moves.

Plans that are forced to have them train beside plain PyTorch, whose bits they are.
"""

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from between_steps import FIRST
from held_updates import arrived, in_flight, late
from host_runs import Pair, let_host_update_all, streaming, trained_pair
from lagging import lagging
from planned_runs import PLANNED, ids, loss_of, offloaded
from sampled import sampled

import zcompile
from zcompile.errors import ParameterChanged, UpdateBroken
from zcompile.ir import optimizer_step
from zcompile.ir.schedule import Run
from zcompile.ir.types import EntryKind
from zcompile.ir.units import KiB
from zcompile.planner.host_step import order_of_need
from zcompile.runtime import executor, relocate
from zcompile.runtime.executor import _Call
from zcompile.runtime.host_updates import HostWalk
from zcompile.runtime.tiers import host as host_tier
from zcompile.runtime.transfer.host_work import HostLane, HostUse, HostWork


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    let_host_update_all(monkeypatch)


@pytest.fixture(scope="module")
def shared():
    """A run of AdamW under a plan, for the tests after which it can go on."""
    with pytest.MonkeyPatch.context() as patched:
        let_host_update_all(patched)
        with trained_pair(adamw) as pair:
            yield pair


adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)
OPTIMIZERS = {
    "AdamW, fused": adamw,
    "AdamW, as lists of ops": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "Adam, fused, amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, fused=True),
    "Adam, op by op, with decay": partial(
        torch.optim.Adam, lr=1e-2, foreach=False, weight_decay=0.1
    ),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "Nesterov, which writes gradients": partial(
        torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, foreach=True
    ),
    "a learning rate that is a tensor": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(1e-2), fused=True
    ),
    "groups": lambda params: torch.optim.AdamW(
        [{"params": params[:4], "lr": 1e-3}, {"params": params[4:], "weight_decay": 0.0}],
        lr=1e-2,
        fused=True,
    ),
}


# Of one run, one after the other: whoever compiles anew lets what was compiled be forgotten.


@pytest.mark.slow
def test_without_clipping_and_under_a_schedule_of_rates(shared):
    rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in shared.optimizers]
    for _ in range(2):
        shared.step(clip=False)
        for rate in rates:
            rate.step()
    assert shared.equal()


def test_a_scaled_gradient_is_read_and_scaled_no_further(shared):
    """A gradient that is clipped and outlives the step is scaled once, as in eager."""
    for (model, forward), optimizer in zip(
        ((shared.plain, shared.plain), (shared.model, shared.compiled)),
        shared.optimizers,
        strict=True,
    ):
        loss_of(forward, ids(50)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        before = shared.on_host
        optimizer.step()
    assert shared.on_host > before
    for mine, plain in zip(shared.model.parameters(), shared.plain.parameters(), strict=True):
        assert torch.equal(mine.grad.on_host(), plain.grad)
    for optimizer in shared.optimizers:
        optimizer.zero_grad()


def test_over_the_bus_goes_no_state(shared):
    """Of a step only gradients leave the device, and nothing comes to it."""
    plan = shared.session.controller.plan
    (call,) = (c for c in plan.step.calls if c.schedule.rows)
    moved = {x.name for x in call.schedule.effects if x.is_transfer}
    on_host = {plan.step.facts[ref].name for ref in plan.on_host}
    assert len(on_host) > 3
    assert not any(name.startswith(n) for name in moved for n in on_host)
    zcompile.stats(shared.model, reset=True)
    shared.step(3)
    sent = zcompile.stats(shared.model)["bytes"]["d2h"]
    assert sent <= 3 * sum(p.nbytes for p in shared.model.parameters())


def test_without_a_wish_the_device_computes_all(shared):
    updates = shared.session.host_updates
    wanted, order = updates.wanted, updates._order
    updates.want(frozenset())
    shared.session.forget_steps()
    before = shared.on_host
    shared.step()
    assert shared.on_host == before
    assert shared.equal()
    updates.want(wanted, order)
    shared.session.forget_steps()
    shared.step()
    assert shared.on_host > before


def test_nothing_keeps_what_was_lent(shared):
    shared.step()
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) in (_Call, HostWalk)]


def read_in_a_thread(pair):
    threads = [
        threading.Thread(target=param.on_host, daemon=True) for param in pair.model.parameters()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


WAITING = {
    "a parameter is read": lambda pair: [p.on_host() for p in pair.model.parameters()],
    "a thread reads": read_in_a_thread,
    "all is waited for": lambda pair: pair.session.drain(),
    "dead gradients are": lambda pair: pair.session._mover.wait_for_dead(
        next(iter(pair.model.parameters())).entry.place.tier
    ),
}


@pytest.mark.timeout(100)
@pytest.mark.parametrize("way", WAITING)
def test_code_in_the_midst_of_a_region_may_wait_for_rows(monkeypatch, shared, way):
    """As a handler of a signal, or an op in Python, may: the row that is needed last is in flight
    until the first region of the forward is computed, which takes the cores."""
    begin, compute, held, seen = HostLane.begin, executor.compute, [], []
    come = threading.Event()
    updates = shared.session.host_updates
    updates.want(updates.wanted, order_of_need(shared.session.controller.plan.step))
    last = max(map(updates.urgency, updates.wanted))

    def begins(lane, work, error):
        if not seen and work.urgency == last:
            held.append((lane, work, error))
            come.set()
        else:
            begin(lane, work, error)

    def computes(run, values, targets=()):
        if not seen and held:
            assert not shared.session.device.cores.take_at_once()
            seen.append(run)
            for each in held:
                begin(*each)
            WAITING[way](shared)
            assert all(use.done() for _, work, _ in held for use in work.uses)
        compute(run, values, targets)

    monkeypatch.setattr(HostLane, "begin", begins)
    shared.session.drain()
    shared.step()
    come.wait()  # its gradient has
    monkeypatch.setattr(executor, "compute", computes)
    for forward in (shared.plain, shared.compiled):
        loss_of(forward, ids(90)).backward()
    assert seen
    for optimizer in shared.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert shared.equal()


@pytest.mark.timeout(100)
def test_whoever_asks_waits_for_the_thread_of_the_lane(monkeypatch, shared):
    """As `test_host_updates_beside.py` has it, where rows are computed in the thread that asks.

    A transfer's thread that waits within a step lets rows be computed, too: steps are made until
    one has left some."""
    late(monkeypatch)
    sides = list(zip((shared.plain, shared.model), shared.optimizers, strict=True))
    for between in FIRST:
        shared.step()
        while not in_flight(shared.session):
            shared.step()
        found = [between(model, optimizer) for model, optimizer in sides]
        assert found[0] == found[1], between.__name__
    shared.step(2)
    shared.session.drain()
    assert shared.equal()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU flushes none")
def test_denormal_numbers_are_flushed_where_the_program_flushes_them(shared, one_thread):
    """That is a mode of each thread, which those that torch shares an op out to do not have. Of a
    tiny gradient, the square is a denormal number, and kept when it is no longer flushed."""
    kept = []
    for flushes in (True, False):
        before = shared.on_host
        torch.set_flush_denormal(flushes)
        try:
            for (model, forward), optimizer in zip(
                ((shared.plain, shared.plain), (shared.model, shared.compiled)),
                shared.optimizers,
                strict=True,
            ):
                loss_of(forward, ids(95)).backward()
                for param in model.parameters():
                    param.grad.fill_(1e-20)
                    optimizer.state[param]["exp_avg_sq"].zero_()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_flush_denormal(False)
        assert shared.on_host > before
        assert shared.equal()
        states = [shared.optimizers[0].state[p]["exp_avg_sq"] for p in shared.plain.parameters()]
        kept.append(any(bool(state.view(torch.int32).any()) for state in states))
    assert kept == [False, True]


# Each of a run of its own.


@pytest.mark.parametrize(
    "name", sampled(OPTIMIZERS, "AdamW, fused", "Nesterov, which writes gradients")
)
def test_the_bits_are_eagers(name):
    with trained_pair(OPTIMIZERS[name]) as pair:
        before = pair.on_host
        pair.step(2)
        assert pair.on_host > before
        assert pair.equal()


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_of_losses_unscales_and_skips(fused):
    with trained_pair(partial(torch.optim.AdamW, lr=1e-2, fused=fused, foreach=not fused)) as pair:
        sides = ((pair.plain, pair.plain), (pair.model, pair.compiled))
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
        for number in range(3):
            for (model, forward), optimizer, scaler in zip(
                sides, pair.optimizers, scalers, strict=True
            ):
                scaler.scale(loss_of(forward, ids(60 + number))).backward()
                if number == 1:
                    next(iter(model.parameters())).grad.mul_(float("inf"))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert pair.equal()
        assert scalers[0].get_scale() == scalers[1].get_scale()


def test_what_rests_elsewhere_goes_through_the_device(tmp_path):
    """The plan is a wish: a row of which an operand was moved since is computed as ever."""
    with trained_pair(adamw, disk=tmp_path / "tier") as pair:
        updates, session = pair.session.host_updates, pair.session
        weight, state = next(
            (p, pair.optimizers[1].state[p]["exp_avg"])
            for p in pair.model.parameters()
            if p.entry.ref in updates.wanted
        )
        assert {weight.entry.home, state.entry.home} == {"host"}
        before = pair.on_host
        pair.step()
        all_of_them = pair.on_host - before
        assert relocate.move(session, state.entry, "disk")
        assert weight.entry.ref in updates.wanted
        before = pair.on_host
        pair.step()
        assert state.entry.home == "disk"
        assert pair.on_host - before == all_of_them - 1
        assert pair.equal()


@pytest.mark.slow
def test_entries_that_lie_in_several_blocks(monkeypatch):
    """As on CUDA, where the host's memory is made block by block."""
    monkeypatch.setattr(host_tier, "BLOCK_BYTES", 5 * KiB)
    whole = host_tier.HostTier.__init__

    def in_blocks(self, *given, **named):
        whole(self, *given, **{**named, "whole": False})

    monkeypatch.setattr(host_tier.HostTier, "__init__", in_blocks)
    lent = []
    lend = HostUse.lend

    def lends(self):
        made = lend(self)
        lent.append(len(made.parts))
        return made

    monkeypatch.setattr(HostUse, "lend", lends)
    with trained_pair(adamw) as pair:
        pair.step(2)
        assert pair.equal()
        assert max(lent) > 1


@pytest.mark.slow
def test_a_narrow_copy_is_made_on_the_host_too():
    """Under autocast: forward and backward bring the copy, which the host writes along."""

    def step(forward, optimizer, number):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(forward, ids(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    pair = Pair(adamw)
    for number in range(PLANNED + 3):
        step(pair.plain, pair.optimizers[0], number)
        step(pair.compiled, pair.optimizers[1], number)
    assert pair.on_host > 0
    assert pair.equal()
    zcompile.close(pair.model)


def test_copies_that_lag_behind_the_host_are_waited_for(monkeypatch):
    """Gradients arrive, for all that the host knows, when it waits for them, and not before."""
    lagging(monkeypatch)
    with trained_pair(adamw, throttle={}) as pair:
        before = pair.on_host
        pair.step(2)
        assert pair.on_host > before
        assert pair.equal()


def test_the_budgets_hold():
    with trained_pair(adamw, host_memory="4MiB") as pair:
        zcompile.stats(pair.model, reset=True)
        pair.step(2)
        peak = zcompile.stats(pair.model)["peak"]
        assert peak["host"] <= 4 * 1024 * KiB
        assert peak["together"] <= pair.session.device_budget


def test_a_row_that_fails_names_its_parameter(monkeypatch):
    """It fails when its step is over: whoever uses its parameter or states is told, the others are
    updated."""
    with trained_pair(adamw) as pair:
        failing = []
        compute = HostWalk.compute

        def fails(self, run, values):
            if len(failing) == 1:
                run = Run(fail_region(run.region), run.inputs, run.outputs)
            failing.append(run)
            compute(self, run, values)

        def fail_region(region):
            def call(*values):
                raise RuntimeError("out of luck")

            return replace(region, call=call)

        loss_of(pair.compiled, ids(70)).backward()
        monkeypatch.setattr(HostWalk, "compute", fails)
        loss_of(pair.plain, ids(70)).backward()
        for optimizer in pair.optimizers:
            optimizer.step()
        monkeypatch.undo()
        refused = {}
        for name, param in pair.model.named_parameters():
            try:
                value = param.on_host()
            except UpdateBroken as error:
                refused[name] = error
                continue
            assert torch.equal(value, pair.plain.get_parameter(name))
        ((name, error),) = refused.items()
        assert error.name == name
        assert f"{name!r} by optimizer step {pair.number} broke off" in str(error)
        assert "RuntimeError: out of luck" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
        param = pair.model.get_parameter(name)
        for state in ("exp_avg", "exp_avg_sq"):
            with pytest.raises(UpdateBroken, match=name):
                pair.optimizers[1].state[param][state].on_host()
        assert torch.isfinite(param.grad.on_host()).all()
        with pytest.raises(UpdateBroken, match=name):
            loss_of(pair.compiled, ids(71))
        with pytest.raises(UpdateBroken, match=name):
            pair.optimizers[1].step()


@pytest.mark.parametrize("chunk", sampled([0, 1], 0))
def test_a_row_of_which_a_chunk_was_written_breaks_off_wherever_the_call_fails(monkeypatch, chunk):
    """Where nothing was written the error is what it is, and the step can be repeated."""
    monkeypatch.setattr(optimizer_step, "HOST_CHUNK_BYTES", 4 * KiB)
    with trained_pair(adamw) as pair:
        lend, lends = HostWalk.lend, Counter()

        def fails(self, borrow):
            entry = self._entries[borrow.entry]
            if entry.kind is EntryKind.PARAM and entry.nbytes > 4 * KiB:
                if lends[entry.name] == chunk:
                    lends[entry.name] += 1
                    raise RuntimeError("nothing to lend")
                lends[entry.name] += 1
            lend(self, borrow)

        loss_of(pair.compiled, ids(70)).backward()
        monkeypatch.setattr(HostWalk, "lend", fails)
        with pytest.raises(RuntimeError, match="nothing to lend") as caught:
            pair.optimizers[1].step()
        monkeypatch.undo()
        ((name, _),) = lends.items()
        param = dict(pair.model.named_parameters())[name]
        state = pair.optimizers[1].state[param]["exp_avg"]
        if chunk:
            assert isinstance(caught.value, UpdateBroken)
            assert caught.value.name == name
            for tensor in (param, state):
                with pytest.raises(UpdateBroken, match=name):
                    tensor.on_host()
            with pytest.raises(UpdateBroken, match=name):
                pair.optimizers[1].step()
        else:
            assert not isinstance(caught.value, UpdateBroken)
            assert torch.isfinite(param.on_host()).all()
            assert torch.isfinite(state.on_host()).all()


@pytest.mark.timeout(100)
def test_a_store_is_closed_while_a_row_is_computed(monkeypatch):
    """It is waited for; those behind it are not computed, and whoever asks is told why."""
    begun, go, ran, run = threading.Event(), threading.Event(), [], HostWork.run

    def waits(work, cores):
        ran.append(work)
        begun.set()
        go.wait()
        run(work, cores)

    class Stopping:
        """The jobs of the lane, as the thread that stops it sees them."""

        def put(self, job):
            assert job is None
            jobs.put(job)
            go.set()  # the row goes on once the lane is told to end, and not before

        def get_nowait(self):
            return jobs.get_nowait()

    with trained_pair(adamw) as made:
        made.session.drain()
        monkeypatch.setattr(HostWork, "run", waits)
        made.step()
        begun.wait()
        arrived(made.session)
        lane = made.session._host_lane
        behind = [work for _, _, work in lane._ready]
        assert len(behind) > 3
        jobs = lane._workers._jobs
        monkeypatch.setattr(lane._workers, "_jobs", Stopping())
        param = next(iter(made.model.parameters()))
        zcompile.close(made.model)
        assert go.is_set()
        assert len(ran) == 1
        assert not any(use.home.error for use in ran[0].uses)
        assert all("closed" in str(use.home.error) for work in behind for use in work.uses)
        assert not any(thread.is_alive() for thread in lane._workers._threads)
        assert made.session.is_idle()
        with pytest.raises(ParameterChanged, match="closed"):
            param.on_host()


@pytest.mark.slow
def test_the_device_alone_where_it_is_asked_for():
    pair = Pair(adamw, updates="device").step(PLANNED + 1)
    assert pair.on_host == 0
    assert not pair.session.controller.plan.on_host
    assert pair.equal()
    zcompile.close(pair.model)


def test_a_durable_run_resumes_from_what_the_host_wrote(tmp_path):
    fields = {"disk": tmp_path / "run", "durable": True}
    with trained_pair(adamw, **fields) as pair:
        pair.step(2)
        assert pair.on_host > 0
        assert pair.equal()
    model, _ = offloaded(**streaming(), **fields)
    optimizer = adamw([*model.parameters()])
    zcompile.resume(tmp_path / "run", model, optimizer)
    mine = [p.on_host() for p in model.parameters()]
    assert all(map(torch.equal, mine, pair.plain.parameters()))
    states = [optimizer.state[p]["exp_avg_sq"].on_host() for p in model.parameters()]
    plain = [pair.optimizers[0].state[p]["exp_avg_sq"] for p in pair.plain.parameters()]
    assert all(map(torch.equal, states, plain))
    zcompile.close(model)
