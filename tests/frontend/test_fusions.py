"""Regions by Inductor: whose bits they have, what they take, when they are compiled, and when not.

Inductor writes C++ here. The first test of a process waits for the compiler; what is compiled once
is in torch's cache, so that the other tests, which have the same fusions, do not.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fusion_models import MODELS, WithLoss, allocated_at_most, ids, offloaded, results, seeded
from sampled import sampled, sampled_rows
from torch import nn
from torch._inductor import config as inductor

import zcompile
from zcompile.errors import CompilerMissing
from zcompile.frontend import fusions
from zcompile.ir.fusions import made_by, read_by
from zcompile.ir.torch_compat import Compiled, CompiledFacts
from zcompile.ir.units import Bytes, KiB


def fusions_of(model):
    return zcompile.stats(model)["fusions"]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model, run, optimizer=None, begin=0, end=5, given=ids):
    optimizer = optimizer or adamw(model)
    losses = []
    for number in range(begin, end):
        loss = run(given(number))
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Small(nn.Module):
    """Two runs of ops, of which one has a norm, and its loss: the compiler is asked little."""

    def __init__(self):
        super().__init__()
        first = (nn.Linear(32, 32), nn.Tanh(), nn.Sigmoid())
        self.layers = nn.Sequential(*first, nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())

    def forward(self, x):
        return self.layers(x).square().mean()


def rows(number=0):
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(number))


FUSED = {"small": (Small, rows), **MODELS}
LEAST = {"small": 1, **dict.fromkeys(MODELS, 5)}
"""More distinct fusions than so many does a model have."""


# --- Whose bits ---


@pytest.mark.parametrize("name", sampled(FUSED, "small"))
def test_bits_are_those_of_torch_compile(name):
    """Convolutions are called with the strides that eager gives them; torch.compile is told to do
    the same."""
    build, given = FUSED[name]
    model, run = offloaded(build)
    ours = results(run, model, given(0))
    found = fusions_of(model)
    assert found["distinct"] > LEAST[name]
    assert found["refused"] == {}
    torch._dynamo.reset()
    other = seeded(build)
    with inductor.patch(layout_optimization=False):
        assert ours.equals(results(torch.compile(other), other, given(0)))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_errors_in_bf16_are_those_of_torch_compile(name):
    """Of every gradient and of the loss, against float64, relative to the norm and over some
    batches: each rounding by itself is as likely up as down."""
    build, given = MODELS[name]
    model, run = offloaded(build)
    other = seeded(build)
    exact = seeded(build).double()
    squares = {}
    stock = torch.compile(other)
    for number in range(12):
        truth = results(exact, exact, given(number))
        for which, found in enumerate(
            (
                results(run, model, given(number), amp=True),
                results(stock, other, given(number), amp=True),
            )
        ):
            for key, grad in {**found.grads, "loss": found.loss}.items():
                wanted = {**truth.grads, "loss": truth.loss}[key]
                error = ((grad.double() - wanted).norm() / wanted.norm()).item()
                squares[which, key] = squares.get((which, key), 0.0) + error**2
    for _, key in [row for row in squares if row[0] == 0]:
        assert squares[0, key] <= 1.1**2 * squares[1, key], key


STREAMED = {"residency": False, "device_memory": Bytes(160 * KiB)}
PLACES = {
    "all on the device": {},
    "streamed": STREAMED,
    "activations on the host": {**STREAMED, "activations": "offload"},
    "on disk": {**STREAMED, "host_memory": Bytes(400 * KiB)},
}


@pytest.mark.slow  # tests/passes/test_compile_fusions.py trains all models, uncompiled
def test_where_bytes_rest_changes_no_bit(tmp_path):
    found, stats = {}, {}
    for name, fields in PLACES.items():
        if name == "on disk":
            fields = {**fields, "disk": tmp_path}
        if name == "activations on the host":
            held = stats["streamed"]["peak"]["activations"]
            arena = stats["streamed"]["planned_peak"]["device"]
            fields = {**fields, "device_memory": Bytes(held * 9 // 10 + arena)}
        model, run = offloaded(WithLoss, **fields)
        found[name] = (
            train(model, run),
            {n: torch.empty(p.shape).copy_(p.detach()) for n, p in model.named_parameters()},
        )
        stats[name] = zcompile.stats(model)
        zcompile.close(model)
    # Each does what it is called.
    assert stats["streamed"]["gathers"] > stats["all on the device"]["gathers"]
    assert stats["on disk"]["bytes"]["disk_write"]
    assert not stats["streamed"]["bytes"]["disk_write"]
    held = {name: row["peak"]["activations"] for name, row in stats.items()}
    assert held["activations on the host"] < held["streamed"]
    # And all train alike.
    losses, weights = found["all on the device"]
    for name, (others, their) in found.items():
        assert others == losses, name
        assert all(torch.equal(weights[n], their[n]) for n in weights), name


@pytest.mark.slow  # tests/passes/test_find_fusions.py: no random op is a member
def test_dropout_draws_the_numbers_of_eager():
    """Where a mask drops a logit, its gradient is zero: in the head's bias, say, which is summed
    over tokens, a single other mask would show."""

    def build():
        return WithLoss(dropout=0.5)

    model, run = offloaded(build)
    plain = seeded(build)
    torch.manual_seed(7)
    ours = results(run, model, ids())
    torch.manual_seed(7)
    eager = results(plain, plain, ids())
    torch.testing.assert_close(ours.loss, eager.loss, rtol=1e-6, atol=0)
    for name, grad in eager.grads.items():
        torch.testing.assert_close(ours.grads[name], grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(torch.rand(3), _after(plain, 7)), "as many numbers were drawn"


def _after(plain, seed):
    torch.manual_seed(seed)
    results(plain, plain, ids())
    return torch.rand(3)


@pytest.mark.slow
def test_a_model_trains_alike_twice():
    (first, _), (second, _) = (
        (train(*made), zcompile.close(made[0])) for made in (offloaded(WithLoss) for _ in range(2))
    )
    assert first == second


# --- What they take ---


@pytest.mark.slow  # what each fusion takes is measured below
def test_a_planned_step_holds_what_was_predicted():
    """With room for all, so that regions are joined, and with little."""
    for fields in ({}, {"device_memory": Bytes(288 * KiB)}):
        model, run = offloaded(WithLoss, **fields)
        optimizer = adamw(model)
        train(model, run, optimizer, 0, 4)
        zcompile.stats(model, reset=True)
        train(model, run, optimizer, 4, 6)
        stats = zcompile.stats(model)
        assert stats["predicted"] is not None
        for what in ("activations", "device", "together"):
            assert stats["peak"][what] == stats["predicted"]["peak"][what], what
        zcompile.close(model)


@pytest.mark.parametrize("amp", sampled([False, True], False))
@pytest.mark.parametrize("name", sampled(FUSED, "small"))
def test_what_a_fusion_takes_is_known_to_the_byte(name, amp, monkeypatch):
    seen = []

    class Seen(fusions.FusionCompiler):
        def __call__(self, nodes):
            fused = super().__call__(nodes)
            made = made_by(nodes)
            seen.append((fused, [n.meta["val"] for n in read_by(nodes, made)], len(made)))
            return fused

    monkeypatch.setattr(fusions, "FusionCompiler", Seen)
    build, given = FUSED[name]
    model, run = offloaded(build)
    results(run, model, given(0), amp)
    assert len(seen) > LEAST[name]
    for fused, fakes, made in seen:
        values = [torch.empty_strided(f.size(), f.stride(), dtype=f.dtype).zero_() for f in fakes]
        with torch.no_grad():
            assert len(fused.call(*values)) == made
        assert allocated_at_most(fused.call, values) == fused.nbytes
        assert fused.kernels > 0


# --- When they are compiled, and when not ---


@pytest.mark.slow
def test_a_deeper_model_compiles_no_more():
    found = []
    for layers in (2, 4):
        model, run = offloaded(lambda layers=layers: WithLoss(layers))
        results(run, model, ids())
        found.append(fusions_of(model)["compiled"])
    assert found[0] == found[1] > 5


def test_what_inductor_refuses_runs_eagerly_with_a_note(monkeypatch, tmp_path, caplog):
    compile_by_inductor = fusions.compile_by_inductor

    def picky(gm, *rest, **options):
        if any("layer_norm" in str(node.target) for node in gm.graph.nodes):
            raise RuntimeError("no norms today\nat length")
        return compile_by_inductor(gm, *rest, **options)

    monkeypatch.setattr(fusions, "compile_by_inductor", picky)
    model, run = offloaded(Small, dump=tmp_path)
    ours = results(run, model, rows())
    refused = fusions_of(model)["refused"]
    assert refused
    assert all(reasons == ["RuntimeError: no norms today"] for reasons in refused.values())
    assert all("native_layer_norm" in ops for ops in refused)
    assert fusions_of(model)["compiled"], "what it does not refuse is compiled"
    assert "Inductor does not compile" in caplog.text
    (passes,) = tmp_path.rglob("passes.json")
    (row,) = [row for row in json.loads(passes.read_text()) if row["name"] == "compile-fusions"]
    assert any("run eagerly: RuntimeError: no norms today" in note for note in row["notes"])
    plain = seeded(Small)
    torch.testing.assert_close(ours.loss, results(plain, plain, rows()).loss)


@pytest.mark.parametrize(
    ("field", "told", "said"),
    [
        ("shared", "buf0", "the memory of its result buf0 is not its own"),
        ("strides", ((7,),) * 9, "would have other strides than eager's"),
        ("called", "extern_kernels.mm", "Inductor calls extern_kernels.mm for it"),
    ],
)
def test_results_whose_memory_is_not_as_counted_are_refused(field, told, said, monkeypatch):
    known = CompiledFacts(64, 1, ((32, 1),) * 9)

    def strange(*given, **options):
        return Compiled(lambda *values: values, None, replace(known, **{field: told}))

    monkeypatch.setattr(fusions, "compile_by_inductor", strange)
    monkeypatch.setattr(fusions._Kept, "write_facts", lambda *_: None)
    model, run = offloaded(nn_gelu)
    run(torch.randn(4, 32)).sum().backward()
    found = fusions_of(model)
    assert found["compiled"] == 0
    assert any(said in why for reasons in found["refused"].values() for why in reasons)


def nn_gelu():
    """Two results of each fusion: the product before, and what is made of it."""
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32))


@pytest.mark.slow
def test_an_interrupt_is_delivered_when_inductor_has_ended(monkeypatch):
    """Its thread has torch's settings changed, and would go on without anybody."""
    compile_by_inductor = fusions.compile_by_inductor
    ended = []

    def slow(*given, **options):
        if not ended:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        made = compile_by_inductor(*given, **options)
        if "cached" not in options:  # else once more, for what torch's cache does not know
            ended.append(made)
        return made

    monkeypatch.setattr(fusions, "compile_by_inductor", slow)
    model, run = offloaded(nn_gelu)
    with pytest.raises(KeyboardInterrupt):
        run(torch.randn(4, 32))
    assert len(ended) == 1, "it was waited for, and nothing was compiled behind it"
    torch._dynamo.reset()
    run(torch.randn(4, 32)).sum().backward()
    assert fusions_of(model)["refused"] == {}


