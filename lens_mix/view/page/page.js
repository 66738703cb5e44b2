// ------------------------------------------------------------------ controls
// A control is an element with a function `sync` that writes the state into it. It is built once for a view, so that
// it keeps the focus while it is used.
function choose(key, text, names, isNumber = false) {
  const select = make("select", { "data-option": key, onchange: event => set({ [key]: isNumber ? +event.target.value : event.target.value }) });
  for (const name of names) {
    const [value, label] = Array.isArray(name) ? name : [name, name];
    select.append(make("option", { value, text: label }));
  }
  const node = make("label", {}, `${text} `, select);
  node.sync = () => { select.value = String(state[key]); };
  return node;
}
function slide(key, text, attributes, write = String) {
  const input = make("input", { type: "range", "data-option": key, ...attributes, oninput: event => set({ [key]: +event.target.value }) });
  const output = make("output"), node = make("label", {}, `${text} `, input, " ", output);
  node.sync = () => {
    input.value = state[key];
    output.textContent = write(state[key]);
    input.setAttribute("aria-valuetext", output.textContent);
  };
  return node;
}
// A row with negative scores is divided by the sum of its magnitudes, so it does not sum to 1.
const unitChoice = () => press("unit", [["share", shownMaps().some(m => m.signed) ? "magnitudes of a row sum to 1" : "rows sum to 1"],
  ["raw", "raw scores"]], "unit");
const scaleChoice = () => choose("scale", "colors", [["root", "square root"], ["linear", "linear"], ["log", "logarithm"]]);
// Two switches: is the first token drawn, and is the position itself?
function numberChoices() {
  const flag = (key, text) => {
    const button = make("button", { type: "button", "data-option": key, text, title: "as a number beside the map, or drawn like any other",
      onclick: () => set({ [key]: state[key] ? 0 : 1 }) });
    button.sync = () => button.setAttribute("aria-pressed", String(!state[key]));
    return button;
  };
  const sinks = [...new Set(shownMaps().filter(m => m.sinks.length).map(sinkName))], isOwn = shownMaps().some(m => !m.keys);
  const buttons = [...(sinks.length ? [flag("first", sinks.join(", "))] : []), ...(isOwn ? [flag("diagonal", "own position")] : [])];
  const node = make("div", { class: "choice", role: "group", "aria-label": "shown as numbers" }, make("span", { text: "as numbers" }), ...buttons);
  node.hidden = !buttons.length;
  node.sync = () => buttons.forEach(button => button.sync());
  return node;
}
function headChoice() {
  const heads = Math.max(0, ...shownMaps().map(m => m.heads));
  const node = choose("head", "head", [[-1, "mean"], ...Array.from({ length: heads }, (_, i) => [i, String(i)])], true);
  node.querySelector("select").id = "head";
  node.hidden = heads < 2;
  return node;
}
function mapChoice() {
  const fit = ofText().filter(m => takes(state.view, m)), node = choose("map", "map", fit.map(m => [maps().indexOf(m), m.title]), true);
  node.querySelector("select").id = "map";
  node.hidden = fit.length < 2;
  return node;
}
function treeChoice() {
  const node = choose("tree", "tree", trees().map((tree, i) => [i, tree.name]), true);
  node.hidden = trees().length < 2;
  return node;
}
// Return the maps whose layers and heads the view shows.
const shownMaps = () => state.view === "layers" ? compared() : state.view === "text" ? ofText() : [map()];
const layerNames = () => [...new Set(shownMaps().filter(m => m.names.length > 1 || m.kind === "layer").flatMap(m => m.names))].sort((a, b) => a - b);
function layerSlider() {
  const names = layerNames(), input = make("input", { type: "range", id: "layer", min: 0, max: Math.max(0, names.length - 1), step: 1,
    oninput: event => set({ layer: names[+event.target.value] }) });
  const output = make("output", { id: "layer-name" }), node = make("label", {}, "layer ", input, " ", output);
  node.hidden = names.length < 2;
  node.sync = async () => {
    const layer = state.layer ?? await strongestLayer() ?? names[names.length - 1];
    input.value = names.indexOf(layer);
    output.textContent = names.includes(layer) ? layer : "";
    input.setAttribute("aria-valuetext", `layer ${layer}`);
  };
  return node;
}
async function strongestLayer() {
  if (VIEWS[state.view].isUpward) return null;
  const best = strongestOf(await comparedRows());
  return best ? best.m.names[best.place] : null;
}
// Buttons that choose the maps to compare.
function compareChoice() {
  const all = candidates(), node = make("div", { class: "choice", role: "group", "aria-label": "methods to compare" }, make("span", { text: "compare" }));
  node.hidden = all.length < 2;
  for (const m of all) node.append(make("button", { type: "button", "data-compare": m.label, text: m.title, onclick: () => {
    const chosen = compared(), next = chosen.includes(m) ? chosen.filter(other => other !== m) : [...chosen, m];
    if (next.length) set({ compare: next.map(one => maps().indexOf(one)).join(",") });
  } }));
  node.sync = () => node.querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-pressed", String(compared().includes(all[i]))));
  return node;
}

