"""What transfers and updates cost the host on CUDA: Python's part, over streams that do nothing.

    python -m benchmarks.cuda_host
    python -m benchmarks.cuda_host --entries 400 --rounds 6

No card is needed: the device's own code runs over streams and events without CUDA behind them, and
bytes do not move. A real call of CUDA adds what it takes itself. Told are microseconds of CPU, the
least of some rounds: of the thread that asks, and of all threads together. *alone*: nothing else is
in flight on the entry; *behind*: each fetch follows a put of the same entry that is in flight. They
are asked for as the walk of a schedule does, with interrupts deferred.

Then what instructions of a model that streams take the thread that walks, by kind, the median: a
fetch with its slot, a wait for it with the tensor that it gives, the end of the slot, and what goes
home of the optimizer's step.

Then, for each parameter of a model that rests on the device whole, a backward, clipping by the norm
of all gradients and a step of a fused AdamW, beside those of plain torch; parameters have 256
elements, so that little of it is arithmetic. *ops that do nothing*: the same tensors and optimizer,
but nothing comes of an op on tiered tensors but norms made before: what torch itself takes beside
its kernels, and no change of ours can spare. And of a model that streams: parameters of 4096
elements, of which most come from the host; clipping waits for the step there, and the step brings
four operands of each parameter and sends three home.

Last, how many calls clipping and a step of a fused AdamW make for 40 weights whose gradients rest
narrow, as under autocast they do: each is at least one launch on a card.
"""

import argparse
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.profiler import ProfilerActivity

import zcompile
from zcompile.config import Config
from zcompile.frontend import optimizer_hooks
from zcompile.ir.types import EntryKind
from zcompile.runtime import executor
from zcompile.runtime import open as opening
from zcompile.runtime.device import cuda
from zcompile.runtime.device.cuda import CudaDevice
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.store.store import Store
from zcompile.runtime.transfer.interrupts import deferred_interrupts
from zcompile.runtime.transfer.ticket import Ticket

NBYTES = 64 * 1024


class _Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        return

    def record(self, stream: object) -> None:
        return

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_time(self, later: object) -> float:
        return 0.0


class _Stream:
    def __init__(self, device: object) -> None:
        return

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None:
        return

    def wait_event(self, event: object) -> None:
        return

    def wait_stream(self, other: object) -> None:
        return

    def synchronize(self) -> None:
        return


class _Idle(CudaDevice):
    """The device, of which no stream and no copy does anything."""

    def __init__(self, throttle: object, meter: Any, crashed: Callable[..., None]) -> None:
        super().__init__(torch.device("cuda", 0), meter, crashed)
        self.torch_device = torch.device("cpu")

    def is_on_host(self, memory: torch.Tensor) -> bool:
        return False

    def can_bypass_staging(self, direction: object) -> bool:
        return False

    def _on_stream(self, direction: Any, work: object, *rest: Any) -> Any:
        return super()._on_stream(direction, _nothing, *rest)


def _nothing() -> None:
    return


def _without_cuda() -> SimpleNamespace:
    stream = _Stream(None)
    pinning = SimpleNamespace(
        cudaHostRegister=lambda *given: 0, cudaHostUnregister=lambda address: 0
    )
    return SimpleNamespace(
        Stream=_Stream,
        Event=_Event,
        current_stream=lambda device: stream,
        current_device=lambda: 0,
        set_device=lambda device: None,
        empty_cache=lambda: None,
        device=lambda device: contextlib.nullcontext(),
        mem_get_info=lambda device: (1 << 40, 1 << 40),
        cudart=lambda: pinning,
    )


def _timed(
    store: Store, count: int, start: Callable[[int], Ticket], settle: bool
) -> tuple[float, float]:
    """Microseconds of CPU for each of `count` transfers: of this thread, and of all."""
    mine, everyone = time.thread_time(), time.process_time()
    with deferred_interrupts():
        tickets = [start(number) for number in range(count)]
        for ticket in tickets if settle else ():
            ticket.join_compute()
    mine = time.thread_time() - mine
    store.drain()
    return mine / count * 1e6, (time.process_time() - everyone) / count * 1e6


