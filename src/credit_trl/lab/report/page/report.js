"use strict";
// Texts are set with textContent and never parsed as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// null and "nan" are undefined (no contrast prompts), other strings are infinities.
function number(value, digits = 4, sign = false) {
  if (value === null || value === undefined || value === "nan") return "–";
  if (typeof value === "string") return value.startsWith("-") ? "−∞" : "∞";
  const text = value.toFixed(digits);
  if (Number(text) === 0) return text.replace("-", "");
  return (sign && value > 0 ? "+" : "") + text.replace("-", "−");
}

const percent = (value, sign) => typeof value === "number" ? number(100 * value, 1, sign) : "–";

function interval(low, high, sign) {
  return typeof low === "number" ? "[" + percent(low, sign) + ", " + percent(high, sign) + "]" : "–";
}

function option(select, value, text) {
  const node = element("option", "", text);
  node.value = value;
  select.append(node);
}

// Symbols with their explanations, which the last section of the page lists.
const terms = [...document.querySelectorAll("dt[data-match]")].map((title) => [new RegExp(title.dataset.match), title.textContent + ": " + title.nextElementSibling.textContent]);

// A text, or one that explains its symbol where somebody points at it or moves the focus to it.
function termed(text) {
  const term = typeof text === "string" && terms.find(([pattern]) => pattern.test(text));
  if (!term) return text;
  const node = element("span", "term", text);
  node.tabIndex = 0;
  node.dataset.tip = term[1];
  return node;
}

function showTip(event) {
  const tip = byId("tip"), focused = document.querySelector("[data-tip]:focus-visible"); // which the pointer does not hide
  const target = event.target.closest && event.target.closest("[data-tip]") || (event.type === "mouseover" && focused);
  document.querySelectorAll("[aria-describedby=tip]").forEach((node) => node.removeAttribute("aria-describedby"));
  tip.hidden = !target || event.key === "Escape";
  if (tip.hidden) return;
  target.setAttribute("aria-describedby", "tip");
  tip.textContent = target.dataset.tip;
  const box = target.getBoundingClientRect(), { offsetWidth, offsetHeight } = tip;
  tip.style.left = Math.max(8, Math.min(box.left, window.innerWidth - offsetWidth - 8)) + "px";
  tip.style.top = (box.bottom + offsetHeight + 14 > window.innerHeight ? box.top - offsetHeight - 6 : box.bottom + 6) + "px";
}

for (const kind of ["mouseover", "focusin", "focusout", "click"]) document.addEventListener(kind, showTip);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") byId("tip").hidden = true; });

// Text with `code` between backticks.
function prose(tag, text) {
  const node = element(tag);
  text.split("`").forEach((part, i, parts) => node.append(i % 2 && i < parts.length - 1 ? element("code", "", part) : part));
  return node;
}

// Table whose rows are blocks with labels in a narrow window. A cell is a text or a node.
function tableOf(names, rows, className, firstClass) {
  const table = element("table", className), head = element("thead"), body = element("tbody"), line = element("tr");
  for (const name of names) {
    line.append(element("th"));
    line.lastChild.append(termed(name));
  }
  head.append(line);
  for (const cells of rows) {
    const row = element("tr");
    cells.forEach((cell, i) => {
      const own = element("td", i === 0 ? firstClass : "");
      own.dataset.label = names[i];
      own.append(i === 0 && firstClass !== "code" ? termed(cell) : cell);
      row.append(own);
    });
    body.append(row);
  }
  table.append(head, body);
  return table;
}

function show(id, title) {
  byId(id).hidden = false;
  byId(id).querySelector("h2").textContent = title;
  const link = element("a", "", title);
  link.href = "#" + id;
  byId("contents").append(link);
}

// ---------------------------------------------------------------- probe

function change(part) {
  return part ? (100 * part.change).toFixed(1) + " ± " + (200 * part.error).toFixed(1) : "–";
}

