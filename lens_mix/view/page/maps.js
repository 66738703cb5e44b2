// ------------------------------------------------------------------ views: text by method
let exported = () => ({});
const UNITS = { token: "", word: "Words are found by the marks that tokenizers write into their pieces.", sentence: "A sentence ends "
  + "after a token that ends in . ! ? 。 ！ ？ or a line break; each special token is a sentence of its own." };
// Return the layer whose row the view shows of a map: the chosen one, or else the one of the strongest cell of all.
const shownPlace = (m, layer) => layer === null ? m.names.length - 1 : sameLayer(m, layer);
// Return a unit without some keys, each of which becomes a unit of its own.
function apart(positions, keys) {
  const units = [];
  positions.forEach((key, i) => {
    if (!i || keys.has(key) || keys.has(positions[i - 1])) units.push([]);
    units[units.length - 1].push(key);
  });
  return units;
}

async function textView(view) {
  const table = [], best = strongestOf(await comparedRows()), layer = state.layer ?? (best ? best.m.names[best.place] : null);
  view.append(make("div", { class: "headline" }, make("h2", { text: `What ${positionName(state.query)} takes, by each method` })));
  if (state.by !== "token") view.append(make("p", { class: "caption", "data-units": state.by, text: `${UNITS[state.by]} The row of a `
    + `${state.by} is the mean of its tokens' rows. The score of another ${state.by} is the sum over its tokens.` }));
  for (const m of ofText()) {
    const place = shownPlace(m, layer), head = headShown(m), keys = keysOf(m);
    if (place < 0) {
      view.append(make("div", { class: "row", "data-map": m.label }, make("h3", {}, make("b", { text: m.title }),
        make("span", { class: "note", text: ` · no layer ${layer} in this map` }))));
      continue;
    }
    const { row, of, whole } = await unitRow(m, place, head, state.query);
    // A first token or a special token that is not colored is left out of its word too.
    const sinks = new Set(state.first ? [] : sinkKeys(m, state.query));
    const units = unitsOf(m.key_words || m.words, keys.length).flatMap(positions => apart(positions, sinks));
    const own = m.keys || state.diagonal ? [] : units.find(positions => positions.includes(state.query));
    const values = row && inUnit(summed(row, units)), each = new Float32Array(keys.length).fill(NaN);
    if (values) units.forEach((positions, i) => positions.forEach(key => { each[key] = values[i]; }));
    const left = new Set([...units.keys()].filter(i => units[i] === own || units[i].some(key => sinks.has(key))));
    const title = make("h3", {}, make("b", { text: m.title }),
      ` · ${m.layer_names[place]}${m.kind === "input" ? ", input map" : ""}${m.heads ? ` · ${headName(m)}` : ""}`);
    const isCut = of.length < whole.length, hasUnits = state.by === "token" || (m.key_words || m.words)[state.by];
    const note = !row ? "this map does not have this row"
      : isCut ? `only the row of ${named(m.tokens, state.query)}: the map does not have the other rows of its ${state.by}`
        : hasUnits ? "" : "its tokens do not show where words begin";
    if (note) title.append(make("span", { class: "note", text: ` · ${note}` }));
    const placed = [], score = i => values ? `\n${shown(each[i])} ${unit()}` : "";
    units.forEach(positions => positions.forEach(key => { placed[key] = positions; }));
    const { line, boxes } = tokenLine(keys, m.key_words || m.words, { role: "group", "aria-label": `${m.title}: the tokens` },
      { tell: i => spelled(keys, placed[i]) + score(i), choose: m.keys ? null : choosePosition });
    const pale = new Set([...sinks, ...own]), most = row ? scaleEnd([values], left) : 0;
    colorBoxes(boxes, row && each, pale, most);
    if (!row) boxes.forEach(box => box.classList.remove("hidden"));
    boxes.forEach((box, i) => box.classList.toggle("chosen", !m.keys && of.includes(i)));
    const below = make("p", { class: "below" });
    if (most) below.append(legend(most, m.signed, unit()));
    const besides = [...[...sinks].map(key => [quotedToken(keys[key]), each[key]]),
      [`the ${own.length > 1 ? state.by : "position"} itself`, own.length ? each[own[0]] : 0]];
    for (const [name, x] of besides) if (row && x) below.append(` · ${name} ${shownUnit(x)}, not colored`);
    if (row) below.append(tellNoise(m, [values], left, shownUnit));
    view.append(make("div", { class: "row", "data-map": m.label }, title, line, below));
    if (row) units.forEach((positions, i) => table.push({ map: m.label, layer: m.names[place], head,
      query: of[0], last_query: of[of.length - 1], key: positions[0], last_key: positions[positions.length - 1],
      token: joined(positions.map(key => keys[key])), value: Number.isNaN(values[i]) ? null : values[i] }));
  }
  exported = () => ({ rows: table });
}
// A picture has no text.
textView.takes = m => !m.grid;
textView.options = () => [unitChoice(), choose("by", "by",
  ["token", ...(map().words.word ? ["word"] : []), "sentence"]), scaleChoice(), numberChoices(), headChoice(), layerSlider()];

