// The page of a backtest. Runs are added to the page in batches, and plotted while they are visible.
"use strict";

(() => {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const runs = JSON.parse(document.getElementById("runs-data").textContent);
  const labels = report.policies.map((item) => item.policy);
  for (const run of runs) run.outcomes = labels.map((label) => run.policies[label]);
  const AT_A_TIME = 30;
  const GROUPS = ["wrongly stopped", "missed", "stopped, unknown", "rightly stopped", "rightly not stopped", "undecided, not stopped"];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const formatRuns = (count) => `${number(count)} ${count === 1 ? "run" : "runs"}`;
  const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
  const number = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });

  function put(parent, tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  }

  // --- the report on all runs

  function interval(row, cell, signed) {
    const place = put(row, "td");
    if (!cell || cell.value === null || !cell.n) {
      place.textContent = "–";
      return;
    }
    const sign = signed && cell.value > 0 ? "+" : "";
    place.append(sign + percent(cell.value));
    if (cell.low < cell.high) put(place, "small", `[${[cell.low, cell.high].map((end) => percent(end).replace(" %", "")).join(", ")}]`);
  }

  function figures() {
    const table = document.getElementById("figures");
    const head = put(put(table, "thead"), "tr");
    put(head, "th", "");
    for (const label of labels) put(head, "th", label).scope = "col";
    if (report.difference) put(head, "th", "difference").scope = "col";
    const body = put(table, "tbody");
    const line = (text) => {
      const row = put(body, "tr");
      put(row, "th", text).scope = "row";
      return row;
    };
    const total = (text, count) => {
      const row = line(text);
      for (const item of report.policies) put(row, "td", number(count(item)));
      if (report.difference) put(row, "td", "");
    };
    total("runs stopped", (item) => item.stopped);
    for (const outcome of ["right", "wrong", "unknown"]) total(`… ${outcome}`, (item) => item.stops[outcome]);
    for (const [name, { label }] of Object.entries(report.policies[0].figures)) {
      const row = line(label);
      for (const item of report.policies) interval(row, item.figures[name]);
      if (report.difference) interval(row, report.difference[name], true);
    }
    if (report.gpu_hours > 0) {
      total("GPU-hours saved by right stops", (item) => item.gpu_hours.right);
      total("GPU-hours lost by wrong stops", (item) => item.gpu_hours.wrong);
    }
  }

  function head() {
    const { turned, healthy, undecided } = report.truths;
    const more = [];
    if (report.without_eval) more.push(`${number(report.without_eval)} have no evals, and no shipped policy stops them`);
    if (report.without_gpu_hours) more.push(`${number(report.without_gpu_hours)} have no known GPU-hours`);
    document.getElementById("counts").textContent =
      `${formatRuns(report.runs)}: ${number(turned)} turned, ${number(healthy)} healthy, ${number(undecided)} undecided` +
      more.map((text) => `; ${text}`).join("") + ".";
    document.getElementById("command").textContent = report.command;
    const table = document.getElementById("roles");
    const row = put(put(table, "thead"), "tr");
    for (const text of ["metric", "role", "better", "runs"]) put(row, "th", text).scope = "col";
    const body = put(table, "tbody");
    for (const item of report.roles) {
      const cells = put(body, "tr");
      put(cells, "th", item.metric).scope = "row";
      put(cells, "td", item.role);
      put(cells, "td", item.role === "kl" ? "–" : item.minimized ? "lower" : "higher");
      put(cells, "td", number(item.runs));
    }
    if (report.read_errors.length) {
      const place = document.getElementById("read-errors");
      put(place, "h3", `Read errors (${number(report.read_errors.length)})`);
      const list = put(place, "ul");
      for (const text of report.read_errors.slice(0, 200)) put(list, "li", text);
      if (report.read_errors.length > 200) put(list, "li", `and ${number(report.read_errors.length - 200)} more`);
    }
  }

  // --- plots

  const layout = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("muted"), size: 11, family: "inherit" },
    hoverlabel: { bgcolor: color("card"), font: { color: color("text") }, bordercolor: color("line") },
    ...more,
  });
  const axis = (more) => ({ gridcolor: color("grid"), zeroline: false, linecolor: color("line"), automargin: true, ...more });
  const OPTIONS = { responsive: true, displayModeBar: false };

  function upright(step, name, text, dash, level) {
    return {
      shape: { type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: color(name), width: 1.6, dash } },
      annotation: {
        x: step, yref: "paper", y: level, text, showarrow: false, xanchor: "left", xshift: 3,
        font: { color: color(name), size: 11 },
      },
    };
  }

  function draw(place, run) {
    const traces = [];
    const line = (role, name, more) => {
      if (!run.series[role]) return;
      const [x, y] = run.series[role];
      traces.push({ type: "scatter", x, y, name, connectgaps: false, ...more });
    };
    line("proxy", "proxy", { mode: "lines", yaxis: "y2", line: { color: color("proxy"), width: 1.2 }, opacity: 0.75 });
    line("eval", "eval score", { mode: "lines+markers", line: { color: color("eval"), width: 2 }, marker: { size: 4 } });
    const marks = [];
    if (run.turn_step !== null) marks.push(upright(run.turn_step, "muted", "turned", "dot", 0.02));
    run.outcomes.forEach((result, index) => {
      if (result.stop_step === null) return;
      const text = labels[index].replaceAll("<", "&lt;");
      marks.push(upright(result.stop_step, index ? "accent" : result.outcome, text, index ? "dash" : "solid", 0.98 - 0.12 * index));
    });
    const best = run.outcomes[0].best_step;
    if (best !== null && run.series.eval) {
      const at = run.series.eval[0].indexOf(best);
      if (at >= 0) {
        traces.push({
          type: "scatter", mode: "markers", x: [best], y: [run.series.eval[1][at]], name: "best checkpoint",
          marker: { color: color("right"), size: 10, symbol: "circle-open", line: { width: 2 } },
        });
      }
    }
    Plotly.newPlot(place, traces, layout({
      margin: { l: 46, r: 46, t: 8, b: 30 },
      showlegend: false,
      hovermode: "x unified",
      xaxis: axis({ showgrid: false }),
      yaxis: axis({ autorange: run.lower ? "reversed" : true }),
      yaxis2: axis({ overlaying: "y", side: "right", showgrid: false, tickfont: { color: color("proxy") } }),
      shapes: marks.map((mark) => mark.shape),
      annotations: marks.map((mark) => mark.annotation),
    }), OPTIONS);
  }

  // --- the runs

  const visibility = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !entry.target.firstChild) draw(entry.target, entry.target.run);
      else if (!entry.isIntersecting && entry.target.firstChild) Plotly.purge(entry.target);
    }
  }, { rootMargin: "600px" });

  function describe(result, run, label) {
    const action = result.stop_step === null ? "not stopped" : `stopped at step ${number(result.stop_step)} of ${number(run.last_step)}`;
    const best = result.best_step !== null && result.stop_step !== null ? `, best checkpoint at step ${number(result.best_step)}` : "";
    const hours = run.gpu_hours ? `, ${(result.saved * run.gpu_hours).toPrecision(3)} GPU-hours` : "";
    const saved = result.stop_step === null ? "" : `; saves ${percent(result.saved, 0)} of its steps${hours}`;
    return `${label}: ${action}${best}${saved}. ${result.reason}`;
  }

  const isDrawn = (run) => Object.keys(run.series).length > 0;
  const drawn = runs.filter(isDrawn).length;

  function card(run) {
    const article = document.createElement("article");
    article.className = run.outcomes[0].outcome;
    put(article, "h3", run.run);
    put(article, "p", `${run.truth}: ${run.why}`, "muted");
    run.outcomes.forEach((result, index) => {
      const line = put(article, "p");
      put(line, "span", result.outcome, `outcome ${result.outcome}`);
      line.append(` — ${describe(result, run, labels[index])}`);
    });
    if (!isDrawn(run)) {
      if (run.last_step) put(article, "p", `Only the worst ${formatRuns(drawn)} have curves.`, "muted");
      return article;
    }
    const place = put(article, "div", undefined, "drawing");
    place.run = run;
    visibility.observe(place);
    return article;
  }

  let group = null;
  let chosen = runs;
  let put_ = 0;

  const differs = (run) => labels.length > 1 && run.outcomes[0].stop_step !== run.outcomes[1].stop_step;
  const fits = (run, which) => which === null || (which === "differ" ? differs(run) : run.group === which);

  function more() {
    const list = document.getElementById("runs");
    for (const run of chosen.slice(put_, put_ + AT_A_TIME)) list.append(card(run));
    put_ = Math.min(put_ + AT_A_TIME, chosen.length);
    document.getElementById("shown").textContent = chosen.length
      ? `${number(chosen.length)} of ${formatRuns(runs.length)}`
      : "No run fits. Take part of the name away, or choose all.";
  }

  function show() {
    const part = document.getElementById("name").value.toLowerCase();
    chosen = runs.filter((run) => fits(run, group) && run.run.toLowerCase().includes(part));
    for (const place of document.querySelectorAll("#runs .drawing")) {
      visibility.unobserve(place);
      if (place.firstChild) Plotly.purge(place);
    }
    document.getElementById("runs").replaceChildren();
    put_ = 0;
    more();
  }

  function choose(which) {
    group = which;
    for (const button of document.querySelectorAll("#groups button")) {
      button.setAttribute("aria-pressed", String(button.which === which));
    }
    show();
  }

  function chips() {
    const place = document.getElementById("groups");
    const chip = (which, text) => {
      const count = runs.filter((run) => fits(run, which)).length;
      if (!count) return;
      const button = put(place, "button", `${text} ${number(count)}`);
      button.type = "button";
      button.which = which;
      button.addEventListener("click", () => choose(which));
    };
    chip(null, "all");
    GROUPS.forEach((text, index) => chip(index, text));
    chip("differ", "stopped differently");
  }

  head();
  figures();
  chips();
  document.getElementById("filter").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("name").addEventListener("input", show);
  choose(null);
  new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting) && put_ < chosen.length) more();
  }, { rootMargin: "1500px" }).observe(document.getElementById("end"));
  dark.addEventListener("change", show);
})();
