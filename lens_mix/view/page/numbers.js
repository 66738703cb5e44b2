"use strict";
// Tokens are only ever inserted as text (textContent, canvas text, SVG text), so that none can act as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
// This is a Map because a user's method may be named "constructor", which every plain object has.
const SCORES = new Map(Object.entries(DATA.scores));
const $ = id => document.getElementById(id);
const make = (name, attributes = {}, ...children) => {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
};
const draw = (name, attributes, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
};

// ------------------------------------------------------------------ state
const state = { prompt: 0, map: 0, layer: null, head: -1, query: null, view: "text", unit: "raw", by: "token",
  scale: "map", first: 1, diagonal: 1, threshold: 0.04, tree: 0 };
const maps = () => DATA.prompts[state.prompt];
const map = () => maps()[state.map];
const keysOf = m => m.keys || m.tokens;
const trees = () => DATA.trees[state.prompt];

function readHash() {
  for (const [key, value] of new URLSearchParams(location.hash.slice(1)))
    if (Object.hasOwn(state, key)) state[key] = ["view", "unit", "scale", "by"].includes(key) ? value : value === "" ? null : +value;
  const inside = (n, count) => Number.isInteger(n) && n >= 0 && n < count;
  if (!inside(state.prompt, DATA.prompts.length)) state.prompt = 0;
  if (!inside(state.map, maps().length)) state.map = 0;
  settle();
}

// Replace every entry of the state that is not valid for this map by its default.
function settle() {
  const inside = (n, count) => Number.isInteger(n) && n >= 0 && n < count;
  if (!views().includes(state.view)) state.view = "text";
  if (!inside(state.tree, trees().length)) state.tree = 0;
  const of = state.view === "tree" ? maps().findIndex(m => m.label === trees()[state.tree].name) : -1;
  if (of >= 0) state.map = of;
  const m = map();
  if (!m.names.includes(state.layer)) state.layer = m.names[m.names.length - 1];
  if (!inside(state.head, m.heads)) state.head = -1;
  if (!inside(state.query, m.tokens.length)) state.query = m.query;
  if (!["token", "word", "sentence"].includes(state.by)) state.by = "token";
}

function set(changes) {
  Object.assign(state, changes);
  // If the map has a tree of its own, it is the one to show.
  const own = "map" in changes || "view" in changes ? trees().findIndex(tree => tree.name === map().label) : -1;
  if (own >= 0) state.tree = own;
  settle();
  const kept = Object.entries(state).map(([key, value]) => [key, value === null ? "" : String(value)]);
  // The frame of a notebook has no address, so that the state cannot be kept there.
  try { history.replaceState(null, "", "#" + new URLSearchParams(kept)); } catch { /* the state is not kept */ }
  render();
}

