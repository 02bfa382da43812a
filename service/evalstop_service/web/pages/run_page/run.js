// The chart of a run by step, in panels: eval, proxy, KL, the probability that the eval has turned, and a lane for each
// other detector: its evidence against its threshold.

import { axis, axisTitle, band, draw, drawable, escape, loadPlotly, loneValues, narrow, palette, percent, redrawn, stepTicks, toggles } from "./charts.js";
import { fetchSameOrigin, onChange } from "./live.js";
import { onTried, tried } from "./what_if.js";

const main = document.querySelector("main");
const shown = { eval: true, proxy: true, kl: true, turned: true, lanes: true, best: true, raw: true, segments: false };
const NONE = { steps: [], values: [], stderrs: [] };
const PANELS = [
  { name: "eval", title: "eval", px: 260 },
  { name: "proxy", title: "proxy", px: 105 },
  { name: "kl", title: "KL", px: 85 },
  { name: "turned", title: "probability of having turned", px: 105 },
];
const LANE_PX = 24;
const LANE_TOP = 1.3; // of the threshold
const MOST_NOTED = 70; // characters of a detector's note
const GAP_PX = 28;
const LABEL_PX = 150;
const LINE_PX = 18;
const MOST_LEVELS = 4;
let series = null;
let posterior = null; // the evidence of the detector of this name, if the policy has it
let hasProbability = false;
let lanes = []; // the other detectors
let segments = null; // loaded when they are first shown
const SEGMENTS = { rise: "best", plateau: "muted", fall: "stop" };

async function load() {
  const [response] = await Promise.all([fetchSameOrigin(main.dataset.series), loadPlotly()]);
  series = await response.json();
  for (const item of series.series) {
    item.values = drawable(item.values);
    item.stderrs = drawable(item.stderrs);
  }
  for (const mark of [series.best_checkpoint, series.raw_maximum]) {
    if (mark) [mark.score] = drawable([mark.score]);
  }
  if (segments) await loadSegments();
  await drawChart();
}

async function loadEvidence() {
  const { replayed, tracks } = await (await fetchSameOrigin(`${location.pathname}/analysis.json`)).json();
  for (const track of tracks) track.values = drawable(track.values);
  posterior = tracks.find((track) => track.detector === "posterior") ?? null;
  hasProbability = posterior !== null && posterior.values.some((value) => value > 0);
  lanes = tracks.filter((track) => track.steps.length && !(track === posterior && hasProbability));
  document.querySelector("[data-note=lanes]").textContent = !replayed
    ? "The run is too long to replay here, or cannot be replayed: there are no strips of its detectors."
    : lanes.length
      ? "Strips: the evidence of each detector of the policy, recomputed from all observations. It calls for a stop where it reaches the dashed line; the triangle is its first call. Observers are measured, and decide nothing; deciding detectors without evidence are left out."
      : "";
  return redraw();
}

async function loadSegments() {
  segments = await (await fetchSameOrigin(`${location.pathname}/segments.json`)).json();
}

async function showOrHide() {
  if (shown.segments && !segments) await loadSegments();
  return redraw();
}

function describeSegments() {
  if (!segments.available) return "Segments in hindsight need ruptures, which is not installed here.";
  if (!segments.items.length) return "No segments: fewer than 6 evals, or all of them equal.";
  const pieces = segments.items.map((one) => `${one.kind} from ${one.first_step.toLocaleString("en")}`);
  return `Segments in hindsight, fitted by ruptures to all evals: ${pieces.join(", ")}. Darker strips: where a border may be, 95 %.`;
}