function buildProbe() {
  const probe = data.probe, facts = probe.facts, policy = facts.success.mean, box = byId("probe").lastElementChild;
  const foreign = facts.conditions["another prompt's z"];
  const numbers = element("dl", "numbers");
  const values = [["without z", policy], ["with z", facts.read.mean], ["with another prompt's z", foreign?.mean], ["best of a group", facts.best.mean]];
  for (const [name, value] of values) {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", typeof value === "number" ? percent(value) + " %" : "–"));
    numbers.append(pair);
  }
  const arms = element("div", "probed");
  for (const arm of probe.arms) {
    const bar = shape("svg", { role: "img", "aria-label": arm.name + ": floor " + change(arm.floor) + " points, target " + percent(arm.ceiling.mean) + " %" });
    bar.append(shape("rect", { x: 0, y: 4, width: "100%", height: 10 }));
    if (arm.floor) {
      const [low, high] = [-2, 2].map((errors) => Math.min(1, Math.max(0, policy + arm.floor.change + errors * arm.floor.error)));
      bar.append(shape("rect", { class: "floor", x: 100 * low + "%", y: 4, width: Math.max(0.5, 100 * (high - low)) + "%", height: 10 }));
    }
    bar.append(shape("circle", { cx: 100 * arm.ceiling.mean + "%", cy: 9, r: 5 }), shape("line", { x1: 100 * policy + "%", x2: 100 * policy + "%", y1: 0, y2: 18 }));
    const floor = arm.floor ? change(arm.floor) + ", share " + arm.floor.share.toFixed(2) : "no floor";
    arms.append(element("span", arm.name in probe.advice.dropped ? "dropped" : "", arm.name), bar, element("small", "", floor + "; ● " + percent(arm.ceiling.mean) + " %"));
  }
  const note = "Success of each arm's target: ● with all that it shows; the bar, the policy's answers weighted by the gated target, ± 2 errors, without what z states. The line is the policy.";
  box.append(element("p", "advice", probe.advice.sentence), numbers, element("p", "note", note), arms);
  box.append(element("p", "note", probe.prompts + " prompts with " + probe.samples + " answers each; " + percent(facts.mixed.mean) + " % of the groups are mixed."));
  const unknown = element("ul");
  const limits = [
    [probe.arms.some((arm) => !arm.floor), "The floor of some arms: too few successes, or a target too far from the policy."],
    [foreign && Math.abs(foreign.mean - facts.read.mean) < 0.05, "What z states: another prompt's z does as much as its own."],
    [facts.truncated.mean > 0.2, "Answers beyond max_completion_length: more than a fifth is truncated."],
    [!Object.keys(probe.lookahead).length, "How fast each arm learns, and what GRPO learns: see --lookahead."],
    [true, "Memorising against generalising, moving teachers, collapse and late reversals."],
  ];
  for (const [holds, text] of limits) if (holds) unknown.append(element("li", "", text));
  box.append(element("h3", "", "What this cannot know"), unknown);
  const rows = Object.entries({ ...facts.conditions, ...facts.parts }).map(([name, part]) => [name, percent(part.baseline), percent(part.mean), change(part)]);
  const leads = probe.leads.map((lead) => [lead.words, percent(lead.without), percent(lead.with), ""]);
  const targets = probe.arms.map((arm) => [arm.name, change(arm.gated), short(arm.length), percent(arm.leads)]);
  const ahead = Object.entries(probe.lookahead).map(([name, changes]) => [name, ...changes.map(change)]);
  const folded = (title, ...parts) => {
    const details = element("details");
    details.append(element("summary", "", title), ...parts);
    box.append(details);
  };
  folded("Success and parts of the verdict with z, %",
    tableOf(["", "without", "with", "change ± 2 errors"], [...rows, ...leads]),
    tableOf(["target", "gated answers", "tokens", "risen first words, %"], targets),
    tableOf(["look-ahead", "seed 0", "seed 1"], ahead));
  folded("Answers to the same prompts with the same random numbers", ...Object.entries(probe.texts).slice(0, 3).flatMap(([prompt, text]) => [
    element("p", "text", text),
    tableOf(["target", "verdict", "answer"], probe.examples.filter((row) => String(row.prompt) === prompt).map((row) => [row.condition, row.success ? "right" : "wrong", row.text])),
  ]));
  folded("The rule of the advice", element("p", "text", probe.rule));
}

// ---------------------------------------------------------------- answer
// Mean of a verdict metric over runs, before and after training; a rate in per cent.
function metricText(metrics, name) {
  const [before, after] = [0, 1].map((i) => metrics.reduce((sum, run) => sum + run[i][name] / metrics.length, 0));
  if (Number.isNaN(before + after)) return "–";
  const isRate = Math.min(before, after) >= 0 && Math.max(before, after) <= 1;
  return isRate ? percent(before) + " → " + percent(after) + " %" : before.toPrecision(4) + " → " + after.toPrecision(4);
}


