// The chart of a group: the evals by step, and below them each hyperparameter over the steps of the lineages, which are
// one tree: lineages that descend from the same run are one line until they part.

import { axis, axisTitle, draw, drawable, escape, loadPlotly, loneValues, narrow, palette, redrawn, stepTicks } from "./charts.js";
import { fetchSameOrigin, onChange } from "./live.js";

const HUES = 5;
const EVAL_PX = 320;
const PANEL_PX = 130;
const GAP_PX = 30;
const LOG_FROM = 8; // a hyperparameter that changes by this factor has a logarithmic axis

const main = document.querySelector("main");
const chart = document.getElementById("chart");
const choices = document.getElementById("choices");
let group = null;
let emphasized = null;

async function load() {
  const [response] = await Promise.all([fetchSameOrigin(main.dataset.series), loadPlotly()]);
  group = await response.json();
  choices.hidden = !group.runs.some((run) => run.lineage.length > 1);
  document.getElementById("chart-preview")?.remove(); // the server's drawing of the evals
  chart.hidden = false;
  return drawChart();
}

function drawChart() {
  if (!group) return undefined;
  const color = palette();
  const byLineage = choices.querySelector("select").value === "lineage";
  document.getElementById("lines-note").textContent = byLineage ? "From the first run of each lineage to its last; the colors are those of the first." : "";
  const panels = [{ title: "eval", px: EVAL_PX }, ...group.hyperparameters.filter(isKnown).map((name) => ({ name, title: escape(name, 60), px: PANEL_PX }))];
  const height = panels.reduce((sum, panel) => sum + panel.px, GAP_PX * (panels.length - 1));
  const layout = { annotations: [] };
  const traces = [];
  let top = height;
  panels.forEach((panel, i) => {
    const yaxis = i === 0 ? "y" : `y${i + 1}`;
    const domain = [Math.max(0, (top - panel.px) / height), top / height];
    top -= panel.px + GAP_PX;
    layout[yaxis.replace("y", "yaxis")] = axis(color, { domain, nticks: i === 0 ? 6 : 4, fixedrange: i > 0, ...(panel.name ? scale(panel.name) : {}) });
    layout.annotations.push({ xref: "paper", yref: "paper", x: 0, y: domain[1], xanchor: "left", yanchor: "bottom", showarrow: false, text: panel.title, font: { size: 12, color: color("text") } });
    traces.push(...group.runs.map((run) => (panel.name ? scheduleLine(color, run, panel.name, yaxis, byLineage) : evalLine(color, run, byLineage))));
  });
  return draw(chart, traces, {
    ...layout, height: height + 72, hovermode: "closest", margin: { l: narrow.matches ? 40 : 56, r: 16, t: 24, b: 48 },
    xaxis: axis(color, { anchor: panels.length === 1 ? "y" : `y${panels.length}`, fixedrange: false, title: axisTitle(color, "step"), ...stepTicks(narrow.matches ? 6 : 12, Infinity) }),
  }).then(followPointer);
}

const isKnown = (name) => group.runs.some((run) => run.lineage.some((stage) => name in stage.hyperparameters));

function listValues(name) {
  return group.runs.flatMap((run) => run.lineage.map((stage) => stage.hyperparameters[name])).filter((value) => value !== undefined);
}

const isText = (name) => listValues(name).some((value) => typeof value === "string");

// The axis of a hyperparameter: logarithmic if it changes by a large factor; texts are places in their order.
function scale(name) {
  const values = listValues(name);
  if (isText(name)) {
    const texts = [...new Set(values.map(String))].sort();
    return { tickvals: texts.map((_, i) => i), ticktext: texts.map((text) => escape(text)), range: [-0.5, texts.length - 0.5] };
  }
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return { tickformat: high < 0.001 ? ".3~e" : "~g", ...(low > 0 && high / low >= LOG_FROM ? { type: "log", dtick: "D2" } : {}) };
}

const placeOf = (run, byLineage) => (byLineage ? group.runs.find((one) => one.id === run.lineage[0].run_id) ?? run : run).place - 1;

function style(color, run, byLineage) {
  const place = placeOf(run, byLineage);
  return { color: color(`hue-${(place % HUES) + 1}`), dash: place % (2 * HUES) < HUES ? "solid" : "dash" };
}

function common(color, run, yaxis, byLineage) {
  const line = style(color, run, byLineage);
  return { type: "scatter", mode: "lines", name: String(run.place), meta: run.id, yaxis, connectgaps: false, opacity: opacityOf(run), line: { ...line, width: 1.8 }, marker: { size: 4, color: line.color } };
}

const opacityOf = (run) => (emphasized && run.id !== emphasized ? 0.12 : run.ended ? 0.4 : 1);

function evalLine(color, run, byLineage) {
  const points = byLineage ? run.lineage.flatMap((stage) => [...pointsOf(stage), [null, null]]) : join(run.pieces);
  const y = drawable(points.map(([, value]) => value));
  return {
    ...common(color, run, "y", byLineage), mode: loneValues(y) ? "lines+markers" : "lines", x: points.map(([step]) => step), y,
    hovertemplate: `run ${run.place}, step %{x:,d}<br>eval %{y:.4~g}<extra></extra>`,
  };
}

const join = (pieces) => pieces.flatMap((piece) => [...piece, [null, null]]);

// The evals of the run of a stage, of its steps.
function pointsOf(stage) {
  const run = group.runs.find((one) => one.id === stage.run_id);
  return run.pieces.flat().filter(([step]) => step > (stage.from_step || -1) && step <= stage.to_step);
}

function scheduleLine(color, run, name, yaxis, byLineage) {
  const texts = isText(name) ? scale(name).ticktext : null;
  const ends = run.lineage.flatMap((stage) => {
    const value = stage.hyperparameters[name] ?? null;
    return [[stage.from_step, value], [stage.to_step, value]];
  });
  return {
    ...common(color, run, yaxis, byLineage), x: ends.map(([step]) => step), line: { ...style(color, run, byLineage), width: 1.8 },
    y: ends.map(([, value]) => (value === null || !texts ? value : texts.indexOf(escape(String(value))))),
    hovertemplate: `run ${run.place}, step %{x:,d}<br>${texts ? "" : `%{y:${scale(name).tickformat}}`}<extra></extra>`,
  };
}

// The run under the pointer is emphasized in every panel and in the table.
let follows = false;

function followPointer() {
  if (follows) return;
  follows = true;
  chart.on("plotly_hover", ({ points }) => emphasize(points[0].data.meta));
  chart.on("plotly_unhover", () => emphasize(null));
}

function emphasize(id) {
  if (id === emphasized || !chart.data) return;
  emphasized = id;
  for (const row of document.querySelectorAll("[data-run]")) row.classList.toggle("emphasized", row.dataset.run === id);
  const opacity = new Map(group.runs.map((run) => [run.id, opacityOf(run)]));
  queueMicrotask(() => Plotly.restyle(chart, { opacity: chart.data.map((trace) => opacity.get(trace.meta)) }));
}

for (const [kind, id] of [["pointerover", (row) => row?.dataset.run ?? null], ["pointerleave", () => null], ["focusin", (row) => row?.dataset.run ?? null], ["focusout", () => null]]) {
  document.querySelector("[data-part=runs]").addEventListener(kind, (event) => emphasize(id(event.target.closest?.("[data-run]"))));
}

if (chart) {
  choices.addEventListener("input", drawChart);
  redrawn(drawChart);
  onChange(load);
  load();
}
