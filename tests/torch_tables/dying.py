"""Stands in for `child.py`: one of its cases kills the process, another never ends."""

import json
import os
import signal
import sys
import threading

from torch_tables.telling import say


def main() -> None:
    say(ready=True)
    for line in sys.stdin:
        unit = json.loads(line)
        cases = ["0", "1", "2"] if unit["name"] == "kills" else ["0", "1"]
        for number, case in enumerate(cases):
            if number < unit["skip"]:
                continue
            say(begin=f"{unit['name']} {case}")
            if unit["name"] == "kills" and case == "1":
                os.kill(os.getpid(), signal.SIGSEGV)
            if unit["name"] == "hangs" and case == "1":
                threading.Event().wait()
        say(over=True, cases=len(cases), seconds=0.0)


if __name__ == "__main__":
    main()
