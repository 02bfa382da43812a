// The charts of a comparison: panels for eval, proxy and KL with one common axis, and a line for each run. The choices are
// kept in the address.

import { axis, axisTitle, band, draw, drawable, loadPlotly, loneValues, narrow, palette, redrawn, toggles } from "./charts.js";
import { fetchSameOrigin } from "./live.js";

const PANELS = [["eval", "eval", 2], ["proxy", "proxy", 1.2], ["kl", "KL", 1.2]]; // role, title, share of the height
const GAP = 0.07;
const HUES = 5; // the lines of the first five runs are solid, those of the others dashed
const X = {
  step: { of: (at) => at.step, title: "step" },
  kl: { of: (at) => at.kl, title: "KL to the initial policy" },
  sqrt_kl: { of: (at) => (at.kl === null || at.kl < 0 ? null : Math.sqrt(at.kl)), title: "√KL to the initial policy" },
};

const main = document.querySelector("main");
const chart = document.getElementById("chart");
const legend = document.querySelector(".legend");
const choices = document.getElementById("choices");
const [xChoice, smoothing] = ["x", "smoothing"].map((name) => choices.querySelector(`[name=${name}]`));
const shown = Object.fromEntries([...legend.querySelectorAll("[data-toggle]")].map((key) => [key.dataset.toggle, key.getAttribute("aria-pressed") === "true"]));
const by = choices.querySelector("[name=by]"); // missing if nothing differs between the runs
if (by) by.value = new URL(location.href).searchParams.get("by") ?? "";
if (by && by.selectedIndex < 0) by.value = "";
const zoomed = ["from", "to"].map((name) => parseFloat(new URLSearchParams(location.search).get(name)));
let zoom = zoomed.every(Number.isFinite) ? zoomed : null;
let runs = null;
let followed = false;

async function load() {
  const [response] = await Promise.all([fetchSameOrigin(main.dataset.series), loadPlotly()]);
  runs = (await response.json()).runs;
  document.getElementById("chart-preview")?.remove(); // the server's drawing of the evals
  for (const run of runs) {
    for (const line of run.lines) line.values = drawable(line.values);
    if (run.best) [run.best.score] = drawable([run.best.score]);
  }
  await drawChart();
}

async function drawChart() {
  const x = X[xChoice.value];
  const present = runs.map((run, index) => ({ run, index })).filter(({ run }) => shown[run.id]);
  const panels = PANELS.filter(([role]) => (role !== "kl" || !xChoice.value.endsWith("kl")) && present.some(({ run }) => lineOf(run, role)));
  chart.hidden = panels.length === 0;
  document.querySelector(".chart-empty").hidden = panels.length > 0;
  if (panels.length === 0) return;
  const color = palette();
  const places = panels.map((panel, i) => ({ role: panel[0], title: panel[1], share: panel[2], axis: i === 0 ? "y" : `y${i + 1}` }));
  const groups = by?.value ? groupRuns(present) : null;
  showGroups(groups, present);
  const traces = places.flatMap((panel) => (groups ? groups.flatMap((group, i) => groupLines(color, panel, group, i, x)) : present.flatMap((one) => lines(color, panel, one, x))));
  const marks = places[0].role === "eval" && !groups ? present.flatMap((one) => bestMark(color, one, x)) : [];
  await draw(chart, [...traces, ...marks], layout(color, places, x, traces));
  if (!followed) followZoom();
}

function lineOf(run, role) {
  return run.lines.find((line) => line.role === role && line.steps.length > 0);
}

// --- Drawing. ---

function lines(color, panel, { run, index }, x) {
  const line = lineOf(run, panel.role);
  if (!line) return [];
  const common = {
    type: "scatter", mode: loneValues(line.values) ? "lines+markers" : "lines", name: String(index + 1), meta: run.id,
    x: line.steps.map((step, i) => x.of({ step, kl: line.kl[i] })), yaxis: panel.axis, connectgaps: false,
    marker: { color: paint(color, index), size: 4 }, line: { color: paint(color, index), width: 1.8, dash: index < HUES ? "solid" : "dash" },
  };
  const weight = Number(smoothing.value);
  const hover = {
    customdata: line.steps, hovertemplate: `run ${index + 1}, step %{customdata:,d}<br>${panel.title} %{y:.4~g}<extra></extra>`,
  };
  if (weight === 0) return [{ ...common, ...hover, y: line.values }];
  return [
    { ...common, y: line.values, opacity: 0.22, hoverinfo: "skip" },
    { ...common, ...hover, y: smooth(line.values, weight) },
  ];
}

