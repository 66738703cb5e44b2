// ------------------------------------------------------------------ graphs over levels and positions
// The sizes of a drawing in pixels: columns, the gaps between them, the widest edge, an edge that stays, the highest level.
const NARROWEST = 13, WIDEST = 64, GAP = 10, THICK = 9, STAY = 1.4, TOP = 34;
// Draw a graph with levels upward and positions from left to right. `graph` has:
//   title: the name of the picture; tokens: the tokens by position; chosen: the explained position; roots: indices of nodes
//   nodes: { level, position, say, share, mark: "circle" or "square", side, small, attributes }
//   edges: { start, end, weight, say, detail, attributes }, with the indices of nodes
//   levels: levels to draw also without a node; levelNames: a Map from a level to its name
//   beside, besideTitle: a Map from a level to a number beside its name, or null, and what the numbers are
//   unitName, format, shareName, legend: what the widths, the areas of nodes and the squares mean, and how to write a width
//   choose(position, index): what a click on a node does, or on a token (index -1 if it has no node)
function drawGraph(view, graph) {
  const plan = layOut(graph), { edges, roots, nodes } = graph;
  const svg = draw("svg", { width: plan.width, height: plan.height, role: "group", "aria-label": graph.title });
  const detail = make("p", { class: "caption", "data-detail": "hint", text: "Click an edge for its numbers. Click a node or a token to explain it." });
  const tell = async say => { detail.dataset.detail = ""; detail.textContent = (await say()).replaceAll("\n", "; "); };
  const strongest = [...edges].sort((a, b) => moves(graph, b) - moves(graph, a) || Math.abs(b.weight) - Math.abs(a.weight));
  const inWords = strongest.slice(0, 10).map(edge => edge.say().replaceAll("\n", ", "));
  const described = inWords.length ? `The strongest edges: ${inWords.slice(0, 5).join("; ")}.` : "No edge.";
  const picture = draw("g", { role: "img", "aria-label": `${graph.title}. ${described}` });
  for (const x of plan.across.values()) picture.append(draw("line", { x1: x, x2: x, y1: TOP, y2: plan.bottom, class: "guide" }));
  // The strongest edges are drawn last, on top.
  const lines = strongest.reverse().map(edge => drawEdge(graph, plan, edge, tell)), marks = nodes.map((_, index) => drawNode(graph, plan, index));
  picture.append(...lines);
  const buttons = draw("g", { role: "group", "aria-label": "Nodes. The arrow keys follow the edges; Enter chooses a node." });
  buttons.append(...marks);
  svg.append(picture, ...drawTokens(graph, plan), buttons);
  const light = lightEdges(picture, lines);
  followPointer(svg, lines, light);
  followKeys(buttons, marks, graph, tell, light);
  const pane = make("div", { class: "pane", "data-middle": roots.length ? plan.x(nodes[roots[0]]) : 0 }, svg);
  view.append(makeLegend(graph, plan.most), make("div", { class: "graph" }, nameLevels(graph, plan), pane), detail);
  if (inWords.length) view.append(make("details", { class: "caption" }, make("summary", { text: "The strongest edges in words" }),
    make("ol", {}, ...inWords.map(text => make("li", { text })))));
}
// Return whether an edge is between two positions. What stays at a position is often most of it, so only these have a width.
const moves = ({ nodes }, edge) => nodes[edge.start].position !== nodes[edge.end].position;
// Return the places of columns and levels in pixels, and the largest weight between two positions.
function layOut(graph) {
  const { nodes, edges, tokens } = graph, levels = [...new Set([...graph.levels, ...nodes.map(node => node.level)])].sort((a, b) => a - b);
  const margin = graph.beside ? 82 : 38, room = Math.max(280, $("panel").clientWidth) - margin - 28;
  const used = [...new Set(nodes.map(node => node.position))].sort((a, b) => a - b);
  // All tokens have a column if their labels fit; otherwise only tokens with a node have one.
  const columns = tokens.length * 22 <= room ? tokens.map((_, position) => position) : used;
  const gaps = columns.filter((position, i) => position - (i ? columns[i - 1] : -1) > 1);
  const step = Math.max(NARROWEST, Math.min(WIDEST, (room - GAP * gaps.length) / columns.length)), across = new Map();
  let right = 0;
  for (const position of columns) {
    right += (gaps.includes(position) ? GAP : 0) + step;
    across.set(position, right - step / 2);
  }
  const down = Math.max(9, Math.min(40, 600 / Math.max(1, levels.length - 1))), rank = new Map(levels.map((level, i) => [level, i]));
  const bottom = TOP + (levels.length - 1) * down, labels = fitting(graph, across);
  const longest = Math.max(...labels.map(position => Math.min(14, visible(tokens[position]).trim().length)));
  return { levels, margin, used: new Set(used), gaps, step, across, bottom, labels, width: Math.ceil(right + 12), height: Math.ceil(bottom + 34 + 6.2 * longest),
    most: edges.reduce((most, edge) => moves(graph, edge) ? Math.max(most, Math.abs(edge.weight)) : most, 0),
    y: level => bottom - rank.get(level) * down,
    // A feed-forward is drawn to the right of the residual stream that it reads and writes.
    x: node => across.get(node.position) + (node.mark === "square" ? Math.min(14, step / 3) : 0) };
}
function drawEdge(graph, { x, y, most }, edge, tell) {
  const [from, to] = [graph.nodes[edge.start], graph.nodes[edge.end]], isMove = moves(graph, edge), strong = isMove ? Math.abs(edge.weight) / most : 0;
  const line = draw("line", { x1: x(from), y1: y(from.level), x2: x(to), y2: y(to.level), "stroke-width": isMove ? Math.max(.8, THICK * strong) : STAY,
    "stroke-opacity": .45 + .5 * strong, "data-weight": edge.weight, "data-from": `${from.level},${from.position}`,
    "data-to": `${to.level},${to.position}`, class: edge.weight < 0 ? "edge less" : isMove ? "edge" : "edge stay", ...edge.attributes });
  return Object.assign(line, { edge, say: edge.say, pick: () => tell(edge.detail || edge.say) });
}
function drawNode(graph, { x, y }, index) {
  const node = graph.nodes[index], side = node.side ?? 6, isRoot = graph.roots.includes(index), isSquare = node.mark === "square";
  const common = { role: "button", tabindex: -1, "aria-label": node.say().replaceAll("\n", ", "), "data-node": `${node.level},${node.position}`,
    class: isRoot ? "root" : isSquare ? "feed-forward" : "", ...node.attributes };
  const mark = isSquare ? draw("rect", { ...common, x: x(node) - side / 2, y: y(node.level) - side / 2, width: side, height: side })
    : draw("circle", { ...common, cx: x(node), cy: y(node.level), r: radius(node, isRoot) });
  return Object.assign(mark, { index, say: node.say, pick: () => graph.choose(node.position, index) });
}
// Return the labels of the tokens, and dots where tokens are left out.
function drawTokens(graph, { across, step, bottom, labels, gaps, used }) {
  const { nodes, tokens, chosen } = graph;
  const highest = position => nodes.reduce((best, node, index) => node.position === position && (best < 0 || node.level > nodes[best].level) ? index : best, -1);
  const dots = gaps.map(position => draw("text", { x: across.get(position) - step / 2 - GAP / 2, y: bottom + 16, class: "faint", "text-anchor": "middle" }, "⋯"));
  return [...dots, ...labels.map(position => {
    const kind = position === chosen ? "chosen" : used.has(position) ? "" : "faint", place = `translate(${across.get(position) - 2} ${bottom + 15}) rotate(60)`;
    const label = draw("text", { x: 0, y: 0, transform: place, class: `label ${kind}` }, shortened(visible(tokens[position]).trim(), 14));
    label.addEventListener("click", () => graph.choose(position, highest(position)));
    return label;
  })];
}
// Return a function that draws the edges of one node strongly and the others weakly; -1: all as they are.
function lightEdges(picture, lines) {
  let lit = -1;
  return index => {
    if (index === lit) return;
    lit = index;
    picture.classList.toggle("lit", index >= 0);
    for (const line of lines) line.classList.toggle("on", line.edge.start === index || line.edge.end === index);
  };
}
// Return the names of the levels, with a number beside each, as a picture that stays in sight if the graph is scrolled.
function nameLevels({ levelNames, beside, besideTitle }, { levels, y, margin: width, height }) {
  const svg = draw("svg", { width, height, role: "img", "aria-label": beside ? `${besideTitle}: ${levels.filter(level => beside.has(level)).reverse()
    .map(level => `layer ${levelNames.get(level)} ${beside.get(level)}`).join(", ")}` : "The layers of the graph." });
  const write = (left, top, text, anchor) => svg.append(draw("text", { x: left, y: top, class: "faint", "text-anchor": anchor }, text));
  write(2, 21, "layer", "start");
  if (beside) besideTitle.split(" ").forEach((word, line) => write(width - 8, 10 + 11 * line, word, "end"));
  let last = -Infinity;
  for (const level of [...levels].reverse()) {
    if (!levelNames.has(level) || y(level) - last < 11) continue;
    last = y(level);
    write(2, last + 4, levelNames.get(level), "start");
    if (beside?.has(level)) write(width - 8, last + 4, beside.get(level), "end");
  }
  return svg;
}
// A node's area shows its share, if it has one.
const radius = (node, isRoot) => node.share === undefined ? (isRoot ? 5.5 : node.small ? 2 : 3.2) : 1.2 + 5.8 * Math.sqrt(Math.min(1, node.share));
// Return the positions whose labels fit: the explained one, then those with the most nodes.
function fitting({ nodes, chosen }, across) {
  const count = new Map([...across.keys()].map(position => [position, position === chosen ? Infinity : 0])), taken = [];
  for (const node of nodes) count.set(node.position, count.get(node.position) + 1);
  for (const position of [...across.keys()].sort((a, b) => count.get(b) - count.get(a)))
    if (taken.every(other => Math.abs(across.get(other) - across.get(position)) >= 13)) taken.push(position);
  return taken;
}
// Show the text of the mark below the pointer, or of the nearest edge, and let a click choose it.
function followPointer(svg, lines, light) {
  const ends = lines.map(line => ["x1", "y1", "x2", "y2"].map(name => +line.getAttribute(name)));
  const found = event => {
    if (event.target.say) return event.target;
    const box = svg.getBoundingClientRect(), [a, b] = [event.clientX - box.left, event.clientY - box.top];
    let nearest = null, least = 6;
    ends.forEach(([x1, y1, x2, y2], i) => {
      const along = Math.max(0, Math.min(1, ((a - x1) * (x2 - x1) + (b - y1) * (y2 - y1)) / ((x2 - x1) ** 2 + (y2 - y1) ** 2 || 1)));
      const away = Math.hypot(a - x1 - along * (x2 - x1), b - y1 - along * (y2 - y1));
      if (away < least) [nearest, least] = [lines[i], away];
    });
    return nearest;
  };
  svg.addEventListener("mousemove", event => {
    const mark = found(event);
    light(mark?.index ?? -1);
    tip(event, mark?.say());
  });
  svg.addEventListener("mouseleave", () => { light(-1); tip(); });
  svg.addEventListener("click", event => { if (!event.target.classList.contains("label")) found(event)?.pick(); });
}
// Move between nodes with the arrow keys: down and up along the strongest edge, left and right within a level.
function followKeys(group, marks, graph, tell, light) {
  const { nodes, edges, roots } = graph;
  let current = roots[0] ?? 0;
  if (!marks.length) return;
  marks[current].setAttribute("tabindex", 0);
  const focus = index => {
    marks[current].setAttribute("tabindex", -1);
    marks[current = index].setAttribute("tabindex", 0);
    marks[current].focus();
  };
  const stronger = (one, other) => !one || Math.abs(other.weight) > Math.abs(one.weight) ? other : one;
  const along = (mine, other) => edges.filter(edge => edge[mine] === current).reduce(stronger, null)?.[other];
  const inLevel = step => [...nodes.keys()].filter(index => nodes[index].level === nodes[current].level
    && Math.sign(nodes[index].position - nodes[current].position) === step).sort((a, b) => step * (nodes[a].position - nodes[b].position))[0];
  group.addEventListener("focusin", event => { current = Math.max(0, marks.indexOf(event.target)); light(current); tell(marks[current].say); });
  group.addEventListener("focusout", () => light(-1));
  group.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const next = { ArrowDown: () => along("end", "start"), ArrowUp: () => along("start", "end"), ArrowLeft: () => inLevel(-1),
      ArrowRight: () => inLevel(1), Home: () => roots[0] }[event.key];
    if (event.key === "Enter" || event.key === " ") { focusAfterChoice = true; marks[current].pick(); }
    else if (next) { const index = next(); if (index !== undefined) focus(index); } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  // The drawing that a key made is the one whose root has the focus next. It is not part of the page yet.
  if (focusAfterChoice) setTimeout(() => marks[roots[0] ?? 0].isConnected && marks[roots[0] ?? 0].focus(), 0);
  focusAfterChoice = false;
}
let focusAfterChoice = false;
// Return the legend: what the widths, colors and areas mean, with samples and numbers.
function makeLegend({ edges, nodes, roots, unitName, format, shareName, legend }, most) {
  const sample = (name, attributes) => {
    const svg = draw("svg", { width: 26, height: 14, "aria-hidden": true });
    svg.append(draw(name, attributes));
    return svg;
  };
  const line = (kind, width) => sample("line", { x1: 5, x2: 21, y1: 7, y2: 7, class: kind, "stroke-width": width });
  const dot = (r, kind) => sample("circle", { cx: 13, cy: 7, r, class: kind });
  const stays = edges.some(edge => nodes[edge.start].position === nodes[edge.end].position);
  const entries = [];
  if (most) entries.push([null, `from another position; width: ${unitName}`],
    ...[most / 4, most / 2, most].map(x => [line("edge", Math.max(.8, THICK * x / most)), format(x)]));
  if (edges.some(edge => edge.weight < 0)) entries.push([line("edge less", 4), "below 0"]);
  if (stays) entries.push([line("edge stay", STAY), "stays at its position"]);
  if (shareName) entries.push([null, `area: ${shareName}`], ...[.1, 1].map(share => [dot(radius({ share }), ""), percent(share)]));
  if (roots.length) entries.push([dot(5.5, "root"), roots.length > 1 ? "the explained positions" : "the explained position"]);
  const square = { x: 9, y: 3, width: 8, height: 8, class: "feed-forward" };
  if (nodes.some(node => node.mark === "square")) entries.push([sample("rect", square), legend]);
  return make("div", { class: "graph-legend" }, ...entries.map(([mark, text]) => make("span", {}, ...(mark ? [mark] : []), make("span", { text }))));
}

