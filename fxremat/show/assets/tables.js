// The tables of a step: its modules as a tree, and its largest values.

const LARGEST = 50;

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
    this.closed = null; // paths of modules whose parts are hidden
  }

  // tree: [module, saved, recomputed, offloaded, gradients, forward, backward, extra] of each module, outer ones first
  draw(data, plan, selected) {
    const rows = plan.tree.map((share) => ({ share, path: data.modules[share[0]], module: share[0] }));
    const outer = new Set(rows.map(({ path }) => parent(path)).filter((path) => path !== null));
    if (!this.closed) this.closed = new Set(this.deep(rows, outer));
    const offloads = plan.tree[0][3] > 0;
    const sizes = [1, 2, ...(offloads ? [3] : []), 4];
    const heads = [["module", "text"], ...sizes.map((place) => [["", "saved", "recomputed", "offloaded", "gradients"][place], ""]),
                   ["time", ""], ["extra time", ""]];
    this.table.tHead.replaceChildren(element("tr", {}, ...cells(heads, "th")));
    const shown = rows.filter(({ path }) => !this.hidden(path));
    this.table.tBodies[0].replaceChildren(...shown.map(({ share, path, module }) => {
      const figures = [...sizes.map((place) => share[place] ? bytes(share[place]) : "-"),
                       seconds(share[5] + share[6] + share[7]), share[7] ? seconds(share[7]) : "-"];
      return element("tr", { class: module === selected ? "selected" : undefined, "data-path": path },
        this.head(data, path, module, outer.has(path)), ...cells(figures.map((text) => [text, undefined])));
    }));
  }

  head(data, path, module, hasParts) {
    const depth = path ? path.split(".").length : 0, open = !this.closed.has(path);
    const toggle = hasParts
      ? element("button", { class: "toggle", type: "button", "aria-expanded": String(open), "aria-label": `parts of ${path || data.model}`,
                            onclick: () => { this.closed[open ? "add" : "delete"](path); this.onSelect(null); } }, open ? "▾" : "▸")
      : element("span", { class: "toggle" });
    const name = path ? path.slice(parent(path) ? parent(path).length + 1 : 0) : data.model;
    const select = element("button", { class: "plain", type: "button", onclick: () => this.onSelect(module) }, name);
    return element("td", { class: "text", style: `padding-left: ${0.3 + 0.9 * depth}rem` }, toggle, select);
  }

  hidden(path) {
    for (let outer = parent(path); outer !== null; outer = parent(outer)) if (this.closed.has(outer)) return true;
    return false;
  }

  // The modules to close at first: those of the deepest levels, until about forty rows are left.
  deep(rows, outer) {
    for (let depth = 8; depth > 0; depth--) {
      const left = rows.filter(({ path }) => (path ? path.split(".").length : 0) <= depth).length;
      if (left <= 40 || depth === 1)
        return [...outer].filter((path) => path && path.split(".").length >= depth);
    }
    return [];
  }
}

// The path of the module around one; null for the model itself.
function parent(path) {
  if (!path) return null;
  return path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "";
}

// The largest values of a step, with what happens to each: [{value, bytes, fate, times, module, source, lives}].
function largestValues(step, selected) {
  const { data, plan } = step, found = new Map();
  const chosen = selected < 0 ? "" : data.modules[selected];
  step.value.forEach((value, life) => {
    if (value < 0 || !inside(data.modules[step.module[life]], chosen)) return;
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
  const heads = [["value", "text"], ["size", ""], ["what happens to it", "text"], ["on the device", "text"], ["module", "text"], ["line", "text"]];
  table.tHead.replaceChildren(element("tr", {}, ...cells(heads, "th")));
  table.tBodies[0].replaceChildren(...largest.map(({ value, bytes: size, fate, times, lives }) => {
    const module = data.values.module[value], type = data.types[data.values.type[value]];
    const point = element("button", { class: "plain", type: "button", title: type, onclick: () => onPoint(lives[0]) }, data.values.name[value]);
    const select = element("button", { class: "plain", type: "button", onclick: () => onSelect(module) }, data.modules[module] || data.model);
    return element("tr", {}, element("td", { class: "text" }, point), ...cells([[bytes(size), ""], [fate, "text"], [times.join("; "), "text"]]),
      element("td", { class: "text" }, select), ...cells([[data.sources[data.values.source[value]], "text wide"]]));
  }));
  return largest.length;
}