// ------------------------------------------------------------------ views: all positions
const cellOf = (m, scores, keys) => {
  const sinks = new Set(state.first ? [] : m.sinks), isOwnDrawn = state.diagonal || Boolean(m.keys);
  return (row, key) => sinks.has(key) || (!isOwnDrawn && key === m.queries[row]) ? null : scores[row * keys + key];
};
function mostOf(m, scores, keys, whole) {
  if (state.range === "all" && whole) return whole;
  const at = cellOf(m, scores, keys), rows = m.queries.map((_, row) => {
    let most = 0, drawn = 0;
    for (let key = 0; key < keys; key++) { const x = Math.abs(at(row, key)) || 0; drawn += x; if (x > most) most = x; }
    const total = size(scores.subarray(row * keys, (row + 1) * keys));
    return { most, total, isPale: isNoise(most, total - drawn, total) };
  });
  const end = Math.max(0, ...rows.filter(row => !row.isPale).map(row => row.most));
  if (state.range === "row") return Object.assign(row => rows[row].isPale ? rows[row].total : rows[row].most, { end, pale: rows.filter(row => row.isPale && row.most).length });
  return end || Math.max(0, ...rows.map(row => row.total));
}
const inUnits = (scores, keys) => {
  if (state.unit !== "share") return scores;
  const out = new Float32Array(scores.length);
  for (let start = 0; start < scores.length; start += keys) out.set(sharesOf(scores.subarray(start, start + keys)), start);
  return out;
};

async function gridView(view) {
  const m = map(), keys = keysOf(m).length, rows = m.queries.length, heads = Math.max(1, m.heads), layers = m.names.length;
  const signature = gridSignature();
  const small = make("div", { class: "pane" }), large = make("div", { class: "pane large" });
  const panes = make("div", { class: "panes" }, large, small);
  const isPlural = layers * heads > 1;
  view.append(make("div", { class: "headline" }, make("h2", { text: `${m.title}: all positions` })), panes);
  if (!isPlural) small.remove();
  const big = make("canvas", { tabindex: 0, role: "application", "aria-roledescription": "heat map", "data-grid": "one" });
  const caption = make("p", { class: "caption" }), below = make("div"), words = make("p", { class: "visually-hidden", id: "strongest-large" });
  big.setAttribute("aria-describedby", words.id);
  large.append(caption, big, words, below);
  const one = { scores: null, find: null, m, keys, rows };
  follow(big, (x, y) => one.find && one.find(x, y), cell => tellCell(m, one.place, headShown(m), one.raw, keys, cell),
    cell => set({ query: m.queries[cell.row], key: cell.key }));
  const thumbs = isPlural ? makeThumbnails(m, small, keys, rows, heads) : null;
  const best = strongestOf(await comparedRows());
  return async () => {
    if (gridSignature() !== signature) return false;
    // Without a choice, it is the layer of the strongest cell of all.
    const wanted = best && state.layer === null ? m.names.indexOf(best.m.names[best.place]) : -1, place = wanted >= 0 ? wanted : placeOf(m);
    one.raw = await scoresOf(m, place, headShown(m));
    one.place = place;
    drawLarge(one, { canvas: big, caption, below, words });
    exported = () => ({ rows: m.queries.flatMap((query, row) => keysOf(m).map((token, key) => ({ map: m.label,
      layer: m.names[place], head: headShown(m), query, query_token: m.tokens[query], key, token,
      value: Number.isNaN(one.raw[row * keys + key]) ? null : one.raw[row * keys + key] }))) });
    thumbs?.mark(place, headShown(m));
    thumbs?.start();
    return true;
  };
}
gridView.takes = m => m.queries.length > 1;
gridView.options = () => [mapChoice(), headChoice(), layerSlider(), unitChoice(), scaleChoice(),
  choose("range", "largest of", [["map", "each map"], ["row", "each row"], ["all", "all maps"]]), numberChoices()];
