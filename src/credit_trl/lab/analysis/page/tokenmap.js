"use strict";
// Texts are set with textContent and never parsed as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const state = { response: 0, quantity: data.quantities[0].key, left: 0, right: -1, sort: "given", zoom: 1, query: "", held: false, at: -1 };
let panes = [];

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

// null is NaN (no contrast prompts), a string is an infinity.
function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value.startsWith("-") ? "−∞" : "∞";
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}

function mapOf(response, checkpoint) {
  return data.responses[response].maps[checkpoint] || null;
}

function shownCheckpoints() {
  const shown = state.right >= 0 && state.right !== state.left ? [state.left, state.right] : [state.left];
  return shown.filter((checkpoint) => mapOf(state.response, checkpoint));
}

// ---------------------------------------------------------------- colours

function strength(value, scale) {
  if (typeof value === "string") return value.startsWith("-") ? -1 : 1;
  if (value === null) return 0;
  return Math.max(-1, Math.min(1, value / scale));
}

function scaleNow() {
  return state.zoom * data.scales[data.responses[state.response].group][state.quantity];
}

function paint() {
  const scale = scaleNow();
  for (const pane of panes) {
    const values = pane.map[state.quantity];
    for (let i = 0; i < pane.cells.length; i++) {
      const s = strength(values[i], scale);
      const cell = pane.cells[i];
      cell.className = pane.base[i] + (s > 0 ? " p" : s < 0 ? " n" : "") + (Math.abs(values[i]) > 1.0001 * scale ? " over" : "");
      cell.style.setProperty("--a", Math.abs(s).toFixed(3));
    }
    paintStrip(pane, values, scale);
  }
  const chosen = data.quantities.find((q) => q.key === state.quantity);
  const digits = scale < 0.1 ? 5 : 2;
  byId("low").textContent = number(-scale, digits);
  byId("high").textContent = "+" + number(scale, digits) + " nats";
  byId("meaning").textContent = chosen.symbol + ": " + meanings(state.quantity);
  for (const label of byId("quantities").querySelectorAll("label")) label.title = meanings(label.firstChild.value);
  markHits();
  if (state.at >= 0) inspect(state.at);
}

// Explanation of a quantity under the formula of each pane, without repetition.
function meanings(quantity) {
  return [...new Set(panes.map((pane) => pane.map.meanings[quantity]))].join(" | ");
}

function paintStrip(pane, values, scale) {
  const canvas = pane.strip;
  const style = getComputedStyle(document.body);
  const colour = (name) => style.getPropertyValue(name).trim().split(/\s+/).join(",");
  const positive = colour("--pos"), negative = colour("--neg");
  const width = Math.max(1, canvas.clientWidth), context = canvas.getContext("2d");
  canvas.width = width;
  canvas.height = 14;
  for (let x = 0; x < width; x++) {
    const from = Math.floor(x * values.length / width), to = Math.max(from + 1, Math.floor((x + 1) * values.length / width));
    let strongest = 0;
    for (let i = from; i < to && i < values.length; i++) {
      const s = strength(values[i], scale);
      if (Math.abs(s) > Math.abs(strongest)) strongest = s;
    }
    context.fillStyle = "rgba(" + (strongest > 0 ? positive : negative) + "," + Math.abs(strongest).toFixed(3) + ")";
    context.fillRect(x, 0, 1, 14);
  }
}

// ---------------------------------------------------------------- one response

function showContext() {
  const response = data.responses[state.response];
  const section = byId("context");
  section.replaceChildren();
  for (const turn of response.prompt) {
    section.append(element("h2", "", turn.role), element("pre", "text", turn.text));
  }
  const shown = [["feedback z", response.feedback], ["demonstration in z", response.demonstration]];
  for (const [name, text] of shown) {
    if (text !== null) section.append(element("h2", "", name), element("pre", "text", text));
  }
  if (response.contrasts.length) {
    const details = element("details");
    details.append(element("summary", "", "contrast prompts x′ (" + response.contrasts.length + ")"));
    for (const text of response.contrasts) details.append(element("pre", "text", text));
    section.append(details);
  }
}

function showPanes() {
  const container = byId("panes");
  container.replaceChildren();
  panes = shownCheckpoints().map((checkpoint) => buildPane(checkpoint));
  for (const pane of panes) container.append(pane.root);
  paint();
  showSummary();
}

function buildPane(checkpoint) {
  const response = data.responses[state.response];
  const map = mapOf(state.response, checkpoint);
  const root = element("div", "pane");
  const strip = element("canvas", "strip");
  const body = element("div", "map");
  body.tabIndex = 0;
  body.setAttribute("role", "group");
  body.setAttribute("aria-label", "Response under " + data.checkpoints[checkpoint]);
  root.append(element("h2", "", data.checkpoints[checkpoint] + " · R_t = " + map.formula + " · λ = " + Number(map.coef.toPrecision(4))), strip, body);
  const cells = [], base = [];
  let row = element("div", "row");
  for (let i = 0; i < response.tokens.length; i++) {
    const text = data.strings[response.tokens[i]];
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
  }
  body.append(row);
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
  strip.addEventListener("click", (event) => {
    const index = Math.min(cells.length - 1, Math.floor(event.offsetX / strip.clientWidth * cells.length));
    state.held = true;
    inspect(index);
    cells[index].scrollIntoView({ block: "center" });
  });
  return { root, strip, cells, base, map, checkpoint };
}

