// Shared by all charts: colors from the style sheet, axes, bands, and redrawing when the color scheme or the width changes.
// Text from trainers is passed to Plotly, which interprets HTML, only by `escape`.

export const narrow = matchMedia("(max-width: 720px)");

// A function from the name of a color in evalstop.css ("eval" for --eval) to its current value.
export function palette() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

let loading = null;

// Loads Plotly, once. It is 1.5 MB: the page works, and shows the server's drawings, before it has arrived.
export function loadPlotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = document.getElementById("plotly").href;
    script.onload = resolve;
    script.onerror = () => {
      loading = null;
      reject(new Error("Plotly could not be loaded"));
    };
    document.head.append(script);
  });
  return loading;
}

// Draws Plotly's `traces` and `layout` with the settings that all charts share.
export async function draw(element, traces, layout) {
  if (!window.Plotly) sketch(element, traces);
  await loadPlotly();
  element.querySelector(".sketch")?.remove();
  const color = palette();
  const common = {
    uirevision: "kept", // a zoom survives updates
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("text") },
    margin: { l: narrow.matches ? 34 : 46, r: narrow.matches ? 12 : 16, t: 12, b: 30 },
    showlegend: false,
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text"), size: 12 } },
    dragmode: narrow.matches ? false : "zoom",
  };
  const config = { displayModeBar: false, responsive: true, doubleClick: "autosize", showTips: false };
  return Plotly.react(element, traces, { ...common, ...layout }, config);
}

// Draws the lines of `traces`, without axes, until Plotly has loaded; charts of several panels come with a drawing by the server.
function sketch(element, traces) {
  const place = (value) => (typeof value === "string" ? Date.parse(value) : value);
  const lines = traces.filter(({ mode, line, yaxis }) => mode.startsWith("lines") && line.width > 0 && !yaxis);
  const points = lines.map(({ x, y }) => x.map((at, i) => [place(at), y[i]]).filter(([, value]) => value !== null));
  const [low, high] = [Math.min, Math.max].map((end) => [0, 1].map((axis) => end(...points.flat().map((point) => point[axis]))));
  const share = (point, axis) => (high[axis] > low[axis] ? (point[axis] - low[axis]) / (high[axis] - low[axis]) : 0.5);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({ class: "sketch", viewBox: "0 0 1 1", preserveAspectRatio: "none" })) svg.setAttribute(name, value);
  lines.forEach(({ line }, i) => {
    const polyline = document.createElementNS(svg.namespaceURI, "polyline");
    polyline.setAttribute("stroke", line.color);
    polyline.setAttribute("points", points[i].map((point) => `${share(point, 0)},${1 - share(point, 1)}`).join(" "));
    svg.append(polyline);
  });
  element.replaceChildren(svg);
}

// An axis in the style of all charts; `more` overrides it.
export function axis(color, more = {}) {
  const { tickfont, ...rest } = more;
  return {
    gridcolor: color("grid"), zeroline: false, tickfont: { size: 11.5, color: color("muted"), ...tickfont }, fixedrange: true,
    nticks: 6, tickformat: "~g", automargin: true, ...rest,
  };
}

// The title of an axis.
export function axisTitle(color, text) {
  return { text, font: { size: 12, color: color("muted") }, standoff: 10 };
}

// The ticks of an axis of steps, which are whole numbers, at most `most` of them.
export function stepTicks(most, span) {
  return { nticks: most, tickformat: ",d", ...(span < most ? { dtick: 1 } : {}) };
}

// A share of 1 in percent. Plotly's own format has no space before the sign.
export function percent(share, digits = 1) {
  return `${(100 * share).toFixed(digits)} %`;
}

// The ticks of an axis of shares from 0 to `highest`, some five of them.
export function shareTicks(highest = 1) {
  const step = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1].find((one) => highest <= 5 * one) ?? 0.2;
  const tickvals = Array.from({ length: Math.floor(highest / step + 1e-9) + 1 }, (_, i) => i * step);
  return { tickvals, ticktext: tickvals.map((value) => percent(value, step < 0.01 ? 1 : 0)) };
}

// The start of a text of people as Plotly shows it: it reads tags in it.
export function escape(text, most = 24) {
  const start = text.length > most ? `${text.slice(0, most)}…` : text;
  return start.replace(/[&<>]/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

// Calls `redraw` when the color scheme or the width class changes.
export function redrawn(redraw) {
  for (const query of [narrow, matchMedia("(prefers-color-scheme: dark)")]) query.addEventListener("change", redraw);
}

// The outline between two lines, for a trace with fill "toself": one closed outline for each segment without a gap (a null
// in either line), separated by nulls.
export function band(xs, low, high) {
  const x = [];
  const y = [];
  let stretch = [];
  const close = () => {
    if (stretch.length > 1) {
      const there = stretch.map((i) => [xs[i], high[i]]);
      const back = stretch.map((i) => [xs[i], low[i]]).reverse();
      for (const [at, value] of [...there, ...back, there[0], [null, null]]) {
        x.push(at);
        y.push(value);
      }
    }
    stretch = [];
  };
  xs.forEach((_, i) => {
    if (low[i] === null || high[i] === null) close();
    else stretch.push(i);
  });
  close();
  return { x, y };
}

// Values limited to what can be drawn: the length of an axis over the whole range of a double would overflow.
export function drawable(values) {
  return values.map((value) => (value === null ? null : Math.max(-1e150, Math.min(1e150, value))));
}

// Whether a value is between two gaps, where a line without markers would not show it.
export function loneValues(values) {
  return values.some((value, i) => value !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null);
}

// Buttons with data-toggle in a legend show and hide traces: they change `shown` and call `redraw`.
export function toggles(legend, shown, redraw) {
  legend.addEventListener("click", (event) => {
    const toggle = event.target.closest("[data-toggle]");
    if (!toggle) return;
    const name = toggle.dataset.toggle;
    shown[name] = !shown[name];
    toggle.setAttribute("aria-pressed", String(shown[name]));
    redraw();
  });
}
