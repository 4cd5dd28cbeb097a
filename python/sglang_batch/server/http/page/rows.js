// The rows of the list. Each is created once and updated in place, so that focus,
// selection and scroll position are kept.
//
// All text is set with textContent or append(), so text from clients is never HTML.

export const ACTIVE = new Set(["validating", "in_progress", "finalizing", "cancelling"]);
// Reasons of errors that are shown without opening the others.
const FIRST_REASONS = 3;
const CAN_CANCEL = new Set(["validating", "in_progress"]);
const DOWNLOADS = {
  output: "Output",
  errors: "Error lines",
  results: "Results",
  so_far: "Results so far",
};

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const millions = new Intl.NumberFormat(undefined, {
  notation: "compact",
  minimumFractionDigits: 2,
  maximumFractionDigits: 2,
});
const money = new Intl.NumberFormat("en-US", {
  style: "currency",
  currency: "USD",
  maximumSignificantDigits: 3,
});
const percent = new Intl.NumberFormat(undefined, { style: "percent" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "short", hourCycle: "h23" });
const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });

/** Create an element. Children are elements or text; null children are left out. */
export function make(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

/**
 * Show a table of items in a section, or hide it if there are none.
 *
 * id: of the heading, which is made where a title is given.
 * columns: the label of each, the text of an item, and the text, if any, with which all
 *   items leave the column out. The first textColumns have no numbers.
 */
export function showTable(section, items, { id, title, note, columns: all, textColumns }) {
  section.hidden = !items.length;
  if (!items.length) return;
  const columns = all.filter(([, text, nothing]) => items.some((item) => text(item) !== nothing));
  const classOf = (i) => (i < textColumns ? null : "number");
  const heads = columns.map(([label], i) =>
    make("th", { role: "columnheader", scope: "col", class: classOf(i) }, label),
  );
  const rows = items.map((item) => {
    const cells = columns.map(([label, text], i) =>
      make(
        "td",
        { role: i ? "cell" : "rowheader", class: classOf(i), "data-label": label },
        make("div", {}, text(item)),
      ),
    );
    return make("tr", { role: "row" }, ...cells);
  });
  const shown = make(
    "div",
    {},
    title
      ? make(
          "div",
          { class: "list-head" },
          make("h2", { id }, title),
          make("p", { class: "small" }, note),
        )
      : null,
    make(
      "table",
      { role: "table", "aria-labelledby": id },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads)),
      make("tbody", { role: "rowgroup" }, ...rows),
    ),
  );
  // Replaced only if it changed, so that a selection is kept.
  if (section.innerHTML !== shown.innerHTML) section.replaceChildren(...shown.childNodes);
}

const sub = (...children) => make("div", { class: "sub" }, ...children);

/** A code such as context_length_exceeded, with line breaks allowed after underscores. */
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

/** A duration, to the second below an hour. */
function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  return s >= 60 && s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : roughly(s);
}

/** A duration that still changes, rounded so that it changes seldom. */
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

function copyButton(text, what, action = "copy") {
  const attributes = { type: "button", class: "copy", "data-action": action, "data-text": text };
  return make("button", { ...attributes, "aria-label": `Copy the id of ${what}` }, "Copy");
}

function idLine(id, what, action) {
  return make("div", { class: "id" }, make("span", { title: id }, id), copyButton(id, what, action));
}

function batchCell(batch) {
  const model = batch.model ? make("span", { class: "model" }, batch.model) : null;
  const pairs = Object.entries(batch.metadata ?? {}).map(([k, v]) => `${k}: ${v}`);
  return [
    make("div", { class: "name" }, nameOf(batch)),
    idLine(batch.id, nameOf(batch)),
    sub(batch.endpoint, model && " \u00b7 ", model),
    batch.owner ? sub(`of ${batch.owner}`) : null,
    pairs.length ? make("div", { class: "pairs" }, pairs.join(" \u00b7 ")) : null,
    fileIds(batch),
  ];
}

function fileIds(batch) {
  const files = [
    ["input", batch.input_file_id],
    ["output", batch.output_file_id],
    ["errors", batch.error_file_id],
  ].filter(([, id]) => id);
  const label = make("summary", { "data-action": "files" }, "File ids");
  const items = files.map(([name, id]) => {
    const line = idLine(id, `the file ${name} of ${nameOf(batch)}`, `copy-${name}`);
    return make("li", {}, make("span", { class: "sub" }, name), line);
  });
  return make("details", {}, label, make("ul", { class: "files" }, ...items));
}

function stateCell(batch) {
  const paused = batch.paused_reason && ACTIVE.has(batch.status);
  const state = paused ? "paused" : batch.status;
  return [
    make(
      "div",
      { class: "state-line" },
      make("span", { class: `state ${state}` }, paused ? "paused" : stateOf(batch)),
      batch.priority ? make("span", { class: "sub" }, `priority ${batch.priority}`) : null,
    ),
    paused ? sub(batch.paused_reason) : null,
    ...progress(batch),
  ];
}

