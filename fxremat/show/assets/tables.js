// The tables of a step: its modules as a tree, and its largest values.

const LARGEST = 20, MOST_ROWS = 30;
const secondary = { 7: "secondary", 8: "secondary" }; // columns of modules that a narrow screen leaves out

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== undefined && child !== null));
  return made;
}

function cells(row, kind = "td") {
  return row.map(([text, className]) => element(kind, { class: className, scope: kind === "th" ? "col" : undefined }, text));
}

class ModuleTable {
  constructor(table, onSelect) {
    this.table = table;
    this.onSelect = onSelect;
    this.closed = null; // rows whose parts are hidden
  }

  // rows: [depth, label, count, modules, saved, recomputed, offloaded, gradients, time, extra time], outer ones first;
  // the figures are those of each of so many modules
  draw(data, plan, selected) {
    const { rows } = plan, columns = [4, 5, 6, 7, 8, 9].filter((at) => rows[0][at]);
    if (!this.closed) this.closed = this.deep(rows);
    const heads = ["", "", "", "", "saved", "recomputed", "offloaded", "gradients", "time", "extra time"];
    this.table.tHead.replaceChildren(element("tr", {}, ...cells([["module", "text"], ...columns.map((at) => [heads[at], secondary[at]])], "th")));
    const shown = [];
    let within = Infinity; // the depth of a closed row, whose parts are left out
    rows.forEach((row, place) => {
      if (row[0] > within) return;
      within = this.closed.has(keyOf(row)) ? row[0] : Infinity;
      const parts = place + 1 < rows.length && rows[place + 1][0] > row[0];
      const figures = columns.map((at) => [row[at] ? (at < 8 ? bytes : seconds)(row[at]) : "-", secondary[at]]);
      shown.push(element("tr", { class: row[3].length && String(row[3]) === String(selected) ? "selected" : undefined,
        "data-path": row[3].map((module) => data.modules[module]).join(" ") }, this.head(row, parts), ...cells(figures)));
    });
    this.table.tBodies[0].replaceChildren(...shown);
  }

  head(row, hasParts) {
    const [depth, label, many, modules] = row, key = keyOf(row), open = !this.closed.has(key);
    const toggle = hasParts
      ? element("button", { class: "toggle", type: "button", "aria-expanded": String(open), "aria-label": `parts of ${label}`,
                            onclick: () => { this.closed[open ? "add" : "delete"](key); this.onSelect(null); } }, open ? "▾" : "▸")
      : element("span", { class: "toggle" });
    const select = modules.length ? element("button", { class: "plain", type: "button", onclick: () => this.onSelect(modules) }, label) : label;
    const count = many > 1 ? element("span", { class: "quiet" }, ` each of ${many}`) : null;
    return element("td", { class: "text", style: `padding-left: calc(${0.3 + 0.9 * depth}rem + 1.2em)` }, toggle, select, count);
  }

  // The rows to close at first: those of the deepest level that leaves at most so many.
  deep(rows) {
    let depth = Math.max(...rows.map((row) => row[0]));
    while (depth > 1 && rows.filter((row) => row[0] <= depth).length > MOST_ROWS) depth--;
    return new Set(rows.filter((row) => row[0] === depth).map(keyOf));
  }
}

function keyOf([depth, label, , modules]) { return `${depth} ${modules[0]} ${label}`; }

// The largest values of a step, with what happens to each: [{value, bytes, fate, times, module, source, lives}].
function largestValues(step, selected) {
  const { data, plan } = step, found = new Map();
  step.value.forEach((value, life) => {
    if (value < 0 || !isAmong(data.modules[step.module[life]], selected, data)) return;
    const entry = found.get(value) || { value, bytes: 0, lives: [] };
    entry.bytes = Math.max(entry.bytes, step.bytes[life]);
    entry.lives.push(life);
    found.set(value, entry);
  });
  const largest = [...found.values()].sort((a, b) => b.bytes - a.bytes || a.value - b.value).slice(0, LARGEST);
  for (const entry of largest) {
    entry.lives.sort((a, b) => step.first[a] - step.first[b]);
    entry.fate = fate(step, entry.lives);
    entry.times = entry.lives.map((life) => {
      const end = step.last[life] === step.count - 1 ? "the end" : step.clock(plan.ends[step.last[life]]);
      return `${step.clock(plan.starts[step.first[life]])} to ${end}`;
    });
  }
  return largest;
}

function fate(step, lives) {
  const kinds = lives.map((life) => step.data.kinds[step.kind[life]][0]);
  const count = (kind) => kinds.filter((other) => other === kind).length;
  const said = [];
  if (count("kept")) said.push("saved for the backward, or returned");
  if (count("temporary")) said.push("freed in the forward");
  if (count("offloaded")) said.push("waits on the host");
  if (count("recomputed")) said.push(count("recomputed") > 1 ? `made again ${count("recomputed")} times` : "made again");
  if (count("results")) said.push("returned");
  if (count("gradients")) said.push("freed on the way");
  if (count("weights")) said.push("a weight, or its state");
  return said.join(", ");
}

function drawValues(table, step, selected, onPoint, onSelect) {
  const { data } = step, largest = largestValues(step, selected);
  const heads = [["value", "text"], ["size", ""], ["what happens to it", "text"], ["on the device", "text secondary"], ["module", "text secondary"], ["line", "text secondary"]];
  table.tHead.replaceChildren(element("tr", {}, ...cells(heads, "th")));
  table.tBodies[0].replaceChildren(...largest.map(({ value, bytes: size, fate, times, lives }) => {
    const module = data.values.module[value], type = data.types[data.values.type[value]];
    const point = element("button", { class: "plain", type: "button", title: type, onclick: () => onPoint(lives[0]) }, data.values.name[value]);
    const select = element("button", { class: "plain", type: "button", onclick: () => onSelect([module]) }, data.modules[module] || data.model);
    return element("tr", {}, element("td", { class: "text" }, point), ...cells([[bytes(size), ""], [fate, "text"], [times.join("; "), "text secondary"]]),
      element("td", { class: "text secondary" }, select), ...cells([[data.sources[data.values.source[value]], "text wide secondary"]]));
  }));
  return largest.length;
}
