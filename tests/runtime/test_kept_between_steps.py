"""What a step keeps for the next one, so that nothing is made anew, and what takes it back.

Views of what rests in the arena, the record of a step, whether all of it is alive, and what guards
are told of a parameter are kept as long as what they depend on is as it was.
"""

import gc
from types import SimpleNamespace

import pytest
import torch
from planned_runs import adamw, begun, gpt, ids, loss_of, same, train, values
from torch import nn

from zcompile.frontend.offload import session_behind
from zcompile.ir.schedule import Borrow, EntryIndex, Reduce, Register, Schedule
from zcompile.ir.types import HELD, EntryKind, EntryRef, Layout
from zcompile.ir.units import MiB
from zcompile.runtime.live_memory import InFlightGradients, LiveMemory
from zcompile.runtime.meter import Gauge
from zcompile.runtime.profile import Recorder
from zcompile.runtime.store import resident
from zcompile.runtime.transfer.ticket import Ready

FLOATS = Layout((64,), (1,), 0, torch.float32)
SERIAL = 7

# --- Views ---


@pytest.fixture
def store(open_store):
    store = open_store()
    store.homes.device.window_bytes = 1 * MiB
    return store


def near_entry(store, value):
    """An entry of 64 floats with a berth of its own on the device."""
    ref = EntryRef(1000 + len(store._entries)).gradient
    assert store.homes.device.plan(ref, "w", 256)
    entry = store.create("w.grad", EntryKind.GRAD, 256, of=ref.number)
    resident.put(store, entry, torch.full((64,), value).view(torch.uint8), 0, ())
    return entry


def lent(store, entry, borrow):
    (view,) = resident.resident_views(store, [entry]).views([borrow], SERIAL)
    return view


def borrowing(layout=FLOATS, writes=False):
    return Borrow(EntryIndex(0), 0, layout, Register(0), writes)


def test_the_next_call_is_lent_what_the_last_one_was(store, monkeypatch):
    entry, borrow = near_entry(store, 3.0), borrowing(writes=True)
    first, version = lent(store, entry, borrow), entry.version
    monkeypatch.setattr(store.arena, "view", lambda *how: pytest.fail("it was viewed before"))
    assert lent(store, entry, borrow) is first
    assert entry.version == version + 1


def test_what_was_moved_is_viewed_anew(store):
    entry, other, borrow = near_entry(store, 3.0), near_entry(store, 5.0), borrowing()
    assert lent(store, entry, borrow).tolist() == [3.0] * 64
    entry.place.rest(other.place.tier, other.place.extent)
    assert lent(store, entry, borrow).tolist() == [5.0] * 64


def test_another_borrow_of_the_same_bytes_is_viewed_anew(store):
    entry = near_entry(store, 3.0)
    assert lent(store, entry, borrowing()).shape == (64,)
    assert lent(store, entry, borrowing(Layout((8, 8), (8, 1), 0, torch.float32))).shape == (8, 8)


def test_a_closed_arena_keeps_no_view(store):
    entry, borrow = near_entry(store, 3.0), borrowing()
    lent(store, entry, borrow)
    assert store.arena.views_of(SERIAL, 1) != [None]
    store.arena.close()
    assert store.arena.views_of(SERIAL, 1) == [None]


def test_what_stays_beside_the_arena_is_not_kept(store):
    held = store.homes.held
    extent = held.take(torch.full((64,), 3.0), "w.grad")
    assert held.view(extent, 0, FLOATS) is held.view(extent, 0, FLOATS)
    assert held.view(extent, 128, Layout((32,), (1,), 0, torch.float32)).tolist() == [3.0] * 32
    assert not held.in_arena
    held.release(extent)
    assert held.usage() == ("held", 0, 0)


# --- The record of a step ---


def noted(recorder, *calls):
    for schedule, entries in calls:
        recorder.note(schedule, entries)
    recorder.stepped()
    return recorder.end()


def test_a_step_like_the_last_one_is_the_same_record(trained):
    forward, backward, entries = trained
    recorder = Recorder()
    recorder.start()
    first = noted(recorder, (forward, entries), (backward, entries))
    assert noted(recorder, (forward, entries), (backward, entries)) is first
    assert noted(recorder, (forward, entries)) is not first
    again = noted(recorder, (forward, entries), (backward, entries))
    assert again is not first
    assert (again.calls, again.facts) == (first.calls, first.facts)


