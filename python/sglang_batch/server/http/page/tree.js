// The prefixes that running batches share: which are in the KV cache, and why.
//
// The server is asked only while the section is open. All text is set with append(), so
// names are never HTML.

import { ask } from "./api.js";
import { make } from "./rows.js";

const MAX_NODES = 25;

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });

const COLUMNS = [
  ["Prefix", ({ prefix_tokens }) => `${whole.format(prefix_tokens)} tokens`],
  ["Own tokens", ({ tokens }) => whole.format(tokens)],
  ["State", stateText],
  ["Running requests", ({ running }) => whole.format(running)],
  ["Requests to come", ({ uses_left }) => whole.format(uses_left)],
  ["Next use", nextUseText],
  ["Compute density", ({ density }) => (density === null ? "" : short.format(density))],
];
const TEXT_COLUMNS = new Set(["Prefix", "State", "Next use"]);

function stateText({ state, running, pinned }) {
  if (state !== "kept") return state;
  const reasons = [running && "in use", pinned && "for later"].filter(Boolean);
  return `kept, ${reasons.join(" and ")}`;
}

// Why the next request in line did not join the last step.
const WHY_NOT = {
  step_full: "Requests are joining: the last step took as many prompt tokens as it may",
  no_row: "Nothing joins: as many requests run as may run at once",
  no_kv: "Nothing joins: the KV cache has no room for another request and its answer",
  no_window: "Nothing joins: the pool of sliding windows is full",
  prompt_cut: "The next request waits until the rest of another prompt is computed",
  on_host: "The next request waits for its KV from host memory",
  offloaded_first: "Nothing joins: requests in host memory resume first",
  online_first: "Nothing joins: an online request goes first",
  decodes_first: "Nothing joined the last step: it only decoded, by the cost model",
  awaits_leader: "Nothing joins: another request is computing a prefix that the next ones share",
  awaits_followers: "Nothing joins: requests that share a prefix need the room",
  awaits_adapter: "Nothing joins: no LoRA adapter of the waiting requests has a slot",
  awaits_siblings: "The next request waits, so that it does not evict a prefix still in use",
};

function nextUseText({ next_use: requests }) {
  if (requests === null) return "never";
  return requests ? `after ${whole.format(requests)} requests` : "next";
}

/** Show the trees of all replicas in an element. Errors are left to the next refresh. */
export async function showTree(element, options) {
  const answer = await ask(`offline_batch/tree?limit=${MAX_NODES}`, options);
  if (!answer.ok) return;
  const { replicas } = await answer.json();
  const shown = make("div", {});
  for (const { replica, jobs, nodes, admission } of replicas) {
    const where = replicas.length > 1 ? `Replica ${replica}, ` : "";
    if (jobs.length && admission in WHY_NOT) {
      shown.append(make("p", { class: "small" }, `${where}${WHY_NOT[admission]}.`));
    }
    for (const job of jobs) {
      const own = nodes.filter((node) => node.job === job.job);
      shown.append(headOf(job, where, own.length), own.length ? tableOf(own, job.job) : "");
    }
  }
  if (!shown.childNodes.length) {
    shown.append(make("p", { class: "empty" }, "No batch is running."));
  }
  // Replaced only if it changed, so that a selection is kept.
  if (element.innerHTML !== shown.innerHTML) element.replaceChildren(...shown.childNodes);
}

function headOf(job, where, numShown) {
  const left = job.prefixes - numShown;
  const text = [
    `${whole.format(job.waiting)} requests wait`,
    `prefixes of ${whole.format(job.in_use_tokens)} tokens in use`,
    `of ${whole.format(job.kept_tokens)} tokens kept for later`,
    left > 0 && `${whole.format(left)} smaller prefixes not shown`,
  ];
  return make(
    "div",
    { class: "list-head" },
    make("h3", {}, `${where}${job.job}`),
    make("p", { class: "small" }, text.filter(Boolean).join(", ")),
  );
}

function tableOf(nodes, name) {
  const levels = new Map();
  const heads = COLUMNS.map(([label]) =>
    make("th", { role: "columnheader", scope: "col", class: classOf(label) }, label),
  );
  const rows = nodes.map((node) => {
    const level = levels.has(node.parent) ? levels.get(node.parent) + 1 : 0;
    levels.set(node.node, level);
    const cells = COLUMNS.map(([label, text], i) =>
      make(
        "td",
        { role: i ? "cell" : "rowheader", class: classOf(label), "data-label": label },
        make(
          "div",
          {},
          i || !level ? "" : make("span", { class: "level", "aria-hidden": "true" }, indent(level)),
          text(node),
        ),
      ),
    );
    return make("tr", { role: "row" }, ...cells);
  });
  return make(
    "table",
    { role: "table", "aria-label": `Shared prefixes of ${name}` },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads)),
    make("tbody", { role: "rowgroup" }, ...rows),
  );
}

function classOf(label) {
  return TEXT_COLUMNS.has(label) ? null : "number";
}

function indent(level) {
  return `${"  ".repeat(level - 1)}└ `;
}
