// What another policy would have done to this run: the service replays the run for each choice.

import { fetchSameOrigin, onChange, oneAtATime } from "./live.js";

// The policy that is tried, and the step at which it would have stopped the run.
export const tried = { policy: "", step: null };

const main = document.querySelector("main");
const form = document.getElementById("what-if"); // missing for a run without observations
const listeners = [];

// Calls `redraw` whenever `tried` has changed.
export function onTried(redraw) {
  listeners.push(redraw);
}

const ask = oneAtATime(async () => {
  try {
    show(tried.policy ? await fetchAnswer() : { sentence: "", reason: "", step: null });
  } catch (error) {
    document.getElementById("what-if-answer").textContent = "The service could not replay it. Choose again in a moment.";
  }
});

async function fetchAnswer() {
  const url = new URL(main.dataset.whatIf, location.href);
  url.searchParams.set("policy", tried.policy);
  return (await fetchSameOrigin(url)).json();
}

function show(answer) {
  document.getElementById("what-if-answer").textContent = answer.reason ? `${answer.sentence} (${answer.reason})` : answer.sentence;
  tried.step = answer.step;
  for (const redraw of listeners) redraw();
}

if (form) {
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("what-if-policy").addEventListener("change", (event) => {
    tried.policy = event.target.value;
    ask();
  });
  onChange(() => (tried.policy ? ask() : undefined));
}
