// Keeps an open page true: follows the server's events, swaps what changed, and draws the chart of a run.
"use strict";

const main = document.querySelector("main");
const kind = main ? main.dataset.page : "";

// --- Parts: the server renders the page again, and what reads differently is swapped. ---

const rendered = new Map();

function parts(root) {
  return new Map([...root.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
}

async function fetchSameOrigin(url) {
  const response = await fetch(url, { redirect: "manual", cache: "no-store" });
  if (response.type === "opaqueredirect" || response.status === 404) {
    location.reload(); // signed out, or gone
    throw new Error("this page is no longer to be seen");
  }
  if (!response.ok) throw new Error(`${url} answered ${response.status}`);
  return response;
}

async function swapParts() {
  const response = await fetchSameOrigin(location.href);
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  const focused = document.activeElement;
  const present = parts(document);
  for (const [name, part] of parts(fresh)) {
    const html = part.innerHTML;
    const old = present.get(name);
    if (!old || rendered.get(name) === html) continue;
    const place = old.contains(focused) ? focusable(old).indexOf(focused) : -1;
    rendered.set(name, html);
    old.replaceChildren(...part.childNodes);
    tellTimes(old);
    if (place >= 0) focusable(old)[place]?.focus({ preventScroll: true });
  }
  main.dataset.revision = fresh.querySelector("main").dataset.revision;
}

function focusable(root) {
  return [...root.querySelectorAll("a, button, input, [tabindex]")];
}

// --- Times: in the viewer's zone, with UTC on hover. ---

const AGES = [["second", 60], ["minute", 60], ["hour", 24], ["day", 30], ["month", 12], ["year", Infinity]];
const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
const absolute = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

function tellTimes(root) {
  for (const element of root.querySelectorAll("time[data-time]")) {
    const at = new Date(element.dateTime);
    let age = (at - Date.now()) / 1000;
    let text = "just now";
    if (Math.abs(age) >= 5) {
      for (const [unit, length] of AGES) {
        if (Math.abs(age) < length) {
          text = relative.format(Math.round(age), unit);
          break;
        }
        age /= length;
      }
    }
    if (element.textContent !== text) element.textContent = text;
    element.title = `${absolute.format(at)}\n${element.dateTime}`;
  }
}

// --- Live: one stream a visible page, because a browser opens only six connections to a host. ---

const RETRY_MS = 10_000;
let stream = null;
let retry = 0;

function follow() {
  if (stream || document.hidden) return;
  const url = new URL(main.dataset.events, location.href);
  url.searchParams.set("since", main.dataset.revision);
  stream = new EventSource(url);
  stream.addEventListener("open", () => tellLive("on", "Live"));
  stream.addEventListener("changed", refresh);
  stream.addEventListener("gone", () => location.reload());
  stream.addEventListener("error", () => {
    tellLive("lost", "Reconnecting");
    if (stream && stream.readyState === EventSource.CLOSED) {
      leave();
      retry = setTimeout(follow, RETRY_MS);
    }
  });
}

function leave() {
  clearTimeout(retry);
  if (stream) stream.close();
  stream = null;
}

function tellLive(state, text) {
  const sign = document.querySelector(".live");
  sign.dataset.live = state;
  sign.querySelector("span").textContent = text;
}

let refreshing = false;
let refreshAgain = false;

async function refresh() {
  if (refreshing) {
    refreshAgain = true;
    return;
  }
  refreshing = true;
  try {
    do {
      refreshAgain = false;
      const begun = performance.now();
      await Promise.all([swapParts(), kind === "run" ? loadChart() : null]);
      // The longer a page takes, the longer it leaves the server in peace.
      await new Promise((resolve) => setTimeout(resolve, performance.now() - begun));
    } while (refreshAgain);
  } catch (error) {
    tellLive("lost", "Reconnecting");
    setTimeout(refresh, RETRY_MS);
  } finally {
    refreshing = false;
  }
}

// --- The chart: gold and proxy above, KL beneath, one axis of steps. Nothing a trainer named reaches Plotly. ---

let series = null;
const shown = { gold: true, proxy: true, kl: true, best: true, raw: true };
const narrow = matchMedia("(max-width: 720px)");

async function loadChart() {
  const response = await fetchSameOrigin(main.dataset.series);
  series = await response.json();
  await drawChart();
}

function drawChart() {
  const chart = document.getElementById("chart");
  const empty = !series.series.some((item) => item.steps.length);
  chart.hidden = empty;
  document.querySelector(".chart-empty").hidden = !empty;
  const present = { gold: signal("eval"), proxy: signal("proxy"), kl: signal("kl"), best: series.best_checkpoint, raw: series.raw_maximum };
  for (const key of document.querySelectorAll("[data-toggle]")) {
    const what = present[key.dataset.toggle];
    key.hidden = !what || (what.steps && !what.steps.length);
  }
  if (empty) return undefined;
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const traces = chartTraces(color);
  const layout = chartLayout(color, traces);
  const config = { displayModeBar: false, responsive: true, doubleClick: "autosize" };
  return Plotly.react(chart, traces, layout, config);
}

function signal(name) {
  return series.series.find((item) => item.signal === name) || { steps: [], values: [], stderrs: [] };
}

function chartTraces(color) {
  const [gold, proxy, kl] = ["eval", "proxy", "kl"].map(signal);
  const dots = gold.steps.length <= 150 ? "lines+markers" : "lines";
  const line = (item, name, yaxis, paint, more) => ({
    type: "scatter", mode: loneValues(item) ? "lines+markers" : "lines", name, x: item.steps, y: item.values, yaxis,
    connectgaps: false, marker: { color: paint, size: 4 }, line: { color: paint, width: 1.8 },
    hovertemplate: "%{y:.4~g}", ...more,
  });
  const mark = (name, at, marker, label) => ({
    type: "scatter", mode: "markers", name: label, x: at ? [at.step] : [], y: at ? [at.score] : [], yaxis: "y",
    marker, visible: shown[name], hovertemplate: "%{y:.4~g}", cliponaxis: false,
  });
  return [
    { type: "scatter", mode: "lines", ...band(gold), yaxis: "y", fill: "toself", fillcolor: color("gold-band"),
      line: { width: 0 }, hoverinfo: "skip", visible: shown.gold },
    line(proxy, "proxy", "y2", color("proxy"), { visible: shown.proxy, line: { color: color("proxy"), width: 1.4 } }),
    line(gold, "gold", "y", color("gold"), {
      mode: dots, visible: shown.gold, line: { color: color("gold"), width: 2.2 },
      text: gold.stderrs.map((stderr) => (stderr === null ? "" : ` ± ${Number(stderr.toPrecision(2))}`)),
      hovertemplate: "%{y:.4~g}%{text}",
    }),
    line(kl, "KL", "y3", color("kl"), { visible: shown.kl }),
    mark("raw", series.raw_maximum, { size: 15, color: "rgba(0,0,0,0)", line: { color: color("gold"), width: 2 } }, "raw maximum"),
    mark("best", series.best_checkpoint, { size: 9, color: color("best"), line: { color: color("card"), width: 1.5 } }, "best checkpoint"),
  ];
}

function loneValues(item) {
  return item.values.some((value, i) => value !== null && (item.values[i - 1] ?? null) === null && (item.values[i + 1] ?? null) === null);
}

function band(gold) {
  // One closed outline for every stretch without a gap, a null between two of them.
  const x = [];
  const y = [];
  let stretch = [];
  const close = () => {
    if (stretch.length > 1) {
      const there = stretch.map((i) => [gold.steps[i], gold.values[i] + gold.stderrs[i]]);
      const back = stretch.map((i) => [gold.steps[i], gold.values[i] - gold.stderrs[i]]).reverse();
      for (const [step, value] of [...there, ...back, there[0], [null, null]]) {
        x.push(step);
        y.push(value);
      }
    }
    stretch = [];
  };
  gold.steps.forEach((_, i) => {
    if (gold.values[i] === null || gold.stderrs[i] === null) close();
    else stretch.push(i);
  });
  close();
  return { x, y };
}

function chartLayout(color, traces) {
  const tick = { size: 11.5, color: color("muted") };
  const hasKl = signal("kl").steps.length > 0 && shown.kl;
  const axis = { gridcolor: color("grid"), zeroline: false, tickfont: tick, fixedrange: true, nticks: 6, tickformat: "~g", automargin: true };
  const [first, last] = stepRange();
  const { shapes, annotations } = chartMarks(color, first, last);
  return {
    uirevision: "kept", // a zoom survives news
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: fontFamily(), size: 12, color: color("text") },
    margin: { l: narrow.matches ? 34 : 46, r: narrow.matches ? 34 : 46, t: 40, b: 30 },
    showlegend: false,
    hovermode: "x unified",
    hoversubplots: "axis",
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text"), size: 12 } },
    dragmode: narrow.matches ? false : "zoom",
    xaxis: {
      anchor: hasKl ? "y3" : "y", range: [first - (last - first || 1) / 60, last + (last - first || 1) / 60], gridcolor: color("grid"),
      zeroline: false, tickfont: tick, nticks: narrow.matches ? 6 : 12, tickformat: ",d", unifiedhovertitle: { text: "step %{x}" },
      spikecolor: color("muted"), spikethickness: 1, spikedash: "solid",
    },
    yaxis: { ...axis, domain: [hasKl ? 0.3 : 0, 1], tickfont: { ...tick, color: color("gold") } },
    yaxis2: { ...axis, tickmode: "auto", overlaying: "y", side: "right", showgrid: false, tickfont: { ...tick, color: color("proxy") } },
    yaxis3: { ...axis, domain: [0, 0.22], nticks: 3, visible: hasKl, tickfont: { ...tick, color: color("kl") } },
    shapes,
    annotations,
  };
}

function fontFamily() {
  return getComputedStyle(document.body).fontFamily;
}

function stepRange() {
  const ends = series.series.flatMap((item) => (item.steps.length ? [item.steps[0], item.steps[item.steps.length - 1]] : []));
  return [Math.min(...ends), Math.max(...ends)];
}

const LABEL_PX = 150;

function chartMarks(color, first, last) {
  const width = document.getElementById("chart").clientWidth;
  const place = (step) => ((step - first) / (last - first || 1)) * width;
  const marks = [];
  if (series.turn_step !== null) marks.push([series.turn_step, "suspected turn", color("muted"), "dot"]);
  if (series.decision) marks.push([series.decision.step, series.decision.state, color("stop"), "solid"]);
  const shapes = marks.map(([step, , paint, dash]) => ({
    type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1, line: { color: paint, width: 1.4, dash }, layer: "below",
  }));
  const close = marks.length > 1 && Math.abs(place(marks[1][0]) - place(marks[0][0])) < LABEL_PX;
  const annotations = marks.map(([step, text, paint], i) => ({
    xref: "x", yref: "paper", x: step, y: 1, yanchor: "bottom", yshift: close && i === 0 ? 18 : 2, text, showarrow: false,
    xanchor: place(step) > width - LABEL_PX / 2 ? "right" : place(step) < LABEL_PX / 2 ? "left" : "center",
    font: { color: paint, size: 12 },
  }));
  return { shapes, annotations };
}

// --- What a visitor does. ---

document.addEventListener("click", async (event) => {
  const copy = event.target.closest("[data-copy]");
  if (copy) await copyText(copy);
  const toggle = event.target.closest("[data-toggle]");
  if (toggle && series) {
    const name = toggle.dataset.toggle;
    shown[name] = !shown[name];
    toggle.setAttribute("aria-pressed", String(shown[name]));
    drawChart();
  }
});

async function copyText(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
    button.dataset.copied = "";
  } catch {
    // The clipboard is there for https and localhost only: select the text, so that Ctrl+C takes it.
    const code = button.parentElement.querySelector("code");
    if (code) getSelection().selectAllChildren(code);
    button.textContent = "Press Ctrl+C";
  }
  setTimeout(() => {
    button.textContent = "Copy";
    delete button.dataset.copied;
  }, 2000);
}

document.addEventListener("keydown", (event) => {
  const search = document.getElementById("search");
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "/" && search && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    search.focus();
  }
});

async function skipLogin() {
  // Reached by a link on another site, the request had no strict cookie: the visitor may be signed in all the same.
  const session = await (await fetchSameOrigin("/session")).json();
  if (session.signed_in) location.replace(main.dataset.next);
}

for (const [name, part] of parts(document)) rendered.set(name, part.innerHTML);
tellTimes(document);
if (kind === "login") skipLogin();
if (kind === "run" || kind === "runs") {
  setInterval(() => tellTimes(document), 10_000);
  document.addEventListener("visibilitychange", () => (document.hidden ? leave() : follow()));
  window.addEventListener("pagehide", leave);
  window.addEventListener("pageshow", (event) => event.persisted && follow());
  follow();
}
if (kind === "run") {
  loadChart();
  for (const query of [narrow, matchMedia("(prefers-color-scheme: dark)")]) {
    query.addEventListener("change", () => series && drawChart());
  }
}
