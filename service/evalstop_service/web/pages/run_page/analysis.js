// Loads the replay of a run: the evidence of its detectors, for the chart by step, and the chart of the eval by its distance
// from the initial policy.

import { axis, axisTitle, band, draw, drawable, palette, redrawn } from "./charts.js";
import { fetchSameOrigin, onChange } from "./live.js";

const main = document.querySelector("main");
const listeners = [];
let analysis = null;

// Calls `use` with the replay whenever it is loaded.
export function onAnalysis(use) {
  listeners.push(use);
  if (analysis) use(analysis);
}

async function load() {
  const response = await fetchSameOrigin(main.dataset.analysis);
  analysis = await response.json();
  const gao = analysis.gao;
  if (gao && gao.line) for (const side of ["eval_scores", "low", "high"]) gao.line[side] = drawable(gao.line[side]);
  for (const track of analysis.evidence.tracks) track.values = drawable(track.values);
  await Promise.all([drawGao(analysis.gao), ...listeners.map((use) => use(analysis))]);
}

function drawGao(gao) {
  document.getElementById("gao-card").hidden = gao === null; // no metric has the role kl
  if (gao === null) return undefined;
  const chart = document.getElementById("gao");
  chart.hidden = gao.pairs.length === 0;
  document.querySelector("[data-note=gao]").textContent = describeGao(gao);
  if (chart.hidden) return undefined;
  const color = palette();
  const line = gao.line;
  const [steps, distances, scores, stderrs] = ["step", "distance", "eval_score", "stderr"].map((name) => gao.pairs.map((pair) => pair[name]));
  const few = steps.length <= 200;
  const trusted = line && line.trusted;
  const traces = [
    { type: "scatter", mode: "lines", ...(trusted ? band(line.distances, line.low, line.high) : { x: [], y: [] }), fill: "toself",
      fillcolor: color("kl-band"), line: { width: 0 }, hoverinfo: "skip" },
    { type: "scatter", mode: "lines", name: "fit", x: line ? line.distances : [], y: line ? line.eval_scores : [],
      line: trusted ? { color: color("kl"), width: 2 } : { color: color("muted"), width: 1.2, dash: "dash" }, hoverinfo: "skip" },
    { type: "scatter", mode: "markers", name: "evals", x: distances, y: drawable(scores),
      marker: { color: color("eval"), size: few ? 6 : 4 },
      error_y: { type: "data", array: drawable(stderrs).map((stderr) => stderr ?? 0), color: color("eval"), thickness: 1, width: 0, visible: few },
      customdata: steps, hovertemplate: "step %{customdata:,d}<br>√KL %{x:.3~g}<br>eval %{y:.4~g}<extra></extra>" },
  ];
  const peak = trusted && line.peak;
  const shapes = peak ? [{ type: "line", xref: "x", yref: "paper", x0: peak[0], x1: peak[0], y0: 0, y1: 1, layer: "below", line: { color: color("muted"), width: 1.4, dash: "dot" } }] : [];
  const annotations = peak ? [{ xref: "x", yref: "paper", x: peak[0], y: 1, yanchor: "bottom", text: "peak of the fit", showarrow: false, font: { color: color("muted"), size: 12 } }] : [];
  return draw(chart, traces, {
    margin: { l: 46, r: 16, t: 24, b: 48 }, shapes, annotations, hovermode: "closest",
    xaxis: axis(color, { title: axisTitle(color, "√KL to the initial policy"), rangemode: "tozero", fixedrange: false }),
    yaxis: axis(color, { title: axisTitle(color, "eval"), tickfont: { color: color("eval") }, fixedrange: false }),
  });
}

function describeGao(gao) {
  if (gao.pairs.length === 0) return "Waiting for an eval after the first KL.";
  if (gao.line === null) return `No fit yet: ${gao.note}.`;
  if (!gao.line.trusted) return `The dashed fit is not reliable: ${gao.note}. It is drawn without its band and peak.`;
  return `Line: ${gao.line.form}, 95 % band. The detector gao_fit says: ${gao.note}.`;
}

onChange(load);
redrawn(() => analysis && drawGao(analysis.gao));
load();
