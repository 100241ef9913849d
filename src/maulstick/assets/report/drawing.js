"use strict";

/* What all charts share: the data, what of it is in view, and what pointer and keys do. */

const data = JSON.parse(document.getElementById("data").textContent);
const at = document.getElementById("at");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const hue = (number) => colour("c" + (number % 8));
const value = (v) => (typeof v === "string" ? { nan: NaN, inf: Infinity, "-inf": -Infinity }[v] : v);
const isNumber = (v) => v !== null && Number.isFinite(v);
const HEAT = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const thousands = (n) => Math.round(n).toLocaleString("en-US");

function format(v) {
  if (v === null || v === undefined) return "–";
  if (Number.isNaN(v)) return "NaN";
  if (!Number.isFinite(v)) return v > 0 ? "∞" : "−∞";
  const size = Math.abs(v);
  if (Number.isInteger(v) && size < 10000000) return String(v);
  if (size >= 0.001 && size < 100000) return String(Number(v.toPrecision(4)));
  return v.toExponential(2).replace("e+", "e");
}

/* The index of the value nearest to x in an ascending list. */
function nearest(list, x) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] < x) low = middle; else high = middle;
  }
  return high > 0 && Math.abs(list[low] - x) <= Math.abs(list[high] - x) ? low : Math.max(high, 0);
}

function niceStep(span, count) {
  const rough = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((f) => f * power).find((step) => step >= rough * (1 - 1e-9));
}

function make(tag, attributes = {}, ...content) {
  const made = document.createElement(tag);
  for (const [name, v] of Object.entries(attributes)) made.setAttribute(name, v);
  made.append(...content);
  return made;
}

/* ---- what is in view: one for all charts over steps, one for those over timesteps ---- */

class View {
  constructor(low, high) {
    Object.assign(this, { low, high: Math.max(high, low + 1), cursor: null, drawings: [], waiting: false });
    this.from = this.low; this.to = this.high;
  }
  show(from, to) {
    const span = Math.min(Math.max(to - from, 4), this.high - this.low);
    this.from = Math.min(Math.max(from, this.low), this.high - span);
    this.to = this.from + span;
    this.redraw();
  }
  zoom(factor, around = this.cursor ?? (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }
  all() { this.show(this.low, this.high); }
  point(x, said) {
    this.cursor = x === null ? null : Math.min(Math.max(x, this.low), this.high);
    if (x !== null && said && (this.cursor < this.from || this.cursor > this.to)) {
      const half = (this.to - this.from) / 2;
      this.show(this.cursor - half, this.cursor + half);
    }
    for (const each of this.drawings) each.drawCursor();
    if (this === steps) tellStep(said);
  }
  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      for (const each of this.drawings) each.draw();
    });
  }
}

const ends = Object.entries(data.axes).filter(([name]) => !name.endsWith("bins")).flatMap(([, list]) => list.length ? [list[0], list.at(-1)] : []);
const heatEnds = data.heat.map((each) => each.steps.at(-1));
/* One left edge, so that a step stands at the same place in charts and heat maps. */
const LEFT = Math.max(56, ...data.heat.flatMap((map) => map.rows.map((row) => Math.min(110, 16 + 6.3 * row.length))));
const steps = new View(Math.min(1, ...ends), Math.max(1, ...ends, ...heatEnds));
const timesteps = new View(0, 1000);
const marks = data.runs.flatMap((run, number) => run.marks.map(([step, kind, text]) => ({ step, kind, text, run: number }))).sort((a, b) => a.step - b.step);

const markSteps = marks.map((mark) => mark.step);

function tellStep(said) {
  at.setAttribute("aria-live", said ? "polite" : "off");
  if (steps.cursor === null) return;
  const step = Math.round(steps.cursor);
  const reach = Math.max(0.5, (steps.to - steps.from) / 200);
  const near = marks.filter((mark) => Math.abs(mark.step - step) <= reach).sort((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step));
  const told = near.slice(0, 3).map((mark) => `${data.runs.length > 1 ? data.runs[mark.run].name + ", " : ""}step ${thousands(mark.step)}, ${mark.text}`);
  if (near.length > 3) told.push(`${near.length - 3} more here`);
  at.textContent = [`step ${thousands(step)}`, ...(said ? values(step) : []), ...told].join(" · ");
}

function values(step) {
  return data.charts.filter((chart) => ["loss", "norm"].includes(chart.id)).flatMap((chart) => chart.lines).map((line) => {
    const place = nearest(data.axes[line.axis], step);
    return `${line.name} ${format(value(line.values[place] ?? null))}`;
  });
}

/* ---- a drawing: a canvas, one above it for the cursor, and what the pointer and the keys do ---- */