// ------------------------------------------------------------------ views: flow
// Return whether the maps of all layers can be multiplied: all rows and consecutive layers, over the tokens, not negative.
const isChain = m => m.kind === "layer" && !m.keys && !m.signed && m.queries.length === m.tokens.length
  && m.queries.every((query, row) => query === row) && m.names.every((name, place) => !place || name === m.names[place - 1] + 1);
// Return the map whose flow is drawn if `m` is chosen, or undefined. For an input map it is a layer map of the same prompt:
// that of the same method if there is one.
function flowMap(m) {
  if (m.kind === "layer") return isChain(m) ? m : undefined;
  const chains = maps().filter(other => isChain(other) && same(other.tokens, m.tokens));
  return chains.find(other => other.method === m.method) || chains[0];
}
const flowIsOffered = m => Boolean(flowMap(m));
// Return the mean over heads of every layer, with 0 for hidden keys. A map is read once.
const chainOf = m => once(m, "chain", () => Promise.all(m.names.map(async (_, place) => (await scoresOf(m, place, -1)).map(x => x || 0))));
// Return the sum of each row of every layer, without the keys that are left out.
const totalsOf = (m, layers, left) => once(m, `totals without ${[...left]}`, () => layers.map(scores => {
  const count = m.tokens.length, totals = new Float64Array(count);
  for (let row = 0, i = 0; row < count; row++) for (let key = 0; key < count; key++, i++) if (!left.has(key)) totals[row] += scores[i];
  return totals;
}));
// Return the share of the rollout of each position, at each level, that comes from some keys.
const sharesOfKeys = (m, layers, keys) => once(m, `shares of ${[...keys]}`, () => {
  const count = m.tokens.length, totals = totalsOf(m, layers, new Set()), levels = [Float64Array.from({ length: count }, (_, key) => +keys.has(key))];
  layers.forEach((scores, place) => levels.push(levels[place].map((own, row) => {
    const total = totals[place][row], stay = residualShare(m, total, true);
    let read = 0;
    for (let key = 0, i = row * count; key < count; key++, i++) read += scores[i] * levels[place][key];
    return stay * own + (total ? (1 - stay) * read / total : 0);
  })));
  return levels;
});
// Return the residual's share of a row. It is larger if the row gave weight to an attention sink that is not a token, and
// whole if the row is zero, which then reads only its position.
function residualShare(m, total, isWhole) {
  const residual = m.residual || 0;
  if (!total) return residual ? 1 : 0;
  return m.provenance.sink && isWhole && residual ? residual / ((1 - residual) * Math.min(1, total) + residual) : residual;
}
// Distribute a weight of 1 at a position over the layers below, as `lm.rollout` does after `m.drop(left)`, and return the
// weights at each level. The layers above `top` are left out, and `visit` is called for each edge.
function distribute(m, layers, top, query, left, visit) {
  const count = m.tokens.length, keys = m.tokens.map((_, key) => key).filter(key => !left.has(key)), totals = totalsOf(m, layers, left);
  const reached = Array.from({ length: top + 2 }, () => new Float64Array(count));
  reached[top + 1][query] = 1;
  for (let place = top; place >= 0; place--) {
    const scores = layers[place], above = reached[place + 1], below = reached[place];
    for (const row of keys) {
      if (!above[row]) continue;
      const total = totals[place][row], stay = residualShare(m, total, !left.size), scale = total ? above[row] * (1 - stay) / total : 0;
      for (let key = 0, i = row * count, last = m.causal ? row + 1 : count; key < last; key++, i++) {
        const share = scale * scores[i] + (key === row ? above[row] * stay : 0);
        if (!share || left.has(key)) continue;
        below[key] += share;
        if (visit) visit(place, row, key, share, scores[i]);
      }
    }
  }
  return reached;
}
// Return what the rows of each layer give to the positions that are left out: a share of what reached the explained one.
function sharesLeftOut(m, layers, reached, left) {
  const all = totalsOf(m, layers, new Set()), kept = totalsOf(m, layers, left);
  return reached.slice(1).map((weights, place) => weights.reduce((sum, weight, row) => {
    const total = all[place][row];
    return weight && total ? sum + weight * (1 - residualShare(m, total, true)) * (total - kept[place][row]) / total : sum;
  }, 0));
}
async function flowView(view) {
  const m = flowMap(map()), query = state.query, at = m.names.indexOf(state.layer), top = at < 0 ? m.names.length - 1 : at;
  const layers = await chainOf(m), left = new Set(state.first ? [] : sinkKeys(m, query));
  const flow = findFlow(m, layers, top, query, left), fed = feedForwards(m, flow);
  view.append(flowHeadline(m, flow), flowCaption(m, flow));
  const levelNames = new Map([[0, "input"], ...m.names.slice(0, top + 1).map((name, place) => [place + 1, String(name)])]);
  drawGraph(view, { title: `The flow of ${m.title} to ${named(m.tokens, query)}`, tokens: m.tokens, chosen: query, nodes: [...flow.nodes, ...fed],
    edges: flow.edges, roots: [0], levels: [...levelNames.keys()], levelNames, beside: left.size ? besideLevels(m, layers, flow) : null,
    besideTitle: sinkName(m), unitName: "share", format: percent, shareName: `share of what reached ${named(m.tokens, query)}`,
    legend: "feed-forward; area: its share of the layer's output, times the node's share", choose: position => set({ query: position }) });
  exported = () => ({ rows: [...flow.edges.map(edge => ({ map: m.label, what: "edge", layer: m.names[edge.place], query: edge.row, key: edge.key,
    token: m.tokens[edge.key], value: edge.weight })), ...fed.map(node => ({ map: m.label, what: "feed-forward", layer: m.names[node.level - 1],
    query: node.position, key: node.position, token: m.tokens[node.position], value: node.output }))] });
}
// Return the edges from the smallest share up, their nodes with the root first, and the shares that reach each level.
function findFlow(m, layers, top, query, left) {
  const edges = [], nodes = [], places = new Map(), me = named(m.tokens, query);
  const nodeAt = (level, position) => {
    const key = level * m.tokens.length + position;
    if (!places.has(key)) places.set(key, nodes.push({ level, position, mark: "circle" }) - 1);
    return places.get(key);
  };
  nodeAt(top + 1, query);
  const reached = distribute(m, layers, top, query, left, (place, row, key, weight, score) => {
    if (weight >= state.threshold) edges.push({ place, row, key, weight, score, start: nodeAt(place, key), end: nodeAt(place + 1, row) });
  });
  for (const edge of edges) {
    edge.say = () => `layer ${m.names[edge.place]}: ${named(m.tokens, edge.row)} from ${named(m.tokens, edge.key)}\n`
      + `${percent(edge.weight)} of what reached ${me}\n${shown(edge.score)} raw score`;
    edge.detail = async () => `${edge.say()}\n${await headsOf(m, edge)}`;
    edge.attributes = { "data-layer": m.names[edge.place] };
  }
  for (const node of nodes) {
    node.share = reached[node.level][node.position];
    node.say = () => `${node.level ? `after layer ${m.names[node.level - 1]}` : "input of the first layer"}: ${named(m.tokens, node.position)}\n`
      + `${percent(node.share)} of what reached ${me}`;
    node.attributes = { "data-share": node.share };
  }
  const whole = left.size ? sharesOfKeys(m, layers, left)[top + 1][query] : 0;
  return { edges, nodes, reached, whole, top, query, left };
}
// Return a square beside each node for the feed-forward before it, if its share of the layer's output was measured.
const feedForwards = (m, { nodes, query }) => nodes.map(node => {
  const layer = m.names[node.level - 1], output = m.feed_forward && node.level ? m.feed_forward[node.level - 1][node.position] : 0;
  const share = output * node.share;
  return { level: node.level, position: node.position, output, mark: "square", side: 12 * Math.sqrt(share),
    attributes: { "data-share": output, "data-layer": layer, "data-token": node.position },
    say: () => `feed-forward of layer ${layer}: ${named(m.tokens, node.position)}\n${percent(output)} of the layer's output here\n`
      + `${percent(share)} of what reached ${named(m.tokens, query)}` };
}).filter(node => node.output);
function besideLevels(m, layers, { reached, left }) {
  const written = share => share && share < 0.00095 ? "< 0.1 %" : percent(share);
  return new Map(sharesLeftOut(m, layers, reached, left).map((share, place) => [place + 1, written(share)]));
}
const bold = text => make("b", { text });
const inText = (tokens, position) => `${quotedToken(tokens[position])} (token ${position})`;
// A whole that is almost 1 is not written as 100 %.
const percentOfWhole = share => share > .999 ? "more than 99.9 %" : share > .95 ? `${(100 * share).toFixed(1)} %` : percent(share);
function flowHeadline(m, { edges, top, query, whole }) {
  const step = edges.filter(edge => edge.row !== edge.key).sort((a, b) => b.weight - a.weight)[0];
  const finding = !step ? ["No step from another position is above the smallest share."] : ["The strongest step: in ", bold(`layer ${m.names[step.place]}`),
    `, ${step.row === query ? positionName(query) : inText(m.tokens, step.row)} takes `, bold(percent(step.weight)), " from ",
    bold(quotedToken(m.tokens[step.key])), ` (token ${step.key}).`];
  if (whole > .95) finding.unshift(`Almost all of this rollout (${percentOfWhole(whole)}) is from the ${sinkName(m)}; the shares below are of the rest. `);
  return makeHeadline(`The flow to ${positionName(query)}${top < m.names.length - 1 ? `, up to layer ${m.names[top]}` : ""}`, finding);
}
const makeHeadline = (title, finding) => make("div", { class: "headline" }, make("h2", { text: title }),
  make("p", { class: "finding", "aria-live": "polite" }, ...finding));
