// Memory of each tier over the step, under the part of the timeline that is shown.

const TOP = 30;
const BOTTOM = 24;
const NEAR = 2.5; // A budget that is at most so many times the peak is a line; a farther one is a word.

class MemoryCurve {
  constructor(tier) {
    this.tier = tier;
    this.canvas = make("canvas");
    this.canvas.setAttribute("role", "img");
    this.sides = FACTS.sides.filter((side) => side.memory[tier.tier] && side.memory.until.length);
    this.measured = this.sides.find((side) => side.name === "measured");
    const planned = this.sides.filter((side) => side !== this.measured).flatMap((side) => side.memory[tier.tier]);
    this.planned = planned.reduce((a, b) => Math.max(a, b), 0);
    const levels = this.measured ? this.measured.memory[tier.tier] : [];
    this.highest = levels.reduce((best, n, i) => (n > levels[best] ? i : best), 0);
    this.canvas.setAttribute("aria-label", `${tier.tier}: peak ${size(tier.peak_bytes)} of ${size(tier.budget_bytes)}`);
    view.drawers.push(() => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.look(event));
    this.canvas.addEventListener("pointerleave", () => { this.pointer = null; hideTip(); view.redraw(); });
  }

  draw() {
    const { draw, width, height } = context(this.canvas);
    const ink = palette("ink", "soft", "grid", "line", "compute", "stall", "state", "paper", "panel");
    Object.assign(this, { drawn: draw, width, height, left: GUTTER(), ink });
    const { tier } = this;
    const peak = Math.max(tier.peak_bytes, this.planned, 1);
    const near = tier.budget_bytes <= NEAR * peak;
    this.most = (near ? Math.max(peak, tier.budget_bytes) : peak) * 1.06;
    this.head(near);
    this.axes();
    draw.save();
    draw.beginPath();
    draw.rect(this.left, TOP - 8, width - this.left - RIGHT, height - TOP - BOTTOM + 8);
    draw.clip();
    if (this.measured) {
      const { memory } = this.measured;
      this.area(memory.until, memory[tier.tier], ink.compute, 0.28);
      if (tier.tier === "device") this.area(memory.until, memory.outside, ink.compute, 0.35);
      this.line(memory.until, memory[tier.tier], ink.compute, []);
    }
    for (const side of this.sides) {
      if (side !== this.measured) this.line(side.memory.until, side.memory[tier.tier], ink.ink, [4, 3]);
    }
    if (near) this.budget();
    draw.restore();
    if (this.measured) this.peak();
    if (this.pointer !== null && this.pointer !== undefined) this.cross();
  }

  x(us) { return this.left + ((us - view.from) / (view.to - view.from)) * (this.width - this.left - RIGHT); }

  y(nbytes) { return this.height - BOTTOM - (nbytes / this.most) * (this.height - TOP - BOTTOM); }

  head(near) {
    const { drawn: draw, ink, tier } = this;
    draw.textAlign = "left";
    draw.fillStyle = ink.ink;
    draw.font = `600 ${draw.font}`;
    const name = title(tier.tier)[0].toUpperCase() + title(tier.tier).slice(1);
    draw.fillText(name, 0, 9);
    const wide = draw.measureText(name).width;
    draw.font = draw.font.replace("600 ", "");
    draw.fillStyle = ink.soft;
    const share = near ? `, ${percent(tier.peak_bytes / tier.budget_bytes)} of it` : "";
    const budget = near ? `budget ${size(tier.budget_bytes)}` : `budget ${size(tier.budget_bytes)}, far above`;
    draw.fillText(fitted(draw, `${budget}; at most ${size(tier.peak_bytes)} held${share}`, this.width - wide - 10), wide + 10, 9);
  }

  axes() {
    const { drawn: draw, ink, width, height } = this;
    draw.textAlign = "right";
    for (const nbytes of sizeTicks(this.most, 4)) {
      const y = Math.round(this.y(nbytes)) + 0.5;
      draw.fillStyle = ink.grid;
      draw.fillRect(this.left, y - 0.5, width - this.left - RIGHT, 1);
      draw.fillStyle = ink.soft;
      draw.fillText(nbytes ? plainSize(nbytes) : "0", this.left - 8, y);
    }
    const { step, found } = ticks(view.from, view.to, Math.floor((width - this.left) / 76));
    draw.textAlign = "center";
    for (const at of found) {
      const x = this.x(at);
      if (x < this.left) continue;
      const label = timeLabel(at, step);
      const half = draw.measureText(label).width / 2;
      draw.fillText(label, Math.min(Math.max(x, this.left + half), width - half), height - BOTTOM / 2 + 2);
    }
  }

