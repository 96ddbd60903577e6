"""Runs on a thread of its own what must not meet the state that torch keeps for this one.

Modes of dispatch, autocast and autograd's books are kept for each thread: where a graph is
compiled, or a backward runs, nothing else can be compiled or traced beside it.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from zcompile.runtime.transfer.interrupts import deferred_interrupts

T = TypeVar("T")


def on_own_thread(work: Callable[[], T], device: torch.device, name: str) -> T | Exception:
    """What `work` returns, or the error it raises, on a thread of its own.

    raises  KeyboardInterrupt, once the thread has ended; a second one at once
    """
    done: list[T | Exception] = []
    ended = threading.Event()  # a thread whose join was interrupted counts as ended (CPython 3.11)

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            done.append(work())
        except Exception as error:  # noqa: BLE001  # on purpose: of any class; it is returned
            done.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        with deferred_interrupts():  # it has begun, or it has not
            thread.start()
        ended.wait()
    except KeyboardInterrupt:
        ended.wait()  # torch's settings are changed while it runs
        raise
    (result,) = done
    return result
