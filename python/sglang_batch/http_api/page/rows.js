// The rows of the list: made once for each batch, then kept up to date in place, so that
// focus, selection and scrolling stay where they are.
//
// All text goes through textContent or append(): what clients send is never HTML.

export const ACTIVE = new Set(["validating", "in_progress", "finalizing", "cancelling"]);
const CAN_CANCEL = new Set(["validating", "in_progress"]);
const DOWNLOADS = {
  output: "Output",
  errors: "Error lines",
  results: "Results",
  so_far: "Results so far",
};

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const percent = new Intl.NumberFormat(undefined, { style: "percent" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "short", hourCycle: "h23" });
const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });

/** An element; children are elements or text, and those that are null are left out. */
export function make(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

const sub = (...children) => make("div", { class: "sub" }, ...children);

/** A code such as context_length_exceeded, which may be broken after its underscores. */
function breakable(code) {
  return code.split("_").flatMap((part, i) => (i ? ["_", make("wbr", {}), part] : [part]));
}

export function nameOf(batch) {
  return batch.input_filename ?? batch.input_file_id;
}

export function doneOf(batch) {
  return batch.request_counts.completed + batch.request_counts.failed;
}

export function stateOf(batch) {
  return batch.status.replace("_", " ");
}

function endOf(batch) {
  return batch.completed_at ?? batch.failed_at ?? batch.cancelled_at ?? batch.expired_at;
}

/** How long something took. */
function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  return s >= 60 && s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : roughly(s);
}

/** How long something goes on, without what changes from one look to the next. */
function roughly(seconds) {
  const s = Math.max(0, Math.round(seconds));
  const minutes = Math.round(s / 60);
  if (s < 60) return `${s} s`;
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 600) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  if (minutes < 2880) return `${Math.round(minutes / 60)} h`;
  return `${Math.round(minutes / 1440)} days`;
}

function time(unix) {
  const date = new Date(unix * 1000);
  const today = new Date().toDateString() === date.toDateString();
  const text = today ? clock.format(date) : `${day.format(date)}, ${clock.format(date)}`;
  const attributes = { datetime: date.toISOString(), title: exact.format(date) };
  return make("time", attributes, text);
}

// The cells -------------------------------------------------------------------------

function batchCell(batch) {
  const model = batch.model ? make("span", { class: "model" }, batch.model) : null;
  const pairs = Object.entries(batch.metadata ?? {}).map(([k, v]) => `${k}: ${v}`);
  return [
    make("div", { class: "name" }, nameOf(batch)),
    make("span", { class: "id", title: batch.id }, batch.id),
    sub(batch.endpoint, model && " \u00b7 ", model),
    pairs.length ? make("div", { class: "pairs" }, pairs.join(" \u00b7 ")) : null,
  ];
}

function stateCell(batch) {
  const paused = batch.paused_reason && ACTIVE.has(batch.status);
  const state = paused ? "paused" : batch.status;
  return [
    make("span", { class: `state ${state}` }, paused ? "paused" : stateOf(batch)),
    paused ? sub(batch.paused_reason) : null,
    batch.priority ? sub(`priority ${batch.priority}`) : null,
  ];
}

function progressCell(batch) {
  const { total } = batch.request_counts;
  if (!total) return batch.status === "validating" ? [sub("checking the file")] : [];
  const done = doneOf(batch);
  const bar = { max: total, value: done, "aria-label": "Lines answered" };
  const left = batch.rate?.eta_s;
  const lines = `${whole.format(total)} ${total === 1 ? "line" : "lines"}`;
  return [
    make("progress", bar),
    make(
      "div",
      { class: "counts" },
      make("span", {}, done < total ? `${whole.format(done)} of ${lines}` : lines),
      make("span", {}, percent.format(Math.floor((100 * done) / total) / 100)),
    ),
    left && ACTIVE.has(batch.status) ? sub(`about ${roughly(left)} left`) : null,
    batch.status === "finalizing" ? sub("writing the results") : null,
  ];
}

function speedCell(batch) {
  if (batch.rate) {
    const lines = batch.rate.lines_per_s;
    const text = `${(lines < 10 ? tenths : whole).format(lines)} lines/s`;
    return [whole.format(batch.rate.tokens_per_s), sub(text)];
  }
  const end = endOf(batch);
  if (!end || !batch.in_progress_at || !batch.usage?.total_tokens) return [];
  const seconds = Math.max(1, end - batch.in_progress_at);
  return [whole.format(batch.usage.total_tokens / seconds), sub("on average")];
}

function cachedCell(batch) {
  if (!batch.usage?.input_tokens) return [];
  const { cached_tokens, optimal_cached_share } = batch.usage.input_tokens_details;
  // It is that of all lines: no measure for the first of a batch that broke off.
  const complete = ACTIVE.has(batch.status) || batch.status === "completed";
  const possible = complete ? (optimal_cached_share ?? null) : null;
  return [
    percent.format(cached_tokens / batch.usage.input_tokens),
    possible === null ? null : sub(`${percent.format(possible)} possible`),
  ];
}

