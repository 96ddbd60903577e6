"""PyTorch's own tables of ops, modules and optimizers: bit-equal with offload, or refused.

A sample here; all of it in the slow tests, and by `python -m torch_tables` (see there). What takes
seconds to import, torch's tables, is imported by the tests that use it: every process of tests
imports this file.
"""

import json
import os
from collections import Counter

import pytest
import torch
from torch_tables import pool, suite
from torch_tables.__main__ import reported
from torch_tables.outcomes import judged
from torch_tables.tiers import TIERS, Tier

from zcompile.runtime.eager.streaming import Chunked

OPS = {
    "views": ["diagonal", "as_strided.partial_views", "transpose", "unsafe_chunk", "view_as_real"],
    "meanings of their own": ["clone", "fill", "zeros_like", "to", "resize_", "copysign"],
    "elementwise": ["add", "where", "lerp", "addcmul", "clamp", "frexp", "sgn"],
    "whole": [
        "matmul",
        "softmax.with_dtype",
        "addbmm",
        "native_batch_norm",
        "index_put",
        "sort",
        "cat",
        "linalg.qr",
        "nn.functional.conv2d",
        "var_mean",
        "nn.functional.dropout",
    ],
    "torch asks for the class": ["__rmatmul__", "linalg.eigvalsh", "linalg.matrix_rank", "svd"],
}
"""Some ops for each road that `zcompile/runtime/eager/dispatch.py` takes, and what is listed as not
equal."""
RARE = ["masked_fill", "prod", "tensor_split"]
"""What is listed of these is met in few samples."""
FEW = ["add", "matmul", "diagonal", "index_put", "native_batch_norm"]
OTHER_DTYPES = {
    "complex64": ["mul", "real", "conj", "linalg.qr", "linalg.pinv"],
    "bfloat16": ["add", "sum"],
    "int64": ["add", "cumsum", "bitwise_and"],
    "bool": ["logical_and", "any"],
}
MODULES = ["nn.Linear", "nn.BatchNorm1d", "nn.Embedding"]


def worked_off(units):
    found = pool.work(units, workers=int(os.environ.get("TABLES_WORKERS", "1")))
    print(suite.summary(found))  # noqa: T201  # shown by pytest -s, and where a test fails
    return found


def check(found, table, complete=False):
    """Every outcome is equal or listed; if `complete`, all that is listed of `table` was met."""
    found = [told for told in found if told.unit["table"] == table]
    assert not suite.wrong(found)
    assert sum(told.counts.get("equal", 0) for told in found) > len(found)
    if complete:
        assert not suite.idle(found, [table]), "listed, and not met"


@pytest.fixture(scope="module")
def sample():
    """One process for all: it takes seconds to import the tables."""
    names = [name for group in OPS.values() for name in group]
    units = suite.units("ops", ["host"], names, most=2)
    units += suite.units("ops", ["host"], RARE)
    for tier in ("disk", "device"):
        units += suite.units("ops", [tier], FEW, most=1)
    for dtype, some in OTHER_DTYPES.items():
        units += suite.units("ops", ["host"], some, [dtype], most=1)
    units += suite.units("modules", ["disk"], MODULES[:1], most=1)
    units += suite.units("modules", ["host"], MODULES[1:], most=1, calls=["eager"])
    units += suite.units("optimizers", ["host"], ["SGD", "Adafactor"], most=2, calls=["eager"])
    units += suite.units("optimizers", ["disk"], ["AdamW"], most=1)
    units += suite.units("optimizers", ["host"], ["SparseAdam"], most=1, calls=["compiled"])
    return worked_off(units)


@pytest.mark.timeout(3600)  # on a busy machine: a process is started, and torch's tables imported
@pytest.mark.parametrize("table", ["ops", "modules", "optimizers"])
def test_a_sample_of_the_tables_of_torch(sample, table):
    check(sample, table, complete=True)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("tier", TIERS)
def test_every_op_of_torch(tier):
    check(worked_off(suite.units("ops", [tier], most=12)), "ops", complete=True)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("dtype", OTHER_DTYPES)
def test_every_op_of_torch_in_another_dtype(dtype):
    check(worked_off(suite.units("ops", ["host"], dtypes=[dtype], most=2)), "ops")


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("calls", ["eager", "compiled"])
@pytest.mark.parametrize("table", ["modules", "optimizers"])
def test_every_module_and_optimizer_of_torch(table, calls, tier):
    units = suite.units(table, [tier], most=None if table == "optimizers" else 4, calls=[calls])
    check(worked_off(units), table, complete=calls == "compiled")