def test_dynamic_sizes_run_eagerly_with_a_note(tmp_path):
    torch._dynamo.reset()
    model, _ = offloaded(nn_gelu, dump=tmp_path)
    run = torch.compile(model, backend="zinf", dynamic=True)
    for rows in (4, 6):
        assert run(torch.randn(rows, 32)).shape == (rows, 32)
    notes = [
        note
        for path in tmp_path.rglob("passes.json")
        for row in json.loads(path.read_text())
        for note in row["notes"]
    ]
    assert any("sizes are dynamic" in note for note in notes)


def test_a_compilation_may_ask_for_it_by_itself():
    torch._dynamo.reset()
    model, _ = offloaded(nn_gelu, regions="auto")
    x = torch.randn(4, 32)
    torch.compile(model, backend="zinf")(x)
    assert zcompile.stats(model)["fusions"] is None
    torch._dynamo.reset()
    torch.compile(model, backend="zinf", options={"regions": "inductor"})(x)
    assert fusions_of(model)["distinct"]


@pytest.mark.slow
def test_a_dry_run_compiles_nothing_and_predicts(monkeypatch):
    monkeypatch.setattr(fusions, "compile_by_inductor", None)
    monkeypatch.setattr(fusions, "missing_compiler", None)
    with torch.device("meta"):
        model = WithLoss()
    plans = {
        regions: zcompile.plan(model, ids(), machine="desktop-24gb", regions=regions)
        for regions in ("eager", "inductor")
    }
    assert plans["inductor"].step_seconds < plans["eager"].step_seconds, "less is read and written"


