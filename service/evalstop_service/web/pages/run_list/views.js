// Saved views: names for the addresses of the list, kept in this browser.

const KEY = "evalstop.views";
const place = document.getElementById("views"); // missing before the first run
const read = () => JSON.parse(localStorage.getItem(KEY) ?? "{}");

function change(edit) {
  const views = read();
  edit(views);
  localStorage.setItem(KEY, JSON.stringify(views));
  show();
}

function show() {
  const items = Object.entries(read()).map(([name, query]) => {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = `${location.pathname}?${query}`;
    link.textContent = name;
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "quiet";
    remove.textContent = "Remove";
    remove.setAttribute("aria-label", `Remove the view ${name}`);
    remove.addEventListener("click", () => change((views) => delete views[name]));
    item.append(link, " ", remove);
    return item;
  });
  place.querySelector("ul").replaceChildren(...items);
}

if (place) {
  const field = place.querySelector("input");
  const save = () => {
    const name = field.value.trim();
    const query = new URLSearchParams(location.search);
    for (const page of ["cursor", "skip"]) query.delete(page);
    if (name) change((views) => (views[name] = query.toString()));
    field.value = "";
  };
  place.hidden = false;
  place.querySelector("label + button").addEventListener("click", save);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();  // Enter would send the filters
    save();
  });
  show();
}
