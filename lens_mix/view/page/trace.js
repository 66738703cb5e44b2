// ------------------------------------------------------------------ state
// The written tokens from `start` to before `stop` are explained by sources of `unit`. A click chooses a sentence or a token
// (`pick`). `listed` is the number of sources in the list; if `all` is 1, the template and the own text are among them.
const state = { start: null, stop: null, unit: DATA.unit, pick: "sentence", listed: 5, all: 0, scale: "root" };
const NUMBERS = new Set(["start", "stop", "listed", "all"]);
const UNITS = Object.keys(DATA.sources), TEMPLATE = "template", OWN = "written", PADDING = "padding";
const count = DATA.tokens.length - DATA.n_prompt;
const spanAt = (start, stop) => DATA.spans.find(span => span.start === start && span.stop === stop);
const isInside = () => Number.isInteger(state.start) && Number.isInteger(state.stop) && 0 <= state.start && state.start < state.stop && state.stop <= count;
// Return the span that is explained first: a part that the user asked for, else the first sentence.
const firstSpan = () => DATA.spans.find(span => span.kind === "part") || DATA.spans[0];
function settle() {
  if (!UNITS.includes(state.unit)) state.unit = UNITS.includes(DATA.unit) ? DATA.unit : UNITS[0];
  if (state.pick !== "token" || !DATA.steps) state.pick = "sentence";
  if (!(state.listed >= 5)) state.listed = 5;
  if (!isInside() || (!DATA.steps && !spanAt(state.start, state.stop))) ({ start: state.start, stop: state.stop } = firstSpan());
}
function readHash() {
  for (const [key, value] of new URLSearchParams(location.hash.slice(1)))
    if (Object.hasOwn(state, key)) state[key] = NUMBERS.has(key) ? +value : value;
  settle();
}
function set(changes) {
  if ("start" in changes || "unit" in changes) state.listed = 5;
  Object.assign(state, changes);
  settle();
  // The frame of a notebook has no address, so that the state cannot be kept there.
  try { history.replaceState(null, "", "#" + new URLSearchParams(Object.entries(state).map(([key, value]) => [key, String(value)]))); } catch { /* it is not kept */ }
  return render();
}

// ------------------------------------------------------------------ scores
const rows = new Map();
async function readRow(packed) {
  if (!rows.has(packed)) rows.set(packed, Float64Array.from(new Uint16Array(await inflate(packed.data)), code => fromFloat16(code) * packed.largest));
  return rows.get(packed);
}
// Return the scores of all tokens for the explained span. Tokens without scores of their span have the sum of their rows.
async function readScores() {
  const span = spanAt(state.start, state.stop);
  if (span) return readRow(span.scores);
  const each = await Promise.all(DATA.steps.slice(state.start, state.stop).map(readRow));
  return each[0].map((_, key) => each.reduce((sum, row) => sum + row[key], 0));
}
const unitName = unit => unit === "given" ? "group" : unit.endsWith(" s") ? `stretches of ${unit}` : unit;
const spread = ranges => ranges.flatMap(([start, stop]) => Array.from({ length: stop - start }, (_, i) => start + i));
const units = new Map();
// Return the sources of a unit, and the index of the source of each token.
function sourcesOf(unit) {
  if (!units.has(unit)) {
    const sources = DATA.sources[unit].map(([kind, name, ranges], index) => ({ index, kind, name, ranges, positions: spread(ranges) }));
    const owner = new Array(DATA.tokens.length).fill(-1);
    for (const source of sources) {
      for (const position of source.positions) owner[position] = source.index;
      source.isContent = ![TEMPLATE, OWN, PADDING].includes(source.kind);
      source.text = textOf(source, unit);
    }
    units.set(unit, { sources, owner });
  }
  return units.get(unit);
}
function textOf({ positions }, unit) {
  if (unit === "token" || unit === "word") return visible(joined(positions.map(i => DATA.tokens[i]))).replace(/[Ġ▁]/g, " ").trim() || "␣";
  const own = new Set(positions);
  return DATA.boxes.filter(([start]) => own.has(start)).map(([, , text]) => text).join("").replace(/\s+/g, " ").trim();
}
// Return the sources before the end of the span, each with its score, its share and what the span loses without it.
function scoreSources(row) {
  const last = DATA.n_prompt + state.stop - 1, { sources } = sourcesOf(state.unit), span = spanAt(state.start, state.stop);
  const losses = new Map((span ? span.losses : []).map(([ranges, loss]) => [JSON.stringify(ranges), loss]));
  const scored = sources.filter(source => source.positions[0] < last)
    .map(source => ({ ...source, score: source.positions.reduce((sum, i) => sum + row[i], 0), loss: losses.get(JSON.stringify(source.ranges)) }));
  const total = scored.reduce((sum, { score }) => sum + Math.abs(score), 0) || 1;
  return scored.map(source => ({ ...source, share: source.score / total }));
}

