"""Models in notebooks: a cell that is run again, a model that is in the way, and what is shown."""

import gc
import os
import sys
import threading
import types
import weakref

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from pairs import mlp, on_disk, train
from torch import nn

import zcompile
from zcompile.errors import DiskOwned, ParameterChanged, Unsupported
from zcompile.frontend.offload import session_behind


class Shell:
    """What is asked of IPython: the inputs so far, their number, and what a notebook says."""

    def __init__(self, monkeypatch):
        self.user_ns, self.execution_count, self.metadata = {"In": [""]}, 0, {}
        module = types.SimpleNamespace(get_ipython=lambda: self)
        monkeypatch.setitem(sys.modules, "IPython", module)

    def get_parent(self):
        return {"metadata": self.metadata}

    def run(self, text, cell=None):
        self.user_ns["In"].append(text)
        self.execution_count += 1
        self.metadata = {"cellId": cell} if cell else {}


@pytest.fixture
def shell(monkeypatch):
    return Shell(monkeypatch)


@pytest.fixture
def build(tmp_path):
    """Makes models on one directory."""
    made = []
    (tmp_path / "disk").mkdir()

    def one(model=None):
        made.append(on_disk(model or mlp(), tmp_path, disk=tmp_path / "disk"))
        return made[-1]

    yield one
    for model in made:
        zcompile.close(model)


@pytest.mark.parametrize("cells", [(None, None), ("a", "a")], ids=["by text", "by id"])
def test_what_a_cell_made_before_is_closed_when_it_is_run_again(shell, build, caplog, cells):
    shell.run("model = build()", cells[0])
    old = build()
    shell.run("train()")
    shell.run("model = build()" + ("  # changed" if cells[1] else ""), cells[1])
    new = build()
    with pytest.raises(ParameterChanged, match="is gone: its store was closed"):
        old[0].weight.tolist()
    assert len(new[0].weight.tolist()) == 32
    assert "a Sequential is run again: what it made is closed" in caplog.text


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("model = build()", lambda model: {"keep": model}),
        ("models.append(build())", lambda model: {"models": [model]}),
        ("runs['a'] = Run(build())", lambda model: {"runs": {"a": types.SimpleNamespace(m=model)}}),
        ("%%fortran\nend", lambda model: {"_last": (model,)}),
    ],
    ids=["another name", "a list", "an object in a dict", "unread text"],
)
def test_a_model_that_is_kept_elsewhere_survives_its_cell(shell, build, monkeypatch, text, keep):
    monkeypatch.setitem(sys.modules, "__main__", main := types.ModuleType("__main__"))
    shell.run(text)
    model = build()
    vars(main).update(keep(model), model=model if text.startswith("model =") else None)
    shell.run(text)
    with pytest.raises(DiskOwned, match=f"`{next(iter(keep(model)))}`"):
        build()
    assert len(model[0].weight.tolist()) == 32


@pytest.mark.parametrize(
    "text",
    [
        "model = build()",
        "get_ipython().run_cell_magic('time', '', 'for model in (build(),): 0\\n')",
    ],
)
def test_what_depends_on_a_model_or_shows_it_does_not_keep_it(shell, build, monkeypatch, text):
    monkeypatch.setitem(sys.modules, "__main__", main := types.ModuleType("__main__"))
    shell.run(text)
    vars(main).update(model=(model := build()), Out={2: model}, _2=model, _=model)
    vars(main).update(optimizer=torch.optim.SGD(model.parameters()), whole=torch.compile(model))
    vars(main).update(trainer=types.SimpleNamespace(model=model), size=3)
    shell.run(text)
    build()
    with pytest.raises(ParameterChanged, match="is gone: its store was closed"):
        model[0].weight.tolist()


def test_a_model_of_another_cell_is_left_alone_and_named(shell, build, monkeypatch):
    shell.run("model = build()")
    model = build()
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setitem(sys.modules, "__main__", main := types.ModuleType("__main__"))
    vars(main).update(model=model, optimizer=optimizer, other=mlp(), Out={7: model[0].weight})
    shell.run("again = build()")
    with pytest.raises(DiskOwned) as caught:
        build()
    told = "another model of this process, a Sequential that `model`, `optimizer`, `Out[7]` still"
    assert told in str(caught.value)
    assert "zcompile.close(model)" in str(caught.value)
    assert len(model[0].weight.tolist()) == 32