# --- Without a compiler ---

WITHOUT = """
import torch, zcompile
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
fields = {"device": "cpu", "device_memory": "1MiB", "host_memory": "4MiB"}
for ask in (
    lambda: zcompile.offload(model, regions="inductor", **fields),
    lambda: torch.compile(zcompile.offload(model, **fields), backend="zinf",
                          options={"regions": "inductor"})(torch.ones(2, 8)),
):
    try:
        ask()
    except Exception as error:  # on purpose: whatever is raised is printed, and compared outside
        error = getattr(error, "inner_exception", error)
        print(type(error).__name__, str(error).splitlines()[0])
torch._dynamo.reset()
torch.compile(model, backend="zinf")(torch.ones(2, 8)).sum().backward()
print("trains", model[0].weight.grad is not None)
"""


@pytest.mark.slow
def test_without_a_compiler_all_else_works_and_the_error_says_what_to_install(tmp_path):
    """In a process that finds no program at all."""
    environment = {**os.environ, "PATH": str(tmp_path), "ZINF_PROGRESS": "0"}
    environment.pop("CXX", None)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env={**environment, "PYTHONPATH": str(Path(zcompile.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, last = ran.stdout.splitlines()
    assert first.startswith("CompilerMissing regions='inductor'")
    assert second.startswith("CompilerMissing regions='inductor'")
    assert "apt-get install g++" in first
    assert "apt-get install g++" in second
    assert last == "trains True"


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(fusions, "missing_compiler", lambda device: "Triton for this GPU")
    with pytest.raises(CompilerMissing, match="cuda device with Triton for this GPU"):
        fusions.check_compiler(torch.device("cuda"))


# --- Kept beside a run ---


def dropping():
    return WithLoss(dropout=0.1)


def durable(disk, build=dropping):
    model, run = offloaded(build, disk=disk, durable=True, host_memory=Bytes(512 * KiB))
    return model, run, adamw(model)


def weights_of(model):
    return {name: torch.empty(p.shape).copy_(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("build", "given", "least"),
    sampled_rows([(Small, rows, 1), (dropping, ids, 5)], (Small, rows, 1)),
)
@pytest.mark.slow
def test_a_resumed_run_computes_with_the_kernels_that_it_began_with(
    build, given, least, tmp_path, monkeypatch
):
    disk, whole = tmp_path / "disk", tmp_path / "whole"
    model, run, optimizer = durable(whole, build)
    torch.manual_seed(3)
    train(model, run, optimizer, 0, 4, given)
    expected = weights_of(model)
    zcompile.close(model)
    # Once more, and in two.
    model, run, optimizer = durable(disk, build)
    torch.manual_seed(3)
    train(model, run, optimizer, 0, 2, given)
    began = fusions_of(model)
    zcompile.close(model)
    monkeypatch.setattr(fusions, "compile_by_inductor", None)
    model, run, optimizer = durable(disk, build)
    zcompile.resume(disk, model, optimizer)
    train(model, run, optimizer, 2, 4, given)
    found = fusions_of(model)
    assert found["compiled"] == 0
    assert found["loaded"] == began["compiled"] > least
    weights = weights_of(model)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    zcompile.close(model)


@pytest.mark.parametrize(
    "harm", sampled(["cut short", "of another torch", "others may write"], "others may write")
)
def test_an_artifact_that_is_of_no_use_is_compiled_anew(harm, tmp_path, caplog):
    def distinct():
        model, run, _ = durable_mlp(tmp_path)
        run(torch.randn(4, 32)).sum().backward()
        found = fusions_of(model)
        zcompile.close(model)
        return found

    began = distinct()
    folder = tmp_path / fusions.FOLDER
    kept = sorted(folder.glob("*.bin"))
    assert len(kept) == began["compiled"] > 0
    for path in kept:
        if harm == "cut short":
            path.write_bytes(path.read_bytes()[:100])
        elif harm == "of another torch":
            path.write_bytes(path.read_bytes().replace(b"CacheCompiled", b"OtherCompiled"))
        else:
            path.chmod(0o666)
    found = distinct()
    assert (found["loaded"], found["compiled"]) == (0, began["compiled"])
    assert ("others than its user" if harm == "others may write" else "anew") in caplog.text


def durable_mlp(disk):
    model, run = offloaded(nn_gelu, disk=disk, durable=True, host_memory=Bytes(512 * KiB))
    return model, run, adamw(model)


RESUMED = """
import json, sys, torch, zcompile
torch.set_num_threads(1)
from test_fusions import durable, fusions_of, train, weights_of
disk, begin, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model, run, optimizer = durable(disk)
if begin:
    zcompile.resume(disk, model, optimizer)
else:
    torch.manual_seed(3)
train(model, run, optimizer, begin, end)
torch.save(weights_of(model), sys.argv[4])
print(json.dumps(fusions_of(model)))
zcompile.close(model)
"""


@pytest.mark.slow
def test_a_second_process_resumes_bit_by_bit(tmp_path):
    """With an empty cache of torch's, which only the process that has nothing to resume shares."""

    def run(disk, begin, end, name, cache):
        here = Path(__file__).parent
        paths = [here, here.parent / "helpers", here.parent.parent]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache),
        }
        args = [str(tmp_path / disk), str(begin), str(end), str(tmp_path / f"{name}.pt")]
        ran = subprocess.run(
            [sys.executable, "-c", RESUMED, *args],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return torch.load(tmp_path / f"{name}.pt"), json.loads(ran.stdout.splitlines()[-1])

    _, began = run("disk", 0, 2, "began", "cache")
    weights, found = run("disk", 2, 4, "resumed", "empty")
    expected, _ = run("whole", 0, 4, "whole", "cache")
    assert found["compiled"] == 0
    assert found["loaded"] == began["compiled"] > 5
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