// ------------------------------------------------------------------ the text
// Return a text with its line breaks, and with other characters that have no shape as their numbers.
const readable = text => [...text].map((c, i, all) => c === "\n" || c === "\t" ? c : withShape(c, i, all)).join("");
const pieces = [];
// Return the element of a box of the text. A mark is a token that is not in the text, such as <s>.
function makePiece(index) {
  const [, , text, isMark] = DATA.boxes[index];
  const wave = DATA.waves && DATA.waves[index];
  pieces[index] = make("span", { class: isMark ? "piece mark" : wave ? "piece stretch" : "piece", "data-box": index, text: isMark ? visible(text) : readable(text) });
  if (wave) pieces[index].prepend(waveOf(wave));
  return pieces[index];
}
// Return the waveform of a stretch of sound, on the scale of all of them.
const loudest = DATA.waves ? Math.max(1e-9, ...DATA.waves.flatMap(wave => (wave || []).map(([low, high]) => Math.max(-low, high)))) : 1;
function waveOf(wave) {
  const name = "http://www.w3.org/2000/svg", height = 40, drawn = document.createElementNS(name, "svg"), path = document.createElementNS(name, "path");
  for (const [key, value] of Object.entries({ width: 1.6 * wave.length, height, viewBox: `0 0 ${wave.length} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" })) drawn.setAttribute(key, value);
  // Its color is that of the text, which stays readable on every color of a stretch.
  path.setAttribute("fill", "currentColor");
  path.setAttribute("d", wave.map(([low, high], i) => {
    const top = height / 2 * (1 - high / loudest), bottom = Math.max(height / 2 * (1 - low / loudest), top + .6);
    return `M${i} ${top.toFixed(1)}h.75V${bottom.toFixed(1)}h-.75z`;
  }).join(""));
  drawn.append(path);
  return drawn;
}
const boxesIn = (start, stop) => DATA.boxes.flatMap(([first], index) => first >= start && first < stop ? [index] : []);
const sentences = DATA.spans.filter(span => span.kind === "sentence");
let builtFor = null;
// Build the written text: options of a list, which are sentences or boxes of tokens.
function buildWritten() {
  if (builtFor === state.pick) return;
  builtFor = state.pick;
  const isToken = state.pick === "token", line = make("div", { id: "written-list", class: "running", role: "listbox", tabindex: 0, dir: "auto",
    "aria-label": `what was written: choose a ${isToken ? "token" : "sentence"}` });
  const makeOption = (node, id) => { node.setAttribute("role", "option"); node.id = id; return node; };
  let group = null;
  for (const index of boxesIn(DATA.n_prompt, DATA.tokens.length)) {
    const token = DATA.boxes[index][0] - DATA.n_prompt, place = sentences.findIndex(span => span.start <= token && token < span.stop);
    const piece = makePiece(index);
    if (isToken) line.append(makeOption(piece, `token-${token}`));
    else if (place < 0) line.append(piece);
    else {
      if (!group || group.place !== place) {
        group = { place, node: makeOption(make("span", { class: "sentence" }), `sentence-${place}`) };
        line.append(group.node);
      }
      group.node.append(piece);
    }
  }
  const had = document.activeElement && document.activeElement.id === "written-list";
  markClaims();
  $("written").replaceChildren(line);
  if (had) line.focus();
  listenTo(line);
}
const shownBlocks = [];
function buildPrompt() {
  for (const [kind, name, message, start, stop] of DATA.blocks) {
    const boxes = boxesIn(start, stop), text = make("div", { class: "running", dir: "auto" }, ...boxes.map(makePiece));
    // Line breaks at the end of a block would be empty lines.
    for (let i = boxes.length - 1; i > 0 && !DATA.boxes[boxes[i]][2].trim(); i--) pieces[boxes[i]].hidden = true;
    const share = make("span", { class: "share" });
    if (kind === TEMPLATE) {
      const button = make("button", { type: "button", "aria-expanded": "false", onclick: () => openTemplate(block, text.hidden) });
      const block = { kind, start, stop, text, button, node: make("div", { class: "template-block" }, button, text) };
      text.hidden = true;
      shownBlocks.push(block);
    } else {
      const isRole = message !== null && message.split(" ").slice(1).join(" ") === kind;
      const label = isRole ? `message ${message.split(" ")[0]}` : kind === name ? "" : kind;
      const head = make("h3", { text: name }, make("span", { text: label }), share);
      shownBlocks.push({ kind, start, stop, text, share, node: make("section", { class: "block", "aria-label": `${name} ${label}`.trim() }, head, text) });
    }
  }
  $("prompt-text").replaceChildren(...shownBlocks.map(block => block.node));
}
function openTemplate({ text, button }, isOpen) {
  text.hidden = !isOpen;
  button.setAttribute("aria-expanded", String(isOpen));
  tellHeight();
}

// ------------------------------------------------------------------ drawing
let shares = new Map();
function colorText(scored) {
  const { owner } = sourcesOf(state.unit), last = DATA.n_prompt + state.stop - 1;
  const colored = scored.filter(source => source.kind !== TEMPLATE), largest = colored.reduce((most, { share }) => Math.max(most, Math.abs(share)), 0);
  const left = scored.filter(source => source.kind === TEMPLATE).reduce((sum, { share }) => sum + Math.abs(share), 0), isPale = isNoise(largest, left, 1), most = isPale ? 1 : largest;
  shares = new Map(scored.map(source => [source.index, source]));
  DATA.boxes.forEach(([start, stop], index) => {
    const piece = pieces[index], source = start < last ? shares.get(owner[start]) : undefined, token = start - DATA.n_prompt;
    const isChosen = token < state.stop && stop - DATA.n_prompt > state.start, isColored = source && source.kind !== TEMPLATE && source.share;
    // What is explained keeps the color of the page, so that it can be read as one.
    const channels = isColored && !isChosen ? rgb(source.share, most) : null;
    piece.style.backgroundColor = channels ? `rgb(${channels})` : "";
    // Between two boxes on fractions of a pixel there would be a line of the ground.
    piece.style.boxShadow = channels ? `1px 0 0 rgb(${channels})` : "";
    piece.style.color = channels ? inkOn(channels) : "";
    piece.classList.toggle("chosen", isChosen);
  });
  for (const { kind, start, stop, share, button } of shownBlocks) {
    const own = scored.filter(source => source.positions[0] >= start && source.positions[0] < stop && (source.kind === TEMPLATE) === (kind === TEMPLATE));
    const text = own.length ? percent(own.reduce((sum, source) => sum + Math.abs(source.share), 0)) : "";
    if (share) share.textContent = text;
    // By sentence or document the template is one source, whose share is in the line below the explained text.
    else button.textContent = [TEMPLATE, writeCount(stop - start, "token"), ["token", "word"].includes(state.unit) && text].filter(Boolean).join(" · ");
  }
  $("text-legend").replaceChildren(legend(most, scored.some(({ share }) => share < 0), `of the span's scores, by ${unitName(state.unit)}; the template is not colored${isPale ? `: it has ${percent(left)}, and no other source more than ${percent(largest)}` : ""}`, percent));
}
const KINDS = { [TEMPLATE]: "template", [OWN]: "own text", document: "documents", prompt: "prompt", source: "source", given: "given groups" };
const quoted = (text, count) => `“${shortened(visible(text.replace(/\s+/g, " ").trim()), count)}”`;
const textBetween = (start, stop) => boxesIn(DATA.n_prompt + start, DATA.n_prompt + stop).map(index => DATA.boxes[index][2]).join("");
const minusIn = text => text.replace("-", "−");
function writeSpan(scored) {
  const { start, stop } = state, tokens = stop - start, numbers = DATA.log_probabilities.slice(start, stop), span = spanAt(start, stop);
  const sum = numbers.includes(null) ? -Infinity : numbers.reduce((sum, x) => sum + x, 0), [prediction, probability] = DATA.predictions[start] || [];
  const whole = Math.exp(sum), text = quoted(textBetween(start, stop), 160);
  $("span-text").textContent = text;
  const other = tokens === 1 && prediction !== null && prediction !== undefined && visible(prediction) !== visible(DATA.tokens[DATA.n_prompt + start])
    ? `; most probable is ${quotedToken(prediction)}${probability === null || probability === undefined ? "" : `, ${percent(probability)}`}` : "";
  $("probability").replaceChildren("probability ", make("b", { text: whole >= .001 || whole === 0 ? percent(whole) : minusIn(whole.toExponential(1)) }),
    tokens > 1 ? ` of ${tokens} tokens, ${percent(Math.exp(sum / tokens))} per token` : other,
    span || tokens === 1 ? "" : `. Its sources are the sums over its tokens; t[${start}:${stop}] explains it as one`);
  const kinds = new Map();
  for (const { kind, share } of scored) kinds.set(kind, (kinds.get(kind) || 0) + Math.abs(share));
  $("kinds").textContent = [...kinds].sort((a, b) => b[1] - a[1]).map(([kind, share]) => `${KINDS[kind] ?? kind} ${percent(share)}`).join(" · ");
  document.title = [text, DATA.model, "lens_mix"].filter(Boolean).join(" · ");
}
function writeList(scored) {
  const ranked = scored.filter(source => state.all || source.isContent).sort((a, b) => Math.abs(b.share) - Math.abs(a.share));
  const listed = ranked.slice(0, state.listed), most = listed.length ? Math.abs(listed[0].share) : 1;
  $("strongest").replaceChildren(...listed.map(source => {
    const bar = make("span", { class: source.share < 0 ? "bar less" : "bar" });
    bar.style.width = `${100 * Math.abs(source.share) / (most || 1)}%`;
    const isNamed = source.isContent && source.name !== "prompt" && source.name.trim() !== source.text, name = source.kind === OWN ? "own text" : source.kind === TEMPLATE ? TEMPLATE : source.name;
    const parts = [make("span", { class: "share", text: percent(source.share) }),
      make("span", {}, isNamed || !source.isContent ? make("span", { class: "name", text: name }) : "", isNamed || !source.isContent ? " " : "", quoted(source.text, 140)), bar];
    if (source.loss !== undefined && source.loss !== null) parts.push(make("span", { class: "loss",
      text: `loss without it: ${nats(source.loss)}` }));
    return make("li", {}, make("button", { type: "button", "data-source": source.index, title: "show it in the text", onclick: () => goTo(source) }, ...parts));
  }));
  if (!listed.length) $("strongest").append(make("li", { class: "caption", text: "No source is before the span." }));
  $("more").hidden = ranked.length <= state.listed;
  $("everything").setAttribute("aria-pressed", String(Boolean(state.all)));
  $("list-title").textContent = `Strongest sources, by ${unitName(state.unit)}`;
  const span = spanAt(state.start, state.stop), place = span && span.kind !== "everything" ? `t[${span.start}:${span.stop}]` : "t";
  $("measured").textContent = listed.some(source => source.loss !== undefined && source.loss !== null)
    ? `Loss: the log probability that the span loses without the source, measured in a forward pass ${DATA.seconds ? "in which the stretch is silent" : "whose prompt has the source's tokens deleted"}.`
    : span ? `Shares are those of the map. ${place}.verify() measures what the span loses without its strongest sources; t.show() then has it.` : "Shares are those of the map.";
  if (!DATA.audit && !DATA.seconds) $("measured").append(" t.audit() measures what each claim rests on.");
}
const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
// Scroll to a source, and mark it for a moment.
function goTo({ positions }) {
  const own = new Set(positions), found = DATA.boxes.flatMap(([start], index) => own.has(start) ? [pieces[index]] : []);
  for (const block of shownBlocks) if (block.kind === TEMPLATE && positions.some(i => i >= block.start && i < block.stop)) openTemplate(block, true);
  for (const piece of document.querySelectorAll(".flash")) piece.classList.remove("flash");
  if (!found.length) return;
  found[0].scrollIntoView({ block: "center", behavior: isStill() ? "instant" : "smooth" });
  for (const piece of found) piece.classList.add("flash");
  clearTimeout(window.flash);
  window.flash = setTimeout(() => found.forEach(piece => piece.classList.remove("flash")), 2500);
}
let renders = 0;
async function render() {
  const version = ++renders;
  tip();
  buildWritten();
  const row = await readScores();
  // If the user has made another choice in the meantime, this rendering is out of date.
  if (version !== renders) return;
  const scored = scoreSources(row);
  colorText(scored);
  writeSpan(scored);
  writeList(scored);
  writeAudit();
  for (const control of controls) control.sync();
  const options = optionsShown();
  options.forEach(option => option.node.setAttribute("aria-selected", String(option.start >= state.start && option.stop <= state.stop)));
  const active = options.find(option => option.stop > state.start);
  if (active) $("written-list").setAttribute("aria-activedescendant", active.node.id);
  for (const button of $("parts").children) button.setAttribute("aria-pressed", String(button.dataset.part === `${state.start}:${state.stop}`));
  document.body.dataset.ready = String(renders);
  tellHeight();
}

// ------------------------------------------------------------------ events
// Return what the arrow keys move between: the written sentences, or the boxes of tokens.
const optionsShown = () => state.pick === "token"
  ? boxesIn(DATA.n_prompt, DATA.tokens.length).map(index => ({ node: pieces[index], start: DATA.boxes[index][0] - DATA.n_prompt, stop: DATA.boxes[index][1] - DATA.n_prompt }))
  : sentences.map((span, place) => ({ node: $(`sentence-${place}`), start: span.start, stop: span.stop })).filter(option => option.node);
function move(step, isWider) {
  const options = optionsShown(), first = options.findIndex(option => option.stop > state.start), last = options.findLastIndex(option => option.start < state.stop);
  const clamp = i => options[Math.max(0, Math.min(options.length - 1, i))];
  if (!options.length) return;
  if (isWider) set({ stop: Math.max(clamp(last + step).stop, clamp(first).stop) });
  else {
    // A part that is no single option is left to its first or after its last option.
    const isOne = first === last, next = clamp((step < 0 ? first : last) + (isOne || step > 0 ? step : 0));
    set({ start: next.start, stop: next.stop });
  }
}
const boxAt = target => target.closest?.("#written .piece")?.dataset.box;
const ends = (a, b) => [DATA.boxes[Math.min(a, b)][0] - DATA.n_prompt, DATA.boxes[Math.max(a, b)][1] - DATA.n_prompt];
let dragged = null;
function listenTo(line) {
  line.addEventListener("mousedown", event => {
    const box = boxAt(event.target);
    if (!DATA.steps || box === undefined || event.button) return;
    // Without this the browser would mark the text itself.
    event.preventDefault();
    line.focus({ preventScroll: true });
    dragged = { from: +box, to: +box };
  });
  line.addEventListener("mouseover", event => {
    const box = boxAt(event.target);
    if (!dragged || box === undefined) return;
    dragged.to = +box;
    const [low, high] = [dragged.from, dragged.to].sort((a, b) => a - b);
    pieces.forEach((piece, index) => piece.classList.toggle("dragged", low < high && index >= low && index <= high));
  });
  line.addEventListener("click", event => {
    const box = boxAt(event.target), claim = claims[event.target.closest(".verdict")?.dataset.claim];
    if (claim) return set({ start: claim.start, stop: claim.stop });
    if (box === undefined) return;
    if (state.pick === "token") {
      const [start, stop] = ends(+box, +box);
      return set(event.shiftKey ? { start: Math.min(start, state.start), stop: Math.max(stop, state.stop) } : { start, stop });
    }
    const token = DATA.boxes[box][0] - DATA.n_prompt, span = sentences.find(span => span.start <= token && token < span.stop);
    if (span) set({ start: span.start, stop: span.stop });
  });
}
addEventListener("mouseup", () => {
  if (!dragged) return;
  const { from, to } = dragged;
  dragged = null;
  for (const piece of pieces) piece.classList.remove("dragged");
  if (from === to) return;
  // The click that follows is one on what contains both boxes, and chooses nothing.
  const [start, stop] = ends(from, to);
  set({ start, stop });
});
const tellBox = index => {
  const [first, last, , isMark] = DATA.boxes[index], source = shares.get(sourcesOf(state.unit).owner[first]), token = first - DATA.n_prompt;
  const lines = [`token ${first}${last > first + 1 ? `–${last - 1}` : ""} ${quotedToken(isMark ? DATA.tokens[first] : DATA.boxes[index][2])}`];
  if (token >= 0 && DATA.log_probabilities[token] !== null) lines.push(`probability ${percent(Math.exp(DATA.log_probabilities[token]))}`);
  if (source && first < DATA.n_prompt + state.stop - 1) lines.push(`${unitName(state.unit)}: ${percent(source.share)} of the span's scores`);
  return lines.join("\n");
};
for (const place of ["written", "prompt-text"]) {
  $(place).addEventListener("mousemove", event => { const piece = event.target.closest(".piece"); tip(event, piece ? tellBox(+piece.dataset.box) : ""); });
  $(place).addEventListener("mouseleave", () => tip());
}
$("everything").addEventListener("click", () => set({ all: state.all ? 0 : 1 }));
$("more").addEventListener("click", () => set({ listed: state.listed + 10 }));
addEventListener("hashchange", () => { readHash(); render(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { ramps = null; render(); });
addEventListener("resize", tellHeight);
addEventListener("keydown", event => {
  if (event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "ArrowRight" || event.key === "ArrowLeft") move(event.key === "ArrowRight" ? 1 : -1, event.shiftKey && Boolean(DATA.steps));
  else if (event.key === "e") set({ start: 0, stop: count });
  else if (UNITS[+event.key - 1]) set({ unit: UNITS[+event.key - 1] });
  else return;
  event.preventDefault();
});

// ------------------------------------------------------------------ the start
const controls = [press("unit", UNITS.map(unit => [unit, unitName(unit)]), "color the prompt by")];
function start() {
  $("options").append(make("span", { class: "choice" }, make("span", { text: "sources by" }), controls[0]));
  if (DATA.steps && sentences.length) {
    controls.push(press("pick", [["sentence", "sentence"], ["token", "token"]], "a click chooses a"));
    $("pick").append(make("span", { class: "choice" }, make("span", { text: "a click chooses a" }), controls[1], make("span", { text: "or drag over several tokens" })));
  }
  $("written-title").textContent = DATA.generated ? "What the model wrote" : "What was written";
  const others = DATA.spans.filter(span => span.kind !== "sentence");
  for (const span of others) {
    const text = span.kind === "everything" ? "everything" : quoted(textBetween(span.start, span.stop), 40), claim = claimAt(span.start, span.stop);
    $("parts").append(make("button", { type: "button", "data-part": `${span.start}:${span.stop}`, onclick: () => set({ start: span.start, stop: span.stop }) }, ...(claim ? [badge(claim.verdict), " "] : []), text));
  }
  $("tour-audit").hidden = !DATA.audit;
  $("token-hint").textContent = DATA.steps ? "" : "Single tokens cannot be chosen: they are computed by t.steps. Read it, and call t.show() again.";
  $("model").textContent = [DATA.model, DATA.seconds ? `${DATA.seconds.toFixed(1)} s of sound` : writeCount(DATA.n_prompt, "prompt token"), `${count} written`].filter(Boolean).join(" · ");
  const keys = [sentences.length > 1 || DATA.steps ? "← → another sentence or token" : "", DATA.steps ? "Shift+← → several" : "", others.some(span => span.kind === "everything") ? "e everything" : "", UNITS.length > 1 ? `1–${UNITS.length} unit of the sources` : ""];
  $("keys").textContent = `Keys: ${keys.filter(Boolean).join(" · ")}`;
  const hops = DATA.hops === null ? "" : DATA.hops < 0 ? "through all written text" : `through ${DATA.hops} steps of written text`;
  $("about").textContent = [`${DATA.method}${DATA.line ? `: ${DATA.line}` : ""}`, hops, DATA.model && `model ${DATA.model}`, `lens_mix ${DATA.version}`].filter(Boolean).join(" · ");
  writeNotes(DATA.notes);
  buildPrompt();
  readHash();
  render();
}
start();