// ---------------------------------------------------------------- all numbers of one token

function inspect(index) {
  const response = data.responses[state.response];
  for (const pane of panes) {
    if (pane.cells[state.at]) pane.cells[state.at].classList.remove("at");
    pane.cells[index].classList.add("at");
  }
  state.at = index;
  const aside = byId("inspector");
  aside.replaceChildren(element("pre", "token", data.strings[response.tokens[index]]));
  const facts = ["token " + (index + 1) + " of " + response.tokens.length, "id " + response.ids[index], data.classes[response.classes[index]]];
  if (response.characters[index] !== undefined) facts.push("part of " + response.characters[index]);
  aside.append(element("p", "note", facts.join(" · ")));
  aside.append(numbersTable(index));
  for (const pane of panes) aside.append(...alternatives(pane, index));
}

function numbersTable(index) {
  const table = element("table", "numbers");
  const head = element("tr");
  head.append(element("th", "", "nats"), ...panes.map((pane) => element("th", "", data.checkpoints[pane.checkpoint])));
  table.append(head);
  const rows = [...data.quantities, { key: "teacher_logps", symbol: "f" }, { key: "entered_coef", symbol: "λ here" }];
  for (const { key, symbol } of rows) {
    const row = element("tr");
    row.dataset.quantity = key;
    const name = element("td", "", symbol);
    name.title = key === "entered_coef" ? "λ in this token's R_t: 0 where the contrast does not apply" : meanings(key);
    row.append(name, ...panes.map((pane) => element("td", "", number(pane.map[key][index]))));
    table.append(row);
  }
  return table;
}

function alternatives(pane, index) {
  const { ids, tokens, student, teacher, specific, advantage } = pane.map.alternatives;
  const table = element("table", "alternatives");
  const head = element("tr");
  for (const name of ["token", "R_t", "S_t", "f", "log π_θ"]) head.append(element("th", "", name));
  table.append(head);
  for (let a = 0; a < ids[index].length; a++) {
    const row = element("tr");
    const name = element("td", "code", data.strings[tokens[index][a]]);
    name.title = "id " + ids[index][a];
    row.append(name);
    for (const column of [advantage, specific, teacher, student]) row.append(element("td", "", number(column[index][a], 3)));
    table.append(row);
  }
  const name = "Most likely tokens" + (panes.length > 1 ? ", " + data.checkpoints[pane.checkpoint] : "");
  return [element("h2", "", name), table];
}

// ---------------------------------------------------------------- list, search, sort

function plain(text) {
  return text.replaceAll("↵\n", "\n");
}

const searchable = data.responses.map((response) => {
  const text = response.tokens.map((t) => plain(data.strings[t])).join("");
  const rest = [response.id, ...response.prompt.map((turn) => turn.text), response.feedback || "", response.demonstration || ""];
  return { response: text.toLowerCase(), rest: rest.join("\n").toLowerCase() };
});

function order() {
  const shown = data.responses.map((_, i) => i).filter((i) => {
    const found = searchable[i];
    return !state.query || found.response.includes(state.query) || found.rest.includes(state.query);
  });
  if (state.sort === "given") return shown;
  const [key, direction] = state.sort.split(" ");
  const value = (i) => {
    if (key === "reward") return data.responses[i].reward;
    const map = mapOf(i, state.left);
    return map && map.means[key];
  };
  const sign = direction === "up" ? 1 : -1;
  return shown.sort((a, b) => {
    const x = value(a), y = value(b);
    if (typeof x !== "number" || typeof y !== "number") return (typeof y === "number") - (typeof x === "number");
    return sign * (x - y);
  });
}

function showList() {
  const list = byId("list");
  list.replaceChildren();
  const shown = order();
  byId("count").textContent = shown.length + " of " + data.responses.length + " responses";
  for (const i of shown) {
    const response = data.responses[i], map = mapOf(i, state.left);
    const button = element("button");
    button.type = "button";
    button.setAttribute("aria-current", String(i === state.response));
    const facts = ["reward " + number(response.reward, 2), response.tokens.length + " tokens"];
    if (map) facts.push("mean S " + number(map.means.specific, 3));
    button.append(element("span", "name", response.id), element("span", "facts", facts.join(" · ")));
    button.addEventListener("click", () => choose(i));
    const item = element("li");
    item.append(button);
    list.append(item);
  }
}

