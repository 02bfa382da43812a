// Two charts of a run: the eval by its distance from the initial policy, and the evidence of its detectors by step.

import { axis, band, draw, drawable, narrow, palette, redrawn, stepTicks } from "./charts.js";
import { fetchSameOrigin, onChange } from "./live.js";

const main = document.querySelector("main");
const TRACK_PX = 96;
const listeners = [];
let analysis = null;

// Calls `use` with the data of these charts whenever it is loaded.
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
  await Promise.all([drawAll(), ...listeners.map((use) => use(analysis))]);
}

function drawAll() {
  const { tracks } = analysis.evidence;
  // Before the chart beside it is drawn, whose width depends on it.
  document.getElementById("gao-card").hidden = analysis.gao === null;
  document.getElementById("evidence-card").hidden = tracks.length > 0 && listStrips(tracks).length === 0;
  return Promise.all([drawGao(analysis.gao), drawEvidence(analysis.evidence)]);
}

function prepareChart(name, empty, note) {
  const chart = document.getElementById(name);
  chart.hidden = empty;
  document.querySelector(`[data-note="${name}"]`).textContent = note;
  return chart;
}

// --- The eval by distance. ---

function drawGao(gao) {
  if (gao === null) return undefined; // no metric has the role kl
  const empty = gao.pairs.length === 0;
  const chart = prepareChart("gao", empty, describeGao(gao));
  if (empty) return undefined;
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
    xaxis: axis(color, { title: { text: "√KL to the initial policy", font: { size: 12, color: color("muted") } }, rangemode: "tozero", fixedrange: false }),
    yaxis: axis(color, { tickfont: { color: color("eval") }, fixedrange: false }),
  });
}

function describeGao(gao) {
  if (gao.pairs.length === 0) return "Waiting for an eval after the first KL.";
  if (gao.line === null) return `No fit yet: ${gao.note}.`;
  if (!gao.line.trusted) return `The dashed fit is not reliable: ${gao.note}. It is drawn without its band and peak.`;
  return `Line: ${gao.line.form}, 95 % band. The detector gao_fit says: ${gao.note}.`;
}

// --- Evidence: one strip for each detector, in the policy's order; the first posterior is in the chart of the run. ---

const KINDS = { count: "count", fraction: "share", log_e_value: "log e-value", statistic: "statistic", posterior: "posterior" };

function listStrips(tracks) {
  const above = tracks.find((track) => track.detector === "posterior");
  return tracks.filter((track) => track !== above);
}

function drawEvidence(evidence) {
  const tracks = listStrips(evidence.tracks);
  const chart = prepareChart("evidence", tracks.length === 0, describeEvidence(evidence));
  if (tracks.length === 0) return undefined;
  const color = palette();
  const layout = { margin: { l: 52, r: 16, t: 22, b: 30 }, hovermode: "x unified", hoversubplots: "axis", shapes: [], annotations: [] };
  const traces = tracks.map((track, i) => addStrip(layout, color, track, i, tracks.length));
  layout.height = Math.max(300, 60 + TRACK_PX * tracks.length);
  const steps = tracks.flatMap((track) => track.steps);
  const span = steps.reduce((a, b) => Math.max(a, b)) - steps.reduce((a, b) => Math.min(a, b));
  layout.xaxis = axis(color, { anchor: `y${tracks.length}`, fixedrange: false, ...stepTicks(narrow.matches ? 4 : 8, span), unifiedhovertitle: { text: "step %{x}" } });
  return draw(chart, traces, layout);
}

function addStrip(layout, color, track, i, count) {
  const name = i === 0 ? "y" : `y${i + 1}`;
  const gap = 0.28 / count;
  const height = (1 - (count - 1) * gap) / count;
  const top = 1 - i * (height + gap);
  layout[i === 0 ? "yaxis" : `yaxis${i + 1}`] = axis(color, {
    domain: [Math.max(0, top - height), top], nticks: 3, tickmode: "auto", rangemode: "tozero",
  });
  for (const [at, paint, dash] of [[track.suspect_at, "suspect", "dot"], [track.stop_at, "stop", "dash"]]) {
    if (at === null) continue;
    layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: name, y0: at, y1: at, line: { color: color(paint), width: 1.3, dash } });
  }
  // Names of members are from the policy and consist of letters, digits, dots and dashes.
  layout.annotations.push({ xref: "paper", yref: "paper", x: 0, y: top, xanchor: "left", yanchor: "bottom", showarrow: false, text: `${track.member} · ${KINDS[track.kind] ?? track.kind}`, font: { size: 12, color: color("text") } });
  return {
    type: "scatter", mode: track.steps.length < 30 ? "lines+markers" : "lines", name: track.member, x: track.steps, y: track.values, yaxis: name,
    line: { color: color("accent"), width: 1.8, shape: "hv" }, marker: { size: 4, color: color("accent") }, hovertemplate: "%{y:.4~g}",
  };
}

function describeEvidence(evidence) {
  if (evidence.tracks.length === 0) return "No detector of the policy has anything to show yet.";
  return `Dotted: suspect. Dashed: stop. ${evidence.note}`;
}

onChange(load);
redrawn(() => analysis && drawAll());
load();
