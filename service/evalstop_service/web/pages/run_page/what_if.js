// What other policies would have done to this run: the service replays the run for each choice.

import { fetchSameOrigin, onChange, oneAtATime } from "./live.js";

// The policies that are tried, and the step at which each would have stopped the run, or null.
export const tried = [];

const main = document.querySelector("main");
const form = document.getElementById("what-if"); // missing for a run without observations
const listeners = [];

// Calls `redraw` whenever `tried` has changed.
export function onTried(redraw) {
  listeners.push(redraw);
}

const ask = oneAtATime(async () => {
  const policies = [...form.querySelectorAll(":checked")].map((box) => box.value);
  const answers = await Promise.all(policies.map(fetchAnswer));
  tried.splice(0, Infinity, ...answers);
  const items = answers.map(({ sentence, reason }) => {
    const item = document.createElement("li");
    item.textContent = reason ? `${sentence} (${reason})` : sentence;
    return item;
  });
  document.getElementById("what-if-answers").replaceChildren(...items);
  for (const redraw of listeners) redraw();
});

async function fetchAnswer(policy) {
  const url = new URL(main.dataset.whatIf, location.href);
  url.searchParams.set("policy", policy);
  try {
    return { policy, ...(await (await fetchSameOrigin(url)).json()) };
  } catch {
    return { policy, step: null, sentence: `The service could not replay ${policy}. Choose it again in a moment.` };
  }
}

if (form) {
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", ask);
  onChange(() => (tried.length ? ask() : undefined));
}