const gridSignature = () => JSON.stringify([state.prompt, state.map, state.scale, state.range, state.unit, state.first, state.diagonal, innerWidth]);
function tellCell(m, place, head, scores, keys, { row, key }) {
  const x = scores[row * keys + key], total = size(scores.subarray(row * keys, (row + 1) * keys)) || 1;
  return `${m.layer_names[place]}${m.heads ? `, ${head < 0 ? "mean of heads" : `head ${head}`}` : ""}\n${named(m.tokens, m.queries[row])} from `
    + `${named(keysOf(m), key)}\n${shown(x)} raw score${Number.isNaN(x) ? "" : `\n${percent(x / total)} share of the row`}`;
}

// Draw the chosen layer and head in full.
function drawLarge(one, { canvas, caption, below, words }) {
  const { m, raw, keys, rows, place } = one, scores = inUnits(raw, keys), at = cellOf(m, scores, keys);
  const most = mostOf(m, scores, keys, state.range === "all" && state.unit === "raw" ? Math.max(...m.layers.map(layer => layer.largest)) : 0);
  const layout = placeLarge(m, keys, rows), { edge, zoom } = layout, row = m.queries.indexOf(state.query);
  const context = sizeCanvas(canvas, layout.width, layout.height);
  context.translate(edge, edge);
  heat(context, [0, 0, keys * zoom, rows * zoom], rows, keys, at, most);
  context.strokeStyle = css("--line");
  context.strokeRect(-.5, -.5, keys * zoom + 1, rows * zoom + 1);
  // A frame would cover rows that are only a few pixels high; the row then has its label alone.
  if (row >= 0 && zoom >= 4) {
    context.strokeStyle = css("--accent");
    context.strokeRect(-1, row * zoom - .5, keys * zoom + 2, zoom + 1);
  }
  labelAxes(context, m, at, layout, row);
  canvas.dataset.numbers = JSON.stringify(layout.numbers.length ? writeRowNumbers(context, m, scores, keys, layout) : []);
  canvas.dataset.geometry = JSON.stringify({ left: edge, top: edge, across: zoom, down: zoom });
  one.find = (x, y) => {
    const key = Math.floor((x - edge) / zoom), row = Math.floor((y - edge) / zoom);
    return key >= 0 && key < keys && row >= 0 && row < rows ? { key, row } : null;
  };
  const layer = `${m.layer_names[place]}${m.heads ? `, ${headName(m)}` : ""}`, stored = m.mean && headShown(m) < 0 ? m.mean : m;
  caption.textContent = `${m.title} · ${layer}. Rows are positions, columns the ${nounsOf(m)} that they read.`
    + ` Stored with an error of at most ${shown(stored.layers[place].error)}.`;
  below.replaceChildren(legend(typeof most === "function" ? most.end || 1 : most, m.signed,
    `${state.unit === "share" ? "of the row" : "raw score"}${state.range === "row" ? ` (each row has its own largest${most.pale ? `; not colored where no ${nounOf(m)} has 1 %` : ""})` : ""}`),
  make("p", { class: "caption", text: describeLeftOut(m, raw, keys) }));
  canvas.setAttribute("aria-label", `${m.title}, ${layer}: ${rows} positions by ${keys} ${nounsOf(m)}. Chosen: position ${state.query}.`);
  const lines = m.queries.map((_, row) => Float32Array.from({ length: keys }, (_, key) => at(row, key) ?? 0));
  const strongest = strongestCells(lines, new Set(), 5).map(([row, key, x]) => `${named(m.tokens, m.queries[row])} from ${named(keysOf(m), key)}, ${shownUnit(x)}`);
  words.textContent = `Strongest: ${strongest.join("; ")}.`;
}
// Return the sizes of the large map: its cells are as large as fits beside the small pictures, or above them on a narrow
// screen. Numbers are beside the rows if these are high enough.
function placeLarge(m, keys, rows) {
  const isNarrow = innerWidth < 1000, longest = Math.max(...m.tokens.slice(0, 400).map(token => Math.min(12, visible(token).length)));
  const edge = Math.min(100, 18 + 7 * longest), width = $("panel").clientWidth * (isNarrow ? 1 : .53) - edge, height = isNarrow ? innerHeight * .36 : 640;
  const columns = [];
  if (m.sinks.length && !state.first) columns.push({ name: sinkName(m) === "first token" ? "first" : "special", of: (row, line) => totalOf(line, m.sinks) });
  if (!state.diagonal && !m.keys) columns.push({ name: "own", of: (row, line) => line[m.queries[row]] || 0 });
  const fit = beside => Math.min(width - beside, height) / Math.max(keys, rows), withNumbers = fit(columns.length * NUMBER + 10), without = fit(10);
  const hasNumbers = withNumbers >= 10, exact = hasNumbers ? withNumbers : without, zoom = Math.min(26, exact >= 3 ? Math.floor(exact) : Math.max(.5, exact));
  const numbers = hasNumbers ? columns : [];
  return { edge, zoom, numbers, width: edge + keys * zoom + 12 + numbers.length * NUMBER, height: edge + rows * zoom + 8 };
}
// Write the tokens: the chosen ones and then those with the largest columns, if there is no room for all.
function labelAxes(context, m, at, { zoom }, chosen) {
  const [ink, accent] = ["--ink", "--accent"].map(css), tokens = keysOf(m), column = new Float32Array(tokens.length);
  m.queries.forEach((_, row) => column.forEach((_, key) => { column[key] += Math.abs(at(row, key)) || 0; }));
  for (const key of spaced(column, zoom, tokens.length)) {
    context.fillStyle = key === state.key ? accent : ink;
    upright(context, shortened(plain(tokens[key]), 12), (key + .5) * zoom, -6);
  }
  context.textAlign = "right";
  for (const row of spaced(Float32Array.from(m.queries, (_, row) => row === chosen ? 9 : 1), zoom, m.queries.length)) {
    context.fillStyle = row === chosen ? accent : ink;
    context.fillText(shortened(plain(m.tokens[m.queries[row]]), 12), -6, (row + .5) * zoom);
  }
}
// Write the numbers of the keys that are not drawn beside each row, and return them.
function writeRowNumbers(context, m, scores, keys, { zoom, numbers }) {
  const right = i => keys * zoom + NUMBER - 2 + i * NUMBER;
  context.font = `10px ${FONT}`;
  context.fillStyle = css("--soft");
  numbers.forEach(({ name }, i) => context.fillText(name, right(i), -8));
  return m.queries.map((_, row) => numbers.map(({ of }, i) => {
    const x = of(row, scores.subarray(row * keys, (row + 1) * keys)), text = state.unit === "share" ? wholePercent(x) : compact(x);
    context.fillText(text, right(i), (row + .5) * zoom + .5);
    return text;
  }));
}
// Return how much the rows give on average to the first token and to their own position.
function describeLeftOut(m, raw, keys) {
  let sink = 0, own = 0;
  m.queries.forEach((query, row) => {
    const line = sharesOf(raw.subarray(row * keys, (row + 1) * keys));
    sink += totalOf(line, m.sinks) / m.queries.length;
    own += m.keys ? 0 : (line[query] || 0) / m.queries.length;
  });
  return [m.sinks.length && `${sinkName(m)}: ${percent(sink)} of a row on average${state.first ? "" : ", not drawn"}`,
    !m.keys && `position itself: ${percent(own)}${state.diagonal ? "" : ", not drawn"}`,
    m.causal && "Grey: keys that the position cannot see"].filter(Boolean).join(" · ");
}

