"""The page of `zinf report` in a real browser: what one sees, and what it does when one acts."""

import os
import shutil
from pathlib import Path

import pytest
from small_run import real_run, write_run
from written_steps import HOSTILE, step, write_step

import zcompile
from zcompile.cli import main

CHROMIUM = os.environ.get("ZINF_TEST_CHROMIUM") or shutil.which("chromium")
AXIS, BLOCK, LANE = 26, 24 + 17 + 5 * 26 + 14, 26
"""Pixels, as in `timeline.js`: of the axis, of one side, and of one of its lanes with the gap."""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with playwright.sync_playwright() as started:
        made = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


class Opened:
    """A page in a browser, with what it said and asked for."""

    def __init__(self, page, file: Path) -> None:
        self.page, self.file = page, file
        self.said, self.asked = [], []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("dialog", lambda dialog: self.said.append(dialog.message))
        page.goto(file.as_uri())

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text().replace("\xa0", " ")

    def lane(self, side: int, lane: int) -> float:
        """The height, on the page, of a lane of the timeline."""
        top = self.page.locator("#lanes").bounding_box()["y"]
        return top + AXIS + side * BLOCK + 24 + 17 + lane * LANE + 3 + 11

    def tip_at(self, side: int, lane: int, share: float) -> str:
        """What the page says under the pointer, at a share of the width of a lane."""
        self.page.locator("#lanes").scroll_into_view_if_needed()
        box = self.page.locator("#lanes").bounding_box()
        left = 86 if self.page.viewport_size["width"] >= 760 else 66
        x = box["x"] + left + share * (box["width"] - left - 12)
        self.page.mouse.move(x, self.lane(side, lane))
        tip = self.page.locator("#tip")
        lines = tip.inner_text().replace("\xa0", " ").splitlines() if tip.is_visible() else ()
        return "\n".join(line for line in lines if line)

    def column(self, number: int) -> list[str]:
        cells = self.page.locator(f"#table .rows .row > :nth-child({number})")
        return [text.replace("\xa0", " ") for text in cells.all_inner_texts()]

    def image(self, selector: str) -> bytes:
        return self.page.locator(selector).screenshot()

    def settle(self) -> None:
        """Wait until everything is drawn that was asked for."""
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """Opens the page of a run, and afterwards checks that it said nothing and asked no network."""
    pages = []

    def of_run(run: Path, width: int = 1200, scheme: str = "light") -> Opened:
        file = tmp_path_factory.mktemp("page") / "report.html"
        assert main(["report", str(run), "-o", str(file)]) == 0
        size = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, color_scheme=scheme)
        pages.append(Opened(context.new_page(), file))
        pages[-1].settle()
        return pages[-1]

    yield of_run
    for page in pages:
        assert page.said == []
        assert page.asked == [page.file.as_uri()]
        page.page.context.close()


@pytest.fixture
def page(opened, tmp_path):
    return opened(write_step(tmp_path, step()))


def test_the_head_tells_the_step(page):
    assert page.text("#title") == "run-0"
    assert page.text("#subtitle").startswith("step 8 · 1 graph · zcompile")
    told = page.text("#summary")
    assert "60.0 ms" in told
    assert "\N{MINUS SIGN}10.0 ms" in told
    assert "of device memory" in told


def test_the_pointer_names_instruction_entry_bytes_and_times(page):
    # The whole is 60 ms with 1 % of it on either side; the first fetch takes 1 ms, and then 6.
    told = page.tip_at(side=1, lane=1, share=(4 + 0.6) / 61.2)
    assert told.splitlines()[:2] == ["blocks.0.weight", "measured, over h2d"]
    assert "977 KiB" in told
    assert "167 MB/s" in told
    assert "run t mm, 1.00 ms later" in told
    told = page.tip_at(side=1, lane=0, share=(4 + 0.6) / 61.2)
    assert told.splitlines()[:2] == ["wait blocks.0.weight", "measured"]
    assert "6.00 ms" in told, "what compute waited"
    told = page.tip_at(side=0, lane=0, share=(13 + 0.6) / 61.2)
    assert told.splitlines()[:2] == ["run t mm", "predicted"]
    assert "forward, number 3" in told
    assert page.tip_at(side=1, lane=4, share=0.5) == "", "nothing was written to disk"


def test_stalls_are_red(page):
    red = page.page.evaluate(
        """([x, y]) => {
            const canvas = document.getElementById("lanes");
            const scale = canvas.width / canvas.clientWidth;
            return [...canvas.getContext("2d").getImageData(x * scale, y * scale, 1, 1).data];
        }""",
        [86 + (1200 - 64 - 98) * 4.6 / 61.2, 26 + BLOCK + 24 + 17 + 14],
    )
    assert red == [0xD2, 0x2F, 0x27, 255]


def test_zooming_and_moving_change_what_is_shown(page):
    whole, memory = page.image("#lanes"), page.image("#curves")
    told = page.tip_at(side=1, lane=0, share=0.5)
    page.page.keyboard.down("Control")
    for _ in range(4):
        page.page.mouse.wheel(0, -300)
    page.page.keyboard.up("Control")
    page.settle()
    assert page.tip_at(side=1, lane=0, share=0.5).splitlines()[:3] == told.splitlines()[:3]
    near = page.image("#lanes")
    assert near != whole
    assert page.image("#curves") != memory, "memory shows the same part"
    box = page.page.locator("#lanes").bounding_box()
    page.page.mouse.move(box["x"] + 600, page.lane(1, 2))
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 300, page.lane(1, 2), steps=3)
    page.page.mouse.up()
    page.settle()
    assert page.image("#lanes") != near
    page.page.get_by_role("button", name="Whole step").click()
    page.page.mouse.move(0, 0)
    page.settle()
    assert page.image("#lanes") == whole
    page.page.get_by_role("button", name="Zoom in").click()
    page.page.locator("#lanes").focus()
    page.page.keyboard.press("ArrowRight")
    page.settle()
    moved = page.image("#curves")
    assert moved != memory
    page.page.keyboard.press("0")
    page.settle()
    assert page.image("#curves") == memory


