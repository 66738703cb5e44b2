"use strict";
// Tokens reach the page as text only: textContent, canvas text and SVG text, never markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
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
const state = { prompt: 0, map: 0, layer: null, head: -1, query: null, view: "text", unit: "raw", words: 0,
  scale: "map", first: 1, diagonal: 1, threshold: 0.04 };
const maps = () => DATA.prompts[state.prompt];
const map = () => maps()[state.map];
const keysOf = m => m.keys || m.tokens;

function readHash() {
  for (const [key, value] of new URLSearchParams(location.hash.slice(1)))
    if (key in state) state[key] = ["view", "unit", "scale"].includes(key) ? value : value === "" ? null : +value;
  const inside = (n, count) => Number.isInteger(n) && n >= 0 && n < count;
  if (!inside(state.prompt, DATA.prompts.length)) state.prompt = 0;
  if (!inside(state.map, maps().length)) state.map = 0;
  if (!Object.hasOwn(VIEWS, state.view)) state.view = "text";
  settle();
}

// What of the state this map can't have is brought back to what it has.
function settle() {
  const m = map();
  if (!m.names.includes(state.layer)) state.layer = m.names[m.names.length - 1];
  const inside = (n, count) => Number.isInteger(n) && n >= 0 && n < count;
  if (!inside(state.head, m.heads)) state.head = -1;
  if (!inside(state.query, m.tokens.length)) state.query = m.query;
}

