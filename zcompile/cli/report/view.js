// The part of the step that is looked at, which timeline and memory share; and what canvases need.

const view = {
  first: 0, last: 1, // of all there is, microseconds
  from: 0, to: 1, // of what is shown
  drawers: [],
  waiting: false,

  open(first, last) {
    const margin = (last - first) * 0.01;
    this.first = this.from = first - margin;
    this.last = this.to = last + margin;
  },

  show(from, to) {
    const whole = this.last - this.first;
    const span = Math.min(whole, Math.max(to - from, 2)); // two microseconds are two instructions
    from = Math.min(Math.max(from, this.first), this.last - span);
    this.from = from;
    this.to = from + span;
    this.redraw();
  },

  zoom(factor, at = (this.from + this.to) / 2) {
    const span = (this.to - this.from) * factor;
    const share = (at - this.from) / (this.to - this.from);
    this.show(at - share * span, at + (1 - share) * span);
  },

  move(us) {
    this.show(this.from + us, this.to + us);
  },

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      for (const draw of this.drawers) draw();
    });
  },
};

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// The colors of the theme, read once for each picture.
function palette(...names) {
  return Object.fromEntries(names.map((name) => [name, color(name)]));
}

// A context in pixels of the page, of the size that the canvas has there.
function context(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const draw = canvas.getContext("2d");
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.clearRect(0, 0, width, height);
  draw.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  draw.textBaseline = "middle";
  return { draw, width, height };
}

// Round numbers between two, at most so many.
function ticks(from, to, most, units = [1, 2, 5]) {
  const least = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = units.map((n) => n * power).find((n) => n >= least) || 10 * power;
  const found = [];
  for (let n = Math.ceil(from / step); n * step <= to; n += 1) found.push(n * step);
  return { step, found };
}

// Sizes of which the unit is round: 0, 16 MiB, 32 MiB.
function sizeTicks(most, count) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(1, most)) / 10));
  const { found } = ticks(0, most / unit, count);
  return found.map((n) => n * unit);
}

function plainSize(nbytes) {
  return size(nbytes).replace(/\.0+(?=\u00a0)/, "").replace(/(\.\d*?)0+(?=\u00a0)/, "$1");
}

// Labels of an axis of time: one unit for all of them.
function timeLabel(us, step) {
  const [unit, factor] = step >= 1e5 ? ["s", 1e6] : step >= 100 ? ["ms", 1e3] : ["\u00b5s", 1];
  const places = Math.max(0, Math.ceil(-Math.log10(step / factor) - 1e-9));
  const text = (us / factor).toFixed(places);
  return `${text.replace("-", "\u2212")}\u00a0${unit}`;
}

// The index of the first of sorted numbers that is more than `value`.
function after(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

// Text that is cut to a width.
function fitted(draw, text, width) {
  if (draw.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (draw.measureText(`${text.slice(0, middle)}\u2026`).width <= width) low = middle; else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}\u2026` : "";
}
