// Live updates: follows the server's events and replaces the parts of the page whose HTML has changed.

import { showTimes } from "./times.js";

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

export async function fetchSameOrigin(url) {
  const response = await fetch(url, { redirect: "manual", cache: "no-store" });
  if (response.type === "opaqueredirect" || response.status === 404) {
    location.reload(); // signed out, or not found
    throw new Error("this page is no longer available");
  }
  if (!response.ok) throw new Error(`${url} answered ${response.status}`);
  return response;
}

// Follows the events at <main data-events data-revision> while the page is visible.
export function live() {
  for (const [name, part] of parts(document)) rendered.set(name, part.innerHTML);
  document.addEventListener("visibilitychange", () => (document.hidden ? leave() : follow()));
  window.addEventListener("pagehide", leave);
  window.addEventListener("pageshow", (event) => event.persisted && follow());
  follow();
}

// --- Parts. ---

function parts(root) {
  return new Map([...root.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
}

async function swapParts() {
  const response = await fetchSameOrigin(location.href);
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
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

// --- One stream, and only while the page is visible: a browser opens at most six connections to a host. ---

let stream = null;
let retry = 0;

function follow() {
  if (stream || document.hidden) return;
  const url = new URL(main.dataset.events, location.href);
  url.searchParams.set("seen", main.dataset.revision);
  stream = new EventSource(url);
  stream.addEventListener("open", () => showLiveState("on", "Live"));
  stream.addEventListener("changed", refresh);
  stream.addEventListener("gone", () => location.reload());
  stream.addEventListener("error", () => {
    showLiveState("lost", "Reconnecting");
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

function showLiveState(state, text) {
  const sign = document.querySelector(".live");
  sign.hidden = false;
  sign.dataset.live = state;
  sign.querySelector("span").textContent = text;
}

const refresh = oneAtATime(async () => {
  try {
    const startedAt = performance.now();
    await Promise.all([swapParts(), ...listeners.map((load) => load())]);
    // Wait as long as the page took to load, so that it uses at most half of the time.
    await new Promise((resolve) => setTimeout(resolve, performance.now() - startedAt));
  } catch (error) {
    showLiveState("lost", "Reconnecting");
    setTimeout(refresh, RETRY_MS);
  }
});
