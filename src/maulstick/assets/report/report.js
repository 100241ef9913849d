"use strict";
(() => {
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
    if (v === 0 || (size >= 0.001 && size < 100000)) return String(Number(v.toPrecision(4)));
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

  /* ---- lines ---- */

  const SHAPES = {
    skip: (g, x, y, r) => { g.moveTo(x, y - r); g.lineTo(x + r, y + r); g.lineTo(x - r, y + r); g.closePath(); },
    rescue: (g, x, y, r) => { g.moveTo(x, y - r); g.lineTo(x + r, y); g.lineTo(x, y + r); g.lineTo(x - r, y); g.closePath(); },
    alarm: (g, x, y, r) => g.arc(x, y, r * 0.9, 0, 7),
    other: (g, x, y, r) => g.rect(x - r * 0.8, y - r * 0.8, r * 1.6, r * 1.6),
  };
  const shapeOf = (kind) => SHAPES[{ judged: "skip", autopsy: "alarm" }[kind] ?? kind] ?? SHAPES.other;

  class LineChart extends Drawing {
    constructor(place, chart, view) {
      super(place, view, `${chart.title}: ${chart.lines.map((line) => line.name).join(", ")}. Arrow keys move along the steps.`);
      this.chart = chart;
      this.bottom = view === steps && marks.length ? 42 : 24;
      this.lines = chart.lines.map((line) => ({ ...line, x: data.axes[line.axis], y: line.values.map(value) }));
      this.log = chart.log ?? this.spreads();
      this.drawLegend();
    }
    height() { return window.innerWidth < 480 ? 190 : 230; }
    axis() { return this.lines[0].x; }
    spreads() {
      const all = this.lines.flatMap((line) => line.y).filter(isNumber).sort((a, b) => a - b);
      return all.length > 2 && all[0] > 0 && all.at(-1) > 30 * all[all.length >> 1];
    }
    drawLegend() {
      this.shown = this.lines.map((line) => {
        const swatch = make("span", { class: "swatch " + line.style, style: `border-color: var(--c${line.hue % 8})` });
        const shown = make("b");
        this.legend.append(make("li", {}, swatch, line.name + " ", shown));
        return shown;
      });
      const button = make("button", { type: "button", "aria-pressed": String(this.log) }, "log scale");
      button.addEventListener("click", () => { this.log = !this.log; button.setAttribute("aria-pressed", String(this.log)); this.draw(); });
      this.legend.append(button);
    }
    range() {
      let low = Infinity, high = -Infinity;
      for (const { x, y } of this.lines) {
        for (let i = Math.max(0, nearest(x, this.view.from) - 1); i < x.length && x[i] <= this.view.to; i++) {
          if (isNumber(y[i]) && (!this.log || y[i] > 0)) { low = Math.min(low, y[i]); high = Math.max(high, y[i]); }
        }
      }
      if (low > high) return this.log ? [0.1, 1] : [0, 1];
      if (this.log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
      const pad = (high - low || Math.abs(high) || 1) * 0.06;
      return [low >= 0 && low < 0.4 * high ? 0 : low - pad, high + pad];
    }
    y(v) {
      const [low, high] = this.ends;
      const share = this.log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
      return this.h - this.bottom - share * (this.h - this.top - this.bottom);
    }
    ticks() {
      const [low, high] = this.ends;
      if (!this.log) {
        const step = niceStep(high - low, 4), first = Math.ceil(low / step);
        return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => (first + i) * step);
      }
      const decades = Math.log10(high / low), factors = decades < 1.2 ? [1, 2, 3, 5] : decades < 2.5 ? [1, 3] : [1];
      const every = Math.max(1, Math.ceil(decades / 6)), ticks = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
        if (power % every === 0) for (const factor of factors) ticks.push(factor * 10 ** power);
      }
      return ticks.filter((tick) => tick >= low && tick <= high);
    }
    paint(g) {
      this.ends = this.range();
      g.textAlign = "right"; g.textBaseline = "middle"; g.lineWidth = 1;
      for (const tick of this.ticks()) {
        g.strokeStyle = colour("grid"); g.fillStyle = colour("soft");
        g.beginPath(); g.moveTo(this.left, this.y(tick)); g.lineTo(this.w - this.right, this.y(tick)); g.stroke();
        g.fillText(format(tick), this.left - 6, this.y(tick));
      }
      g.save();
      g.beginPath(); g.rect(this.left, 0, this.w - this.left - this.right + 1, this.h - this.bottom + 1); g.clip();
      for (const line of this.lines) this.paintLine(g, line);
      g.restore();
      if (this.view === steps) this.paintMarks(g);
    }
    paintLine(g, { x, y, style, hue: number }) {
      g.strokeStyle = g.fillStyle = hue(number);
      g.lineWidth = { faint: 1, bold: 2.4, dash: 1.4, dots: 1.4 }[style] ?? 1.5;
      g.globalAlpha = style === "faint" ? 0.4 : 1;
      g.setLineDash(style === "dash" ? [5, 4] : []);
      g.lineJoin = "round";
      const odd = [];
      let open = false;
      g.beginPath();
      for (let i = Math.max(0, nearest(x, this.view.from) - 2); i < x.length; i++) {
        const px = this.x(x[i]);
        if (isNumber(y[i]) && (!this.log || y[i] > 0)) {
          open ? g.lineTo(px, this.y(y[i])) : g.moveTo(px, this.y(y[i]));
          open = true;
        } else if (y[i] !== null || style !== "faint") {
          open = false;
          if (y[i] !== null && !isNumber(y[i]) && style !== "dash") odd.push(px);
        }
        if (x[i] > this.view.to) break;
      }
      g.stroke();
      g.setLineDash([]);
      if (style === "dots") x.forEach((step, i) => { if (isNumber(y[i]) && (!this.log || y[i] > 0)) { g.beginPath(); g.arc(this.x(step), this.y(y[i]), x.length > 60 ? 1.5 : 3, 0, 7); g.fill(); } });
      g.globalAlpha = 1;
      g.strokeStyle = colour("bad"); g.lineWidth = 1.5;
      // NaN and infinity have no place on the scale: a cross at the upper edge.
      for (const px of odd) { g.beginPath(); g.moveTo(px - 3, 3); g.lineTo(px + 3, 9); g.moveTo(px + 3, 3); g.lineTo(px - 3, 9); g.stroke(); }
    }
    paintMarks(g) {
      const strip = this.h - this.bottom + 7;
      for (const mark of marks) {
        if (mark.step < this.view.from || mark.step > this.view.to) continue;
        g.fillStyle = colour(mark.kind);
        const skipped = ["skip", "judged"].includes(mark.kind);
        g.beginPath(); shapeOf(mark.kind)(g, this.x(mark.step), skipped ? strip : strip + 9, 3.5); g.fill();
        const line = this.chart.id === "norm" && this.lines.find((each) => each.run === mark.run);
        if (!line || !skipped) continue;
        const v = line.y[nearest(line.x, mark.step)];
        if (isNumber(v) && v > 0) { g.beginPath(); shapeOf(mark.kind)(g, this.x(mark.step), this.y(v), 5); g.fill(); }
      }
    }
    paintCursor(g) {
      for (const { x, y, hue: number } of this.lines) {
        const i = nearest(x, this.view.cursor);
        if (!isNumber(y[i]) || (this.log && y[i] <= 0)) continue;
        g.fillStyle = hue(number); g.beginPath(); g.arc(this.x(x[i]), this.y(y[i]), 3.5, 0, 7); g.fill();
      }
    }
    tell() {
      this.lines.forEach(({ x, y }, number) => {
        const i = nearest(x, this.view.cursor ?? this.view.to);
        this.shown[number].textContent = x.length ? format(y[i]) : "–";
      });
    }
  }

  /* ---- heat maps ---- */

  class HeatMap extends Drawing {
    constructor(place, map) {
      super(place, steps, `${map.title}: ${map.rows.length} rows. The table below has the last values.`);
      this.map = map;
      this.grid = map.values.map((row) => row.map(value));
      const all = this.grid.flat().filter((v) => isNumber(v) && v > 0);
      this.low = all.reduce((a, b) => Math.min(a, b), Infinity); this.high = all.reduce((a, b) => Math.max(a, b), -Infinity);
      if (!all.length) { this.low = 0.1; this.high = 1; }
      this.log = this.high > 20 * this.low;
      const bar = make("span", { class: "swatch", style: `border: 0; width: 7em; height: .8em; vertical-align: -.05em; background: linear-gradient(90deg, ${HEAT.join(",")})` });
      this.shown = make("b");
      this.legend.append(make("li", {}, format(this.low) + " ", bar, " " + format(this.high) + (this.log ? " (log scale)" : "")), make("li", {}, this.shown));
      if (this.grid.flat().some((v) => v !== null && !isNumber(v))) this.legend.firstChild.append("; red: NaN or infinite");
      this.plot.addEventListener("pointermove", (event) => { this.row = this.rowAt(event.clientY - this.plot.getBoundingClientRect().top); this.tell(); });
    }
    height() { return Math.max(90, this.map.rows.length * 15) + this.top + this.bottom; }
    axis() { return this.map.steps; }
    rowAt(y) { return Math.min(Math.max(Math.floor((y - this.top) / this.cell()), 0), this.map.rows.length - 1); }
    turnRow(by) { this.row = Math.min(Math.max((this.row ?? 0) + by, 0), this.map.rows.length - 1); this.tell(); }
    cell() { return (this.h - this.top - this.bottom) / this.map.rows.length; }
    shade(v) {
      const share = this.log ? Math.log(Math.max(v, this.low) / this.low) / Math.log(this.high / this.low || 2) : (v - this.low) / (this.high - this.low || 1);
      const place = Math.min(Math.max(share, 0), 1) * (HEAT.length - 1), below = Math.min(Math.floor(place), HEAT.length - 2);
      const part = (hex, channel) => parseInt(hex.slice(1 + 2 * channel, 3 + 2 * channel), 16);
      const mixed = [0, 1, 2].map((channel) => part(HEAT[below], channel) + (place - below) * (part(HEAT[below + 1], channel) - part(HEAT[below], channel)));
      return `rgb(${mixed.map(Math.round).join(" ")})`;
    }
    paint(g) {
      const tall = this.cell(), { steps: ends, rows } = this.map;
      g.textAlign = "right"; g.textBaseline = "middle"; g.fillStyle = colour("soft");
      rows.forEach((row, number) => g.fillText(row.length > 17 ? row.slice(0, 16) + "…" : row, this.left - 6, this.top + (number + 0.5) * tall));
      g.save();
      g.beginPath(); g.rect(this.left, 0, this.w - this.left - this.right, this.h); g.clip();
      ends.forEach((end, column) => {
        const begin = column ? ends[column - 1] : Math.min(steps.low - 1, end - 1);
        if (end < this.view.from || begin > this.view.to) return;
        const x0 = this.x(begin), wide = Math.max(this.x(end) - x0, 1);
        this.grid.forEach((row, number) => {
          const v = row[column];
          if (v === null) return;
          g.fillStyle = isNumber(v) ? this.shade(v) : colour("bad");
          g.fillRect(x0, this.top + number * tall, wide + 0.6, tall - 1);
        });
      });
      g.restore();
    }
    tell() {
      const cursor = this.view.cursor;
      if (cursor === null) { this.shown.textContent = ""; return; }
      let column = nearest(this.map.steps, cursor);
      if (this.map.steps[column] < cursor && column < this.map.steps.length - 1) column += 1;
      const row = this.row ?? 0;
      this.shown.textContent = `${this.map.rows[row]}, step ${thousands(this.map.steps[column])}: ${format(this.grid[row][column])}`;
    }
  }

  /* ---- the page ---- */

  for (const chart of data.charts) new LineChart(document.querySelector(`[data-chart="${CSS.escape(chart.id)}"]`), chart, chart.over === "step" ? steps : timesteps);
  for (const map of data.heat) new HeatMap(document.querySelector(`[data-heat="${map.id}"]`), map);
  const drawAll = () => { steps.redraw(); timesteps.redraw(); };
  drawAll();
  new ResizeObserver(drawAll).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  function goToStep(step, scroll) {
    const span = Math.min(steps.to - steps.from, Math.max(40, (steps.high - steps.low) / 20));
    steps.show(step - span / 2, step + span / 2);
    steps.point(step, true);
    if (scroll) document.getElementById("charts").scrollIntoView();
  }
  function goToMark(direction) {
    const now = steps.cursor ?? (direction > 0 ? steps.low - 1 : steps.high + 1);
    const next = direction > 0 ? marks.find((mark) => mark.step > now + 0.5) : marks.findLast((mark) => mark.step < now - 0.5);
    if (next) steps.point(next.step, true);
    else { at.setAttribute("aria-live", "polite"); at.textContent = marks.length ? "No further mark in this direction." : "There are no marks."; }
  }
  document.getElementById("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = document.getElementById("step").value.replace(/[,.\s]/g, ""), step = Number(text);
    if (text === "" || !Number.isInteger(step) || step < steps.low || step > steps.high) at.textContent = `Steps go from ${thousands(steps.low)} to ${thousands(steps.high)}.`;
    else goToStep(step, false);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.step) goToStep(Number(button.dataset.step), true);
    else if (button.dataset.mark) goToMark(Number(button.dataset.mark));
    else if (button.dataset.zoom) ({ in: () => steps.zoom(0.5), out: () => steps.zoom(2), all: () => steps.all() })[button.dataset.zoom]();
    else if (button.classList.contains("picture")) openPicture(button);
    else if (button.dataset.turn) turn(Number(button.dataset.turn));
  });

  at.textContent = matchMedia("(hover: none)").matches
    ? "Touch a chart to read it, with two fingers to zoom."
    : "Drag over a chart to zoom; double-click shows all. Keys: ← → + − 0, n and p for marks.";

  const viewer = document.getElementById("viewer");
  let opened = null;
  function openPicture(button) {
    opened = button;
    const picture = button.querySelector("img");
    Object.assign(viewer.querySelector("img"), { src: picture.src, alt: picture.alt });
    viewer.querySelector("p").textContent = picture.alt;
    if (!viewer.open) viewer.showModal();
  }
  function turn(direction) {
    if (direction === 0) return viewer.close();
    const row = [...opened.closest(".film").querySelectorAll("button")], next = row[row.indexOf(opened) + direction];
    if (next) openPicture(next);
  }
  viewer.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") turn(-1);
    if (event.key === "ArrowRight") turn(1);
  });
})();
