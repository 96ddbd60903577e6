"""What a step keeps for the next one, so that nothing is made anew, and what takes it back.

Views of what rests in the arena, the record of a step, whether all of it is alive, what guards are
told of a parameter, and the operands of an optimizer are kept as long as what they depend on is as
it was.
"""

import ast
import copy
import gc
import inspect
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from planned_runs import THROTTLE, adamw, begun, gpt, ids, loss_of, same, train, values
from torch import nn

import zcompile
from zcompile.frontend import optimizer_hooks
from zcompile.frontend.offload import session_behind
from zcompile.ir.optimizer_step import StepRoom
from zcompile.ir.schedule import Borrow, Cast, EntryIndex, Reduce, Register, Schedule
from zcompile.ir.types import HELD, EntryKind, EntryRef, Layout
from zcompile.ir.units import MiB
from zcompile.runtime.changes import CHANGES
from zcompile.runtime.durable.recover import _rest_in
from zcompile.runtime.eager import repeats, tensor
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.live_memory import InFlightGradients, LiveMemory
from zcompile.runtime.meter import Gauge
from zcompile.runtime.profile import Recorder
from zcompile.runtime.relocate import move
from zcompile.runtime.store import resident
from zcompile.runtime.store.store import NEVER, Entry, call_key
from zcompile.runtime.tiers.base import Place
from zcompile.runtime.tiers.extents import WrittenRanges
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


# --- The mark that all of it is kept by ---


def lasting_entry(store):
    """A parameter of 64 floats that rests on the device."""
    ref = EntryRef(1000 + len(store._entries))
    assert store.homes.device.plan(ref, "w", 256)
    place = store.homes.reserve("w", EntryKind.GRAD, 256, ref)
    entry = store.create("w", EntryKind.PARAM, 256, at=place)
    resident.put(store, entry, torch.full((64,), 3.0).view(torch.uint8), 0, ())
    return entry


def called_with(store, entry):
    """What a call is lent that takes one entry, and no other call knows."""
    views = resident.resident_views(store, [entry], SERIAL)
    return views, views.views([borrowing(writes=True)], SERIAL)[0]


EVENTS = {
    "it moves": lambda s, e: e.place.rest(e.place.tier, e.place.extent),
    "its name": lambda s, e: e.rename("v"),
    "its kind": lambda s, e: e.become_state("v"),
    "a deferred change": lambda s, e: e.defer_only((SimpleNamespace(),)),
    "something waits": lambda s, e: e.wait_for(SimpleNamespace(settle=lambda: None)),
    "it rests narrow": lambda s, e: e.rest_narrow(Cast(torch.float32, torch.float16)),
    "a copy": lambda s, e: e.keep_copy(torch.float16, e),
    "no copy": lambda s, e: s.drop_copies(e),
    "blank again": lambda s, e: s._mover.mark_blank(e.place),
    "closed": lambda s, e: s.arena.close(),
    "an end": lambda s, e: s._mover.close(OSError()),
    "a failure": lambda s, e: s._mover.abandon(OSError()),
}


@pytest.mark.parametrize("event", EVENTS)
def test_whatever_happens_to_an_entry_that_lasts_gives_a_new_mark(store, event):
    entry = lasting_entry(store)
    mark = CHANGES.mark
    EVENTS[event](store, entry)
    assert CHANGES.mark is not mark


def test_a_transfer_gives_none(store):
    entry = store.create("w", EntryKind.PARAM, 256, tier="host")
    slot, mark = store.arena.slot(0, 256), CHANGES.mark
    store.put(entry, slot).wait()
    store.fetch(entry, slot).wait()
    store.read(entry, torch.empty(256, dtype=torch.uint8)).wait()
    assert CHANGES.mark is mark


def test_a_blank_entry_gives_one_where_it_may_be_lent(store):
    near, far = lasting_entry(store), store.create("w", EntryKind.PARAM, 256, tier="host")
    for entry in (near, far):
        mark = CHANGES.mark
        store.zero(entry)
        assert (CHANGES.mark is not mark) == entry.on_device


@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_copy_that_is_made_anew_gives_none(store, tier):
    weight, copy = store.create("w", EntryKind.PARAM, 256, tier="host"), lasting_entry(store)
    if tier == "host":
        copy = store.create("w in bfloat16", EntryKind.COPY, 256, tier="host")
    weight.keep_copy(torch.bfloat16, copy)
    weight.copy_made(torch.bfloat16, weight.version)
    mark = CHANGES.mark
    assert weight.blank_copy(torch.bfloat16) is copy
    assert CHANGES.mark is mark
    assert weight.copies[torch.bfloat16] == (copy, NEVER)


