// The page: its head, what binds the step, links, passes, settings; then all pictures are drawn.

const MOST_WARNINGS = 6;
const CHUNK = 400;

function drawHead() {
  byId("title").textContent = FACTS.title;
  const { step } = FACTS;
  const parts = step ? [`step ${step.number}`] : [];
  parts.push(`${FACTS.graphs.length} graph${FACTS.graphs.length === 1 ? "" : "s"}`);
  parts.push(`zcompile ${FACTS.zcompile}`, `torch ${FACTS.torch}`);
  byId("subtitle").textContent = parts.join(" \u00b7 ");
  if (!step) return;
  const { measured, predicted } = step;
  const beside = (field) => (predicted ? `predicted ${seconds(predicted[field])}` : "");
  const share = (s) => (measured.step_s ? percent(s / measured.step_s) : "");
  const rows = [
    ["Step", seconds(measured.step_s), beside("step_s")],
    ["Compute", seconds(measured.compute_s), `${share(measured.compute_s)} of the step`],
    ["Waits for transfers", seconds(measured.stall_s), `${share(measured.stall_s)} of the step`],
  ];
  if (FACTS.plan) {
    rows.push(["Bound by", title(FACTS.plan.least_by), `a plan like this takes at least ${seconds(FACTS.plan.least_s)}`]);
    const best = [...FACTS.plan.shadows].sort((a, b) => b.planned_s - a.planned_s)[0];
    if (best) rows.push(["One more GiB", best.planned_s > 0 ? `\u2212${seconds(best.planned_s)}` : "no gain", best.planned_s > 0 ? `a step, of ${best.tier} memory` : "of device or host memory"]);
  }
  byId("summary").replaceChildren(...rows.map(([name, value, more]) => make("div", [
    make("dt", name), make("dd", [value, make("small", more)]),
  ])));
}

function drawWarnings() {
  const rows = FACTS.warnings;
  if (!rows.length) return;
  byId("warnings").hidden = false;
  const list = byId("warnings").querySelector("ul");
  list.replaceChildren(...rows.slice(0, MOST_WARNINGS).map((text) => make("li", text)));
  if (rows.length <= MOST_WARNINGS) return;
  const button = make("button", `${rows.length - MOST_WARNINGS} more`);
  button.type = "button";
  button.addEventListener("click", () => {
    list.append(...rows.slice(MOST_WARNINGS).map((text) => make("li", text)));
    button.remove();
  });
  list.after(button);
}

function drawBound() {
  const { plan, step, unplanned } = FACTS;
  if (!step) return;
  byId("bound").hidden = false;
  const { measured, predicted } = step;
  const rows = [["Measured", measured.step_s, "compute", ""]];
  if (predicted) rows.unshift(["Predicted", predicted.step_s, "compute", ""]);
  if (plan) {
    rows.unshift(["Least of such plans", plan.least_s, "host", `bound by ${plan.least_by}`]);
    rows.unshift(["Floor of all plans", plan.floor_s, "host", `bound by ${plan.floor_by}`]);
  }
  const most = Math.max(...rows.map((row) => row[1]));
  byId("bars").replaceChildren(...rows.map(([name, value, paint, more]) => {
    const words = more ? [name, make("small", more)] : [name];
    const bar = make("div", make("i", [], { color: paint, width: value / most }), { className: "bar" });
    return make("div", [make("span", words), bar, make("span", seconds(value))], { className: "bar-row" });
  }));
  const says = [];
  if (plan) {
    for (const { tier, planned_s: saved, least_s: least } of plan.shadows) {
      const share = measured.step_s ? ` (${percent(Math.max(0, saved) / measured.step_s)})` : "";
      says.push(make("p", saved > 0
        ? `One more GiB of ${tier} memory saves ${seconds(saved)} a step${share}; the bound falls by ${seconds(least)}.`
        : `One more GiB of ${tier} memory saves nothing.`));
    }
  } else says.push(make("p", unplanned || "Nothing is known of the plan of this step."));
  const cells = (tag, texts) => make("tr", texts.map((text) => make(tag, text)));
  const phases = Object.keys(measured.phases);
  says.push(make("table", [
    cells("th", ["phase", "measured", "predicted", "bound by"]),
    ...phases.map((phase) => cells("td", [
      phase, seconds(measured.phases[phase]),
      predicted && phase in predicted.phases ? seconds(predicted.phases[phase]) : "\u2013",
      plan && phase in plan.binding ? title(plan.binding[phase]) : "\u2013",
    ])),
  ]));
  byId("says").replaceChildren(...says);
}

