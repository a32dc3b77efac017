// The frontier as a curve: peak against time, with the plans that can be drawn as points to choose from.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

class FrontierChart {
  constructor(holder, data, onChoose) {
    this.holder = holder;
    this.data = data;
    this.onChoose = onChoose;
    this.height = 280;
    this.left = 64;
    this.top = 26; // above it are the names of the axis and of the budget, where no point can be
    this.peaks = reach([...data.points.map(([peak]) => peak), data.keep_all[0]]);
    this.times = reach(data.points.map(([, time]) => time));
  }

  x(peak) { return this.left + (this.width - this.left - 26) * (peak - this.peaks[0]) / (this.peaks[1] - this.peaks[0]); }
  y(time) { return this.top + (this.height - this.top - 44) * (this.times[1] - time) / (this.times[1] - this.times[0]); }

  describe(plan) {
    const [whole, fastest] = this.data.keep_all;
    const share = (100 * plan.peak / whole).toFixed(1), slower = fastest ? (plan.time / fastest).toFixed(2) : "1.00";
    return `peak ${bytes(plan.peak)}, ${share}% of keeping everything; time ${seconds(plan.time)}, ${slower}x`;
  }

  draw(chosen) {
    if (this.data.points.length < 2) return;
    this.width = Math.max(280, this.holder.clientWidth || 640);
    const { data } = this, bottom = this.height - 44, right = this.width - 26;
    const parts = [];
    for (const [size, label] of sizeTicks(...this.peaks, this.width / 90)) {
      parts.push(svg("line", { class: "axis", x1: this.x(size), x2: this.x(size), y1: this.top, y2: bottom }));
      parts.push(svg("text", { x: this.x(size), y: bottom + 15, "text-anchor": "middle" }, label));
    }
    for (const [time, label] of timeTicks(...this.times)) {
      parts.push(svg("line", { class: "axis", x1: this.left, x2: right, y1: this.y(time), y2: this.y(time) }));
      parts.push(svg("text", { x: this.left - 6, y: this.y(time) + 4, "text-anchor": "end" }, label));
    }
    parts.push(svg("path", { class: "curve", d: stairs(data.points, this) }));
    if (data.budget && data.budget <= this.peaks[1]) {
      const x = this.x(data.budget), label = `budget ${bytes(data.budget)}`;
      parts.push(svg("line", { class: "limit", x1: x, x2: x, y1: this.top - 6, y2: bottom }));
      parts.push(svg("text", { x: Math.max(this.left + 50, Math.min(right - 50, x)), y: this.top - 12, "text-anchor": "middle" }, label));
    }
    parts.push(svg("text", { x: (this.left + right) / 2, y: this.height - 6, "text-anchor": "middle" }, "peak"));
    parts.push(svg("text", { x: this.left - 6, y: this.top - 12, "text-anchor": "end" }, "time"));
    data.plans.forEach((plan, number) => {
      const on = number === chosen;
      const choose = () => this.onChoose(number);
      parts.push(svg("circle", { cx: this.x(plan.peak), cy: this.y(plan.time), r: on ? 6 : 5, role: "radio", tabindex: on ? 0 : -1,
        "aria-checked": String(on), "aria-label": this.describe(plan), "data-plan": number, onclick: choose,
        onkeydown: (event) => this.key(event, number) }, svg("title", {}, this.describe(plan))));
    });
    const picture = svg("svg", { viewBox: `0 0 ${this.width} ${this.height}`, role: "radiogroup", "aria-label": "Peak against time" }, ...parts);
    this.holder.replaceChildren(picture);
  }

  key(event, number) {
    const by = { ArrowLeft: 1, ArrowDown: 1, ArrowRight: -1, ArrowUp: -1, Enter: 0, " ": 0 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(this.data.plans.length - 1, number + by));
    this.onChoose(next);
    this.holder.querySelector(`[data-plan="${next}"]`).focus();
  }
}

// More memory is never slower: from the right, each point holds down to its peak.
function stairs(points, chart) {
  let path = `M${chart.x(chart.peaks[1])},${chart.y(points[0][1])}`;
  for (const [peak, time] of points) path += ` V${chart.y(time)} H${chart.x(peak)}`;
  return path;
}

// The begin and end of an axis. It spans at least a tenth of its numbers, so that what hardly differs looks alike.
function reach(numbers) {
  const most = Math.max(...numbers), least = Math.min(...numbers), spread = Math.max(most - least, 0.1 * most) || 1;
  return [Math.max(0, least - 0.08 * spread), least + 1.08 * spread];
}