// ------------------------------------------------------------------ around the views
const VIEWS = { layers: layersView, text: textView, grid: gridView, flow: flowView, methods: methodsView, tree: treeView };
const TITLES = { layers: "Layer by layer", text: "Text by method", grid: "All positions", flow: "Flow", methods: "Agreement", tree: "Tree" };
const takes = (name, m) => VIEWS[name].takes(m);
// Return the names of the views that work for some map of this text.
const views = () => Object.keys(VIEWS).filter(name => ofText().some(m => takes(name, m)));

let renders = 0, drawn = { signature: null, update: null };
// Return what a view is built for; another change only draws it again.
const viewSignature = () => JSON.stringify([state.prompt, maps().indexOf(ofText()[0]), state.view,
  ["grid", "flow", "methods"].includes(state.view) ? state.map : state.view === "tree" ? state.tree : 0]);
async function render() {
  const version = ++renders;
  tip();
  writeHeader();
  writeAnswer();
  syncOptions();
  await drawText();
  if (version !== renders) return;
  let isDone = drawn.update && drawn.signature === viewSignature() && await drawn.update();
  if (version !== renders) return;
  if (!isDone) {
    const fresh = make("div", { id: "view" });
    let update = null;
    try {
      update = await VIEWS[state.view](fresh);
    } catch (error) {
      fresh.append(make("p", { class: "caption", text: String(error) }));
      console.error(error);
    }
    // If the user has made another choice in the meantime, this rendering is out of date.
    if (version !== renders) return;
    $("headline").replaceChildren(...fresh.querySelectorAll(":scope > .headline"));
    $("view").replaceWith(fresh);
    drawn = { signature: viewSignature(), update };
    for (const pane of fresh.querySelectorAll("[data-middle]")) pane.scrollLeft = pane.dataset.middle - pane.clientWidth / 2;
    if (update) await update();
  }
  document.body.dataset.ready = String(renders);
  readAhead();
  tellHeight();
}
// Read the numbers of all heads while nothing else is to do, so that a change of the head needs no wait.
const ahead = new Set();
async function readAhead() {
  for (const m of ofText()) {
    if (ahead.has(m)) continue;
    ahead.add(m);
    for (let place = 0; place < m.names.length; place++) {
      await new Promise(resolve => (window.requestIdleCallback || setTimeout)(resolve));
      await packedLayer(m, place);
    }
  }
}
// Draw everything anew, as after a change of the window's width or of the theme.
function renderAnew() {
  ramps = null;
  drawn = { signature: null, update: null };
  optionsShown = null;
  render();
}
let optionsShown = null;
function syncOptions() {
  const signature = `${viewSignature()}${layersSignature()}`, box = $("options");
  if (signature !== optionsShown) {
    const focused = box.contains(document.activeElement) ? document.activeElement.dataset : null;
    box.replaceChildren(...VIEWS[state.view].options());
    optionsShown = signature;
    // The control that was used keeps the focus.
    if (focused) [...box.querySelectorAll("button, select, input")]
      .find(one => ["option", "value", "compare"].every(name => one.dataset[name] === focused[name]))?.focus();
  }
  for (const control of box.children) control.sync?.();
  box.hidden = [...box.children].every(control => control.hidden);
}
let listed = null;
function writeHeader() {
  const m = map(), record = m.provenance, texts = DATA.prompts.flatMap((all, prompt) => all.map((one, i) => ({ prompt, i, one }))
    .filter(({ one, i }) => all.findIndex(other => same(other.tokens, one.tokens)) === i)
    .map(({ one }) => { const fit = all.filter(other => same(other.tokens, one.tokens)); return { prompt, one, i: all.indexOf(fit[firstMap(fit)]) }; }));
  const prompt = $("prompt"), current = texts.findIndex(text => text.prompt === state.prompt && same(text.one.tokens, m.tokens));
  if (!listed) {
    listed = texts;
    prompt.hidden = texts.length < 2;
    prompt.replaceChildren(...texts.map(({ prompt, one }, i) => make("option", { value: i, text: `prompt ${prompt + 1} of ${DATA.prompts.length}${
      texts.filter(text => text.prompt === prompt).length > 1 && one.provenance.part ? `, ${one.provenance.part}` : ""}: ${shortened(asLine(one), 40)}` })));
    $("views").replaceChildren(...Object.keys(VIEWS).map(name => make("button", { type: "button", role: "tab", "data-view": name,
      id: `tab-${name}`, text: TITLES[name], "aria-controls": "panel" })));
  }
  prompt.value = String(current);
  const layers = Math.max(0, ...ofText().map(one => Math.max(...one.names) + 1)), isKnown = ofText().some(layered);
  const verified = record.verification_error, error = typeof verified === "number" ? verified.toExponential(0) : verified;
  const meaning = verified && `verified: every block was rebuilt from its components and compared with what the model computed; the largest relative error was ${error}`;
  $("model").textContent = [record.model, isKnown && `${layers} ${layers === 1 ? "layer" : "layers"}`, m.grid ? `${m.grid.rows > 1 ? `${m.grid.rows} × ` : ""}${m.grid.columns} ${nounsOf(m)}` : writeCount(m.tokens.length, "token"),
    verified && `verified to ${error}`].filter(Boolean).join(" · ");
  $("model").title = meaning || "";
  const offered = views();
  for (const button of $("views").children) {
    const isChosen = button.dataset.view === state.view;
    button.setAttribute("aria-selected", String(isChosen));
    button.tabIndex = isChosen ? 0 : -1;
    button.hidden = !offered.includes(button.dataset.view);
  }
  $("views").hidden = offered.length < 2;
  // The tabs of a narrow screen scroll to the chosen one.
  const tabs = $("views"), tab = $(`tab-${state.view}`);
  const isInSight = tab.offsetLeft >= tabs.scrollLeft && tab.offsetLeft + tab.offsetWidth <= tabs.scrollLeft + tabs.clientWidth;
  if (!isInSight) tabs.scrollLeft = tab.offsetLeft - 20;
  $("panel").setAttribute("aria-labelledby", `tab-${state.view}`);
  writeKeys(offered);
  const some = shownMaps(), rounding = Math.max(...some.flatMap(one => one.layers.map(layer => layer.error)));
  const which = some.length > 1 ? [some.map(one => one.label).join(", ")] : [m.label, m.kind === "input" ? "input map" : "layer map", `method ${m.method}`];
  $("about").textContent = [...which, record.model && `model ${record.model}`, record.dtype && `dtype ${record.dtype}`,
    record.engine && `engine ${record.engine}`, record.date, `stored with an error of at most ${shown(rounding)}`, meaning, `lens_mix ${DATA.version}`].filter(Boolean).join(" · ");
  writeNotes(m.notes);
}

