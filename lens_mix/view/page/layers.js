// ------------------------------------------------------------------ views: layer by layer
// One position in every layer: layers down, tokens across, methods side by side.
const layered = m => m.names.length > 1 || m.kind === "layer";
const candidates = () => ["layer", "input"].flatMap(kind => ofText().filter(m => layered(m) && m.kind === kind));
// Return the maps that are compared: the chosen ones, or the first three of the layer maps (of the input maps if there are none).
function compared() {
  const all = candidates(), chosen = state.compare.split(",").filter(Boolean).map(Number).map(i => maps()[i]).filter(m => all.includes(m));
  if (chosen.length) return all.filter(m => chosen.includes(m));
  const layerMaps = all.filter(m => m.kind === "layer");
  return (layerMaps.length ? layerMaps : all).slice(0, 3);
}
// Return the strongest cell of a map's rows outside the keys that are no finding: sinks and the position itself.
function strongestCell(m, shares, query) {
  const left = new Set([...sinkKeys(m, query), ownKey(m, query)]);
  let best = null;
  shares.forEach((row, place) => row.forEach((x, key) => {
    if (!left.has(key) && x && (!best || Math.abs(x) > Math.abs(best.share))) best = { m, place, key, share: x };
  }));
  return best;
}
// Return the rows of the compared maps at the explained position: { m, rows, shares, best }.
async function comparedRows() {
  const query = state.query;
  const found = await Promise.all(compared().filter(m => m.queries.includes(query)).map(async m => {
    const rows = await rowsOf(m, headShown(m), query), shares = rows.map(sharesOf);
    return { m, rows, shares, best: strongestCell(m, shares, query) };
  }));
  return found;
}
const strongestOf = found => found.reduce((best, { best: one }) => one && (!best || Math.abs(one.share) > Math.abs(best.share)) ? one : best, null);
const totalOf = (row, keys) => [...keys].reduce((sum, key) => sum + (key >= 0 ? row[key] || 0 : 0), 0);

// Return one sentence about the strongest cell of all, and one about the same cell in another map.
function findingOf(found) {
  const best = strongestOf(found), strong = text => make("b", { text });
  if (!found.length) return [`No map that is compared here has the row of ${positionName(state.query)}.`];
  if (!best) return ["No row here has weight outside the first token and the position itself."];
  const { m, place, key, share } = best, position = positionName(state.query), head = headName(m);
  const [, before, number] = /^(.*?)(layer \d+)?$/.exec(m.kind === "layer" ? `In ${m.layer_names[place]}` : capital(m.layer_names[place]));
  const first = [before, strong(number || ""), `${m.kind === "layer" ? "" : ","} ${position} takes `,
    strong(percent(Math.abs(share))), ` of its ${m.title} row${head ? ` (${head})` : ""} from `, strong(quotedToken(keysOf(m)[key])),
    ` (${numberName(m)} ${key})${share < 0 ? ", with a negative sign" : ""}.`];
  const other = found.find(one => one.m !== m && same(keysOf(one.m), keysOf(m)) && one.m.names.includes(m.names[place]) && one.m.kind === m.kind);
  if (!other) return first;
  const row = other.shares[other.m.names.indexOf(m.names[place])], own = row[ownKey(other.m, state.query)] || 0;
  const sink = totalOf(row, sinkKeys(other.m, state.query));
  const rest = sink >= own ? [sink, `the ${sinkName(other.m)}`] : [own, "the position itself"];
  return [...first, ` ${other.m.title} gives it ${percent(row[key])} there`, rest[0] >= .05 ? ` and ${percent(rest[0])} to ${rest[1]}.` : "."];
}
// Return one line about the chosen cell in every compared map with these keys, and its strongest head.
async function readingOf(found, layer, key, keys) {
  const parts = await Promise.all(found.filter(({ m }) => same(keysOf(m), keys)).map(async ({ m, rows, shares }) => {
    const place = m.names.indexOf(layer);
    if (place < 0 || !inside(key, keysOf(m).length)) return `${m.title} –`;
    const x = state.unit === "share" ? percent(shares[place][key]) : shown(rows[place][key]);
    return `${m.title} ${x}${await strongestHead(m, place, key)}`;
  }));
  return `Layer ${layer}, ${quotedToken(keys[key])} (${numberName(map())} ${key}): ${parts.join(" · ")}.`;
}

