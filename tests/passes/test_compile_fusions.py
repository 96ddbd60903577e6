"""Regions that call fusions in one piece: with a compiler whose code is eager's, all is eager's."""

import functools

import pytest
import torch
from fusion_models import WithLoss, ids
from joint import catch
from sampled import sampled
from small_models import SMALL_MODELS, small

import zcompile
from zcompile.config import Config
from zcompile.frontend import fusions
from zcompile.frontend.offload import session_behind
from zcompile.ir import printer
from zcompile.ir.fusions import Fused, copied, fused_of, fusion_of, fusions_of, made_by, read_by
from zcompile.ir.work import work_of
from zcompile.memory.footprint import footprint
from zcompile.passes.pipeline import pipeline


class Eager(fusions.FusionCompiler):
    """Compiles nothing: the code of a fusion runs as it is."""

    extra = 0

    def __call__(self, nodes):
        made = made_by(nodes)
        gm = copied(nodes, made, read_by(nodes, made))
        key = f"{len(self._known)}"
        self._known[key] = "eager"
        nbytes = sum(n.meta["val"].untyped_storage().nbytes() for n in made) + self.extra
        return Fused(key, fusions._Call(key, gm.forward), nbytes, 1)


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setattr(fusions, "FusionCompiler", Eager)


def trained(model, run, inputs, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    torch.manual_seed(5)
    for _ in range(steps):
        out = run(*inputs)
        parts = out if isinstance(out, tuple) else (out,)
        sum(part.float().square().mean() for part in parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        n: torch.empty(p.shape, dtype=p.dtype).copy_(p.detach())
        for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, "transformer block", "bf16 autocast"))
def test_every_model_trains_with_eagers_bits(name, eager):
    torch._dynamo.reset()
    model, inputs = small(name)
    plain, again = small(name)
    zcompile.offload(
        model, device="cpu", device_memory="8MiB", host_memory="64MiB", regions="inductor"
    )
    expected = trained(plain, plain, again)
    found = trained(model, torch.compile(model, backend="zinf"), inputs)
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert all(weight.isfinite().all() for weight in expected.values())


@functools.cache
def traced():
    return catch(WithLoss(1), ids())


def compiled(extra=0, known=None):
    """The joint graph of a model after all passes."""
    known = [] if known is None else known

    def compiler(nodes):
        made = made_by(nodes)
        nbytes = sum(n.meta["val"].untyped_storage().nbytes() for n in made) + extra
        known.append(Fused(str(len(known)), len, nbytes, 3))
        return known[-1]

    passes = pipeline(Config(device="cpu", regions="inductor"), compiler=compiler)
    return traced().through(*passes)


def test_what_it_takes_beyond_its_results_is_live_for_as_long_as_it_runs():
    extra = 1 << 20
    without, with_it = (
        footprint(joint.graph, joint.plan.params) for joint in (compiled(), compiled(extra))
    )
    assert len(without.curve) == len(with_it.curve)
    for node, less, more in zip(with_it.nodes, without.curve, with_it.curve, strict=True):
        assert more - less == (extra if fusion_of(node) is not None else 0)
    assert with_it.peak > extra


def test_what_it_reads_lives_until_it_is_over_and_what_it_makes_from_where_it_begins():
    joint = compiled()
    held = footprint(joint.graph, joint.plan.params)
    where = {node: at for at, node in enumerate(held.nodes)}
    for members in fusions_of(held.nodes).values():
        first, last = where[members[0]], where[members[-1]]
        made = made_by(members)
        for node in read_by(members, made):
            assert all(storage.last >= last for storage in held.of.get(node, ()))
        for node in made:
            assert all((s.first, s.last >= last) == (first, True) for s in held.of[node])


def test_its_work_is_what_it_reads_and_writes():
    joint = compiled()
    for members in fusions_of(joint.graph.nodes).values():
        made = made_by(members)
        values = [n.meta["val"] for n in (*read_by(members, made), *made)]
        work = work_of(members)
        assert work.ops == 3
        assert work.flops == 0
        assert 0 < work.nbytes <= sum(v.numel() * v.element_size() for v in values)


@pytest.mark.slow  # tests/frontend/test_fusions.py reads the note
def test_what_is_refused_is_run_as_it_is_and_noted_once():
    passes = pipeline(Config(device="cpu", regions="inductor"), compiler=lambda nodes: "not today")
    joint = catch(WithLoss(2), ids()).through(*passes)
    assert not fusions_of(joint.graph.nodes)
    assert not any(fused_of(node) for node in joint.graph.nodes)
    (note,) = [note for note in joint.plan.notes if note.by == "compile-fusions"]
    assert note.text.endswith("run eagerly: not today")


@pytest.mark.slow
def test_dumps_and_schedules_show_what_is_in_one_piece(eager):
    torch._dynamo.reset()
    joint = compiled()
    rows = printer.text(joint.graph).splitlines()
    for members in fusions_of(joint.graph.nodes).values():
        marks = [row[0] for row in rows if row[2:] in [printer.line(node) for node in members]]
        assert marks == ["/", *"|" * (len(members) - 2), "\\"][: len(members)] or marks == ["\\"]
    assert all(row[:2] == "  " for row in rows if "aten.mm(" in row)
    model = WithLoss(1)
    zcompile.offload(
        model, device="cpu", device_memory="8MiB", host_memory="64MiB", regions="inductor"
    )
    torch.compile(model, backend="zinf")(ids())
    texts = [region.text for region in session_behind(model).regions.values()]
    assert any("fused(" in text and "native_layer_norm" in text for text in texts)