function drawChart() {
  const chart = document.getElementById("chart");
  document.getElementById("chart-preview")?.remove(); // the server's drawing, shown until Plotly is loaded
  const empty = !series.series.some((item) => item.steps.length);
  chart.hidden = empty;
  document.querySelector(".chart-empty").hidden = !empty;
  for (const key of document.querySelectorAll("[data-toggle]")) {
    const name = key.dataset.toggle;
    key.hidden = name === "lanes" ? lanes.length === 0 : name === "best" ? !series.best_checkpoint : name === "raw" ? !series.raw_maximum : name === "segments" ? !data("eval").steps.length : !data(name).steps.length;
  }
  const note = document.querySelector("[data-note=segments]");
  note.hidden = !(shown.segments && segments);
  if (!note.hidden) note.textContent = describeSegments();
  if (empty) return undefined;
  const color = palette();
  const panels = placePanels();
  const { traces, ...layout } = panels.reduce((drawing, panel) => addPanel(drawing, panel, color), { traces: [], shapes: [], annotations: [] });
  const steps = marks(color);
  return draw(chart, traces, {
    ...layout,
    height: panels.height + steps.top + 48,
    margin: { l: narrow.matches ? 34 : 46, r: 16, t: steps.top, b: 48 },
    hovermode: "x unified",
    hoversubplots: "axis",
    xaxis: axis(color, {
      anchor: panels[panels.length - 1].axis, range: steps.range, fixedrange: false,
      title: axisTitle(color, "step"), ...stepTicks(narrow.matches ? 6 : 12, steps.span), unifiedhovertitle: { text: "step %{x}" },
      spikecolor: color("muted"), spikethickness: 1, spikedash: "solid",
    }),
    shapes: [...layout.shapes, ...steps.shapes],
    annotations: [...layout.annotations, ...steps.annotations],
  });
}

function data(name) {
  if (name === "turned") return hasProbability ? posterior : NONE;
  return series.series.find((item) => item.role === name) ?? NONE;
}

// The panels with data, with their axes and positions, from 0 at the bottom to 1.
function placePanels() {
  const panels = PANELS.filter(({ name }) => data(name).steps.length && (shown[name] || name === "eval"));
  if (shown.lanes) panels.push(...lanes.map((track) => ({ name: "lane", track, px: LANE_PX })));
  if (!panels.length) panels.push(PANELS.find(({ name }) => data(name).steps.length)); // all are hidden: show one for the marks
  const height = panels.reduce((sum, panel) => sum + panel.px, GAP_PX * (panels.length - 1));
  let top = height;
  const placed = panels.map((panel, i) => {
    const domain = [Math.max(0, (top - panel.px) / height), top / height];
    top -= panel.px + GAP_PX;
    return { ...panel, domain, axis: i === 0 ? "y" : `y${i + 1}` };
  });
  return Object.assign(placed, { height });
}

function addPanel(drawing, panel, color) {
  if (panel.track) return addLane(drawing, panel, color);
  const { values } = data(panel.name);
  const hasValues = values.some((value) => value !== null);
  drawing[panel.axis.replace("y", "yaxis")] = axis(color, {
    type: "linear", domain: panel.domain, visible: hasValues, tickfont: { color: color(paint(panel.name)) }, nticks: panel.name === "eval" ? 6 : 3,
    ...(panel.name === "turned" ? { range: [-0.02, 1.02], tickvals: [0, 0.5, 1], ticktext: ["0 %", "50 %", "100 %"] } : {}),
  });
  const call = panel.name === "turned" && posterior.call_step !== null ? `, called at step ${posterior.call_step.toLocaleString("en")}` : "";
  const title = hasValues ? panel.title + call : `${panel.title}: no finite value yet`;
  drawing.annotations.push(label(0, panel.domain[1], title, color(paint(panel.name)), { xref: "paper", xanchor: "left", yshift: 4 }));
  if (panel.name === "eval" && shown.segments && segments) drawing.shapes.push(...segments.items.flatMap((one, i) => segmentShapes(color, one, i, panel.domain)));
  if (panel.name === "turned") drawing.shapes.push(...thresholds(color, panel.axis));
  drawing.traces.push(...traces(panel.name, color, panel.axis));
  return drawing;
}

// A band behind the eval, the strip in which its beginning may be, and the fitted line.
function segmentShapes(color, one, index, [y0, y1]) {
  const fill = { type: "rect", xref: "x", yref: "paper", y0, y1, layer: "below", line: { width: 0 }, fillcolor: color(SEGMENTS[one.kind]) };
  const line = { type: "line", xref: "x", yref: "y", x0: one.first_step, x1: one.last_step, y0: one.first_score, y1: one.last_score, line: { color: color("text"), width: 1.2, dash: "dot" } };
  const strip = { ...fill, x0: one.low_step, x1: one.high_step, opacity: 0.22, fillcolor: color("muted") };
  return [{ ...fill, x0: one.first_step, x1: one.last_step, opacity: 0.1 }, line, ...(index ? [strip] : [])];
}

