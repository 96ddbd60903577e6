"""Draws one moment of a run: `zinf watch`.

A `Frame` holds what is known, with what follows from it; a picture and a line are drawn of nothing
else. Figures of a step are of the last steps under the plan in force; steps that took more than
UNUSUAL times their median (the plan was made anew, a checkpoint was saved) do not count for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zcompile.ir.step_log import StepLog, Stepped, is_alive
from zcompile.ir.units import show_rate, show_seconds, show_size

LAST = 16
"""Lines of the log that figures of a step are taken from."""
UNUSUAL = 2.0
QUIET_S, QUIET_STEPS = 10.0, 5.0
"""A run is quiet after so many seconds, and so many usual steps, without a line."""
WIDE = 116
"""Columns from which the sections stand side by side."""
MOST_COLUMNS = 160


@dataclass(frozen=True)
class TierUse:
    """Bytes of a tier: by now, the most so far, and how many there are to be used."""

    name: str
    used_bytes: int
    peak_bytes: int
    budget_bytes: int | None


@dataclass(frozen=True)
class LinkUse:
    """A link in a step. busy: share of the time in which it was in use, where it can tell."""

    name: str
    step_bytes: float
    bytes_per_s: float
    capacity_per_s: float | None
    busy: float | None
    shares: str | None


@dataclass(frozen=True)
class Frame:
    """One moment of a run.

    state      "waiting" (for a run), "starting", "running", "quiet", "ended", "failed", "gone"
    said       the state, as a sentence
    step       number of the last step
    step_s     median seconds of a step; None before there was one
    seconds    of a step: what they are spent on; "elsewhere" is what neither compute nor the
               optimizer took, nor what they waited for
    plan       why there is none, or what binds it
    history    seconds of steps, oldest first
    others     runs beside it that live
    """

    run: str
    state: str
    said: str
    model: str = ""
    device: str = ""
    step: int = 0
    elapsed_s: float = 0.0
    step_s: float | None = None
    last_s: float | None = None
    predicted_s: float | None = None
    tokens_per_s: float | None = None
    seconds: Mapping[str, float] | None = None
    tiers: tuple[TierUse, ...] = ()
    links: tuple[LinkUse, ...] = ()
    plan: str = ""
    history: tuple[float, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        return self.state in ("ended", "failed", "gone")


# --- What is known ---


def frame_of(
    log: StepLog, now: float, tokens: int | None = None, others: Sequence[str] = ()
) -> Frame:
    """The frame of a run at `now`, in Unix seconds.

    tokens  of a step
    """
    begun, planned = log.begun, log.planned
    if begun is None:
        said = "no step was logged yet, or it was written by a zcompile that logs none"
        return Frame(log.run.name, "waiting", said, others=tuple(others))
    rows = list(log.steps)
    timed = [row for row in rows if row.seconds is not None]
    under_plan = [row for row in rows[len(rows) - log.recent :] if row.seconds is not None]
    recent = (under_plan or timed)[-LAST:]
    usual_s = median(map(_step_s, recent)) if recent else None
    usual = [row for row in recent if _step_s(row) <= UNUSUAL * (usual_s or 0.0)]
    state, said = _state(log, now, usual_s)
    last = log.steps[-1] if log.steps else None
    until = now if state in ("starting", "running", "quiet") or last is None else last.time
    until = log.ended.time if log.ended is not None else until
    return Frame(
        run=log.run.name,
        state=state,
        said=said,
        model=begun.model,
        device="cpu (emulated)" if begun.device == "cpu" else begun.device,
        step=log.ended.step if log.ended is not None else last.step if last else 0,
        elapsed_s=max(0.0, until - begun.time),
        step_s=usual_s,
        last_s=_step_s(recent[-1]) if recent else None,
        predicted_s=planned.step_s if planned is not None else None,
        tokens_per_s=tokens / usual_s if tokens and usual_s else None,
        seconds=_spent(usual) if usual else None,
        tiers=_tiers(log, last) if last is not None else (),
        links=_links(log, usual) if usual else (),
        plan=_plan(log),
        history=tuple(map(_step_s, timed)),
        others=tuple(others),
    )


def _step_s(row: Stepped) -> float:
    return (row.seconds or 0.0) / row.count


def _state(log: StepLog, now: float, usual_s: float | None) -> tuple[str, str]:
    assert log.begun is not None
    process, ended = log.begun.process, log.ended
    if ended is not None:
        ago = f"{show_duration(max(0.0, now - ended.time))} ago"
        return (
            ("failed", f"ended {ago}, by {ended.why}") if ended.why else ("ended", f"ended {ago}")
        )
    last_heard = log.steps[-1].time if log.steps else log.begun.time
    silent_s = max(0.0, now - last_heard)
    ago = show_duration(silent_s)
    alive = is_alive(process)
    if alive is False:
        return "gone", (
            f"process {process.pid} is gone and did not say why; it was last heard {ago} ago. It "
            "was killed (for memory? see dmesg), or it crashed"
        )
    where = "" if alive else f"; it runs as {process.where}, and may have ended"
    if not log.steps:
        return "starting", f"compiles, and runs its first step, for {ago} by now{where}"
    if silent_s > max(QUIET_S, QUIET_STEPS * (usual_s or 0.0)):
        return "quiet", (
            f"no step for {ago}: it plans, compiles, evaluates, saves, or waits for data{where}"
        )
    return "running", f"running{where}"


def _spent(rows: Sequence[Stepped]) -> dict[str, float]:
    steps = sum(row.count for row in rows)
    told = {
        "compute": sum(row.compute_s for row in rows) / steps,
        "stall": sum(row.stall_s for row in rows) / steps,
        "optimizer": sum(row.optimizer_s for row in rows) / steps,
    }
    whole = sum(row.seconds or 0.0 for row in rows) / steps
    return {**told, "elsewhere": max(0.0, whole - sum(told.values()))}


def _tiers(log: StepLog, last: Stepped) -> tuple[TierUse, ...]:
    budgets = log.planned.budgets if log.planned is not None else {}
    return tuple(
        TierUse(tier, used, last.peak.get(tier, used), budgets.get(tier))
        for tier, used in last.used.items()
        if tier in budgets or used
    )


def _links(log: StepLog, rows: Sequence[Stepped]) -> tuple[LinkUse, ...]:
    """The links in an order that stays, also those over which nothing goes."""
    steps, seconds = sum(r.count for r in rows), sum(r.seconds or 0.0 for r in rows)
    known = log.planned.links if log.planned is not None else {}
    found = []
    for link in rows[-1].nbytes:
        nbytes = sum(row.nbytes.get(link, 0) for row in rows)
        capacity = known.get(link)
        if not nbytes and capacity is None:
            continue
        busy_s = [row.busy_s[link] for row in rows if link in row.busy_s]
        found.append(
            LinkUse(
                link,
                nbytes / steps,
                nbytes / seconds,
                capacity.bytes_per_s if capacity is not None else None,
                sum(busy_s) / seconds if busy_s else None,
                capacity.shares if capacity is not None else None,
            )
        )
    return tuple(found)


def _plan(log: StepLog) -> str:
    planned = log.planned
    if planned is None or not log.steps:
        return ""
    if planned.why:
        return f"no plan of a whole step: {planned.why}"
    by: dict[str, list[str]] = {}
    for phase, binds in planned.binding.items():
        by.setdefault(binds, []).append(phase)
    told = ", ".join(f"{binds} ({', '.join(phases)})" for binds, phases in by.items())
    return f"planned; bound by {told}" if told else "planned"


# --- How it is shown ---


def show_duration(seconds: float) -> str:
    """Time that passes, for people: "45 s", "12 min", "3 h 20 min"."""
    minutes = int(seconds) // 60
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


STYLES = {
    "waiting": "cyan",
    "starting": "cyan",
    "running": "green",
    "quiet": "yellow",
    "ended": "blue",
    "failed": "red",
    "gone": "red",
}
SPENT = {"compute": "green", "optimizer": "cyan", "stall": "red", "elsewhere": "yellow"}
LEVELS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-:=+*#"


LEAST = 0.005
"""Share of a bar that is seen, however short the bar."""


@dataclass(frozen=True)
class Pen:
    """What a picture is drawn with. ascii: other characters cannot be shown; tight: there is no
    room for empty lines."""

    ascii: bool
    tight: bool

    @property
    def gap(self) -> list[RenderableType]:
        return [] if self.tight else [Text()]

    @property
    def shades(self) -> str:
        return "#=." if self.ascii else "█▓░"

    def bar(self, width: int, parts: Sequence[tuple[float, str, int]]) -> Text:
        """Parts of a whole, each a share of it, a style and a shade, then what is left."""
        marks = self.shades
        text, share = Text(), 0.0
        for more, style, shade in parts:
            share = min(1.0, share + max(0.0, more))
            upto = max(round(share * width), int(share >= LEAST))
            text.append(marks[shade] * (upto - len(text)), style)
        text.append(marks[2] * (width - len(text)), "bright_black")
        return text

    def curve(self, values: Sequence[float], above: float) -> Text:
        """Values as columns from 0 to `above`; those over it stand out."""
        marks = ASCII_LEVELS if self.ascii else LEVELS
        text = Text()
        for value in values:
            mark = marks[min(len(marks) - 1, int(value / (above or 1.0) * len(marks)))]
            text.append(mark, "yellow" if value > above else "cyan")
        return text


def headline(frame: Frame) -> str:
    """A frame as one line."""
    if frame.state != "running":
        told = f"{frame.run}: {frame.said}"
        return f"{told}; step {frame.step}" if frame.step and frame.state != "waiting" else told
    parts = [f"step {frame.step}"]
    if frame.step_s is not None:
        ahead = f" (predicted {show_seconds(frame.predicted_s)})" if frame.predicted_s else ""
        parts.append(f"{show_seconds(frame.step_s)} a step{ahead}")
    if frame.seconds is not None and frame.step_s:
        parts.append(f"{frame.seconds['stall'] / sum(frame.seconds.values()):.0%} stalled")
    if frame.tokens_per_s is not None:
        parts.append(f"{frame.tokens_per_s:,.0f} tokens/s")
    parts += [
        f"{link.name} {show_rate(link.bytes_per_s)}" for link in frame.links if link.step_bytes
    ]
    parts += [f"{tier.name} {show_size(tier.used_bytes)}" for tier in frame.tiers]
    return f"{frame.run}: {', '.join(parts)}"


def drawn(
    frame: Frame, width: int, ascii_only: bool = False, hint: str = "", tight: bool = False
) -> RenderableType:
    """A frame as a picture of at most `width` columns.

    hint   a line below it
    tight  without empty lines
    """
    pen, width = Pen(ascii_only, tight), min(width, MOST_COLUMNS)
    wide = width >= WIDE and frame.seconds is not None
    half = (width - 4) // 2 if wide else width
    left = [*_spending(frame, half, pen), *_tier_rows(frame, half, pen)]
    right = _link_rows(frame, half, pen)
    plan = [*pen.gap, Text(frame.plan, "bold")] if frame.plan else []
    rows = _head(frame, width, pen)
    if wide:
        grid = Table.grid(padding=(0, 4, 0, 0), pad_edge=False)
        grid.add_column(width=half)
        grid.add_column(width=half)
        grid.add_row(Group(*left), Group(*right, *plan))
        rows.append(grid)
    else:
        rows += [*left, *right, *plan]
    for other in frame.others:
        rows += [*pen.gap, Text(f"beside it runs {other}", "bright_black")]
    if hint:
        rows += [*pen.gap, Text(hint, "bright_black")]
    return Group(*rows)


def _head(frame: Frame, width: int, pen: Pen) -> list[RenderableType]:
    style = STYLES[frame.state]
    title = Table.grid(expand=False, pad_edge=False)
    title.add_column(width=width - 24, no_wrap=True, overflow="crop")
    title.add_column(width=24, justify="right", no_wrap=True, overflow="crop")
    name = Text.assemble((frame.run, "bold"), f"  {frame.model}")
    if frame.device:
        name.append(f" on {frame.device}")
    mark = "*" if pen.ascii else "●"
    took = f" {show_duration(frame.elapsed_s)}" if frame.state != "waiting" else ""
    title.add_row(name, Text(f"{mark} {frame.state}{took}", style))
    rows: list[RenderableType] = [title]
    if frame.state != "running" or frame.said != "running":
        rows.append(Text(frame.said, style))
    if frame.step_s is None:
        return rows
    told = Text.assemble(
        (f"step {frame.step:,}", "bold"), f"   {show_seconds(frame.step_s)} a step"
    )
    if frame.predicted_s is not None:
        told.append(f", predicted {show_seconds(frame.predicted_s)}")
        told.append(f" ({frame.step_s / frame.predicted_s:.2f} times)", "bright_black")
    if frame.tokens_per_s is not None:
        told.append(f"   {frame.tokens_per_s:,.0f} tokens/s", "bold")
    rows += [*pen.gap, told]
    room = width - len("  of 1,000 steps at most 1.00 ms")
    shown = frame.history[-room:]
    most = f"  last {len(shown)} at most {show_seconds(max(shown))}"
    rows.append(Text.assemble(pen.curve(shown, UNUSUAL * frame.step_s), (most, "bright_black")))
    return rows


NAMES, FIGURES = 13, 38
"""Columns of names, and of the figures behind a bar."""


def _grid(head: str, said: str, width: int) -> Table:
    table = Table.grid(pad_edge=False)
    table.add_column(width=NAMES, no_wrap=True, overflow="crop")
    table.add_column(width=_bar_width(width), no_wrap=True, overflow="crop")
    table.add_column(width=FIGURES, justify="right", no_wrap=True, overflow="crop")
    table.add_row(Text(head, "bold"), "", Text(said, "bright_black"))
    return table


def _bar_width(width: int) -> int:
    return max(1, width - NAMES - FIGURES)


def _spending(frame: Frame, width: int, pen: Pen) -> list[RenderableType]:
    if frame.seconds is None:
        return []
    whole = sum(frame.seconds.values()) or 1.0
    table = _grid("a step", "elsewhere: data, Python, eager code", width)
    for name, style in SPENT.items():
        share = frame.seconds[name] / whole
        bar = pen.bar(_bar_width(width), [(share, style, 0)])
        table.add_row(f"  {name}", bar, f"{show_seconds(frame.seconds[name]):>9} {share:>5.0%}")
    return [*pen.gap, table]


def _tier_rows(frame: Frame, width: int, pen: Pen) -> list[RenderableType]:
    if not frame.tiers:
        return []
    table = _grid("tiers", f"{pen.shades[0]} now, {pen.shades[1]} most so far", width)
    for tier in frame.tiers:
        budget = tier.budget_bytes
        whole = budget or tier.peak_bytes or 1
        used, peak = tier.used_bytes / whole, tier.peak_bytes / whole
        style = "red" if peak > 1 else "magenta"
        bar = pen.bar(_bar_width(width), [(used, style, 0), (peak - used, style, 1)])
        of = f" of {show_size(budget)}" if budget is not None else ""
        told = f"{show_size(tier.used_bytes)}, most {show_size(tier.peak_bytes)}{of}"
        table.add_row(f"  {tier.name}", bar, told)
    return [*pen.gap, table]


def _link_rows(frame: Frame, width: int, pen: Pen) -> list[RenderableType]:
    if not frame.links:
        return []
    table = _grid("links", "of what each can carry", width)
    for link in frame.links:
        capacity = link.capacity_per_s
        share = link.bytes_per_s / capacity if capacity else 0.0
        bar = pen.bar(_bar_width(width), [(share, "blue", 0)])
        of = f" of {show_rate(capacity)} {share:>5.0%}" if capacity else ""
        table.add_row(f"  {link.name}", bar, f"{show_rate(link.bytes_per_s)}{of}")
    pairs = sorted({" and ".join(sorted((x.name, x.shares))) for x in frame.links if x.shares})
    turns = [Text(f"  {pair} take turns", "bright_black") for pair in pairs]
    return [*pen.gap, table, *turns]
