// ------------------------------------------------------------------ views: layer by layer
// One position in every layer: layers down, tokens across, methods side by side.
const layered = m => m.names.length > 1 || m.kind === "layer";
const candidates = () => { const all = ofText().filter(layered); return [...all.filter(m => m.kind === "layer"), ...all.filter(m => m.kind === "input")]; };
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
const strongestOf = found => found.map(one => one.best).filter(Boolean).reduce((best, one) => !best || Math.abs(one.share) > Math.abs(best.share) ? one : best, null);
const totalOf = (row, keys) => [...keys].reduce((sum, key) => sum + (key >= 0 ? row[key] || 0 : 0), 0);

// Return one sentence about the strongest cell of all, and one about the same cell in another map.
function findingOf(found) {
  const best = strongestOf(found), strong = text => make("b", { text });
  if (!found.length) return [`No map that is compared here has the row of ${positionName(state.query)}.`];
  if (!best) return ["No row here has weight outside the first token and the position itself."];
  const { m, place, key, share } = best, position = positionName(state.query), head = headName(m);
  const [, before, number] = /^(.*?)(layer \d+)?$/.exec(m.kind === "layer" ? `In ${m.layer_names[place]}` : capital(m.layer_names[place]));
  const first = [before, strong(number || ""), `${m.kind === "layer" ? "" : ","} ${position} takes `,
    strong(percent(Math.abs(share))), ` of its ${m.title} row${head ? ` (${head})` : ""} from `, strong(quotedToken(keysOf(m)[key])), ` (token ${key})${share < 0 ? ", with a negative sign" : ""}.`];
  const other = found.find(one => one.m !== m && same(keysOf(one.m), keysOf(m)) && one.m.names.includes(m.names[place]) && one.m.kind === m.kind);
  if (!other) return first;
  const row = other.shares[other.m.names.indexOf(m.names[place])], sink = totalOf(row, sinkKeys(other.m, state.query)), own = row[ownKey(other.m, state.query)] || 0;
  const rest = sink >= own ? [sink, `the ${sinkName(other.m)}`] : [own, "the position itself"];
  return [...first, ` ${other.m.title} gives it ${percent(row[key])} there`, rest[0] >= .05 ? ` and ${percent(rest[0])} to ${rest[1]}.` : "."];
}
// Return one line about the chosen cell in every compared map with these keys.
function readingOf(found, layer, key, keys) {
  const parts = found.filter(({ m }) => same(keysOf(m), keys)).map(({ m, rows, shares }) => {
    const place = m.names.indexOf(layer);
    if (place < 0 || !inside(key, keysOf(m).length)) return `${m.title} –`;
    const x = state.unit === "share" ? percent(shares[place][key]) : shown(rows[place][key]);
    return `${m.title} ${x}`;
  });
  return `Layer ${layer}, ${quotedToken(keys[key])} (token ${key}): ${parts.join(" · ")}.`;
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
    reading.textContent = layer === null || key === null ? "" : state.layer === null && state.key === null
      ? "Click a cell to read it by every method, or move to it with the arrow keys." : readingOf(found, layer, key, keys);
    for (const panel of panels) drawPanel(panel, found.find(one => one.m === panel.m), best, layer, same(keysOf(panel.m), keys) ? key : null);
    exported = () => ({ rows: found.flatMap(({ m, rows, shares }) => rows.flatMap((row, place) => [...row].map((x, key) => ({
      map: m.label, layer: m.names[place], head: headShown(m), query: state.query, query_token: m.tokens[state.query], key, token: keysOf(m)[key],
      value: Number.isNaN(x) ? null : x, share: Number.isNaN(x) ? null : shares[place][key] })))) });
    return true;
  };
  return update;
}
layersView.takes = layered;
layersView.options = () => [press("unit", [["share", "rows sum to 1"], ["raw", "raw scores"]], "unit"), scaleChoice(), numberChoices(), headChoice(), layerSlider(), compareChoice()];
const layersSignature = () => JSON.stringify([state.prompt, compared().map(m => maps().indexOf(m))]);

