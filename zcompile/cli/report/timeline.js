// The timeline: predicted above measured, a lane for compute and one for each link.

const GUTTER = () => (innerWidth < 760 ? 66 : 86);
const RIGHT = 12;
const LANE = 22;
const GAP = 4;
const HEAD = 24;
const CALLS = 17;
const AXIS = 26;
const BLOCK = HEAD + CALLS + LANES.length * (LANE + GAP) + 14;

const timeline = {
  canvas: byId("lanes"),
  found: null, // what the pointer is on: {side, lane, index}
  pointers: new Map(),

  start() {
    const sides = FACTS.sides;
    for (const side of sides) {
      for (const rows of [side.slices, ...Object.values(side.hops)]) rows.reach = reach(rows.end);
    }
    const times = sides.flatMap((side) => side.spans.flatMap((span) => [span.begin, span.end]));
    const late = sides.flatMap((side) => LINKS.map((link) => side.hops[link].end.at(-1) || 0));
    view.open(Math.min(0, ...times), Math.max(1, ...times, ...late));
    byId("timeline").hidden = false;
    this.canvas.style.height = `${AXIS + sides.length * BLOCK}px`;
    const words = sides.map((side) => `${side.name}: ${seconds(side.step_s)}`).join(", ");
    this.canvas.setAttribute("aria-label", `Timeline of a step; ${words}`);
    legend("timeline-legend", [
      ["compute", "computes"], ["stall", "waits for a transfer"], ["host", "other instructions"],
      ...LINKS.map((link) => [link, title(link)]),
    ]);
    view.drawers.push(() => this.draw(), () => this.drawOverview());
    this.listen();
  },

  x(us) {
    return this.left + (us - this.origin) * this.pixels;
  },

  time(x) {
    return this.origin + (x - this.left) / this.pixels;
  },

  draw() {
    const { draw, width, height } = context(this.canvas);
    this.left = GUTTER();
    this.width = width;
    this.origin = view.from;
    this.pixels = (width - this.left - RIGHT) / (view.to - view.from);
    const ink = palette("ink", "soft", "grid", "line", "panel", "paper", "host", "stall", ...LANES);
    this.drawAxis(draw, ink, height);
    FACTS.sides.forEach((side, number) => this.drawSide(draw, ink, side, AXIS + number * BLOCK));
    this.drawFound(draw, ink);
  },

  drawAxis(draw, ink, height) {
    const room = Math.floor((this.width - this.left) / 76);
    const { step, found } = ticks(view.from, view.to, room);
    draw.textAlign = "center";
    for (const at of found) {
      const x = Math.round(this.x(at)) + 0.5;
      if (x < this.left) continue;
      draw.fillStyle = ink.grid;
      draw.fillRect(x - 0.5, AXIS - 4, 1, height - AXIS);
      draw.fillStyle = ink.soft;
      const label = timeLabel(at, step);
      const half = draw.measureText(label).width / 2;
      draw.fillText(label, Math.min(Math.max(x, this.left + half), this.width - half), AXIS / 2 - 2);
    }
  },

  drawSide(draw, ink, side, top) {
    const right = this.width - RIGHT;
    draw.textAlign = "left";
    draw.fillStyle = ink.ink;
    draw.font = draw.font.replace(/^/, "600 ");
    const name = side.name[0].toUpperCase() + side.name.slice(1);
    draw.fillText(name, 0, top + HEAD / 2);
    const wide = draw.measureText(name).width;
    draw.font = draw.font.replace("600 ", "");
    draw.fillStyle = ink.soft;
    draw.fillText(`${seconds(side.step_s)} a step`, wide + 10, top + HEAD / 2);
    LANES.forEach((lane, number) => {
      const y = this.laneTop(top, number);
      draw.fillStyle = ink.panel;
      draw.fillRect(this.left, y, right - this.left, LANE);
      draw.fillStyle = ink.soft;
      draw.textAlign = "right";
      draw.fillText(title(lane), this.left - 8, y + LANE / 2);
    });
    draw.save();
    draw.beginPath();
    draw.rect(this.left, top, right - this.left, BLOCK);
    draw.clip();
    this.drawCalls(draw, ink, side, top + HEAD);
    this.drawCompute(draw, ink, side.slices, this.laneTop(top, 0));
    LINKS.forEach((link, number) => {
      const { begin, end, reach: reached } = side.hops[link];
      const bars = new Bars(this, draw, this.laneTop(top, number + 1), { [link]: ink[link] });
      for (let i = after(reached, view.from); i < begin.length && begin[i] < view.to; i += 1) {
        bars.add(link, begin[i], end[i]);
      }
      bars.finish();
    });
    draw.restore();
  },

  laneTop(top, number) {
    return top + HEAD + CALLS + number * (LANE + GAP) + 3;
  },

  drawCalls(draw, ink, side, y) {
    draw.textAlign = "left";
    for (const { phase, begin, end } of side.spans) {
      const from = Math.max(this.left, this.x(begin)), to = this.x(end);
      if (to < this.left || from > this.width) continue;
      draw.fillStyle = ink.line;
      draw.fillRect(from, y + CALLS - 3, Math.max(1, to - from - 1), 2);
      draw.fillStyle = ink.soft;
      const text = fitted(draw, phase, to - from - 4);
      if (text) draw.fillText(text, from, y + CALLS / 2 - 3);
    }
  },

  drawCompute(draw, ink, slices, y) {
    computeBars(this, draw, ink, y, LANE, slices, after(slices.reach, view.from), view.to);
    this.label(draw, ink, slices, y);
  },

  // Names inside of instructions that are wide enough.
  label(draw, ink, { moment: which, begin, end, stall_begin: since, stall, reach: reached }, y) {
    draw.fillStyle = ink.paper;
    draw.textAlign = "left";
    const least = this.time(48) - this.time(0);
    for (let i = after(reached, view.from); i < begin.length && begin[i] < view.to; i += 1) {
      if (end[i] - begin[i] < least || !computes(which[i])) continue;
      const from = Math.max(this.left, this.x(Math.max(begin[i], since[i] + stall[i])));
      const wide = Math.min(this.x(end[i]), this.width) - from;
      if (wide < 48) continue;
      const text = fitted(draw, NAMES[FACTS.moments.name[which[i]]], wide - 10);
      if (text) draw.fillText(text, from + 5, y + LANE / 2 + 0.5);
    }
  },

  // --- What the pointer is on ---

  lane(y) {
    const number = Math.floor((y - AXIS) / BLOCK);
    if (number < 0 || number >= FACTS.sides.length) return null;
    const top = AXIS + number * BLOCK;
    const lane = LANES.findIndex((_, n) => Math.abs(y - this.laneTop(top, n) - LANE / 2) <= LANE / 2 + 1);
    return lane < 0 ? null : { side: FACTS.sides[number], lane: LANES[lane], y: this.laneTop(top, lane), top };
  },

  at(x, y) {
    const where = this.lane(y);
    if (!where || x < this.left) return null;
    const us = this.time(x);
    const slack = this.time(x + 3) - us;
    const rows = where.lane === "compute" ? where.side.slices : where.side.hops[where.lane];
    const begins = rows.stall_begin || rows.begin;
    let best = null, nearest = slack, longest = -1;
    const first = after(rows.reach, us - slack);
    for (let i = first; i < rows.begin.length && rows.begin[i] <= us + slack; i += 1) {
      const begin = Math.min(rows.begin[i], begins[i]);
      const away = us < begin ? begin - us : us > rows.end[i] ? us - rows.end[i] : 0;
      const long = rows.end[i] - begin;
      if (away < nearest || (away === nearest && long > longest)) {
        [best, nearest, longest] = [i, away, long];
      }
    }
    return best === null ? null : { ...where, rows, index: best };
  },

  drawFound(draw, ink) {
    if (!this.found) return;
    const { side, lane, rows, index, y, top } = this.found;
    draw.save();
    draw.beginPath();
    draw.rect(this.left, 0, this.width - this.left - RIGHT, 4000);
    draw.clip();
    const outline = (begin, end, at) => {
      const x = this.x(begin);
      draw.strokeStyle = ink.ink;
      draw.lineWidth = 1.5;
      draw.strokeRect(x - 1, at - 1, Math.max(2, this.x(end) - x) + 2, LANE + 2);
    };
    outline(Math.min(rows.begin[index], (rows.stall_begin || rows.begin)[index]), rows.end[index], y);
    const compute = this.laneTop(top, 0);
    const arrow = (hop, link) => {
      const user = side.hops[link].user[hop];
      const slice = user < 0 ? -1 : side.slices.moment.indexOf(user);
      if (slice < 0) return;
      const from = this.x(side.hops[link].end[hop]), to = this.x(side.slices.begin[slice]);
      const low = this.laneTop(top, LANES.indexOf(link)), high = compute + LANE;
      draw.strokeStyle = ink.ink;
      draw.lineWidth = 1.25;
      draw.beginPath();
      draw.moveTo(from, low);
      draw.bezierCurveTo(from, (low + high) / 2, to, (low + high) / 2, to, high + 1);
      draw.stroke();
      draw.beginPath();
      draw.arc(to, high + 1, 2.5, 0, 7);
      draw.fillStyle = ink.ink;
      draw.fill();
    };
    if (lane === "compute") {
      for (const link of LINKS) {
        side.hops[link].user.forEach((user, hop) => {
          if (user === rows.moment[index]) arrow(hop, link);
        });
      }
    } else arrow(index, lane);
    draw.restore();
  },

  describe({ side, lane, rows, index }) {
    const m = FACTS.moments;
    const lasted = (begin, end) => [["begins", moment(begin)], ["takes", time(end - begin)]];
    const told = (n) => `${NAMES[m.kind[n]]} ${NAMES[m.name[n]]}`;
    if (lane === "compute") {
      const n = rows.moment[index];
      const known = [["phase", `${NAMES[m.phase[n]]}, number ${m.index[n]}`], ...lasted(rows.begin[index], rows.end[index])];
      if (rows.stall[index] > 0) known.push(["waits", time(rows.stall[index])]);
      if (m.nbytes[n]) known.push(["bytes", size(m.nbytes[n])]);
      const entry = NAMES[m.entry[n]];
      if (entry && entry !== NAMES[m.name[n]]) known.push(["entry", entry]);
      return [told(n), side.name, known];
    }
    const nbytes = rows.nbytes[index], took = rows.end[index] - rows.begin[index];
    const known = lasted(rows.begin[index], rows.end[index]);
    known.push(["bytes", size(nbytes)]);
    if (took > 0) known.push(["rate", rate((nbytes / took) * 1e6)]);
    if (rows.sender[index] >= 0) {
      const n = rows.sender[index];
      known.push(["sent by", `${NAMES[m.kind[n]]}, ${NAMES[m.phase[n]]} number ${m.index[n]}`]);
    }
    if (rows.user[index] >= 0) {
      const slice = side.slices.moment.indexOf(rows.user[index]);
      const ahead = slice < 0 ? 0 : side.slices.begin[slice] - rows.end[index];
      known.push(["first used by", `${told(rows.user[index])}, ${time(Math.max(0, ahead))} later`]);
    }
    return [NAMES[rows.name[index]], `${side.name}, over ${title(lane)}`, known];
  },

  // --- The whole step, and which part of it is shown ---

  drawOverview() {
    const canvas = byId("overview");
    const { draw, width, height } = context(canvas);
    const ink = palette("compute", "stall", "panel", "paper", "ink", "host");
    const left = GUTTER(), room = width - left - RIGHT;
    const pixels = room / (view.last - view.first);
    const known = `${canvas.width} ${canvas.height} ${ink.panel}`;
    if (this.known !== known) { // else the picture of before is true still
      this.known = known;
      draw.fillStyle = ink.panel;
      draw.fillRect(left, 0, room, height);
      this.drawWhole(draw, ink, { left, width, origin: view.first, pixels }, height);
      this.picture = document.createElement("canvas");
      [this.picture.width, this.picture.height] = [canvas.width, canvas.height];
      this.picture.getContext("2d").drawImage(canvas, 0, 0);
    } else draw.drawImage(this.picture, 0, 0, width, height);
    const from = left + (view.from - view.first) * pixels, to = left + (view.to - view.first) * pixels;
    draw.globalAlpha = 0.55;
    draw.fillStyle = ink.paper;
    draw.fillRect(left, 0, from - left, height);
    draw.fillRect(to, 0, left + room - to, height);
    draw.globalAlpha = 1;
    draw.strokeStyle = ink.ink;
    draw.lineWidth = 1;
    draw.strokeRect(from + 0.5, 0.5, Math.max(3, to - from - 1), height - 1);
    this.overviewTime = (at) => view.first + (at - left) / pixels;
  },

  // Compute of the whole step, as it was measured.
  drawWhole(draw, ink, frame, height) {
    computeBars(frame, draw, ink, 8, height - 16, FACTS.sides.at(-1).slices, 0, view.last);
  },

  // --- Pointer and keys ---

  listen() {
    const canvas = this.canvas;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const look = (event) => {
      const [x, y] = place(event);
      const before = this.found;
      this.found = this.at(x, y);
      if (this.found) showTip(event, ...this.describe(this.found)); else hideTip();
      if (before !== this.found) view.redraw();
    };
    let last = null;
    canvas.addEventListener("pointerdown", (event) => {
      last = event.clientX;
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragged");
      look(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (last === null) { look(event); return; }
      const moved = event.clientX - last;
      if (!moved) return;
      last = event.clientX;
      hideTip();
      view.move(-moved * (this.time(1) - this.time(0)));
    });
    for (const over of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(over, () => { last = null; canvas.classList.remove("dragged"); });
    }
    canvas.addEventListener("pointerleave", () => { this.found = null; hideTip(); view.redraw(); });
    canvas.addEventListener("dblclick", (event) => {
      const found = this.at(...place(event));
      if (!found) return;
      const begin = found.rows.begin[found.index], end = found.rows.end[found.index];
      const margin = Math.max(2, end - begin);
      view.show(begin - margin, end + margin);
    });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        view.zoom(Math.exp(event.deltaY * 0.004), this.time(place(event)[0]));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        view.move((event.deltaX || event.deltaY) * (this.time(1) - this.time(0)));
      } else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const span = view.to - view.from;
      const acts = {
        ArrowLeft: () => view.move(-span / 8), ArrowRight: () => view.move(span / 8),
        "+": () => view.zoom(0.6), "=": () => view.zoom(0.6), "-": () => view.zoom(1 / 0.6),
        0: () => view.show(view.first, view.last), Home: () => view.show(view.first, view.last),
      };
      if (!Object.hasOwn(acts, event.key) || event.ctrlKey || event.metaKey) return;
      acts[event.key]();
      event.preventDefault();
    });
    byId("zoom-in").addEventListener("click", () => view.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => view.zoom(2));
    byId("zoom-all").addEventListener("click", () => view.show(view.first, view.last));
    const overview = byId("overview");
    const jump = (event) => {
      const at = this.overviewTime(event.clientX - overview.getBoundingClientRect().left);
      const half = (view.to - view.from) / 2;
      view.show(at - half, at + half);
    };
    overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); jump(event); });
    overview.addEventListener("pointermove", (event) => { if (event.buttons) jump(event); });
  },
};