function buildAnswer() {
  const answer = data.answer, section = byId("answer"), box = section.lastElementChild;
  section.hidden = false;
  section.classList.add(answer.status);
  section.querySelector("h2").replaceChildren(...prose("span", answer.title).childNodes);
  if (answer.progress) box.append(...progressOf(answer.progress));
  const [subject, ...lines] = answer.lines.map((line) => prose("p", line));
  if (subject) box.append(subject);
  for (const { run, title, remedy } of answer.problems) {
    const problem = element("div", "problem"), strong = element("strong");
    strong.append(...prose("span", (data.runs.length > 1 ? run + ": " : "") + title).childNodes);
    if (data.runs.length > 1 || title !== answer.title) problem.append(strong);
    problem.append(prose("p", remedy));
    box.append(problem);
  }
  box.append(...lines);
  if (answer.groups.length) {
    const metrics = Object.keys(answer.groups[0].metrics[0][1]);
    const rows = answer.groups.map((row) => [
      row.group, String(row.prompts), percent(row.before), percent(row.after), interval(row.low, row.high),
      percent(row.difference, true), interval(row.difference_low, row.difference_high, true), ...metrics.map((name) => metricText(row.metrics, name)),
    ]);
    const titles = ["group", "prompts", "before, %", "after, %", "95 % interval of after", "difference", "95 % interval of it", ...metrics];
    box.append(tableOf(titles, rows, "stacked"));
  }
  if (!answer.warnings.length) return;
  const list = element("ul");
  for (const { run, step, time, message } of answer.warnings) {
    const place = (data.runs.length > 1 ? run + ", " : "") + "step " + step + (time ? ", " + time.replace("T", " ").replace("+00:00", " UTC") : "");
    list.append(prose("li", place + ": " + message));
  }
  box.append(element("h3", "", "Warnings (" + answer.warnings.length + ")"), list);
}

const STALE = 600, REFRESH = 15; // seconds

// Bar and text of a run that has not ended; the page is read again until it has.
function progressOf({ step, last_step, seconds_left }) {
  const bar = element("progress"), text = element("p", "note"), age = Date.now() / 1000 - data.written;
  bar.max = last_step;
  bar.value = step;
  bar.setAttribute("aria-label", "Steps");
  text.textContent = "Step " + step + " of " + last_step;
  if (age > STALE) text.textContent += ". The last news is " + duration(age) + " old: the run may have ended before its last step.";
  else {
    if (typeof seconds_left === "number") text.textContent += ", about " + duration(seconds_left) + " left";
    text.textContent += ". This page reads itself again while the run trains.";
    setTimeout(refresh, 1000 * REFRESH);
  }
  return [bar, text];
}

function duration(seconds) {
  if (seconds < 90) return Math.max(1, Math.round(seconds)) + " s";
  return seconds < 5400 ? Math.round(seconds / 60) + " minutes" : (seconds / 3600).toFixed(1) + " hours";
}

const REMEMBERED = ["theme", "step", "response", "left", "right"];

// Read the page again with the same choices, but not while somebody holds a token.
function refresh() {
  if (document.hidden || state.held) return setTimeout(refresh, 1000);
  try {
    sessionStorage.setItem("choices", JSON.stringify(REMEMBERED.map((id) => byId(id).value)));
  } catch { /* no storage here */ }
  location.reload();
}

function restore() {
  let values = [];
  try {
    values = JSON.parse(sessionStorage.getItem("choices")) || [];
    sessionStorage.removeItem("choices");
  } catch { /* no storage here */ }
  REMEMBERED.forEach((id, i) => {
    const select = byId(id), isLast = id === "step" && values[i] === String(select.options.length - 2); // follow the newest
    if (isLast || !values[i] || ![...select.options].some((item) => item.value === values[i]) || select.value === values[i]) return;
    select.value = values[i];
    select.dispatchEvent(new Event("change"));
  });
}

// ---------------------------------------------------------------- summary and comparison