class Drawing {
  constructor(place, view, name) {
    Object.assign(this, { place, view, left: view === steps ? LEFT : 56, right: 10, top: 8, bottom: 24 });
    this.legend = place.appendChild(make("ul", { class: "legend" }));
    this.plot = place.appendChild(make("div", { class: "plot", tabindex: "0", role: "img", "aria-label": name }));
    this.base = this.plot.appendChild(document.createElement("canvas"));
    this.above = this.plot.appendChild(document.createElement("canvas"));
    this.pointers = new Map();
    this.listen();
    view.drawings.push(this);
  }
  size() {
    const width = this.plot.clientWidth, height = this.height(), ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.above]) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.w = width; this.h = height;
  }
  x(step) { return this.left + ((step - this.view.from) / (this.view.to - this.view.from)) * (this.w - this.left - this.right); }
  stepAt(x) { return this.view.from + ((x - this.left) / (this.w - this.left - this.right)) * (this.view.to - this.view.from); }
  draw() {
    this.size();
    const g = this.base.getContext("2d");
    g.clearRect(0, 0, this.w, this.h);
    g.font = "11px system-ui, sans-serif";
    this.paint(g);
    this.drawXAxis(g);
    this.drawCursor();
  }
  drawXAxis(g) {
    const { from, to } = this.view;
    const step = Math.max(1, niceStep(to - from, Math.max(2, (this.w - this.left) / 90)));
    g.fillStyle = colour("soft"); g.textAlign = "center"; g.textBaseline = "top";
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const label = thousands(tick), half = g.measureText(label).width / 2;
      g.fillText(label, Math.min(Math.max(this.x(tick), this.left + half - 4), this.w - half), this.h - 15);
    }
  }
  drawCursor() {
    if (!this.w) return;
    const g = this.above.getContext("2d");
    g.clearRect(0, 0, this.w, this.h);
    if (this.selection) {
      g.fillStyle = colour("focus"); g.globalAlpha = 0.18;
      g.fillRect(this.selection[0], this.top, this.selection[1] - this.selection[0], this.h - this.top - this.bottom);
      g.globalAlpha = 1;
    }
    const cursor = this.view.cursor;
    if (cursor !== null && cursor >= this.view.from && cursor <= this.view.to) {
      g.strokeStyle = colour("cursor"); g.lineWidth = 1;
      g.beginPath(); g.moveTo(this.x(cursor), this.top); g.lineTo(this.x(cursor), this.h - this.bottom); g.stroke();
      this.paintCursor(g);
    }
    this.tell();
  }
  paintCursor() {}
  turnRow() {}
  /* The step under the pointer, or a mark's that is near enough: single steps are narrower than a pixel. */
  pointedAt(x) {
    const step = this.stepAt(x);
    if (this.view !== steps || !marks.length) return step;
    const mark = marks[nearest(markSteps, step)];
    return Math.abs(this.x(mark.step) - x) <= 4 ? mark.step : step;
  }
  where(event) { return event.clientX - this.plot.getBoundingClientRect().left; }
  listen() {
    const plot = this.plot, view = this.view;
    plot.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, this.where(event));
      if (event.pointerType === "mouse" && event.button === 0) { this.start = this.where(event); plot.setPointerCapture(event.pointerId); }
      view.point(this.pointedAt(this.where(event)));
    });
    plot.addEventListener("pointermove", (event) => {
      const x = this.where(event);
      if (this.pointers.size === 2 && this.pointers.has(event.pointerId)) return this.pinch(event.pointerId, x);
      if (this.start !== undefined && Math.abs(x - this.start) > 4) this.selection = [Math.max(this.left, Math.min(x, this.start)), Math.min(this.w - this.right, Math.max(x, this.start))];
      view.point(this.pointedAt(x));
    });
    const up = (event) => {
      this.pointers.delete(event.pointerId);
      const chosen = this.selection;
      this.start = this.selection = undefined;
      if (chosen && event.type === "pointerup") view.show(this.stepAt(chosen[0]), this.stepAt(chosen[1]));
      else this.drawCursor();
    };
    plot.addEventListener("pointerup", up);
    plot.addEventListener("pointercancel", up);
    plot.addEventListener("dblclick", () => view.all());
    plot.addEventListener("wheel", (event) => {
      // Only with Ctrl (a pinch on a trackpad): scrolling the page must not stop over every chart.
      if (!event.ctrlKey) return;
      event.preventDefault();
      view.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.stepAt(this.where(event)));
    }, { passive: false });
    plot.addEventListener("keydown", (event) => {
      const now = view.cursor ?? (view.from + view.to) / 2, jump = (view.to - view.from) / 20;
      const actions = {
        ArrowLeft: () => view.point(this.neighbour(now, -1, event.shiftKey ? jump : 0), true),
        ArrowRight: () => view.point(this.neighbour(now, 1, event.shiftKey ? jump : 0), true),
        Home: () => view.point(view.low, true), End: () => view.point(view.high, true),
        "+": () => view.zoom(0.5), "=": () => view.zoom(0.5), "-": () => view.zoom(2), 0: () => view.all(), Escape: () => view.all(),
        ArrowUp: () => this.turnRow(-1), ArrowDown: () => this.turnRow(1),
        n: () => goToMark(1), p: () => goToMark(-1),
      };
      if (!event.ctrlKey && !event.metaKey && !event.altKey && actions[event.key]) { event.preventDefault(); actions[event.key](); }
    });
  }
  pinch(id, x) {
    const other = [...this.pointers].find(([each]) => each !== id)[1], before = this.pointers.get(id);
    const factor = Math.max(Math.abs(before - other), 20) / Math.max(Math.abs(x - other), 20);
    this.view.zoom(factor, this.stepAt((x + other) / 2));
    this.pointers.set(id, x);
  }
  neighbour(now, direction, jump) {
    const axis = this.axis();
    if (jump || !axis.length) return now + direction * (jump || 1);
    const place = nearest(axis, now);
    const moved = direction > 0 ? (axis[place] > now ? place : place + 1) : (axis[place] < now ? place : place - 1);
    return axis[Math.min(Math.max(moved, 0), axis.length - 1)];
  }
}