def test_an_entry_that_becomes_something_else_is_recorded_anew(trained):
    forward, backward, entries = trained
    recorder = Recorder()
    recorder.start()
    first = noted(recorder, (forward, entries), (backward, entries))
    entries[0].kind = EntryKind.STATE
    other = noted(recorder, (forward, entries), (backward, entries))
    assert other is not first
    assert other.facts[entries[0].ref].kind is EntryKind.STATE
    entries[0].kind = EntryKind.PARAM


@pytest.fixture(scope="module")
def planned():
    """A model that rests on the device, in the middle of its training, and plain PyTorch beside:
    of each a model, how it is called, and its optimizer."""
    plain = gpt()
    optimizer = adamw(plain)
    train(plain, plain, optimizer, 0, 4)
    return begun(4, device_memory="16MiB"), (plain, plain, optimizer)


@pytest.fixture
def trained(planned):
    """Forward and backward of a model, and their entries."""
    (model, _, _), _ = planned
    walked = session_behind(model).controller._base
    forward, backward = (call.schedule for call in walked.calls[:2])
    alive = {entry.ref: entry for entry in session_behind(model).entries()}
    return forward, backward, [alive[ref] for ref in walked.calls[0].entries]


# --- Gradients that stay ---


def in_flight():
    gauge = Gauge()
    live = LiveMemory(gauge)
    return gauge, live, InFlightGradients(live)


def test_a_gradient_that_stays_counts_as_if_it_was_sent():
    """`stays` is `expect`, `note` and `sent` in one."""
    levels = []
    for at_once in (False, True):
        gauge, live, flying = in_flight()
        grads, seen = [torch.ones(16) for _ in range(3)], []
        for grad in grads:
            (rows,) = live.exchange((), [grad])
            if at_once:
                flying.make_way(64, 128)
                flying.stays(64, grad, rows, Ready())
            else:
                flying.expect(64, 128)
                flying.note(grad, Ready())
                flying.sent(64, rows, stays=True)
            seen.append((gauge.now, flying.exceeds(64, 128), flying.exceeds(1, 128)))
        flying.wait_down_to()
        seen.append((gauge.now, flying.exceeds(64, 128)))
        del grad
        grads.clear()
        seen.append(live.nbytes)
        levels.append(seen)
    assert levels[0] == levels[1]
    assert levels[0][-2:] == [(192, False), 0]


def test_gradients_that_stay_are_taken_together_where_nothing_is_between_them():
    rows = [
        Reduce(Register(n), EntryIndex(n), nbytes=64, stays=n != 2, of_nbytes=128 * (n == 5))
        for n in range(9)
    ]
    found = Schedule.staying_runs.func(SimpleNamespace(instructions=rows))
    assert {at: [r.entry for r in run] for at, run in found.items()} == {
        0: [0, 1],
        3: [3, 4],
        6: [6, 7, 8],
    }


# --- Whatever happens between two steps ---


def usual(model, call, optimizer, tokens):
    loss_of(call, tokens).backward()