// List the keys that do something on this page.
function writeKeys(offered) {
  const all = ofText(), keys = [rowsThere().size > 1 && `← → ${rowNoun(all[0])}`, all.some(m => m.names.length > 1) && "↑ ↓ layer", all.some(m => m.heads) && "h head",
    offered.length > 1 && `1–${offered.length} view`].filter(Boolean);
  $("keys").textContent = keys.length ? `Keys: ${keys.join(" · ")}` : "";
}

// ------------------------------------------------------------------ events
// Show another view. If it starts below the middle of the window, scroll until the tabs are at the top.
async function openView(view) {
  await set({ view });
  if ($("panel").getBoundingClientRect().top <= innerHeight / 2) return;
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  scrollBy({ top: $("views").getBoundingClientRect().top, behavior: isStill ? "instant" : "smooth" });
}
$("views").addEventListener("click", event => event.target.dataset.view && openView(event.target.dataset.view));
$("views").addEventListener("keydown", event => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], offered = views();
  if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  event.stopPropagation();
  openView(offered[(offered.indexOf(state.view) + step + offered.length) % offered.length]);
  $(`tab-${state.view}`).focus();
});
$("prompt").addEventListener("change", event => {
  const { prompt, i } = listed[+event.target.value];
  set({ prompt, map: i, query: null, layer: null, key: null, compare: "", tree: 0 });
});
$("export").addEventListener("click", event => event.target.dataset.export && save(event.target.dataset.export));
addEventListener("hashchange", () => { readHash(); render(); });
let width = innerWidth;
addEventListener("resize", () => {
  // A change of the height alone, as by a frame that grows to its page, moves nothing.
  if (innerWidth === width) return;
  width = innerWidth;
  clearTimeout(window.later);
  window.later = setTimeout(renderAnew, 150);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renderAnew);
addEventListener("keydown", event => {
  if (event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  const all = [...rowsThere()].sort((a, b) => a - b), at = all.indexOf(state.query), names = layerNames();
  const step = (list, i) => list[Math.max(0, Math.min(list.length - 1, i))], shownLayer = state.layer ?? +($("layer-name")?.textContent || names[names.length - 1]);
  const down = VIEWS[state.view].isUpward ? -1 : 1, place = names.indexOf(shownLayer);
  const heads = Math.max(0, ...shownMaps().map(m => m.heads));
  if (event.key === "ArrowRight") set({ query: step(all, at + 1) });
  else if (event.key === "ArrowLeft") set({ query: step(all, at - 1) });
  else if (event.key === "ArrowDown" && names.length) set({ layer: step(names, place + down) });
  else if (event.key === "ArrowUp" && names.length) set({ layer: step(names, place - down) });
  else if (event.key === "h" && heads) set({ head: state.head + 1 < heads ? state.head + 1 : -1 });
  else if (views()[+event.key - 1]) {
    // What has the focus stays in sight, so the page scrolls only if nothing has it.
    (document.activeElement === document.body ? openView : view => set({ view }))(views()[+event.key - 1]);
  }
  else return;
  event.preventDefault();
});
readHash();
render();
