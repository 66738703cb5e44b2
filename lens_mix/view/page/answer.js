// ------------------------------------------------------------------ what is explained
// Return what a row explains, from the first map of this text that knows it; a map with a target knows most.
function explainedAt(query) {
  const all = [map(), ...ofText()].map(m => m.explained ? m.explained[m.queries.indexOf(query)] : null).filter(one => one && Object.keys(one).length);
  return all.find(one => one.target !== undefined) || all[0] || {};
}
const isLast = query => query === map().tokens.length - 1;
const positionName = query => isLast(query) && map().predicts_next ? "the last position" : `${quotedToken(map().tokens[query])} (${numberName(map())} ${query})`;
const capital = text => text.charAt(0).toUpperCase() + text.slice(1);

function writeAnswer() {
  const m = map(), { prediction, probability, others = [], target, value } = explainedAt(state.query);
  const token = m.tokens[state.query];
  $("question").textContent = m.predicts_next ? "Where did the next word come from?" : `Which ${nounsOf(m)} did the model use?`;
  $("asked").textContent = prediction === undefined ? "This page explains"
    : !m.predicts_next ? `At ${positionName(state.query)} the model predicts`
      : isLast(state.query) ? "The model continues with" : `After ${positionName(state.query)} the model continues with`;
  $("prediction").replaceChildren(make("b", { text: quotedToken(prediction ?? token) }),
    prediction === undefined ? ` ${numberName(m)} ${state.query}` : probability === undefined ? "" : ` ${percent(probability)}`);
  const alternatives = others.map(([text, p]) => `${quotedToken(text)} ${percent(p)}`).join(" · ");
  const aim = target && `explained: ${target}${value === undefined ? "" : ` = ${minus(shown(value))}`}`;
  const known = [alternatives && `then ${alternatives}`, aim].filter(Boolean).join(" — ");
  const hint = rowsThere().size > 1 ? `${known && " — "}click a ${rowNoun(m)} to explain another position` : "";
  document.title = [prediction === undefined ? plain(token) : plain(prediction), m.provenance.model, "lens_mix"].filter(Boolean).join(" · ");
  $("others").replaceChildren(known, make("span", { class: "on-screen", text: hint }));
}
// Return the positions that some map of this text has a row of.
const rowsThere = () => new Set(ofText().flatMap(m => m.queries));

// ------------------------------------------------------------------ the text, colored by one map
// Return the row that colors the text: that of the recommended input map, of the method's map with the best score, or the
// mean of a layer map: Value Zeroing's if there is one, and attention's only if there is no other. A rollout has no score,
// because one through many layers may be all on the first token: it comes last.
async function textRow() {
  const all = ofText().filter(m => m.queries.includes(state.query)), input = all.filter(m => m.kind === "input");
  const score = m => m.provenance.aggregation ? -1 : SCORES.get(m.method) ?? 0, recommended = input.find(m => m.provenance.input_map);
  const rank = m => m.method === "value_zeroing" ? 2 : m.method === "attention" ? 0 : 1;
  const [best] = input.filter(m => score(m) >= 0).sort((a, b) => score(b) - score(a));
  const [layerMap] = all.filter(m => m.kind === "layer").sort((a, b) => rank(b) - rank(a)), m = recommended || best || layerMap || all[0];
  if (!m) return null;
  if (m.kind === "input") return { m, row: sharesOf(await rowOf(m, m.names.length - 1, -1, state.query)),
    name: m === recommended ? `recommended map: ${m.method.replaceAll("_", " ")}` : `${m.title}, ${m.layer_names[m.names.length - 1]}` };
  const rows = (await rowsOf(m, headShown(m), state.query)).map(sharesOf);
  return { m, row: rows[0].map((_, key) => rows.reduce((sum, row) => sum + row[key] / rows.length, 0)),
    name: `${m.title}, ${rows.length > 1 ? "mean of the layers" : m.layer_names[0]}` };
}

// Return why the recommended map does not color the text, and what to call; "" if it does, or if the page has none.
function whyOther() {
  const recommended = ofText().find(m => m.provenance.input_map);
  if (!recommended || recommended.queries.includes(state.query)) return "";
  const { queries } = recommended, some = queries.length > 1 ? `${queries.length} positions`
    : isLast(queries[0]) ? "the last position" : positionName(queries[0]);
  return ` · the recommended map has only ${some}: lm.input_map(model, prompt, queries=[${state.query}]) computes this one`;
}

