"""What the documentation names is there: files, functions, links; its example trains."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_layers import FLOORS

from examples.train_gpt import Shape
from examples.train_gpt import model as gpt

ROOT = Path(__file__).parent.parent
PRODUCT = ROOT / "zcompile"
PAGES = (ROOT / "README.md", ROOT / "DESIGN.md", *sorted((ROOT / "docs").rglob("*.md")))
OTHERS = {"Tensor", "Module", "AccumulateGrad"}
"""Classes of torch of which a page names a member."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language; "" for those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for said, body in found if said == language]


def prose(text: str) -> str:
    return re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(text))


def in_repository(path: str) -> Path | None:
    """The file or folder that a page means, whose paths may be relative to `zcompile/`."""
    return next((base / path for base in (ROOT, PRODUCT) if (base / path).exists()), None)


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Names that a file defines: of its own, and "Class.member"."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        own = list(defined(node))
        found.update(own)
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{name}" for member in node.body for name in defined(member))
    return frozenset(found)


def defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


@functools.cache
def members() -> frozenset[str]:
    """Every "Class.member" of the product."""
    files = PRODUCT.rglob("*.py")
    return frozenset(name for file in files for name in names_in(file) if "." in name)


def stale(text: str) -> list[str]:
    """The code spans that name a file, a folder, a function or a member that is not there."""
    missing = []
    for span in spans(text):
        if match := re.fullmatch(r"([\w./-]+\.(?:py|toml|md))(?:::([\w.]+))?", span):
            file, name = match.groups()
            path = in_repository(file)
            if path is None or (name is not None and name not in names_in(path)):
                missing.append(span)
        elif match := re.fullmatch(r"([A-Z]\w*[a-z]\w*)\.(\w+)", span):
            if match[1] not in OTHERS and span not in members():
                missing.append(span)
        elif re.fullmatch(r"\w+/[\w/.-]*", span):
            begin = span.partition("/")[0]
            if in_repository(begin) is not None and in_repository(span) is None:
                missing.append(span)
    return missing


def anchors(page: Path) -> set[str]:
    """What links may name in a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(text: str, folder: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        path, _, anchor = link.partition("#")
        target = folder / path
        if "://" not in link and (
            not target.exists() or (anchor and anchor not in anchors(target))
        ):
            dead.append(link)
    return dead


@pages
def test_what_a_page_names_is_there(page):
    assert stale(page.read_text(encoding="utf-8")) == []


@pages
def test_links_lead_somewhere(page):
    assert dead_links(page.read_text(encoding="utf-8"), page.parent) == []


@pytest.mark.parametrize(
    ("said", "there"),
    [
        ("`passes/lower.py::lower`", True),
        ("`passes/lower.py::raise_up`", False),
        ("`passes/raise.py`", False),
        ("`runtime/store/store.py::Store.fetch`", True),
        ("`runtime/store/store.py::Store.fetches`", False),
        ("`tests/test_docs.py`", True),
        ("`Schedule.least_bytes`", True),
        ("`Schedule.most_bytes`", False),
        ("`tests/e2e`", True),
        ("`tests/e2f`", False),
        ("`runs/run-3`", True),
        ("```\npasses/raise.py\n```", True),
    ],
)
def test_what_counts_as_named(said, there):
    assert (stale(said) == []) is there


@pytest.mark.parametrize(
    ("link", "alive"),
    [
        ("[a](docs/guide.md)", True),
        ("[a](docs/guide.md#how-errors-look)", True),
        ("[a](docs/guide.md#how-errors-sound)", False),
        ("[a](docs/guise.md)", False),
        ("[a](https://example.org)", True),
    ],
)
def test_what_counts_as_a_dead_link(link, alive):
    assert (dead_links(link, ROOT) == []) is alive


def test_every_page_is_reached_from_the_readme():
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop().resolve()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        left += [page.parent / link for link in links if "://" not in link]
    assert set(PAGES) <= seen


@pages
def test_examples_of_a_page_are_python(page):
    for body in blocks(page.read_text(encoding="utf-8"), "python"):
        compile(body, str(page), "exec")


def test_each_row_of_the_table_of_libraries_names_its_test():
    """That the test exists is held for every page above."""
    text = (ROOT / "docs/integrations/index.md").read_text(encoding="utf-8")
    _, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows
    for row in rows:
        *_, how, test = (cell.strip() for cell in row.strip("|").split(" | "))
        assert how == "unchanged" or how.startswith(("refused", "`")), row
        assert re.fullmatch(r"`tests/[\w/]+\.py(::\w+)?`", test), row


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_the_example_trains_as_eager_pytorch_does(page, tmp_path):
    """As it stands, but for the device, and sizes and paths as there are here."""
    examples = blocks((ROOT / page).read_text(encoding="utf-8"), "python")
    (example,) = [body for body in examples if "torch.save" in body]
    for said, here in {
        'device="cuda"': 'device="cpu"',
        '"20GiB"': '"1MiB"',
        '"64GiB"': '"4MiB"',
        '"/mnt/nvme"': repr(str(tmp_path / "disk")),
        '"model.pt"': repr(str(tmp_path / "model.pt")),
    }.items():
        assert example.count(said) == 1
        example = example.replace(said, here)
    loader = [(torch.randint(256, (2, 16)),) * 2 for _ in range(4)]
    shape = Shape(layers=2, width=64, heads=2, context=16)

    def make(shape: Shape) -> torch.nn.Module:
        torch.manual_seed(0)
        return gpt(shape)

    exec(compile(example, page, "exec"), {"GPT": make, "cfg": shape, "loader": loader})
    plain = make(shape)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4, fused=True)
    for ids, targets in loader:
        plain(ids, targets).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    saved = torch.load(tmp_path / "model.pt")
    assert {name.removeprefix("_orig_mod.") for name in saved} == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(saved[f"_orig_mod.{name}"], value), name


def test_the_figure_of_the_readme_was_measured():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8").splitlines()
    figure = re.findall(r"^\| ([\d. |]+) \|$", readme, re.MULTILINE)
    assert len(figure) == 5
    for row in figure:
        room, seconds, ratio, moved = row.split(" | ")
        (found,) = [x for x in measured if x.startswith(f"| H200 and one NVMe drive | {room} |")]
        cells = found.strip("| ").split(" | ")
        assert [cells[2], cells[3], cells[-1]] == [seconds, ratio, moved]


def test_the_design_has_a_row_for_every_entry_of_the_house():
    design = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    rows = [
        row.rstrip("/") for row in re.findall(r"^\| `([a-z_]+(?:/|\.py))` \|", design, re.MULTILINE)
    ]
    told = [row.removesuffix(".py") for row in rows]
    floors = [sorted(floor & set(told)) for floor in FLOORS]
    assert [entry for floor in floors for entry in floor] == told, "bottom to top"
    packages = {path.parent.name for path in PRODUCT.glob("*/__init__.py")}
    assert packages <= set(told)
    assert len(told) == 14
