// A view is a function `async xView(view)` that fills the empty element `view` from `state` and `map()`, and sets
// `exported`, a function that returns the rows for CSV and JSON. It may return a function that draws the view again
// after a change of `state`; this one returns false if the view must be built anew. Properties of a view:
//   xView.takes(m)    whether the view works for a map; a view that works for no map of the text is not offered
//   xView.options()   its controls, made by `choose`, `press`, `slide` (page.js)
//   xView.isUpward    whether layers are drawn from the bottom to the top, as the arrow keys then move
// `map()` is a map that the view takes. `state.first` and `state.diagonal` are 1 if the first token and the position
// itself are drawn; they are 0 at first, and the view then shows them as numbers and leaves them out of its scale.
// `state.layer` is null until the user chooses a layer. `tip(event, text)` shows a tooltip.
// This is a Map because a user's method may be named "constructor", which every plain object has.
const SCORES = new Map(Object.entries(DATA.scores));

// ------------------------------------------------------------------ state
const state = { prompt: 0, map: null, layer: null, key: null, head: -1, query: null, view: "layers", unit: "share", by: "token",
  scale: "root", range: "map", first: 0, diagonal: 0, compare: "", threshold: 0.04, tree: 0 };
const WORDS = new Set(["view", "unit", "scale", "range", "by", "compare"]);
const CHOICES = { unit: ["share", "raw"], scale: ["root", "linear", "log"], range: ["map", "row", "all"], by: ["token", "word", "sentence"] };
const maps = () => DATA.prompts[state.prompt];
const map = () => maps()[state.map];
// Whether the user has chosen a map. Until then each view shows the one of `defaultMap`.
let isMapChosen = false;
const keysOf = m => m.keys || m.tokens;
const trees = () => DATA.trees[state.prompt];
const same = (a, b) => a === b || (a.length === b.length && a.every((token, i) => token === b[i]));
// Return the maps of the chosen map's text, whose rows therefore belong to the same positions.
const ofText = () => maps().filter(m => same(m.tokens, map().tokens));
const inside = (n, count) => Number.isInteger(n) && n >= 0 && n < count;

function readHash() {
  for (const [key, value] of new URLSearchParams(location.hash.slice(1)))
    if (Object.hasOwn(state, key)) state[key] = WORDS.has(key) ? value : value === "" ? null : +value;
  if (!inside(state.prompt, DATA.prompts.length)) state.prompt = 0;
  isMapChosen = inside(state.map, maps().length);
  if (!isMapChosen) state.map = firstMap(maps());
  settle();
}
// Return the index of the map to show first: a layer map of a text whose prediction is known, if there is one.
function firstMap(all) {
  const rank = m => 2 * (m.explained !== null) + (m.kind === "layer");
  return all.reduce((best, m, i) => rank(m) > rank(all[best]) ? i : best, 0);
}

// Return the map that a view shows if the user has chosen none. The flow of a map whose rows go to the first token in most
// layers shows little, so the flow starts with the layer map that gives it the smallest share.
function defaultMap() {
  const all = ofText(), chains = state.view === "flow" ? all.filter(isChain) : [];
  return chains.length ? chains.reduce((least, m) => m.sink_share < least.sink_share ? m : least) : all[firstMap(all)];
}

// Replace every entry of the state that is not valid for this text by its default.
function settle() {
  if (!views().includes(state.view)) state.view = views()[0];
  if (!inside(state.tree, trees().length)) state.tree = 0;
  if (!isMapChosen) state.map = maps().indexOf(defaultMap());
  const of = state.view === "tree" ? maps().findIndex(m => m.label === trees()[state.tree].name) : -1;
  if (of >= 0) state.map = of;
  // A view shows a map that it can show.
  if (!takes(state.view, map())) state.map = maps().indexOf(ofText().find(m => takes(state.view, m)) || map());
  const all = ofText();
  if (!layerNames().includes(state.layer)) state.layer = null;
  if (!all.some(m => inside(state.head, m.heads))) state.head = -1;
  if (!all.some(m => m.queries.includes(state.query))) state.query = firstQuery();
  if (!all.some(m => inside(state.key, keysOf(m).length))) state.key = null;
  for (const [key, names] of Object.entries(CHOICES)) if (!names.includes(state[key])) state[key] = names[0];
}
// Return the position to explain first: the one that a target reads, if a map of this text has one.
function firstQuery() {
  const all = ofText(), wanted = all.find(m => m.provenance.input_map) || all.find(m => m.explained && m.explained.some(one => one.target));
  return (wanted || map()).query;
}