// Return groups of neighbouring tokens between which a line may break: a token that starts with a space, or that
// follows a long group, starts a new one. A box and its space are then never on two lines.
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}]/u;
function wordsOf(tokens, starts) {
  const groups = [];
  let length = 0;
  tokens.forEach((token, i) => {
    const before = i ? tokens[i - 1] : "";
    const isStart = !i || starts.has(i) || SPACED.test(token) || UNSPACED.test(token) || /[\s>\]]$/.test(before);
    if (isStart || length + token.length > 24) { groups.push([]); length = 0; }
    groups[groups.length - 1].push(i);
    length += token.length;
  });
  return groups;
}
// Return the tokens as boxes: the line, and `boxes` in the order of the tokens. `tell(i)` returns the text of a tooltip,
// `choose(i)` reacts to a click, and `pass(i)` to the pointer; `i` is null beside the tokens.
// The words of a text without spaces (WordPiece) are set apart.
function tokenLine(tokens, starts, attributes, { tell, choose, pass = () => {} }) {
  const isApart = Boolean(starts.word) && !tokens.some(token => SPACED.test(token)), first = new Set(isApart ? starts.word : []);
  const length = tokens.length > 120 ? "long" : tokens.length > 60 ? "medium" : "";
  const line = make("div", { class: `tokens ${length}`, dir: "auto", ...attributes }), boxes = [];
  for (const group of wordsOf(tokens, first)) {
    const word = make("span", { class: first.has(group[0]) && group[0] ? "word apart" : "word" });
    for (const i of group) {
      const box = make("span", { class: "token", "data-key": i, text: visible(tokens[i]) });
      boxes.push(box);
      word.append(box);
    }
    line.append(word);
    if (/[\nĊ]$/.test(tokens[group[group.length - 1]])) line.append(make("br"));
  }
  const find = event => { const box = event.target.closest(".token"); return box ? +box.dataset.key : null; };
  line.addEventListener("mousemove", event => { const i = find(event); tip(event, i === null ? "" : tell(i)); pass(i); });
  line.addEventListener("mouseleave", () => { tip(); pass(null); });
  line.addEventListener("click", event => { const i = find(event); if (i !== null && choose) choose(i); });
  return { line, boxes };
}
// Color boxes by a row; `pale` has the keys that are left out of the scale. The largest other number ends the scale.
function colorBoxes(boxes, row, pale, most) {
  boxes.forEach((box, key) => {
    const x = row ? row[key] : NaN, isHidden = Number.isNaN(x), channels = isHidden ? null : rgb(x, most);
    box.classList.toggle("hidden", isHidden);
    box.classList.toggle("pale", pale.has(key) && !isHidden);
    box.style.backgroundColor = isHidden || pale.has(key) ? "" : `rgb(${channels})`;
    box.style.color = isHidden || pale.has(key) ? "" : inkOn(channels);
  });
}
const largestOf = (row, without) => row.reduce((most, x, key) => without.has(key) || Number.isNaN(x) ? most : Math.max(most, Math.abs(x)), 0);

let textParts = null;
// Build the text once for each prompt.
function buildText() {
  const { tokens } = map(), all = ofText().filter(m => m.keys), keys = all.length ? all.map(m => m.keys) : [];
  const signature = JSON.stringify([state.prompt, ofText().map(m => maps().indexOf(m))]);
  if (textParts && textParts.signature === signature) return textParts;
  const placed = map().grid && !map().keys ? new Set(map().grid.positions) : null;
  const there = rowsThere(), next = make("span", { class: "next" }), label = "the text: choose a token to explain its position";
  const main = tokenLine(tokens, map().words, { id: "tokens", role: "listbox", tabindex: 0, "aria-label": label },
    { tell: i => tellToken(tokens, i, textParts.values), choose: choosePosition, pass: linkPanels });
  main.boxes.forEach((box, i) => {
    box.classList.toggle("special", SPECIAL.test(tokens[i]));
    // Positions with a place are in the picture, and only the others are boxes.
    box.classList.toggle("placed", Boolean(placed && placed.has(i)));
    box.id = `token-${i}`;
    box.setAttribute("role", "option");
    if (!there.has(i)) box.setAttribute("aria-disabled", "true");
  });
  textParts = { signature, main, next, there, sources: null, source: null, values: null };
  const parts = textParts;
  $("text").replaceChildren(main.line);
  if (keys.length) {
    parts.source = make("div", { id: "sources" });
    $("text").append(parts.source);
  }
  return parts;
}
// Tell the view which token of the text is under the pointer, and mark the token that is under it in the view.
let linked = null;
function linkPanels(key) {
  if (key === linked) return;
  linked = key;
  $("view").dispatchEvent(new CustomEvent("link", { detail: key }));
}
function linkToken(m, key) {
  for (const box of document.querySelectorAll("#text .linked")) box.classList.remove("linked");
  if (key !== null) (m.keys ? $("sources") : $("tokens"))?.querySelector(`[data-key="${key}"]`)?.classList.add("linked");
}
const choosePosition = query => { if (rowsThere().has(query)) set({ query }); };
function tellToken(tokens, i, values) {
  const value = !values ? "" : Number.isNaN(values[i]) ? "the position cannot see it" : `${percent(values[i])} of the row`;
  return [named(tokens, i), value].filter(Boolean).join("\n");
}

