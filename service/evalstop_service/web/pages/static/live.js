// Live updates: asks the server whether the page has changed, and replaces the parts whose HTML has.

import { showTimes } from "./times.js";

const POLL_MS = 2_000;
const RETRY_MS = 10_000;

const main = document.querySelector("main");
const rendered = new Map();
const listeners = [];

// Calls `load` whenever the page has changed, in parallel with replacing its parts.
export function onChange(load) {
  listeners.push(load);
}

// A function that does `work`, never twice at the same time: calls meanwhile lead to one more.
export function oneAtATime(work) {
  let [working, again] = [false, false];
  return async () => {
    again = true;
    if (working) return;
    working = true;
    while (again) {
      again = false;
      await work();
    }
    working = false;
  };
}

export async function fetchSameOrigin(url, headers = {}) {
  const response = await fetch(url, { redirect: "manual", cache: "no-store", headers });
  if (response.type === "opaqueredirect" || response.status === 404) {
    location.reload(); // signed out, or not found
    throw new Error("this page is no longer available");
  }
  if (!response.ok) throw new Error(`${url} answered ${response.status}`);
  return response;
}

// Keeps the page up to date while it is visible: <main data-revision> says what it shows.
export function live() {
  for (const [name, part] of parts(document)) rendered.set(name, part.innerHTML);
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(next) : poll()));
  poll();
}

// --- Parts. ---

function parts(root) {
  return new Map([...root.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
}

function swapParts(fresh) {
  const present = parts(document);
  for (const [name, part] of parts(fresh)) {
    const html = part.innerHTML;
    const old = present.get(name);
    if (!old) return location.reload(); // a page that had nothing to show has its first data
    if (rendered.get(name) === html) continue;
    rendered.set(name, html);
    swap(old, part);
  }
  main.dataset.revision = fresh.querySelector("main").dataset.revision;
}

function swap(old, part) {
  const place = old.contains(document.activeElement) ? focusable(old).indexOf(document.activeElement) : -1;
  const [href, id] = ["href", "id"].map((name) => document.activeElement.getAttribute(name));
  const open = [...old.querySelectorAll("details[id][open]")].map((details) => details.id);
  const filledIn = new Map(fields(old).map((field) => [field.id, field]));
  old.replaceChildren(...part.childNodes);
  showTimes(old);
  for (const id of open) old.querySelector(`#${CSS.escape(id)}`)?.setAttribute("open", "");
  for (const field of fields(old)) {
    const before = filledIn.get(field.id);
    if (before) [field.value, field.checked] = [before.value, before.checked];
  }
  if (place < 0) return;
  // The same link or checkbox, whose row may have moved.
  const same = id ? document.getElementById(id) : href && old.querySelector(`a[href="${CSS.escape(href)}"]`);
  (same || focusable(old)[place])?.focus({ preventScroll: true });
}

function fields(root) {
  return [...root.querySelectorAll("input[id], textarea[id], select[id]")].filter((field) => field.type !== "radio");
}

function focusable(root) {
  return [...root.querySelectorAll("a, button, input, select, textarea, summary, [tabindex]")];
}

// --- Polling. ---

let next = 0;

const poll = oneAtATime(async () => {
  clearTimeout(next);
  let wait = POLL_MS;
  try {
    const startedAt = performance.now();
    const response = await fetchSameOrigin(location.href, { "X-Seen-Revision": main.dataset.revision });
    if (response.status !== 204) {
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      await Promise.all([swapParts(fresh), ...listeners.map((load) => load())]);
    }
    showLiveState("on", "Live");
    wait = Math.max(POLL_MS, 9 * (performance.now() - startedAt)); // each open page takes a tenth of a core at most
  } catch (error) {
    showLiveState("lost", "Reconnecting");
    wait = RETRY_MS;
  }
  if (!document.hidden) next = setTimeout(poll, wait);
});

function showLiveState(state, text) {
  const sign = document.querySelector(".live");
  sign.hidden = false;
  sign.dataset.live = state;
  sign.querySelector("span").textContent = text;
}