// Change the state, and return a promise that is kept when the page is drawn.
function set(changes) {
  // The chosen key belongs to the row of one position.
  if ("query" in changes && !("key" in changes)) state.key = null;
  Object.assign(state, changes);
  // Another prompt comes with its first map.
  if ("map" in changes) isMapChosen = !("prompt" in changes);
  // If the map has a tree of its own, it is the one to show.
  const own = "map" in changes || "view" in changes ? trees().findIndex(tree => tree.name === map().label) : -1;
  if (own >= 0) state.tree = own;
  settle();
  const kept = Object.entries(state).map(([key, value]) => [key, value === null || (key === "map" && !isMapChosen) ? "" : String(value)]);
  // The frame of a notebook has no address, so that the state cannot be kept there.
  try { history.replaceState(null, "", "#" + new URLSearchParams(kept)); } catch { /* the state is not kept */ }
  return render();
}

// ------------------------------------------------------------------ numbers
// The numbers of a layer are stored as deflated float16, uint8 or int8: those of visible keys only, head by head and
// row by row. They stay in that form, and a table converts each code to its number.
const CODES = { float16: { type: Uint16Array, count: 65536, number: fromFloat16 },
  uint8: { type: Uint8Array, count: 256, number: c => (c / 255) ** 2 },
  int8: { type: Int8Array, count: 256, number: c => { const x = (c << 24 >> 24) / 127; return Math.sign(x) * x * x; } } };
