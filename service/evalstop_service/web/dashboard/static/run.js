// The chart of a run: the eval and the proxy above, KL below, one axis of steps.

import { axis, band, draw, drawable, loneValues, narrow, palette, redrawn, toggles } from "./charts.js";
import { fetchSameOrigin, onChange } from "./live.js";

const main = document.querySelector("main");
const shown = { eval: true, proxy: true, kl: true, best: true, raw: true };
let series = null;
const LABEL_PX = 150;

async function load() {
  const response = await fetchSameOrigin(main.dataset.series);
  series = await response.json();
  for (const item of series.series) {
    item.values = drawable(item.values);
    item.stderrs = drawable(item.stderrs);
  }
  for (const mark of [series.best_checkpoint, series.raw_maximum]) {
    if (mark) [mark.score] = drawable([mark.score]);
  }
  await drawChart();
}

function drawChart() {
  const chart = document.getElementById("chart");
  const empty = !series.series.some((item) => item.steps.length);
  chart.hidden = empty;
  document.querySelector(".chart-empty").hidden = !empty;
  const present = { eval: role("eval"), proxy: role("proxy"), kl: role("kl"), best: series.best_checkpoint, raw: series.raw_maximum };
  for (const key of document.querySelectorAll("[data-toggle]")) {
    const what = present[key.dataset.toggle];
    key.hidden = !what || (what.steps && !what.steps.length);
  }
  if (empty) return undefined;
  const color = palette();
  return draw(chart, traces(color), layout(color));
}

function role(name) {
  return series.series.find((item) => item.role === name) || { steps: [], values: [], stderrs: [] };
}

function traces(color) {
  const [evals, proxy, kl] = ["eval", "proxy", "kl"].map(role);
  const dots = evals.steps.length <= 150 ? "lines+markers" : "lines";
  const line = (item, name, yaxis, paint, more) => ({
    type: "scatter", mode: loneValues(item.values) ? "lines+markers" : "lines", name, x: item.steps, y: item.values, yaxis,
    connectgaps: false, marker: { color: paint, size: 4 }, line: { color: paint, width: 1.8 },
    hovertemplate: "%{y:.4~g}", ...more,
  });
  const mark = (name, at, marker, label) => ({
    type: "scatter", mode: "markers", name: label, x: at ? [at.step] : [], y: at ? [at.score] : [], yaxis: "y",
    marker, visible: shown[name], hovertemplate: "%{y:.4~g}", cliponaxis: false,
  });
  return [
    { type: "scatter", mode: "lines", ...evalBand(evals), yaxis: "y", fill: "toself", fillcolor: color("eval-band"),
      line: { width: 0 }, hoverinfo: "skip", visible: shown.eval },
    line(proxy, "proxy", "y2", color("proxy"), { visible: shown.proxy, line: { color: color("proxy"), width: 1.4 } }),
    line(evals, "eval", "y", color("eval"), {
      mode: dots, visible: shown.eval, line: { color: color("eval"), width: 2.2 },
      text: evals.stderrs.map((stderr) => (stderr === null ? "" : ` ± ${Number(stderr.toPrecision(2))}`)),
      hovertemplate: "%{y:.4~g}%{text}",
    }),
    line(kl, "KL", "y3", color("kl"), { visible: shown.kl }),
    mark("raw", series.raw_maximum, { size: 15, color: "rgba(0,0,0,0)", line: { color: color("eval"), width: 2 } }, "raw maximum"),
    mark("best", series.best_checkpoint, { size: 9, color: color("best"), line: { color: color("card"), width: 1.5 } }, "best checkpoint"),
  ];
}

function evalBand(evals) {
  const off = (sign) => evals.values.map((value, i) => (value === null || evals.stderrs[i] === null ? null : value + sign * evals.stderrs[i]));
  return band(evals.steps, off(-1), off(1));
}

function layout(color) {
  const hasKl = role("kl").steps.length > 0 && shown.kl;
  const [first, last] = stepRange();
  const { shapes, annotations } = marks(color, first, last);
  return {
    margin: { l: narrow.matches ? 34 : 46, r: narrow.matches ? 34 : 46, t: 40, b: 30 },
    hovermode: "x unified",
    hoversubplots: "axis",
    xaxis: axis(color, {
      anchor: hasKl ? "y3" : "y", range: [first - (last - first || 1) / 60, last + (last - first || 1) / 60], fixedrange: false,
      nticks: narrow.matches ? 6 : 12, tickformat: ",d", unifiedhovertitle: { text: "step %{x}" },
      spikecolor: color("muted"), spikethickness: 1, spikedash: "solid",
    }),
    yaxis: axis(color, { domain: [hasKl ? 0.3 : 0, 1], tickfont: { color: color("eval") } }),
    yaxis2: axis(color, { tickmode: "auto", overlaying: "y", side: "right", showgrid: false, tickfont: { color: color("proxy") } }),
    yaxis3: axis(color, { domain: [0, 0.22], nticks: 3, visible: hasKl, tickfont: { color: color("kl") } }),
    shapes,
    annotations,
  };
}

function stepRange() {
  const ends = series.series.flatMap((item) => (item.steps.length ? [item.steps[0], item.steps[item.steps.length - 1]] : []));
  return [Math.min(...ends), Math.max(...ends)];
}

function marks(color, first, last) {
  const width = document.getElementById("chart").clientWidth;
  const place = (step) => ((step - first) / (last - first || 1)) * width;
  const lines = [];
  for (const change of series.eval_changes) {
    if (change.step > first && change.step <= last) lines.push([change.step, "eval changed", color("muted"), "dash"]);
  }
  if (series.turn_step !== null) lines.push([series.turn_step, "suspected turn", color("muted"), "dot"]);
  if (series.decision) lines.push([series.decision.step, series.decision.state, color("stop"), "solid"]);
  const shapes = lines.map(([step, , paint, dash]) => ({
    type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1, line: { color: paint, width: 1.4, dash }, layer: "below",
  }));
  const close = (i) => i + 1 < lines.length && Math.abs(place(lines[i + 1][0]) - place(lines[i][0])) < LABEL_PX;
  const annotations = lines.map(([step, text, paint], i) => ({
    xref: "x", yref: "paper", x: step, y: 1, yanchor: "bottom", yshift: close(i) ? 18 : 2, text, showarrow: false,
    xanchor: place(step) > width - LABEL_PX / 2 ? "right" : place(step) < LABEL_PX / 2 ? "left" : "center",
    font: { color: paint, size: 12 },
  }));
  return { shapes, annotations };
}

onChange(load);
redrawn(() => series && drawChart());
toggles(document.querySelector(".legend"), shown, () => series && drawChart());
load();
