// Asks the server for its batches every few seconds and shows them.

import { Chart } from "./charts.js";
import { ACTIVE, Rows, doneOf, nameOf, stateOf } from "./rows.js";

const REFRESH_MS = 3000;
const PATIENCE_MS = 10000;
const KEEP_POINTS_S = 3600;
const KEY_NAME = "sglang-batch-api-key";
const STATES = [
  ["all", "All", () => true],
  ["active", "Not over", (batch) => ACTIVE.has(batch.status)],
  ["completed", "Completed", (batch) => batch.status === "completed"],
  ["failed", "Failed", (batch) => batch.status === "failed"],
  ["cancelled", "Cancelled", (batch) => batch.status === "cancelled"],
  ["expired", "Expired", (batch) => batch.status === "expired"],
];

const whole = new Intl.NumberFormat();
const exact = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", hourCycle: "h23" });
const $ = (id) => document.getElementById(id);

let key = storedKey();
let batches = null;
let points = [];
let answeredAt = null;
let serverAhead = 0; // seconds that the server's clock is ahead of ours
let timer = null;
let refreshing = false;

const rows = new Rows($("rows"));
const throughput = new Chart(
  $("throughput"),
  [
    { name: "prompt, computed", value: (p) => p.computed_tokens_per_s },
    { name: "prompt, cached", value: (p) => p.cached_tokens_per_s },
    { name: "output", value: (p) => p.output_tokens_per_s },
  ],
  {
    title: "Throughput",
    unit: "tokens per second",
    known: () => true,
    empty: "The first values come within ten seconds.",
  },
);
const kv = new Chart(
  $("kv"),
  [
    { name: "left", value: (p) => p.kv.left },
    { name: "right", value: (p) => p.kv.right },
    { name: "online", value: (p) => p.kv.online },
    { name: "shared prefixes", value: (p) => p.kv.shared },
  ],
  {
    title: "KV in use",
    unit: "tokens",
    known: (p) => p.kv !== null,
    limit: (p) => p.kv.capacity,
    empty: "Shown while a batch is in progress, except with SGLang's own scheduler.",
  },
);

// The key -----------------------------------------------------------------------------

function storedKey() {
  try {
    return sessionStorage.getItem(KEY_NAME);
  } catch {
    return null; // storage is switched off: the key lasts until the page is left
  }
}

function setKey(value) {
  key = value;
  try {
    if (value === null) sessionStorage.removeItem(KEY_NAME);
    else sessionStorage.setItem(KEY_NAME, value);
  } catch {
    // See storedKey().
  }
  $("forget-key").hidden = value === null;
}

function ask(path, options = {}) {
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  return fetch(path, { ...options, headers, cache: "no-store" });
}

// Asking and showing ------------------------------------------------------------------

async function refresh() {
  if (refreshing) return;
  refreshing = true;
  clearTimeout(timer);
  try {
    await refreshOnce();
  } catch {
    lost("The server does not answer");
  } finally {
    refreshing = false;
    timer = setTimeout(refresh, REFRESH_MS);
  }
}

