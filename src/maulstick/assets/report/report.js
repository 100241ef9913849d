"use strict";

/* The page: every drawing in its place, search, marks, pictures. */

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