  // The corners of a curve in the part that is shown; of levels in one pixel, the highest and the last.
  path(until, levels) {
    const { drawn: draw } = this;
    const first = after(until, view.from);
    const pixels = (this.width - this.left - RIGHT) / (view.to - view.from);
    let before = first ? until[first - 1] : Math.min(0, until[0]);
    let from = this.x(before), most = 0;
    draw.moveTo(from, this.y(levels[Math.min(first, levels.length - 1)]));
    for (let i = first; i < until.length; i += 1) {
      before = until[i];
      if (levels[i] > most) most = levels[i];
      const to = this.left + (before - view.from) * pixels;
      if (to - from < 1 && i + 1 < until.length && before <= view.to) continue;
      const y = this.y(most);
      draw.lineTo(from, y);
      draw.lineTo(to, y);
      if (most !== levels[i]) draw.lineTo(to, this.y(levels[i]));
      [from, most] = [to, 0];
      if (before > view.to) break;
    }
    return before;
  }

  area(until, levels, fill, alpha) {
    const { drawn: draw } = this;
    const first = after(until, view.from);
    draw.beginPath();
    const last = this.path(until, levels);
    draw.lineTo(this.x(last), this.y(0));
    draw.lineTo(this.x(first ? until[first - 1] : Math.min(0, until[0] || 0)), this.y(0));
    draw.closePath();
    draw.globalAlpha = alpha;
    draw.fillStyle = fill;
    draw.fill();
    draw.globalAlpha = 1;
  }

  line(until, levels, stroke, dash) {
    const { drawn: draw } = this;
    draw.beginPath();
    this.path(until, levels);
    draw.strokeStyle = stroke;
    draw.lineWidth = dash.length ? 1.2 : 1.6;
    draw.lineJoin = "round";
    draw.setLineDash(dash);
    draw.stroke();
    draw.setLineDash([]);
  }

  budget() {
    const { drawn: draw, ink, tier, width } = this;
    const y = Math.round(this.y(tier.budget_bytes)) + 0.5;
    draw.strokeStyle = ink.stall;
    draw.lineWidth = 1.5;
    draw.beginPath();
    draw.moveTo(this.left, y);
    draw.lineTo(width - RIGHT, y);
    draw.stroke();
  }

  peak() {
    const { drawn: draw, ink, tier, measured, width } = this;
    const levels = measured.memory[tier.tier], until = measured.memory.until;
    const most = this.highest;
    const x = (this.x(most ? until[most - 1] : 0) + this.x(until[most])) / 2, y = this.y(levels[most]);
    if (x < this.left || x > width - RIGHT) return;
    draw.beginPath();
    draw.arc(x, y, 3.5, 0, 7);
    draw.fillStyle = ink.ink;
    draw.fill();
    const text = `peak ${size(levels[most])}`;
    const half = draw.measureText(text).width / 2 + 4;
    const at = Math.min(Math.max(x, this.left + half), width - RIGHT - half);
    const below = y + 13;
    draw.fillStyle = ink.paper;
    draw.globalAlpha = 0.82;
    draw.fillRect(at - half, below - 8, 2 * half, 16);
    draw.globalAlpha = 1;
    draw.fillStyle = ink.ink;
    draw.textAlign = "center";
    draw.fillText(text, at, below);
  }

  cross() {
    const { drawn: draw, ink } = this;
    const x = this.x(this.pointer);
    draw.fillStyle = ink.soft;
    draw.fillRect(Math.round(x), TOP - 8, 1, this.height - TOP - BOTTOM + 8);
  }

  look(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    if (x < this.left) { this.pointer = null; hideTip(); return; }
    this.pointer = view.from + ((x - this.left) / (this.width - this.left - RIGHT)) * (view.to - view.from);
    const rows = [];
    for (const side of this.sides) {
      const { memory } = side;
      const at = Math.min(after(memory.until, this.pointer), memory.until.length - 1);
      rows.push([side.name, size(memory[this.tier.tier][at])]);
      if (this.tier.tier === "device") rows.push(["", `${size(memory.outside[at])} of it outside the arena`]);
    }
    rows.push(["budget", size(this.tier.budget_bytes)]);
    showTip(event, title(this.tier.tier), `at ${moment(this.pointer)}`, rows);
    view.redraw();
  }
}

function startMemory() {
  const tiers = FACTS.tiers.filter((tier) => FACTS.sides.some((side) => side.memory[tier.tier]));
  if (!tiers.length) return;
  byId("memory").hidden = false;
  legend("memory-legend", [
    ["", "measured", "solid"], ["", "predicted", "dashed"], ["stall", "budget", "solid"],
    ["compute", "stronger: values of graphs, outside the arena"],
  ]);
  byId("curves").replaceChildren(...tiers.map((tier) => new MemoryCurve(tier).canvas));
}