async function refreshOnce() {
  if (document.hidden && batches !== null) return;
  const after = points.at(-1)?.time ?? 0;
  const answer = await ask(`batches/data?after=${after}`, {
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (answer.status === 401 || answer.status === 403) {
    askForKey();
    return;
  }
  if (!answer.ok) {
    lost(`The server answers with an error (${answer.status})`);
    return;
  }
  const data = await answer.json();
  answeredAt = Date.now();
  serverAhead = data.now - answeredAt / 1000;
  $("key-form").hidden = true;
  setServer("live", "Live");
  addPoints(data.points);
  announceChanges(data.batches);
  batches = data.batches;
  showBatches();
}

function setServer(state, text) {
  // Only what changes is set: this is read aloud.
  if ($("server").textContent !== text) $("server").textContent = text;
  $("server").className = state;
}

function lost(text) {
  const since = answeredAt === null ? "" : `; what you see is from ${exact.format(answeredAt)}`;
  setServer("lost", `${text}${since}. Trying again.`);
}

function askForKey() {
  setServer("lost", key === null ? "An API key is needed" : "The server refuses this API key");
  $("key-form").hidden = false;
}

function addPoints(added) {
  if (!added.length) return;
  const from = added.at(-1).time - KEEP_POINTS_S;
  points = points.filter((p) => p.time < added[0].time && p.time > from).concat(added);
  throughput.update(points);
  kv.update(points);
}

function announceChanges(newer) {
  const before = new Map((batches ?? []).map((batch) => [batch.id, batch.status]));
  const changed = newer.filter(
    ({ id, status }) => batches !== null && before.get(id) !== status,
  );
  const texts = changed.map((batch) => `${nameOf(batch)}: ${stateOf(batch)}.`);
  if (texts.length) $("announcements").textContent = texts.join(" ");
}

function showBatches() {
  if (batches === null) return;
  for (const [value, label, fits] of STATES) {
    const option = $("filter").querySelector(`[value=${value}]`);
    const text = `${label} (${batches.filter(fits).length})`;
    if (option.textContent !== text) option.textContent = text;
  }
  const [value, label, fits] = STATES.find(([value]) => value === $("filter").value);
  const shown = batches.filter(fits);
  rows.show(shown, Date.now() / 1000 + serverAhead);
  document.querySelector("table").hidden = !shown.length;
  $("no-batch").hidden = batches.length > 0;
  $("none-in-state").hidden = shown.length > 0 || !batches.length;
  $("none-in-state").textContent =
    value === "active" ? "All batches are over." : `No batch is ${label.toLowerCase()}.`;
  showSummary();
}

function showSummary() {
  const active = batches.filter((batch) => ACTIVE.has(batch.status));
  const left = active.reduce(
    (sum, batch) => sum + batch.request_counts.total - doneOf(batch),
    0,
  );
  const running = points.at(-1)?.kv?.running;
  const parts = [];
  if (active.length) {
    parts.push(`${active.length} not over`, `${whole.format(left)} lines left`);
    if (running !== undefined) parts.push(`${whole.format(running)} requests in the engine`);
  }
  $("summary").textContent = parts.join(" \u00b7 ");
}

// What people do ----------------------------------------------------------------------

function complain(text) {
  $("message").textContent = text;
  $("message").hidden = text === "";
}

async function errorText(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answers with an error (${answer.status}).`;
  }
}

function confirmCancel(batch) {
  const { total } = batch.request_counts;
  const answered = total
    ? `${whole.format(doneOf(batch))} of ${whole.format(total)} lines are answered and stay; the others will not run.`
    : "No line was answered yet.";
  $("confirm-text").textContent = `${nameOf(batch)}: ${answered}`;
  $("confirm").returnValue = "keep";
  $("confirm").showModal();
  $("confirm").onclose = () => {
    if ($("confirm").returnValue === "cancel") cancel(batch);
  };
}

async function cancel(batch) {
  try {
    const answer = await ask(`${batch.path}/cancel`, { method: "POST" });
    if (!answer.ok) complain(await errorText(answer));
  } catch {
    complain("The server does not answer. The batch goes on.");
  }
  await refresh();
}

/** A link cannot carry the key: the file is fetched and then handed over. */
async function download(link) {
  try {
    const answer = await ask(link.getAttribute("href"));
    if (!answer.ok) {
      complain(await errorText(answer));
      return;
    }
    const url = URL.createObjectURL(await answer.blob());
    const hand = document.createElement("a");
    hand.href = url;
    hand.download = link.download;
    hand.click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch {
    complain("The download broke off: the server does not answer.");
  }
}

function start() {
  for (const [value, label] of STATES) $("filter").append(new Option(label, value));
  $("filter").addEventListener("change", showBatches);
  $("how-to").textContent = [
    `curl ${location.origin}/v1/files -F purpose=batch -F file=@requests.jsonl`,
    `curl ${location.origin}/v1/batches -H 'Content-Type: application/json' \\`,
    `  -d '{"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}'`,
  ].join("\n");
  $("rows").addEventListener("click", (event) => {
    const target = event.target.closest("[data-action]");
    if (target === null) return;
    complain("");
    const batch = rows.batch(target.closest("tr").dataset.id);
    if (target.dataset.action === "cancel") confirmCancel(batch);
    if (target.matches("a") && key !== null) {
      event.preventDefault();
      download(target);
    }
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey($("key").value);
    $("key").value = "";
    refresh();
  });
  $("forget-key").addEventListener("click", () => {
    setKey(null);
    batches = null;
    points = [];
    location.reload();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) refresh();
  });
  $("forget-key").hidden = key === null;
  refresh();
}

start();