def read(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    assert float(model.head.weight.grad.abs().sum()) > 0


def keep_gradients(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    usual(model, call, optimizer, tokens)


def two_batches(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    usual(model, call, optimizer, tokens.flip(1))


def some_inputs(model, call, optimizer, tokens):
    loss_of(call, tokens).backward(inputs=[model.head.weight, model.norm.weight])


def replaced(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    model.norm.weight.grad = torch.ones(model.norm.weight.shape)


def left_out(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    model.norm.weight.grad = None


def evaluated(model, call, optimizer, tokens):
    with torch.inference_mode():
        loss_of(call, tokens)
    usual(model, call, optimizer, tokens)
    with torch.no_grad():
        loss_of(call, tokens.flip(1))


def hooked(model, call, optimizer, tokens):
    taken = model.norm.weight.register_hook(lambda grad: grad * 2)
    usual(model, call, optimizer, tokens)
    taken.remove()


def written(model, call, optimizer, tokens):
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    usual(model, call, optimizer, tokens)


def withdrawn(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    if hasattr(model.norm.weight, "entry"):
        session_behind(model).controller.withdraw()


def other_optimizer(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    optimizer.state.clear()


def frozen(model, call, optimizer, tokens):
    model.norm.weight.requires_grad_(False)
    usual(model, call, optimizer, tokens)


def thawed(model, call, optimizer, tokens):
    model.norm.weight.requires_grad_()
    usual(model, call, optimizer, tokens)


def new_data(model, call, optimizer, tokens):
    model.norm.weight.data = torch.full(model.norm.weight.shape, 0.5)
    usual(model, call, optimizer, tokens)


def node_hooked(model, call, optimizer, tokens):
    weight = model.norm.weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    taken = node.register_hook(lambda given, made: None)
    usual(model, call, optimizer, tokens)
    taken.remove()


QUICK = (
    *(read, keep_gradients, two_batches, some_inputs),
    *(replaced, left_out, evaluated, hooked, written, other_optimizer, withdrawn),
)


def same_after_each(planned, changes):
    (model, _, _), (plain, _, _) = planned
    for number, change in enumerate(changes):
        for after, happens in enumerate((change, usual, usual)):
            for net, call, optimizer in planned:
                happens(net, call, optimizer, ids(100 + 10 * number + after))
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            assert same(model, values(plain)), (change.__name__, after)


def test_what_happens_between_steps_is_seen_by_the_next(planned):
    """Each change comes to a step of which all was kept, and two that are as before follow."""
    same_after_each(planned, QUICK)


@pytest.mark.slow  # it is traced anew for each
def test_a_parameter_that_becomes_another_is_seen_by_the_next_step(planned):
    same_after_each(planned, (frozen, thawed, new_data, node_hooked))


def test_a_step_of_a_plan_in_force_keeps_all_of_it(planned, monkeypatch):
    """What this file is about, as long as nothing changes."""
    (model, _, _), _ = planned
    same_after_each(planned, (usual, usual))  # the plan is in force again
    session = session_behind(model)
    seen = [session.controller._last]
    looked_at = type(session).entries

    def others_only(self):
        """A session that an earlier test of this process left alive may be looked at."""
        return pytest.fail("looked at again") if self is session else looked_at(self)

    monkeypatch.setattr(type(session), "entries", others_only)
    for _ in range(3):
        same_after_each(planned, (usual,))
        seen.append(session.controller._last)
    assert all(step is seen[0] for step in seen)


def test_gradients_of_which_one_cannot_be_wrapped_leave_nothing(monkeypatch):
    """Their entries are made before: those that no tensor owns yet die as well."""
    model, compiled, optimizer = begun(4, layers=1, device_memory="16MiB")
    session = session_behind(model)
    on_device = session.gradients.on_device
    wrap, made = on_device._wrap, []

    def fails(entry, layout):
        made.extend([entry.key] if entry.home == HELD else [])
        if len(made) == 2:
            raise MemoryError
        return wrap(entry, layout)

    before = {entry.key for entry in session.entries()}
    monkeypatch.setattr(on_device, "_wrap", fails)
    with pytest.raises(MemoryError):
        loss_of(compiled, ids(3)).backward()
    monkeypatch.undo()
    optimizer.zero_grad()
    gc.collect()
    session.enter("")  # frees what has died
    assert {entry.key for entry in session.entries()} == before


def test_a_step_whose_states_have_died_is_no_step_to_plan_for(planned):
    (model, compiled, _), _ = planned
    same_after_each(planned, (usual, usual))
    for _, _, optimizer in planned:
        optimizer.state.clear()
    loss_of(compiled, ids(1))  # another step begins, and the one that has ended is looked at
    session = session_behind(model)
    assert session.controller._last.lasting <= {entry.ref for entry in session.entries()}
    same_after_each(planned, (usual,))


def test_guards_are_told_whether_a_parameter_is_trained_now(planned):
    (model, _, _), _ = planned
    weight = model.norm.weight
    told = weight.__tensor_flatten__()[1]
    assert weight.__tensor_flatten__()[1] is told
    weight.requires_grad_(False)
    assert (told.requires_grad, weight.__tensor_flatten__()[1].requires_grad) == (True, False)
    weight.requires_grad_()
    assert weight.__tensor_flatten__()[1] is told
