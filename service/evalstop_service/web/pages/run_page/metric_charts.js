// The small charts of a run's other metrics: loaded when they come into view, and again when the run changes.

import { fetchSameOrigin, onChange } from "./live.js";

const place = document.getElementById("metric-charts");
const section = place.closest("section");
let seen = false;
let shown = "";

async function load() {
  if (!seen && !section.hidden) return;
  const response = await fetchSameOrigin(place.dataset.charts);
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("metric-charts");
  if (fresh.innerHTML === shown) return;  // a link that is replaced between press and release is not clicked
  shown = fresh.innerHTML;
  section.hidden = !fresh.querySelector("li");
  place.replaceChildren(...fresh.childNodes);
}

new IntersectionObserver((entries, observer) => {
  if (!entries.some((entry) => entry.isIntersecting)) return;
  observer.disconnect();
  seen = true;
  load();
}).observe(place);
onChange(load);
