// Areas stacked over time, drawn as SVG.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 8, right: 4, bottom: 20, left: 46 };
const LONGEST_S = 3600;
const SHORTEST_S = 60;
// Samples further apart than this are not connected.
const GAP_S = 20;
const TICKS_S = [30, 60, 120, 300, 600, 900, 1200];

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "short", hourCycle: "h23" });
const exact = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", hourCycle: "h23" });

function svg(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** The next number that is easy to read and to halve. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= value);
}

export class Chart {
  /**
   * @param figure with a .legend, a list, and with an empty .plot and .when; hidden while
   *   no point has values
   * @param seriesOf (points) => [{name, hint, color, value: (point) => number}], from
   *   bottom to top; hint is shown where the pointer rests on the name
   * @param options title and unit, for screen readers; known: (point) => whether it has
   *   values; limit: (point) => number, drawn as a line
   */
  constructor(figure, seriesOf, options) {
    this.seriesOf = seriesOf;
    this.series = [];
    this.options = options;
    this.figure = figure;
    this.legend = figure.querySelector(".legend");
    this.plot = figure.querySelector(".plot");
    this.when = figure.querySelector(".when");
    this.points = [];
    this.pointed = null;
    this.makeLegend();
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.draw();
    });
  }

  makeLegend() {
    const series = this.seriesOf(this.points);
    const names = (all) => all.map(({ name }) => name).join("\n");
    const same = this.series.length > 0 && names(series) === names(this.series);
    this.series = series;
    if (same) return;
    this.legend.replaceChildren();
    this.values = series.map(({ name, hint, color }) => {
      const item = document.createElement("li");
      const value = document.createElement("b");
      item.className = color;
      if (hint) item.title = hint;
      item.append(`${name} `, value);
      this.legend.append(item);
      return value;
    });
  }

  update(points) {
    this.points = points.filter((p) => p.time > points.at(-1).time - LONGEST_S);
    this.figure.hidden = !this.points.some(this.options.known);
    this.makeLegend();
    this.draw();
  }

  draw() {
    const known = this.points.filter(this.options.known);
    if (known.length < 2) {
      const text = document.createElement("p");
      text.textContent = "The first values appear within ten seconds.";
      this.plot.replaceChildren(text);
      this.showValues(known.at(-1));
      return;
    }
    this.measure(known);
    const root = svg("svg", { role: "img", "aria-label": this.inWords() });
    this.drawGrid(root);
    for (const part of this.parts()) this.drawPart(root, part);
    this.drawLimit(root, known.at(-1));
    if (this.pointed) {
      const x = this.x(this.pointed.time);
      const y = { y1: MARGIN.top, y2: MARGIN.top + this.height };
      root.append(svg("line", { class: "cursor", x1: x, x2: x, ...y }));
    }
    this.plot.replaceChildren(root);
    this.showValues(this.pointed ?? this.points.at(-1));
  }

  measure(known) {
    this.width = this.plot.clientWidth - MARGIN.left - MARGIN.right;
    this.height = this.plot.clientHeight - MARGIN.top - MARGIN.bottom;
    this.to = this.points.at(-1).time;
    this.from = Math.min(this.points[0].time, this.to - SHORTEST_S);
    const most = Math.max(...known.map((p) => Math.max(this.total(p), this.limit(p))));
    this.top = roundUp(most);
  }

  limit(point) {
    return this.options.limit?.(point) ?? 0;
  }

  total(point) {
    return this.series.reduce((sum, { value }) => sum + value(point), 0);
  }

  x(time) {
    return MARGIN.left + (this.width * (time - this.from)) / (this.to - this.from);
  }

  y(value) {
    return MARGIN.top + this.height * (1 - value / this.top);
  }

  drawGrid(root) {
    for (const value of [0, this.top / 2, this.top]) {
      const y = this.y(value);
      const x = { x1: MARGIN.left, x2: MARGIN.left + this.width };
      root.append(svg("line", { class: "grid", ...x, y1: y, y2: y }));
      const place = { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" };
      root.append(svg("text", place, short.format(value)));
    }
    const enough = this.width / 90;
    const step = TICKS_S.find((s) => (this.to - this.from) / s <= enough) ?? 1800;
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      const label = (step < 60 ? exact : clock).format(t * 1000);
      const x = Math.min(this.x(t), MARGIN.left + this.width - 16);
      const y = MARGIN.top + this.height + 15;
      root.append(svg("text", { x, y, "text-anchor": "middle" }, label));
    }
  }

  /** The points, split at gaps and at points without values. */
  parts() {
    const parts = [[]];
    for (const point of this.points) {
      const last = parts.at(-1).at(-1);
      const known = this.options.known(point);
      if (last && (!known || point.time - last.time > GAP_S)) parts.push([]);
      if (known) parts.at(-1).push(point);
    }
    return parts.filter((part) => part.length > 1);
  }

  drawPart(root, part) {
    let below = part.map(() => 0);
    this.series.forEach(({ value, color }) => {
      const above = part.map((point, at) => below[at] + value(point));
      const corner = (values) => (point, at) =>
        `${this.x(point.time).toFixed(1)},${this.y(values[at]).toFixed(1)}`;
      const upper = part.map(corner(above));
      const lower = part.map(corner(below)).reverse();
      const d = `M${[...upper, ...lower].join("L")}Z`;
      root.append(svg("path", { class: `area ${color}`, d }));
      below = above;
    });
  }

  drawLimit(root, point) {
    if (!this.limit(point)) return;
    const y = this.y(this.limit(point));
    const x = { x1: MARGIN.left, x2: MARGIN.left + this.width };
    root.append(svg("line", { class: "limit", ...x, y1: y, y2: y }));
    const text = `capacity ${whole.format(this.limit(point))}`;
    const place = { x: x.x2, y: y + 14, "text-anchor": "end" };
    root.append(svg("text", place, text));
  }

  showValues(point) {
    const known = point && this.options.known(point);
    this.series.forEach(({ value }, i) => {
      this.values[i].textContent = known ? whole.format(value(point)) : "\u2013";
    });
    this.when.textContent = this.pointed ? `at ${exact.format(this.pointed.time * 1000)}` : "";
  }

  inWords() {
    const last = this.points.at(-1);
    const minutes = Math.max(1, Math.round((this.to - this.points[0].time) / 60));
    const values = this.series.map(
      ({ name, value }) => `${name} ${whole.format(value(last))}`,
    );
    const now = this.options.known(last) ? `now ${values.join(", ")}` : "no current value";
    return `${this.options.title}, last ${minutes} min: ${now} ${this.options.unit}`;
  }

  point(event) {
    if (!this.plot.querySelector("svg")) return;
    const at = event.clientX - this.plot.getBoundingClientRect().left;
    const away = (point) => Math.abs(this.x(point.time) - at);
    this.pointed = this.points.reduce((a, b) => (away(b) < away(a) ? b : a));
    this.draw();
  }
}