async function drawText() {
  const parts = buildText(), m = map(), found = await textRow(), pale = found ? asNumbers(found.m, state.query) : new Set();
  // The position itself keeps its color here: it is one token of many, and it has a frame.
  pale.delete(state.query);
  const keys = found && keysOf(found.m), ownMost = found ? scaleEnd([found.row], new Set([...pale, ownKey(found.m, state.query)])) : 0;
  const most = ownMost || (found ? largestOf(found.row, pale) : 0);
  parts.values = found && !found.m.keys ? found.row : null;
  await drawPicture(found, found && found.row, pale, most);
  colorBoxes(parts.main.boxes, parts.values || m.tokens.map((_, i) => m.causal && i > state.query ? NaN : 0), parts.values ? pale : new Set(), most);
  parts.main.boxes.forEach((box, i) => {
    const isChosen = i === state.query;
    if (box.classList.contains("chosen") !== isChosen) box.classList.toggle("chosen", isChosen);
    box.setAttribute("aria-selected", String(isChosen));
    const isKnown = parts.values && !Number.isNaN(parts.values[i]);
    box.setAttribute("aria-label", `${plain(m.tokens[i])}, ${numberName(m)} ${i}${isKnown ? `, ${percent(parts.values[i])}` : ""}`);
  });
  parts.main.line.setAttribute("aria-activedescendant", `token-${state.query}`);
  const chosen = parts.main.boxes[state.query];
  // The prediction is written where the model would write it.
  const { prediction } = explainedAt(state.query), at = parts.main.boxes[state.query];
  parts.next.remove();
  if (prediction !== undefined && at) {
    parts.next.textContent = plain(prediction);
    parts.next.setAttribute("aria-hidden", "true");
    at.parentNode.lastChild === at ? at.parentNode.append(parts.next) : at.after(parts.next);
  }
  if (parts.source) {
    // Frames of a sound are below the waveform.
    const hasText = Boolean(found && found.m.keys && !found.m.grid);
    parts.source.hidden = !hasText;
    if (hasText) {
      const { line, boxes } = tokenLine(keys, found.m.key_words, { role: "group", "aria-label": "the tokens that the rows read" },
        { tell: i => tellToken(keys, i, found.row) });
      colorBoxes(boxes, found.row, pale, most);
      parts.source.replaceChildren(make("p", { class: "caption", text: "What it reads:" }), line);
    }
  }
  // Only the box of a long text scrolls, and never the page.
  const scroller = parts.main.line, top = chosen.offsetTop;
  if (top < scroller.scrollTop || top + 40 > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + 40 - scroller.clientHeight;
  writeTextLegend(found, keys, most, pale);
}
function writeTextLegend(found, keys, most, pale) {
  const box = $("text-legend");
  if (!found) return box.replaceChildren("No map has the row of this position", whyOther(), ".");
  const order = [...found.row.keys()].filter(key => !Number.isNaN(found.row[key]) && !pale.has(key))
    .sort((a, b) => Math.abs(found.row[b]) - Math.abs(found.row[a])).slice(0, 3);
  const strongest = order.map(key => `${quotedToken(keys[key])} ${percent(found.row[key])}`).join(", ");
  const left = [...pale].filter(key => found.row[key]), sink = percent(totalOf(found.row, left));
  const unitName = `of the row${largestOf(found.row, pale) > most ? "; the position itself has more" : ""}`;
  const noise = tellNoise(found.m, [found.row], new Set([...pale, ownKey(found.m, state.query)]), percent);
  box.replaceChildren(legend(most, found.m.signed, unitName, percent), " · ",
    make("span", { text: found.name, title: found.m.provenance.input_map?.figures || found.m.line }),
    ` · most: ${strongest}`, left.length ? ` · ${sinkName(found.m)} ${sink}, not colored` : "", noise, whyOther());
}
