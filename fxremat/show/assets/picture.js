// The picture of a step on a canvas: stacked memory, the budget, the time axis, and lanes of blocks, recomputation, copies.

class Picture {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.right = 16;
    this.laneHeight = 15;
  }

  // Draw a step. state: {view: [from, to], selected, hover: {moment, life}, drag: [x, x], budget, keepAll}
  draw(step, state) {
    this.step = step;
    this.state = state;
    this.style = getComputedStyle(document.documentElement);
    const width = this.canvas.parentElement.clientWidth, narrow = width < 560;
    this.left = narrow ? 66 : 96;
    this.height = narrow ? 240 : 360;
    this.width = Math.max(40, Math.floor(width - this.left - this.right));
    const limits = [
      { size: state.keepAll > 1.01 * step.peak && state.keepAll, label: `${narrow ? "keep all" : "keeping everything"} ${bytes(state.keepAll)}`, color: "quiet", dash: [2, 3] },
      { size: state.budget, label: `budget ${bytes(state.budget)}`, color: "text", dash: [7, 4] },
    ].filter(({ size }) => size).sort((a, b) => b.size - a.size);
    this.inside = limits.filter(({ size }) => size <= 4 * step.peak);
    this.outside = limits.filter(({ size }) => size > 4 * step.peak); // named above the picture
    this.top = 24 + 15 * this.outside.length;
    this.lanes = this.lanesOf(step);
    this.axis = this.top + this.height + this.lanes.length * this.laneHeight + 13;
    const tall = this.axis + 20, scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(tall * scale);
    this.canvas.style.height = `${tall}px`;
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.font = "12px system-ui, sans-serif";
    const most = Math.max(step.peak, ...this.inside.map(({ size }) => size), step.hosted) || 1;
    this.most = most * this.height / (this.height - 22); // with room for a label
    this.columns = step.columns(...state.view, this.width);
    this.context.fillStyle = this.color("page");
    this.context.fillRect(0, 0, width, tall);
    this.grid();
    this.areas();
    this.host();
    this.highlight();
    this.split();
    this.limits();
    this.drawLanes();
    this.times();
    this.cursor();
  }

  color(name) { return this.style.getPropertyValue(`--${name}`).trim(); }
  x(time) { const [from, to] = this.state.view; return this.left + this.width * (time - from) / (to - from); }
  y(size) { return this.top + this.height * (1 - size / this.most); }
  timeAt(x) { const [from, to] = this.state.view; return from + (to - from) * (x - this.left) / this.width; }
  column(x) { return Math.max(0, Math.min(this.width - 1, Math.floor(x - this.left))); }
  sizeAt(y) { return this.most * (1 - (y - this.top) / this.height); }

  // Where in the columns a life is to be seen: [first, end).
  span(life) {
    const search = (test) => {
      let low = 0, high = this.columns.length;
      while (low < high) { const middle = (low + high) >> 1; if (test(this.columns[middle])) high = middle; else low = middle + 1; }
      return low;
    };
    return [search((moment) => moment >= this.step.first[life]), search((moment) => moment > this.step.last[life])];
  }

  heights(start, end) {
    const change = new Float64Array(this.width + 1);
    for (let place = start; place < end; place++) {
      const life = this.step.order[place], [first, stop] = this.span(life);
      if (first >= stop) continue;
      change[first] += this.step.bytes[life];
      change[stop] -= this.step.bytes[life];
    }
    for (let column = 1; column <= this.width; column++) change[column] += change[column - 1];
    return change;
  }

  areas() {
    let below = new Float64Array(this.width);
    for (const band of this.step.bands) {
      const height = this.heights(band.start, band.end);
      const above = below.map((low, column) => low + height[column]);
      this.context.globalAlpha = band.marked ? (band.shade ? 0.8 : 1) : 0.22;
      this.context.fillStyle = this.color(band.color);
      this.area(below, above);
      below = above;
    }
    this.context.globalAlpha = 1;
  }

  // Fill between two heights; runs of columns without any are left out.
  area(below, above) {
    let column = 0;
    while (column < this.width) {
      if (above[column] <= below[column]) { column++; continue; }
      const begin = column;
      while (column < this.width && above[column] > below[column]) column++;
      this.context.beginPath();
      this.context.moveTo(this.left + begin, this.y(below[begin]));
      for (let at = begin; at < column; at++) {
        this.context.lineTo(this.left + at, this.y(above[at]));
        this.context.lineTo(this.left + at + 1, this.y(above[at]));
      }
      for (let at = column - 1; at >= begin; at--) {
        this.context.lineTo(this.left + at + 1, this.y(below[at]));
        this.context.lineTo(this.left + at, this.y(below[at]));
      }
      this.context.fill();
    }
  }

  // What waits on the host, as a line over the areas.
  host() {
    const { host } = this.step.plan;
    if (!host.length) return;
    this.context.strokeStyle = this.color("host");
    this.context.lineWidth = 1.5;
    this.context.setLineDash([2, 3]);
    this.context.beginPath();
    this.columns.forEach((moment, column) => this.context.lineTo(this.left + column, this.y(host[moment])));
    this.context.stroke();
    this.context.setLineDash([]);
    this.context.lineWidth = 1;
  }

  // The outline of the value that is pointed at, and the box around it.
  highlight() {
    const { hover } = this.state;
    this.outlined = null;
    if (!hover || hover.life < 0) return;
    const place = this.step.order.indexOf(hover.life), below = this.heights(0, place);
    const [first, stop] = this.span(hover.life);
    if (first >= stop) return;
    this.context.fillStyle = this.color("outlined");
    this.context.strokeStyle = this.color("text");
    this.context.lineWidth = 1.5;
    this.context.beginPath();
    const size = this.step.bytes[hover.life];
    for (let at = first; at < stop; at++) {
      this.context.lineTo(this.left + at, this.y(below[at] + size));
      this.context.lineTo(this.left + at + 1, this.y(below[at] + size));
    }
    for (let at = stop - 1; at >= first; at--) {
      this.context.lineTo(this.left + at + 1, this.y(below[at]));
      this.context.lineTo(this.left + at, this.y(below[at]));
    }
    this.context.closePath();
    this.context.fill();
    this.context.stroke();
    this.context.lineWidth = 1;
    const lows = below.slice(first, stop);
    this.outlined = { left: this.left + first, right: this.left + stop, top: this.y(Math.max(...lows) + size), bottom: this.y(Math.min(...lows)) };
  }

  line(x1, y1, x2, y2, color, dash = []) {
    this.context.strokeStyle = color;
    this.context.setLineDash(dash);
    this.context.beginPath();
    this.context.moveTo(x1, y1);
    this.context.lineTo(x2, y2);
    this.context.stroke();
    this.context.setLineDash([]);
  }

  text(words, x, y, align = "left", color = "quiet") {
    this.context.fillStyle = this.color(color);
    this.context.textAlign = align;
    this.context.fillText(words, x, y);
  }

  // Text over the picture, with a rim that sets it off.
  label(words, x, y, align, color) {
    this.context.strokeStyle = this.color("page");
    this.context.lineWidth = 4;
    this.context.lineJoin = "round";
    this.context.textAlign = align;
    this.context.strokeText(words, x, y);
    this.context.lineWidth = 1;
    this.text(words, x, y, align, color);
  }

  grid() {
    for (const [size, label] of sizeTicks(0, this.most)) {
      const y = Math.round(this.y(size)) + 0.5;
      this.line(this.left, y, this.left + this.width, y, this.color("grid"));
      this.text(label, this.left - 6, y + 4, "right");
    }
  }

  split() {
    const { plan } = this.step;
    if (plan.split >= this.step.count) return;
    const x = this.x(plan.starts[plan.split]);
    if (x < this.left || x > this.left + this.width) return;
    this.line(x, this.top - 12, x, this.axis, this.color("quiet"), [1, 3]);
    this.text("forward", x - 6, this.top - 9, "right");
    this.text("backward", x + 6, this.top - 9);
  }

  // Lines across at the budget and at the peak of keeping everything, and the plan's own peak as a point.
  limits() {
    const right = this.left + this.width, point = this.peakAt(), wide = (label) => this.context.measureText(label).width;
    const above = point && this.inside.map(({ size }) => this.y(size)).filter((y) => y <= point.y && y > point.y - 20);
    const high = point && Math.min(point.y - 2, ...above) - 6; // the baseline of the label of the peak
    const named = `peak ${bytes(this.step.peak)}`, half = wide(named) / 2;
    let [least, most] = [this.left + half, right - half]; // where the middle of that label may be
    this.outside.forEach(({ label, color }, number) => this.label(`↑ ${label}`, right, 11 + 15 * number, "right", color));
    let last = this.top; // the baseline of the label above
    for (const { size, label, color, dash } of this.inside) {
      const y = Math.round(this.y(size)) + 0.5;
      this.line(this.left, y, right, y, this.color(color), dash);
      last = y - 5 > last + 13 || last === this.top ? y - 5 : Math.max(y, last) + 13;
      const beside = point && Math.abs(last - high) < 14, onRight = beside && point.x < (this.left + right) / 2;
      this.label(label, onRight ? right - 4 : this.left + 6, last, onRight ? "right" : "left", color);
      if (beside && onRight) most = Math.min(most, right - wide(label) - half - 12);
      else if (beside) least = Math.max(least, this.left + wide(label) + half + 12);
    }
    if (!point) return;
    this.context.beginPath();
    this.context.arc(point.x, point.y, 3.5, 0, 7);
    this.context.fillStyle = this.color("text");
    this.context.strokeStyle = this.color("page");
    this.context.fill();
    this.context.stroke();
    this.label(named, Math.max(least, Math.min(most, point.x)), high, "center", "text");
  }

  // Where the peak is in the picture; null where the view leaves it out.
  peakAt() {
    const { total, peak } = this.step, first = this.columns.findIndex((moment) => total[moment] === peak);
    if (first < 0) return null;
    let last = first;
    while (this.columns[last + 1] === this.columns[first]) last++;
    return { x: this.left + (first + last + 1) / 2, y: this.y(peak) };
  }

  // Lanes: a label, and [start, end, color] of what is on them.
  lanesOf(step) {
    const { plan } = step, lanes = [["blocks", this.blockRuns(step)]];
    const again = plan.roles.indexOf("recompute");
    if (again >= 0) {
      const runs = plan.starts.map((start, at) => [start, plan.ends[at], "recomputed", at]).filter(([, , , at]) => plan.role[at] === again);
      lanes.push(["run again", runs]);
    }
    for (const name of new Set(plan.copies.map(([lane]) => lane)))
      lanes.push([name, plan.copies.filter(([lane]) => lane === name).map(([, start, end]) => [start, end, "offloaded"])]);
    return lanes;
  }

  blockRuns(step) {
    const { plan } = step, runs = [];
    for (let at = 0; at < step.count; at++) {
      const run = runs[runs.length - 1], block = plan.block[at];
      if (run && run[3] === block) run[1] = plan.ends[at];
      else runs.push([plan.starts[at], plan.ends[at], block % 2 ? "lane" : "lane-other", block]);
    }
    return runs;
  }

  drawLanes() {
    this.lanes.forEach(([label, runs], row) => {
      const y = this.top + this.height + 9 + row * this.laneHeight;
      const fitting = [label, label.replace("the ", "")].find((text) => this.context.measureText(text).width < this.left - 6);
      this.text(fitting || label.split(" ").pop(), this.left - 6, y + 11, "right");
      for (const [start, end, color, block] of runs) {
        const x = Math.max(this.left, this.x(start)), stop = Math.min(this.left + this.width, this.x(end));
        if (stop < this.left || x > this.left + this.width) continue;
        this.context.fillStyle = this.color(color);
        this.context.fillRect(x, y, Math.max(0.6, stop - x), this.laneHeight - 3);
        const name = row ? "" : this.step.plan.blocks[block] || "";
        const short = [name, String(block + 1)].find((text) => this.context.measureText(text).width < stop - x - 4);
        if (!row && short) this.text(short, (x + stop) / 2, y + 10, "center", "text");
      }
    });
  }

  times() {
    const [from, to] = this.state.view;
    for (const [time, label] of this.step.plan.timed ? timeTicks(from, to) : opTicks(from, to)) {
      const x = Math.round(this.x(time)) + 0.5;
      this.line(x, this.axis - 4, x, this.axis, this.color("quiet"));
      this.text(label, x, this.axis + 13, "center");
    }
    this.line(this.left, this.axis - 4, this.left + this.width, this.axis - 4, this.color("line"));
  }

  cursor() {
    const { hover, drag } = this.state;
    if (drag) {
      this.context.globalAlpha = 0.25;
      this.context.fillStyle = this.color("accent");
      this.context.fillRect(Math.min(...drag), this.top, Math.abs(drag[1] - drag[0]), this.height);
      this.context.globalAlpha = 1;
    } else if (hover) {
      const x = hover.x !== undefined ? hover.x : Math.max(this.left, this.x(this.step.plan.starts[hover.moment])) + 0.5;
      this.line(x, this.top, x, this.axis, this.color("text"));
    }
  }
}

// Multiples of 1, 2 or 5 times a power of ten between two numbers, about so many, with as many decimals as they need.
function roundSteps(from, to, count) {
  const power = 10 ** Math.floor(Math.log10((to - from) / count));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => (to - from) / size <= count);
  const found = [];
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  for (let number = Math.ceil(from / step - 1e-9); number * step <= to * (1 + 1e-12); number++)
    found.push([number * step, String(+(number * step).toFixed(decimals))]);
  return found;
}

function sizeTicks(from, to, count = 6) {
  const [unit, size] = units.find(([, size]) => to >= size) || ["B", 1];
  return roundSteps(from / size, to / size, count).map(([number, label]) => [number * size, `${label} ${unit}`]);
}

function timeTicks(from, to, count = 6) {
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["us", 1e-6]].find(([, size]) => to >= size) || ["us", 1e-6];
  return roundSteps(from / size, to / size, count).map(([number, label]) => [number * size, `${label} ${unit}`]);
}

function opTicks(from, to) {
  return roundSteps(from, to, 6).filter(([number]) => Number.isInteger(number)).map(([number, label]) => [number, `op ${label}`]);
}
