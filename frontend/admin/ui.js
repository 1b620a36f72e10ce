// Values from the router are inserted as text only, never as markup, styles or addresses.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const POINTS = 300;
const STATES = ["prepare", "queue", "compute", "pull", "wire", "route", "wait", "decode", "move"];
const byId = (id) => document.getElementById(id);
let history = [];

function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS(SVG, name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

const text = (x, y, said, kind = "", more = {}) => element("svg:text", { x, y, class: kind, ...more }, said);
const rect = (x, y, width, height, kind, more = {}) =>
  element("svg:rect", { x, y, width: Math.max(0, width), height, class: kind, ...more });

function seconds(s) {
  if (s === null || s === undefined) return "–";
  return s < 1 ? `${(1e3 * s).toFixed(s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;
}

function amount(number, unit = "") {
  const steps = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [step, letter] of steps) if (number >= step) return `${(number / step).toFixed(1)} ${letter}${unit}`;
  return `${number >= 10 ? number.toFixed(0) : Number(number.toFixed(1))}${unit ? " " + unit : ""}`;
}

const clock = (at) => new Date(1e3 * at).toLocaleTimeString();

// Topology: prefill replicas on the left, decode replicas on the right, KV transfers between them.

const WIDE = 330, HIGH = 74, GAP = 10, FULL = 1000;

function topology(view) {
  const svg = byId("topology"), places = new Map(), columns = { prefill: 0, decode: 0 }, drawn = [];
  for (const replica of view.replicas) {
    const x = replica.role === "prefill" ? 0 : FULL - WIDE, y = columns[replica.role]++ * (HIGH + GAP) + 18;
    places.set(replica.id, { x, y, role: replica.role });
    drawn.push(box(replica, x, y));
  }
  const rows = Math.max(1, columns.prefill, columns.decode);
  const most = Math.max(1, ...view.flows.map((flow) => flow.bytes_per_s));
  const flows = view.flows.filter((flow) => places.has(flow.source) && places.has(flow.target)).map((flow) => {
    const from = edge(places.get(flow.source), true), to = edge(places.get(flow.target), false);
    const bend = from.x === to.x ? (from.x < FULL / 2 ? 120 : -120) : 0, middle = (from.x + to.x) / 2 + bend;
    const path = element("svg:path", {
      d: `M${from.x} ${from.y} C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`,
      class: `flow ${["pull", "move"].includes(flow.kind) ? flow.kind : ""}`,
      "stroke-width": 1.5 + 5 * (flow.bytes_per_s / most),
    });
    path.append(element("svg:title", {}, `${flow.kind} ${flow.source} to ${flow.target}: ${amount(flow.bytes_per_s, "B/s")}`));
    return path;
  });
  const all = view.flows.reduce((sum, flow) => sum + flow.bytes_per_s, 0);
  const heads = [
    text(0, 11, `prefill (${columns.prefill})`, "head"),
    text(FULL - WIDE, 11, `decode (${columns.decode})`, "head"),
    text(FULL / 2, 11, `KV ${amount(all, "B/s")}`, "small", { "text-anchor": "middle" }),
  ];
  svg.setAttribute("viewBox", `0 0 ${FULL} ${rows * (HIGH + GAP) + 20}`);
  svg.replaceChildren(...heads, ...flows, ...drawn);
}

const edge = (place, leaves) => ({
  x: place.role === "prefill" ? place.x + WIDE : place.x,
  y: place.y + HIGH / 2 + (leaves ? -4 : 4),
});

function box(replica, x, y) {
  const state = ["ready", "joining", "draining", "lost"].includes(replica.state) ? replica.state : "lost";
  const role = replica.role === "prefill" ? "prefill" : "decode";
  const held = replica.blocks ? 1 - (replica.blocks_free + replica.blocks_cached) / replica.blocks : 0;
  const cached = replica.blocks ? replica.blocks_cached / replica.blocks : 0;
  const room = WIDE - 20, tokens = role === "prefill" ? replica.computed_per_s : replica.generated_per_s;
  const group = element("svg:g", { "data-replica": replica.id, "data-state": state, class: state === "lost" ? "off" : "" });
  group.append(
    rect(x + 2, y, WIDE - 4, HIGH, `box ${role} ${state}`, { rx: 6 }),
    text(x + 10, y + 17, replica.id, "head"),
    text(x + WIDE - 10, y + 17, state, `state-${state}`, { "text-anchor": "end" }),
    text(x + 10, y + 34, `${replica.running} running, ${replica.waiting} waiting, ${amount(tokens)} tokens/s`),
    rect(x + 10, y + 42, room, 7, "bar"),
    rect(x + 10, y + 42, room * Math.min(1, replica.running / Math.max(1, replica.max_running)), 7, "load"),
    rect(x + 10, y + 52, room, 7, "bar"),
    rect(x + 10, y + 52, room * held, 7, "held"),
    rect(x + 10 + room * held, y + 52, room * cached, 7, "cached"),
    text(x + 10, y + 70, `KV ${(100 * held).toFixed(0)} % in use, ${(100 * cached).toFixed(0)} % cached${replica.reused === null ? "" : `, ${(100 * replica.reused).toFixed(0)} % reused`}`, "small"),
  );
  return group;
}

// Charts of the last minutes.

function chart(id, lines, shown) {
  const svg = byId(id), width = 480, height = 130, left = 52, bottom = 16;
  const values = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const top = Math.max(...values, 1e-9) * 1.1;
  const at = (value, i) => `${(left + (i + POINTS - history.length) * (width - left) / POINTS).toFixed(1)} ${(height - bottom - value / top * (height - bottom - 8)).toFixed(1)}`;
  const parts = [element("svg:line", { x1: left, x2: width, y1: height - bottom, y2: height - bottom, class: "axis" }),
    text(0, 14, shown(top / 1.1), "small"), text(0, height - bottom, shown(0), "small"),
    text(left, height - 2, "5 minutes ago", "small"), text(width, height - 2, "now", "small", { "text-anchor": "end" })];
  lines.forEach((line, number) => {
    let path = "", pen = "M";
    line.values.forEach((value, i) => { if (value === null) { pen = "M"; } else { path += pen + at(value, i); pen = "L"; } });
    if (path) parts.push(element("svg:path", { d: path + (path.includes("L") ? "" : "h1"), class: line.kind }));
    const last = line.values.findLast((value) => value !== null);
    parts.push(text(width, 14 + 14 * number, `${line.name} ${last === undefined ? "–" : shown(last)}`, "small", { "text-anchor": "end" }));
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...parts);
}

function charts() {
  const pair = (name) => [0, 1].map((i) => ({ name: ["P50", "P99"][i], kind: ["p50", "p99"][i], values: history.map((point) => point[name] && point[name][i]) }));
  chart("ttft", pair("ttft_s"), seconds);
  chart("itl", pair("itl_s"), seconds);
  chart("rate", [{ name: "", kind: "p50", values: history.map((point) => point.tokens_per_s) }], (value) => amount(value));
  chart("waiting", [{ name: "", kind: "p50", values: history.map((point) => point.waiting) }], (value) => amount(value));
}

// Tables.

function table(id, heads, rows, none) {
  const body = rows.length ? rows : [[none]];
  const head = element("tr", {}, ...heads.map((one) => element("th", {}, one)));
  byId(id).replaceChildren(...(rows.length ? [head] : []), ...body.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell)))));
}

const PARTS = ["wait_s", "queue_s", "fetch_s", "compute_s", "keep_s", "transfer_s", "stall_s", "decode_s"];

function reason(options) {
  if (!options.length) return "";
  const parts = PARTS.filter((part) => options[0][part] > 0).map((part) => `${part.slice(0, -2)} ${seconds(options[0][part])}`);
  const second = options[1] ? `; next best ${pair(options[1])} ${seconds(options[1].cost_s)}` : "";
  const predicted = options[0].is_learnt ? seconds(options[0].cost_s) : "not learnt yet";
  return `${predicted}: ${parts.join(", ") || "nothing"}${second}`;
}

const pair = (option) => `${option.prefill || "–"} → ${option.decode || "–"}${option.fetch_from ? ` (from ${option.fetch_from})` : ""}`;

function decisions(view) {
  const rows = view.decisions.map((one) => {
    const link = element("a", { href: `#${encodeURIComponent(one.request)}` }, one.request);
    return [link, one.tenant || "–", one.options.length ? pair(one.options[0]) : "–", reason(one.options), one.outcome || "–", seconds(one.first_token_s || null), seconds(one.seconds)];
  });
  table("decisions", ["request", "tenant", "pair", "predicted cost", "outcome", "first token", "total"], rows, "none yet");
  table("events", ["at", "replica", "event"], view.events.map((one) => [clock(one.at), one.replica, one.text]), "none yet");
  table("autoscaler", ["at", "decision", "reason"], view.autoscaler.map((one) => [clock(one.at), one.text, one.reason]), "no decisions");
  byId("routers").replaceChildren(...Object.entries(view.routers).map(([name, address]) => element("li", {}, `${name}: ${address}${name === view.router ? " (this one)" : ""}`)));
}

