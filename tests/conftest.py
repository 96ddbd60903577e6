"""What every test may ask for: golden files, and a skip for tests that need a GPU.

And what makes a run of them the same alone, beside others and in the background: threads, Ctrl-C,
what is collected as garbage, and where a machine's figures are kept.
"""

import gc
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import lean  # noqa: F401  # first, since it sets how torch compiles
import pytest
import torch
from hypothesis import HealthCheck, settings

# What is measured of this machine is kept for one run of the tests, all its processes together, and
# not for the user.
if "PYTEST_XDIST_WORKER" not in os.environ:  # whose environment is that of the process above it
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="zcompile-tests-")

# What a shell starts in the background ignores Ctrl-C, and so would its children. Tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as processors: a second thread in each would only wait for the other's.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # in the processes that tests start

# On a busy machine drawing examples, and each of them, takes as long as it takes.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
SLOW_TIMEOUT_S = 1800
"""After which a slow test counts as hung; any other after the `timeout` of pyproject.toml."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write the golden files anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # What computes for minutes takes many times that beside others, and hangs no more for it.
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            # Skipped on purpose: what only a GPU can show is shown on one; the same code paths are
            # tested on the CPU device, so nothing is unseen without a GPU but CUDA itself.
            reason = "needs a CUDA device, and torch sees none; the CPU device runs the same paths"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """No file of tests pays for what those before it left: torch forgets what it compiled, and what
    is alive then, modules for the most part, is not searched for garbage again and again."""
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


class Accepting:
    """Equal to every text; what it is compared with becomes the golden file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, str), "a golden file holds text"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(other, encoding="utf-8")
        return True

    __hash__ = None


@pytest.fixture
def golden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | Accepting:
    """The accepted text of this test: `assert printer.text(graph) == golden`.

    It lies in tests/golden, under the test's own path and name; `pytest --accept` writes it. With
    any torch, memory is counted as with one that lets go of the gradients that it calls a backward
    with.
    """
    from zcompile.memory import footprint
    from zcompile.passes.plan_activations import graph

    for file in (footprint, graph):
        monkeypatch.setattr(file, "keeps_tangents", lambda: False)
    home = request.path.relative_to(TESTS).with_suffix("")
    path = GOLDEN / home / (re.sub(r"[^\w.-]+", "_", request.node.name) + ".txt")
    if request.config.getoption("--accept"):
        return Accepting(path)
    if not path.exists():
        pytest.fail(f"there is no {path.relative_to(TESTS)}; write it with pytest --accept")
    return path.read_text(encoding="utf-8")


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """Neither warnings nor bars of transformers: a test reads what we say."""
    import transformers  # only where it is asked for: it takes its time

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()


@pytest.fixture
def zinf(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of a command."""
    from zcompile.cli import main  # which imports triton, after what it reads is set

    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run
