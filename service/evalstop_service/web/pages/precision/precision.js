// The charts of precision: the figures of each detector over time, and those of the policy's stops with their intervals.

import { axis, axisTitle, band, draw, narrow, palette, percent, redrawn, shareTicks, toggles } from "./charts.js";
import { fetchSameOrigin, onChange } from "./live.js";

const PAINT = { precision: "best", recall: "kl", false_stops: "stop" };
const NAMES = { precision: "precision", recall: "recall", false_stops: "false stops" };

const main = document.querySelector("main");
const DASHES = { precision: "solid", recall: "dash", false_stops: "dot" };
const HUES = 5;
const MARKS = ["circle", "square", "diamond"];
const shown = { precision: true, recall: false, false_stops: false };
const ofDetectors = { ...shown };
let figures = null;

async function load() {
  figures = await (await fetchSameOrigin(main.dataset.figures)).json();
  drawAll();
}

function drawAll() {
  if (!figures) return;
  const color = palette();
  const chosen = (figuresShown) => Object.keys(figuresShown).filter((name) => figuresShown[name]);
  drawShares(color, "detectors-chart", chosen(ofDetectors).flatMap((name) => figures.detectors.map((one, i) => ofDetector(color, name, one, i))));
  drawShares(color, "over-time-chart", chosen(shown).flatMap((name) => overTime(color, name)));
}

function drawShares(color, id, traces) {
  const chart = findChart(id, traces.some((trace) => trace.x.length));
  if (!chart) return; // without a date Plotly draws the year 2000
  const share = axis(color, { title: axisTitle(color, "share of cases"), ...shareTicks(), range: [-0.02, 1.02] });
  const time = axis(color, { title: axisTitle(color, "week"), type: "date", nticks: narrow.matches ? 4 : 8, tickformat: "%b %-d\n%Y", showgrid: false });
  const legend = { orientation: "h", x: 0, y: -0.3, yanchor: "top", itemclick: false, itemdoubleclick: false };
  draw(chart, traces, { xaxis: time, yaxis: share, hovermode: "closest", showlegend: id === "detectors-chart", legend });
}

const decided = (points, name) => points.filter((one) => one[name] && one[name].value !== null);
const summarize = (points, name) => points.map((one) => `${percent(one[name].value)}<br>${one[name].decided} cases, ${percent(one[name].low)} to ${percent(one[name].high)}`);

// Names of detectors are from the policy and consist of letters, digits, dots and dashes.
function ofDetector(color, name, { name: detector, observes, running }, place) {
  const known = decided(running, name);
  const index = place - figures.detectors.filter((one) => !one.observes).length; // among observers
  const paint = color(observes ? `hue-${(index % HUES) + 1}` : "text");
  return {
    type: "scatter", mode: "lines+markers", name: detector, showlegend: name === Object.keys(ofDetectors).find((one) => ofDetectors[one]),
    x: known.map((one) => one.week), y: known.map((one) => one[name].value), text: summarize(known, name),
    line: { color: paint, width: observes ? 1.8 : 3, dash: DASHES[name] }, marker: { size: 5, color: paint, symbol: MARKS[observes && index < HUES ? 0 : 1 + (place % 2)] },
    hovertemplate: `${detector}: ${NAMES[name]} so far %{text}<extra></extra>`,
  };
}

function overTime(color, name) {
  const paint = color(PAINT[name]);
  const [known, weeks] = [figures.running, figures.weeks].map((points) => decided(points, name));
  const at = known.map((one) => one.week);
  const of = (points, end) => points.map((one) => one[name][end]);
  return [
    { type: "scatter", mode: "lines", ...band(at, of(known, "low"), of(known, "high")), fill: "toself", fillcolor: makeTransparent(paint), line: { width: 0 }, hoverinfo: "skip" },
    {
      type: "scatter", mode: "markers", x: weeks.map((one) => one.week), y: of(weeks, "value"), text: summarize(weeks, name),
      marker: { size: 7, color: color("card"), line: { color: paint, width: 1.5 } },
      hovertemplate: `${NAMES[name]} of the week %{text}<extra></extra>`,
    },
    {
      type: "scatter", mode: "lines+markers", x: at, y: of(known, "value"), text: summarize(known, name), line: { color: paint, width: 2.2 }, marker: { size: 4, color: paint },
      hovertemplate: `${NAMES[name]} so far %{text}<extra></extra>`,
    },
  ];
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

const legends = document.querySelectorAll(".legend");
if (legends.length) {
  [ofDetectors, shown].forEach((one, i) => toggles(legends[i], one, drawAll));
  redrawn(drawAll);
  onChange(load);
  load();
}