def test_a_write_of_values_gives_none(store):
    entry = lasting_entry(store)
    mark = CHANGES.mark
    resident.put(store, entry, torch.zeros(64).view(torch.uint8), 0, ())
    entry.written()
    assert CHANGES.mark is mark


def test_every_attribute_of_an_entry_is_told_of_or_need_not_be():
    """A new attribute is of one of the two kinds; what is kept depends on those that are told."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(Entry.__init__))).body
    assigned = {
        target.attr
        for row in ast.walk(made)
        if isinstance(row, ast.Assign | ast.AnnAssign)
        for target in (row.targets if isinstance(row, ast.Assign) else [row.target])
    }
    told = {f"_{name}" for name, value in vars(Entry).items() if isinstance(value, property)}
    untold = {"key", "born", "partition", "store", "ref", "version", "owner", "shown"}
    untold |= {"copies", "whole", "norms", "tiles", "tie"}
    assert assigned == (told & assigned) | untold
    assert {f"_{name}" for name in ("kind", "nbytes", "place", "unset")} <= told & assigned
    assert {f"_{name}" for name in ("deferred", "waits", "sources", "narrow")} <= told & assigned


def test_the_next_call_does_not_look_at_what_lasts(store, monkeypatch):
    entry = lasting_entry(store)
    _, view = called_with(store, entry)
    version = entry.version
    monkeypatch.setattr(resident, "_extents_of", lambda store, entries: [None] * len(entries))
    again, same_view = called_with(store, entry)
    assert again.kept is not None
    assert same_view is view
    assert entry.version == version + 1


def test_a_call_with_another_entry_looks_at_it(store):
    entry, other = lasting_entry(store), lasting_entry(store)
    called_with(store, entry)
    other.ref = entry.ref
    called, view = called_with(store, other)
    assert called.kept is None
    assert view.data_ptr() != called_with(store, entry)[1].data_ptr()


def test_after_a_change_a_call_looks_again(store):
    entry = lasting_entry(store)
    called_with(store, entry)
    entry.wait_for(SimpleNamespace(settle=lambda: entry.wait_for(None)))
    called, view = called_with(store, entry)
    assert called.extents == [None]
    assert entry.waits is None
    assert view.tolist() == [3.0] * 64


def test_beside_what_is_kept_others_are_lent_by_the_views_of_the_last_call(store, monkeypatch):
    param, grad = lasting_entry(store), near_entry(store, 5.0)
    writing = replace(borrowing(), writes=True)
    borrows = [writing, replace(writing, entry=EntryIndex(1))]
    lent, kept, versions = [], [], []
    for _ in range(4):
        views = resident.resident_views(store, [param, grad], SERIAL)
        kept.append(views.kept is not None)
        lent.append(views.views(borrows, SERIAL))
        versions.append((param.version, grad.version))
        monkeypatch.setattr(store.arena, "view", lambda *how: pytest.fail("it was viewed before"))
    assert kept[1:] == [True] * 3
    assert all(one is first for views in lent for one, first in zip(views, lent[0], strict=True))
    first = versions[0]
    assert versions == [(first[0] + n, first[1] + n) for n in range(4)], "each writes, once a call"


def test_what_a_view_moves_is_viewed_anew(store):
    """To view one entry may have what waits settled, which moves others."""
    param, grad = lasting_entry(store), near_entry(store, 5.0)
    borrows = [borrowing(), replace(borrowing(), entry=EntryIndex(1))]
    for _ in range(2):
        views = resident.resident_views(store, [param, grad], SERIAL)
        views.views(borrows, SERIAL)
    assert views.kept is not None
    other = lasting_entry(store)
    resident.put(store, other, torch.full((64,), 7.0).view(torch.uint8), 0, ())

    def settled():
        grad.wait_for(None)
        param.place.rest(other.place.tier, other.place.extent)

    grad.wait_for(SimpleNamespace(settle=settled))
    views = resident.resident_views(store, [param, grad], SERIAL)
    assert views.kept is not None
    assert views.views(borrows, SERIAL)[0].tolist() == [7.0] * 64


def test_calls_are_known_by_what_lasts(store):
    """What was made for the call is another in the next one."""
    param, grads = lasting_entry(store), [near_entry(store, 1.0) for _ in range(2)]
    first, next_one = (call_key(SERIAL, [grad, param]) for grad in grads)
    assert first == next_one != call_key(SERIAL, [grads[0], lasting_entry(store)])
    assert call_key(SERIAL, grads[:1]) == call_key(SERIAL, grads[1:])


def test_of_calls_without_what_lasts_no_view_is_kept(store):
    lent(store, near_entry(store, 1.0), borrowing())
    assert not store.arena.lent


@pytest.fixture
def cleared(monkeypatch):
    """The marks at each moment when nothing of an entry holds a value any more."""
    marks, clear = [], WrittenRanges.clear

    def clears(self):
        clear(self)
        marks.append(CHANGES.mark)

    monkeypatch.setattr(WrittenRanges, "clear", clears)
    return marks


def test_while_an_entry_moves_it_is_known_to_hold_nothing(store, cleared, monkeypatch):
    """Who looks while its value is on its way keeps nothing of what was there."""
    entry, put, marks = lasting_entry(store), store.put, []

    def puts(*args, **kwargs):
        marks.append(CHANGES.mark)
        return put(*args, **kwargs)

    monkeypatch.setattr(store, "put", puts)
    assert move(store, entry, "host")
    assert len(cleared) == len(marks) == 1
    assert cleared[0] is not marks[0]


def test_what_a_commit_brings_is_looked_at_anew(store, cleared):
    entry = store.create("w", EntryKind.PARAM, 256)
    _rest_in(entry, entry.place.tier.reserve(256, "w"), ())
    assert len(cleared) == 1
    assert CHANGES.mark is not cleared[0]


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


def test_a_gradient_that_rests_otherwise_is_recorded_anew(trained, store):
    forward, _, entries = trained
    recorder = Recorder()
    recorder.start()
    grad, other = near_entry(store, 1.0), near_entry(store, 1.0)
    first = noted(recorder, (forward, [*entries, grad]))
    assert noted(recorder, (forward, [*entries, grad])) is first
    assert noted(recorder, (forward, [*entries, other])) is not first
    first = noted(recorder, (forward, [*entries, grad]))
    grad.place = Place(256, store.homes.held, grad.place.extent)
    assert noted(recorder, (forward, [*entries, grad])) is not first
    first = noted(recorder, (forward, [*entries, grad]))
    grad.place = Place(128, store.homes.held, grad.place.extent)
    assert noted(recorder, (forward, [*entries, grad])) is not first


@pytest.fixture(scope="module")
def planned():
    return planned_anew()


def planned_anew(**room):
    """A model that rests on the device, in the middle of its training, and plain PyTorch beside:
    of each a model, how it is called, and its optimizer."""
    plain = gpt()
    optimizer = adamw(plain)
    train(plain, plain, optimizer, 0, 4)
    return begun(4, **(room or {"device_memory": "16MiB"})), (plain, plain, optimizer)


@pytest.fixture(scope="module")
def streaming():
    """As `planned`, with room for a part: states stream, and some gradients are sent home."""
    return planned_anew(device_memory="160KiB", throttle=THROTTLE)


@pytest.fixture
def trained(planned):
    """Forward and backward of a model, and their entries."""
    (model, _, _), _ = planned
    walked = session_behind(model).controller._base
    forward, backward = (call.schedule for call in walked.calls[:2])
    alive = {entry.ref: entry for entry in session_behind(model).entries()}
    return forward, backward, [alive[ref] for ref in walked.calls[0].entries]


def test_a_call_of_other_sizes_is_recorded_anew(trained):
    forward, _, entries = trained
    recorder = Recorder()
    recorder.start()
    other = replace(forward, holds=replace(forward.holds, sizes=(*forward.holds.sizes, 3)))
    assert other.serial == forward.serial
    for schedule in (forward, other, forward):
        step = noted(recorder, (schedule, entries))
        assert step.calls[0].schedule is schedule


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


def test_what_fails_while_all_are_joined_counts_no_more():
    """The others are joined later, as those that are joined one by one."""

    class Failed:
        def join_compute(self):
            raise MemoryError

    gauge, _, flying = in_flight()
    for ticket in (Ready(), Failed(), Ready()):
        flying.expect(64, 1024)
        flying.note(torch.ones(16), ticket)
        flying.sent(64, ())
    with pytest.raises(MemoryError):
        flying.wait_down_to()
    assert (gauge.now, flying.exceeds(64, 127), flying.exceeds(64, 128)) == (64, True, False)
    flying.wait_down_to()
    assert (gauge.now, flying.exceeds(64, 64)) == (0, False)


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


def written_through_data(model, call, optimizer, tokens):
    model.head.weight.data.mul_(0.75)
    usual(model, call, optimizer, tokens)


def loaded(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    model.load_state_dict({name: 0.5 * v.detach() for name, v in model.state_dict().items()})


def updated_in_backward(model, call, optimizer, tokens):
    @torch.no_grad()
    def update(param):
        param.sub_(param.grad, alpha=0.1)

    taken = model.head.weight.register_post_accumulate_grad_hook(update)
    usual(model, call, optimizer, tokens)
    taken.remove()


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


# --- Whatever happens to an optimizer between two steps ---


def options(**changed):
    """The optimizer is given other options, which stay."""

    def happens(model, call, optimizer, tokens):
        usual(model, call, optimizer, tokens)
        for group in optimizer.param_groups:
            group.update(changed)

    happens.__name__ = str(changed)
    return happens


def one_group_more(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    moved = [model.norm.weight, model.norm.bias]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if not any(p is one for one in moved)]
    optimizer.add_param_group({"params": moved, "lr": 0.1})


def one_group_less(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    *_, last = optimizer.param_groups
    del optimizer.param_groups[1:]
    optimizer.param_groups[0]["params"] += last["params"]


def in_another_order(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    optimizer.param_groups[0]["params"].reverse()


def a_gradient_for_a_state(model, call, optimizer, tokens):
    """The state shows what was made as a gradient, and is one from here on."""
    usual(model, call, optimizer, tokens)
    weight = model.norm.weight
    state = optimizer.state[weight]["exp_avg"]
    state.data = weight.grad.data
    weight.grad = None
    optimizer.step()
    if hasattr(state, "entry"):
        assert state.entry.kind is EntryKind.STATE
    optimizer.state[weight]["exp_avg"] = state.clone()


def a_state_less(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    del optimizer.state[model.norm.weight]


def states_loaded(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def a_plain_state(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    optimizer.state[model.norm.weight]["exp_avg"] = torch.full(model.norm.weight.shape, 0.25)


def states_exchanged(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    state, a, b = optimizer.state, model.norm.weight, model.norm.bias
    state[a], state[b] = state[b], state[a]


def one_state_for_both(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    states = optimizer.state[model.norm.weight]
    states["exp_avg"] = states["exp_avg_sq"]
    optimizer.step()
    states["exp_avg"] = states["exp_avg_sq"].clone()


def a_state_of_its_own(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    states = optimizer.state[model.norm.weight]
    states["exp_avg"] = states["exp_avg"].clone()


def a_state_written(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    optimizer.state[model.norm.weight]["exp_avg"].mul_(3.0)


def a_state_assigned(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    states = optimizer.state[model.norm.weight]
    states["exp_avg"].data = torch.full(model.norm.weight.shape, 0.125)


def another_step(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    optimizer.state[model.norm.weight]["step"] = torch.tensor(40.0)


def one_gradient_for_two(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    model.norm.bias.grad = model.norm.weight.grad


def a_gradient_scaled(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    model.norm.weight.grad.mul_(0.5)


def gradients_exchanged(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    a, b = model.norm.weight, model.norm.bias
    a.grad, b.grad = b.grad, a.grad


def values_exchanged(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    a, b = model.norm.weight, model.norm.bias
    one, other = a.data.clone(), b.data.clone()
    a.data.copy_(other)
    b.data.copy_(one)


def a_second_optimizer(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()


def a_closure(model, call, optimizer, tokens):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(call, tokens)
        loss.backward()
        return loss

    optimizer.step(closure)


def hooks_of_steps(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)

    def before(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            group["lr"] *= 2

    def after(optimizer, args, kwargs):
        model.norm.weight.grad = None

    taken = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    optimizer.step()
    for hook in taken:
        hook.remove()


def states_told(model, call, optimizer, tokens):
    usual(model, call, optimizer, tokens)
    float(sum(v.float().sum() for s in optimizer.state.values() for v in s.values()))


def one_moved(model, call, optimizer, tokens):
    """A parameter and a state leave the device, as those that are evicted."""
    usual(model, call, optimizer, tokens)
    if hasattr(model.norm.weight, "entry"):
        session = session_behind(model)
        gone = model.norm.weight, optimizer.state[model.norm.weight]["exp_avg"]
        assert all([move(session, one.entry, "host") for one in gone])


OF_OPTIMIZERS = (
    *(options(lr=0.02), options(lr=torch.tensor(0.03)), options(lr=0.01)),
    *(options(betas=(0.8, 0.9)), options(weight_decay=0.1), options(maximize=True)),
    *(options(maximize=False), options(fused=False, foreach=True)),
    *(
        options(fused=True, foreach=False),
        one_group_more,
        one_group_less,
        in_another_order,
        a_state_less,
    ),
    *(states_loaded, a_plain_state, states_exchanged, one_state_for_both, a_state_of_its_own),
    *(a_state_written, a_state_assigned, another_step, one_gradient_for_two, a_gradient_scaled),
    *(gradients_exchanged, values_exchanged, a_second_optimizer, a_closure, hooks_of_steps),
    *(states_told, one_moved),
)

QUICK = (
    *(read, keep_gradients, two_batches, some_inputs),
    *(replaced, left_out, evaluated, hooked, written, other_optimizer, withdrawn),
    *(written_through_data, loaded, updated_in_backward),
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


@pytest.fixture
def seen(monkeypatch):
    """The list ops whose operands were kept; their operands are held only where `held` is a list,
    since gradients that somebody holds are sent away."""
    found, look = SimpleNamespace(ops=[], held=None), repeats.call_as_before

    def looks(cls, func, args, kwargs, leaves):
        call = look(cls, func, args, kwargs, leaves)
        if call is not None:
            found.ops.append(func.name())
            if found.held is not None:
                found.held.append((func, args, kwargs))
        return call

    monkeypatch.setattr(tensor, "call_as_before", looks)
    return found


def test_what_happens_to_an_optimizer_is_seen_by_its_next_step(planned, seen):
    """Each change comes to a step of which all was kept."""
    for change in OF_OPTIMIZERS:
        seen.ops.clear()
        same_after_each(planned, (usual,))
        assert seen.ops, f"before {change.__name__}"
        same_after_each(planned, (change,))


def train_until_all_is_kept(models, seen):
    """A review of the plan makes what is kept anew."""
    for _ in range(8):
        seen.ops.clear()
        same_after_each(models, (usual,))
        if sum("adamw" in op for op in seen.ops) == 3:
            return
    pytest.fail("the steps are never all repeats")


@pytest.fixture
def repeated(planned, seen):
    """The call of an optimizer in a step of which all is kept: its session, op, and operands."""
    (model, _, _), _ = planned
    train_until_all_is_kept(planned, seen)
    seen.held = []
    for net, call, optimizer in planned:
        usual(net, call, optimizer, ids(7))
        optimizer.step()
        optimizer.zero_grad()
    ((func, args, kwargs),) = seen.held
    return session_behind(model), func, args, kwargs


def keep(session, func, args, kwargs):
    """As a call does that was looked at, and is a repeat."""
    call = repeats.list_call(TieredTensor, func, args, kwargs)
    (same,) = [known for known in session.repeats[call.kind] if known.known == call.known]
    same.keep(repeats._kept_operands(call))


def exchange(values):
    """Two that lie alike."""
    layouts = [value.entry_layout for value in values]
    one = next(n for n, layout in enumerate(layouts) if layout in layouts[n + 1 :])
    other = layouts.index(layouts[one], one + 1)
    values[one], values[other] = values[other], values[one]


def lies_otherwise(values):
    at = next(n for n, value in enumerate(values) if value.dim() == 2)
    values[at] = values[at].t()
    assert values[at].entry is not None  # which it knows from here on


def twice(values):
    values[:] = [next(v for v in values if v.shape == value.shape) for value in values]


def plain(values):
    values[0] = torch.zeros(values[0].shape)


def of_entry(change):
    return lambda values: change(values[0].entry)


def off_the_device(entry):
    entry.place = Place(entry.nbytes, entry.store.homes._tiers[0], entry.place.extent)


PARAMS, GRADS, FIRST, STEPS = 0, 1, 2, 5
OPERANDS = {
    "another parameter": (PARAMS, exchange),
    "a parameter that lies otherwise": (PARAMS, lies_otherwise),
    "a plain parameter": (PARAMS, plain),
    "another state": (FIRST, exchange),
    "a plain state": (FIRST, plain),
    "a plain gradient": (GRADS, plain),
    "a gradient that lies otherwise": (GRADS, lies_otherwise),
    "one gradient for two": (GRADS, twice),
    "a gradient that waits": (GRADS, of_entry(lambda e: e.wait_for(SimpleNamespace(settle=list)))),
    "a gradient with a change": (GRADS, of_entry(lambda e: e.defer_only((None,)))),
    "a gradient with a copy": (GRADS, of_entry(lambda e: e.copies.update({torch.half: (e, 0)}))),
    "a narrow gradient": (GRADS, of_entry(lambda e: setattr(e, "narrow", "a cast"))),
    "a gradient of more bytes": (GRADS, of_entry(lambda e: setattr(e, "nbytes", 8 * e.nbytes))),
    "a gradient of another kind": (
        GRADS,
        of_entry(lambda e: setattr(e, "kind", EntryKind.RESULT)),
    ),
    "a gradient elsewhere": (GRADS, of_entry(off_the_device)),
    "a number of another dtype": (STEPS, lambda v: v.__setitem__(0, v[0].double())),
    "a vector for a number": (STEPS, lambda v: v.__setitem__(0, v[0].reshape(1))),
    "a number elsewhere": (STEPS, lambda v: v.__setitem__(0, v[0].to("meta"))),
}


def test_an_operand_that_is_not_as_it_was_is_looked_at(repeated):
    _, func, args, kwargs = repeated

    @torch.no_grad()
    def is_repeat(args):
        leaves = repeats.leaves_of(args, kwargs)
        return repeats.call_as_before(TieredTensor, func, args, kwargs, leaves) is not None

    grads = [g.entry for g in args[GRADS]]
    before = [dict(vars(entry)) for entry in grads]
    for name, (at, change) in OPERANDS.items():
        lists = [list(value) for value in args]
        keep(*repeated)
        assert is_repeat(lists), name
        mark = CHANGES.mark
        change(lists[at])
        assert CHANGES.mark is mark, name
        assert not is_repeat(lists), name
        for entry, was in zip(grads, before, strict=True):
            vars(entry).update({**was, "copies": {}, "version": entry.version})


def test_a_call_in_other_circumstances_is_looked_at(repeated, monkeypatch):
    """Who calls with another number of an option calls a repeat; with a tensor for it, not."""
    session, func, args, kwargs = repeated

    @torch.no_grad()
    def is_repeat(kwargs=kwargs):
        leaves = repeats.leaves_of(args, kwargs)
        return repeats.call_as_before(TieredTensor, func, args, kwargs, leaves) is not None

    keep(*repeated)
    assert is_repeat()
    assert is_repeat({**kwargs, "lr": 0.5})
    assert not is_repeat({**kwargs, "lr": torch.tensor(0.1)})
    for owner, name, value in (
        (session.host_updates, "wanted", frozenset({EntryRef(1)})),
        (session, "fabric", object()),
        (type(session), "step_room", StepRoom(0, 1, 1, 1)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            assert not is_repeat(), name
        assert is_repeat(), name
    with torch.enable_grad():  # where autograd records it, uses of parameters are noted
        leaves = repeats.leaves_of(args, kwargs)
        assert repeats.call_as_before(TieredTensor, func, args, kwargs, leaves) is None
    CHANGES.note()
    assert not is_repeat()


def test_states_are_called_by_who_has_them(planned):
    """Also after they changed hands, and after a state got another name, or kind."""
    (model, _, optimizer), _ = planned
    a, b = model.norm.weight, model.norm.bias

    def names():
        same_after_each(planned, (usual,))
        states = {p: optimizer.state[p]["exp_avg"].entry for p in (a, b)}
        assert {entry.kind for entry in states.values()} == {EntryKind.STATE}
        return [states[p].name for p in (a, b)]

    assert names() == names() == ["norm.weight.exp_avg", "norm.bias.exp_avg"]
    for net, _, one in planned:
        first, last = net.norm.weight, net.norm.bias
        one.state[first], one.state[last] = one.state[last], one.state[first]
    assert names() == ["norm.weight.exp_avg", "norm.bias.exp_avg"]
    state = optimizer.state[a]["exp_avg"]
    mark = CHANGES.mark
    state.entry.become_state("norm.weight.exp_avg")
    assert CHANGES.mark is mark
    state.entry.become_state("norm.weight.first")
    assert state.entry.name == "norm.weight.first"
    assert names() == ["norm.weight.exp_avg", "norm.bias.exp_avg"]
    optimizer.state[a]["exp_avg"].entry.rename("another")
    assert names() == ["norm.weight.exp_avg", "norm.bias.exp_avg"]
    optimizer.state[a]["exp_avg"].entry.kind = EntryKind.RESULT
    assert names() == ["norm.weight.exp_avg", "norm.bias.exp_avg"]


class Keeping(torch.optim.Optimizer):
    """Keeps the sum of all gradients in a tensor that it makes itself, with nothing like a
    parameter."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            total = self.state[param].setdefault("sum", torch.zeros(param.shape))
            total.add_(param.grad)
            param.sub_(total, alpha=0.1)


