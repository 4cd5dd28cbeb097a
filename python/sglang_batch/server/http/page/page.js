// Asks the server for its batches every few seconds and shows them.

import { ask, errorText, hasKey, setKey } from "./api.js";
import { Chart } from "./charts.js";
import { showEngines } from "./engines.js";
import { ACTIVE, Rows, doneOf, nameOf, stateOf } from "./rows.js";
import { SubmitDialog } from "./submit.js";
import { showTree } from "./tree.js";
import { showUsage } from "./usage.js";

const REFRESH_MS = 3000;
const TYPING_MS = 300;
const PATIENCE_MS = 10000;
const KEEP_POINTS_S = 3600;
const STATES = [
  ["all", "All", () => true],
  ["active", "Active", (batch) => ACTIVE.has(batch.status)],
  ["completed", "Completed", (batch) => batch.status === "completed"],
  ["failed", "Failed", (batch) => batch.status === "failed"],
  ["cancelled", "Cancelled", (batch) => batch.status === "cancelled"],
  ["expired", "Expired", (batch) => batch.status === "expired"],
];

const whole = new Intl.NumberFormat();
const exact = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", hourCycle: "h23" });
const $ = (id) => document.getElementById(id);

let batches = null;
let points = [];
let answeredAt = null;
let serverAhead = 0; // seconds that the server's clock is ahead of ours
let timer = null;
let refreshing = false;
let refreshAgain = false; // the search changed during a refresh
let searched = ""; // the text that the batches were searched for
let started = null; // id of a batch that gets the focus once it is shown
let endpoints = [];
let maxBatches = 0;

const rows = new Rows($("rows"));
const rate = { unit: "tokens per second", known: () => true };
const charts = [
  new Chart(
    $("output"),
    () => [{ name: "generated", color: "series-3", value: (p) => p.output_tokens_per_s }],
    { ...rate, title: "Output" },
  ),
  new Chart(
    $("prompt"),
    () => [
      { name: "computed", color: "series-1", value: (p) => p.computed_tokens_per_s },
      { name: "from the cache", color: "series-2", value: (p) => p.cached_tokens_per_s },
    ],
    { ...rate, title: "Prompts" },
  ),
  new Chart($("kv"), kvSeries, {
    title: "KV cache in use",
    unit: "tokens",
    known: (p) => p.kv !== null,
    limit: (p) => p.kv.capacity,
  }),
];

/** Lines are told apart by side only under policies that mix the two. */
function kvSeries(points) {
  const mixed = points.some((p) => p.kv?.right);
  const lines = mixed
    ? [
        {
          name: "prompt-heavy lines",
          hint: "Lines that spend more time on their prompts than on their answers",
          color: "series-1",
          value: (p) => p.kv.left,
        },
        {
          name: "output-heavy lines",
          hint: "Lines that spend more time on their answers than on their prompts",
          color: "series-3",
          value: (p) => p.kv.right,
        },
      ]
    : [{ name: "lines of batches", color: "series-1", value: (p) => p.kv.left }];
  return [
    ...lines,
    { name: "online requests", color: "series-5", value: (p) => p.kv.online },
    {
      name: "shared prefixes",
      hint: "The beginnings that several running lines have in common, counted once",
      color: "series-4",
      value: (p) => p.kv.shared,
    },
  ];
}

// Refreshing ---------------------------------------------------------------------------

async function refresh() {
  refreshAgain = refreshing;
  if (refreshing) return;
  refreshing = true;
  clearTimeout(timer);
  try {
    await refreshOnce();
  } catch {
    lost("The server does not answer");
  } finally {
    refreshing = false;
    timer = setTimeout(refresh, refreshAgain ? 0 : REFRESH_MS);
  }
}