function buildSummary() {
  const box = byId("summary").lastElementChild;
  if (data.runs.length === 1) {
    const facts = element("dl", "facts");
    const add = (name, value) => {
      const pair = element("div");
      pair.append(element("dt"), element("dd", "", value));
      pair.firstChild.append(termed(name));
      facts.append(pair);
    };
    for (const row of data.comparison) {
      const bounds = interval(row.low, row.high);
      add("avg@" + row.k + (row.greedy ? ", greedy," : "") + " at step " + row.step + ", %", percent(row.score) + (bounds === "–" ? "" : " " + bounds));
      if (typeof row.before === "number") add("avg@" + row.k + " before training, %", percent(row.before));
    }
    const [row] = data.training;
    for (const [name, value] of [["highest training reward", row.train_score], ["seconds a step", row.seconds], ["S_t, mean (nats)", row.s_mean]]) {
      if (typeof value === "number") add(name, short(value));
    }
    box.append(facts, optionsOf("Options", true));
    return;
  }
  const tasks = [...new Set(data.comparison.map((row) => row.task))];
  for (const task of tasks) {
    const rows = data.comparison.filter((row) => row.task === task);
    const names = ["arm", "runs", "step", "before", "avg@" + rows[0].k + (rows.some((row) => row.greedy) ? ", greedy" : "") + ", %", "its 95 % interval", "difference", "95 % interval of it", "p (Holm)"];
    const cells = rows.map((row) => [
      armName(data.arms.indexOf(row.arm)), String(row.runs), String(row.step), percent(row.before), percent(row.score), interval(row.low, row.high),
      percent(row.difference, true), interval(row.difference_low, row.difference_high, true),
      typeof row.p_holm !== "number" ? "–" : row.p_holm < 0.001 ? "< 0.001" : row.p_holm.toFixed(3),
    ]);
    box.append(element("h3", "", task + ": last evaluation, " + rows[0].prompts + " shared prompts"), tableOf(names, cells, "stacked"));
    box.append(element("p", "note", "Differences are from the first arm, in percentage points, paired by prompt and by seed where both arms have the same seeds. With few prompts intervals are rough."));
  }
  const training = ["arm", "C", "avg@k, %", "train score, peak", "seconds a step", "ratio", "S_t, mean", "S_t, std"];
  const cells = data.training.map((row, i) => [
    armName(i), String(row.contrasts ?? "–"), percent(row.score),
    ...[row.train_score, row.seconds, row.ratio, row.s_mean, row.s_std].map((value) => typeof value === "number" ? short(value) : "–"),
  ]);
  box.append(element("h3", "", "Training: contrast prompts C, cost and S_t in nats"), tableOf(training, cells, "stacked"));
  box.append(optionsOf("Options that differ", data.comparison.length === 0));
}

function optionsOf(title, isOpen) {
  const names = Object.keys(data.options[0]), details = element("details");
  let head = names, rows = data.options.map((row) => names.map((name) => String(row[name] ?? "–")));
  if (names.length > rows.length) { // the shorter side lies across
    head = ["option", ...(rows.length > 1 ? rows.map((row) => row[0]) : ["value"])];
    rows = names.slice(1).map((name, i) => [name, ...rows.map((row) => row[i + 1])]);
  }
  details.append(element("summary", "", title), tableOf(head, rows, "stacked options"));
  details.open = isOpen;
  return details;
}

function armName(index) {
  const name = element("span", "", "");
  const item = element("span", "swatch c" + index % 6 + (index > 5 ? " again" : ""));
  item.style.display = "inline-block";
  item.style.verticalAlign = "middle";
  item.style.marginRight = "7px";
  name.append(item, termed(data.arms[index]));
  return name;
}

// ---------------------------------------------------------------- curves

const WIDTH = 360, HEIGHT = 170, LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 22;

function buildCurves() {
  const bands = data.runs.length > data.arms.length ? "Bands reach from the lowest to the highest run of an arm." : "The band of avg@k is its 95 % interval over prompts.";
  const changes = data.changes.length ? " Dotted lines stand where a resumed run changed its options, see above." : "";
  byId("curves").querySelector(".note").append(" " + bands + changes);
  if (data.arms.length > 1) {
    data.arms.forEach((_, index) => {
      const item = element("li");
      item.append(armName(index));
      byId("arms").append(item);
    });
  }
  for (const curve of data.curves) byId("grid").append(figureOf(curve));
}

function ticksOf(low, high) {
  const span = high - low, step = 10 ** Math.floor(Math.log10(span / 2));
  const unit = [1, 2, 5, 10].map((factor) => factor * step).find((size) => span / size <= 4) || span;
  const ticks = [];
  for (let tick = Math.ceil(low / unit) * unit; tick <= high + 1e-9 * unit; tick += unit) ticks.push(tick);
  return [ticks, Math.max(0, -Math.floor(Math.log10(unit) + 1e-9))];
}

