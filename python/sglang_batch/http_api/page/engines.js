// The servers whose engines run the batches, if this server has no engine of its own.
//
// All text is set with append(), so names and reasons are never HTML.

import { make } from "./rows.js";

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const percent = new Intl.NumberFormat(undefined, { style: "percent" });

const COLUMNS = [
  ["Engine", ({ name }) => name],
  ["State", stateText],
  ["Lines", ({ lines }) => whole.format(lines)],
  ["Running", ({ running }) => whole.format(running)],
  ["Answered", ({ answered }) => whole.format(answered)],
  ["Tokens/s", ({ tokens_per_s: rate }) => (rate === null ? "" : whole.format(rate))],
  ["Tokens", ({ tokens }) => whole.format(tokens)],
  ["Cached", ({ answered, cached_share }) => (answered ? percent.format(cached_share) : "")],
  ["Times lost", ({ losses }) => whole.format(losses)],
];
const TEXT_COLUMNS = new Set(["Engine", "State"]);

function stateText({ status, reason }) {
  if (status === "running" || !reason) return status;
  return `${status}${status === "starting" ? " again" : ""}: ${reason}`;
}

/** Show these engines in a section, or hide it if there are none. */
export function showEngines(section, engines) {
  section.hidden = !engines.length;
  if (!engines.length) return;
  const running = engines.filter(({ status }) => status === "running").length;
  const heads = COLUMNS.map(([label]) =>
    make("th", { role: "columnheader", scope: "col", class: classOf(label) }, label),
  );
  const rows = engines.map((engine) => {
    const cells = COLUMNS.map(([label, text], i) =>
      make(
        "td",
        { role: i ? "cell" : "rowheader", class: classOf(label), "data-label": label },
        make("div", {}, text(engine)),
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
      make("h2", { id: "engines-title" }, "Engines"),
      make("p", { class: "small" }, `${running} of ${engines.length} run`),
    ),
    make(
      "table",
      { role: "table", "aria-labelledby": "engines-title" },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads)),
      make("tbody", { role: "rowgroup" }, ...rows),
    ),
  );
  // Replaced only if it changed, so that a selection is kept.
  if (section.innerHTML !== shown.innerHTML) section.replaceChildren(...shown.childNodes);
}

function classOf(label) {
  return TEXT_COLUMNS.has(label) ? null : "number";
}
