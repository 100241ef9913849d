"use strict";

/* The two kinds of charts: lines, and heat maps. */

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