// Return the head that gives a key the largest share of its row, if the map has heads and their mean is shown.
async function strongestHead(m, place, key) {
  if (m.heads < 2 || headShown(m) >= 0) return "";
  const rows = await Promise.all(Array.from({ length: m.heads }, (_, head) => rowOf(m, place, head, state.query)));
  const shares = rows.map(row => sharesOf(row)[key]), best = shares.reduce((best, x, head) => Math.abs(x) > Math.abs(shares[best]) ? head : best, 0);
  return ` (head ${best}: ${percent(shares[best])})`;
}

async function layersView(view) {
  const panels = [], signature = layersSignature();
  const finding = make("p", { id: "finding", class: "finding", "aria-live": "polite" });
  const reading = make("p", { id: "reading", class: "reading", "aria-live": "polite" });
  const title = make("h2", {}), grid = make("div", { class: "panels" });
  for (const m of compared()) {
    const canvas = make("canvas", { tabindex: 0, role: "application", "aria-roledescription": "heat map", "data-panel": m.label });
    const scale = make("div"), text = make("p", { class: "visually-hidden" });
    text.id = `strongest-${panels.length}`;
    canvas.setAttribute("aria-describedby", text.id);
    const guide = make("div", { class: "guide", hidden: true });
    const box = make("section", { class: "panel", "aria-label": m.title }, make("h3", { text: m.title }),
      make("p", { class: "line", text: m.line || "\u00a0" }), make("div", { class: "drawing" }, canvas, guide, text), scale);
    grid.append(box);
    const panel = { m, canvas, guide, scale, text, box, cell: null };
    follow(canvas, (x, y) => panel.find && panel.find(x, y), cell => panel.tell(cell),
      cell => set({ layer: m.names[cell.place], key: cell.key, map: maps().indexOf(m) }), cell => linkToken(m, cell && cell.key));
    canvas.addEventListener("keydown", event => moveCell(event, panel));
    panels.push(panel);
  }
  const keyed = compared().reduce((most, m) => Math.max(most, keysOf(m).length), 0);
  grid.style.setProperty("--least", `${Math.round(Math.max(300, Math.min(560, 60 + keyed * 1.6)))}px`);
  view.append(make("div", { class: "headline" }, title, finding, reading), grid);
  // The pointer over a token of the text marks its column in every panel.
  view.addEventListener("link", event => { for (const panel of panels) guideTo(panel, event.detail); });
  const update = async () => {
    if (layersSignature() !== signature) return false;
    const found = await comparedRows(), best = strongestOf(found);
    const layer = state.layer ?? (best ? best.m.names[best.place] : null);
    // The chosen key is one of the keys of the map in which it was chosen.
    const keys = keysOf(state.key === null && best ? best.m : map()), key = inside(state.key ?? -1, keys.length) ? state.key : best ? best.key : null;
    title.textContent = `Layer by layer, for ${positionName(state.query)}`;
    finding.replaceChildren(...findingOf(found));
    const isChosen = state.layer !== null || state.key !== null;
    reading.classList.toggle("on-screen", !isChosen);
    reading.textContent = layer === null || key === null ? "" : isChosen ? await readingOf(found, layer, key, keys)
      : "Click a cell to read it by every method, or move to it with the arrow keys.";
    // The columns may be others now, so a column is marked again only when the pointer moves.
    linkPanels(null);
    for (const panel of panels) drawPanel(panel, found.find(one => one.m === panel.m), found, best, layer, same(keysOf(panel.m), keys) ? key : null);
    exported = () => ({ rows: found.flatMap(({ m, rows, shares }) => rows.flatMap((row, place) => [...row].map((x, key) => ({
      map: m.label, layer: m.names[place], head: headShown(m), query: state.query, query_token: m.tokens[state.query], key, token: keysOf(m)[key],
      value: Number.isNaN(x) ? null : x, share: Number.isNaN(x) ? null : shares[place][key] })))) });
    return true;
  };
  return update;
}
layersView.takes = layered;
layersView.options = () => [unitChoice(), scaleChoice(), numberChoices(), headChoice(), layerSlider(), compareChoice()];
const layersSignature = () => JSON.stringify([state.prompt, compared().map(m => maps().indexOf(m))]);