function choose(index) {
  state.response = index;
  state.at = -1;
  state.held = false;
  if (!mapOf(index, state.left)) state.left = data.responses[index].maps.findIndex((map) => map !== null);
  byId("left").value = String(state.left);
  showList();
  showContext();
  showPanes();
}

function markHits() {
  const response = data.responses[state.response];
  const hit = new Set();
  const text = searchable[state.response].response;
  if (state.query) {
    const owner = [];
    response.tokens.forEach((t, i) => {
      for (let k = plain(data.strings[t]).toLowerCase().length; k > 0; k--) owner.push(i);
    });
    for (let from = text.indexOf(state.query); from >= 0; from = text.indexOf(state.query, from + 1)) {
      for (let k = from; k < from + state.query.length; k++) hit.add(owner[k]);
    }
  }
  for (const pane of panes) pane.cells.forEach((cell, i) => cell.classList.toggle("hit", hit.has(i)));
}

// ---------------------------------------------------------------- summary, controls

function showSummary() {
  const box = byId("summary").lastElementChild;
  box.replaceChildren(...shownCheckpoints().flatMap(summaryOf));
}

function summaryOf(checkpoint) {
  const summary = data.summaries[checkpoint];
  const percent = (value) => typeof value === "number" ? (100 * value).toFixed(1) + " %" : "–";
  const difference = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : null;
  const tables = element("div", "tables");
  tables.append(tableOf(
    ["token class", "tokens", "of |ΔV|", "of |S|", "mean ΔV", "mean S"],
    summary.classes.map((c) => [c.name, percent(c.share_of_tokens), percent(c.share_of_delta_v), percent(c.share_of_specific), number(c.mean_delta_v, 3), number(c.mean_specific, 3)]),
  ));
  for (const [title, strings] of [["most specific", summary.most_specific], ["most generic", summary.most_generic]]) {
    tables.append(tableOf(
      [title, "times", "mean S", "mean ΔV − S"],
      strings.map((s) => [s.text, String(s.count), number(s.mean_specific, 3), number(difference(s.mean_delta_v, s.mean_specific), 3)]),
      "code",
    ));
  }
  const counts = summary.responses + " responses with contrast, " + summary.tokens + " tokens";
  return [element("h2", "", data.checkpoints[checkpoint] + ": " + counts), tables];
}

function tableOf(names, rows, firstClass) {
  const table = element("table");
  const head = element("tr");
  head.append(...names.map((name) => element("th", "", name)));
  table.append(head);
  for (const cells of rows) {
    const row = element("tr");
    row.append(...cells.map((text, i) => element("td", i === 0 ? firstClass : "", text)));
    table.append(row);
  }
  return table;
}

function option(select, value, text) {
  const node = element("option", "", text);
  node.value = value;
  select.append(node);
}

function buildControls() {
  for (const { key, symbol } of data.quantities) {
    const label = element("label");
    const input = element("input");
    input.type = "radio";
    input.name = "quantity";
    input.value = key;
    input.checked = key === state.quantity;
    input.addEventListener("change", () => { state.quantity = key; paint(); });
    label.append(input, symbol);
    byId("quantities").append(label);
  }
  option(byId("right"), "-1", "—");
  data.checkpoints.forEach((name, i) => {
    option(byId("left"), String(i), name);
    option(byId("right"), String(i), name);
  });
  byId("right-label").hidden = data.checkpoints.length < 2;
  if (data.checkpoints.length > 1) state.right = 1;
  byId("right").value = String(state.right);
  const orders = [["given", "as given"], ["specific down", "mean S, high first"], ["specific up", "mean S, low first"], ["delta_v down", "mean ΔV, high first"], ["advantage down", "mean R, high first"], ["reward down", "reward, high first"], ["reward up", "reward, low first"]];
  for (const [value, text] of orders) option(byId("sort"), value, text);
  byId("left").addEventListener("change", (event) => { state.left = Number(event.target.value); showList(); showPanes(); });
  byId("right").addEventListener("change", (event) => { state.right = Number(event.target.value); showPanes(); });
  byId("sort").addEventListener("change", (event) => { state.sort = event.target.value; showList(); });
  byId("search").addEventListener("input", (event) => { state.query = event.target.value.toLowerCase(); showList(); markHits(); });
  byId("palette").addEventListener("change", (event) => { document.body.dataset.palette = event.target.value; paint(); });
  // Each step of the slider changes the magnitude of the full colour by a factor of 2^(1/4).
  byId("scale").addEventListener("input", (event) => { state.zoom = 2 ** (Number(event.target.value) / 4); paint(); });
  byId("theme").addEventListener("change", (event) => {
    if (event.target.value) document.documentElement.dataset.theme = event.target.value;
    else delete document.documentElement.dataset.theme;
  });
}

function fitHeader() {
  document.documentElement.style.setProperty("--header", document.querySelector("header").offsetHeight + "px");
}

buildControls();
choose(0);
fitHeader();
addEventListener("resize", fitHeader);