def measure(entries: int, rounds: int) -> dict[str, tuple[float, float]]:
    """What is transferred how -> microseconds of CPU: of the thread that asks, and of all."""
    with (
        mock.patch.object(cuda, "_CUDA", _without_cuda()),
        mock.patch.object(opening, "CpuDevice", _Idle),
    ):
        budget = f"{2 * entries * NBYTES >> 20}MiB"
        store = Store(Config(device="cpu", device_memory=budget, host_memory=budget))
        try:
            made = [store.create(f"w{n}", EntryKind.PARAM, NBYTES) for n in range(entries)]
            slots = [store.arena.slot(NBYTES * n, NBYTES) for n in range(entries)]

            def fetch(number: int) -> Ticket:
                mark = store.device.mark()
                return store.fetch(made[number], slots[number], after=[mark])

            def put(number: int) -> Ticket:
                mark = store.device.mark()
                return store.put(made[number], slots[number], after=[mark])

            def put_and_fetch(number: int) -> Ticket:
                put(number)
                return fetch(number)

            found: dict[str, list[tuple[float, float]]] = {}
            for _ in range(rounds):
                for name, start, settle in (
                    ("put", put, False),
                    ("fetch, alone", fetch, True),
                    ("put and fetch behind it", put_and_fetch, True),
                ):
                    found.setdefault(name, []).append(_timed(store, entries, start, settle))
        finally:
            store.close()
    return {
        name: (min(r[0] for r in rows), min(r[1] for r in rows)) for name, rows in found.items()
    }


def walked(rounds: int) -> dict[str, float]:
    """Kind of instruction -> microseconds of CPU of this thread: the median, of a model of which
    all streams that can."""
    taken: dict[str, list[float]] = {}

    def timed(kind: type, act: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def acting(call: Any, instruction: Any) -> None:
            since = time.thread_time()
            act(call, instruction)
            taken.setdefault(kind.__name__, []).append(time.thread_time() - since)

        return acting

    acts = {kind: timed(kind, act) for kind, act in executor.ACTIONS.items()}
    with (
        mock.patch.object(cuda, "_CUDA", _without_cuda()),
        mock.patch.object(opening, "CpuDevice", _Idle),
        mock.patch.dict(executor.ACTIONS, acts),
    ):
        model: nn.Module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(40)))
        zcompile.offload(
            model,
            device="cpu",
            device_memory="4MiB",
            host_memory="640MiB",
            updates="device",  # as on CUDA: else a plan may let the host compute what is timed
        )
        run = torch.compile(model, backend="zinf")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for number in range(WARM + rounds):
            if number == WARM:
                taken.clear()
            run(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        zcompile.close(model)
    shown = ("Fetch", "Wait", "Free", "Store")
    return {kind: statistics.median(taken[kind]) * 1e6 for kind in shown}


WARM = 8
"""Steps until everything rests where it is planned to, and norms are taken on the way."""


def _ops_that_do_nothing(norms: Sequence[torch.Tensor]) -> contextlib.ExitStack:
    """A context in which an op on tiered tensors does nothing, but for norms of a list: those are
    made of `norms`. Nor does anything of ours happen before a step, and after it."""

    def dispatch(cls: type, func: Any, *given: Any, **more: Any) -> Any:
        wanted = func is torch.ops.aten._foreach_norm.Scalar
        return [*torch.stack([*norms]).unbind()] if wanted else None

    done = contextlib.ExitStack()
    for owner, name, instead in (
        (TieredTensor, "__torch_dispatch__", classmethod(dispatch)),
        (optimizer_hooks, "_begin", lambda *given: None),
        (optimizer_hooks, "_end", lambda *given: None),
    ):
        done.enter_context(mock.patch.object(owner, name, instead))
    return done


def updates(
    device_memory: str | None, rounds: int, width: int = 16, idle: bool = False
) -> tuple[float, float, float]:
    """Microseconds of CPU of this thread for each parameter: of a backward, of clipping, and of a
    step.

    device_memory  None: of plain torch
    idle           ops of the last two do nothing
    """
    with (
        mock.patch.object(cuda, "_CUDA", _without_cuda()),
        mock.patch.object(opening, "CpuDevice", _Idle),
    ):
        model: nn.Module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(100)))
        run: Any = model
        if device_memory is not None:
            zcompile.offload(
                model,
                device="cpu",
                device_memory=device_memory,
                host_memory="640MiB",
                updates="device",
            )
            run = torch.compile(model, backend="zinf")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        found, norms = [], [torch.ones(()) for _ in model.parameters()]
        for number in range(WARM + rounds):
            loss = run(torch.ones(2, width)).sum()
            begin = time.thread_time()
            loss.backward()
            taken = [time.thread_time() - begin]
            quiet = idle and number >= WARM
            with _ops_that_do_nothing(norms) if quiet else contextlib.nullcontext():
                begin = time.thread_time()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                clipped = time.thread_time()
                optimizer.step()
                taken += [clipped - begin, time.thread_time() - clipped]
            found.append(taken)
            optimizer.zero_grad()
        if device_memory is not None:
            zcompile.close(model)
    count = len(list(model.parameters()))
    backward, clip, step = (min(rows) / count * 1e6 for rows in zip(*found[WARM:], strict=True))
    return backward, clip, step