function flowCaption(m, { edges, reached: [bottom], whole, top, query, left }) {
  const sources = [...bottom.keys()].filter(key => bottom[key] >= 0.0005).sort((a, b) => bottom[b] - bottom[a]).slice(0, 3), chosen = map();
  const source = key => `${key === query ? "its own position" : named(m.tokens, key)} (${percent(bottom[key])})`;
  const drawn = edges.filter(edge => !edge.place).reduce((sum, edge) => sum + edge.weight, 0);
  const collects = m.causal && top > 4 && sources[0] < 2 && query > 1 && bottom[sources[0]] > .8;
  const text = [m !== chosen && `“${chosen.title}” has no layers to draw, so this is the flow of “${m.title}”.`,
    `Down to the input, most comes from ${sources.map(source).join(", ")}.`,
    left.size && `These are shares of what is not from the ${sinkName(m)}, which ${left.size > 1 ? "have" : "has"} ${percentOfWhole(whole)} of the whole; `
      + "the numbers beside the layers are what each layer takes from there.",
    collects && "In causal models, a rollout through many layers collects at the first positions, so read its upper layers.",
    `${m.title}: a rollout${m.heads ? " of the mean over heads" : ""}${m.residual ? `, with a residual weight of ${m.residual}` : ""}`
      + `${m.residual && m.provenance.sink && !left.size ? " (more in rows that gave weight to an attention sink)" : ""}.`,
    `Edges below ${percent(state.threshold)} are not drawn, and a path whose drawing ends continues below that share; at the input, ${percent(drawn)} is drawn.`].filter(Boolean).join(" ");
  return make("p", { class: "caption", "data-share": drawn, "data-left": whole, text });
}
const writeHeads = heads => heads.slice(0, 8).map(([head, score]) => `head ${head}: ${shown(score)}`);
async function headsOf(m, edge) {
  if (!m.heads) return "this map has no heads";
  const layer = await packedLayer(m, edge.place), row = new Float32Array(layer.keys);
  const heads = Array.from({ length: m.heads }, (_, head) => [head, readRow(layer, head, edge.row, row)[edge.key]]);
  return `raw: ${writeHeads(heads.sort((a, b) => b[1] - a[1])).join(", ")}`;
}
// The switch of the sinks alone, because the position itself is always drawn.
function sinkChoice() {
  const node = numberChoices();
  node.querySelector("[data-option=diagonal]")?.remove();
  node.hidden = !map().sinks.length;
  return node;
}
flowView.takes = flowIsOffered;
flowView.options = () => [mapChoice(), layerSlider(), slide("threshold", "smallest share", { min: .005, max: .3, step: .005 },
  share => `${+(100 * share).toFixed(1)} %`), sinkChoice()];
