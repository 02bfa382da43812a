// Keyboard commands: single keys, their list, the command palette; and the toast, which says why a key did nothing.

const SEARCH_AFTER_MS = 150;
const MOST_FOUND = 8;
const SWITCH = "evalstop-single-keys";

const keys = document.getElementById("keys");
const palette = document.getElementById("palette");
const search = palette.querySelector("input");
const list = palette.querySelector("ul");
const toast = document.getElementById("toast");
const pages = [...keys.querySelectorAll("a[data-key]")];
let awaitsPage = false; // "g" was pressed

// --- Single keys. They can be switched off, since speech input triggers them by accident (WCAG 2.1.4). ---

const keysSwitch = keys.querySelector("input");
keysSwitch.checked = localStorage.getItem(SWITCH) !== "off";
keysSwitch.addEventListener("change", () => localStorage.setItem(SWITCH, keysSwitch.checked ? "on" : "off"));

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]") || event.altKey || event.isComposing) return;
  if (event.ctrlKey || event.metaKey) {
    if (event.key.toLowerCase() !== "k" || event.shiftKey) return;
    openPalette();
  } else if (isTypedInto(event.target)) {
    if (event.key === "Escape" && event.target.value === "") event.target.blur(); // back to the single keys
    return;
  } else if (!keysSwitch.checked || !pressKey(event.key)) return;
  event.preventDefault();
});

// A field of a closed dialog keeps the focus until the next frame is drawn.
function isTypedInto(element) {
  return element.matches("input, textarea, select") && !element.closest("dialog:not([open])");
}

// Executes the command of a key; returns whether it has one.
function pressKey(key) {
  const page = awaitsPage && pages.find((link) => link.dataset.key === key);
  awaitsPage = key === "g" && !awaitsPage;
  if (page) location.assign(page.href);
  else if (key === "?") keys.showModal();
  else if (key === "j" || key === "k") return moveFocus(key === "j" ? 1 : -1);
  else if (key === "/") (document.getElementById("search") || { focus: openPalette }).focus();
  else if (key === "v") openVeto();
  else if (key === "Escape" && !toast.hidden) toast.hidden = true;
  else return awaitsPage;
  return true;
}

// Focuses the link of the next or the previous row, counted from the row that contains the focus.
function moveFocus(by) {
  const rows = [...document.querySelectorAll("main .row-link, #queue .what > a")];
  const row = document.activeElement.closest("tr, li");
  const at = rows.findIndex((link) => link === document.activeElement || (row && row.contains(link)));
  const next = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by];
  if (next) next.focus();
  return rows.length > 0;
}

function openVeto() {
  const row = document.activeElement.closest("#queue li") || document.querySelector(".controls");
  const form = row && row.querySelector('details[id^="act-veto"]');
  if (form) openForm(form);
  else showToast(document.querySelector(".controls") ? "There is no stop to veto." : "Move to a stop first, by j and k.");
}

function openForm(details) {
  details.open = true;
  details.querySelector("form :is(input, textarea, select):not([type=hidden])").focus();
}

// --- The command palette: pages, what can be done on this page, and runs by name. ---

const commands = [
  ...pages.map((link) => ({ text: link.textContent, kind: "page", go: () => location.assign(link.href) })),
  ...[...document.querySelectorAll(".controls .act")].map((form) => ({ text: form.querySelector("summary").textContent, kind: "this run", go: () => openForm(document.getElementById(form.id) || form) })),
  { text: "Keys", kind: "help", go: () => keys.showModal() },
];
let shown = [];
let chosen = 0;
let asked = null;

function openPalette() {
  search.value = "";
  show(commands);
  palette.showModal();
}

search.addEventListener("input", () => {
  const text = search.value.trim();
  show(commands.filter((command) => command.text.toLowerCase().includes(text.toLowerCase())));
  clearTimeout(asked);
  if (text) asked = setTimeout(() => findRuns(text), SEARCH_AFTER_MS);
});

// Searches runs by name and takes the links from the HTML of the list.
async function findRuns(text) {
  const response = await fetch(new URL(`../../runs?name=${encodeURIComponent(text)}`, import.meta.url), { redirect: "manual" });
  if (!response.ok || search.value.trim() !== text) return;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  if (search.value.trim() !== text) return;
  const found = [...page.querySelectorAll(".runs .row-link")].slice(0, MOST_FOUND);
  const runs = found.map((link) => ({ text: link.textContent, kind: "run", go: () => location.assign(link.getAttribute("href")) }));
  show([...shown.filter((command) => command.kind !== "run"), ...runs]);
}

function show(found) {
  shown = found;
  list.replaceChildren(
    ...found.map((command, i) => {
      const option = document.createElement("li");
      const [text, kind] = [document.createElement("bdi"), document.createElement("small")];
      text.textContent = command.text;
      kind.textContent = command.kind;
      option.append(text, kind);
      option.id = `option-${i}`;
      option.setAttribute("role", "option");
      option.addEventListener("click", () => run(i));
      return option;
    }),
  );
  palette.querySelector("[role=status]").textContent = found.length ? "" : "Nothing found";
  choose(0);
}

function choose(i) {
  chosen = Math.max(0, Math.min(i, shown.length - 1));
  [...list.children].forEach((option, at) => option.setAttribute("aria-selected", String(at === chosen)));
  search.setAttribute("aria-activedescendant", shown.length ? `option-${chosen}` : "");
  list.children[chosen]?.scrollIntoView({ block: "nearest" });
}

function run(i) {
  palette.close();
  shown[i]?.go();
}

search.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") choose(chosen + 1);
  else if (event.key === "ArrowUp") choose(chosen - 1);
  else if (event.key === "Enter") run(chosen);
  else return;
  event.preventDefault();
});

// A click beside a dialog closes it.
for (const dialog of [keys, palette]) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}

// --- The toast. ---

function showToast(text) {
  toast.querySelector("p").textContent = text;
  toast.hidden = false;
}

toast.querySelector("[data-close]").addEventListener("click", () => (toast.hidden = true));