// A detector's evidence as a share of its threshold, which is the dashed line, and its first call.
function addLane(drawing, { track, domain, axis: yaxis }, color) {
  drawing[yaxis.replace("y", "yaxis")] = axis(color, { type: "linear", domain, range: [0, LANE_TOP], visible: false });
  const called = track.call_step !== null;
  const ink = color(track.observes ? "muted" : "accent");
  const say = track.observes ? "observes" : "decides";
  const call = called ? `called at step ${track.call_step.toLocaleString("en")}` : "no call";
  // Names of members are from the policy and consist of letters, digits, dots and dashes.
  drawing.annotations.push(label(0, domain[1], `${track.member} ${say}, ${call}`, color(called ? "text" : "muted"), { xref: "paper", xanchor: "left", yshift: 1 }));
  drawing.shapes.push(
    { type: "rect", xref: "paper", x0: 0, x1: 1, yref: yaxis, y0: 0, y1: LANE_TOP, fillcolor: color("grid"), opacity: 0.5, line: { width: 0 }, layer: "below" },
    { type: "line", xref: "paper", x0: 0, x1: 1, yref: yaxis, y0: 1, y1: 1, line: { color: color("stop"), width: 1, dash: "dash" } },
  );
  const { steps, at } = fillForward(track);
  const top = track.stop_at ?? Math.max(...track.values.map((value) => value ?? 0), 1);
  const height = (i) => Math.max(0, Math.min((track.values[i] ?? 0) / top, LANE_TOP));
  drawing.traces.push(
    { type: "scatter", mode: "lines", name: track.member, x: steps, y: at.map(height), yaxis, fill: "tozeroy", fillcolor: `${ink}40`, line: { color: ink, width: 1.3, shape: "hv" },
      text: at.map((i) => describeEvidence(track, i)), hovertemplate: "%{text}" },
    callMark(track, 1, yaxis, color),
  );
  return drawing;
}

function callMark(track, y, yaxis, color) {
  const called = track.call_step !== null;
  return {
    type: "scatter", mode: "markers", x: called ? [track.call_step] : [], y: called ? [y] : [], yaxis, hoverinfo: "skip", cliponaxis: false,
    marker: { symbol: "triangle-down", size: 11, color: color(track.observes ? "suspect" : "stop"), line: { color: color("card"), width: 1 } },
  };
}

// The evidence holds until it changes: the steps of the chart, and the index of the value that holds at each.
function fillForward(track) {
  const steps = [...new Set([...track.steps, ...data("eval").steps, series.last_step])].filter((step) => step >= track.steps[0]).sort((a, b) => a - b);
  let i = 0;
  const at = steps.map((step) => {
    while (track.steps[i + 1] <= step) i += 1;
    return i;
  });
  return { steps, at };
}

function describeEvidence(track, i) {
  const number = (value) => (value === null ? "no value" : Math.abs(value) < 1e-6 ? "0" : Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 }));
  const evidence = track.stop_at === null ? number(track.values[i]) : `${number(track.values[i])} of ${number(track.stop_at)}`;
  const note = track.notes[i];
  return narrow.matches || !note ? evidence : `${evidence}: ${escape(note, MOST_NOTED)}`;
}

function paint(name) {
  return name === "turned" ? "hue-4" : name;
}

function traces(name, color, yaxis) {
  const item = data(name);
  const line = {
    type: "scatter", mode: loneValues(item.values) ? "lines+markers" : "lines", name: name === "kl" ? "KL" : name, x: item.steps, y: item.values,
    yaxis, connectgaps: false, visible: shown[name], marker: { color: color(paint(name)), size: 4 }, line: { color: color(paint(name)), width: 1.6 },
    hovertemplate: "%{y:.4~g}",
  };
  if (name === "turned") return [callMark(item, item.stop_at, yaxis, color), { ...line, line: { ...line.line, shape: "hv" }, text: item.values.map((value) => (value === null ? "" : percent(value))), hovertemplate: "%{text}" }];
  if (name !== "eval") return [line];
  const mark = (key, at, marker, title) => ({
    type: "scatter", mode: "markers", name: title, x: at ? [at.step] : [], y: at ? [at.score] : [], yaxis,
    marker, visible: shown[key], hovertemplate: "%{y:.4~g}", cliponaxis: false,
  });
  return [
    shade(evalBand(item), yaxis, color("eval-band"), shown.eval),
    { ...line, mode: item.steps.length <= 150 ? "lines+markers" : "lines", line: { color: color("eval"), width: 2.2 },
      text: item.stderrs.map((stderr) => (stderr === null ? "" : ` ± ${Number(stderr.toPrecision(2))}`)), hovertemplate: "%{y:.4~g}%{text}" },
    mark("raw", series.raw_maximum, { size: 15, color: "rgba(0,0,0,0)", line: { color: color("eval"), width: 2 } }, "raw maximum"),
    mark("best", series.best_checkpoint, { size: 9, color: color("best"), line: { color: color("card"), width: 1.5 } }, "best checkpoint"),
  ];
}

