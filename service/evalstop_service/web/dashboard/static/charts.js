// What all charts share: colors out of the style sheet, axes, bands, and drawing again when light, width or paper change.
// Nothing a trainer named reaches Plotly.

export const narrow = matchMedia("(max-width: 720px)");

// A function from a name of evalstop.css ("eval" for --eval) to its present color.
export function palette() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

// Draws; `traces` and `layout` as Plotly has them, over what all charts have in common.
export function draw(element, traces, layout) {
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

// An axis in the manner of all charts; `more` is what it has of its own.
export function axis(color, more = {}) {
  const { tickfont, ...rest } = more;
  return {
    gridcolor: color("grid"), zeroline: false, tickfont: { size: 11.5, color: color("muted"), ...tickfont }, fixedrange: true,
    nticks: 6, tickformat: "~g", automargin: true, ...rest,
  };
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

// Calls `redraw` whenever what is drawn has to look different: dark or light, narrow or wide.
export function redrawn(redraw) {
  for (const query of [narrow, matchMedia("(prefers-color-scheme: dark)")]) query.addEventListener("change", redraw);
}

// The outline between two lines, for a trace with fill "toself": one closed outline for every stretch without a gap (a
// null in either), a null between two of them.
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

// Values that can be drawn: an axis from one end of what a double holds to the other has no length that it holds.
export function drawable(values) {
  return values.map((value) => (value === null ? null : Math.max(-1e150, Math.min(1e150, value))));
}

// Whether some value stands between two gaps, where a line alone would not show it.
export function loneValues(values) {
  return values.some((value, i) => value !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null);
}

// Buttons with data-toggle in the legend of a chart show and hide what they name: `shown` is changed, then `redraw` called.
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