// Make small pictures of every layer and head. They are drawn after the large one, a layer at a time, so that the page answers meanwhile.
function makeThumbnails(m, pane, keys, rows, heads) {
  const layers = m.names.length, width = innerWidth < 1000 ? $("panel").clientWidth - 8 : Math.min(640, $("panel").clientWidth * .44);
  const gap = 5, edge = 30, head = 16, thumb = Math.max(22, Math.min(heads > 1 ? 60 : 84, Math.floor((width - 40) / Math.min(heads, 16)) - gap)), step = thumb + gap;
  const columns = heads > 1 ? heads : Math.max(1, Math.min(layers, Math.floor(width / step))), name = heads > 1 ? 0 : 14;
  const lines = heads > 1 ? layers : Math.ceil(layers / columns);
  const { canvas, context } = canvasOf(edge + columns * step, head + lines * (step + name), { "data-grid": "all", role: "img",
    "aria-label": `Small pictures of ${layers} layers${heads > 1 ? ` and ${heads} heads` : ""}. Choose one with the layer and head controls.` });
  const corner = (place, one) => heads > 1 ? [edge + one * step, head + place * step]
    : [edge + (place % columns) * step, head + Math.floor(place / columns) * (step + name) + name];
  const frame = make("div", { class: "frame" });
  const find = (x, y) => {
    for (let place = 0; place < layers; place++) for (let one = 0; one < heads; one++) {
      const [left, top] = corner(place, one);
      if (x >= left && x < left + thumb && y >= top && y < top + thumb) return { place, one,
        key: Math.floor((x - left) / thumb * keys), row: Math.floor((y - top) / thumb * rows) };
    }
    return null;
  };
  const scoresIn = (place, one) => scoresOf(m, place, m.heads > 1 ? one : -1);
  follow(canvas, find, async cell => tellCell(m, cell.place, m.heads ? cell.one : -1, await scoresIn(cell.place, cell.one), keys, cell),
    cell => set({ layer: m.names[cell.place], head: m.heads > 1 ? cell.one : -1 }));
  pane.append(make("p", { class: "caption", text: `${m.heads > 1 ? "Layers down, heads across" : "One picture per layer"}. Click one to enlarge it.` }),
    make("div", { class: "thumbs" }, canvas, frame));
  context.fillStyle = css("--soft");
  context.strokeStyle = css("--line");
  for (let place = 0; place < layers; place++) for (let one = 0; one < heads; one++) {
    const [left, top] = corner(place, one);
    if (heads === 1) context.fillText(layerNumber(m, place), left, top - 8);
    else if (one === 0) context.fillText(layerNumber(m, place), 6, top + thumb / 2);
    if (heads > 1 && place === 0) context.fillText(String(one), left + thumb / 2 - 4, 8);
    context.strokeRect(left - .5, top - .5, thumb + 1, thumb + 1);
  }
  let isStarted = false;
  return {
    mark(place, one) {
      const isWhole = heads > 1 && one < 0, [left, top] = corner(place, Math.max(0, one));
      placeBox(frame, left - 3, top - 3, isWhole ? heads * step - gap + 6 : thumb + 6, thumb + 6);
    },
    async start() {
      if (isStarted) return;
      isStarted = true;
      const whole = state.range === "all" && state.unit === "raw" ? Math.max(...m.layers.map(layer => layer.largest)) : 0;
      for (let place = 0; place < layers; place++) {
        for (let one = 0; one < heads; one++) {
          await idle();
          if (!canvas.isConnected) return;
          const scores = inUnits(await scoresIn(place, one), keys);
          heat(context, [...corner(place, one), thumb, thumb], rows, keys, cellOf(m, scores, keys), mostOf(m, scores, keys, whole));
        }
      }
      document.body.dataset.thumbnails = String(+(document.body.dataset.thumbnails || 0) + 1);
    },
  };
}
// Wait until the browser has drawn and answered what it has to.
let rested = 0;
const idle = async () => {
  if (performance.now() - rested < 12) return;
  await new Promise(resolve => { const channel = new MessageChannel(); channel.port1.onmessage = () => resolve(); channel.port2.postMessage(0); });
  rested = performance.now();
};

