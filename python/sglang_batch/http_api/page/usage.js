// What each key used: of all keys for an admin, of its own for a client.
//
// All text is set with textContent or append(), so names are never HTML.

import { make } from "./rows.js";

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const percent = new Intl.NumberFormat(undefined, { style: "percent" });

const COLUMNS = [
  ["Key", ({ name }) => name],
  ["Batches", ({ today }) => whole.format(today.batches)],
  ["Lines", ({ today }) => whole.format(today.lines)],
  ["Online calls", ({ today }) => whole.format(today.calls)],
  ["Prompt tokens", ({ today }) => whole.format(today.input_tokens)],
  ["Cached prompt tokens", ({ today }) => whole.format(today.cached_tokens)],
  ["Output tokens", ({ today }) => whole.format(today.output_tokens)],
  ["Token limit used", limitText],
  ["Tokens in 7 days", ({ week_tokens }) => whole.format(week_tokens)],
];

function limitText({ today, tokens_per_day: limit }) {
  if (limit === null) return "no limit";
  const share = limit ? today.total_tokens / limit : 1;
  return `${percent.format(share)} of ${whole.format(limit)}`;
}

/** Show these keys in a section, or hide it if there are none. */
export function showUsage(section, keys) {
  section.hidden = !keys.length;
  if (!keys.length) return;
  const heads = COLUMNS.map(([label], i) =>
    make("th", { role: "columnheader", scope: "col", class: i ? "number" : null }, label),
  );
  const rows = keys.map((key) => {
    const cells = COLUMNS.map(([label, text], i) =>
      make(
        "td",
        { role: i ? "cell" : "rowheader", class: i ? "number" : null, "data-label": label },
        make("div", {}, text(key)),
      ),
    );
    return make("tr", { role: "row" }, ...cells);
  });
  const shown = make(
    "div",
    {},
    make(
      "div",
      { class: "list-head" },
      make("h2", { id: "usage-title" }, "Usage by key"),
      make("p", { class: "small" }, "Today, in UTC"),
    ),
    make(
      "table",
      { role: "table", "aria-labelledby": "usage-title" },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads)),
      make("tbody", { role: "rowgroup" }, ...rows),
    ),
  );
  // Replaced only if it changed, so that a selection is kept.
  if (section.innerHTML !== shown.innerHTML) section.replaceChildren(...shown.childNodes);
}
