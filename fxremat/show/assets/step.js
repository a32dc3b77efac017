// The step of one plan: what is on the device at each moment, in the order in which it is stacked.

const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function bytes(count) {
  const unit = units.find(([, size]) => Math.abs(count) >= size);
  return unit ? `${(count / unit[1]).toFixed(1)} ${unit[0]}` : `${count} B`;
}

function seconds(value) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]])
    if (Math.abs(value) >= 0.9995 * size) return `${+(value / size).toPrecision(3)} ${unit}`;
  return value ? `${+(value * 1e6).toPrecision(3)} us` : "0 s";
}

// Whether a module is one of those selected, or a part of one; all are where none is selected.
function isAmong(module, selected, data) {
  return !selected.length || selected.map((number) => data.modules[number])
    .some((outer) => module === outer || module.startsWith(outer + "."));
}

class Step {
  constructor(data, plan) {
    this.data = data;
    this.plan = plan;
    this.count = plan.starts.length;
    const { kind, first, last, bytes, value, op } = plan.lives;
    this.kind = Uint8Array.from(kind);
    this.first = Int32Array.from(first);
    this.last = Int32Array.from(last);
    this.bytes = Float64Array.from(bytes);
    this.value = value;
    this.op = op;
    this.module = value.map((number, life) =>
      number >= 0 ? data.values.module[number] : op[life] >= 0 ? data.ops.module[op[life]] : 0);
    this.groups = this.module.map((module) => data.groups.of[module]);
    const change = new Float64Array(this.count + 1);
    for (let life = 0; life < kind.length; life++) {
      change[this.first[life]] += this.bytes[life];
      change[this.last[life] + 1] -= this.bytes[life];
    }
    this.total = change.slice(0, this.count);
    for (let place = 1; place < this.count; place++) this.total[place] += this.total[place - 1];
    this.peak = this.total.reduce((most, size) => Math.max(most, size), 0);
    this.end = plan.ends.reduce((latest, time) => Math.max(latest, time), 0) || 1;
    this.hosted = plan.host.reduce((most, size) => Math.max(most, size), 0);
    this.stack("module", []);
  }

  // The order in which lives are stacked, and the bands of one color in it. Those of selected modules come first in each.
  stack(by, selected) {
    const among = this.data.modules.map((module) => isAmong(module, selected, this.data));
    const marked = this.module.map((module) => among[module]);
    const key = (life) => by === "module"
      ? ((this.kind[life] ? this.groups[life] + 1 : 0) * 16 + this.kind[life]) * 2 + !marked[life]
      : (this.kind[life] * 2 + !marked[life]) * 4096 + this.groups[life];
    const keys = this.module.map((_, life) => key(life));
    this.order = Array.from(keys.keys()).sort((a, b) => keys[a] - keys[b] || a - b);
    this.bands = [];
    this.order.forEach((life, place) => {
      const band = this.bands[this.bands.length - 1], color = this.color(by, life), shade = this.shade(by, life);
      if (band && band.color === color && band.shade === shade && band.marked === marked[life]) band.end = place + 1;
      else this.bands.push({ color, shade, marked: marked[life], start: place, end: place + 1 });
    });
  }

  // The name of a life's color in page.css.
  color(by, life) {
    const kind = this.kind[life], number = this.data.groups.color[this.groups[life]];
    return by === "purpose" || !kind ? this.data.kinds[kind][0] : number < 0 ? "module-other" : `module-${number}`;
  }

  // 0 or 1: neighbors that share a color differ in it.
  shade(by, life) {
    return by === "purpose" ? this.groups[life] % 2 : this.kind[life] ? this.data.groups.shade[this.groups[life]] : 0;
  }

  // What the colors mean: [name, text] of each that is to be seen.
  legend(by) {
    const { kinds, colors } = this.data, shown = new Set(this.bands.map(({ color }) => color));
    const all = by === "purpose" ? kinds
      : [kinds[0], ...colors.map((label, number) => [`module-${number}`, label]), ["module-other", "smaller modules"]];
    return all.filter(([name]) => shown.has(name));
  }

  // The lives at a moment, from the bottom up, each with where it begins and ends in bytes.
  at(moment) {
    let height = 0;
    const found = [];
    for (const life of this.order) {
      if (this.first[life] > moment || this.last[life] < moment) continue;
      found.push({ life, low: height, high: height + this.bytes[life] });
      height += this.bytes[life];
    }
    return found;
  }

  // The last moment that has begun by then.
  momentAt(time) {
    let low = 0, high = this.count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.plan.starts[middle] <= time) low = middle; else high = middle - 1;
    }
    return low;
  }

  // For each column between two times, the moment of most memory in it.
  columns(from, to, count) {
    const found = new Int32Array(count);
    for (let column = 0; column < count; column++) {
      const begin = this.momentAt(from + (to - from) * column / count);
      const over = column === count - 1 && to >= this.end;
      const until = over ? this.count - 1 : this.momentAt(from + (to - from) * (column + 1) / count * (1 - 1e-12));
      let most = begin;
      for (let place = begin + 1; place <= until; place++) if (this.total[place] > this.total[most]) most = place;
      found[column] = most;
    }
    return found;
  }

  clock(time) {
    return this.plan.timed ? seconds(time) : `op ${Math.round(time)}`;
  }

  momentName(moment) {
    const { plan, data } = this, role = plan.roles[plan.role[moment]];
    if (plan.op[moment] >= 0) return `${role} ${data.ops.name[plan.op[moment]]}`;
    return plan.value[moment] >= 0 ? `${role} ${data.values.name[plan.value[moment]]}` : role;
  }

  blockName(moment) {
    const block = this.plan.block[moment];
    return `block ${block + 1}, ${this.plan.blocks[block] || ""}`;
  }

  lifeName(life) {
    const { data } = this, name = data.kinds[this.kind[life]][0];
    if (this.value[life] >= 0) return data.values.name[this.value[life]];
    return this.op[life] >= 0 ? `${name} of ${data.ops.name[this.op[life]]}` : data.kinds[this.kind[life]][1];
  }

  // What is said of a life: pairs of a label and a text.
  about(life) {
    const { data, plan } = this, value = this.value[life], op = this.op[life];
    const source = value >= 0 ? data.values.source[value] : op >= 0 ? data.ops.source[op] : 0;
    const first = this.first[life], last = this.last[life];
    const type = value >= 0 ? data.types[data.values.type[value]] : "";
    return [
      ["size", bytes(this.bytes[life]) + (type ? `, ${type}` : "")],
      ["purpose", data.kinds[this.kind[life]][1]],
      ["module", data.modules[this.module[life]] || data.model],
      ["line", data.sources[source]],
      ["from", `${this.clock(plan.starts[first])}, ${this.momentName(first)}`],
      ["to", last === this.count - 1 ? "the end" : `${this.clock(plan.ends[last])}, ${this.momentName(last)}`],
    ].filter(([, text]) => text);
  }
}