function shade(outline, yaxis, fillcolor, visible) {
  return { type: "scatter", mode: "lines", ...outline, yaxis, fill: "toself", fillcolor, line: { width: 0 }, hoverinfo: "skip", visible };
}

function evalBand(evals) {
  const off = (sign) => evals.values.map((value, i) => (value === null || evals.stderrs[i] === null ? null : value + sign * evals.stderrs[i]));
  return band(evals.steps, off(-1), off(1));
}

function thresholds(color, yref) {
  const lines = [[posterior.suspect_at, "suspect", "dot"], [posterior.stop_at, "stop", "dash"]];
  return lines.filter(([at]) => at !== null).map(([at, name, dash]) => ({
    type: "line", xref: "paper", x0: 0, x1: 1, yref, y0: at, y1: at, line: { color: color(name), width: 1.3, dash },
  }));
}

function label(x, y, text, paint, more) {
  return { xref: "x", yref: "paper", x, y, yanchor: "bottom", text, showarrow: false, font: { color: paint, size: 12 }, ...more };
}

// Marks at steps across all panels: the turn, the decision, notes, the stops of tried policies, and the planned steps that were not run.
function marks(color) {
  const ends = series.series.flatMap((item) => (item.steps.length ? [item.steps[0], item.steps[item.steps.length - 1]] : []));
  const [first, ran] = [Math.min(...ends), Math.max(...ends, series.last_step)];
  const last = Math.max(ran, series.planned_end ?? ran);
  const width = document.getElementById("chart").clientWidth;
  const span = last - first || 1;
  const place = (step) => ((step - first) / span) * width;
  const lines = series.eval_changes.filter((change) => change.step > first && change.step <= ran).map((change) => [change.step, "eval changed", color("muted"), "dash"]);
  for (const { name, step } of series.turns) lines.push([step, name, color(name.includes("hindsight") ? "text" : "muted"), "dot"]);
  if (series.decision) lines.push([series.decision.step, series.decision.state, color("stop"), "solid"]);
  tried.forEach(({ policy, step }, i) => step !== null && lines.push([step, `what if ${policy}`, color(`hue-${(i % 5) + 1}`), "dash"]));
  for (const { step, text } of series.notes) lines.push([step, escape(text), color("accent"), "dot"]);
  lines.sort((a, b) => a[0] - b[0]);
  const shapes = lines.map(([step, , paint, dash]) => ({
    type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1, line: { color: paint, width: 1.4, dash }, // above the grid, which would break it
  }));
  let level = 0;
  let highest = 0;
  const annotations = lines.map(([step, text, paint], i) => {
    // Labels that would overlap are moved up, one line each.
    level = i > 0 && place(step) - place(lines[i - 1][0]) < LABEL_PX ? (level + 1) % MOST_LEVELS : 0;
    highest = Math.max(highest, level);
    const xanchor = place(step) > width - LABEL_PX / 2 ? "right" : place(step) < LABEL_PX / 2 ? "left" : "center";
    return label(step, 1, text, paint, { yshift: 20 + level * LINE_PX, xanchor });
  });
  if (last > series.last_step) {
    const room = place(last) - place(series.last_step);
    shapes.push({ type: "rect", xref: "x", yref: "paper", x0: series.last_step, x1: last, y0: 0, y1: 1, fillcolor: color("muted"), opacity: 0.12, line: { width: 0 }, layer: "below" });
    annotations.push(label((series.last_step + last) / 2, 0.9, `${(last - series.last_step).toLocaleString("en")} steps ${series.ended ? "not run" : "to go"}`, color("muted"),
      { xanchor: "center", yanchor: "middle", textangle: room < LABEL_PX ? -90 : 0 }));
  }
  return { span, range: [first - span / 60, last + span / 60], top: 40 + highest * LINE_PX, shapes, annotations };
}

function redraw() {
  return series ? drawChart() : undefined;
}

onChange(load);
redrawn(redraw);
toggles(document.querySelector(".legend"), shown, showOrHide);
onTried(redraw);
onChange(loadEvidence);
loadEvidence();
load();
