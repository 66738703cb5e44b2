// ------------------------------------------------------------------ views: flow
async function flowView(view) {
  const m = map(), count = m.tokens.length;
  if (m.kind === "input" || m.keys || m.queries.length < count || m.signed) {
    view.append(make("p", { class: "caption", text: "The flow view needs a layer map with all rows, whose keys are its tokens and whose "
      + `scores are not negative; “${m.label}” ${m.kind === "input" ? "is an input map" : m.keys ? "is a map between two sequences"
        : m.signed ? "is signed" : "has only some rows"}. Choose another map above.` }));
    exported = () => ({ rows: [] });
    return;
  }
  if (m.names.some((name, place) => place && name !== m.names[place - 1] + 1)) {
    view.append(make("p", { class: "caption", text: `The flow view needs layers that follow one another; “${m.label}” has ${m.names.join(", ")}.` }));
    exported = () => ({ rows: [] });
    return;
  }
  const top = placeOf(m), residual = m.residual || 0;
  let weight = new Float64Array(count);
  weight[state.query] = 1;
  const edges = [], nodes = [{ level: top + 1, token: state.query, weight: 1 }];
  for (let place = top; place >= 0; place--) {
    const scores = await scoresOf(m, place, -1), below = new Float64Array(count);
    for (let query = 0; query < count; query++) {
      if (!weight[query]) continue;
      const row = scores.slice(query * count, (query + 1) * count), total = size(row) || 1;
      // If a row gave weight to an attention sink, the residual has a larger share, as in rollout.
      const stay = m.provenance.sink && residual ? residual / ((1 - residual) * Math.min(1, size(row)) + residual) : residual;
      for (let key = 0; key < count; key++) {
        const mixed = Number.isNaN(row[key]) ? 0 : weight[query] * (1 - stay) * row[key] / total;
        const all = mixed + (key === query ? weight[query] * stay : 0);
        if (all < state.threshold) continue;
        edges.push({ place, query, key, weight: all, stays: key === query, score: row[key] });
        below[key] += all;
      }
    }
    weight = below;
    weight.forEach((reached, token) => reached && nodes.push({ level: place, token, weight: reached }));
  }
  const bottom = weight.reduce((sum, x) => sum + x, 0);
  const across = Math.max(16, Math.min(64, (Math.max(innerWidth, 480) - 120) / count)), down = Math.max(16, Math.min(40, 560 / (top + 1)));
  const x = token => 50 + token * across + across / 2, y = level => 24 + (top + 1 - level) * down;
  const svg = draw("svg", { width: 70 + count * across, height: y(0) + 100, role: "img" });
  for (const edge of edges) {
    const line = draw("line", { x1: x(edge.key), y1: y(edge.place), x2: x(edge.query), y2: y(edge.place + 1),
      "stroke-width": Math.max(.8, 11 * edge.weight), "stroke-opacity": .35 + .6 * Math.min(1, edge.weight * 2),
      class: edge.stays ? "edge stay" : "edge", "data-weight": edge.weight, "data-layer": m.names[edge.place] });
    showTip(line, `layer ${m.names[edge.place]}: ${named(m.tokens, edge.query)} from `
      + `${named(m.tokens, edge.key)}\n${shown(edge.weight)} of what reached the chosen token\n${shown(edge.score)} raw score`);
    line.addEventListener("click", () => clickedEdge(m, edge, detail));
    svg.append(line);
  }
  const marked = [];
  for (const node of nodes) {
    const place = node.level - 1, share = m.feed_forward && place >= 0 ? m.feed_forward[place][m.queries.indexOf(node.token)] : 0;
    const text = `${node.level ? `after layer ${m.names[place]}` : "input of the first layer"}: ${named(m.tokens, node.token)}\n`
      + `${shown(node.weight)} of what reached the chosen token`;
    svg.append(showTip(draw("circle", { cx: x(node.token), cy: y(node.level), r: 3.2 }), text));
    if (!share) continue;
    const side = 12 * Math.sqrt(share * node.weight);
    svg.append(showTip(draw("rect", { x: x(node.token) + 4, y: y(node.level) - side / 2, width: side, height: side,
      class: "feed-forward", "data-share": share, "data-layer": m.names[place], "data-token": node.token }),
    `feed-forward of layer ${m.names[place]}: ${named(m.tokens, node.token)}\n${shown(share)} of the layer's output here\n`
      + `${shown(share * node.weight)} of what reached the chosen token`));
    marked.push({ map: m.label, what: "feed-forward", layer: m.names[place], query: node.token, key: node.token,
      token: m.tokens[node.token], value: share });
  }
  for (let level = 0; level <= top; level++) layerLabels(svg, (y(level) + y(level + 1)) / 2, String(m.names[level]));
  const order = spaced(Float32Array.from(weight, (w, i) => w + (i === state.query ? 9 : 0) + 1e-9), across, count);
  for (const token of order) svg.append(tokenLabel(m.tokens[token], x(token), y(0) + 14,
    token === state.query ? "chosen" : weight[token] ? "" : "faint", () => set({ query: token })));
  const detail = make("p", { class: "caption", text: "Click an edge for its heads." });
  view.append(make("p", { class: "caption", "data-share": bottom, text: `The sources of ${named(m.tokens, state.query)}, from `
    + `layer ${m.names[top]} at the top down to the first. Width: share of what reached it${residual ? `, with a residual weight of ${residual}${m.provenance.sink ? " (more in rows that gave weight to an attention sink)" : ""}` : ""}; `
    + `grey edges stay at their position. Edges below ${state.threshold} are left out: ${(100 * bottom).toFixed(1)} % of the total is shown at the bottom.`
    + (m.feed_forward ? " Orange squares: what the feed-forward added at a position; area: its share of the layer's output there, times what "
      + "reached the chosen token. The feed-forward reads no other position, so the edges are not reduced by it." : "") }), makePane(svg, x(state.query)), detail);
  exported = () => ({ rows: edges.map(edge => ({ map: m.label, what: "edge", layer: m.names[edge.place], query: edge.query, key: edge.key,
    token: m.tokens[edge.key], value: edge.weight })).concat(marked) });
}
// Return a pane that scrolls to `middle` at first, if the drawing is wider than the page.
function makePane(svg, middle) {
  return make("div", { class: "pane", "data-middle": middle }, svg);
}
function layerLabels(svg, middle, text) {
  const width = +svg.getAttribute("width");
  svg.append(draw("text", { x: 8, y: middle + 4, class: "faint" }, text));
  if (width > innerWidth) svg.append(draw("text", { x: width - 4, y: middle + 4, class: "faint", "text-anchor": "end" }, text));
}
// Show a text while the pointer is over a node.
function showTip(node, text) {
  node.addEventListener("mousemove", event => tip(event, text));
  node.addEventListener("mouseleave", () => tip());
  return node;
}
function tokenLabel(token, left, top, kind, choose) {
  const label = draw("text", { x: 0, y: 0, transform: `translate(${left + 4} ${top}) rotate(60)`, class: `label ${kind}` },
    shortened(visible(token).trim(), 14));
  if (choose) label.addEventListener("click", choose);
  return label;
}
async function clickedEdge(m, edge, detail) {
  const all = await layerOf(m, edge.place), place = edge.query * m.tokens.length + edge.key;
  const heads = m.heads ? all.map((scores, head) => [head, scores[place]]).sort((a, b) => b[1] - a[1]).slice(0, 8)
    .map(([head, score]) => `head ${head}: ${shown(score)}`).join(", ") : `${shown(all[0][place])}; this map has no heads`;
  detail.textContent = `Layer ${m.names[edge.place]}, ${named(m.tokens, edge.query)} from ${named(m.tokens, edge.key)}, raw: ${heads}.`;
}