function drawLinks() {
  const { step } = FACTS;
  if (!step) return;
  const { measured, predicted } = step;
  const capacity = Object.fromEntries((FACTS.links || []).map((row) => [row.link, row.bytes_per_s]));
  const used = LINKS.filter((link) => measured.nbytes[link] || link in capacity);
  if (!used.length) return;
  byId("links").hidden = false;
  byId("link-rows").replaceChildren(...used.map((link) => {
    const nbytes = measured.nbytes[link] || 0, busy = measured.busy_s[link] || 0;
    const share = busy / measured.step_s;
    const carried = capacity[link] ? nbytes / (capacity[link] * measured.step_s) : 0;
    const marks = [
      make("i", [], { className: "pale", color: link, width: Math.min(1, share) }),
      make("i", [], { color: link, width: Math.min(1, carried) }),
    ];
    if (predicted && predicted.step_s) {
      const ahead = (predicted.busy_s[link] || 0) / predicted.step_s;
      marks.push(make("i", [], { className: "mark", left: Math.min(0.998, ahead) }));
    }
    const told = [`${size(nbytes)} a step`];
    if (capacity[link]) told.push(`${percent(carried)} of ${rate(capacity[link])}`);
    const more = [];
    if (busy > 0) more.push(`in use ${percent(share)} of the time, at ${rate(nbytes / busy)}`);
    else if (nbytes) more.push("times are not measured here");
    const ahead = predicted ? predicted.nbytes[link] || 0 : nbytes;
    if (ahead !== nbytes) more.push(`predicted ${size(ahead)}`);
    const text = make("div", [told.join(", "), make("br"), make("small", more.join("; "))]);
    return make("div", [make("span", title(link)), make("div", marks, { className: "bar" }), text], { className: "link-row" });
  }));
}

function drawPasses() {
  const graphs = FACTS.graphs.filter((graph) => graph.passes.length);
  if (!graphs.length) return;
  byId("passes").hidden = false;
  byId("pass-rows").replaceChildren(...graphs.flatMap((graph) => {
    const rows = graph.passes.map(passRow);
    if (graphs.length === 1) return rows;
    return [make("h3", `graph ${graph.index}${graph.name ? `: ${graph.name}` : ""}`), ...rows];
  }));
}

function passRow(pass) {
  const did = Object.entries(pass.did).sort().map(([op, n]) => `${op}\u00a0${n > 0 ? "+" : "\u2212"}${Math.abs(n)}`);
  const said = did.length ? did.join(", ") : !pass.step ? "as captured" : pass.same ? "no change" : "order only";
  const peak = pass.peak_before === pass.peak_after ? `peak ${size(pass.peak_after)}` : `peak ${size(pass.peak_before)} \u2192 ${size(pass.peak_after)}`;
  const number = String(pass.step).padStart(2, "0");
  const head = make("summary", [make("b", `${number} ${pass.name}`), make("code", said), make("span", peak)]);
  const made = make("details", head);
  made.addEventListener("toggle", () => {
    if (!made.open || made.children.length > 1) return;
    made.append(...pass.notes.map((note) => make("p", note, { className: "note" })));
    if (pass.diff_note) made.append(make("p", pass.diff_note, { className: "note" }));
    if (pass.diff.length) made.append(diff(pass.diff));
  });
  return made;
}

// A few hundred lines at first, and more on demand.
function diff(lines) {
  const box = make("pre");
  box.tabIndex = 0;
  let shown = 0;
  const more = make("button");
  more.type = "button";
  const add = () => {
    for (const line of lines.slice(shown, shown + CHUNK)) {
      const className = { "+": "plus", "-": "minus", "@": "at" }[line[0]] || "";
      more.before(make("span", line, { className }));
    }
    shown = Math.min(lines.length, shown + CHUNK);
    more.textContent = `${lines.length - shown} more lines`;
    more.hidden = shown === lines.length;
  };
  more.addEventListener("click", add);
  box.append(more);
  add();
  return box;
}

function drawSettings() {
  const rows = Object.entries(FACTS.config).flatMap(([key, value]) => [
    make("dt", key), make("dd", typeof value === "string" ? value : JSON.stringify(value)),
  ]);
  byId("config").replaceChildren(...rows);
}

drawHead();
drawWarnings();
if (FACTS.step) {
  timeline.start();
  startMemory();
}
drawBound();
drawLinks();
entries.start();
drawPasses();
drawSettings();
addEventListener("resize", () => view.redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.redraw());
addEventListener("scroll", hideTip, { passive: true });
view.redraw();
