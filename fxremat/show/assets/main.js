// The page: one state, drawn again whenever it changes.

const began = performance.now();
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const drawn = new Map(); // number of a plan -> its step, made when it is first asked for
const state = { plan: data.chosen, by: "module", selected: -1, view: null, hover: null, drag: null };
const picture = new Picture(byId("canvas"));
const modules = new ModuleTable(byId("modules"), (module) => module === null ? drawTables() : select(module));
const frontier = new FrontierChart(byId("frontier"), data, choose);

function step() {
  if (!drawn.has(state.plan)) drawn.set(state.plan, new Step(data, data.plans[state.plan]));
  return drawn.get(state.plan);
}

function view() { return state.view || [0, step().end]; }

function drawPicture() { picture.draw(step(), { ...state, view: view(), budget: data.budget }); }

function drawTables() {
  modules.draw(data, step().plan, state.selected);
  const count = drawValues(byId("values"), step(), state.selected, point, select);
  const where = state.selected > 0 ? ` of ${data.modules[state.selected]}` : "";
  byId("values-of").textContent = `The ${count} largest${where}. A name shows the value in the picture.`;
}

function drawFacts() {
  const plan = step().plan, own = state.plan === data.chosen;
  const facts = own ? data.facts : [["this point", frontier.describe(plan)], ["does", does(plan)]];
  byId("facts").replaceChildren(...facts.flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]));
  byId("point").textContent = frontier.describe(plan) + (own ? " (the plan)" : "");
  byId("less").disabled = state.plan === data.plans.length - 1;
  byId("more").disabled = state.plan === 0;
}

function does(plan) {
  const [, saved, again, away, , , , extra] = plan.tree[0];
  const said = [`saves ${bytes(saved)}`];
  if (again) said.push(`recomputes ${bytes(again)} in ${seconds(extra)}`);
  if (away) said.push(`offloads ${bytes(away)}`);
  return said.join(", ");
}

function drawLegend() {
  const shown = new Set(step().kind);
  byId("legend").replaceChildren(...data.kinds.flatMap(([name, text], kind) =>
    shown.has(kind) ? [element("li", {}, element("i", { style: `background: var(--${name})` }), text)] : []));
  if (step().hosted) byId("legend").append(element("li", {}, element("i", { class: "line" }), "waits on the host (dotted line)"));
}

function drawAll() {
  step().stack(state.by, state.selected);
  byId("deselect").hidden = state.selected < 0;
  drawFacts();
  drawLegend();
  drawPicture();
  drawTables();
  frontier.draw(state.plan);
}

function choose(number) {
  state.plan = number;
  state.view = state.hover = null;
  byId("tip").hidden = true;
  drawAll();
}

// Select a module: its values stand out, and are what the table lists. The model itself is all of them.
function select(module) {
  state.selected = module === state.selected || module === 0 ? -1 : module;
  state.hover = null;
  byId("tip").hidden = true;
  drawAll();
  announce(state.selected < 0 ? "All modules." : `Module ${data.modules[state.selected]} is selected.`);
}

// Show a life from the table in the picture.
function point(life) {
  state.hover = { moment: step().first[life], life };
  const [from, to] = view(), begins = step().plan.starts[step().first[life]], ends = step().plan.ends[step().last[life]];
  if (ends < from || begins > to) state.view = null;
  drawPicture();
  describe();
  byId("picture").scrollIntoView({ block: "nearest" });
}

function announce(text) { byId("detail").replaceChildren(element("span", {}, text)); }

function about(life) {
  const made = element("div", { class: "about" }, element("b", {}, step().lifeName(life)));
  for (const [label, text] of step().about(life)) made.append(element("span", {}, label), element("span", {}, text));
  return made;
}

// What is said of the moment and the value that are pointed at, below the picture.
function describe() {
  const { moment, life } = state.hover, plan = step().plan;
  const now = `At ${step().clock(plan.starts[moment])}: ${step().momentName(moment)}, ${step().blockName(moment)}; ` +
    `${bytes(step().total[moment])} on the device.`;
  const parts = [element("div", {}, now)];
  if (life >= 0) {
    const module = step().module[life];
    parts.push(about(life));
    if (module) parts.push(element("button", { class: "plain", type: "button", onclick: () => select(module) }, `Select ${data.modules[module]}`));
  }
  byId("detail").replaceChildren(...parts);
}

// The value below a point of the picture, in its pixels; null outside of it.
function under(x, y) {
  if (x < picture.left || x >= picture.left + picture.width || y < picture.top || y > picture.top + picture.height) return null;
  const moment = picture.columns[picture.column(x)], size = picture.sizeAt(y);
  const found = step().at(moment).find(({ low, high }) => low <= size && size < high);
  return { moment, life: found ? found.life : -1, x };
}

