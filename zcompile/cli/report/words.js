// Numbers as words, and elements from text: nothing of a run is ever read as markup.

const FACTS = JSON.parse(document.getElementById("facts").textContent);
const NAMES = FACTS.names;
const LINKS = ["h2d", "d2h", "disk_read", "disk_write"];
const LANES = ["compute", ...LINKS];
const TITLES = {
  compute: "compute", h2d: "h2d", d2h: "d2h", disk_read: "disk read", disk_write: "disk write",
  device: "device", host: "host", disk: "disk",
  weight: "weights", gradient: "gradients", state: "optimizer states", copy: "copies", other: "others",
};

function title(key) {
  return Object.hasOwn(TITLES, key) ? TITLES[key] : key;
}

function digits(value) {
  return value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);
}

// A time in microseconds, as `zinf` shows it.
function time(us) {
  const most = Math.abs(us);
  if (most === 0) return "0 s";
  const [unit, factor] = most >= 1e6 ? ["s", 1e6] : most >= 1e3 ? ["ms", 1e3] : ["\u00b5s", 1];
  return `${us < 0 ? "\u2212" : ""}${digits(most / factor)}\u00a0${unit}`;
}

// A moment: all digits down to a microsecond.
function moment(us) {
  return Math.abs(us) >= 1000 ? `${(us / 1000).toFixed(3).replace("-", "\u2212")}\u00a0ms` : time(us);
}

function seconds(s) {
  return time(s * 1e6);
}

function size(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (at < 4 && Math.abs(nbytes) >= 1024) { nbytes /= 1024; at += 1; }
  return `${at === 0 ? Math.round(nbytes) : digits(nbytes)}\u00a0${units[at]}`;
}

function rate(bytesPerSecond) {
  const units = ["B/s", "KB/s", "MB/s", "GB/s", "TB/s"];
  let at = 0;
  while (at < 4 && bytesPerSecond >= 1000) { bytesPerSecond /= 1000; at += 1; }
  return `${digits(bytesPerSecond)}\u00a0${units[at]}`;
}

function percent(share) {
  return `${share >= 0.0995 || share === 0 ? Math.round(share * 100) : (share * 100).toFixed(1)}\u00a0%`;
}

function byId(id) {
  return document.getElementById(id);
}

// An element with a class, texts and elements inside, and a color for its background.
function make(tag, inside = [], { className = "", color = "", width = null, left = null } = {}) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (color) made.style.background = `var(--${color})`;
  if (width !== null) made.style.width = `${100 * width}%`;
  if (left !== null) made.style.left = `${100 * left}%`;
  for (const part of Array.isArray(inside) ? inside : [inside]) made.append(part);
  return made;
}

function legend(id, rows) {
  byId(id).replaceChildren(...rows.map(([color, text, className]) => {
    const mark = make("i", [], { className: className || "", color: className ? "" : color });
    if (className && color) mark.style.color = `var(--${color})`;
    return make("li", [mark, text]);
  }));
}

// --- The tip: a title, a line about it, and rows of two texts ---

const tip = byId("tip");

function showTip(event, heading, about, rows) {
  const table = make("table", rows.map(([a, b]) => make("tr", [make("td", a), make("td", b)])));
  tip.replaceChildren(make("b", heading), make("p", about), table);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const x = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
  const y = event.clientY + 18 + height > innerHeight ? event.clientY - 14 - height : event.clientY + 18;
  tip.style.left = `${Math.max(8, Math.min(x, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, y)}px`;
}

function hideTip() {
  tip.hidden = true;
}