// ------------------------------------------------------------------ views: tree
const KINDS = new Map(Object.entries({ resid_pre: "before the layer", resid_mid: "after attention", mlp_out: "feed-forward",
  resid_post: "after the layer" }));
const stageOf = node => node.level ? `${node.kind ? `${KINDS.get(node.kind) || node.kind}, ` : "after "}layer ${node.layer}` : "input of the first layer";
// Layers go upward and tokens from left to right; levels and tokens without a node are not drawn.
async function treeView(view) {
  const tree = trees()[state.tree], { nodes, edges, tokens, options } = tree, m = map();
  const levels = [...new Set(nodes.map(node => node.level))].sort((a, b) => a - b);
  const columns = [...new Set(nodes.map(node => node.position))].sort((a, b) => a - b);
  const across = Math.max(18, Math.min(64, (Math.max(innerWidth, 480) - 174) / columns.length));
  const down = Math.max(9, Math.min(40, 600 / levels.length));
  const column = position => 64 + columns.indexOf(position) * across + across / 2;
  const y = level => 20 + (levels.length - 1 - levels.indexOf(level)) * down, bottom = y(levels[0]);
  // A feed-forward is drawn to the right of the residual stream that it reads and writes.
  const x = node => column(node.position) + (node.kind === "mlp_out" ? Math.min(14, across / 3) : 0);
  const svg = draw("svg", { width: 124 + columns.length * across, height: bottom + 110, role: "img" });
  for (const position of columns) svg.append(draw("line", { x1: column(position), x2: column(position), y1: 20, y2: bottom, class: "guide" }));
  const detail = make("p", { class: "caption", "data-detail": "", text: "Click a node or an edge for its layer, tokens and values." });
  const name = node => `${node.position} “${shortened(plain(node.token), 24)}”`;
  const addMark = (mark, text) => {
    mark.addEventListener("click", () => { detail.textContent = text.replaceAll("\n", "; "); });
    svg.append(showTip(mark, text));
  };
  const most = edges.reduce((largest, [, , values]) => Math.max(largest, Math.abs(values.weight)), 0) || 1;
  for (const [start, end, values] of edges) {
    const [from, to] = [nodes[start], nodes[end]], strong = Math.abs(values.weight) / most;
    const others = Object.keys(values).filter(key => key !== "weight" && typeof values[key] === "number" && key !== "layer");
    const heads = Array.isArray(values.heads) ? values.heads.slice(0, 8).map(([head, weight]) => `head ${head}: ${shown(weight)}`) : [];
    addMark(draw("line", { x1: x(from), y1: y(from.level), x2: x(to), y2: y(to.level), "stroke-width": Math.max(.8, 9 * strong),
      "stroke-opacity": .3 + .6 * strong, "data-weight": values.weight, "data-from": `${from.level},${from.position}`,
      "data-to": `${to.level},${to.position}`, class: values.weight < 0 ? "edge less" : from.position === to.position ? "edge stay" : "edge" }),
    [`layer ${values.layer ?? to.layer}: ${name(to)} from ${name(from)}`, `weight ${shown(values.weight)}`,
      ...others.map(key => `${key.replace("_", " ")} ${shown(values[key])}`), ...heads].join("\n"));
  }
  nodes.forEach((node, place) => {
    const incoming = edges.filter(([, end]) => end === place), outgoing = edges.filter(([start]) => start === place), top = tree.roots.includes(place);
    const list = (some, other) => some.slice(0, 6).map(edge => `${name(nodes[edge[other]])} ${shown(edge[2].weight)}`).join(", ")
      + (some.length > 6 ? `, and ${some.length - 6} more` : "");
    const common = { "data-node": `${node.level},${node.position}`, class: `${top ? "root" : ""} ${node.kind === "mlp_out" ? "feed-forward" : ""}` };
    addMark(node.kind === "mlp_out" ? draw("rect", { ...common, x: x(node) - 3, y: y(node.level) - 3, width: 6, height: 6 })
      : draw("circle", { ...common, cx: x(node), cy: y(node.level), r: top ? 5 : 3.2 }),
    [`${stageOf(node)}: ${name(node)}`, typeof node.share === "number" && `share ${shown(node.share)}`, incoming.length && `from ${list(incoming, 0)}`,
      outgoing.length && `to ${list(outgoing, 1)}`].filter(Boolean).join("\n"));
  });
  let last = Infinity;
  for (const level of levels) {
    const node = nodes.find(candidate => candidate.level === level);
    if (last - y(level) < 12 || (node.kind && node.kind !== "resid_post" && level)) continue;
    layerLabels(svg, y(level), level ? `layer ${node.layer}` : "input");
    last = y(level);
  }
  const same = tokens.length === m.tokens.length && tokens.every((token, i) => token === m.tokens[i]);
  const weight = columns.map(position => nodes.filter(node => node.position === position).length);
  for (const place of spaced(weight, across, columns.length)) {
    const position = columns[place], node = nodes.find(candidate => candidate.position === position);
    svg.append(tokenLabel(node.token, column(position), bottom + 16, same && position === state.query ? "chosen" : "",
      same && (() => set({ query: position }))));
  }
  view.append(make("p", { class: "caption", "data-pruned": edges.length, text: `${tree.name}: ${rule(tree)} ${nodes.length} nodes and `
    + `${edges.length} edges over ${columns.length} of ${tokens.length || columns.length} tokens are drawn; tokens without a node have no column. `
    + (edges.length < tree.whole[1] ? `These are the largest of ${tree.whole[1]} edges. ` : "")
    + `Layers go upward; the large circle is the root. Width: weight, the widest is ${shown(most)}; grey edges stay at their position.`
    + (nodes.some(node => node.kind === "mlp_out") ? " Orange squares are feed-forwards." : "") }),
    makePane(svg, tree.roots.length ? x(nodes[tree.roots[0]]) : 0), detail);
  exported = () => ({ options, rows: edges.map(([start, end, values]) => ({ tree: tree.name, layer: values.layer ?? nodes[end].layer,
    from_level: nodes[start].level, key: nodes[start].position, key_token: nodes[start].token, to_level: nodes[end].level,
    query: nodes[end].position, query_token: nodes[end].token, value: values.weight })) });
}
// Return a sentence about the edges that were left out when the graph was made.
function rule({ options, nodes, whole }) {
  if (options.order) return `from the top, a token adds the tokens with a score above ${options.threshold} of the layer's largest, each `
    + `only once${options.cost ? `; branches with less than ${options.cost} per edge are removed` : ""}.`;
  if (options.by) return `edges whose ${options.by} is not above ${options.threshold} are left out (${options.edges_before - whole[1]} of ${options.edges_before}).`;
  if (options.threshold !== undefined) return `edges whose importance is not above ${options.threshold} are left out`
    + `${nodes.some(node => node.kind) ? ", top-down" : ""}.`;
  return "all edges of the given graph.";
}
