"""Layouts of block-sparse attention: what each reads, block by block, and what computes it."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import absent_card
import pytest
import torch
from fusion_models import allocated_at_most
from torch import Tensor, fx, nn
from torch.nn.attention import flex_attention as torchs

import zcompile
from zcompile.errors import LayoutInvalid, Unsupported
from zcompile.frontend import fusions
from zcompile.ir.fusions import made_by, read_by
from zcompile.ir.torch_compat import Compiled, CompiledFacts
from zcompile.sparse_attention import BigBird, Fixed, Longformer, Pattern, Variable, attend

LAYOUTS = {
    "fixed": Fixed(window=2),
    "fixed, causal, patterns": Fixed(window=4, shared=1, patterns=2, causal=True),
    "fixed, both": Fixed(window=3, shared=1, both=True),
    "variable": Variable(windows=(1, 2, 3), shared=(0, 4), random=1),
    "variable, causal, both": Variable(windows=(2,), both=True, causal=True),
    "bigbird": BigBird(random=2),
    "bigbird, causal": BigBird(random=1, causal=True),
    "longformer": Longformer(window=3, shared=(0, 3)),
    "longformer, causal": Longformer(window=1, causal=True),
}


def drawn(layout: object, blocks: int, head: int = 0) -> list[str]:
    return ["".join(".#"[int(x)] for x in row) for row in layout.reads(head, blocks)]


@pytest.mark.parametrize(
    ("layout", "head", "picture"),
    [
        (Fixed(window=2), 0, "##.#.# ##.#.# .###.# .###.# .#.### .#.###"),
        (Fixed(window=2, patterns=2), 1, "###.#. ###.#. #.###. #.###. #.#.## #.#.##"),
        (Fixed(window=3), 0, "###.# ###.# ###.# ..### ..###"),
        (Fixed(window=3, both=True), 0, "###..# ###..# ###### ..#### ..#### ######"),
        (Variable(windows=(1, 2)), 0, "#.... ###.. ###.. #..## #..##"),
        (Variable(windows=(2,), shared=(3,), both=True), 0, "##.#. ##.#. ..##. ##### ...##"),
        (BigBird(random=0), 0, "##### ###.. ####. #.### #..##"),
        (Longformer(window=1, shared=(2,)), 0, "#.#. .##. #### ..##"),
        (Longformer(window=3, shared=(9,)), 0, "##.. ###. .### ..##"),
    ],
)
def test_what_a_layout_reads(layout, head, picture):
    rows = picture.split()
    assert drawn(layout, len(rows), head) == rows


@pytest.mark.parametrize("layout", [BigBird(random=2), Variable(random=2, shared=(), windows=(1,))])
def test_drawn_blocks_are_as_many_and_the_same_each_time(layout):
    bare = BigBird(random=0) if isinstance(layout, BigBird) else Variable((1,), ())
    more = (layout.reads(0, 9) & ~bare.reads(0, 9)).sum(1)
    assert more.max() <= 2
    assert more.sum() > 0
    assert torch.equal(layout.reads(0, 9), layout.reads(0, 9))
    assert not torch.equal(layout.reads(0, 9), layout.reads(1, 9))


def test_causal_layouts_draw_what_they_may_read():
    made = Variable((1,), (), random=9, causal=True).reads(0, 9)
    assert torch.equal(made, torch.ones(9, 9).tril().bool())


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_query_reads_its_own_block(name):
    pattern = Pattern(LAYOUTS[name], heads=2, tokens=90, block=16)
    assert pattern.reads.diagonal(dim1=1, dim2=2).all()
    assert pattern.dense.any(2).all()
    assert 0 < pattern.share < 1


@pytest.mark.parametrize(("tokens", "block"), [(96, 16), (90, 16), (256, 128), (300, 64), (7, 16)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_are_those_of_the_dense_mask(name, tokens, block):
    """What torch makes of the dense mask by looking at every pair."""
    pattern = Pattern(LAYOUTS[name], heads=2, tokens=tokens, block=block)
    made = pattern.blocks
    tile = made.BLOCK_SIZE[0]
    assert tile == max(128, block)
    wanted = torchs.create_block_mask(
        made.mask_mod, 1, 2, tokens, tokens, device="cpu", BLOCK_SIZE=tile
    )
    assert torch.equal(made.to_dense(), wanted.to_dense())
    assert made.seq_lengths == (tokens, tokens)
    at = torch.arange(tokens)
    rule = [made.mask_mod(0, head, at[:, None], at[None]) for head in range(2)]
    assert torch.equal(torch.stack(rule), pattern.dense)
    whole = torch.zeros(2, *wanted.to_dense().shape[2:], dtype=torch.bool)
    for head in range(2):
        for row, count in enumerate(made.full_kv_num_blocks[0, head]):
            whole[head, row, made.full_kv_indices[0, head, row, :count].long()] = True
    spread = whole.repeat_interleave(tile, 1).repeat_interleave(tile, 2)[:, :tokens, :tokens]
    assert not (spread & ~pattern.dense).any(), "a tile that is taken whole is read whole"


def operands(heads: int, tokens: int, grad: bool = False) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, tokens, 8, generator=source).requires_grad_(grad) for _ in range(3)
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_flex_attention_computes_the_dense_reference(name):
    pattern = Pattern(LAYOUTS[name], heads=2, tokens=80, block=16)
    given = operands(2, 80)
    flex, dense = (attend(*given, pattern, by=by) for by in ("flex", "dense"))
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-6)
    scores = given[0] @ given[1].transpose(2, 3) / 8**0.5
    formula = scores.masked_fill(~pattern.dense, -torch.inf).softmax(-1) @ given[2]
    torch.testing.assert_close(dense, formula, rtol=1e-5, atol=1e-6)


def test_training_by_flex_attention_is_refused_on_the_cpu_and_the_reference_trains():
    pattern = Pattern(Longformer(), heads=1, tokens=64, block=16)
    given = operands(1, 64, grad=True)
    with pytest.raises(Unsupported, match=r"no backward on the CPU.*by='dense'"):
        attend(*given, pattern)
    attend(*given, pattern, by="dense").sum().backward()
    assert all(t.grad is not None for t in given)


class Block(nn.Module):
    """Attention of 2 heads of a pattern, between two products."""

    def __init__(self, pattern: Pattern, by: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.pattern, self.by = pattern, by

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = attend(q, k, v, self.pattern, by=self.by)
        return self.out(y.transpose(1, 2).flatten(2))


def tiered(pattern: Pattern, by: str, **fields: Any) -> Block:
    model = Block(pattern, by)
    known = {"device": "cpu", "device_memory": "8MiB", "host_memory": "16MiB"}
    zcompile.offload(model, **{**known, **fields})
    torch._dynamo.reset()
    return model


X = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("by", ["flex", "dense"])
@pytest.mark.slow
def test_a_compiled_model_infers_as_eager(by):
    pattern = Pattern(BigBird(causal=True), heads=2, tokens=64, block=16)
    model = tiered(pattern, by)
    with torch.no_grad():
        made = torch.compile(model, backend="zinf")(X)
        assert torch.equal(made, Block(pattern, by)(X))


# --- Regions by Inductor ---

OWN = Pattern(Longformer(window=1, shared=()), heads=2, tokens=300, block=128)
"""A token reads the tile that it is in, and no other; the last is not whole."""
LONG = torch.randn(2, OWN.tokens, 16, generator=torch.Generator().manual_seed(1))


def infers(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.compile(model, backend="zinf")(x).clone()


@pytest.mark.parametrize("regions", ["inductor", "eager"])
def test_inductor_computes_no_tile_that_nobody_reads(regions):
    """Zero times NaN is NaN: where it is computed, it shows, as it does by eager's formula."""
    model = tiered(OWN, "flex", regions=regions)
    clean = infers(model, LONG)
    torch.testing.assert_close(clean, Block(OWN, "dense")(LONG), rtol=1e-5, atol=1e-6)
    spoiled = LONG.clone()
    spoiled[:, 128:256] = torch.nan
    made = infers(model, spoiled)
    assert made[:, 128:256].isnan().all()
    others = torch.cat([made[:, :128], made[:, 256:]], 1)
    if regions == "eager":
        assert others.isnan().all()
        return
    assert torch.equal(others, torch.cat([clean[:, :128], clean[:, 256:]], 1))
    assert zcompile.stats(model)["fusions"]["refused"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fixed, causal, patterns", "variable", "bigbird, causal"])
def test_inductor_computes_the_bits_of_torch_compile(layout):
    pattern = Pattern(LAYOUTS[layout], heads=2, tokens=300, block=64)
    made = infers(tiered(pattern, "flex", regions="inductor"), LONG)
    torch._dynamo.reset()
    plain = Block(pattern, "flex")
    with torch.no_grad():
        assert torch.equal(made, torch.compile(plain)(LONG))


class Masks(nn.Module):
    """One sum of attention under several masks, which are told apart by their rules alone."""

    def __init__(self, *rules: Callable[..., Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.masks = [
            torchs.create_block_mask(rule, None, None, 256, 256, device="cpu") for rule in rules
        ]

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return sum(torchs.flex_attention(x, x, x, block_mask=mask) for mask in self.masks)


def back(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def ahead(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key >= query


def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query - key <= torch.tensor([3])[0]


SQUARE = torch.randn(1, 2, 256, 8, generator=torch.Generator().manual_seed(2))


def with_masks(
    monkeypatch: pytest.MonkeyPatch, *rules: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What regions by Inductor compute, what eager does, and counts of fusions. What Inductor is
    given is run as it is, which takes no compiler."""

    def as_it_is(gm: fx.GraphModule, *_: Any, **options: Any) -> Compiled:
        return Compiled(gm.forward, None, CompiledFacts(0, 1, (None,)))

    monkeypatch.setattr(fusions, "compile_by_inductor", as_it_is)
    monkeypatch.setattr(fusions._Kept, "write_facts", lambda *_: None)
    torch._dynamo.reset()
    plain, model = Masks(*rules), Masks(*rules)
    fields = {"device": "cpu", "device_memory": "16MiB", "host_memory": "16MiB"}
    zcompile.offload(model, regions="inductor", **fields)
    with torch.no_grad():
        return infers(model, SQUARE), plain(SQUARE), zcompile.stats(model)["fusions"]


def test_a_mask_is_compiled_once_and_not_taken_for_another(monkeypatch):
    found, wanted, counts = with_masks(monkeypatch, back, ahead, back)
    assert torch.equal(found, wanted)
    assert counts["refused"] == {}
    assert counts["distinct"] == 2, "what lies between is one op each, left to eager"


def test_a_mask_with_numbers_of_its_own_is_left_to_eager(monkeypatch):
    found, wanted, counts = with_masks(monkeypatch, near)
    assert torch.equal(found, wanted)
    ((why,),) = counts["refused"].values()
    assert "has constants of its own" in why


def within(reach: Any) -> Callable[..., Tensor]:
    return lambda batch, head, query, key: (query - key).abs() <= reach


class Given(Masks):
    """Attention under a mask that each call is given."""

    def forward(self, x: Tensor, mask: torchs.BlockMask) -> Tensor:
        x = x * self.scale
        return torchs.flex_attention(x, x, x, block_mask=mask)


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        ([(within(n), 128) for n in (3, 40, 4)], ["a number that its mask"]),
        ([(within(n), 128) for n in (3.5, 40.5, 4.5)], ["a number that its mask"]),
        ([(back, block) for block in (128, 64, 32)], ["its mask's blocks"]),
        pytest.param(  # each of the two by itself, above
            [(within(n), block) for n, block in ((3, 128), (40, 128), (4, 64))],
            ["a number that its mask", "its mask's blocks"],
            marks=pytest.mark.slow,
        ),
        ([(within(torch.tensor(n)), 128) for n in (3, 40, 4)], []),
    ],
    ids=["ints", "floats", "block sizes", "ints, then block sizes", "tensors"],
)
def test_a_mask_may_change_from_call_to_call(masks, said, monkeypatch, caplog):
    """A number of its own is dynamic from its second value on, which is said; a tensor is not."""

    def as_it_is(gm: fx.GraphModule, *_: Any, **options: Any) -> Compiled:
        return Compiled(gm.forward, None, CompiledFacts(0, 1, (None,)))

    monkeypatch.setattr(fusions, "compile_by_inductor", as_it_is)
    monkeypatch.setattr(fusions._Kept, "write_facts", lambda *_: None)
    torch._dynamo.reset()
    plain, model = Given(), Given()
    fields = {"device": "cpu", "device_memory": "16MiB", "host_memory": "16MiB"}
    zcompile.offload(model, regions="inductor", **fields)
    run = torch.compile(model, backend="zinf")
    with torch.no_grad():
        for rule, block in masks:
            mask = torchs.create_block_mask(
                rule, None, None, 256, 256, device="cpu", BLOCK_SIZE=block
            )
            assert torch.equal(run(SQUARE, mask), plain(SQUARE, mask))
    found = zcompile.stats(model)["fusions"]
    assert found["distinct"] == 1
    assert list(found["refused"]) == (["flex_attention"] if said else [])
    for part, why in zip(said, found["refused"].get("flex_attention", []), strict=True):
        assert part in why
        assert "dynamic=False" in why
        assert why in caplog.text


def test_what_attention_takes_is_far_less_than_all_pairs(monkeypatch):
    """Its result counts; tiles of each thread are what the kernel takes for itself."""
    seen = []

    class Seen(fusions.FusionCompiler):
        def __call__(self, nodes):
            fused = super().__call__(nodes)
            seen.append((fused, [n.meta["val"] for n in read_by(nodes, made_by(nodes))]))
            return fused

    monkeypatch.setattr(fusions, "FusionCompiler", Seen)
    infers(tiered(OWN, "flex", regions="inductor"), LONG)
    ((fused, fakes),) = seen
    values = [torch.empty_strided(f.size(), f.stride(), dtype=f.dtype).zero_() for f in fakes]
    assert fused.nbytes == LONG.nbytes
    pairs = 2 * 2 * OWN.tokens**2 * 4
    assert fused.nbytes <= allocated_at_most(fused.call, values) < pairs / 3


@pytest.mark.slow
def test_inductor_writes_kernels_for_a_gpu_in_both_phases():
    """Without one: the code is written and looked at. Its memory is known; it calls no library."""
    pytest.importorskip("triton")
    helpers = Path(absent_card.__file__)
    paths = (helpers.parent, Path(zcompile.__file__).parent.parent)
    ran = subprocess.run(
        [sys.executable, str(helpers)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(ran.stdout.splitlines()[-1])
    value, row = (4 * math.prod(size) for size in ((2, 2, 256, 64), (2, 2, 256)))
    # Beside what it returns, the largest score of each row; and for gradients, a sum of each.
    assert told["forward"]["nbytes"] == value + 2 * row
    assert told["backward"]["nbytes"] == 3 * value + row
    for phase, kernels in (("forward", 1), ("backward", 2)):
        assert told[phase]["kernels"] == kernels
        assert not told[phase]["called"]
        assert not told[phase]["shared"]


# --- Training ---


def trained(model: nn.Module, call: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for _ in range(4):
        call(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("by", ["flex", "dense"])
def test_a_compiled_model_trains_to_the_bits_of_eager(by, monkeypatch):
    """`flex_attention` as on a GPU: what keeps it from its backward here is lifted. Its formula
    has one on any device, and graphs that are given to its ops cross both phases."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *given: None)
    monkeypatch.setattr("zcompile.sparse_attention._backward_is_missing", lambda *given: False)
    pattern = Pattern(Fixed(window=2, causal=True), heads=2, tokens=64, block=16)
    plain, model = Block(pattern, by), tiered(pattern, by)
    wanted = trained(plain, plain)
    found = trained(model, torch.compile(model, backend="zinf"))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.slow
def test_training_that_inductor_has_no_kernel_for_is_left_to_eager(monkeypatch):
    """As above, by regions of Inductor: it writes a backward for GPUs alone."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *given: None)
    monkeypatch.setattr("zcompile.sparse_attention._backward_is_missing", lambda *given: False)
    pattern = Pattern(Fixed(window=2, causal=True), heads=2, tokens=64, block=16)
    plain, model = Block(pattern, "flex"), tiered(pattern, "flex", regions="inductor")
    plain(X).square().mean().backward()
    torch.compile(model, backend="zinf")(X).square().mean().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.cpu(), wanted.grad, rtol=1e-5, atol=1e-7)
    refused = zcompile.stats(model)["fusions"]["refused"]
    assert {"flex_attention", "flex_attention_backward"} <= set(refused)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Fixed(window=0), "Fixed: window=0 must be one or more"),
        (lambda: Fixed(window=2, shared=1, patterns=3), "3 patterns of 1 shared are more blocks"),
        (lambda: Variable(windows=()), r"Variable: windows=\(\) must be one or more each"),
        (lambda: Variable(shared=(-1,)), r"Variable: shared=\(-1,\) must not be negative"),
        (lambda: BigBird(window=2), "BigBird: window=2 must be odd"),
        (lambda: BigBird(random=-1), "BigBird: random=-1 must not be negative"),
        (lambda: Longformer(window=4), "Longformer: window=4 must be odd"),
        (lambda: Pattern(Fixed(), 0, 8), "Pattern: heads=0 must be one or more"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make, told):
    with pytest.raises(LayoutInvalid, match=told):
        make()


def test_what_does_not_fit_a_pattern_is_refused():
    pattern = Pattern(Longformer(), heads=2, tokens=64, block=16)
    with pytest.raises(LayoutInvalid, match=r"size \[2, 2, 48, 8\] is not \[batch, 2, 64, width\]"):
        attend(*operands(2, 48), pattern)
    with pytest.raises(LayoutInvalid, match="by='triton' is not one of flex, dense"):
        attend(*operands(2, 64), pattern, by="triton")