NARROW = "_foreach_copy_", "_to_copy", "_foreach_mul_", "_fused_adamw_"
"""Ops by which narrow gradients are widened, scaled, and used."""


def calls_with_narrow_gradients(weights: int = 40, width: int = 192) -> dict[str, int]:
    """Op -> its calls in clipping and a step, those counted as well that torch makes of lists of
    tiered tensors, and for its step counts."""
    with (
        mock.patch.object(cuda, "_CUDA", _without_cuda()),
        mock.patch.object(opening, "CpuDevice", _Idle),
    ):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(weights)))
        zcompile.offload(
            model, device="cpu", device_memory="64MiB", host_memory="256MiB", updates="device"
        )
        run = torch.compile(model, backend="zinf")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(WARM + 1):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = run(torch.ones(2, width)).sum()
            loss.backward()
            with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as seen:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        zcompile.close(model)
    calls = Counter(event.name.removeprefix("aten::") for event in seen.events())
    return {op: calls[op] for op in NARROW}


ON_DEVICE = (
    ("plain torch", None, 16, False),
    ("ops that do nothing", "64MiB", 16, True),
    ("all on the device", "64MiB", 16, False),
)
STREAMING = (("streaming", "1MiB", 64, False),)


def tell_updates(rounds: int, rows: Sequence[tuple[str, str | None, int, bool]]) -> None:
    """Print what a backward, clipping and a step take.

    rows  what is told of, with the arguments of `updates`
    """
    for name, device_memory, width, idle in rows:
        backward, clip, step = updates(device_memory, rounds, width, idle)
        print(
            f"{name:26} {backward:6.1f} us backward {clip:6.1f} us clipping {step:6.1f} us a step, "
            "for each parameter",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=400, help="transfers in a round")
    parser.add_argument("--rounds", type=int, default=6, help="of which the least is told")
    parser.add_argument("--updates", action="store_true", help="only those, on the device")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.updates:
        tell_updates(args.rounds, ON_DEVICE)
        return
    for name, (mine, everyone) in measure(args.entries, args.rounds).items():
        print(f"{name:26} {mine:6.1f} us asking {everyone:6.1f} us all threads", flush=True)
    for kind, taken in walked(args.rounds).items():
        print(f"{f'a walk: {kind}':26} {taken:6.1f} us", flush=True)
    tell_updates(args.rounds, ON_DEVICE + STREAMING)
    calls = ", ".join(f"{op} {count}" for op, count in calls_with_narrow_gradients().items())
    print(f"{'narrow gradients':26} calls for 40 weights: {calls}", flush=True)


if __name__ == "__main__":
    main()
