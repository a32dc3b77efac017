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
    this.width = 640;
    this.height = 240;
    this.left = 84;
    this.top = 12;
    const peaks = data.points.map(([peak]) => peak), times = data.points.map(([, time]) => time);
    this.most = 1.04 * Math.max(...peaks, data.keep_all[0]);
    const spread = Math.max(...times) - Math.min(...times);
    this.fast = Math.max(0, Math.min(...times) - 0.08 * spread);
    this.slow = Math.max(...times) + 0.08 * spread || 1;
  }

  x(peak) { return this.left + (this.width - this.left - 10) * peak / this.most; }
  y(time) { return this.top + (this.height - this.top - 30) * (this.slow - time) / (this.slow - this.fast); }

  describe(plan) {
    const [whole, fastest] = this.data.keep_all;
    const share = (100 * plan.peak / whole).toFixed(1), slower = fastest ? (plan.time / fastest).toFixed(2) : "1.00";
    return `peak ${bytes(plan.peak)}, ${share}% of keeping everything; time ${seconds(plan.time)}, ${slower}x`;
  }

  draw(chosen) {
    if (this.data.points.length < 2) return;
    this.width = Math.max(320, Math.min(640, this.holder.clientWidth || 640));
    const { data } = this, bottom = this.height - 30;
    const parts = [];
    for (const [size, label] of sizeTicks(this.most)) {
      parts.push(svg("line", { class: "axis", x1: this.x(size), x2: this.x(size), y1: this.top, y2: bottom }));
      parts.push(svg("text", { x: this.x(size), y: bottom + 15, "text-anchor": "middle" }, label));
    }
    for (const [time, label] of timeTicks(this.fast, this.slow)) {
      parts.push(svg("line", { class: "axis", x1: this.left, x2: this.width - 10, y1: this.y(time), y2: this.y(time) }));
      parts.push(svg("text", { x: this.left - 6, y: this.y(time) + 4, "text-anchor": "end" }, label));
    }
    parts.push(svg("path", { class: "curve", d: stairs(data.points, this) }));
    if (data.budget && data.budget <= this.most) {
      parts.push(svg("line", { class: "limit", x1: this.x(data.budget), x2: this.x(data.budget), y1: this.top, y2: bottom }));
      parts.push(svg("text", { x: this.x(data.budget) - 4, y: this.top + 10, "text-anchor": "end" }, "budget"));
    }
    parts.push(svg("text", { x: this.width - 10, y: this.height - 2, "text-anchor": "end" }, "peak"));
    parts.push(svg("text", { x: 4, y: this.top + 10 }, "time"));
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
  let path = `M${chart.x(chart.most)},${chart.y(points[0][1])}`;
  for (const [peak, time] of points) path += ` V${chart.y(time)} H${chart.x(peak)}`;
  return path;
}