def test_the_traceback_of_an_error_is_named(build, monkeypatch):
    def fails():
        kept = build()
        raise KeyError(len(kept))

    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    with pytest.raises(KeyError) as caught:
        fails()
    monkeypatch.setattr(sys, "last_traceback", caught.tb, raising=False)
    with pytest.raises(DiskOwned, match=r"`kept in the traceback of the last error"):
        build()


def test_two_models_of_one_run_of_a_cell_are_two(shell, build):
    shell.run("models = [build(), build()]")
    first = build()
    with pytest.raises(DiskOwned, match="another model of this process"):
        build()
    assert len(first[0].weight.tolist()) == 32


def test_outside_of_notebooks_no_model_is_closed_for_another(build):
    first = build()
    with pytest.raises(DiskOwned, match=r"call zcompile\.close"):
        build()
    assert len(first[0].weight.tolist()) == 32


def test_what_only_garbage_holds_is_closed(build, tmp_path):
    loop = [on_disk(mlp(), tmp_path, disk=tmp_path / "disk")]
    loop.append(loop)
    del loop
    build()


def held(session):
    """The blocks of memory that a session has of host and device."""
    host = session.homes._tiers[0]
    ring = session._context.staging._whole
    blocks = [*host._blocks.values(), session.arena._memory, ring.memory]
    return [weakref.ref(block) for block in blocks]


def test_closing_gives_back_threads_files_and_memory_while_the_model_is_still_there(tmp_path):
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with zcompile.offloaded(
        mlp(), device="cpu", device_memory="8MiB", host_memory="2MiB", disk=tmp_path
    ) as model:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        train(model, optimizer)
        session = session_behind(model)
        memory = held(session)
        assert len(memory) >= 3
        assert threading.active_count() > threads
        assert len(list(tmp_path.iterdir())) == 2, "a lock and a file"
    assert all(block() is None for block in memory)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ParameterChanged, match="is gone: its store was closed"):
        model(torch.ones(1, 16))
    with pytest.raises(ParameterChanged, match=r"^the model is gone: its store was closed"):
        zcompile.stats(model)
    zcompile.close(model)  # once more does nothing


def test_offloaded_gives_the_model_itself_and_closes_after_an_error(tmp_path):
    plain = mlp()

    def fails():
        with zcompile.offloaded(plain, device="cpu", host_memory="2MiB", disk=tmp_path) as model:
            assert model is plain
            assert type(model) is nn.Sequential
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Unsupported, match="no tiered parameters"), zcompile.offloaded(nn.ReLU()):
        pass


def test_stats_are_a_dict_that_reads_well(tmp_path):
    model = on_disk(mlp(), tmp_path)
    stats = zcompile.stats(model)
    assert isinstance(stats, dict)
    assert stats == dict(stats)
    lines = repr(stats).splitlines()
    assert [line.split()[0] for line in lines] == list(stats)
    assert lines[0].startswith("bytes            disk_read 0 B, disk_write")
    assert "step_s           -" in lines
    stats["predicted"] = {
        "step_s": 0.5,
        "phases": {"forward": 0.00632335574914579},
        "bytes": {"h2d": 2048},
        "busy": {"h2d": 0.25},
        "binding": "h2d",
    }
    told = "step_s 500 ms, phases forward 6.32 ms, bytes h2d 2.00 KiB, busy h2d 250 ms, binding h2d"
    assert f"predicted        {told}" in repr(stats).splitlines()
    assert repr(model) == repr(mlp())


CELLS = (
    "import torch, zcompile",
    """model = zcompile.offload(torch.nn.Linear(8, 8), device="cpu", device_memory="1MiB",
                         host_memory="1MiB", disk={disk!r})
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
model""",
    """other = zcompile.offload(torch.nn.Linear(8, 8), device="cpu", disk={disk!r})""",
    "zcompile.close(model)",
)


@pytest.mark.slow
def test_a_cell_is_run_twice_in_a_real_kernel(tmp_path):
    cells = [nbformat.v4.new_code_cell(text.format(disk=str(tmp_path))) for text in CELLS]
    client = NotebookClient(nbformat.v4.new_notebook(cells=cells), allow_errors=True)
    start, build, other, close = range(4)

    def run(index):
        outputs = client.execute_cell(cells[index], index)["outputs"]
        return "\n".join(output.get("evalue") or str(output) for output in outputs)

    with client.setup_kernel():
        assert run(start) == ""
        for _ in range(2):
            assert "Linear(in_features=8" in run(build)
        told = run(other)
        assert "is in use by another model of this process, a Linear that `model`" in told
        assert run(close) == ""
        assert run(other) == ""