def test_a_plain_state_that_a_step_makes_is_in_the_store_for_the_next():
    plain, model = (nn.Linear(8, 8) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    zcompile.offload(model, device="cpu", device_memory="1MiB", host_memory="8MiB")
    runs = [(net, Keeping(net.parameters())) for net in (plain, model)]
    for number in range(3):
        for net, optimizer in runs:
            net(torch.full((2, 8), number + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            states = [optimizer.state[param]["sum"] for param in net.parameters()]
        assert {type(state) is TieredTensor for state in states} == {number > 0}
        assert same(model, values(plain))


def test_what_happens_between_steps_is_seen_by_the_next(planned):
    """Each change comes to a step of which all was kept, and two that are as before follow."""
    same_after_each(planned, QUICK)


def test_a_step_that_streams_and_clips_keeps_its_operands(streaming, seen):
    (model, call, _), _ = streaming
    train_until_all_is_kept(streaming, seen)
    usual(model, call, None, ids(7))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert {bool(p.grad.entry.deferred) for p in model.parameters()} == {True, False}
    model.zero_grad()


def test_what_happens_between_steps_that_stream_is_seen_by_the_next(streaming):
    same_after_each(streaming, (*QUICK, a_second_optimizer, states_loaded, a_gradient_scaled))


@pytest.mark.slow  # it is traced anew for each
def test_a_parameter_that_becomes_another_is_seen_by_the_next_step(planned):
    same_after_each(planned, (frozen, thawed, new_data, node_hooked))


def test_a_step_of_a_plan_in_force_keeps_all_of_it(planned, monkeypatch):
    """What this file is about, as long as nothing changes."""
    (model, _, _), _ = planned
    same_after_each(planned, (usual,) * 4)  # the plan is in force again, and was reviewed
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


def test_an_entry_whose_handle_cannot_be_made_leaves_nothing(store, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    entry = near_entry(store, 1.0)
    key = entry.key
    with monkeypatch.context() as broken:
        broken.setattr(torch, "frombuffer", fails)
        with pytest.raises(MemoryError):
            store.handle(entry)
    store.enter("")
    assert key not in store._entries


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


@pytest.mark.slow
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


# These come last: a run has so many plans, and they ask for some.


@pytest.mark.slow
def test_a_gradient_that_a_state_shows_becomes_a_state():
    """In a run whose plan is in force: what states are is looked at again only if something has
    changed."""
    planned = planned_anew()
    (model, _, optimizer), _ = planned
    same_after_each(planned, (usual,) * 4)
    assert optimizer_hooks._NAMED[optimizer].mark is CHANGES.mark
    same_after_each(planned, (a_gradient_for_a_state,))
    zcompile.close(model)


@pytest.mark.slow  # ops on lists, one by one
def test_what_is_kept_does_not_grow_with_steps(planned):
    """Ops on lists make their results anew, and those are entries that no later call knows."""
    (model, compiled, optimizer), _ = planned
    session = session_behind(model)
    same_after_each(planned, (options(fused=False, foreach=True),))
    kept = (
        *(session.executor.foresight._kept, session.executor.foresight._identities),
        *(session.executor.recorder._kept, session.arena.lent),
    )
    for number in range(60):
        if number == 10:  # the plan is in force again
            before = [len(one) for one in kept]
        usual(model, compiled, optimizer, ids(number))
        optimizer.step()
        optimizer.zero_grad()
    more = [len(one) - was for one, was in zip(kept, before, strict=True)]
    assert all(count < 10 for count in more), more
