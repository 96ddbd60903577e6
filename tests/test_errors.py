"""Every error says what, where, why and what to do; and is the built-in one people catch."""

import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zcompile import errors
from zcompile.errors import ZinfError
from zcompile.ir.units import GiB, MiB
from zcompile.machine.files import MachineUnknown, MachineUnreadable
from zcompile.machine.model import MachineInvalid

DISK = Path("/data")
TROUBLESHOOTING = Path(__file__).parent.parent / "docs" / "troubleshooting.md"

SENTENCES = {
    errors.ConfigInvalid: (
        ("regions", "fast", "is not one of auto, eager, inductor"),
        "regions='fast' is not one of auto, eager, inductor",
    ),
    errors.LayoutInvalid: (
        ("BigBird", "window=2", "must be odd"),
        "BigBird: window=2 must be odd",
    ),
    errors.UnknownOption: (
        ("tile_byte", ["tile_bytes", "dump"], "offload()"),
        "offload() does not know 'tile_byte'; did you mean 'tile_bytes'? (known: dump, tile_bytes)",
    ),
    errors.BudgetExceeded: (
        (
            "device",
            16 * GiB,
            18 * GiB,
            "forward",
            [("b", 5 * GiB), ("a.weight", 6 * GiB)],
            'device_memory="18GiB" would do',
        ),
        "forward needs 18.0 GiB on the device, the budget is 16.0 GiB\n"
        "  at the peak these are alive, 11.0 GiB in all:\n"
        "      6.00 GiB  a.weight\n"
        "      5.00 GiB  b\n"
        '  to fit: device_memory="18GiB" would do',
    ),
    errors.SlotsOverlap: (
        ((512, 520, "a.weight"), (0, 1000, "b")),
        "'a.weight' was to be brought to bytes [512, 520) of the device, where 'b' still holds "
        "[0, 1000); nothing was overwritten, but this is a defect of zcompile: report it with this "
        "line and what was called before, and build the model anew to go on",
    ),
    errors.TierFull: (
        ("a.weight", 3 * MiB, [("host", MiB, 2 * MiB), ("disk", 0, GiB)]),
        "no tier has 3.00 MiB left for 'a.weight'\n"
        "    host: 1.00 MiB used of 2.00 MiB\n"
        "    disk: 0 B used of 1.00 GiB\n"
        "  to fit: raise host_memory, give a directory as disk, or free space on it",
    ),
    errors.RanksDiffer: (
        (
            "what they do next",
            [(0, "forward of graph0"), (1, "call aten.add_"), (2, "forward of graph0")],
            "let every rank make the same calls",
        ),
        "the ranks differ in what they do next\n"
        "    ranks 0, 2: forward of graph0\n"
        "    rank 1: call aten.add_\n"
        "  to fix: let every rank make the same calls",
    ),
    errors.CallChanged: (
        ("forward of graph0", 3, b"\x01\x02\x03\x04\x05", b"\xff" * 16),
        "forward of graph0 would make 3 collectives with digest ffffffff, and all ranks have "
        "agreed on those with digest 01020304 for this call; bytes of one tensor would be taken "
        "for those of another, so all ranks end. This is a defect of zcompile: report it with this "
        "line and the config, and start all ranks again from a checkpoint to go on",
    ),
    errors.RankFailed: (
        (1, "node7", "failed: ValueError: no", "start all ranks again"),
        "rank 1 on node7 failed: ValueError: no; start all ranks again",
    ),
    errors.DiskUnusable: (
        (DISK, "does not exist", "create it"),
        "disk='/data' does not exist; create it",
    ),
    errors.UserCodeFailed: (
        ("forward of Model", " at model.py:3", KeyError("x"), "see that it runs"),
        "forward of Model failed at model.py:3: KeyError: 'x'; see that it runs",
    ),
    errors.DiskOwned: (
        (DISK, "process 12"),
        "disk='/data' is in use by process 12; give each model a directory of its own, "
        "or end that process, or call zcompile.close on the other model",
    ),
    errors.IOFault: (
        (28, "write", DISK / "tier.bin", "a.weight", 4096, 512, 8192, "No space left on device"),
        "[Errno 28] write of 'a.weight' failed: No space left on device "
        "(512 of 8192 bytes at offset 4096 of /data/tier.bin)",
    ),
    errors.DeviceTooSmall: (
        ("cuda:0", 80 * GiB, 70 * GiB),
        "device_memory asks for 80.0 GiB on cuda:0, which has 70.0 GiB free; lower device_memory "
        "or free the device",
    ),
    errors.CompilerMissing: (
        ("cpu", "a C++ compiler (apt-get install g++)"),
        "regions='inductor' compiles for the cpu device with a C++ compiler (apt-get install g++), "
        "which this machine lacks; install it, or give regions='eager', which needs no compiler",
    ),
    errors.ModelWrapped: (
        ("DistributedDataParallel",),
        "the model is wrapped in DistributedDataParallel; remove the wrapper and give "
        "zcompile.offload the plain module: placing and sharding parameters is done here. Where a "
        "library wraps it, take what zcompile.integrations has for that library",
    ),
    errors.RankZeroFailed: (
        ("node7", "OSError: no space left"),
        "rank 0 on node7 has failed while it alone read: OSError: no space left. No value has "
        "changed, and the run can go on: mend that, and do it again on all ranks",
    ),
    errors.TorchUnsupported: (
        ("2.9.0", "2.11 to 2.13"),
        "torch 2.9.0 is installed, zcompile is tested with 2.11 to 2.13: it relies on torch "
        "internals that may differ; install a tested version",
    ),
    errors.ParameterChanged: (
        ("a.weight", "was replaced", "offload the model again"),
        "parameter 'a.weight' was replaced; offload the model again",
    ),
    errors.UpdateBroken: (
        ("a.weight", 7, "no space left"),
        "the update of 'a.weight' by optimizer step 7 broke off while it was computed, so "
        "that it and its states are neither the old nor the new ones: no space left; go back to a "
        "checkpoint: build model and optimizer again and call zcompile.resume",
    ),
    errors.ValueUnset: (
        ("a.weight",),
        "'a.weight' has no value yet: its model was on the meta device when it was offloaded; "
        "zcompile.load(model, path) gives it one from a file, model.load_state_dict(...) from "
        "memory",
    ),
    errors.Unsupported: (
        ("a double backward", "call backward once"),
        "a double backward; call backward once",
    ),
    errors.PassOrder: (
        ("release-params", {"gathered"}, ["release-params", "gather-params"]),
        "release-params needs gathered, which no earlier pass gives "
        "(order: release-params > gather-params)",
    ),
    errors.GraphInvalid: (
        ("release-params", "%mm reads %t, released above", "  > %mm = aten.mm(%x, %t)"),
        "after release-params, %mm reads %t, released above\n  > %mm = aten.mm(%x, %t)",
    ),
    errors.ScheduleInvalid: (
        ("3 reads slot 0 before its wait",),
        "the schedule is not safe: 3 reads slot 0 before its wait",
    ),
    errors.RunUnreadable: (
        (DISK, "holds no run"),
        "/data holds no run; write one with ZINF_DUMP=DIR or Config(dump=DIR)",
    ),
    errors.NotInRun: (
        (DISK, "pass", "gather-param", ["release-params", "gather-params"]),
        "/data has no pass 'gather-param'; did you mean gather-params, release-params?",
    ),
    errors.CheckpointInvalid: (
        (DISK / "model.safetensors", "ends before its header does"),
        "/data/model.safetensors ends before its header does; copy it again, or use another",
    ),
    errors.CheckpointUnwritable: (
        (28, DISK, "it needs 2.00 GiB, and 1.00 GiB are free", "free space"),
        "[Errno 28] no checkpoint can be written to /data: it needs 2.00 GiB, and 1.00 GiB are "
        "free; free space",
    ),
    errors.DurableDamaged: (
        (DISK / "zinf.tier", "'a.weight'", "ends before its data"),
        "/data/zinf.tier: 'a.weight' ends before its data; the files are left as they are: look "
        "with `zinf disk verify /data`, or start anew after `zinf disk gc --all /data`",
    ),
    errors.DurableHeld: (
        (DISK, "holds step 3 of an earlier run"),
        "disk='/data' holds step 3 of an earlier run: continue it with zcompile.resume('/data', "
        "model, optimizer) before the first step, or remove it with `zinf disk gc --all /data`",
    ),
    errors.NothingCommitted: (
        (DISK, "holds no commit"),
        "disk='/data' holds no commit; there is nothing to resume: train on",
    ),
    errors.CommitFailed: (
        (DISK, 3, 2, OSError(28, "No space left on device")),
        "[Errno 28] disk='/data': step 3 was not committed (No space left on device); step 2 is "
        "intact: see to the disk, start again and resume",
    ),
    errors.CheckpointMismatch: (
        ("/data", ["a.weight: missing, the model has float32[2]"]),
        "/data does not fit:\n    a.weight: missing, the model has float32[2]",
    ),
}


