// The page: one state, drawn again whenever it changes.

const began = performance.now();
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const drawn = new Map(); // number of a plan -> its step, made when it is first asked for
const state = { plan: data.chosen, by: "module", selected: [], view: null, hover: null, drag: null };
const picture = new Picture(byId("canvas"));
const modules = new ModuleTable(byId("modules"), (modules) => modules ? select(modules) : drawTables());
const frontier = new FrontierChart(byId("frontier"), data, choose);

function step() {
  if (!drawn.has(state.plan)) drawn.set(state.plan, new Step(data, data.plans[state.plan]));
  return drawn.get(state.plan);
}

function view() { return state.view || [0, step().end]; }

function drawPicture() { picture.draw(step(), { ...state, view: view(), budget: data.budget, keepAll: data.keep_all[0] }); }

function drawTables() {
  modules.draw(data, step().plan, state.selected);
  const count = drawValues(byId("values"), step(), state.selected, point, select);
  const where = state.selected.length ? ` of ${named(state.selected)}` : "";
  byId("values-of").textContent = `The ${count} largest${where}. A name shows the value in the picture.`;
}

// Modules as a text, for a sentence.
function named(modules) {
  return data.modules[modules[0]] + (modules.length > 1 ? ` and ${modules.length - 1} like it` : "");
}

function drawFacts() {
  const plan = step().plan, own = state.plan === data.chosen;
  byId("headline").textContent = own ? data.headline : plan.headline;
  const facts = own ? data.facts : [["this point", frontier.describe(plan)], ["does", does(plan)]];
  byId("facts").replaceChildren(...facts.flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]));
  byId("point").textContent = frontier.describe(plan) + (own ? " (the plan)" : "");
  byId("less").disabled = state.plan === data.plans.length - 1;
  byId("more").disabled = state.plan === 0;
}

function does(plan) {
  const [, , , , saved, again, away, , , extra] = plan.rows[0];
  const said = [`saves ${bytes(saved)}`];
  if (again) said.push(`recomputes ${bytes(again)} in ${seconds(extra)}`);
  if (away) said.push(`offloads ${bytes(away)}`);
  return said.join(", ");
}

function drawLegend() {
  byId("legend").replaceChildren(...step().legend(state.by).map(([name, text]) =>
    element("li", {}, element("i", { style: `background: var(--${name})` }), text)));
  if (step().hosted) byId("legend").append(element("li", {}, element("i", { class: "line" }), "waits on the host (dotted line)"));
}

function drawAll() {
  step().stack(state.by, state.selected);
  byId("deselect").hidden = !state.selected.length;
  drawFacts();
  drawLegend();
  drawPicture();
  drawTables();
  frontier.draw(state.plan);
}

function choose(number) {
  state.plan = number;
  state.view = null;
  leave();
  drawAll();
}

// Point at nothing.
function leave() {
  state.hover = null;
  byId("tip").hidden = true;
  byId("detail").replaceChildren();
}

// Select modules: their values stand out, and are what the table lists. The model itself is all of them.
function select(chosen) {
  state.selected = String(chosen) === String(state.selected) || chosen.includes(0) ? [] : chosen;
  leave();
  drawAll();
  byId("said").textContent = state.selected.length ? `Selected: ${named(state.selected)}.` : "All modules.";
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

// What is said of the value and the moment that are pointed at.
function about() {
  const { moment, life } = state.hover, plan = step().plan;
  const now = `At ${step().clock(plan.starts[moment])}: ${step().momentName(moment)}, ${step().blockName(moment)}; ` +
    `${bytes(step().total[moment])} on the device.`;
  const made = element("div", { class: "about" });
  if (life >= 0) {
    made.append(element("b", {}, step().lifeName(life)));
    for (const [label, text] of step().about(life)) made.append(element("span", {}, label), element("span", {}, text));
  }
  made.append(element("em", {}, now));
  return made;
}

// Below the picture, for keys and fingers: a tip beside the pointer is for the mouse.
function describe() {
  const module = state.hover.life >= 0 ? step().module[state.hover.life] : 0;
  const button = module ? element("button", { type: "button", onclick: () => select([module]) }, `Select ${data.modules[module]}`) : "";
  byId("tip").hidden = true;
  byId("detail").replaceChildren(about(), button);
}

// The value below a point of the picture, in its pixels; null outside of it.
function under(x, y) {
  if (x < picture.left || x >= picture.left + picture.width || y < picture.top || y > picture.top + picture.height) return null;
  const moment = picture.columns[picture.column(x)], size = picture.sizeAt(y);
  const found = step().at(moment).find(({ low, high }) => low <= size && size < high);
  return { moment, life: found ? found.life : -1, x };
}

function moveTo(x, y, mouse) {
  leave();
  state.hover = under(x, y);
  drawPicture();
  if (!state.hover) return;
  if (!mouse) return describe();
  const tip = byId("tip");
  tip.hidden = false;
  tip.replaceChildren(about());
  const [left, top] = beside(picture.outlined || { left: x - 8, right: x + 8, top: y - 8, bottom: y + 8 }, x, y, tip);
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

// Where the tip goes: beside the outlined value, which it must not cover, as near to the pointer as it can.
function beside(box, x, y, tip) {
  const { offsetWidth: wide, offsetHeight: tall } = tip, holder = byId("picture");
  const room = holder.clientWidth - wide, screen = window.innerHeight - holder.getBoundingClientRect().top - tall;
  const across = Math.max(0, Math.min(room, x - wide / 2)), along = Math.max(0, y - tall / 2);
  const away = (left, top) => Math.hypot(Math.max(left - x, x - left - wide, 0), Math.max(top - y, y - top - tall, 0)) + 9999 * (top > screen);
  return [[across, box.top - tall - 8], [box.left - wide - 8, along], [box.right + 8, along], [across, box.bottom + 8]]
    .filter(([left, top]) => left >= 0 && left <= room && top >= 0)
    .reduce((best, place) => away(...place) < away(...best) ? place : best);
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
  drawPicture();
  describe();
}

const keys = {
  ArrowLeft: () => move(-1, 0), ArrowRight: () => move(1, 0), ArrowUp: () => move(0, 1), ArrowDown: () => move(0, -1),
  Home: () => { state.hover = null; move(0, 0); }, End: () => move(step().count, 0),
  Enter: () => state.hover && state.hover.life >= 0 && select([step().module[state.hover.life]]),
  "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2),
  Escape: () => { state.view = null; leave(); if (state.selected.length) select([0]); else drawPicture(); },
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
    } else if (!pressed) moveTo(x, y, event.pointerType === "mouse");
  });
  holder.addEventListener("pointerdown", (event) => { if (!event.button) pressed = place(event); });
  holder.addEventListener("pointerup", (event) => {
    if (!pressed) return;
    const [x, y] = place(event), drag = state.drag;
    pressed = state.drag = null;
    if (drag) zoomTo(drag);
    else if (event.pointerType !== "mouse") moveTo(x, y, false);
    else if (state.hover && state.hover.life >= 0) select([step().module[state.hover.life]]);
  });
  holder.addEventListener("pointerleave", (event) => {
    pressed = state.drag = null;
    if (event.pointerType === "mouse") leave(); // a finger that is lifted leaves, too
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
  byId("deselect").addEventListener("click", () => select([0]));
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

byId("frontier-section").hidden = data.points.length < 2;
drawAdvice();
drawAll();
listen();

// For whoever looks at the page from outside, such as its tests.
window.fxremat = {
  data, state, step, picture, under, choose, select, zoom, bytes, seconds, sizeTicks, timeTicks, frontier,
  drawMilliseconds: performance.now() - began,
};