async function refreshOnce() {
  if (document.hidden && batches !== null) return;
  const after = points.at(-1)?.time ?? 0;
  const search = $("search").value.trim();
  const query = new URLSearchParams({ after, search });
  const answer = await ask(`batches/data?${query}`, {
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
  if (search === searched) announceChanges(data.batches);
  searched = search;
  ({ batches, endpoints, max_batches: maxBatches } = data);
  $("new-batch").hidden = false;
  showBatches();
  $("usage").hidden = !data.usage.length;
  showUsage($("usage-table"), data.usage);
  showEngines($("engines"), data.engines);
  $("tree").hidden = !data.is_admin;
  if (data.is_admin && $("tree-details").open) await refreshTree();
}

function refreshTree() {
  return showTree($("tree-jobs"), { signal: AbortSignal.timeout(PATIENCE_MS) });
}

function setServer(state, text) {
  // Set only if it changed, because screen readers announce it.
  if ($("server").textContent !== text) $("server").textContent = text;
  $("server").className = state;
}

function lost(text) {
  const since = answeredAt === null ? "" : `, last answer at ${exact.format(answeredAt)}`;
  setServer("lost", `${text}${since}. Trying again.`);
}

function askForKey() {
  setServer("lost", hasKey() ? "The server does not accept this API key" : "An API key is required");
  $("key-form").hidden = false;
  $("new-batch").hidden = true;
}

function addPoints(added) {
  if (!added.length) return;
  const from = added.at(-1).time - KEEP_POINTS_S;
  points = points.filter((p) => p.time < added[0].time && p.time > from).concat(added);
  for (const chart of charts) chart.update(points);
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
  const [, label, fits] = STATES.find(([value]) => value === $("filter").value);
  const shown = batches.filter(fits);
  rows.show(shown, Date.now() / 1000 + serverAhead);
  document.querySelector("table").hidden = !shown.length;
  const none = !batches.length && !searched;
  const matching = searched ? ` that matches \u201c${searched}\u201d` : "";
  const inState = $("filter").value === "all" ? "was found" : `is ${label.toLowerCase()}`;
  $("no-batch").hidden = !none;
  $("none-found").hidden = shown.length > 0 || none;
  $("none-found").textContent = `No batch${matching} ${inState}.`;
  $("limit-note").hidden = batches.length < maxBatches;
  $("limit-note").textContent =
    `These are the latest ${maxBatches}. A search finds older batches too.`;
  if (rows.focus(started)) started = null;
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
    parts.push(`${active.length} active`, `${whole.format(left)} lines left`);
    if (running !== undefined) parts.push(`${whole.format(running)} requests in the engine`);
  }
  $("summary").textContent = parts.join(" \u00b7 ");
}

// Actions -----------------------------------------------------------------------------

function showError(text) {
  $("message").textContent = text;
  $("message").hidden = text === "";
}

function confirmCancel(batch) {
  const { total } = batch.request_counts;
  const answered = total
    ? `${whole.format(doneOf(batch))} of ${whole.format(total)} lines are answered and will be kept. The others will not run.`
    : "No line is answered yet.";
  $("confirm-text").textContent = `${nameOf(batch)}: ${answered}`;
  $("confirm").returnValue = "keep";
  $("confirm").showModal();
  $("confirm").onclose = () => {
    if ($("confirm").returnValue === "cancel") cancel(batch);
  };
}

function showStarted(batch) {
  $("search").value = "";
  $("filter").value = "all";
  showError("");
  started = batch.id;
  refresh();
}

async function copy(button) {
  const copied = await copyText(button.dataset.text);
  button.textContent = copied ? "Copied" : "Not copied";
  $("announcements").textContent = button.textContent;
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

/** Over plain HTTP, browsers have no clipboard for pages: the selection is copied. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    const focused = document.activeElement;
    field.value = text;
    field.className = "hidden";
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return copied;
  }
}

async function cancel(batch) {
  try {
    const answer = await ask(`${batch.path}/cancel`, { method: "POST" });
    if (!answer.ok) showError(await errorText(answer));
  } catch {
    showError("The server does not answer. The batch may still be running.");
  }
  await refresh();
}

/** Links cannot send the key, so the file is fetched and then saved by a link. */
async function download(link) {
  try {
    const answer = await ask(link.getAttribute("href"));
    if (!answer.ok) {
      showError(await errorText(answer));
      return;
    }
    const url = URL.createObjectURL(await answer.blob());
    const saver = document.createElement("a");
    saver.href = url;
    saver.download = link.download;
    saver.click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch {
    showError("The download failed: the server does not answer.");
  }
}

function start() {
  for (const [value, label] of STATES) $("filter").append(new Option(label, value));
  $("filter").addEventListener("change", showBatches);
  $("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, TYPING_MS);
  });
  const dialog = new SubmitDialog({ onStarted: showStarted, onKeyRefused: askForKey });
  $("new-batch").addEventListener("click", () => dialog.open(endpoints));
  $("how-to").textContent = [
    `curl ${location.origin}/v1/files -F purpose=batch -F file=@requests.jsonl`,
    `curl ${location.origin}/v1/batches -H 'Content-Type: application/json' \\`,
    `  -d '{"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}'`,
  ].join("\n");
  $("rows").addEventListener("click", (event) => {
    const target = event.target.closest("[data-action]");
    if (target === null) return;
    showError("");
    const batch = rows.batch(target.closest("tr").dataset.id);
    if (target.dataset.action === "cancel") confirmCancel(batch);
    if (target.dataset.action.startsWith("copy")) copy(target);
    if (target.matches("a") && hasKey()) {
      event.preventDefault();
      download(target);
    }
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey($("key").value);
    $("forget-key").hidden = false;
    $("key").value = "";
    refresh();
  });
  $("forget-key").addEventListener("click", () => {
    setKey(null);
    batches = null;
    points = [];
    location.reload();
  });
  $("tree-details").addEventListener("toggle", () => {
    if ($("tree-details").open) refreshTree().catch(() => lost("The server does not answer"));
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) refresh();
  });
  $("forget-key").hidden = !hasKey();
  $("usage-details").open = matchMedia("(min-width: 44rem)").matches;
  refresh();
}

start();