function show(view, isAll) {
  if (isAll) history = view.history;
  else for (const point of view.history) if (!history.length || point.at > history[history.length - 1].at + 0.2) history.push(point);
  history = history.slice(-POINTS);
  byId("name").textContent = view.deployment;
  document.title = `${view.deployment}: ${view.num_replicas} replicas`;
  const more = view.num_replicas > view.replicas.length ? `, ${view.replicas.length} of them shown` : "";
  byId("summary").textContent = `${view.num_replicas} replicas${more}, as ${view.router} sees them`;
  topology(view);
  charts();
  decisions(view);
}

// Timeline of a request.

async function life(id) {
  const path = encodeURIComponent(id).replaceAll(".", "%2E");
  const [found, why] = await Promise.all(["lives", "routes"].map(async (kind) => {
    const answer = await fetch(`/debug/${kind}/${path}`);
    return answer.ok ? answer.json() : {};
  }));
  const [name, told] = Object.entries(found)[0] || [];
  byId("routes").replaceChildren();
  if (!told) {
    byId("life-head").textContent = `request ${id} not found on this router`;
    return byId("life").replaceChildren();
  }
  byId("life-head").textContent = `${name}: ${told.outcome} after ${seconds(told.seconds)}, first token after ${seconds(told.first_token_s)}${told.trace_id ? `, trace ${told.trace_id}` : ""}`;
  const svg = byId("life"), rows = told.spans.length, width = 1000, left = 190;
  svg.setAttribute("viewBox", `0 0 ${width} ${rows * 20 + 4}`);
  svg.replaceChildren(...told.spans.flatMap(([state, where, start, end], row) => {
    const x = left + (width - left - 70) * start / told.seconds, long = (width - left - 70) * (end - start) / told.seconds;
    return [text(0, row * 20 + 14, `${state} ${where || "router"}`),
      rect(x, row * 20 + 3, Math.max(1.5, long), 14, `span ${STATES.includes(state) ? state : ""}`),
      text(x + Math.max(1.5, long) + 4, row * 20 + 14, seconds(end - start), "small")];
  }));
  const lines = Object.values(why)[0] || [];
  byId("routes").replaceChildren(...told.troubles.map((one) => element("p", {}, `continued on another replica: ${one}`)),
    ...lines.map((attempt, number) => element("p", {}, `attempt ${number + 1}: ${pair(attempt.options[0])}, predicted ${reason(attempt.options)}`)));
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  location.hash = encodeURIComponent(byId("request").value);
});

function asked() {
  const id = decodeURIComponent(location.hash.slice(1));
  byId("request").value = id;
  if (id) life(id);
}

addEventListener("hashchange", asked);
asked();

const source = new EventSource("/ui/events");
const link = (said, isLost) => { byId("link").textContent = said; byId("link").className = isLost ? "lost" : ""; };
for (const name of ["all", "now"]) source.addEventListener(name, (event) => { link(`as of ${new Date().toLocaleTimeString()}`, false); show(JSON.parse(event.data), name === "all"); });
source.addEventListener("error", () => link("connection to the router lost", true));