function errorsCell(batch) {
  if (batch.errors.length) return validationErrors(batch);
  const { failed } = batch.request_counts;
  const kinds = Object.entries(batch.line_errors).sort((a, b) => b[1] - a[1]);
  const lines = kinds.length ? kinds.reduce((sum, kind) => sum + kind[1], 0) : failed;
  if (!lines) return [];
  const items = kinds.map(([code, count]) =>
    make("li", { class: "sub" }, `${whole.format(count)} \u00d7 `, ...breakable(code)),
  );
  return [
    make("span", { class: "bad" }, `${whole.format(lines)} ${lines === 1 ? "line" : "lines"}`),
    items.length ? make("ul", {}, ...items) : null,
  ];
}

function validationErrors(batch) {
  const texts = batch.errors.map(({ line, message, code }) =>
    [line === null ? null : `Line ${line}:`, message ?? code].filter(Boolean).join(" "),
  );
  const more = batch.num_errors - 1;
  const items = texts.slice(1).map((text) => make("li", { class: "sub" }, text));
  if (more > items.length) {
    items.push(make("li", { class: "sub" }, `and ${whole.format(more - items.length)} more`));
  }
  const label = make("summary", { "data-action": "more" }, `${whole.format(more)} more`);
  return [
    make("div", { class: "bad message" }, texts[0]),
    more ? make("details", {}, label, make("ul", {}, ...items)) : null,
  ];
}

function timeCell(batch, now) {
  const end = endOf(batch);
  const start = batch.in_progress_at;
  let text = null;
  if (start) text = end ? `ran ${duration(end - start)}` : `${roughly(now - start)} in progress`;
  const left = batch.expires_at - now;
  return [
    time(batch.created_at),
    text === null ? null : sub(text),
    ACTIVE.has(batch.status) ? sub(left > 0 ? `expires in ${roughly(left)}` : "expired") : null,
  ];
}

function actionsCell(batch) {
  const links = Object.entries(batch.downloads).map(([name, href]) => {
    const label = `${DOWNLOADS[name]} of ${nameOf(batch)}`;
    const attributes = { class: "button", href, download: `${batch.id}_${name}.jsonl` };
    const more = { "aria-label": label, "data-action": name };
    return make("a", { ...attributes, ...more }, DOWNLOADS[name]);
  });
  if (CAN_CANCEL.has(batch.status)) {
    const label = `Cancel ${nameOf(batch)}`;
    const attributes = { type: "button", class: "danger", "data-action": "cancel" };
    links.push(make("button", { ...attributes, "aria-label": label }, "Cancel"));
  }
  return links.length ? [make("div", { class: "actions" }, ...links)] : [];
}

const CELLS = [
  ["Batch", batchCell],
  ["State", stateCell],
  ["Progress", progressCell],
  ["Tokens/s", speedCell],
  ["Cached", cachedCell],
  ["Errors", errorsCell],
  ["Created", timeCell],
  ["Actions", actionsCell],
];
const NUMBERS = new Set(["Tokens/s", "Cached"]);

// The rows --------------------------------------------------------------------------

class Row {
  constructor(batch) {
    this.cells = CELLS.map(([label, fill]) => {
      const role = label === "Batch" ? "rowheader" : "cell";
      const cell = make("td", { role, "data-label": label });
      return { cell, fill, shown: null, number: NUMBERS.has(label) };
    });
    const cells = this.cells.map(({ cell }) => cell);
    this.element = make("tr", { role: "row", tabindex: "-1", "data-id": batch.id }, ...cells);
  }

  update(batch, now) {
    this.batch = batch;
    this.now = now;
    const over = ACTIVE.has(batch.status) ? "" : "over";
    this.element.className = `${batch.status} ${over}`.trim();
    for (const part of this.cells) this.fill(part);
  }

  fill(part) {
    const content = make("div", {}, ...part.fill(this.batch, this.now));
    if (content.innerHTML === part.shown) return;
    const focused = part.cell.contains(document.activeElement)
      ? document.activeElement.dataset.action
      : null;
    const open = part.cell.querySelector("details")?.open;
    part.shown = content.innerHTML;
    part.cell.replaceChildren(content);
    const nothing = part.shown === "" ? "nothing" : "";
    part.cell.className = `${part.number ? "number" : ""} ${nothing}`.trim();
    if (open) part.cell.querySelector("details")?.setAttribute("open", "");
    if (focused) {
      (part.cell.querySelector(`[data-action=${focused}]`) ?? this.element).focus();
    }
  }
}

export class Rows {
  constructor(body) {
    this.body = body;
    this.rows = new Map();
  }

  batch(id) {
    return this.rows.get(id)?.batch;
  }

  /** Show these batches, in this order; now is the server's Unix time. */
  show(batches, now) {
    const ids = new Set(batches.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    let next = this.body.firstElementChild;
    for (const batch of batches) {
      const row = this.rows.get(batch.id) ?? new Row(batch);
      this.rows.set(batch.id, row);
      row.update(batch, now);
      // Rows that are there keep their order: none is moved, which would lose its focus.
      if (row.element === next) next = next.nextElementSibling;
      else this.body.insertBefore(row.element, next);
    }
  }
}
