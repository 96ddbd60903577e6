"""Writes a run as one page that opens in a browser: `zinf report RUN -o report.html`.

The page holds everything: style, scripts and the facts of the run (`facts.py`) as one block of
JSON. It loads nothing and asks no network; its policy (CSP) forbids that, and every script but
those that were put in here, by their hash. Names in a run are shown as text, never as markup.
"""

import base64
import hashlib
import json
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from zcompile.cli.format import Answer, write_file
from zcompile.cli.report.facts import facts_of
from zcompile.ir.serialize import open_run
from zcompile.ir.units import show_size

SCRIPTS = ("words.js", "view.js", "timeline.js", "memory.js", "tables.js", "page.js")
"""In the order in which the page runs them, in one scope."""


@dataclass(frozen=True)
class Page:
    """A page on disk. damage: a sentence for each file of the run that could not be read."""

    path: Path
    nbytes: int
    damage: tuple[str, ...]


def report(path: Path, graph: int | None, target: Path) -> Answer:
    """Write the page of a run to `target`; exit code 1, if files of the run are damaged.

    graph   show the passes of this one alone
    raises  RunUnreadable, NotInRun, ConfigInvalid if the page cannot be written
    """
    facts, damage = facts_of(open_run(path, graph))
    text = page(facts)
    write_file("output", target, text)
    lines = [f"{target}: {facts['title']}, {show_size(len(text.encode()))}; open it in a browser"]
    lines += (f"  damaged: {row}" for row in damage)
    written = Page(target, len(text.encode()), damage)
    return Answer("\n".join(lines), written, 1 if damage else 0)


def page(facts: dict[str, Any]) -> str:
    """The page of these facts (`facts_of`)."""
    here = files(__package__)
    style = (here / "page.css").read_text(encoding="utf-8")
    parts = [(here / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();\n"
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    filled = (here / "page.html").read_text(encoding="utf-8")
    for mark, text in {
        "@POLICY@": escape(policy),
        "@TITLE@": escape(f"{facts['title']} - zinf report"),
        "@STYLE@": style,
        "@SCRIPT@": script,
        "@FACTS@": _inside_script(facts),  # last: names in it may look like a mark
    }.items():
        filled = filled.replace(mark, text, 1)
    return filled


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _inside_script(facts: dict[str, Any]) -> str:
    """JSON that no parser of HTML takes for the end of a script, or for markup."""
    text = json.dumps(facts, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