function figureOf(curve) {
  const figure = element("figure"), caption = element("figcaption");
  const points = curve.series.flatMap((one) => one.points);
  const steps = [...new Set(points.map((point) => point[0]))].sort((a, b) => a - b);
  const values = points.flatMap((point) => point.slice(1)).filter((value) => typeof value === "number");
  let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const isFlat = high - low <= 1e-9 * Math.abs(high); // sums of equal values differ in the last digit
  const margin = (!isFlat && (high - low) * 0.06) || Math.abs(high) * 0.05 || 1;
  low -= margin;
  high += margin;
  const x = (step) => LEFT + (WIDTH - LEFT - RIGHT) * (steps.length > 1 ? (step - steps[0]) / (steps.at(-1) - steps[0]) : 0.5);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0" });
  const [ticks, digits] = ticksOf(low, high);
  for (const tick of ticks) {
    svg.append(shape("line", { class: "frame", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
    svg.append(shape("text", { x: LEFT - 5, y: y(tick) + 4, "text-anchor": "end" }, number(tick, digits)));
  }
  const [marks] = steps.length > 1 ? ticksOf(steps[0], steps.at(-1)) : [[steps[0]]];
  for (const mark of marks.filter(Number.isInteger)) svg.append(shape("text", { x: x(mark), y: HEIGHT - 6, "text-anchor": "middle" }, String(mark)));
  for (const step of data.changes.filter((step) => step >= steps[0] && step <= steps.at(-1))) {
    const line = shape("line", { class: "change", y1: TOP, y2: HEIGHT - BOTTOM, x1: x(step), x2: x(step) });
    line.append(shape("title", {}, "Options changed at step " + step));
    svg.append(line);
  }
  const ranks = ranksOf(curve.series, high - low);
  curve.series.forEach(({ arm, points: own }, n) => {
    const group = shape("g", { class: "c" + arm % 6 + (arm > 5 ? " again" : "") + (ranks[n] ? " over" + Math.min(3, ranks[n]) : "") });
    const banded = own.filter((point) => typeof point[2] === "number" && typeof point[3] === "number");
    if (banded.length) {
      const edge = [...banded.map((p) => [p[0], p[3]]), ...banded.map((p) => [p[0], p[2]]).reverse()];
      group.append(shape("polygon", { class: "band", points: edge.map(([s, v]) => x(s) + "," + y(v)).join(" ") }));
    }
    group.append(shape("polyline", { points: own.map(([s, v]) => x(s) + "," + y(v)).join(" ") }));
    if (own.length <= 30) for (const [s, v] of own) group.append(shape("circle", { class: "dot", cx: x(s), cy: y(v), r: 2.6 + 2 * ranks[n] }));
    svg.append(group);
  });
  const cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  svg.append(cursor);
  let at = steps.length - 1;
  const read = (index) => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    cursor.setAttribute("x1", x(steps[at]));
    cursor.setAttribute("x2", x(steps[at]));
    caption.textContent = textAt(curve, steps[at]);
  };
  const rest = () => {
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    caption.textContent = lastText(curve);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), place = (event.clientX - box.left) / box.width * WIDTH;
    const distances = steps.map((step) => Math.abs(x(step) - place));
    read(distances.indexOf(Math.min(...distances)));
  });
  svg.addEventListener("pointerleave", rest);
  svg.addEventListener("blur", rest);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    read(at + move);
  });
  svg.setAttribute("aria-label", curve.title + ", last: " + lastText(curve));
  rest();
  figure.append(element("h3"), svg, caption);
  figure.firstChild.append(termed(curve.title));
  const covered = curve.series.filter((_, n) => ranks[n]).map(({ arm }) => data.arms[arm]);
  if (covered.length) figure.append(element("p", "note", "Drawn dashed, as it lies on an earlier curve: " + covered.join("; ")));
  return figure;
}

// Number of earlier curves on which each curve lies: at all common steps they differ by less than a line's width.
function ranksOf(series, span) {
  const ranks = [];
  series.forEach(({ points }, n) => {
    const values = new Map(points.map(([step, value]) => [step, value]));
    const isCovered = (earlier) => {
      const common = earlier.points.filter(([step]) => values.has(step));
      return common.length > 0 && common.every(([step, value]) => Math.abs(value - values.get(step)) < 0.01 * span);
    };
    ranks.push(series.slice(0, n).filter(isCovered).length);
  });
  return ranks;
}

function textAt(curve, step) {
  const parts = curve.series.flatMap(({ arm, points }) => {
    const found = points.find((point) => point[0] === step);
    return found ? [valueText(arm, found)] : [];
  });
  return "step " + step + ": " + parts.join(" · ");
}

// The last values of all arms, which may end at different steps.
function lastText(curve) {
  const ends = new Map();
  for (const { arm, points } of curve.series) {
    const last = points.at(-1);
    ends.set(last[0], [...(ends.get(last[0]) || []), valueText(arm, last)]);
  }
  return [...ends].map(([step, parts]) => "step " + step + ": " + parts.join(" · ")).join("; ");
}

function valueText(arm, [, value, low, high]) {
  const name = data.arms.length > 1 ? data.arms[arm] + " " : "";
  return name + short(value) + (typeof low === "number" ? " [" + short(low) + ", " + short(high) + "]" : "");
}

function short(value) {
  return number(value, Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 3);
}

// ---------------------------------------------------------------- rollouts