def every_error() -> list[type[ZinfError]]:
    members = (value for _, value in inspect.getmembers(errors, inspect.isclass))
    return [kind for kind in members if issubclass(kind, ZinfError) and kind is not ZinfError]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_has_its_sentence(kind):
    arguments, sentence = SENTENCES[kind]
    assert str(kind(*arguments)) == sentence


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_is_also_a_built_in_one(kind):
    builtin = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    assert builtin[0] not in (Exception, BaseException, object)
    assert issubclass(kind, ZinfError)


def test_an_io_fault_keeps_its_errno():
    fault = errors.IOFault(*SENTENCES[errors.IOFault][0])
    assert fault.errno == 28
    assert (fault.file, fault.name) == (DISK / "tier.bin", "a.weight")


def test_notes_become_lines_of_the_sentence_where_that_is_shown():
    refused = ZinfError("no room")
    refused.add_note("a value is large")
    refused.put_notes_into_sentence()
    assert str(refused) == "no room\n  note: a value is large"
    assert not hasattr(refused, "__notes__")
    fault = errors.IOFault(*SENTENCES[errors.IOFault][0])
    fault.add_note("while it compiled")
    told = str(fault)
    fault.put_notes_into_sentence()
    assert (str(fault), fault.__notes__) == (told, ["while it compiled"])


