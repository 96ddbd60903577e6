"""What torch and Python do beside what is tested, and no test hangs on: imported by every process
that is given many tests or ranks, before it compiles anything. And whether triton interprets, which
is settled by then."""

import gc
import os

import torch

if not torch.cuda.is_available():
    # Triton reads this when it is imported, and its own functions are then interpreted, or never.
    # torch._dynamo, which the lines below import, imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# After each compilation torch collects garbage, and times the guards it has made, for
# which it first fills the caches of the processor: a sixteenth of the time of tests, of which
# nothing hangs on either.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # in the processes that tests start
torch._dynamo.config.run_gc_after_compile = False
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# pytest listens to every logger that does not propagate, and torch writes its structured trace,
# with each graph as text, as soon as anybody listens: a twentieth of the time of tests.
torch._logging._internal.trace_log.handlers.clear()
torch._logging._internal.trace_log.addHandler = lambda handler: None

# A process of tests keeps many modules alive; looking at them all for garbage every few thousand
# objects is a twelfth of its time. What a test wants collected it collects.
gc.set_threshold(50_000, 20, 100)

# With each seed torch notes for devices that may come later where it was set, the text of the whole
# stack: two milliseconds, a hundredth of the time of tests.
for _others in (torch.cuda, torch.xpu, torch.mtia):
    if not _others.is_available():
        _others.manual_seed_all = lambda seed: None