function guideTo({ m, guide, canvas }, key) {
  const { left, top, across, keys, bottom } = JSON.parse(canvas.dataset.geometry || "{}"), i = keys && !m.keys ? keys.indexOf(key) : -1;
  guide.hidden = i < 0;
  if (i >= 0) Object.assign(guide.style, { left: `${left + i * across}px`, width: `${Math.max(2, across)}px`, top: `${top}px`, height: `${bottom - top}px` });
}
function moveCell(event, panel) {
  const { m, cell } = panel, steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!steps || !cell || event.ctrlKey || event.metaKey || event.altKey) return;
  const clamp = (n, count) => Math.max(0, Math.min(count - 1, n));
  event.preventDefault();
  event.stopPropagation();
  set({ layer: m.names[clamp(cell.place + steps[0], m.names.length)], key: clamp(cell.key + steps[1], keysOf(m).length), map: maps().indexOf(m) });
}

// Draw one map: the cells, the numbers of the left-out keys at the right, and labels of the strongest keys below.
function drawPanel(panel, one, best, layer, key) {
  const { m, canvas, scale, text } = panel, keys = keysOf(m), layers = m.names.length;
  // A map without the row of this position is not shown.
  panel.box.hidden = !one;
  if (!one) return;
  const left = asNumbers(m, state.query), sinks = sinkKeys(m, state.query), own = ownKey(m, state.query);
  const columns = [...(sinks.length && !state.first ? [[sinkName(m) === "first token" ? "first" : "special", sinks]] : []), ...(own >= 0 && !state.diagonal ? [["own", [own]]] : [])];
  const values = state.unit === "share" ? one.shares : one.rows;
  const most = values.reduce((most, row) => Math.max(most, largestOf(row, left)), 0);
  // A column that is only a number is not drawn; in a causal map the keys after the position are not drawn either.
  const end = m.causal && !m.keys ? Math.min(keys.length, state.query + 1) : keys.length;
  const drawn = Array.from({ length: end }, (_, i) => i).filter(i => !left.has(i));
  const width = Math.max(220, Math.floor(canvas.parentElement.clientWidth || 360)), edge = 26, side = columns.length * 40 + 2;
  const rowHeight = layers > 60 ? 8 : layers > 36 ? 11 : layers > 8 ? 13 : 18, head = columns.length ? 15 : 3, inner = width - edge - side;
  const cell = drawn.length ? Math.min(inner / drawn.length, 64) : inner, across = cell * drawn.length;
  const column = drawn.map(i => values.reduce((most, row) => Math.max(most, Math.abs(row[i]) || 0), 0));
  const isWide = cell >= 46, bottom = head + layers * rowHeight;
  const chosenColumn = drawn.indexOf(key), chosenRow = m.names.indexOf(layer);
  const sizes = Float32Array.from(column, (x, i) => i === chosenColumn ? Infinity : x);
  const labels = isWide ? drawn.map((_, i) => i) : spaced(sizes, cell, drawn.length, Math.max(6, Math.min(24, Math.floor(across / 22))));
  const labelled = labels.map(i => shortened(plain(keys[drawn[i]]), isWide ? Math.max(5, Math.floor(cell / 7)) : 12));
  const longest = measureLabels(labelled), context = sizeCanvas(canvas, width, bottom + (isWide ? 22 : longest + 10));
  const [ink, soft, line, accent, mark] = ["--ink", "--soft", "--line", "--accent", "--mark"].map(css);
  heat(context, [edge, head, across, layers * rowHeight], layers, drawn.length, (place, i) => values[place][drawn[i]], most);
  context.strokeStyle = line;
  context.strokeRect(edge - .5, head - .5, across + 1, layers * rowHeight + 1);
  // Every layer has its numbers; only some have their label if rows are low.
  const every = rowHeight >= 13 ? layers > 12 ? 5 : 1 : 10;
  for (let place = 0; place < layers; place++) {
    const middle = head + place * rowHeight + rowHeight / 2 + .5, isChosen = place === chosenRow, number = layerNumber(m, place);
    context.textAlign = "right";
    context.font = `${isChosen ? "700 " : ""}10px ${FONT}`;
    if (isChosen || (place % every === 0 && Math.abs(place - chosenRow) * rowHeight >= 11)) {
      context.fillStyle = isChosen ? accent : soft;
      context.fillText(number, edge - 5, middle);
    }
    if (rowHeight >= 11 || isChosen || place % 2 === 0 && Math.abs(place - chosenRow) > 1) columns.forEach(([, some], i) => {
      context.fillStyle = isChosen ? ink : soft;
      const x = totalOf(values[place], some);
      context.fillText(state.unit === "share" ? wholePercent(x) : compact(x), edge + across + 38 + i * 40, middle);
    });
  }
  context.font = `10px ${FONT}`;
  context.fillStyle = soft;
  columns.forEach(([name], i) => context.fillText(name, edge + across + 38 + i * 40, 6));
  context.textAlign = "left";
  for (const [n, i] of labels.entries()) {
    const x = edge + i * cell + cell / 2, isChosen = i === chosenColumn, label = labelled[n];
    context.font = `${isChosen ? "700 " : ""}11px ${FONT}`;
    context.fillStyle = isChosen ? accent : ink;
    if (isWide) { context.textAlign = "center"; context.fillText(label, x, bottom + 12, cell - 2); } else upright(context, label, x, bottom + 6, "right");
  }
  const frame = (place, i, style, width) => {
    if (place < 0 || i < 0) return;
    context.strokeStyle = style; context.lineWidth = width;
    const w = Math.max(cell, 3);
    context.strokeRect(edge + i * cell + (cell - w) / 2 - width / 2, head + place * rowHeight - width / 2, w + width, rowHeight + width);
  };
  // The strongest cell of each map has an orange frame, and the chosen one a dark frame; a cell that is both is orange.
  frame(chosenRow, chosenColumn, ink, 1.5);
  if (one.best) frame(one.best.place, drawn.indexOf(one.best.key), mark, one.best === best ? 2.5 : 1.5);
  context.lineWidth = 1;
  panel.cell = { place: Math.max(0, chosenRow), key: key ?? drawn[0] ?? 0 };
  canvas.dataset.geometry = JSON.stringify({ left: edge, top: head, across: cell, down: rowHeight, bottom, keys: drawn });
  panel.find = (x, y) => {
    const i = Math.floor((x - edge) / cell), place = Math.floor((y - head) / rowHeight);
    return i >= 0 && i < drawn.length && place >= 0 && place < layers ? { place, key: drawn[i] } : null;
  };
  panel.tell = cell => `${m.layer_names[cell.place]}${m.heads ? `, ${headName(m)}` : ""}\n${named(keys, cell.key)}\n`
    + `${shown(one.rows[cell.place][cell.key])} raw score\n${percent(one.shares[cell.place][cell.key])} share of the row`;
  scale.replaceChildren(legend(most, m.signed, state.unit === "share" ? "of the row" : "raw score"));
  const list = one.shares.flatMap((row, place) => [...row].map((x, i) => [place, i, x])).filter(([, i, x]) => x && !left.has(i))
    .sort((a, b) => Math.abs(b[2]) - Math.abs(a[2])).slice(0, 5);
  canvas.setAttribute("aria-label", `${m.title}: ${layers === 1 ? "one layer" : `${layers} layers`} by ${drawn.length} tokens. Chosen: ${chosenRow < 0 || chosenColumn < 0 ? "none"
    : `layer ${layer}, ${plain(keys[key])}, ${percent(one.shares[chosenRow][key])} of the row`}.`);
  text.textContent = `Strongest: ${list.map(([place, i, x]) => `${m.layer_names[place]}, ${plain(keys[i])}, token ${i}, ${percent(x)}`).join("; ")}. Arrow keys move the chosen cell.`;
}
// Return the width of the longest label, with a little more for a bold one.
function measureLabels(labels) {
  const context = sheet.getContext("2d", { willReadFrequently: true });
  context.font = `700 11px ${FONT}`;
  return Math.ceil(Math.max(0, ...labels.map(label => context.measureText(label).width)));
}
const wholePercent = x => { const whole = Math.round(100 * x); return whole === 0 && x !== 0 ? "<1%" : `${minus(whole)}%`; };
const compact = x => minus(x === 0 ? "0" : Math.abs(x) >= 1000 || Math.abs(x) < .01 ? x.toExponential(0) : x.toPrecision(2));
