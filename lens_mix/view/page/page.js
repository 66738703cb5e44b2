// ------------------------------------------------------------------ around the views
const VIEWS = { text: textView, grid: gridView, flow: flowView, methods: methodsView, tree: treeView };
const views = () => Object.keys(VIEWS).filter(name => name !== "tree" || trees().length);
let renders = 0;
async function render() {
  const version = ++renders, fresh = make("section", { id: "view" });
  tip();
  controls(map());
  try { await VIEWS[state.view](fresh); } catch (error) { fresh.append(make("p", { class: "caption", text: String(error) })); }
  // If the user has made another choice in the meantime, this rendering is out of date.
  if (version !== renders) return;
  $("view").replaceWith(fresh);
  for (const pane of fresh.querySelectorAll("[data-middle]")) pane.scrollLeft = pane.dataset.middle - pane.clientWidth / 2;
  document.body.dataset.ready = String(renders);
  if (window.parent !== window) parent.postMessage({ lensMixHeight: document.documentElement.offsetHeight }, "*");
}
function controls(m) {
  const prompt = $("prompt");
  prompt.hidden = DATA.prompts.length < 2;
  const fill = (select, names, value) => {
    select.replaceChildren(...names.map(([key, text]) => make("option", { value: key, text, selected: String(key) === String(value) })));
    select.value = String(value);
  };
  fill(prompt, DATA.prompts.map((all, i) => [i, `${i}: ${shortened(visible(joined(all[0].tokens)), 40)}`]), state.prompt);
  fill($("map"), maps().map((m, i) => [i, m.label]), state.map);
  fill($("head"), [[-1, "mean"], ...Array.from({ length: m.heads }, (_, i) => [i, String(i)])], state.head);
  $("head-label").hidden = !m.heads;
  $("layer").max = m.names.length - 1;
  $("layer").value = m.names.indexOf(state.layer);
  $("layer").disabled = m.names.length === 1;
  $("layer-name").textContent = state.layer;
  $("layer").parentElement.hidden = !layerNumber(m, 0);
  for (const button of $("views").children) {
    button.setAttribute("aria-selected", button.dataset.view === state.view);
    button.hidden = !views().includes(button.dataset.view);
  }
  $("last-view").textContent = views().length;
  const record = m.provenance;
  $("about").textContent = [m.kind === "input" ? "input map" : "layer map", `method ${m.method}`,
    record.model && `model ${record.model}`, record.dtype && `dtype ${record.dtype}`, record.engine && `engine ${record.engine}`, record.date,
    `stored as ${m.code}, error ≤ ${shown(m.layers[placeOf(m)].error)}`, `lens_mix ${DATA.version}`].filter(Boolean).join(" · ");
  $("notes").textContent = m.notes.length ? `Notes: ${m.notes.join("; ")}` : "";
  const box = $("options");
  const choice = (key, text, names) => make("label", {}, `${text} `, make("select", { "data-option": key,
    onchange: event => set({ [key]: event.target.value }) }, ...names.map(name => make("option", { value: name, text: name,
    selected: state[key] === name }))));
  const tree = make("label", { hidden: trees().length < 2 }, "tree ", make("select", { "data-option": "tree",
    onchange: event => set({ tree: +event.target.value }) }, ...trees().map((tree, i) => make("option", { value: i, text: tree.name, selected: state.tree === i }))));
  const flag = (key, text) => make("label", {}, make("input", { type: "checkbox", "data-option": key, checked: Boolean(state[key]),
    onchange: event => set({ [key]: +event.target.checked }) }), ` ${text}`);
  const scale = choice("scale", "scale", ["map", "row", "global", "log"]);
  const boxes = { text: [choice("unit", "unit", ["raw", "share"]), choice("by", "by", ["token", ...(m.words.word ? ["word"] : []), "sentence"]), choice("scale", "scale", ["map", "log"]),
      flag("first", "first token")],
    grid: [scale, flag("first", "first column"), flag("diagonal", "diagonal")], methods: [], tree: [tree],
    flow: [make("label", {}, "smallest share ", make("input", { type: "range", min: .005, max: .3, step: .005, value: state.threshold,
      "data-option": "threshold", oninput: event => set({ threshold: +event.target.value }) }),
    make("output", { text: String(state.threshold) }))] }[state.view].filter(Boolean);
  const about = make("span", { text: `token ${named(m.tokens, state.query)}` });
  // A control that is in use is not replaced, because a slider could then not be dragged further.
  if (!box.contains(document.activeElement) || box.dataset.view !== state.view) box.replaceChildren(...boxes, about);
  else { box.lastChild.replaceWith(about); for (const shownValue of box.querySelectorAll("output")) shownValue.textContent = state.threshold; }
  box.dataset.view = state.view;
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
  if (event.key === "ArrowRight") set({ query: step(m.queries, row + 1) });
  else if (event.key === "ArrowLeft") set({ query: step(m.queries, row < 0 ? 0 : row - 1) });
  else if (event.key === "ArrowUp") set({ layer: step(m.names, place + 1) });
  else if (event.key === "ArrowDown") set({ layer: step(m.names, place - 1) });
  else if (event.key === "h" && m.heads) set({ head: state.head + 1 < m.heads ? state.head + 1 : -1 });
  else if (views()[+event.key - 1]) set({ view: views()[+event.key - 1] });
  else return;
  event.preventDefault();
});
readHash();
render();