const tables = new Map();
function tableOf(code) {
  if (!tables.has(code)) tables.set(code, Float32Array.from({ length: CODES[code].count }, (_, c) => CODES[code].number(c)));
  return tables.get(code);
}
const kept = new Map();
// Return the value of `find` for an object and some words; it is found once.
function once(object, name, find) {
  if (!kept.has(object)) kept.set(object, new Map());
  const found = kept.get(object);
  if (!found.has(name)) found.set(name, find());
  return found.get(name);
}
// Return one layer: its codes, their table, and for each row the place of its first code and which keys are visible.
// `of` is the map, or its mean over heads.
const packedLayer = (m, place, of = m) => once(of, place, async () => {
  const layer = of.layers[place], buffer = await inflate(layer.data);
  const codes = new CODES[of.code].type(buffer), rows = m.queries.length, keys = keysOf(m).length;
  const mask = m.visible ? new Uint8Array(await inflate(m.visible[place])) : null;
  const seen = mask && Uint8Array.from({ length: rows * keys }, (_, i) => mask[i >> 3] >> (i & 7) & 1);
  const starts = new Int32Array(rows + 1);
  for (let row = 0; row < rows; row++) starts[row + 1] = starts[row] + (seen ? seen.subarray(row * keys, (row + 1) * keys).reduce((a, b) => a + b, 0)
    : m.causal ? Math.min(m.queries[row] + 1, keys) : keys);
  return { codes, table: tableOf(of.code), signs: of.code === "int8" ? 255 : -1, largest: layer.largest, starts, seen, keys, rows };
});
// Write one row of one head to `out`, with NaN for hidden keys.
function readRow({ codes, table, signs, largest, starts, seen, keys, rows }, head, row, out) {
  let next = head * starts[rows] + starts[row];
  const count = starts[row + 1] - starts[row];
  if (!seen) {
    for (let key = 0; key < count; key++) out[key] = table[codes[next++] & signs] * largest;
    out.fill(NaN, count, keys);
  } else for (let key = 0; key < keys; key++) out[key] = seen[row * keys + key] ? table[codes[next++] & signs] * largest : NaN;
  return out;
}
// Return the layer and the index of a head in it; the mean over heads (-1) has a layer of its own.
async function headOf(m, place, head) {
  const isMean = m.mean && !(head >= 0 && head < m.heads);
  return { layer: await packedLayer(m, place, isMean ? m.mean : m), head: isMean ? 0 : Math.max(0, Math.min(head, m.heads - 1)) };
}
// Return the scores of one head, or the mean over heads (-1), [row * keys + key], with NaN for hidden keys.
async function scoresOf(m, place, head) {
  const found = await headOf(m, place, head), { rows, keys } = found.layer, out = new Float32Array(rows * keys);
  for (let row = 0; row < rows; row++) readRow(found.layer, found.head, row, out.subarray(row * keys, (row + 1) * keys));
  return out;
}
// Return the scores of one layer, [head][row * keys + key].
const layerOf = (m, place) => Promise.all(Array.from({ length: Math.max(1, m.heads) }, (_, head) => scoresOf(m, place, m.heads > 1 ? head : -1)));
async function rowOf(m, place, head, query) {
  const row = m.queries.indexOf(query);
  if (row < 0) return null;
  const found = await headOf(m, place, head);
  return readRow(found.layer, found.head, row, new Float32Array(found.layer.keys));
}
// Return the row of a query in every layer.
const rowsOf = (m, head, query) => Promise.all(m.names.map((_, place) => rowOf(m, place, head, query)));
const size = row => row.reduce((sum, x) => sum + (Number.isNaN(x) ? 0 : Math.abs(x)), 0);
const sharesOf = row => { const total = size(row) || 1; return row.map(x => x / total); };
const isNoiseRow = (row, without) => isNoise(largestOf(row, without), [...without].reduce((sum, key) => sum + (Math.abs(row[key]) || 0), 0), size(row));
const areNoise = (rows, without) => rows.length > 0 && rows.every(row => isNoiseRow(row, without));
// Return the end of the color scale of rows, of which some keys have no color.
const scaleEnd = (rows, without) => Math.max(0, ...rows.map(row => areNoise(rows, without) ? size(row) : largestOf(row, without)));
// Return why rows have no colors; "" if they have.
const tellNoise = (m, rows, without, format) => !areNoise(rows, without) ? ""
  : ` · no other ${nounOf(m)} has more than ${format(Math.max(...rows.map(row => largestOf(row, without))))}, so none is colored`;
const inUnit = row => state.unit === "share" ? sharesOf(row) : row;
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
const shownUnit = x => state.unit === "share" ? percent(x) : shown(x);
const unit = () => state.unit === "share" ? "share of the row" : "raw score";
const headShown = m => m.heads && state.head < m.heads ? state.head : -1;
const headName = m => m.heads ? headShown(m) < 0 ? "mean of heads" : `head ${headShown(m)}` : "";
// Return the index of the chosen layer; the last one if none is chosen.
const placeOf = m => m.names.includes(state.layer) ? m.names.indexOf(state.layer) : m.names.length - 1;
// Return the index of the layer with this name, or -1. An input map with one layer always uses that layer.
const sameLayer = (m, name) => m.kind === "input" && m.names.length === 1 ? 0 : m.names.indexOf(name);
// Return the number of a layer for its label; a map of the whole model, or a mean of layers, has none.
const layerNumber = (m, place) => m.layer_names[place].endsWith(`layer ${m.names[place]}`) ? String(m.names[place]) : "";
// Return the keys that are shown as numbers: the first token (in an encoder special tokens), and the position itself.
const ownKey = (m, query) => m.keys ? -1 : query;
const sinkKeys = (m, query) => m.sinks.filter(key => key !== ownKey(m, query));
function asNumbers(m, query) {
  return new Set([...(state.first ? [] : sinkKeys(m, query)), ...(state.diagonal ? [] : [ownKey(m, query)])]);
}
const sinkName = m => m.sinks.length === 1 && m.sinks[0] === 0 ? (m.grid ? m.tokens[0] : "first token") : m.grid ? m.sinks.map(key => m.tokens[key]).join(" and ") : "special tokens";

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