flowView.isUpward = true;

// ------------------------------------------------------------------ views: tree
const KINDS = new Map(Object.entries({ resid_pre: "before the layer", resid_mid: "after attention", mlp_out: "feed-forward",
  resid_post: "after the layer" }));
const stageOf = node => node.level ? `${node.kind ? `${KINDS.get(node.kind) || node.kind}, ` : "after "}layer ${node.layer}` : "input of the first layer";
// Return the tree or routes from another position, computed from the map's numbers; for a graph that was given, its part
// that leads to the chosen node.
async function rooted(packed) {
  const m = maps().find(candidate => candidate.label === packed.of);
  const cut = Number.isFinite(state.cut) ? state.cut : packed.options.threshold;
  if (m && state.query === packed.nodes[packed.roots[0]].position && cut === packed.options.threshold) return packed;
  if (m) return (packed.shares ? growRoutes : growTree)(m, packed, state.query, cut);
  return packed.nodes[state.node] && !packed.roots.includes(state.node) ? { ...partOf(packed, [state.node]), isPart: true } : packed;
}
// Return the part of a graph that leads to some nodes, without the nodes at some positions. `source` has the index that each
// node had before.
function partOf(tree, roots, without = new Set()) {
  const entering = new Map(), edges = [], index = new Map();
  for (const edge of tree.edges) if (!without.has(tree.nodes[edge[0]].position)) {
    if (!entering.has(edge[1])) entering.set(edge[1], []);
    entering.get(edge[1]).push(edge);
  }
  const keep = node => index.has(node) || index.set(node, index.size);
  // A graph without a root is kept whole.
  (roots.length ? roots : [...tree.nodes.keys()].filter(node => !without.has(tree.nodes[node].position))).forEach(keep);
  for (const node of index.keys()) for (const edge of entering.get(node) || []) { keep(edge[0]); edges.push(edge); }
  const kept = [...index.keys()];
  return { ...tree, source: kept.map(node => tree.source ? tree.source[node] : node), nodes: kept.map(node => tree.nodes[node]),
    roots: roots.map(node => index.get(node)), edges: edges.map(([start, end, values]) => [index.get(start), index.get(end), values]) };
}
// Return the sum over heads of each layer, with 0 for hidden keys, and the largest sum. A map is read once.
const sumsOf = m => once(m, "sums", () => Promise.all(m.names.map(async (_, place) => {
  const layer = await packedLayer(m, place), { rows, keys } = layer, sum = new Float64Array(rows * keys), row = new Float32Array(keys);
  for (let head = 0; head < Math.max(1, m.heads); head++) for (let query = 0; query < rows; query++) {
    readRow(layer, head, query, row);
    for (let key = 0; key < keys; key++) sum[query * keys + key] += row[key] || 0;
  }
  return { sum, largest: sum.reduce((most, x) => Math.max(most, x), -Infinity) };
})));
// Return the attribution tree of a position (Hao et al., 2021, algorithm 1), as lm.attribution_tree with cost=0 does.
async function growTree(m, packed, root, threshold) {
  const layers = await sumsOf(m), count = m.tokens.length, levels = new Map([[root, layers.length]]), edges = [];
  for (let place = layers.length - 1; place >= 0; place--) {
    const { sum, largest } = layers[place], candidates = [];
    // A token that was added through this layer adds no others through it.
    if (largest > 0) for (const query of [...levels.keys()].sort((a, b) => a - b)) for (let key = 0; key < count; key++) {
      const weight = sum[query * count + key];
      if (weight / largest > threshold) candidates.push({ query, key, weight, share: weight / largest });
    }
    for (const { query, key, weight, share } of candidates.sort((a, b) => b.share - a.share)) {
      if (levels.has(key)) continue;
      levels.set(key, place);
      edges.push([key, query, { weight, share, layer: m.names[place] }]);
    }
  }
  const nodes = [...levels].map(([position, level]) => ({ level, position, token: m.tokens[position], layer: level ? m.names[level - 1] : m.names[0] - 1 }));
  const index = new Map(nodes.map((node, i) => [node.position, i]));
  return { ...packed, options: { ...packed.options, threshold }, computed: m, roots: [0], whole: [nodes.length, edges.length], nodes,
    edges: edges.map(([key, query, values]) => [index.get(key), index.get(query), values]) };
}
const ROUTE_KINDS = ["resid_mid", "mlp_out", "resid_post"];
// Return the routes to a position, as lens_mix.graphs.information_flow_routes does.
async function growRoutes(m, packed, root, threshold) {
  const layers = await Promise.all(m.names.map((_, place) => packedLayer(m, place))), { resid_pre, resid_mid, parallel } = packed.shares;
  const count = m.tokens.length, index = new Map(), nodes = [], edges = [];
  const nodeAt = (level, position) => {
    const key = level * count + position, place = Math.floor((level - 1) / 3);
    if (!index.has(key)) index.set(key, nodes.push({ level, position, token: m.tokens[position], layer: level ? m.names[place] : m.names[0] - 1,
      kind: level ? ROUTE_KINDS[(level - 1) % 3] : "resid_pre" }) - 1);
    return index.get(key);
  };
  const add = (node, level, position, values) => edges.push([nodeAt(level, position), node, { ...values, layer: nodes[node].layer }]);
  nodeAt(3 * layers.length, root);
  for (let node = 0; node < nodes.length; node++) {
    const { level, position, kind } = nodes[node], place = Math.floor((level - 1) / 3);
    if (kind === "resid_mid") {
      const rowOfHead = (_, head) => readRow(layers[place], head, position, new Float32Array(count));
      const heads = Array.from({ length: Math.max(1, m.heads) }, rowOfHead);
      const own = resid_pre[place][position];
      for (let key = 0; key < count; key++) {
        const above = [];
        // The residual has an edge of its own, so each head's equal share of it is subtracted.
        heads.forEach((scores, head) => {
          const weight = (scores[key] || 0) - (key === position ? own / heads.length : 0);
          if (weight > threshold) above.push([head, weight]);
        });
        const attention = above.reduce((sum, [, weight]) => sum + weight, 0), residual = key === position && own > threshold ? own : 0;
        if (attention || residual) add(node, level - 1, key, { weight: attention + residual, attention, residual,
          ...(m.heads && { heads: above.sort((a, b) => b[1] - a[1]) }) });
      }
    } else if (kind === "mlp_out") add(node, parallel[place] ? 3 * place : level - 1, position, { weight: 1 });
    else if (kind === "resid_post") {
      if (resid_mid[place][position] > threshold) add(node, level - 2, position, { weight: resid_mid[place][position] });
      if (m.feed_forward[place][position] > threshold) add(node, level - 1, position, { weight: m.feed_forward[place][position] });
    }
  }
  const strongest = [...edges].sort((a, b) => b[2].weight - a[2].weight).slice(0, packed.most_edges);
  return { ...packed, options: { ...packed.options, threshold }, computed: m, roots: [0], whole: [nodes.length, edges.length], nodes, edges: strongest };
}
// The node that a given graph is reduced to, and the threshold of a computed graph; null: as it was made.
Object.assign(state, { node: null, cut: null });
let settledTree = null;
// Node and threshold are those of one graph, so another graph is shown as it was made.
function settleTree() {
  const here = `${state.prompt}/${state.tree}`;
  if (settledTree !== null && settledTree !== here) Object.assign(state, { node: null, cut: null });
  settledTree = here;
}
async function treeView(view) {
  settleTree();
  const packed = trees()[state.tree], whole = await rooted(packed), m = map(), isText = same(whole.tokens, m.tokens);
  const roots = new Set(whole.roots.map(node => whole.nodes[node].position));
  const left = new Set(state.first || !isText ? [] : m.sinks.filter(key => !roots.has(key))), tree = left.size ? partOf(whole, whole.roots, left) : whole;
  const root = tree.nodes[tree.roots[0]], title = packed.of ? m.title : tree.name;
  const name = root && isText && root.position === state.query ? positionName(state.query) : root && nodeName(root);
  view.append(makeHeadline(`${title}${root ? `: what leads to ${name}` : ""}`, root ? treeFinding(tree, root) : []), treeCaption(tree, whole, packed, left));
  const choose = (position, index) => packed.of ? set({ query: position })
    : set({ ...(index >= 0 && { node: tree.source ? tree.source[index] : index }), ...(isText && { query: position }) });
  const score = m.provenance.has_tree ? "attribution score" : "score";
  drawGraph(view, { title: `${title}${root ? ` to ${nodeName(root)}` : ""}`, tokens: tokensOf(tree), chosen: isText ? state.query : -1,
    ...treeMarks(tree), roots: tree.roots, levels: [], levelNames: layerNamesOf(tree), beside: null, unitName: tree.shares ? "importance, 0 to 1" : tree.options.order ? score : "weight",
    format: twoDigits, shareName: tree.nodes.some(hasShare) && "share", legend: "feed-forward", choose });
  exported = () => ({ options: tree.options, rows: tree.edges.map(([start, end, values]) => ({ tree: tree.name, layer: layerOfEdge(tree, [start, end, values]),
    from_level: tree.nodes[start].level, key: tree.nodes[start].position, key_token: tree.nodes[start].token, to_level: tree.nodes[end].level,
    query: tree.nodes[end].position, query_token: tree.nodes[end].token, value: values.weight })) });
}
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const twoDigits = x => String(+x.toPrecision(2));
const hasShare = node => typeof node.share === "number";
const nodeName = node => `${node.position} “${shortened(plain(node.token), 24)}”`;
const layerOfEdge = (tree, [, end, values]) => values.layer ?? tree.nodes[end].layer;
// Return the tokens by position; a position without a known token has its number.
function tokensOf(tree) {
  if (tree.tokens.length) return tree.tokens;
  const known = new Map(tree.nodes.map(node => [node.position, node.token]));
  return Array.from({ length: 1 + Math.max(...known.keys()) }, (_, position) => known.get(position) ?? String(position));
}
// Return the name of one level per layer, the last of the layer.
function layerNamesOf(tree) {
  const last = new Map([...tree.nodes].sort((a, b) => a.level - b.level).map(node => [node.layer, node.level]));
  return new Map([...last].map(([layer, level]) => [level, layer === undefined ? String(level) : level ? String(layer) : "input"]));
}
// Return the nodes and edges as `drawGraph` takes them.
function treeMarks(tree) {
  const into = tree.nodes.map(() => []), out = tree.nodes.map(() => []);
  for (const edge of tree.edges) { into[edge[1]].push(edge); out[edge[0]].push(edge); }
  const list = (some, other) => some.slice(0, 6).map(edge => `${nodeName(tree.nodes[edge[other]])} ${shown(edge[2].weight)}`).join(", ")
    + (some.length > 6 ? `, and ${some.length - 6} more` : "");
  const nodes = tree.nodes.map((node, place) => ({ level: node.level, position: node.position, mark: node.kind === "mlp_out" ? "square" : "circle",
    share: hasShare(node) ? node.share : undefined, small: node.kind === "resid_mid" || node.kind === "resid_mid_cross",
    say: () => [`${stageOf(node)}: ${nodeName(node)}`, hasShare(node) && `share ${shown(node.share)}`, into[place].length && `from ${list(into[place], 0)}`,
      out[place].length && `to ${list(out[place], 1)}`].filter(Boolean).join("\n") }));
  const edges = tree.edges.map(edge => {
    const [start, end, values] = edge, others = Object.keys(values).filter(key => key !== "weight" && typeof values[key] === "number" && key !== "layer");
    return { start, end, weight: values.weight, say: () => [`layer ${layerOfEdge(tree, edge)}: ${nodeName(tree.nodes[end])} from ${nodeName(tree.nodes[start])}`,
      `weight ${shown(values.weight)}`, ...others.map(key => `${key.replace("_", " ")} ${shown(values[key])}`),
      ...(Array.isArray(values.heads) ? writeHeads(values.heads) : [])].join("\n") };
  });
  return { nodes, edges };
}
// Return a sentence about the strongest step. A weight is a share of its end alone, so it is one that ends at the root's
// position, if there is one.
function treeFinding(tree, root) {
  const moved = tree.edges.filter(([start, end]) => tree.nodes[start].position !== tree.nodes[end].position)
    .sort((a, b) => Math.abs(b[2].weight) - Math.abs(a[2].weight));
  const step = moved.find(([, end]) => tree.nodes[end].position === root.position) || moved[0];
  if (!step) return [`Nothing from another position is above the threshold${tree.of ? "; a smaller one may show more" : ""}.`];
  const [from, to] = [tree.nodes[step[0]], tree.nodes[step[1]]];
  return ["The strongest step to it: through ", bold(`layer ${layerOfEdge(tree, step)}`), ", from ", bold(quotedToken(from.token)), ` (token ${from.position})`,
    to.position === root.position ? ", " : ` to ${quotedToken(to.token)} (token ${to.position}), `, bold(twoDigits(step[2].weight)), "."];
}
function treeCaption(tree, whole, packed, left) {
  const error = tree.computed && Math.max(...tree.computed.layers.map(layer => layer.error));
  const text = [tree.isPart ? `This is a part of the given graph of ${packed.nodes.length} nodes.` : rule(tree),
    `${counted(tree.nodes.length, "node")} and ${counted(tree.edges.length, "edge")} are drawn.`,
    !left.size && !tree.isPart && tree.edges.length < tree.whole[1] && `These are the largest of ${tree.whole[1]} edges.`,
    left.size && sinkOf(whole, tree, left, sinkName(map())),
    tree.computed && `Computed in the page, from numbers stored with an error of at most ${shown(error)}.`].filter(Boolean).join(" ");
  return make("p", { class: "caption", "data-pruned": tree.edges.length, text }, ...wayBack(tree, packed));
}
// Return the button that shows the graph as it was made, if another one is shown.
function wayBack(tree, packed) {
  if (!tree.computed && !tree.isPart) return [];
  const first = packed.nodes[packed.roots[0]], isCut = tree.options.threshold !== packed.options.threshold;
  const text = tree.isPart ? "back to the whole graph" : `back to ${nodeName(first)}${isCut ? ` and the threshold ${packed.options.threshold}` : ""}`;
  const onclick = () => set(tree.isPart ? { node: null } : { query: first.position, cut: null });
  return [" ", make("button", { type: "button", "data-whole": "", text, onclick })];
}
// Return a sentence about the edges that are left out, from sinks into the nodes that are drawn.
function sinkOf(whole, tree, left, name) {
  const drawn = new Set(tree.source), indexOf = node => whole.source ? whole.source[node] : node;
  const edges = whole.edges.filter(([start, end]) => left.has(whole.nodes[start].position) && drawn.has(indexOf(end)));
  if (!edges.length) return "";
  const largest = edges.reduce((most, edge) => Math.abs(edge[2].weight) > Math.abs(most[2].weight) ? edge : most);
  return `${counted(edges.length, "edge")} from the ${name} ${edges.length > 1 ? "are" : "is"} left out; the largest is `
    + `${twoDigits(largest[2].weight)}, to ${nodeName(whole.nodes[largest[1]])} in layer ${layerOfEdge(whole, largest)}.`;
}
// Return a sentence about the edges that were left out when the graph was made.
function rule({ options, nodes, whole }) {
  if (options.order) return `From the top, a token adds the tokens with a score above ${options.threshold} of the layer's largest, each `
    + `only once${options.cost ? `; branches with less than ${options.cost} per edge are removed` : ""}.`;
  if (options.by) return `Edges whose ${options.by} is not above ${options.threshold} are left out (${options.edges_before - whole[1]} of ${options.edges_before}).`;
  if (options.threshold !== undefined) return `Edges whose importance is not above ${options.threshold} are left out`
    + `${nodes.some(node => node.kind) ? ", top-down" : ""}.`;
  return "All edges of the given graph.";
}
// The threshold of a graph that the page can compute.
function cutChoice() {
  settleTree();
  const packed = trees()[state.tree], range = packed.shares ? { min: .005, max: .3, step: .005 } : { min: .02, max: .98, step: .02 };
  const node = slide("cut", "threshold", range), [input, output] = [node.querySelector("input"), node.querySelector("output")];
  node.hidden = !packed.of;
  node.sync = () => { input.value = state.cut ?? packed.options.threshold; output.textContent = input.value; };
  return node;
}
treeView.takes = () => trees().length > 0;
treeView.options = () => [treeChoice(), cutChoice(), sinkChoice()];
treeView.isUpward = true;