function buildRollouts() {
  const groups = new Map();
  for (const rollout of data.rollouts) {
    const name = (data.runs.length > 1 ? rollout.run + ", " : "") + "step " + rollout.step;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(rollout);
  }
  const names = [...groups.keys()];
  names.forEach((name, i) => option(byId("step"), String(i), name));
  const choose = () => {
    const own = groups.get(names[Number(byId("step").value)]);
    byId("shown").textContent = own.length + " rollouts";
    byId("cards").replaceChildren(...own.map((rollout, i) => cardOf(rollout, i === 0)));
  };
  byId("step").value = String(names.length - 1);
  byId("step").addEventListener("change", choose);
  choose();
}

function labelled(name, text, className) {
  const box = element("div", className);
  box.append(element("h3", "", name), element("pre", "text", text));
  return box;
}

// Pictures of a prompt; other addresses than PNG data are dropped.
function pictures(urls) {
  const box = element("div", "pictures");
  for (const url of (urls || []).filter((url) => url.startsWith("data:image/png;base64,"))) {
    box.append(element("img"));
    box.lastChild.src = url;
  }
  return box.childElementCount ? [box] : [];
}

function cardOf(rollout, isOpen) {
  const card = element("details", "rollout"), summary = element("summary"), box = element("div");
  const rewards = Object.entries(rollout.rewards).filter(([name]) => name !== "s_mean" && name !== "advantage");
  const facts = rewards.map(([name, value]) => name + " " + number(value, 2));
  if (rollout.rewards.s_mean) facts.push("mean S_t " + number(rollout.rewards.s_mean, 3));
  const said = rollout.completion.map((turn) => turn.text).join("\n");
  summary.append(element("span", "reward", facts.join(" · ")), element("span", "line", said.replaceAll("\n", " ")));
  const several = rollout.completion.length > 1;
  box.append(...pictures(rollout.images), ...rollout.prompt.map((turn) => labelled(turn.role, turn.text)));
  box.append(...rollout.completion.map((turn) => labelled(several ? "completion, " + turn.role : "completion", turn.text)));
  if (rollout.feedback) box.append(labelled("feedback", rollout.feedback));
  if (rollout.teacher_prompt) {
    const prompt = element("details", "wide");
    prompt.append(element("summary", "", "prompt of the teacher (x, z)"), element("pre", "text", rollout.teacher_prompt));
    box.append(prompt);
  }
  card.open = isOpen;
  card.append(summary, box);
  return card;
}

// ---------------------------------------------------------------- token maps

const maps = data.maps;
const state = { response: 0, quantity: maps && maps.quantities[0].key, left: 0, right: -1, zoom: 1, held: false, at: -1 };
let panes = [];

const mapOf = (response, checkpoint) => maps.responses[response].maps[checkpoint] || null;

function shownCheckpoints() {
  const shown = state.right >= 0 && state.right !== state.left ? [state.left, state.right] : [state.left];
  return shown.filter((checkpoint) => mapOf(state.response, checkpoint));
}

function strength(value, scale) {
  if (value === null || value === "nan") return 0;
  if (typeof value === "string") return value.startsWith("-") ? -1 : 1;
  return Math.max(-1, Math.min(1, value / scale));
}

function paint() {
  const scale = state.zoom * maps.responses[state.response].scales[state.quantity];
  for (const pane of panes) {
    const values = pane.map[state.quantity];
    pane.cells.forEach((cell, i) => {
      const s = strength(values[i], scale);
      cell.className = pane.base[i] + (s > 0 ? " p" : s < 0 ? " n" : "") + (Math.abs(values[i]) > 1.0001 * scale ? " over" : "");
      cell.style.setProperty("--a", Math.abs(s).toFixed(3));
      cell.dataset.value = Math.abs(values[i]) < 0.05 ? "" : number(values[i], 1, true);
    });
  }
  const digits = scale < 0.1 ? 5 : 2;
  const isCredit = state.quantity === "centred" || state.quantity === "advantage";
  byId("low").textContent = number(-scale, digits) + (isCredit ? " punished" : "");
  byId("high").textContent = (isCredit ? "rewarded " : "") + "+" + number(scale, digits) + " nats";
  byId("meaning").textContent = meanings(state.quantity);
  for (const label of byId("quantities").querySelectorAll("label")) label.dataset.tip = meanings(label.firstChild.value);
  if (state.at >= 0) inspect(state.at);
}

// Explanation of a quantity under the formula of each pane, without repetition.
function meanings(quantity) {
  return [...new Set(panes.map((pane) => pane.map.meanings[quantity]))].join(" | ");
}