def test_a_case_that_kills_its_process_is_named_and_the_others_go_on():
    units = [{"name": name, "table": "ops"} for name in ("first", "kills", "last")]
    found = pool.work(units, module="torch_tables.dying")
    rows = {told.unit["name"]: (told.counts, [r["case"] for r in told.rows]) for told in found}
    assert rows["first"] == ({"equal": 2}, [])
    assert rows["kills"] == ({"equal": 2, "crash": 1}, ["kills 1"])
    assert rows["last"] == ({"equal": 2}, [])


@pytest.mark.slow
def test_a_case_that_never_ends_is_named_with_where_its_threads_are():
    units = [{"name": name, "table": "ops"} for name in ("hangs", "last")]
    hangs, last = pool.work(units, module="torch_tables.dying", patience_s=5)
    assert (hangs.counts, last.counts) == ({"equal": 1, "hang": 1}, {"equal": 2})
    assert hangs.rows[0]["case"] == "hangs 1"
    assert "dying.py" in hangs.rows[0]["why"]


def test_a_wrong_value_is_seen():
    """What is compared shows a bit, a stride, and autograd's marks."""
    from torch_tables.comparing import differences

    a = torch.arange(6.0).reshape(2, 3)
    for other, told in (
        (a.clone().index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(5.0000005)), "5.0"),
        (a.t().contiguous().t(), "strides (1, 2), not (3, 1)"),
        (a.clone().requires_grad_(), "requires_grad True, not False"),
        (a.double(), "dtype torch.float64"),
        (a[:1], "size (1, 3)"),
        (-0.0 * a.sign().sub(a.sign()) + a, None),
    ):
        said = "; ".join(differences(a, other, "x"))
        assert (told in said) if told else not said


def test_an_op_that_does_nothing_is_seen_in_every_table(monkeypatch, tmp_path):
    """What streams leaves its operands as they were: results and steps of optimizers are wrong."""
    from torch_tables import ops, training

    monkeypatch.setattr(Chunked, "__call__", lambda self, first, last, values: None)
    monkeypatch.setattr(Chunked, "joins", lambda self, other: False)
    tier = Tier("host", tmp_path)
    (op,) = ops.ops_named(["mul"])
    wide = next(c for c in ops.cases(op, torch.float32) if c.sample.input.numel() > 1)
    found = [wide.run(tier)]
    tier.close()
    found.append(next(training.module_cases("nn.Linear", False)).run("host", tmp_path))
    found.append(next(training.optimizer_cases("SGD", False)).run("host", tmp_path))
    assert [outcome.kind for outcome in found] == ["different"] * 3, found


def test_what_is_refused_is_not_called_random(monkeypatch, tmp_path):
    """Though torch itself gives other values each time."""
    from torch_tables import ops

    monkeypatch.setattr(ops.Case, "_differences", lambda *sides: iter(["result: other values"]))
    tier = Tier("host", tmp_path)
    (op,) = ops.ops_named(["mul"])
    kinds = {}
    for case in ops.cases(op, torch.float32, 1):
        kinds.setdefault(case.way, set()).add(case.run(tier).kind)
    tier.close()
    assert kinds["out-resized"] == {"refused"}
    assert kinds["function"] == {"random"}


def test_a_report_that_was_broken_off_is_taken_up(tmp_path):
    told = pool.Told({"table": "ops", "name": "add", "skip": 0}, Counter(equal=2), 2, 0.5, [])
    report = tmp_path / "report"
    report.write_text(json.dumps(vars(told)) + '\n{"unit": {"ta')
    assert reported(report) == [told]
    assert report.read_text() == json.dumps(vars(told)) + "\n"
    assert reported(tmp_path / "none") == []


def test_what_both_sides_refuse_is_not_called_equal():
    from torch_tables.training import Run

    ours, torchs = Run(error=RuntimeError("no")), Run(error=RuntimeError("no"))
    assert judged(torchs, ours, lambda a, b: []).kind == "raises"
    assert judged(torchs, Run(), lambda a, b: []).kind == "different"
    assert judged(torchs, Run(error=KeyError("no")), lambda a, b: []).kind == "different"
    unit = {"table": "ops", "tier": "host", "name": "add"}
    row = {"case": "add #0", "way": "out", "kind": "raises", "why": "no"}
    assert suite.wrong([pool.Told(unit, Counter(raises=1), cases=1, rows=[row])])
    assert not suite.wrong([pool.Told(unit, Counter(raises=1, equal=1), cases=2, rows=[row])])