def test_a_wheel_alone_scrolls_the_page(page):
    page.page.locator("#lanes").hover()
    page.page.mouse.wheel(0, 200)
    page.page.wait_for_function("scrollY > 0")


def test_the_table_sorts_and_filters(page):
    assert page.column(1)[0] == "blocks.2.weight", "the largest first"
    page.page.get_by_role("button", name="Entry").click()
    assert page.column(1)[:2] == ["blocks.0.weight", "blocks.0.weight.exp_avg"]
    page.page.get_by_role("button", name="Entry").click()
    assert page.column(1)[0] == "blocks.2.weight.exp_avg"
    page.page.get_by_role("button", name="Comes, a step").click()
    assert page.column(5)[0] == "977 KiB"
    page.page.locator("#filter").fill("EXP_AVG")
    assert len(page.column(1)) == 3
    assert page.text("#count") == "3 of 6 entries, 33 B"
    assert page.column(4)[0] == "disk, not host"
    page.page.locator("#filter").fill("")
    page.page.locator("#filter-tier").select_option("host")
    assert set(page.column(2)) == {"weight"}


def test_a_pass_shows_its_difference_when_it_is_opened(page):
    assert page.page.locator("pre").count() == 0
    page.page.locator("summary", has_text="gather-params").click()
    lines = page.page.locator("pre .plus").all_inner_texts()
    assert "+%pending = zinf.fetch(%up_weight)" in lines
    page.page.locator("summary", has_text="cut-regions").click()
    assert page.page.locator(".note", has_text="a note").is_visible()


def test_memory_says_what_was_held_under_the_pointer(page):
    curve = page.page.locator("#curves canvas").first
    curve.hover()
    told = page.text("#tip")
    assert told.startswith("device")
    assert "measured" in told
    assert "5.72 MiB" in told, "the budget"


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(opened, tmp_path, width, scheme):
    page = opened(write_step(tmp_path, step(layers=12, name="a" * 200)), width, scheme)
    assert page.page.evaluate("document.documentElement.scrollWidth") == width
    paper = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")


def test_hostile_names_are_shown_and_do_nothing(opened, tmp_path):
    page = opened(write_step(tmp_path, step(name=HOSTILE)))
    assert page.column(1)[0] == f"{HOSTILE}.2.weight"
    assert HOSTILE in page.tip_at(side=1, lane=1, share=(4 + 0.6) / 61.2)
    assert page.page.title() == "run-0 - zinf report"
    assert page.page.locator("img").count() == 0


def test_a_large_step_has_few_rows_and_all_of_its_lanes(opened, tmp_path):
    page = opened(write_step(tmp_path, step(layers=500)))
    assert page.text("#count").startswith("1000 of 1000 entries")
    assert len(page.column(1)) < 60
    page.page.locator("#table .body").evaluate("(body) => { body.scrollTop = body.scrollHeight; }")
    page.page.wait_for_function(
        "[...document.querySelectorAll('#table .rows .row')].some((row) => "
        "row.firstChild.textContent === 'blocks.0.weight.exp_avg')"
    )
    assert "measured" in page.tip_at(side=1, lane=0, share=0.5)


def test_a_run_without_a_step_says_so(opened, tmp_path):
    page = opened(write_run(tmp_path))
    assert "No step was measured yet" in page.text("#warnings")
    assert page.page.locator("#timeline").is_hidden()
    assert page.column(1) == ["up.weight"]


def longest_run(page: Opened) -> tuple[str, float]:
    """Of the measured run instructions the longest: its name, and the share of the width at which
    its middle is shown."""
    facts = page.page.evaluate("JSON.parse(document.getElementById('facts').textContent)")
    names, kinds = facts["names"], facts["moments"]["kind"]
    slices = facts["sides"][1]["slices"]
    rows = zip(slices["moment"], slices["begin"], slices["end"], strict=True)
    runs = [row for row in rows if names[kinds[row[0]]] == "run"]
    moment, begin, end = max(runs, key=lambda row: row[2] - row[1])
    begins = [span["begin"] for side in facts["sides"] for span in side["spans"]]
    ends = [span["end"] for side in facts["sides"] for span in side["spans"]]
    ends += [at for side in facts["sides"] for hops in side["hops"].values() for at in hops["end"]]
    first, last = min(0, *begins), max(ends)
    middle = (begin + end) / 2 - first
    # The whole is shown with 1 % of it on either side.
    return names[facts["moments"]["name"][moment]], (middle / (last - first) + 0.01) / 1.02


def test_the_page_of_a_real_run(opened, tmp_path):
    # With so many rows compute takes a good part of the step, and its longest run many pixels.
    model = real_run(tmp_path, rows=1 << 16, device_memory="64MiB")
    zcompile.close(model)
    page = opened(tmp_path)
    assert page.text("#subtitle").startswith("step 2")
    assert "0.weight" in page.column(1)
    assert page.page.locator("#curves canvas").count() >= 2
    assert page.page.locator("#pass-rows details").count() > 5
    name, share = longest_run(page)
    assert page.tip_at(side=1, lane=0, share=share).splitlines()[:2] == [f"run {name}", "measured"]
