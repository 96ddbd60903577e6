"""Steps as a dump holds them, made by hand: what `zinf report` and `--perfetto` are tested on."""

from pathlib import Path

from small_run import write_run

from zcompile.ir import serialize as rf

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;"
"""The name of a module that means harm."""
MB = 10**6


def step(layers: int = 3, name: str = "blocks") -> rf.TimelineRecord:
    """A forward in which each layer's weight is fetched, waited for and read.

    Layer n: fetched while layer n - 1 computes; compute takes 10 ms a layer, a fetch 6 ms, and the
    first is waited for.
    """
    moments, passages, ahead = [], [], []
    entries = []
    for n in range(layers):
        at = 0.02 * n
        weight = f"{name}.{n}.weight"
        rows = (
            ("fetch", weight, at, at + 0.001, 0.0, "h2d", 3),
            ("wait", weight, at + 0.001, at + 0.008, 0.006, "compute", None),
            ("borrow", f"{name}.{n}.bias", at + 0.008, at + 0.008, 0.0, "compute", None),
            ("run", "t mm", at + 0.008, at + 0.018, 0.0, "compute", None),
        )
        for kind, about, begin, end, stall, stream, use in rows:
            index = len(moments)
            moments.append(
                rf.MomentRecord(
                    0,
                    "forward",
                    index,
                    kind,
                    about,
                    begin,
                    end,
                    stall,
                    begin + 0.5,
                    end + 0.5,
                    stall / 2,
                    entry="" if kind == "run" else about,
                    stream=stream,
                    nbytes=0 if kind == "run" else MB,
                    used_by=4 * n + use if use else None,
                    levels=(MB * (n + 1), MB * n, 2 * MB, 3 * MB),
                    predicted_levels=(MB * (n + 2), MB * n),
                )
            )
        passages.append(rf.PassageRecord("h2d", weight, MB, at + 0.001, at + 0.007))
        ahead.append(rf.PassageRecord("h2d", weight, MB, at + 0.501, at + 0.506, 0, 4 * n))
        entries.append(rf.EntryRecord(weight, "weight", MB + n, "host", "host"))
        entries.append(rf.EntryRecord(f"{weight}.exp_avg", "state", 10 + n, "disk", "host"))
    took = 0.02 * layers
    sums = {"h2d": MB * layers}, {"h2d": 0.006 * layers}
    return rf.TimelineRecord(
        step=8,
        measured=rf.StepRecord(took, 0.01 * layers, 0.006 * layers, {"forward": took}, *sums),
        predicted=rf.StepRecord(took, 0.01 * layers, 0.003 * layers, {"forward": took}, *sums),
        moments=tuple(moments),
        format=rf.FORMAT,
        passages=tuple(passages),
        predicted_passages=tuple(ahead),
        tiers=(
            rf.TierRecord("device", 2 * MB * layers, MB * layers),
            rf.TierRecord("host", 100 * MB, 2 * MB),
            rf.TierRecord("disk", 3 * MB, 3 * MB),
        ),
        entries=tuple(entries),
        links=(rf.LinkRecord("h2d", 1e9), rf.LinkRecord("disk_read", 1e8)),
        plan=rf.StepPlanRecord(
            took / 2,
            "h2d",
            took / 4,
            "compute",
            {"forward": "h2d"},
            MB,
            0,
            (rf.ShadowRecord("device", 0.01, 0.005), rf.ShadowRecord("host", 0.0, 0.0)),
        ),
        inexact=("w may round otherwise than eager's, by tile-loss: it is tiled",),
    )


def write_step(root: Path, record: rf.TimelineRecord, graphs: int = 1) -> Path:
    """A new run below `root` with this step; returns its directory."""
    run = write_run(root, graphs)
    rf.timeline_file(run).write_text(rf.encode(record))
    return run
