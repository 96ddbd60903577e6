"""Ctrl-C loses nothing, wherever it strikes, and always arrives."""

import copy
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from interrupted import check_everywhere, nothing_swallowed, spots_of, strike
from sampled import sampled
from torch import nn

import zcompile
from zcompile.checkpoint.stream import NewFile
from zcompile.frontend import offload
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import EntryKind
from zcompile.ir.units import Bytes, KiB
from zcompile.runtime.closing import wait_for_dead_stores
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.transfer.interrupts import (
    deferred_interrupts,
    deliver_interrupts,
    uninterrupted,
)
from zcompile.runtime.transfer.ticket import Promise

FIELDS = {"device": "cpu", "device_memory": "1MiB", "host_memory": "4MiB"}


def model_of(tmp_path, home, **fields):
    """A small model, whose parameters rest on the host or on disk."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if home == "disk":
        (tmp_path / "disk").mkdir(exist_ok=True)
        fields |= {"disk": tmp_path / "disk", "host_memory": Bytes(256 * KiB)}
    return zcompile.offload(model, **{**FIELDS, **fields})


@pytest.fixture(params=["host", "disk"])
def model(request, tmp_path):
    made = model_of(tmp_path, request.param)
    yield made
    zcompile.close(made)


INPUT = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def makes_and_frees(model):
    with torch.no_grad():
        torch.zeros_like(model[0].weight)


def clones(model):
    with torch.no_grad():
        model[0].weight.clone()


def deep_copies(model):
    copy.deepcopy(model[0].weight)


def gathers(model):
    with torch.no_grad():
        model[0].weight @ INPUT.T


def reads(model):
    model[0].weight.detach().cpu()


def writes(model):
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(64, 64))


def blanks(model):
    with torch.no_grad():
        model[0].weight.zero_()


def streams(model):
    with torch.no_grad():
        model[0].weight.mul_(1.5)


def takes_gradients(model):
    model(INPUT).sum().backward()


def adds_gradients(model):
    takes_gradients(model)
    takes_gradients(model)


def steps(model):
    takes_gradients(model)
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()


def uses_the_store(model):
    store = session_behind(model)
    memory = torch.ones(8 * KiB, dtype=torch.uint8)
    with deferred_interrupts():
        entry = store.create("new", EntryKind.STATE, memory.numel())
        handle = store.handle(entry)
    store.put(entry, memory).wait()
    store.add(entry, memory.view(torch.float32)).wait()
    store.read_all(entry)
    store.zero(entry)
    del handle


OPERATIONS = {
    f.__name__: f
    for f in (
        makes_and_frees,
        clones,
        deep_copies,
        gathers,
        reads,
        writes,
        blanks,
        streams,
        uses_the_store,
        takes_gradients,
        adds_gradients,
        steps,
    )
}
MOST = 12
"""Of thousands of bytecodes; all of them where slow tests run."""


def check(model, operation, most=None):
    session = session_behind(model)

    def let_go():
        model.zero_grad()
        session.executor.foresight.abandon()  # what was started for the call that would come next

    check_everywhere(lambda: OPERATIONS[operation](model), session, most=most, after=let_go)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_in_an_op_loses_nothing(model, operation):
    check(model, operation, MOST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_at_any_bytecode_of_an_op_loses_nothing(model, operation):
    check(model, operation)


@pytest.fixture
def compiled(model):
    torch._dynamo.reset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    call = torch.compile(model, backend="zinf")

    def train():
        call(INPUT.clone()).sum().backward()  # which dies with the graph, as batches do
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        train()
    return train


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("model", sampled(["host", "disk"], "disk"), indirect=True)  # both above
@pytest.mark.parametrize("most", [MOST, pytest.param(None, marks=pytest.mark.slow)])
def test_an_interrupt_in_a_compiled_step_loses_nothing(model, compiled, most):
    session = session_behind(model)

    def let_go():
        # As the next forward does: what a step has noted waits for its end, or for that.
        session.settle()
        model.zero_grad()
        session.executor.foresight.abandon()
        session.executor.wait_for_in_flight()
        session.gradients.expect(())  # as the next forward does: a pass that failed leaves sums
        session.stepping = None

    check_everywhere(compiled, session, most=most, after=let_go)


def opens_and_closes(directory):
    model = nn.Linear(64, 64)
    try:
        zcompile.offload(model, disk=directory, **FIELDS)
    finally:
        if isinstance(model.weight, TieredTensor):
            zcompile.close(model)


def builds_under_init(directory):
    model = None
    try:
        with zcompile.init(disk=directory, **FIELDS):
            model = nn.Linear(64, 64)
    finally:
        if model is not None:
            zcompile.close(model)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("most", [MOST, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("opening", [opens_and_closes, builds_under_init])
def test_an_interrupt_while_a_model_is_offloaded_leaves_nothing_open(tmp_path, opening, most):
    for _ in range(2):
        opening(tmp_path)
    spots = spots_of(lambda: opening(tmp_path))
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    struck = 0
    for spot in spots[:: max(1, len(spots) // (most or len(spots)))]:
        with nothing_swallowed():
            came, out = strike(spot, lambda: opening(tmp_path))
        assert came == out, spot
        struck += came
        gc.collect()
        wait_for_dead_stores()
        assert threading.active_count() == threads, (spot, threading.enumerate())
        assert not list(tmp_path.iterdir()), spot
        assert len(os.listdir("/proc/self/fd")) == descriptors, spot
    assert struck > MOST // 2


CHILD = """
import os, signal, sys, threading
import torch, zcompile
from torch import nn
from zcompile.frontend.offload import session_behind

