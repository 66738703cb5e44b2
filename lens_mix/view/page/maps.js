// ------------------------------------------------------------------ views: text
let exported = () => ({});
// Return tokens in a row; each one has the colour of the value of its unit.
function tokenRow(tokens, { values, units = tokens.map((_, i) => [i]), chosen = [], choose, unitName = unit() }) {
  const line = make("div", { class: "tokens", dir: "auto" });
  // If the first token is left out, the scale ends at the largest of the others.
  const most = values ? strongest(state.first ? values : values.slice(1)) : 0;
  units.forEach((positions, place) => positions.forEach(i => {
    const span = make("span", { class: "token", "data-key": i }), x = values ? values[place] : 0;
    span.textContent = visible(tokens[i]);
    if (tokens[i].endsWith("\n")) span.append(document.createElement("br"));
    if (values) {
      const leftOut = !state.first && i === 0;
      span.classList.toggle("hidden", leftOut || Number.isNaN(x));
      span.style.background = leftOut || Number.isNaN(x) ? "none" : colour(x, most);
      if (!leftOut && strength(Math.abs(x) / (most || 1)) > 0.55) span.style.color = css("--ground");
    }
    span.classList.toggle("chosen", chosen.includes(i));
    span.addEventListener("mousemove", event => tip(event, spelled(tokens, positions) + (values ? `\n${shown(x)} ${unitName}` : "")));
    span.addEventListener("mouseleave", () => tip());
    if (choose) span.addEventListener("click", () => choose(i));
    line.append(span);
  }));
  return line;
}
const UNITS = { token: "", word: "Words are found by the marks that tokenizers write into their pieces.", sentence: "A sentence ends "
  + "after a token that ends in . ! ? 。 ！ ？ or a line break; each special token is a sentence of its own." };

async function textView(view) {
  const chosen = map(), table = [], choose = query => set({ query });
  if (state.by !== "token") view.append(make("p", { class: "caption", "data-units": state.by, text: `${UNITS[state.by]} The row of a `
    + `${state.by} is the mean of its tokens' rows. The score of another ${state.by} is the sum over its tokens.` }));
  if (chosen.keys) {
    const units = unitsOf(chosen.words, chosen.tokens.length), mine = units.find(positions => positions.includes(state.query));
    view.append(make("div", { class: "row" }, make("h3", { text: "queries: click one" }),
      tokenRow(chosen.tokens, { units, chosen: mine, choose })));
  }
  for (const m of maps()) {
    const place = sameLayer(m, state.layer), head = m === chosen && m.heads ? state.head : -1, keys = keysOf(m);
    if (place < 0) {
      view.append(make("div", { class: "row", "data-map": m.label }, make("h3", {}, make("b", { text: m.label }),
        make("span", { class: "note", text: ` · no layer ${state.layer} in this map` }))));
      continue;
    }
    const { row, of, whole } = await unitRow(m, place, head, state.query);
    let units = unitsOf(m.key_words || m.words, keys.length);
    // If the first token is left out of the scale, it is left out of its word too.
    if (!state.first && units[0].length > 1) units = [[0], units[0].slice(1), ...units.slice(1)];
    const values = row && inUnit(summed(row, units));
    const title = make("h3", {}, make("b", { text: m.label }),
      ` · ${m.layer_names[place]}${m.kind === "input" ? ", input map" : ""}`
      + (m.heads ? ` · ${head < 0 ? "mean of heads" : `head ${head}`}` : "") + ` · ${unit()}`
      + (row ? ` · strongest ${shown(strongest(values))}` : ""));
    const note = !row ? "this map does not have this row" : of.length < whole.length ? `only the row of ${named(m.tokens, state.query)}: the map `
      + `does not have the other rows of its ${state.by}` : (m.key_words || m.words)[state.by] || state.by === "token" ? "" : "its tokens do not show where words begin";
    if (note) title.append(make("span", { class: "note", text: ` · ${note}` }));
    view.append(make("div", { class: "row", "data-map": m.label }, title,
      tokenRow(keys, { values, units, chosen: m.keys ? [] : of, choose: m.keys ? null : choose })));
    if (row) units.forEach((positions, i) => table.push({ map: m.label, layer: m.names[place], head,
      query: of[0], last_query: of[of.length - 1], key: positions[0], last_key: positions[positions.length - 1],
      token: joined(positions.map(key => keys[key])), value: Number.isNaN(values[i]) ? null : values[i] }));
  }
  exported = () => ({ rows: table });
}