function progress(batch) {
  const { total } = batch.request_counts;
  if (!total) return batch.status === "validating" ? [sub("checking the file")] : [];
  const done = doneOf(batch);
  const bar = { max: total, value: done, "aria-label": "Lines answered" };
  const lines = `${whole.format(total)} ${total === 1 ? "line" : "lines"}`;
  const share = percent.format(Math.floor((100 * done) / total) / 100);
  return [
    make("div", { class: "bar" }, make("progress", bar), make("span", {}, share)),
    make("div", { class: "counts" }, done < total ? `${whole.format(done)} of ${lines}` : lines),
    ACTIVE.has(batch.status) && batch.rate ? paceOf(batch.rate) : null,
    batch.status === "finalizing" ? sub("writing the results") : null,
  ];
}

function paceOf({ lines_per_s: lines, eta_s: left }) {
  const pace = `${(lines < 10 ? tenths : whole).format(lines)} lines/s`;
  return sub(left ? `${pace}, ${roughly(left)} left` : pace);
}

/** Numbers under one another, with their names. */
function figures(...lines) {
  const cells = lines.flatMap(([value, name, exact]) => [
    make("b", { title: exact ?? null }, value),
    make("span", {}, name),
  ]);
  return make("div", { class: "figures" }, ...cells);
}

/** Up to six digits in full, and more of them in millions. */
function counted(tokens, name) {
  return tokens < 1e6
    ? [whole.format(tokens), name]
    : [millions.format(tokens), name, whole.format(tokens)];
}

function speedCell(batch) {
  if (batch.rate) {
    const { tokens_per_s: all, output_tokens_per_s: output } = batch.rate;
    return [figures(counted(output, "output"), counted(all - output, "prompt"))];
  }
  const end = endOf(batch);
  if (!end || !batch.in_progress_at || !batch.usage?.total_tokens) return [];
  const seconds = Math.max(1, end - batch.in_progress_at);
  const { output_tokens: output, input_tokens: prompt } = batch.usage;
  return [
    figures(counted(output / seconds, "output"), counted(prompt / seconds, "prompt")),
    sub("on average"),
  ];
}

function tokensCell(batch) {
  if (!batch.usage?.total_tokens) return [];
  const { input_tokens: prompt, output_tokens: output, input_tokens_details: details } = batch.usage;
  const lines = [counted(output, "output"), counted(prompt, "prompt")];
  // Merged lines needed no prompt: neither theirs nor a cached one.
  const computed = prompt - (details.merged_tokens ?? 0);
  const cached = details.cached_tokens - (details.merged_cached_tokens ?? 0);
  if (computed) lines.push([percent.format(cached / computed), "cached"]);
  const possible = details.optimal_cached_share ?? null;
  if (possible !== null) lines.push([percent.format(possible), "at best"]);
  const { merged_requests: merged, engine_seconds: engine, dollars } = batch.usage;
  const { truncated_answers: truncated } = batch.usage;
  if (truncated) lines.push(counted(truncated, "truncated"));
  if (merged) lines.push(counted(merged, merged === 1 ? "line merged" : "lines merged"));
  if (engine) lines.push([tenths.format(engine), "engine seconds"]);
  if (dollars !== undefined) lines.push([money.format(dollars), "cost"]);
  return [figures(...lines)];
}

function errorsCell(batch) {
  if (batch.errors.length) return validationErrors(batch);
  const reasons = batch.error_reasons;
  const { failed } = batch.request_counts;
  const lines = reasons.length ? reasons.reduce((sum, reason) => sum + reason.lines, 0) : failed;
  if (!lines) return [];
  const items = reasons.map(reasonItem);
  const more = items.slice(FIRST_REASONS);
  const label = `${whole.format(more.length)} more ${more.length === 1 ? "reason" : "reasons"}`;
  return [
    make("span", { class: "bad" }, `${whole.format(lines)} ${lines === 1 ? "line" : "lines"}`),
    items.length ? make("ul", {}, ...items.slice(0, FIRST_REASONS)) : null,
    more.length
      ? make(
          "details",
          {},
          make("summary", { "data-action": "more" }, label),
          make("ul", {}, ...more),
        )
      : null,
  ];
}

function reasonItem({ code, message, lines }) {
  return make(
    "li",
    { class: "sub reason", title: message || null },
    make("b", {}, whole.format(lines)),
    " \u00d7 ",
    ...breakable(code),
    message ? `: ${message}` : "",
  );
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
  ["Progress", stateCell],
  ["Tokens/s", speedCell],
  ["Tokens", tokensCell],
  ["Errors", errorsCell],
  ["Created", timeCell],
  ["Actions", actionsCell],
];

// The rows --------------------------------------------------------------------------

class Row {
  constructor(batch) {
    this.cells = CELLS.map(([label, fill]) => {
      const role = label === "Batch" ? "rowheader" : "cell";
      const cell = make("td", { role, "data-label": label });
      return { cell, fill, shown: null };
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
    part.cell.className = part.shown === "" ? "nothing" : "";
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

  /** Move the focus to a batch. False if it is not shown. */
  focus(id) {
    this.rows.get(id)?.element.focus();
    return this.rows.has(id);
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
      // Existing rows keep their order. Moving one would lose its focus.
      if (row.element === next) next = next.nextElementSibling;
      else this.body.insertBefore(row.element, next);
    }
  }
}