// The runs by their value of the chosen field, as the table shows it.
function groupRuns(present) {
  const groups = new Map();
  for (const one of present) {
    const row = document.querySelector(`[data-run="${one.run.id}"]`);
    const value = row.querySelectorAll(".c-field")[by.selectedIndex - 1].textContent.trim();
    if (!groups.has(value)) groups.set(value, []);
    groups.get(value).push(one);
  }
  return [...groups].map(([value, members]) => ({ value, members }));
}

function hueOf(index) {
  return `key hue-${(index % HUES) + 1}${index < HUES ? "" : " dashed"}`;
}

// The legend of the groups; the keys of runs have the colors of their groups.
function showGroups(groups, present) {
  for (const { run, index } of present) {
    const group = groups?.findIndex(({ members }) => members.some((one) => one.run === run)) ?? index;
    legend.querySelector(`[data-toggle="${run.id}"]`).className = hueOf(group);
  }
  const list = document.querySelector("[data-groups]");
  list.hidden = !groups;
  list.replaceChildren(...(groups ?? []).map(({ value, members }, i) => {
    const item = document.createElement("li");
    item.className = hueOf(i);
    item.append(document.createElement("i"), `${value}: mean and range of ${members.length} run${members.length === 1 ? "" : "s"}`);
    return item;
  }));
}

// The mean of a group wherever one of its runs has a value, and the band between its lowest and its highest run there.
function groupLines(color, panel, { members }, index, x) {
  const drawn = members.map(({ run }) => {
    const line = lineOf(run, panel.role);
    if (!line) return [];
    const values = smooth(line.values, Number(smoothing.value));
    const at = line.steps.map((step, i) => x.of({ step, kl: line.kl[i] }));
    return at.flatMap((value, i) => (value === null || values[i] === null ? [] : [[value, values[i]]])).sort((a, b) => a[0] - b[0]);
  });
  const xs = [...new Set(drawn.flatMap((points) => points.map(([at]) => at)))].sort((a, b) => a - b);
  const there = xs.map(() => []);
  for (const points of drawn) {
    let i = 0;
    xs.forEach((at, place) => {
      if (!points.length || at < points[0][0] || at > points[points.length - 1][0]) return;
      while (i < points.length - 2 && points[i + 1][0] < at) i += 1;
      const [[x0, y0], [x1, y1]] = [points[i], points[Math.min(i + 1, points.length - 1)]];
      there[place].push(x1 > x0 ? y0 + ((y1 - y0) * (at - x0)) / (x1 - x0) : y0);
    });
  }
  const common = { type: "scatter", mode: "lines", name: `group ${index + 1}`, yaxis: panel.axis };
  const outline = band(xs, there.map((values) => Math.min(...values)), there.map((values) => Math.max(...values)));
  return [
    { ...common, ...outline, fill: "toself", fillcolor: `${paint(color, index)}26`, line: { width: 0 }, hoverinfo: "skip" },
    { ...common, x: xs, y: there.map((values) => values.reduce((a, b) => a + b, 0) / values.length), line: { color: paint(color, index), width: 2, dash: index < HUES ? "solid" : "dash" },
      hovertemplate: `group ${index + 1}, mean %{y:.4~g}<extra></extra>` },
  ];
}

function paint(color, index) {
  return color(`hue-${(index % HUES) + 1}`);
}

// The exponential moving average, divided by the sum of its weights, so that it starts at the first value.
function smooth(values, weight) {
  let [sum, weights] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    weights = weight * weights + (1 - weight);
    return sum / weights;
  });
}

function bestMark(color, { run, index }, x) {
  const at = run.best && x.of(run.best);
  if (at === null || run.best.score === null) return [];
  return [{
    type: "scatter", mode: "markers", name: "best", meta: run.id, x: [at], y: [run.best.score], yaxis: "y", cliponaxis: false,
    marker: { size: 9, color: paint(color, index), line: { color: color("card"), width: 1.5 } },
    hovertemplate: `run ${index + 1}, best checkpoint<br>eval %{y:.4~g}<extra></extra>`,
  }];
}