function moveTo(x, y) {
  state.hover = under(x, y);
  const tip = byId("tip");
  tip.hidden = !state.hover || state.hover.life < 0;
  if (state.hover) {
    drawPicture();
    describe();
    if (!tip.hidden) {
      tip.replaceChildren(about(state.hover.life));
      const room = byId("picture").clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(0, Math.min(x + 14, room))}px`;
      const below = y + 16 + tip.offsetHeight <= byId("picture").clientHeight;
      tip.style.top = `${below ? y + 16 : Math.max(0, y - tip.offsetHeight - 10)}px`;
    }
  } else drawPicture();
}

function zoom(from, to) {
  const whole = step().end, least = whole * 1e-6;
  const begin = Math.max(0, Math.min(from, whole - least)), end = Math.min(whole, Math.max(to, begin + least));
  state.view = begin <= 0 && end >= whole ? null : [begin, end];
  drawPicture();
}

// Zoom to what was dragged over, in pixels; a drag beside the picture is none.
function zoomTo(drag) {
  const [begin, end] = drag.map((x) => Math.max(picture.left, Math.min(picture.left + picture.width, x))).sort((a, b) => a - b);
  if (end - begin > 3) zoom(picture.timeAt(begin), picture.timeAt(end));
  else drawPicture();
}

function zoomBy(factor) {
  const [from, to] = view();
  const middle = state.hover ? step().plan.starts[state.hover.moment] : (from + to) / 2;
  zoom(middle - (middle - from) * factor, middle + (to - middle) * factor);
}

// Keys: left and right in time, up and down through the values at one moment.
function move(inTime, inStack) {
  const plan = step().plan;
  let moment = state.hover ? state.hover.moment : state.view ? step().momentAt(state.view[0]) : 0;
  if (inTime) moment = Math.max(0, Math.min(step().count - 1, moment + inTime));
  const there = step().at(moment);
  let at = there.findIndex(({ life }) => state.hover && life === state.hover.life);
  if (inStack || at < 0) at = Math.max(0, Math.min(there.length - 1, at + inStack));
  const [from, to] = view(), start = plan.starts[moment];
  if (start < from || start > to) zoom(start - (to - from) / 2, start + (to - from) / 2);
  state.hover = { moment, life: there.length ? there[at].life : -1 };
  byId("tip").hidden = true;
  drawPicture();
  describe();
}

const keys = {
  ArrowLeft: () => move(-1, 0), ArrowRight: () => move(1, 0), ArrowUp: () => move(0, 1), ArrowDown: () => move(0, -1),
  Home: () => { state.hover = null; move(0, 0); }, End: () => move(step().count, 0),
  Enter: () => state.hover && state.hover.life >= 0 && select(step().module[state.hover.life]),
  "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2),
  Escape: () => { state.view = state.hover = null; if (state.selected >= 0) select(0); else drawPicture(); },
};

function listen() {
  const holder = byId("picture");
  const place = (event) => { const box = holder.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  let pressed = null;
  holder.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (pressed && event.pointerType === "mouse" && Math.abs(x - pressed[0]) > 4) {
      state.drag = [pressed[0], x];
      byId("tip").hidden = true;
      drawPicture();
    } else if (!pressed) moveTo(x, y);
  });
  holder.addEventListener("pointerdown", (event) => { if (!event.button) pressed = place(event); });
  holder.addEventListener("pointerup", (event) => {
    if (!pressed) return;
    const [x, y] = place(event), drag = state.drag;
    pressed = state.drag = null;
    if (drag) zoomTo(drag);
    else if (event.pointerType !== "mouse") moveTo(x, y);
    else if (state.hover && state.hover.life >= 0) select(step().module[state.hover.life]);
  });
  holder.addEventListener("pointerleave", () => {
    pressed = state.drag = state.hover = null;
    byId("tip").hidden = true;
    drawPicture();
  });
  holder.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const input of document.querySelectorAll('input[name="stack"]'))
    input.addEventListener("change", () => { state.by = input.value; drawAll(); });
  byId("zoom-in").addEventListener("click", () => zoomBy(0.5));
  byId("zoom-out").addEventListener("click", () => zoomBy(2));
  byId("whole").addEventListener("click", () => { state.view = null; drawPicture(); });
  byId("deselect").addEventListener("click", () => select(0));
  byId("less").addEventListener("click", () => choose(state.plan + 1));
  byId("more").addEventListener("click", () => choose(state.plan - 1));
  window.addEventListener("resize", () => { drawPicture(); frontier.draw(state.plan); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawPicture);
}

function drawAdvice() {
  if (!data.advice || !data.advice.length) return;
  byId("advice").hidden = false;
  byId("advice-list").replaceChildren(...data.advice.map((text) => element("li", {}, text)));
}

document.title = data.title;
byId("title").textContent = data.title;
byId("frontier-section").hidden = data.points.length < 2;
drawAdvice();
drawAll();
listen();

// For whoever looks at the page from outside, such as its tests.
window.fxremat = {
  data, state, step, picture, under, choose, select, zoom, bytes, seconds, sizeTicks, timeTicks,
  drawMilliseconds: performance.now() - began,
};
