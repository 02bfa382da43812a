// Times in the viewer's time zone, with UTC on hover; `data-time="age"` is shown as an age.

const AGES = [["second", 60], ["minute", 60], ["hour", 24], ["day", 30], ["month", 12], ["year", Infinity]];
const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
const absolute = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });

export function showTimes(root) {
  for (const element of root.querySelectorAll("time[data-time]")) {
    const at = new Date(element.dateTime);
    const text = element.dataset.time === "age" ? age(at) : absolute.format(at);
    if (element.textContent !== text) element.textContent = text;
    element.title = `${utc(at)}\n${exact.format(at)}`;
  }
}

function age(at) {
  let distance = (at - Date.now()) / 1000;
  if (Math.abs(distance) < 5) return "just now";
  for (const [unit, length] of AGES) {
    if (Math.abs(distance) < length) return relative.format(Math.round(distance), unit);
    distance /= length;
  }
  return "";
}

function utc(at) {
  return `${at.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}
