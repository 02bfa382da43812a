// On every page: times, live updates, copy buttons and filters.

import { live } from "./live.js";
import { showTimes } from "./times.js";

// MLflow's clients print links such as /mlflow/#/experiments/0/runs/ID, which keep their end when they are redirected.
const printed = /^#\/experiments\/.*\/runs\/([0-9a-f]{32})/.exec(location.hash);
if (printed) location.replace(new URL(`../../runs/${printed[1]}`, import.meta.url));

showTimes(document);
setInterval(() => showTimes(document), 10_000);
if (document.querySelector("main[data-revision]")) live();

// On a phone, rows of links are scrolled to the current one.
for (const here of document.querySelectorAll(".nav [aria-current], .filter [aria-current]")) {
  const row = here.parentElement;
  row.scrollLeft = here.offsetLeft + here.offsetWidth - row.offsetLeft - row.clientWidth;
}

document.addEventListener("click", async (event) => {
  const copy = event.target.closest("[data-copy]");
  if (copy) await copyText(copy);
});

async function copyText(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
    button.dataset.copied = "";
  } catch {
    // The clipboard is available for https and localhost only: select the text for Ctrl+C.
    const code = button.parentElement.querySelector("code");
    if (code) getSelection().selectAllChildren(code);
    button.textContent = "Press Ctrl+C";
  }
  setTimeout(() => {
    button.textContent = "Copy";
    delete button.dataset.copied;
  }, 2000);
}

// Filters are applied when they are changed; without JavaScript the form has a button.
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
});

// The list of runs: refuses to compare too few or too many runs.
document.addEventListener("submit", (event) => {
  const form = event.target.closest("#compare");
  if (!form) return;
  const { least, most } = form.dataset;
  const ticked = new FormData(form).getAll("run").length;
  if (Number(least) <= ticked && ticked <= Number(most)) return;
  event.preventDefault();
  const status = form.querySelector("[role=status]");
  status.textContent = `Choose ${least} to ${most} runs in the list, not ${ticked}.`;
  status.className = "problem small";
});