// ------------------------------------------------------------------ views: grid
// Draw [rows × columns] numbers as squares of `zoom` pixels.
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
    tip(event, `${m.layer_names[at.place]}${m.heads ? `, head ${at.one}` : ""}\n${named(m.tokens, m.queries[at.row])} from `
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
      if (heads === 1) { context.fillStyle = css("--soft"); context.fillText(layerNumber(m, place), left, top - 7); }
    }
    if (heads > 1) { context.fillStyle = css("--soft"); context.fillText(layerNumber(m, place), 6, corner(place, 0)[1] + thumb / 2); }
  }
}
// Draw a small picture of a map. If several cells share a pixel, it shows the strongest one.
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
  pane.append(make("p", { class: "caption", text: `${m.label} · ${m.layer_names[place]}`
    + (m.heads ? `, ${state.head < 0 ? "mean of heads" : `head ${state.head}`}` : "")
    + `; raw scores, stored with an error of at most ${shown(m.layers[place].error)}. Grey: keys that the query cannot see.` }), canvas);
  exported = () => ({ rows: m.queries.flatMap((query, row) => keysOf(m).map((token, key) => ({ map: m.label,
    layer: m.names[place], head: state.head, query, key, token,
    value: Number.isNaN(scores[row * keys + key]) ? null : scores[row * keys + key] }))) });
}
// Return the places whose labels fit; the largest ones get theirs first.
function spaced(sizes, zoom, count) {
  const apart = Math.max(1, Math.ceil(13 / zoom)), taken = [];
  for (const place of [...sizes.keys()].sort((a, b) => sizes[b] - sizes[a]).slice(0, 400))
    if (taken.length < 90 && taken.every(other => Math.abs(other - place) >= apart)) taken.push(place);
  return taken.filter(place => place < count);
}
// Draw a map with one row per layer: layers down, keys across.
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
    context.fillText(layerNumber(m, place), 16, 90 + place * high + high / 2);
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
    tip(event, cell && `${m.layer_names[cell.place]}\n${named(keysOf(m), cell.key)}\n${shown(rows[cell.place][cell.key])} ${unit()}`); });
  canvas.addEventListener("mouseleave", () => tip());
  canvas.addEventListener("click", event => { const cell = at(event); if (cell) set({ layer: m.names[cell.place] }); });
  panes.append(make("div", { class: "pane" }, make("p", { class: "caption",
    text: `${m.label}: what ${named(m.tokens, m.queries[0])} used, ${layerNumber(m, 0) ? "layers down, keys across" : m.layer_names[0]}; ${unit()}.` }), canvas));
  exported = () => ({ rows: rows.flatMap((row, place) => [...row].map((value, key) => ({ map: m.label, layer: m.names[place],
    query: m.queries[0], key, token: keysOf(m)[key], value: Number.isNaN(value) ? null : value }))) });
}

// ------------------------------------------------------------------ views: methods
async function methodsView(view) {
  const base = map(), others = maps().filter(m => m !== base), table = make("table"), rows = [];
  const isComparable = m => m.tokens.length === base.tokens.length && keysOf(m).length === keysOf(base).length;
  // The score is that of the method's best input map, so a rollout or flow on the page does not get it.
  const score = m => m.provenance.aggregation ? undefined : SCORES.get(m.method);
  table.append(make("tr", {}, make("th", { text: `rank agreement with ${base.label}, this row` }),
    ...base.names.map((_, place) => make("th", { text: layerNumber(base, place) || base.layer_names[place] })), make("th", { text: "leaderboard" })));
  for (const m of [base, ...others]) {
    const cells = [];
    for (const [place, name] of base.names.entries()) {
      const there = sameLayer(m, name);
      let value = NaN;
      if (isComparable(m) && there >= 0) {
        const [mine, theirs] = [await rowOf(base, place, -1, state.query), await rowOf(m, there, -1, state.query)];
        // Magnitudes are compared, as in lm.compare, because a sign is not part of how much was used.
        if (mine && theirs) value = spearman(mine.map(Math.abs), theirs.map(Math.abs));
      }
      const cell = make("td", { text: Number.isNaN(value) ? "–" : value.toFixed(2), "data-layer": name });
      if (!Number.isNaN(value)) cell.style.background = colour(value, 2);
      cells.push(cell);
      rows.push({ map: base.label, with: m.label, layer: name, query: state.query, value: Number.isNaN(value) ? null : value });
    }
    table.append(make("tr", { "data-map": m.label }, make("td", { text: m.label }), ...cells,
      make("td", { text: score(m) === undefined ? "–" : score(m).toFixed(2) })));
  }
  view.append(make("div", { class: "pane" }, table), make("p", { class: "caption", text: "Spearman's correlation of the rows' magnitudes, as in lm.compare. Leaderboard: the score of the "
    + `method's best input map (${DATA.scored}). A rollout or flow on this page may be worse, and has no score.` }));
  const place = placeOf(base), mine = await rowOf(base, place, -1, state.query);
  for (const m of others.filter(isComparable)) {
    const there = sameLayer(m, state.layer);
    const theirs = there < 0 ? null : await rowOf(m, there, -1, state.query);
    if (!mine || !theirs) continue;
    const share = row => row.map(x => x / (size(row) || 1));
    const [a, b] = [share(mine), share(theirs)];
    const line = tokenRow(keysOf(base), { values: a.map((x, i) => x - b[i]), chosen: base.keys ? [] : [state.query],
      choose: base.keys ? null : query => set({ query }), unitName: "difference of shares" });
    view.append(make("div", { class: "row" }, make("h3", {}, make("b", { text: `${base.label} − ${m.label}` }),
      ` · difference of shares · ${base.layer_names[place]}`), line));
  }
  exported = () => ({ rows });
}
