// What each key used: of all keys for an admin, of its own for a client.
//
// All text is set with textContent or append(), so names are never HTML.

import { showTable } from "./rows.js";

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const percent = new Intl.NumberFormat(undefined, { style: "percent" });

const NO_LIMIT = "no limit";
// A column is left out where all keys have its last entry.
const COLUMNS = [
  ["Key", ({ name }) => name],
  ["Batches", ({ today }) => whole.format(today.batches)],
  ["Lines", ({ today }) => whole.format(today.lines)],
  ["Online calls", ({ today }) => whole.format(today.calls), "0"],
  ["Prompt tokens", ({ today }) => whole.format(today.input_tokens)],
  ["Cached prompt tokens", ({ today }) => whole.format(today.cached_tokens), "0"],
  ["Output tokens", ({ today }) => whole.format(today.output_tokens), "0"],
  ["Merged tokens", ({ today }) => whole.format(today.merged_tokens), "0"],
  ["Engine seconds", ({ today }) => whole.format(today.engine_seconds), "0"],
  ["Token limit used", limitText, NO_LIMIT],
  ["Tokens in 7 days", ({ week_tokens }) => whole.format(week_tokens)],
];

function limitText({ today, tokens_per_day: limit }) {
  if (limit === null) return NO_LIMIT;
  // It may have been lowered below what was used, so that a share would say nothing.
  if (today.total_tokens >= limit) return `used up: ${whole.format(limit)}`;
  return `${percent.format(today.total_tokens / limit)} of ${whole.format(limit)}`;
}

/** Show these keys in an element. */
export function showUsage(place, keys) {
  showTable(place, keys, { id: "usage-title", columns: COLUMNS, textColumns: 1 });
}
