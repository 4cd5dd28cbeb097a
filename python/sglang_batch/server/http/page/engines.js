// The servers whose engines run the batches, if this server has no engine of its own.
//
// All text is set with append(), so names and reasons are never HTML.

import { showTable } from "./rows.js";

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
  ["Times lost", ({ losses }) => whole.format(losses), "0"],
];

function stateText({ status, reason }) {
  if (status === "running" || !reason) return status;
  return `${status}${status === "starting" ? " again" : ""}: ${reason}`;
}

/** Show these engines in a section, or hide it if there are none. */
export function showEngines(section, engines) {
  const running = engines.filter(({ status }) => status === "running").length;
  showTable(section, engines, {
    id: "engines-title",
    title: "Engines",
    note: `${running} of ${engines.length} run`,
    columns: COLUMNS,
    textColumns: 2,
  });
}