function layout(color, places, x, traces) {
  const found = {
    uirevision: xChoice.value, hovermode: "closest", annotations: [],
    margin: { l: narrow.matches ? 38 : 52, r: narrow.matches ? 12 : 16, t: 24, b: 48 },
    xaxis: axis(color, {
      anchor: places[places.length - 1].axis, fixedrange: false, nticks: narrow.matches ? 5 : 10, ...(xChoice.value === "step" ? { tickformat: ",d" } : {}),
      title: axisTitle(color, x.title), ...(zoom ? { range: zoom, autorange: false } : { autorange: true }),
    }),
  };
  const whole = places.reduce((sum, panel) => sum + panel.share, 0);
  const room = 1 - GAP * (places.length - 1);
  let top = 1;
  for (const panel of places) {
    const bottom = Math.max(0, top - (panel.share / whole) * room);
    found[panel.axis.replace("y", "yaxis")] = axis(color, { domain: [bottom, top], nticks: 5, ...range(traces.filter((trace) => trace.yaxis === panel.axis)) });
    found.annotations.push({ xref: "paper", yref: "paper", x: 0, y: top, xanchor: "left", yanchor: "bottom", showarrow: false, text: panel.title, font: { size: 12, color: color("text") } });
    top = bottom - GAP;
  }
  return found;
}

// The vertical range of a panel follows the zoom; Plotly would keep the range of all values.
function range(traces) {
  const seen = zoom ? traces.flatMap(({ x, y }) => y.filter((value, i) => value !== null && x[i] !== null && x[i] >= zoom[0] && x[i] <= zoom[1])) : [];
  if (seen.length === 0) return { autorange: true };
  const [low, high] = [seen.reduce((a, b) => Math.min(a, b)), seen.reduce((a, b) => Math.max(a, b))];
  const room = (high - low || Math.abs(high) || 1) / 16;
  return { range: [low - room, high + room], autorange: false };
}

// --- Choices. ---

function followZoom() {
  followed = true;
  chart.on("plotly_relayout", (change) => {
    if ("xaxis.range[0]" in change) zoom = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    else if (change["xaxis.autorange"]) zoom = null;
    else return;
    writeAddress();
    drawChart();
  });
  chart.on("plotly_hover", ({ points }) => emphasize(points[0].data.meta));
  chart.on("plotly_unhover", () => emphasize(null));
}

function writeAddress() {
  const address = new URL(location.href);
  const query = address.searchParams;
  for (const name of ["x", "smoothing", "by", "from", "to", "hidden"]) query.delete(name);
  if (by?.value) query.set("by", by.value);
  if (xChoice.value !== "step") query.set("x", xChoice.value);
  if (Number(smoothing.value) > 0) query.set("smoothing", smoothing.value);
  if (zoom) ["from", "to"].forEach((name, i) => query.set(name, Number(zoom[i].toPrecision(8))));
  for (const id of Object.keys(shown)) if (!shown[id]) query.append("hidden", id);
  history.replaceState(null, "", address);
  document.querySelector(".chart-card [data-copy]").dataset.copy = address.href;
}

// The run under the pointer is emphasized in every panel, in the legend and in the table.
let emphasized = null;

function emphasize(id) {
  if (id === emphasized || !runs) return;
  emphasized = id;
  for (const one of document.querySelectorAll("[data-toggle], [data-run]")) {
    one.classList.toggle("emphasized", id !== null && (one.dataset.toggle ?? one.dataset.run) === id);
  }
  queueMicrotask(paintEmphasis); // not during a zoom event: Plotly would keep the new style as an edit by the visitor
}

function paintEmphasis() {
  if (!chart.data || chart.hidden || by?.value) return;
  Plotly.restyle(chart, { opacity: chart.data.map((trace) => (trace.hoverinfo === "skip" ? 0.22 : 1) * (emphasized === null || trace.meta === emphasized ? 1 : 0.18)) });
}

for (const list of [legend, document.querySelector(".comparison")]) {
  for (const kind of ["pointerover", "focusin"]) list.addEventListener(kind, (event) => emphasize(idOf(event.target)));
  for (const kind of ["pointerleave", "focusout"]) list.addEventListener(kind, () => emphasize(null));
}

function idOf(target) {
  const one = target.closest("[data-toggle], [data-run]");
  return one ? one.dataset.toggle ?? one.dataset.run : null;
}

choices.hidden = false;
choices.addEventListener("input", (event) => {
  if (event.target !== smoothing) zoom = null; // another axis
  if (runs) drawChart();
});
choices.addEventListener("change", writeAddress); // when a slider is released: browsers limit how often the address may change
toggles(legend, shown, () => {
  writeAddress();
  if (runs) drawChart();
});
redrawn(() => runs && drawChart());
load();