function computes(moment) {
  return NAMES[FACTS.moments.kind[moment]] === "run";
}

// The bars of compute, and of what it waited for, from the slice `first` until the time `to`.
function computeBars(frame, draw, ink, y, height, slices, first, to) {
  const bars = new Bars(frame, draw, y, { host: ink.host, compute: ink.compute, stall: ink.stall }, height);
  const { moment, begin, end, stall_begin: since, stall } = slices;
  for (let i = first; i < begin.length && Math.min(begin[i], since[i]) <= to; i += 1) {
    const waited = since[i] + stall[i];
    if (stall[i] > 0) bars.add("stall", since[i], waited);
    const from = stall[i] > 0 ? Math.max(begin[i], waited) : begin[i];
    bars.add(computes(moment[i]) ? "compute" : "host", from, end[i]);
  }
  bars.finish();
}

// The latest end so far of each row: ends of compute beside the host are in no order.
function reach(ends) {
  let latest = -Infinity;
  return ends.map((end) => (latest = Math.max(latest, end)));
}

// Bars of one lane, in a frame that begins at the time `origin` and has so many pixels a microsecond.
// What is narrower than two pixels is summed up, so that a pixel is as dark as it is full, and
// thousands of bars are as many rectangles as the lane has pixels.
class Bars {
  constructor(frame, draw, y, colors, height = LANE) {
    Object.assign(this, { frame, draw, y, colors, height });
    this.columns = Object.fromEntries(Object.keys(colors).map((kind) => [kind, new Float32Array(Math.ceil(frame.width) + 3)]));
  }

  add(kind, begin, end) {
    const { left, width, origin, pixels } = this.frame;
    const from = Math.max(left + (begin - origin) * pixels, left);
    const to = Math.min(left + (end - origin) * pixels, width);
    if (to <= from) return;
    if (to - from >= 2) {
      this.draw.fillStyle = this.colors[kind];
      this.draw.fillRect(from, this.y, to - from - (to - from > 6 ? 0.75 : 0), this.height);
      return;
    }
    const columns = this.columns[kind];
    const at = Math.floor(from), rest = at + 1 - from;
    if (to - from <= rest) columns[at] += to - from;
    else { // two columns, or three
      columns[at] += rest;
      columns[at + 1] += Math.min(1, to - at - 1);
      if (to > at + 2) columns[at + 2] += to - at - 2;
    }
  }

  finish() {
    for (const [kind, columns] of Object.entries(this.columns)) {
      this.draw.fillStyle = this.colors[kind];
      columns.forEach((full, at) => {
        if (full <= 0) return;
        this.draw.globalAlpha = Math.min(1, Math.max(0.12, full));
        this.draw.fillRect(at, this.y, 1, this.height);
      });
    }
    this.draw.globalAlpha = 1;
  }
}
