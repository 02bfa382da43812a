// What another policy or threshold would have done to this run: the service replays the run for each choice.

import { fetchSameOrigin, onChange, oneAtATime } from "./live.js";

// The policy that is tried, the step at which it would have stopped the run, and its threshold if it is a probability.
export const tried = { policy: "", step: null, probability: null };

const main = document.querySelector("main");
const form = document.getElementById("what-if"); // missing for a run without observations
const listeners = [];
let stopAt = null;

// Calls `redraw` whenever `tried` has changed.
export function onTried(redraw) {
  listeners.push(redraw);
}

const ask = oneAtATime(async () => {
  try {
    show(tried.policy ? await fetchAnswer() : { sentence: "", reason: "", step: null, threshold: null });
  } catch (error) {
    document.getElementById("what-if-answer").textContent = "The service could not replay it. Choose again in a moment.";
  }
});

async function fetchAnswer() {
  const url = new URL(main.dataset.whatIf, location.href);
  url.searchParams.set("policy", tried.policy);
  if (stopAt !== null) url.searchParams.set("stop_at", stopAt);
  return (await fetchSameOrigin(url)).json();
}

function show(answer) {
  const threshold = answer.threshold;
  document.getElementById("what-if-answer").textContent = answer.reason ? `${answer.sentence} (${answer.reason})` : answer.sentence;
  const label = document.getElementById("what-if-threshold");
  label.hidden = threshold === null;
  if (threshold) {
    label.querySelector("span").textContent = `${threshold.member} stops at ${Number(threshold.stop_at.toPrecision(3))}`;
    if (stopAt === null) {
      const slider = document.getElementById("what-if-stop-at");
      [slider.min, slider.max, slider.step] = [threshold.lowest, threshold.highest, threshold.increment];
      slider.value = threshold.stop_at;
    }
  }
  tried.step = answer.step;
  tried.probability = threshold && threshold.kind === "posterior" ? threshold.stop_at : null;
  for (const redraw of listeners) redraw();
}

if (form) {
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("what-if-policy").addEventListener("change", (event) => {
    tried.policy = event.target.value;
    stopAt = null;
    ask();
  });
  document.getElementById("what-if-stop-at").addEventListener("input", (event) => {
    stopAt = event.target.value;
    ask();
  });
  onChange(() => (tried.policy ? ask() : undefined));
}