// ------------------------------------------------------------------ numbers
const decoded = new Map();
async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
function fromFloat16(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}
// Return the scores of one layer, [head][row * keys + key], with NaN for hidden keys. A layer is decoded once.
function layerOf(m, place) {
  const name = `${DATA.prompts.findIndex(all => all.includes(m))}/${m.label}/${place}`;
  if (!decoded.has(name)) decoded.set(name, decode(m, m.layers[place]));
  return decoded.get(name);
}
async function decode(m, packed) {
  const rows = m.queries.length, keys = keysOf(m).length, heads = Math.max(1, m.heads);
  const mask = packed.visible ? new Uint8Array(await inflate(packed.visible)) : null;
  const seen = (row, key) => mask ? mask[(row * keys + key) >> 3] >> ((row * keys + key) & 7) & 1
    : !m.causal || key <= m.queries[row];
  const buffer = await inflate(packed.data);
  const raw = m.code === "float16" ? new Uint16Array(buffer)
    : m.code === "int8" ? new Int8Array(buffer) : new Uint8Array(buffer);
  const steps = m.code === "int8" ? 127 : 255;
  const number = m.code === "float16" ? fromFloat16 : c => Math.sign(c) * (c / steps) ** 2;
  let next = 0;
  const out = [];
  for (let head = 0; head < heads; head++) {
    const scores = new Float32Array(rows * keys).fill(NaN);
    for (let row = 0; row < rows; row++)
      for (let key = 0; key < keys; key++)
        if (seen(row, key)) scores[row * keys + key] = number(raw[next++]) * packed.largest;
    out.push(scores);
  }
  return out;
}
// Return the scores of one head, or the mean over heads (-1).
const means = new WeakMap();
async function scoresOf(m, place, head) {
  const all = await layerOf(m, place);
  if (all.length === 1) return all[0];
  if (head >= 0) return all[head];
  if (!means.has(all)) {
    const mean = new Float32Array(all[0].length);
    for (const scores of all) for (let i = 0; i < mean.length; i++) mean[i] += scores[i] / all.length;
    means.set(all, mean);
  }
  return means.get(all);
}
async function rowOf(m, place, head, query) {
  const row = m.queries.indexOf(query), keys = keysOf(m).length;
  return row < 0 ? null : (await scoresOf(m, place, head)).slice(row * keys, (row + 1) * keys);
}
const size = row => row.reduce((sum, x) => sum + (Number.isNaN(x) ? 0 : Math.abs(x)), 0);
const inUnit = row => {
  const total = state.unit === "share" ? size(row) || 1 : 1;
  return row.map(x => x / total);
};
// Return the words or sentences as lists of positions, or single tokens if the map has no such units.
function unitsOf(starts, count) {
  const first = starts[state.by] || Array.from({ length: count }, (_, i) => i);
  return first.map((start, i) => Array.from({ length: (first[i + 1] ?? count) - start }, (_, j) => start + j));
}
// Return the row of the query's unit: the mean of its tokens' rows, in which hidden keys count 0. `of` has the
// positions of these rows: only the query's own if the map does not have all of them.
async function unitRow(m, place, head, query) {
  const whole = unitsOf(m.words, m.tokens.length).find(positions => positions.includes(query));
  const of = whole.every(position => m.queries.includes(position)) ? whole : [query];
  const rows = await Promise.all(of.map(position => rowOf(m, place, head, position)));
  if (!rows[0]) return { row: null, of, whole };
  const row = Array.from(rows[0], (_, key) => rows.every(scores => Number.isNaN(scores[key])) ? NaN
    : rows.reduce((sum, scores) => sum + (scores[key] || 0), 0) / rows.length);
  return { row, of, whole };
}
// Return the sum over each unit's visible keys.
const summed = (row, units) => units.map(keys => keys.every(key => Number.isNaN(row[key])) ? NaN
  : keys.reduce((sum, key) => sum + (row[key] || 0), 0));
const strongest = row => row.reduce((most, x) => Number.isNaN(x) ? most : Math.max(most, Math.abs(x)), 0);
const shown = x => Number.isNaN(x) ? "hidden" : x === 0 ? "0"
  : Math.abs(x) >= 0.001 && Math.abs(x) < 10000 ? x.toPrecision(4) : x.toExponential(2);
const placeOf = m => Math.max(0, m.names.indexOf(state.layer));
// Return the index of the layer with this name, or -1. An input map with one layer always uses that layer.
const sameLayer = (m, name) => m.kind === "input" && m.names.length === 1 ? 0 : m.names.indexOf(name);
// Return the number of a layer for its label; a map of the whole model, or a mean of layers, has none.
const layerNumber = (m, place) => m.layer_names[place].endsWith(`layer ${m.names[place]}`) ? String(m.names[place]) : "";
const unit = () => state.unit === "share" ? "share of the row" : "raw score";