// ------------------------------------------------------------------ views: agreement of methods
const isComparable = (m, base) => m.tokens.length === base.tokens.length && keysOf(m).length === keysOf(base).length;
// Return a correlation in as few characters as possible, because a deep model has many columns: .89, −.12, 1.
function correlation(x) {
  const text = x.toFixed(2);
  return Number.isNaN(x) ? "–" : +text % 1 === 0 ? minus(+text || 0) : minus(text.replace("0.", "."));
}
async function methodsView(view) {
  const base = map(), others = ofText().filter(m => m !== base), table = make("table", { class: "agreement" }), rows = [];
  // The score is that of the method's best input map, so a rollout or flow on the page does not get it.
  const score = m => m.provenance.aggregation ? undefined : SCORES.get(m.method);
  const columns = [`agreement with ${base.title}`, "leaderboard", ...base.names.map((_, place) => layerNumber(base, place) || base.layer_names[place])];
  table.append(make("tr", {}, ...columns.map(text => make("th", { scope: "col", text }))));
  for (const m of [base, ...others]) {
    const cells = [];
    for (const [place, name] of base.names.entries()) {
      const there = sameLayer(m, name);
      let value = NaN;
      if (isComparable(m, base) && there >= 0) {
        const [mine, theirs] = [await rowOf(base, place, -1, state.query), await rowOf(m, there, -1, state.query)];
        // Magnitudes are compared, as in lm.compare, because a sign is not part of how much was used.
        if (mine && theirs) value = spearman(mine.map(Math.abs), theirs.map(Math.abs));
      }
      const cell = make("td", { text: correlation(value), "data-layer": name });
      if (!Number.isNaN(value)) { cell.style.background = color(value, 2); cell.style.color = inkOn(rgb(value, 2)); }
      cells.push(cell);
      rows.push({ map: base.label, with: m.label, layer: name, query: state.query, value: Number.isNaN(value) ? null : value });
    }
    table.append(make("tr", { "data-map": m.label }, make("th", { scope: "row", text: m.title }),
      make("td", { text: score(m) === undefined ? "–" : score(m).toFixed(2), "data-score": "" }), ...cells));
  }
  view.append(make("div", { class: "headline" }, make("h2", { text: `Do the methods agree about ${positionName(state.query)}?` })),
    make("div", { class: "pane", tabindex: 0, role: "region", "aria-label": "rank agreement of the methods" }, table),
    make("p", { class: "caption", text: "Each layer's rank agreement (Spearman's correlation of the rows' magnitudes, −1 to 1, as in lm.compare). "
      + `Leaderboard: the score of the method's best input map (${DATA.scored}). A rollout or flow on this page may be worse, and has no score.` }));
  const best = strongestOf(await comparedRows()), found = state.layer ?? (best ? best.m.names[best.place] : null);
  const place = base.names.includes(found) ? base.names.indexOf(found) : placeOf(base), layer = base.names[place], mine = await rowOf(base, place, -1, state.query);
  for (const m of others.filter(m => isComparable(m, base))) {
    const there = sameLayer(m, layer);
    const theirs = there < 0 ? null : await rowOf(m, there, -1, state.query);
    if (!mine || !theirs) continue;
    const [a, b] = [sharesOf(mine), sharesOf(theirs)], difference = a.map((x, i) => x - b[i]), pale = asNumbers(base, state.query);
    const arePale = isNoiseRow(a, pale) && isNoiseRow(b, pale), most = arePale ? 1 : largestOf(difference, pale), label = `difference of ${base.title} and ${m.title}`;
    const { line, boxes } = tokenLine(keysOf(base), base.key_words || base.words, { role: "group", "aria-label": label },
      { tell: i => `${named(keysOf(base), i)}\n${shown(difference[i])} difference of shares`, choose: base.keys ? null : choosePosition });
    colorBoxes(boxes, difference, pale, most);
    boxes.forEach((box, i) => box.classList.toggle("chosen", !base.keys && i === state.query));
    view.append(make("div", { class: "row" }, make("h3", {}, make("b", { text: `${base.title} − ${m.title}` }),
      ` · difference of shares · ${base.layer_names[place]}`), line, make("p", { class: "below" }, legend(most, true, "difference of shares", percent), arePale ? tellNoise(base, [a], pale, percent) : "")));
  }
  exported = () => ({ rows });
}
methodsView.takes = m => ofText().some(other => other !== m && isComparable(other, m));
methodsView.options = () => [mapChoice(), scaleChoice(), numberChoices(), layerSlider()];