function showContext() {
  const response = maps.responses[state.response], section = byId("context");
  section.replaceChildren(...pictures(response.images[0]), ...response.prompt.map((turn) => labelled(turn.role, turn.text)));
  if (response.feedback !== null) section.append(labelled("feedback z, reward " + number(response.reward, 2), response.feedback));
  const folded = response.demonstration === null ? [] : [["demonstration in z", [response.demonstration]]];
  if (response.contrasts.length) folded.push(["contrast prompts x′ (" + response.contrasts.length + ")", response.contrasts]);
  for (const [name, texts] of folded) {
    const details = element("details");
    const shown = (i) => (texts === response.contrasts ? pictures(response.images[i + 1]) : []);
    details.append(element("summary", "", name), ...texts.flatMap((text, i) => [...shown(i), element("pre", "text", text)]));
    section.append(details);
  }
}

function showPanes() {
  panes = shownCheckpoints().map(buildPane);
  byId("panes").replaceChildren(...panes.map((pane) => pane.root));
  byId("panes").classList.toggle("numbered", byId("values").checked);
  paint();
  byId("classes").lastElementChild.replaceChildren(...shownCheckpoints().flatMap(classesOf));
}

function buildPane(checkpoint) {
  const response = maps.responses[state.response], map = mapOf(state.response, checkpoint);
  const root = element("div", "pane"), body = element("div", "map");
  body.tabIndex = 0;
  body.setAttribute("role", "group");
  body.setAttribute("aria-label", "Response under " + maps.checkpoints[checkpoint]);
  root.append(element("h3", "", maps.checkpoints[checkpoint] + " · " + map.formula), body);
  const cells = [], base = [];
  let row = element("div", "row");
  response.tokens.forEach((text, i) => {
    const ends = text.endsWith("\n");
    base.push(response.special[i] ? "t special" : "t");
    const cell = element("span", base[i], ends ? text.slice(0, -1) : text);
    cell.index = i;
    cells.push(cell);
    row.append(cell);
    if (ends) {
      body.append(row);
      row = element("div", "row");
    }
  });
  if (row.childNodes.length) body.append(row);
  body.addEventListener("mouseover", (event) => {
    if (!state.held && event.target.index !== undefined) inspect(event.target.index);
  });
  body.addEventListener("click", (event) => {
    const index = event.target.index;
    state.held = index !== undefined && !(state.held && index === state.at);
    if (index !== undefined) inspect(index);
  });
  body.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    state.held = true;
    inspect(Math.max(0, Math.min(cells.length - 1, state.at + step)));
    cells[state.at].scrollIntoView({ block: "nearest" });
  });
  return { root, cells, base, map, checkpoint };
}

function inspect(index) {
  const response = maps.responses[state.response];
  for (const pane of panes) {
    if (pane.cells[state.at]) pane.cells[state.at].classList.remove("at");
    pane.cells[index].classList.add("at");
  }
  state.at = index;
  const facts = ["token " + (index + 1) + " of " + response.tokens.length, "id " + response.ids[index], response.classes[index]];
  if (response.characters[index] !== undefined) facts.push("part of " + response.characters[index]);
  const rows = [...maps.quantities, { key: "teacher_logps", symbol: "f" }].map(({ key, symbol }) => [symbol, ...panes.map((pane) => number(pane.map[key][index]))]);
  const numbers = tableOf(["nats", ...panes.map((pane) => maps.checkpoints[pane.checkpoint])], rows, "numbers");
  const token = element("div");
  token.append(element("pre", "token", response.tokens[index]), element("p", "note", facts.join(" · ")), numbers);
  byId("inspector").replaceChildren(token, ...panes.map((pane) => alternatives(pane, index)));
}

function alternatives(pane, index) {
  const { ids, tokens, student_logps, teacher_logps, specific, centred } = pane.map.alternatives;
  const rows = ids[index].map((_, a) => [tokens[index][a], ...[centred, specific, teacher_logps, student_logps].map((column) => number(column[index][a], 2))]);
  const name = "Most likely tokens" + (panes.length > 1 ? ", " + maps.checkpoints[pane.checkpoint] : "");
  const box = element("div");
  box.append(element("h3", "", name), tableOf(["token", "R_t − mean", "S_t", "f", "log π_θ"], rows, "alternatives", "code"));
  return box;
}

function choose(index) {
  state.response = index;
  state.at = -1;
  state.held = false;
  if (!mapOf(index, state.left)) state.left = maps.responses[index].maps.findIndex((map) => map !== null);
  byId("left").value = String(state.left);
  byId("values").checked = maps.responses[index].tokens.length <= 120;
  showContext();
  showPanes();
  byId("headline").textContent = headlineOf(maps.responses[index]);
  inspect(maps.responses[index].headline.index);
  for (const { cells } of panes) {
    const cell = cells[state.at], body = cell.closest(".map");
    body.scrollTop += cell.getBoundingClientRect().top - body.getBoundingClientRect().top - body.clientHeight / 3;
  }
}