function spearman(a, b) {
  const both = [...a.keys()].filter(i => !Number.isNaN(a[i]) && !Number.isNaN(b[i]));
  if (both.length < 3) return NaN;
  const ranks = row => {
    const order = [...both.keys()].sort((i, j) => row[both[i]] - row[both[j]]), out = new Float64Array(both.length);
    for (let i = 0; i < order.length;) {
      let j = i;
      while (j < order.length && row[both[order[j]]] === row[both[order[i]]]) j++;
      for (let k = i; k < j; k++) out[order[k]] = (i + j - 1) / 2;
      i = j;
    }
    return out;
  };
  const x = ranks(a), y = ranks(b), mean = (both.length - 1) / 2;
  let xy = 0, xx = 0, yy = 0;
  for (let i = 0; i < x.length; i++) {
    xy += (x[i] - mean) * (y[i] - mean); xx += (x[i] - mean) ** 2; yy += (y[i] - mean) ** 2;
  }
  return xx && yy ? xy / Math.sqrt(xx * yy) : NaN;
}

// ------------------------------------------------------------------ colours and tokens
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function colour(x, most) {
  if (Number.isNaN(x)) return css("--hidden");
  if (!x || !most) return "transparent";
  return `rgba(${css(x < 0 ? "--negative" : "--positive")}, ${Math.min(1, strength(Math.abs(x) / most)).toFixed(3)})`;
}
// The logarithmic scale covers four orders of magnitude.
const strength = x => state.scale === "log" ? Math.max(0, 1 + Math.log10(x) / 4) : x;
const JOINER = 0x200d;
const visible = token => [...token].map((c, i, all) => {
  const point = c.codePointAt(0);
  if (c === "\n") return "↵";
  if (c === "\t") return "⇥";
  // The character that joins two emoji is kept, because they are drawn as one.
  if (point === JOINER && i && /^\p{Extended_Pictographic}/u.test(all[i + 1] || "")) return c;
  if (point < 32 || point === 127 || (point >= 0x200b && point <= 0x200f) || (point >= 0x202a && point <= 0x202e)
    || (point >= 0x2066 && point <= 0x2069) || (point >= 0xd800 && point <= 0xdfff) || point === 0xfffe || point === 0xffff)
    return "\u27e8" + point.toString(16) + "\u27e9";
  return c;
}).join("").replace(/^[Ġ▁]/, " ");
// A token that is a piece of a character is written as the character and the token's number, "é[1/2]".
const NUMBERED = /^(.+)(\[(\d{1,6})\/(\d{1,6})\])$/s;
// Return the text of neighbouring tokens; the pieces of a character become that character.
function joined(tokens) {
  const texts = [];
  for (let i = 0; i < tokens.length; i++) {
    const [, text, , first, count] = NUMBERED.exec(tokens[i]) || [];
    const whole = first === "1" && i + +count <= tokens.length && Array.from({ length: +count }, (_, j) => `${text}[${j + 1}/${count}]`)
      .every((token, j) => token === tokens[i + j]);
    texts.push(whole ? text : tokens[i]);
    if (whole) i += count - 1;
  }
  return texts.join("");
}
function shortened(token, count = 14) {
  const [, text, number] = NUMBERED.exec(token) || [null, token, ""], all = [...text];
  return (all.length > count ? all.slice(0, count - 1).join("") + "…" : text) + number;
}
const plain = text => visible(text).trim() || visible(text);
const named = (tokens, place) => `${place} “${shortened(plain(tokens[place]), 24)}”`;

// Return the positions and the text of a unit.
const spelled = (tokens, unit) => unit.length === 1 ? named(tokens, unit[0])
  : `${unit[0]}–${unit[unit.length - 1]} “${shortened(visible(joined(unit.map(i => tokens[i]))).trim(), 60)}”`;

function tip(event, text) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const x = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
  const y = event.clientY + 18 + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : event.clientY + 18;
  box.style.left = `${Math.max(4, x)}px`;
  box.style.top = `${Math.max(4, y)}px`;
}
