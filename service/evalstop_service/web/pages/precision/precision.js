// The charts of precision: figures over time with their intervals, delays, and stated risks against measured ones.

import { axis, band, draw, narrow, palette, percent, redrawn, shareTicks, toggles } from "./charts.js";
import { fetchSameOrigin, onChange } from "./live.js";

const PAINT = { precision: "best", recall: "kl", false_stops: "stop" };
const NAMES = { precision: "precision", recall: "recall", false_stops: "false stops" };

const main = document.querySelector("main");
const shown = { precision: true, recall: false, false_stops: false };
let figures = null;

async function load() {
  figures = await (await fetchSameOrigin(main.dataset.figures)).json();
  drawAll();
}

function drawAll() {
  if (!figures) return;
  const color = palette();
  drawOverTime(color);
  drawDelays(color);
  drawCalibration(color);
}

function drawOverTime(color) {
  const traces = Object.keys(shown).filter((name) => shown[name]).flatMap((name) => overTime(color, name));
  const chart = findChart("over-time-chart", traces.some((trace) => trace.x.length));
  if (!chart) return; // without a date Plotly draws the year 2000
  const share = axis(color, { ...shareTicks(), range: [-0.02, 1.02] });
  const time = axis(color, { type: "date", nticks: narrow.matches ? 4 : 8, tickformat: "%b %-d\n%Y", showgrid: false });
  draw(chart, traces, { xaxis: time, yaxis: share, hovermode: "closest" });
}

function overTime(color, name) {
  const paint = color(PAINT[name]);
  const [known, weeks] = [figures.running, figures.weeks].map((points) => points.filter((one) => one[name] && one[name].value !== null));
  const at = known.map((one) => one.week);
  const of = (points, end) => points.map((one) => one[name][end]);
  const summary = (points) => points.map((one) => `${percent(one[name].value)}<br>${one[name].decided} cases, ${percent(one[name].low)} to ${percent(one[name].high)}`);
  return [
    { type: "scatter", mode: "lines", ...band(at, of(known, "low"), of(known, "high")), fill: "toself", fillcolor: makeTransparent(paint), line: { width: 0 }, hoverinfo: "skip" },
    {
      type: "scatter", mode: "markers", x: weeks.map((one) => one.week), y: of(weeks, "value"), text: summary(weeks),
      marker: { size: 7, color: color("card"), line: { color: paint, width: 1.5 } },
      hovertemplate: `${NAMES[name]} of the week %{text}<extra></extra>`,
    },
    {
      type: "scatter", mode: "lines+markers", x: at, y: of(known, "value"), text: summary(known), line: { color: paint, width: 2.2 }, marker: { size: 4, color: paint },
      hovertemplate: `${NAMES[name]} so far %{text}<extra></extra>`,
    },
  ];
}

function drawDelays(color) {
  const { from, width, share } = figures.delays;
  const chart = findChart("delay-chart", from.length);
  if (!chart) return;
  const bars = { type: "bar", x: from, y: share, width, offset: 0, customdata: share.map((one) => percent(one)), marker: { color: color("accent"), line: { color: color("card"), width: 1 } }, hovertemplate: "%{customdata} from %{x} steps on<extra></extra>" };
  draw(chart, [bars], { xaxis: axis(color, { showgrid: false, tickformat: ",d" }), yaxis: axis(color, { ...shareTicks(Math.max(...share)), rangemode: "tozero" }), bargap: 0 });
}

function drawCalibration(color) {
  const points = figures.calibration;
  const chart = findChart("calibration-chart", points.length);
  if (!chart) return;
  const most = Math.max(...points.flatMap((one) => [one.stated, Math.min(one.high, 2.5 * Math.max(one.value, one.stated, 0.02))])) * 1.1;
  const diagonal = { type: "scatter", mode: "lines", x: [0, most], y: [0, most], line: { color: color("muted"), width: 1.2, dash: "dot" }, hoverinfo: "skip" };
  const measured = {
    type: "scatter", mode: "markers+text", x: points.map((one) => one.stated), y: points.map((one) => one.value), text: points.map((one) => one.label),
    textposition: "top right", textfont: { color: color("muted"), size: 11.5 }, cliponaxis: false,
    error_y: { type: "data", symmetric: false, array: points.map((one) => one.high - one.value), arrayminus: points.map((one) => one.value - one.low), color: color("stop"), thickness: 1.6, width: 4 },
    customdata: points.map((one) => `states ${percent(one.stated)}, measured ${percent(one.value)}`),
    marker: { size: 9, color: color("stop") }, hovertemplate: "%{text}: %{customdata}<extra></extra>",
  };
  const share = { ...shareTicks(most), range: [0, most] };
  draw(chart, [diagonal, measured], {
    xaxis: axis(color, { ...share, title: { text: "stated", font: { size: 11.5, color: color("muted") } } }),
    yaxis: axis(color, { ...share, title: { text: "measured", font: { size: 11.5, color: color("muted") } } }),
    margin: { l: 52, r: 24, t: 10, b: 44 },
  });
}

// The chart with this id, or null while it has nothing to draw.
function findChart(id, count) {
  const chart = document.getElementById(id);
  chart.hidden = !count;
  chart.nextElementSibling.hidden = Boolean(count);
  return count ? chart : null;
}

function makeTransparent(paint) {
  return `${paint}2b`; // colors are #rrggbb
}

const legend = document.querySelector(".legend");
if (legend) {
  toggles(legend, shown, drawAll);
  redrawn(drawAll);
  onChange(load);
  load();
}
