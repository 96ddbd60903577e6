"""Works in a process of its own: one line of JSON in, lines of JSON out, one before each case.

What kills the process is then known by name, and the others go on. See `pool.py`.
"""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from torch_tables import ops, training  # noqa: E402
from torch_tables.outcomes import Outcome  # noqa: E402
from torch_tables.telling import say  # noqa: E402
from torch_tables.tiers import Tier  # noqa: E402


def main() -> None:
    gc.collect()
    gc.freeze()  # torch's tables: a million objects, to be gone through after each op
    say(ready=True)
    with tempfile.TemporaryDirectory(prefix="zcompile-tables-") as directory:
        worker = Worker(Path(directory))
        for line in sys.stdin:
            worker.work(json.loads(line))


class Worker:
    """Works off units, one after the other.

    A unit says: `table`: "ops", "modules" or "optimizers"; `name`: of what, in the table; `tier`;
    `dtype`; `compiled`; `most`: samples or settings of it, None: all; `skip`: cases done before
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tiers: dict[str, Tier] = {}

    def work(self, unit: dict[str, Any]) -> None:
        began = time.process_time()
        done = 0
        for number, (case, run) in enumerate(self._cases(unit)):
            done += 1
            if number < unit["skip"]:
                continue
            say(begin=case.name)
            outcome = run()
            if outcome.kind != "equal":
                say(case=case.name, way=case.way, kind=outcome.kind, why=outcome.why)
        if unit["table"] == "ops":
            done += 1
            say(begin=f"{unit['name']} after all cases")
            gc.collect()
            if left := self._tier(unit).clear():
                say(
                    case=f"{unit['name']} after all cases",
                    way="",
                    kind="different",
                    why=f"{left} entries of it are alive",
                )
        say(over=True, cases=done, seconds=time.process_time() - began)

    def _cases(self, unit: dict[str, Any]) -> Iterator[tuple[Any, Callable[[], Outcome]]]:
        dtype, most = getattr(torch, unit["dtype"]), unit["most"]
        if unit["table"] == "ops":
            tier = self._tier(unit)
            for op in ops.ops_named([unit["name"]]):
                if ops.op_name(op) == unit["name"] and op.supports_dtype(dtype, "cpu"):
                    for case in ops.cases(op, dtype, most):
                        yield case, partial(case.run, tier)
                        tier.clear()
            return
        table = training.module_cases if unit["table"] == "modules" else training.optimizer_cases
        for case in table(unit["name"], unit["compiled"], most):
            yield case, partial(case.run, unit["tier"], self._directory / "training")

    def _tier(self, unit: dict[str, Any]) -> Tier:
        name = unit["tier"]
        if name not in self._tiers:
            self._tiers[name] = Tier(name, self._directory / name)
        return self._tiers[name]


if __name__ == "__main__":
    main()