// What there is to see at the token that is shown first: its change, and the token that the teacher prefers there.
function headlineOf({ tokens, maps: all, headline: { index, pair } }) {
  const scored = all.map((map, i) => [map, maps.checkpoints[i]]).filter(([map]) => map !== null);
  const [[start, startName], [end, endName]] = [scored[0], scored.at(-1)];
  const sampled = "“" + tokens[index].trim() + "”", probability = (map) => typeof map.student_logps[index] === "number" ? percent(Math.exp(map.student_logps[index])) + " %" : "–";
  let text = "Token " + (index + 1) + ", " + sampled + ": ";
  text += scored.length > 1 ? "its probability went from " + probability(start) + " (" + startName + ") to " + probability(end) + " (" + endName + ")." : "probability " + probability(start) + ".";
  if (pair === null) return text + " The teacher prefers it, too.";
  const credit = (value) => number(value, 1, true);
  return text + " With the feedback the teacher prefers “" + start.alternatives.tokens[index][pair].trim() + "”: R_t − mean is " + credit(start.alternatives.centred[index][pair]) + " for that and " + credit(start.centred[index]) + " for " + sampled + ".";
}

function classesOf(checkpoint) {
  const summary = maps.summaries[checkpoint], tables = element("div", "tables");
  const share = (value) => typeof value === "number" ? percent(value) + " %" : "–";
  tables.append(tableOf(
    ["token class", "tokens", "of |ΔV|", "of |S|", "mean ΔV", "mean S"],
    summary.map((c) => [c.name, share(c.of_tokens), share(c.of_delta_v), share(c.of_specific), number(c.delta_v, 3), number(c.specific, 3)]),
  ));
  return [element("h3", "", maps.checkpoints[checkpoint] + ": " + summary.reduce((sum, c) => sum + c.tokens, 0) + " tokens of responses with contrast prompts"), tables];
}

function buildMaps() {
  for (const { key, symbol } of maps.quantities) {
    const label = element("label"), input = element("input");
    input.type = "radio";
    input.name = "quantity";
    input.value = key;
    input.checked = key === state.quantity;
    input.addEventListener("change", () => { state.quantity = key; paint(); });
    label.append(input, symbol);
    byId("quantities").append(label);
  }
  maps.responses.forEach((response, i) => option(byId("response"), String(i), response.id + " · reward " + number(response.reward, 2)));
  option(byId("right"), "-1", "—");
  maps.checkpoints.forEach((name, i) => {
    option(byId("left"), String(i), name);
    option(byId("right"), String(i), name);
  });
  byId("right-label").hidden = maps.checkpoints.length < 2;
  if (maps.checkpoints.length > 1) state.right = maps.checkpoints.length - 1;
  byId("right").value = String(state.right);
  byId("response").addEventListener("change", (event) => choose(Number(event.target.value)));
  byId("left").addEventListener("change", (event) => { state.left = Number(event.target.value); showPanes(); });
  byId("right").addEventListener("change", (event) => { state.right = Number(event.target.value); showPanes(); });
  byId("values").addEventListener("change", (event) => byId("panes").classList.toggle("numbered", event.target.checked));
  // Each step of the slider changes the magnitude of the full colour by a factor of 2^(1/4).
  byId("scale").addEventListener("input", (event) => { state.zoom = 2 ** (Number(event.target.value) / 4); paint(); });
  choose(0);
}

// ---------------------------------------------------------------- page

byId("theme").addEventListener("change", (event) => {
  if (event.target.value) document.documentElement.dataset.theme = event.target.value;
  else delete document.documentElement.dataset.theme;
});
if (data.answer) buildAnswer();
if (data.probe) { show("probe", "Advice before training"); buildProbe(); }
const isComparison = data.runs && data.runs.length > 1;
if (isComparison) { show("summary", "Comparison"); buildSummary(); }
if (maps) { show("maps", isComparison ? "Token maps of " + maps.run : "Token maps"); buildMaps(); }
if (data.curves && data.curves.length) { show("curves", "Curves"); buildCurves(); }
if (data.rollouts && data.rollouts.length) { show("rollouts", "Rollouts"); buildRollouts(); }
if (data.runs && !isComparison) { byId("symbols").before(byId("summary")); show("summary", "Run"); buildSummary(); }
if (maps || (data.curves && data.curves.length)) show("symbols", "Symbols");
restore();
