// Labeling: r, w, u and n press their buttons, and a click on a curve sets the step of the turn.

const SWITCHED = "evalstop-single-keys"; // "off" if switched off in the list of keys

// On the window, after the page's other keys, so that no key is handled twice.
window.addEventListener("keydown", (event) => {
  const busy = event.defaultPrevented || event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input") || document.querySelector("dialog[open]");
  const pressed = busy || localStorage.getItem(SWITCHED) === "off" ? null : document.querySelector(`[data-press="${CSS.escape(event.key)}"]`);
  if (!pressed) return;
  event.preventDefault();
  pressed.click();
});

document.querySelector(".curves")?.addEventListener("click", (event) => {
  const curve = event.target.closest("svg");
  if (!curve) return;
  const { left, width } = curve.getBoundingClientRect();
  const [first, last] = [Number(curve.dataset.first), Number(curve.dataset.last)];
  document.getElementById("turn-step").value = String(Math.round(first + ((event.clientX - left) / width) * (last - first)));
});