function set(changes) {
  Object.assign(state, changes);
  settle();
  const kept = Object.entries(state).map(([key, value]) => [key, value === null ? "" : String(value)]);
  // A notebook's frame has no address of its own to keep it in.
  try { history.replaceState(null, "", "#" + new URLSearchParams(kept)); } catch { /* then it is not kept */ }
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
// One layer: scores [head][row * keys + key] with NaN where the key is hidden; decoded when first asked for.
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
// One head's scores, or the mean over heads (-1).
const means = new WeakMap();
async function scoresOf(m, place, head) {
  const all = await layerOf(m, place);
  if (all.length === 1) return all[0];
  if (head >= 0) return all[head];
  if (!means.has(all)) {
    const mean = new Float32Array(all[0].length);
    for (const one of all) for (let i = 0; i < mean.length; i++) mean[i] += one[i] / all.length;
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
const strongest = row => row.reduce((most, x) => Number.isNaN(x) ? most : Math.max(most, Math.abs(x)), 0);
const shown = x => Number.isNaN(x) ? "hidden" : x === 0 ? "0"
  : Math.abs(x) >= 0.001 && Math.abs(x) < 10000 ? x.toPrecision(4) : x.toExponential(2);
const placeOf = m => Math.max(0, m.names.indexOf(state.layer));
// Of a map down to the input with one layer that one; else the layer of this name, or -1: never another.
const sameLayer = (m, name) => m.kind === "input" && m.names.length === 1 ? 0 : m.names.indexOf(name);
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

// ------------------------------------------------------------------ colour and words
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function colour(x, most) {
  if (Number.isNaN(x)) return css("--hidden");
  if (!x || !most) return "transparent";
  return `rgba(${css(x < 0 ? "--negative" : "--positive")}, ${Math.min(1, strength(Math.abs(x) / most)).toFixed(3)})`;
}
// Logarithmic: four orders of magnitude.
const strength = x => state.scale === "log" ? Math.max(0, 1 + Math.log10(x) / 4) : x;
const visible = token => [...token].map(c => {
  const point = c.codePointAt(0);
  if (c === "\n") return "↵";
  if (c === "\t") return "⇥";
  if (point < 32 || point === 127 || (point >= 0x200b && point <= 0x200f) || (point >= 0x202a && point <= 0x202e)
    || (point >= 0x2066 && point <= 0x2069) || (point >= 0xd800 && point <= 0xdfff))
    return "\u27e8" + point.toString(16) + "\u27e9";
  return c;
}).join("").replace(/^[Ġ▁]/, " ");
const shortened = (text, count = 14) => [...text].length > count ? [...text].slice(0, count - 1).join("") + "…" : text;
const named = (tokens, place) => `${place} “${shortened(visible(tokens[place]).trim() || visible(tokens[place]), 24)}”`;

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

// ------------------------------------------------------------------ views: text
let exported = () => ({});
function tokenRow(m, row, chosen, choose) {
  const keys = keysOf(m), line = make("div", { class: "tokens", dir: "auto" });
  const values = row ? inUnit(row) : null, total = new Float32Array(keys.length).fill(NaN);
  if (values) {
    const groups = state.words && m.words ? m.words : keys.map((_, i) => [i]);
    for (const group of groups) {
      const held = group.filter(i => !Number.isNaN(values[i]));
      const sum = held.length ? held.reduce((all, i) => all + values[i], 0) : NaN;
      for (const i of group) total[i] = sum;
    }
  }
  // Without the first token the others share the whole scale.
  const most = strongest(state.first ? total : total.slice(1));
  keys.forEach((token, i) => {
    const span = make("span", { class: "token", "data-key": i });
    const text = visible(token);
    span.textContent = text;
    if (token.endsWith("\n")) span.append(document.createElement("br"));
    if (values) {
      const left = !state.first && i === 0;
      span.classList.toggle("hidden", left || Number.isNaN(total[i]));
      span.style.background = left || Number.isNaN(total[i]) ? "none" : colour(total[i], most);
      if (!left && strength(Math.abs(total[i]) / (most || 1)) > 0.55) span.style.color = css("--ground");
    }
    span.classList.toggle("chosen", i === chosen);
    span.addEventListener("mousemove", event => tip(event, values
      ? `${named(keys, i)}\n${shown(total[i])} ${unit()}${state.words ? ", its word" : ""}` : named(keys, i)));
    span.addEventListener("mouseleave", () => tip());
    if (choose) span.addEventListener("click", () => choose(i));
    line.append(span);
  });
  return { line, total };
}

async function textView(view) {
  const chosen = map(), table = [];
  const choose = query => set({ query });
  if (chosen.keys) {
    const { line } = tokenRow({ ...chosen, keys: null }, null, state.query, choose);
    view.append(make("div", { class: "row" }, make("h3", { text: "queries: click one" }), line));
  }
  for (const m of maps()) {
    const place = sameLayer(m, state.layer), head = m === chosen && m.heads ? state.head : -1;
    if (place < 0) {
      view.append(make("div", { class: "row", "data-map": m.label }, make("h3", {}, make("b", { text: m.label }),
        make("span", { class: "note", text: ` · no layer ${state.layer} in this map` }))));
      continue;
    }
    const row = await rowOf(m, place, head, state.query);
    const title = make("h3", {}, make("b", { text: m.label }),
      ` · ${m.kind === "input" ? "down to the input" : `layer ${m.names[place]}`}`
      + (m.heads ? ` · ${head < 0 ? "mean of heads" : `head ${head}`}` : "") + ` · ${unit()}`
      + (row ? ` · strongest ${shown(strongest(inUnit(row)))}` : ""));
    if (!row) title.append(make("span", { class: "note", text: " · this row is not held" }));
    const own = m.keys ? null : state.query;
    const { line, total } = tokenRow(m, row, own, m.keys ? null : choose);
    view.append(make("div", { class: "row", "data-map": m.label }, title, line));
    if (row) keysOf(m).forEach((token, key) => table.push({ map: m.label, layer: m.names[place], head,
      query: state.query, key, token, value: Number.isNaN(total[key]) ? null : total[key] }));
  }
  exported = () => ({ rows: table });
}

// ------------------------------------------------------------------ views: grid
// Draws [rows × columns] numbers, `zoom` pixels each.
function heat(context, left, top, rows, columns, at, most, zoom) {
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
    const x = at(row, column);
    if (x === 0) continue;
    context.fillStyle = colour(x, typeof most === "function" ? most(row) : most);
    context.fillRect(left + column * zoom, top + row * zoom, Math.ceil(zoom), Math.ceil(zoom));
  }
}
function canvasOf(width, height) {
  const sharp = Math.min(window.devicePixelRatio || 1, 2), canvas = make("canvas");
  canvas.width = Math.round(width * sharp); canvas.height = Math.round(height * sharp);
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(sharp, sharp);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  return { canvas, context };
}
const blank = (m, row, key) => (!state.first && key === 0) || (!state.diagonal && !m.keys && key === m.queries[row]);
const cellOf = (m, scores, keys) => (row, key) => blank(m, row, key) ? 0 : scores[row * keys + key];
function mostOf(m, scores, keys, whole) {
  const at = cellOf(m, scores, keys);
  const ofRow = row => {
    let most = 0;
    for (let key = 0; key < keys; key++) { const x = Math.abs(at(row, key)); if (x > most) most = x; }
    return most;
  };
  if (state.scale === "row") return ofRow;
  if (state.scale === "global" && whole) return whole;
  return m.queries.reduce((most, _, row) => Math.max(most, ofRow(row)), 0);
}

async function gridView(view) {
  const m = map(), keys = keysOf(m).length, rows = m.queries.length, heads = Math.max(1, m.heads);
  const panes = make("div", { class: "panes" });
  view.append(panes);
  if (rows === 1) {
    await layersByKeys(panes, m, keys);
    return;
  }
  const layers = m.names.length, narrow = innerWidth < 700;
  const width = narrow ? innerWidth - 60 : Math.min(620, innerWidth * .45);
  const thumb = Math.max(24, Math.min(heads > 1 ? 60 : 80, Math.floor(width / heads) - 5));
  const columns = heads > 1 ? heads : Math.max(1, Math.min(layers, Math.floor(width / (thumb + 6))));
  const lines = heads > 1 ? layers : Math.ceil(layers / columns), gap = 5, edge = 34, head = 16;
  const step = thumb + gap, name = heads > 1 ? 0 : 13;
  const { canvas, context } = canvasOf(edge + columns * step, head + lines * (step + name));
  canvas.dataset.grid = "all";
  const corner = (place, one) => heads > 1 ? [edge + one * step, head + place * step]
    : [edge + (place % columns) * step, head + Math.floor(place / columns) * (step + name) + name];
  const found = event => {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    for (let place = 0; place < layers; place++) for (let one = 0; one < heads; one++) {
      const [left, top] = corner(place, one);
      if (x >= left && x < left + thumb && y >= top && y < top + thumb) return { place, one,
        key: Math.floor((x - left) / thumb * keys), row: Math.floor((y - top) / thumb * rows) };
    }
    return null;
  };
  canvas.addEventListener("mousemove", async event => {
    const at = found(event);
    if (!at) return tip();
    const all = await layerOf(m, at.place);
    tip(event, `layer ${m.names[at.place]}${m.heads ? `, head ${at.one}` : ""}\n${named(m.tokens, m.queries[at.row])} from `
      + `${named(keysOf(m), at.key)}\n${shown(all[at.one][at.row * keys + at.key])} raw score`);
  });
  canvas.addEventListener("mouseleave", () => tip());
  canvas.addEventListener("click", event => {
    const at = found(event);
    if (at) set({ layer: m.names[at.place], head: m.heads ? at.one : -1 });
  });
  panes.append(make("div", { class: "pane" }, make("p", { class: "caption",
    text: `${m.label}: ${m.heads ? "layers down, heads across" : "one square per layer"}; rows are queries. Click one.` }), canvas));
  const large = make("div", { class: "pane large" });
  panes.append(large);
  context.fillStyle = css("--soft");
  if (heads > 1) for (let one = 0; one < heads; one++) context.fillText(String(one), edge + one * step + thumb / 2 - 4, 8);
  const whole = state.scale === "global" ? Math.max(...m.layers.map(layer => layer.largest)) : 0;
  await largeMap(large, m, keys, whole);
  const version = renders;
  for (let place = 0; place < layers; place++) {
    const all = await layerOf(m, place);
    if (version !== renders) return;
    for (let one = 0; one < heads; one++) {
      const [left, top] = corner(place, one);
      thumbnail(context, m, all[one], keys, rows, left, top, thumb, whole);
      const chosen = m.names[place] === state.layer && (!m.heads || one === state.head);
      context.strokeStyle = css(chosen ? "--accent" : "--line");
      context.lineWidth = chosen ? 2 : 1;
      context.strokeRect(left - .5, top - .5, thumb + 1, thumb + 1);
      if (heads === 1) { context.fillStyle = css("--soft"); context.fillText(String(m.names[place]), left, top - 7); }
    }
    if (heads > 1) { context.fillStyle = css("--soft"); context.fillText(String(m.names[place]), 6, corner(place, 0)[1] + thumb / 2); }
  }
}
// Long maps: the strongest of the cells that share a pixel.
function thumbnail(context, m, scores, keys, rows, left, top, side, whole) {
  const at = cellOf(m, scores, keys), most = mostOf(m, scores, keys, whole);
  if (rows <= side && keys <= side) {
    for (let row = 0; row < rows; row++) for (let key = 0; key < keys; key++) {
      const x = at(row, key);
      if (x === 0) continue;
      context.fillStyle = colour(x, typeof most === "function" ? most(row) : most);
      context.fillRect(left + key * side / keys, top + row * side / rows, side / keys + .3, side / rows + .3);
    }
    return;
  }
  const best = new Float32Array(side * side).fill(NaN);
  for (let row = 0; row < rows; row++) for (let key = 0; key < keys; key++) {
    const x = at(row, key), scaled = x / ((typeof most === "function" ? most(row) : most) || 1);
    const pixel = Math.floor(row * side / rows) * side + Math.floor(key * side / keys);
    if (Number.isNaN(best[pixel]) || Math.abs(scaled) > Math.abs(best[pixel])) best[pixel] = scaled;
  }
  heat(context, left, top, side, side, (row, column) => best[row * side + column], 1, 1);
}

async function largeMap(pane, m, keys, whole) {
  const place = placeOf(m), scores = await scoresOf(m, place, m.heads ? state.head : -1), rows = m.queries.length;
  const zoom = Math.max(1, Math.min(26, Math.floor(Math.min(innerWidth < 1000 ? innerWidth - 150 : innerWidth * .5 - 180, 640) / Math.max(keys, rows / 1.2))));
  const labels = Math.min(110, 16 + 7 * Math.max(...m.tokens.map(token => Math.min(12, visible(token).length))));
  const { canvas, context } = canvasOf(labels + keys * zoom + 8, labels + rows * zoom + 8);
  canvas.dataset.grid = "one";
  context.translate(labels, labels);
  heat(context, 0, 0, rows, keys, cellOf(m, scores, keys), mostOf(m, scores, keys, whole), zoom);
  context.strokeStyle = css("--line");
  context.strokeRect(-.5, -.5, keys * zoom + 1, rows * zoom + 1);
  const chosen = m.queries.indexOf(state.query);
  if (chosen >= 0) { context.strokeStyle = css("--accent"); context.strokeRect(-1, chosen * zoom - .5, keys * zoom + 2, zoom + 1); }
  const column = new Float32Array(keys);
  for (let row = 0; row < rows; row++) for (let key = 0; key < keys; key++) column[key] += Math.abs(scores[row * keys + key]) || 0;
  for (const key of spaced(column, zoom, keys)) {
    context.save();
    context.translate(key * zoom + zoom / 2, -5);
    context.rotate(-Math.PI / 2);
    context.fillStyle = css("--ink");
    context.fillText(shortened(visible(keysOf(m)[key]).trim(), 12), 0, 0);
    context.restore();
  }
  context.textAlign = "right";
  const rowSizes = new Float32Array(rows).map((_, row) => 1 + (row === chosen ? 9 : 0));
  for (const row of spaced(rowSizes, zoom, rows)) {
    context.fillStyle = css(row === chosen ? "--accent" : "--ink");
    context.fillText(shortened(visible(m.tokens[m.queries[row]]).trim(), 12), -5, row * zoom + zoom / 2);
  }
  const at = event => {
    const box = canvas.getBoundingClientRect();
    const key = Math.floor((event.clientX - box.left - labels) / zoom), row = Math.floor((event.clientY - box.top - labels) / zoom);
    return key >= 0 && key < keys && row >= 0 && row < rows ? { key, row } : null;
  };
  canvas.addEventListener("mousemove", event => {
    const cell = at(event);
    tip(event, cell && `${named(m.tokens, m.queries[cell.row])} from ${named(keysOf(m), cell.key)}\n`
      + `${shown(scores[cell.row * keys + cell.key])} raw score`);
  });
  canvas.addEventListener("mouseleave", () => tip());
  canvas.addEventListener("click", event => { const cell = at(event); if (cell) set({ query: m.queries[cell.row] }); });
  pane.append(make("p", { class: "caption", text: `Layer ${m.names[place]}`
    + (m.heads ? `, ${state.head < 0 ? "mean of heads" : `head ${state.head}`}` : "")
    + `; raw scores, stored with an error of at most ${shown(m.layers[place].error)}. Grey: keys that can't be seen.` }), canvas);
  exported = () => ({ rows: m.queries.flatMap((query, row) => keysOf(m).map((token, key) => ({ map: m.label,
    layer: m.names[place], head: state.head, query, key, token,
    value: Number.isNaN(scores[row * keys + key]) ? null : scores[row * keys + key] }))) });
}
// Places whose labels fit, the largest first.
function spaced(sizes, zoom, count) {
  const apart = Math.max(1, Math.ceil(13 / zoom)), taken = [];
  for (const place of [...sizes.keys()].sort((a, b) => sizes[b] - sizes[a]).slice(0, 400))
    if (taken.length < 90 && taken.every(other => Math.abs(other - place) >= apart)) taken.push(place);
  return taken.filter(place => place < count);
}
// One row per layer: layers down, keys across.
async function layersByKeys(panes, m, keys) {
  const zoom = Math.max(1, Math.min(22, Math.floor((Math.max(innerWidth, 500) - 110) / keys))), high = Math.max(12, Math.min(22, zoom));
  const rows = await Promise.all(m.names.map(async (_, place) => inUnit(await scoresOf(m, place, m.heads ? state.head : -1))));
  const { canvas, context } = canvasOf(60 + keys * zoom, 100 + rows.length * high);
  canvas.dataset.grid = "rows";
  const most = Math.max(...rows.map(strongest)), column = new Float32Array(keys);
  rows.forEach((row, place) => {
    for (let key = 0; key < keys; key++) {
      const x = row[key];
      column[key] = Math.max(column[key], Math.abs(x) || 0);
      if (x === 0 || (!state.first && key === 0)) continue;
      context.fillStyle = colour(x, state.scale === "row" ? strongest(row) : most);
      context.fillRect(50 + key * zoom, 90 + place * high, Math.ceil(zoom), high);
    }
    context.fillStyle = css(m.names[place] === state.layer ? "--accent" : "--soft");
    context.fillText(String(m.names[place]), 16, 90 + place * high + high / 2);
  });
  for (const key of spaced(column, zoom, keys)) {
    context.save(); context.translate(50 + key * zoom + zoom / 2, 84); context.rotate(-Math.PI / 2);
    context.fillStyle = css("--ink"); context.fillText(shortened(visible(keysOf(m)[key]).trim(), 12), 0, 0); context.restore();
  }
  const at = event => {
    const box = canvas.getBoundingClientRect(), key = Math.floor((event.clientX - box.left - 50) / zoom);
    const place = Math.floor((event.clientY - box.top - 90) / high);
    return key >= 0 && key < keys && place >= 0 && place < rows.length ? { key, place } : null;
  };
  canvas.addEventListener("mousemove", event => { const cell = at(event);
    tip(event, cell && `layer ${m.names[cell.place]}\n${named(keysOf(m), cell.key)}\n${shown(rows[cell.place][cell.key])} ${unit()}`); });
  canvas.addEventListener("mouseleave", () => tip());
  canvas.addEventListener("click", event => { const cell = at(event); if (cell) set({ layer: m.names[cell.place] }); });
  panes.append(make("div", { class: "pane" }, make("p", { class: "caption",
    text: `${m.label}: what ${named(m.tokens, m.queries[0])} took, layers down, keys across; ${unit()}.` }), canvas));
  exported = () => ({ rows: rows.flatMap((row, place) => [...row].map((value, key) => ({ map: m.label, layer: m.names[place],
    query: m.queries[0], key, token: keysOf(m)[key], value: Number.isNaN(value) ? null : value }))) });
}

// ------------------------------------------------------------------ views: flow
async function flowView(view) {
  const m = map(), count = m.tokens.length;
  if (m.kind === "input" || m.keys || m.queries.length < count || m.signed) {
    view.append(make("p", { class: "caption", text: "Flow needs a layer map with all rows, whose keys are its tokens and whose "
      + `scores are not below 0; “${m.label}” is ${m.kind === "input" ? "a map down to the input" : m.keys ? "one between two sequences"
        : m.signed ? "signed" : "one of some rows"}. Choose another map above.` }));
    exported = () => ({ rows: [] });
    return;
  }
  if (m.names.some((name, place) => place && name !== m.names[place - 1] + 1)) {
    view.append(make("p", { class: "caption", text: `Flow needs layers that follow one another; “${m.label}” holds ${m.names.join(", ")}.` }));
    exported = () => ({ rows: [] });
    return;
  }
  const top = placeOf(m), stay = m.residual || 0;
  let weight = new Float64Array(count);
  weight[state.query] = 1;
  const edges = [];
  for (let place = top; place >= 0; place--) {
    const scores = await scoresOf(m, place, -1), below = new Float64Array(count);
    for (let query = 0; query < count; query++) {
      if (!weight[query]) continue;
      const row = scores.slice(query * count, (query + 1) * count), total = size(row) || 1;
      for (let key = 0; key < count; key++) {
        const mixed = Number.isNaN(row[key]) ? 0 : weight[query] * (1 - stay) * row[key] / total;
        const all = mixed + (key === query ? weight[query] * stay : 0);
        if (all < state.threshold) continue;
        edges.push({ place, query, key, weight: all, stays: key === query, score: row[key] });
        below[key] += all;
      }
    }
    weight = below;
  }
  const bottom = weight.reduce((sum, x) => sum + x, 0);
  const across = Math.max(16, Math.min(64, (Math.max(innerWidth, 480) - 90) / count)), down = Math.max(16, Math.min(40, 560 / (top + 1)));
  const x = token => 50 + token * across + across / 2, y = level => 24 + (top + 1 - level) * down;
  const svg = draw("svg", { width: 70 + count * across, height: y(0) + 100, role: "img" });
  for (const edge of edges) {
    const line = draw("line", { x1: x(edge.key), y1: y(edge.place), x2: x(edge.query), y2: y(edge.place + 1),
      "stroke-width": Math.max(.8, 11 * edge.weight), "stroke-opacity": .35 + .6 * Math.min(1, edge.weight * 2),
      class: edge.stays ? "edge stay" : "edge", "data-weight": edge.weight, "data-layer": m.names[edge.place] });
    line.addEventListener("mousemove", event => tip(event, `layer ${m.names[edge.place]}: ${named(m.tokens, edge.query)} from `
      + `${named(m.tokens, edge.key)}\n${shown(edge.weight)} of what reached the chosen token\n${shown(edge.score)} raw score`));
    line.addEventListener("mouseleave", () => tip());
    line.addEventListener("click", () => clickedEdge(m, edge, detail));
    svg.append(line);
  }
  const reached = new Set([`${top + 1}/${state.query}`, ...edges.map(edge => `${edge.place}/${edge.key}`)]);
  for (const name of reached) {
    const [level, token] = name.split("/").map(Number);
    svg.append(draw("circle", { cx: x(token), cy: y(level), r: 3.2 }));
  }
  for (let level = 0; level <= top; level++)
    svg.append(draw("text", { x: 8, y: (y(level) + y(level + 1)) / 2 + 4, class: "faint" }, String(m.names[level])));
  const order = spaced(Float32Array.from(weight, (w, i) => w + (i === state.query ? 9 : 0) + 1e-9), across, count);
  for (const token of order) {
    const label = draw("text", { x: 0, y: 0, transform: `translate(${x(token) + 4} ${y(0) + 14}) rotate(60)`,
      class: token === state.query ? "chosen" : weight[token] ? "" : "faint" }, shortened(visible(m.tokens[token]).trim(), 14));
    label.style.cursor = "pointer";
    label.addEventListener("click", () => set({ query: token }));
    svg.append(label);
  }
  const detail = make("p", { class: "caption", text: "Click an edge for its heads." });
  view.append(make("p", { class: "caption", "data-share": bottom, text: `Where ${named(m.tokens, state.query)} has its information from, `
    + `layer ${m.names[top]} at the top down to the first. Width: share of what reached it${stay ? `, with a residual weight of ${stay}` : ""}; `
    + `grey stays at its position. Edges below ${state.threshold} are left out: ${(100 * bottom).toFixed(1)} % of it is shown at the bottom.` }),
    svg, detail);
  exported = () => ({ svg, rows: edges.map(edge => ({ map: m.label, layer: m.names[edge.place], query: edge.query, key: edge.key,
    token: m.tokens[edge.key], value: edge.weight })) });
}
async function clickedEdge(m, edge, detail) {
  const all = await layerOf(m, edge.place), place = edge.query * m.tokens.length + edge.key;
  const heads = m.heads ? all.map((scores, head) => [head, scores[place]]).sort((a, b) => b[1] - a[1]).slice(0, 8)
    .map(([head, score]) => `head ${head}: ${shown(score)}`).join(", ") : `${shown(all[0][place])}; this map has no heads`;
  detail.textContent = `Layer ${m.names[edge.place]}, ${named(m.tokens, edge.query)} from ${named(m.tokens, edge.key)}, raw: ${heads}.`;
}

// ------------------------------------------------------------------ views: methods
async function methodsView(view) {
  const base = map(), others = maps().filter(m => m !== base), table = make("table"), kept = [];
  const alike = m => m.tokens.length === base.tokens.length && keysOf(m).length === keysOf(base).length;
  const score = m => DATA.scores[m.method];
  table.append(make("tr", {}, make("th", { text: `Spearman with ${base.label}, this row` }),
    ...base.names.map(name => make("th", { text: String(name) })), make("th", { text: "leaderboard" })));
  for (const m of [base, ...others]) {
    const cells = [];
    for (const [place, name] of base.names.entries()) {
      const there = sameLayer(m, name);
      let value = NaN;
      if (alike(m) && there >= 0) {
        const [mine, theirs] = [await rowOf(base, place, -1, state.query), await rowOf(m, there, -1, state.query)];
        // By size, as lm.compare does: a sign says how, not how much.
        if (mine && theirs) value = spearman(mine.map(Math.abs), theirs.map(Math.abs));
      }
      const cell = make("td", { text: Number.isNaN(value) ? "–" : value.toFixed(2), "data-layer": name });
      if (!Number.isNaN(value)) cell.style.background = colour(value, 2);
      cells.push(cell);
      kept.push({ map: base.label, with: m.label, layer: name, query: state.query, value: Number.isNaN(value) ? null : value });
    }
    table.append(make("tr", { "data-map": m.label }, make("td", { text: m.label }), ...cells,
      make("td", { text: score(m) === undefined ? "–" : score(m).toFixed(2) })));
  }
  view.append(make("div", { class: "pane" }, table), make("p", { class: "caption", text: "Spearman of the rows' sizes, as lm.compare has it. Leaderboard: how well the best input map of "
    + "the method orders tokens as replacing them does (partial Spearman, SmolLM2-135M, 40 prompts)." }));
  const place = placeOf(base), mine = await rowOf(base, place, -1, state.query);
  for (const m of others.filter(alike)) {
    const there = sameLayer(m, state.layer);
    const theirs = there < 0 ? null : await rowOf(m, there, -1, state.query);
    if (!mine || !theirs) continue;
    const share = row => row.map(x => x / (size(row) || 1));
    const [a, b] = [share(mine), share(theirs)], unit = state.unit;
    state.unit = "raw";
    const { line } = tokenRow({ ...base, label: m.label }, a.map((x, i) => x - b[i]), base.keys ? null : state.query,
      base.keys ? null : query => set({ query }));
    state.unit = unit;
    view.append(make("div", { class: "row" }, make("h3", {}, make("b", { text: `${base.label} − ${m.label}` }),
      ` · difference of shares, layer ${base.names[place]}`), line));
  }
  exported = () => ({ rows: kept });
}

// ------------------------------------------------------------------ around the views
const VIEWS = { text: textView, grid: gridView, flow: flowView, methods: methodsView };
let renders = 0;
async function render() {
  const version = ++renders, fresh = make("section", { id: "view" });
  tip();
  controls(map());
  try { await VIEWS[state.view](fresh); } catch (error) { fresh.append(make("p", { class: "caption", text: String(error) })); }
  // Another choice may have been made meanwhile.
  if (version !== renders) return;
  $("view").replaceWith(fresh);
  document.body.dataset.ready = String(renders);
  if (window.parent !== window) parent.postMessage({ lensMixHeight: document.documentElement.scrollHeight }, "*");
}
function controls(m) {
  const prompt = $("prompt");
  prompt.hidden = DATA.prompts.length < 2;
  const fill = (select, names, value) => {
    select.replaceChildren(...names.map(([key, text]) => make("option", { value: key, text, selected: String(key) === String(value) })));
    select.value = String(value);
  };
  fill(prompt, DATA.prompts.map((all, i) => [i, `${i}: ${shortened(all[0].tokens.map(visible).join(""), 40)}`]), state.prompt);
  fill($("map"), maps().map((one, i) => [i, one.label]), state.map);
  fill($("head"), [[-1, "mean"], ...Array.from({ length: m.heads }, (_, i) => [i, String(i)])], state.head);
  $("head-label").hidden = !m.heads;
  $("layer").max = m.names.length - 1;
  $("layer").value = m.names.indexOf(state.layer);
  $("layer").disabled = m.names.length === 1;
  $("layer-name").textContent = state.layer;
  for (const button of $("views").children) button.setAttribute("aria-selected", button.dataset.view === state.view);
  const made = m.provenance;
  $("about").textContent = [m.kind === "input" ? "map down to the input" : "layer map", `method ${m.method}`,
    made.model && `model ${made.model}`, made.dtype && `dtype ${made.dtype}`, made.engine && `engine ${made.engine}`, made.date,
    `stored as ${m.code}, error ≤ ${shown(m.layers[placeOf(m)].error)}`, `lens_mix ${DATA.version}`].filter(Boolean).join(" · ");
  $("notes").textContent = m.notes.length ? `Notes: ${m.notes.join("; ")}` : "";
  const box = $("options");
  const choice = (key, text, names) => make("label", {}, `${text} `, make("select", { "data-option": key,
    onchange: event => set({ [key]: event.target.value }) }, ...names.map(name => make("option", { value: name, text: name,
    selected: state[key] === name }))));
  const flag = (key, text) => make("label", {}, make("input", { type: "checkbox", "data-option": key, checked: Boolean(state[key]),
    onchange: event => set({ [key]: +event.target.checked }) }), ` ${text}`);
  const scale = choice("scale", "scale", ["map", "row", "global", "log"]);
  const parts = { text: [choice("unit", "unit", ["raw", "share"]), m.words && flag("words", "words"), choice("scale", "scale", ["map", "log"]),
      flag("first", "first token")],
    grid: [scale, flag("first", "first column"), flag("diagonal", "diagonal")], methods: [],
    flow: [make("label", {}, "least share ", make("input", { type: "range", min: .005, max: .3, step: .005, value: state.threshold,
      "data-option": "threshold", oninput: event => set({ threshold: +event.target.value }) }),
    make("output", { text: String(state.threshold) }))] }[state.view].filter(Boolean);
  const about = make("span", { text: `token ${named(m.tokens, state.query)}` });
  // The control in use stays: a slider that is replaced can't be dragged on.
  if (!box.contains(document.activeElement) || box.dataset.view !== state.view) box.replaceChildren(...parts, about);
  else { box.lastChild.replaceWith(about); for (const shownValue of box.querySelectorAll("output")) shownValue.textContent = state.threshold; }
  box.dataset.view = state.view;
}
// ------------------------------------------------------------------ export
function offer(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
const quoted = value => /[",\n\r]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? "");
function save(kind) {
  const { rows = [], svg } = exported(), name = `lens_mix-${state.view}`;
  const picture = $("view").querySelector("canvas");
  if (kind === "csv") {
    const columns = rows.length ? Object.keys(rows[0]) : [];
    return offer(`${name}.csv`, new Blob([[columns, ...rows.map(row => columns.map(column => row[column]))]
      .map(line => line.map(quoted).join(",")).join("\n")], { type: "text/csv" }));
  }
  if (kind === "json") return offer(`${name}.json`, new Blob([JSON.stringify({ state, provenance: map().provenance,
    notes: map().notes, rows }, null, 1)], { type: "application/json" }));
  if (kind === "png" && picture) return picture.toBlob(blob => offer(`${name}.png`, blob));
  if (kind === "svg" && svg) {
    const copy = svg.cloneNode(true);
    copy.prepend(draw("style", {}, document.querySelector("style").textContent.replaceAll(/var\((--[a-z]+)\)/g, (_, v) => css(v))));
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    return offer(`${name}.svg`, new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
  }
  tipAt(kind);
}
function tipAt(kind) {
  const box = $("export").getBoundingClientRect();
  tip({ clientX: box.left, clientY: box.top }, kind === "svg" ? "SVG: of the flow view" : "PNG: of the grid view");
  setTimeout(() => tip(), 2000);
}

// ------------------------------------------------------------------ events
$("views").addEventListener("click", event => event.target.dataset.view && set({ view: event.target.dataset.view }));
$("prompt").addEventListener("change", event => set({ prompt: +event.target.value, map: 0, query: null, layer: null }));
$("map").addEventListener("change", event => set({ map: +event.target.value }));
$("head").addEventListener("change", event => set({ head: +event.target.value }));
$("layer").addEventListener("input", event => set({ layer: map().names[+event.target.value] }));
$("export").addEventListener("click", event => event.target.dataset.export && save(event.target.dataset.export));
$("maximise").addEventListener("click", () => document.fullscreenElement ? document.exitFullscreen()
  : document.documentElement.requestFullscreen?.().catch(() => {}));
addEventListener("hashchange", () => { readHash(); render(); });
addEventListener("resize", () => { clearTimeout(window.later); window.later = setTimeout(render, 150); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => render());
addEventListener("keydown", event => {
  if (event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  const m = map(), place = placeOf(m), row = m.queries.indexOf(state.query);
  const step = (list, i) => list[Math.max(0, Math.min(list.length - 1, i))];
  const views = Object.keys(VIEWS);
  if (event.key === "ArrowRight") set({ query: step(m.queries, row + 1) });
  else if (event.key === "ArrowLeft") set({ query: step(m.queries, row < 0 ? 0 : row - 1) });
  else if (event.key === "ArrowUp") set({ layer: step(m.names, place + 1) });
  else if (event.key === "ArrowDown") set({ layer: step(m.names, place - 1) });
  else if (event.key === "h" && m.heads) set({ head: state.head + 1 < m.heads ? state.head + 1 : -1 });
  else if (views[+event.key - 1]) set({ view: views[+event.key - 1] });
  else return;
  event.preventDefault();
});
readHash();
render();
