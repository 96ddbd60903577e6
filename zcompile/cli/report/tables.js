// What rests where: a stacked bar for each tier, and a table of which only the visible rows exist.

const KINDS = ["weight", "gradient", "state", "copy", "other"];
const ROW = 30;
const AROUND = 8;

const entries = {
  sorted: [],
  by: "nbytes",
  down: true,

  start() {
    const e = FACTS.entries;
    if (!e.name.length) return;
    byId("entries").hidden = false;
    this.drawTiers();
    const tiers = [...new Set(e.home)].map((n) => NAMES[n]).sort();
    this.choices("filter-tier", "All tiers", tiers.map((home) => [home, this.home(home)]));
    const kinds = [...new Set(e.kind)].map((n) => NAMES[n]);
    this.choices("filter-kind", "All kinds", kinds.map((kind) => [kind, title(kind)]));
    this.drawTable();
    for (const id of ["filter", "filter-tier", "filter-kind"]) {
      byId(id).addEventListener("input", () => this.sort());
    }
    this.sort();
  },

  home(home) { return home === "held" ? "device, where made" : title(home); },

  choices(id, all, rows) {
    byId(id).replaceChildren(...[["", all], ...rows].map(([value, text]) => {
      const option = make("option", text);
      option.value = value;
      return option;
    }));
  },

  drawTiers() {
    const e = FACTS.entries;
    const sums = new Map();
    e.name.forEach((_, i) => {
      const home = NAMES[e.home[i]] === "held" ? "device" : NAMES[e.home[i]];
      const row = sums.get(home) || sums.set(home, {}).get(home);
      const kind = KINDS.includes(NAMES[e.kind[i]]) ? NAMES[e.kind[i]] : "other";
      row[kind] = (row[kind] || 0) + e.nbytes[i];
    });
    const order = ["device", "host", "disk"];
    const homes = [...sums.keys()].sort((a, b) => order.indexOf(a) - order.indexOf(b));
    const totals = homes.map((home) => Object.values(sums.get(home)).reduce((a, b) => a + b, 0));
    const most = Math.max(1, ...totals);
    legend("entries-legend", KINDS.filter((kind) => homes.some((h) => sums.get(h)[kind])).map((kind) => [kind, title(kind)]));
    byId("tiers").replaceChildren(...homes.map((home, n) => {
      const parts = KINDS.filter((kind) => sums.get(home)[kind]);
      const bar = make("div", parts.map((kind) => make("i", [], { color: kind, width: sums.get(home)[kind] / most })), { className: "bar" });
      const tier = (FACTS.tiers || []).find((row) => row.tier === home);
      const of = tier ? ` of ${size(tier.budget_bytes)}` : "";
      const words = parts.map((kind) => `${size(sums.get(home)[kind])} ${title(kind)}`).join(", ");
      bar.title = words;
      const text = make("div", [`${size(totals[n])}${of}`, make("br"), make("small", words)]);
      return make("div", [make("span", title(home)), bar, text], { className: "tier-row" });
    }));
  },

  columns: [
    ["name", "Entry"], ["kind", "Kind"], ["nbytes", "Bytes"], ["home", "Rests on"],
    ["arrives", "Comes, a step"], ["leaves", "Leaves, a step"],
  ],

  drawTable() {
    const titles = this.columns.map(([key, text]) => {
      const button = make("button", text);
      button.type = "button";
      const cell = make("span", button);
      cell.setAttribute("role", "columnheader");
      button.addEventListener("click", () => {
        this.down = this.by === key ? !this.down : !["name", "kind", "home"].includes(key);
        this.by = key;
        this.sort();
      });
      return cell;
    });
    const head = make("div", titles, { className: "row titles" });
    head.setAttribute("role", "row");
    this.inside = make("div", [], { className: "rows" });
    this.body = make("div", [head, this.inside], { className: "body" });
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "rowgroup");
    this.titles = titles;
    byId("table").replaceChildren(this.body);
    this.body.addEventListener("scroll", () => this.fill());
  },

  sort() {
    const e = FACTS.entries;
    const text = byId("filter").value.trim().toLowerCase();
    const tier = byId("filter-tier").value, kind = byId("filter-kind").value;
    const rows = [];
    for (let i = 0; i < e.name.length; i += 1) {
      if (tier && NAMES[e.home[i]] !== tier) continue;
      if (kind && NAMES[e.kind[i]] !== kind) continue;
      if (text && !NAMES[e.name[i]].toLowerCase().includes(text)) continue;
      rows.push(i);
    }
    const column = e[this.by];
    const texts = ["name", "kind", "home"].includes(this.by);
    const natural = new Intl.Collator("en", { numeric: true });
    const order = texts ? (a, b) => natural.compare(NAMES[column[a]], NAMES[column[b]]) : (a, b) => column[a] - column[b];
    rows.sort((a, b) => (this.down ? -1 : 1) * order(a, b) || a - b);
    this.sorted = rows;
    this.titles.forEach((cell, n) => {
      const mine = this.columns[n][0] === this.by;
      cell.setAttribute("aria-sort", mine ? (this.down ? "descending" : "ascending") : "none");
      cell.firstChild.textContent = this.columns[n][1] + (mine ? (this.down ? " \u2193" : " \u2191") : "");
    });
    const sum = rows.reduce((total, i) => total + e.nbytes[i], 0);
    byId("count").textContent = `${rows.length} of ${e.name.length} entries, ${size(sum)}`;
    this.inside.style.height = `${rows.length * ROW}px`;
    this.body.scrollTop = 0;
    this.fill();
  },

  fill() {
    const first = Math.max(0, Math.floor(this.body.scrollTop / ROW) - AROUND);
    const last = Math.min(this.sorted.length, first + Math.ceil(this.body.clientHeight / ROW) + 2 * AROUND);
    const made = [];
    for (let n = first; n < last; n += 1) made.push(this.row(this.sorted[n], n));
    this.inside.replaceChildren(...made);
  },

  row(i, n) {
    const e = FACTS.entries;
    const home = NAMES[e.home[i]], plan = NAMES[e.plan[i]], kind = NAMES[e.kind[i]];
    const mark = make("i", [], { color: KINDS.includes(kind) ? kind : "other" });
    const astray = plan !== home && plan !== "held";
    const where = make("span", astray ? `${this.home(home)}, not ${this.home(plan)}` : this.home(home), { className: astray ? "astray" : "" });
    const name = make("span", NAMES[e.name[i]]);
    name.title = NAMES[e.name[i]];
    const moved = (nbytes) => make("span", nbytes ? size(nbytes) : "\u2013");
    const cells = [name, make("span", [mark, kind]), make("span", size(e.nbytes[i])), where, moved(e.arrives[i]), moved(e.leaves[i])];
    for (const cell of cells) cell.setAttribute("role", "cell");
    const row = make("div", cells, { className: "row" });
    row.setAttribute("role", "row");
    row.style.top = `${n * ROW}px`;
    return row;
  },
};