def test_a_commit_of_which_nobody_knows_is_told_as_such():
    error = OSError(5, "Input/output error")
    assert str(errors.CommitFailed(DISK, 1, 0, error, unsure=True)) == (
        "[Errno 5] disk='/data': step 1 may or may not have been committed (Input/output error); "
        "nothing was committed before: see to the disk, start again and resume, which tells"
    )
    assert "what was saved after step 3 was not" in str(errors.CommitFailed(DISK, 3, 3, error))


def test_many_live_values_are_summed_up():
    alive = [(f"p{i}", (20 - i) * MiB) for i in range(12)]
    error = errors.BudgetExceeded("device", GiB, 2 * GiB, "forward", alive, "raise it")
    assert "20.0 MiB  p0" in str(error)
    assert "p8" not in str(error)
    assert "42.0 MiB  ... 4 more" in str(error)


@pytest.mark.parametrize(("name", "shown"), [("0.weight", "'0.weight'"), ("%mm_1", "%mm_1")])
def test_names_of_modules_are_quoted_and_nodes_stand_as_in_a_graph(name, shown):
    assert errors.quoted(name) == shown


def test_an_unknown_key_without_a_neighbour_names_all():
    error = errors.UnknownOption("zzz", ["dump", "regions"], "options")
    assert str(error) == "options does not know 'zzz' (known: dump, regions)"


def test_what_is_not_in_an_empty_run():
    assert str(errors.NotInRun(DISK, "graph", "1", [])) == "/data has no graph '1', nor any other"
    assert str(errors.NotInRun(DISK, "graph", "x", ["0"])) == "/data has no graph 'x'; it has 0"


def test_the_root_can_travel_between_processes():
    assert str(pickle.loads(pickle.dumps(ZinfError("why")))) == "why"


def descendants(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from descendants(child)


def explained() -> dict[str, str]:
    """Classes of the page on errors -> how it says that their sentences begin."""
    rows = re.findall(
        r"^\| `(\w+)` \| `(.*?)` \|", TROUBLESHOOTING.read_text("utf-8"), re.MULTILINE
    )
    assert len(dict(rows)) == len(rows), "each class once"
    return dict(rows)


def test_each_error_is_explained_and_none_that_is_gone():
    there = {kind.__name__ for kind in descendants(ZinfError) if "zcompile" in kind.__module__}
    assert set(explained()) == there


OF_MACHINES = [
    MachineUnknown("dgx9", ["dgx2"]),
    MachineUnreadable(DISK, "no such file"),
    MachineInvalid("my.toml", "[device]", "has no bytes", "give them"),
]


@pytest.mark.parametrize(
    "error",
    [*(kind(*SENTENCES[kind][0]) for kind in every_error()), *OF_MACHINES],
    ids=lambda error: type(error).__name__,
)
def test_the_page_on_errors_shows_how_each_begins(error):
    begin = explained()[type(error).__name__]
    pattern = ".+".join(re.escape(part.strip()) for part in begin.split("..."))
    assert re.match(pattern, str(error)), begin