function guideTo({ m, guide, canvas }, key) {
  const { left, top, across, keys, bottom } = JSON.parse(canvas.dataset.geometry || "{}"), i = keys && !m.keys ? keys.indexOf(key) : -1;
  guide.hidden = i < 0;
  if (i >= 0) placeBox(guide, left + i * across, top, Math.max(2, across), bottom - top);
}
function moveCell(event, panel) {
  const { m, cell } = panel, steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!steps || !cell || event.ctrlKey || event.metaKey || event.altKey) return;
  const clamp = (n, count) => Math.max(0, Math.min(count - 1, n));
  event.preventDefault();
  event.stopPropagation();
  set({ layer: m.names[clamp(cell.place + steps[0], m.names.length)], key: clamp(cell.key + steps[1], keysOf(m).length), map: maps().indexOf(m) });
}

// The sizes of a panel in pixels: the labels of the layers at the left, one column of numbers at the right, and the widest cell.
const EDGE = 26, NUMBER = 40, WIDEST_CELL = 64;
// Draw one map: the cells, the numbers of the left-out keys at the right, and labels of the strongest keys below.
function drawPanel(panel, one, found, best, layer, key) {
  const { m, canvas } = panel;
  // A map without the row of this position is not shown.
  panel.box.hidden = !one;
  if (!one) return;
  const values = state.unit === "share" ? one.shares : one.rows, left = asNumbers(m, state.query);
  const most = scaleEnd(values, left);
  const place = placePanel(m, largestShares(found, m), left, m.names.indexOf(layer), key, Math.max(220, Math.floor(canvas.parentElement.clientWidth || 360)));
  const { keys, top, across, down, bottom } = place, wide = across * keys.length;
  const context = sizeCanvas(canvas, place.width, place.height);
  heat(context, [EDGE, top, wide, bottom - top], m.names.length, keys.length, (row, i) => values[row][keys[i]], most);
  context.strokeStyle = css("--line");
  context.strokeRect(EDGE - .5, top - .5, wide + 1, bottom - top + 1);
  canvas.dataset.numbers = JSON.stringify(writeNumbers(context, m, place, values));
  writeLabels(context, place);
  // The strongest cell of each map has an orange frame, and the chosen one a dark frame; a cell that is both is orange.
  frameCell(context, place, place.chosenRow, place.chosenColumn, css("--ink"), 1.5);
  if (one.best) frameCell(context, place, one.best.place, keys.indexOf(one.best.key), css("--mark"), one.best === best ? 2.5 : 1.5);
  canvas.dataset.geometry = JSON.stringify({ left: EDGE, top, across, down, bottom, keys });
  panel.cell = { place: Math.max(0, place.chosenRow), key: key ?? keys[0] ?? 0 };
  panel.find = (x, y) => {
    const i = Math.floor((x - EDGE) / across), row = Math.floor((y - top) / down);
    return i >= 0 && i < keys.length && row >= 0 && row < m.names.length ? { place: row, key: keys[i] } : null;
  };
  panel.tell = cell => `${m.layer_names[cell.place]}${m.heads ? `, ${headName(m)}` : ""}\n${named(keysOf(m), cell.key)}\n`
    + `${shown(one.rows[cell.place][cell.key])} raw score\n${percent(one.shares[cell.place][cell.key])} share of the row`;
  panel.scale.replaceChildren(legend(most, m.signed, state.unit === "share" ? "of the row" : "raw score"), tellNoise(m, values, left, shownUnit));
  describePanel(panel, one, place, key, left);
}
// Return the largest share of each key in any layer of the maps with these keys. A map counts by its own largest, so that all
// maps side by side label the same columns, each map's strongest among them.
function largestShares(found, m) {
  const out = new Float32Array(keysOf(m).length);
  for (const one of found.filter(other => same(keysOf(other.m), keysOf(m)))) {
    const left = asNumbers(one.m, state.query), most = one.shares.reduce((most, row) => Math.max(most, largestOf(row, left)), 0) || 1;
    out.forEach((_, key) => { for (const row of one.shares) if (!left.has(key)) out[key] = Math.max(out[key], Math.abs(row[key]) / most || 0); });
  }
  return out;
}
// Return where the parts of a panel are. A key that is shown as a number has no column; in a causal map the keys after the
// position have none either.
function placePanel(m, largest, left, chosenRow, key, width) {
  const tokens = keysOf(m), layers = m.names.length, sinks = sinkKeys(m, state.query), own = ownKey(m, state.query);
  const numbers = [...(sinks.length && !state.first ? [{ name: sinkName(m) === "first token" ? "first" : "special", keys: sinks }] : []),
    ...(own >= 0 && !state.diagonal ? [{ name: "own", keys: [own] }] : [])];
  const end = m.causal && !m.keys ? Math.min(tokens.length, state.query + 1) : tokens.length;
  const keys = Array.from({ length: end }, (_, i) => i).filter(i => !left.has(i)), chosenColumn = keys.indexOf(key);
  const down = layers > 60 ? 8 : layers > 36 ? 11 : layers > 8 ? 13 : 18, top = numbers.length ? 15 : 3, bottom = top + layers * down;
  const across = Math.min((width - EDGE - numbers.length * NUMBER - 2) / Math.max(1, keys.length), WIDEST_CELL), isWide = across >= 46;
  const count = Math.floor(across * keys.length / 22);
  const sizes = Float32Array.from(keys, (key, i) => i === chosenColumn ? Infinity : largest[key]);
  const labelled = isWide ? keys.map((_, i) => i) : spaced(sizes, across, keys.length, Math.max(6, Math.min(24, count)));
  const labels = labelled.map(i => ({ i, text: shortened(plain(tokens[keys[i]]), isWide ? Math.max(5, Math.floor(across / 7)) : 12) }));
  return { width, keys, numbers, top, bottom, across, down, isWide, labels, chosenRow, chosenColumn,
    height: bottom + (isWide ? 22 : measureLabels(labels.map(label => label.text)) + 10) };
}
// Write the number of each layer at the left, and those of the left-out keys at the right; return the latter.
function writeNumbers(context, m, { keys, numbers, top, across, down, chosenRow }, values) {
  const [ink, soft, accent] = ["--ink", "--soft", "--accent"].map(css), right = i => EDGE + across * keys.length + NUMBER - 2 + i * NUMBER;
  // Where rows are low, only some layers have their label and their numbers.
  const every = down >= 13 ? m.names.length > 12 ? 5 : 1 : 10, isFree = place => Math.abs(place - chosenRow) * down >= 11;
  const write = (text, x, y, color, isBold) => {
    context.font = `${isBold ? "700 " : ""}10px ${FONT}`;
    context.fillStyle = color;
    context.fillText(text, x, y);
  };
  context.textAlign = "right";
  numbers.forEach(({ name }, i) => write(name, right(i), 6, soft, false));
  return values.map((row, place) => {
    const isChosen = place === chosenRow, middle = top + (place + .5) * down + .5;
    if (isChosen || (place % every === 0 && isFree(place))) write(layerNumber(m, place), EDGE - 5, middle, isChosen ? accent : soft, isChosen);
    return numbers.map((column, i) => {
      const x = totalOf(row, column.keys), text = state.unit === "share" ? wholePercent(x) : compact(x);
      if (down >= 11 || isChosen || (place % 2 === 0 && isFree(place))) write(text, right(i), middle, isChosen ? ink : soft, isChosen);
      return text;
    });
  });
}
function writeLabels(context, { labels, across, bottom, isWide, chosenColumn }) {
  for (const { i, text } of labels) {
    const x = EDGE + (i + .5) * across, isChosen = i === chosenColumn;
    context.font = `${isChosen ? "700 " : ""}11px ${FONT}`;
    context.fillStyle = css(isChosen ? "--accent" : "--ink");
    context.textAlign = "center";
    if (isWide) context.fillText(text, x, bottom + 12, across - 2);
    else upright(context, text, x, bottom + 6, "right");
  }
}
// A cell of less than three pixels has a frame around the three pixels at its middle.
function frameCell(context, { top, across, down }, row, column, color, width) {
  if (row < 0 || column < 0) return;
  const wide = Math.max(across, 3);
  context.strokeStyle = color;
  context.lineWidth = width;
  context.strokeRect(EDGE + (column + .5) * across - wide / 2 - width / 2, top + row * down - width / 2, wide + width, down + width);
  context.lineWidth = 1;
}
// Write what a panel shows as text: its size, the chosen cell, and the strongest cells.
function describePanel({ m, canvas, text }, { shares }, { keys, chosenRow, chosenColumn }, key, left) {
  const tokens = keysOf(m), layers = m.names.length, isChosen = chosenRow >= 0 && chosenColumn >= 0;
  const sinks = sinkKeys(m, state.query), own = ownKey(m, state.query);
  const besides = place => [...(sinks.length ? [`${sinkName(m)} ${percent(totalOf(shares[place], sinks))}`] : []),
    ...(own >= 0 ? [`position itself ${percent(shares[place][own] || 0)}`] : [])].join(", ");
  canvas.setAttribute("aria-label", `${m.title}: ${layers === 1 ? "one layer" : `${layers} layers`} by ${keys.length} ${nounsOf(m)}. Chosen: ${isChosen
    ? `layer ${m.names[chosenRow]}, ${plain(tokens[key])}, ${percent(shares[chosenRow][key])} of the row; ${besides(chosenRow)}` : "none"}.`);
  const list = strongestCells(shares, left, 5).map(([place, i, x]) => `${m.layer_names[place]}, ${plain(tokens[i])}, token ${i}, ${percent(x)}`);
  text.textContent = `Strongest: ${list.join("; ")}. Arrow keys move the chosen cell.`;
}
// Return the strongest cells, [layer, key, value], without those of some keys.
function strongestCells(rows, left, count) {
  let best = [];
  rows.forEach((row, place) => row.forEach((x, key) => {
    if (!x || left.has(key) || (best.length === count && Math.abs(x) <= Math.abs(best[count - 1][2]))) return;
    best = [...best, [place, key, x]].sort((a, b) => Math.abs(b[2]) - Math.abs(a[2])).slice(0, count);
  }));
  return best;
}
// Return the width of the longest label, with a little more for a bold one.
function measureLabels(labels) {
  const context = sheet.getContext("2d", { willReadFrequently: true });
  context.font = `700 11px ${FONT}`;
  return Math.ceil(Math.max(0, ...labels.map(label => context.measureText(label).width)));
}
const wholePercent = x => { const whole = Math.round(100 * x); return whole === 0 && x !== 0 ? "<1%" : `${minus(whole)}%`; };
const compact = x => minus(x === 0 ? "0" : Math.abs(x) >= 1000 || Math.abs(x) < .01 ? x.toExponential(0) : x.toPrecision(2));
