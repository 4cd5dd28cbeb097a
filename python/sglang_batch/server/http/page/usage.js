// What each key used: of all keys for an admin, of its own for a client.
//
// All text is set with textContent or append(), so names are never HTML.

import { showTable } from "./rows.js";

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
  ["Merged tokens", ({ today }) => whole.format(today.merged_tokens)],
  ["Engine seconds", ({ today }) => whole.format(today.engine_seconds)],
  ["Token limit used", limitText],
  ["Tokens in 7 days", ({ week_tokens }) => whole.format(week_tokens)],
];

function limitText({ today, tokens_per_day: limit }) {
  if (limit === null) return "no limit";
  // It may have been lowered below what was used, so that a share would say nothing.
  if (today.total_tokens >= limit) return `used up: ${whole.format(limit)}`;
  return `${percent.format(today.total_tokens / limit)} of ${whole.format(limit)}`;
}

/** Show these keys in a section, or hide it if there are none. */
export function showUsage(section, keys) {
  showTable(section, keys, {
    id: "usage-title",
    title: "Usage by key",
    note: "Today, in UTC",
    columns: COLUMNS,
    textColumns: 1,
  });
}