model = zcompile.offload(nn.Linear(64, 64), device="cpu", device_memory="1MiB", host_memory="2MiB")
session = session_behind(model)
lost = []
sys.unraisablehook = lambda told: lost.append(told.exc_value)

def fits():
    made = []
    with torch.no_grad():
        try:
            while True:
                made.append(torch.zeros_like(model.weight))
        except zcompile.errors.TierFull:
            return len(made)

before, arrived = fits(), 0
while arrived < int(sys.argv[1]):
    try:
        os.write(1, b"ready\\n")
        with torch.no_grad():
            while True:
                made = torch.zeros_like(model.weight)
                del made
    except KeyboardInterrupt:
        arrived += 1
made = None
assert fits() == before, (fits(), before)
assert len(session.entries()) == 2
assert not lost, lost
"""


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_interrupts_from_outside_all_arrive_and_leak_nothing():
    """Each is sent when the one before has arrived, so that their number is known."""
    command = [sys.executable, "-c", CHILD, "50"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(50):
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
    assert child.wait() == 0


def test_a_second_interrupt_breaks_a_wait_and_only_that():
    promise, reached = Promise(), []

    def press():
        signal.raise_signal(signal.SIGINT)
        reached.append(True)

    @uninterrupted
    def twice():
        press()
        press()  # nobody waits here, and this is no code of ours: it is broken like any other

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert reached == [True]

    @uninterrupted
    def waiting():
        press()
        sender.start()
        promise.wait()

    def send():
        """When the main thread is seen in its wait."""
        main = threading.main_thread().ident
        while sys._current_frames()[main].f_code is not Promise.wait_finished.__code__:
            os.sched_yield()
        signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=send, daemon=True)
    with pytest.raises(KeyboardInterrupt):
        waiting()
    sender.join()
    assert not promise.done()


def test_interrupts_are_deferred_in_a_process_that_another_thread_has_forked():
    codes = []

    def fork():
        if child := os.fork():
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return
        code = 1
        try:
            with deferred_interrupts():
                signal.raise_signal(signal.SIGINT)
                code = 2  # it has not struck here
        except KeyboardInterrupt:
            code = 0 if code == 2 else 3
        os._exit(code)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert codes == [0]


def test_a_handler_of_the_user_is_called_once_and_stays():
    calls = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        mine = signal.getsignal(signal.SIGINT)
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert not calls
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine
        with deferred_interrupts():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as code of the user may do
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)


def test_a_long_section_delivers_where_it_says():
    with deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            deliver_interrupts()


def test_a_parameter_keeps_its_gradient_if_offloading_breaks_off(monkeypatch):
    """Ctrl-C after the first of two parameters: both are as before, and nothing stays open."""
    model = nn.Linear(8, 8)
    model(torch.ones(1, 8)).sum().backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    become, threads = offload._become_tiered, threading.active_count()

    def pressing(*args):
        become(*args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(offload, "_become_tiered", pressing)
    with pytest.raises(KeyboardInterrupt):
        zcompile.offload(model, **FIELDS)
    for param, (value, grad) in zip(model.parameters(), before, strict=True):
        assert type(param) is nn.Parameter
        assert torch.equal(param, value)
        assert torch.equal(param.grad, grad)
    assert threading.active_count() == threads


def test_an_interrupt_while_a_save_opens_its_files_leaves_none_open(model, tmp_path, monkeypatch):
    share = NewFile._share

    def pressing(file):
        signal.raise_signal(signal.SIGINT)
        return share(file)

    monkeypatch.setattr(NewFile, "_share", pressing)
    with pytest.raises(KeyboardInterrupt):
        zcompile.save(tmp_path / "kept", model)
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    assert not [name for name in names if "kept.zinf-partial" in _target(name)]
    assert not list(tmp_path.glob("kept*"))


def _target(name):
    try:
        return os.readlink(name)
    except FileNotFoundError:  # that of the listing itself
        return ""


@uninterrupted
def struck(done):
    os.kill(os.getpid(), signal.SIGINT)
    done.append("all of it")


def test_a_handler_that_was_saved_within_a_section_is_the_usual_one_after_it():
    """A hook of the user's saves it there, and puts it back when all is over."""
    usual = signal.getsignal(signal.SIGINT)
    try:
        with deferred_interrupts():
            saved = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGINT, saved)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        done = []
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                struck(done)
        assert len(done) == 2
        assert signal.getsignal(signal.SIGINT) is usual
    finally:
        signal.signal(signal.SIGINT, usual)
