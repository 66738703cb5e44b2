// ------------------------------------------------------------------ export
function offer(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
// A spreadsheet may compute some texts, and readers of CSV may take some for a number or a missing value. These are
// written as JSON strings, as in lens_mix/tables.py.
const MISREAD = [/^\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|^"/, /[\0-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\p{Cs}]/u,
  /^\s*(|n\/?a|nan|null|none|<na>|#n\/?a( n\/a)?|1\.#(ind|qnan)|true|false|inf(inity)?|(\d+\.?\d*|\.\d+)(e[+-]?\d*)?)\s*$/i];
const written = value => typeof value !== "string" ? String(value ?? "") : !MISREAD.some(pattern => pattern.test(value)) ? value
  : JSON.stringify(value).replace(/[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]/g, c => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
const quoted = text => /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
// Characters that XML does not allow, as a lone surrogate, become \ufffd.
const forXml = text => text.replace(/[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\p{Cs}]/gu, "\ufffd");
// Return what the row of a position explains, as columns; the page's own position is the default.
function explainedColumns(query) {
  const { prediction, probability, target, value } = explainedAt(query);
  return { prediction: prediction ?? null, probability: probability ?? null, target: target ?? null, target_value: value ?? null };
}
async function save(kind) {
  const { rows: found = [], options } = exported(), name = `lens_mix-${state.view}`, columnsOf = new Map();
  const rows = found.map(row => {
    const query = row.query ?? state.query;
    if (!columnsOf.has(query)) columnsOf.set(query, explainedColumns(query));
    return { ...row, ...columnsOf.get(query) };
  });
  if (kind === "csv") {
    const columns = rows.length ? Object.keys(rows[0]) : [];
    return offer(`${name}.csv`, new Blob([[columns, ...rows.map(row => columns.map(column => row[column]))]
      .map(line => line.map(value => quoted(written(value))).join(",")).join("\n")], { type: "text/csv" }));
  }
  if (kind === "json") return offer(`${name}.json`, new Blob([JSON.stringify({ state,
    explained: { query: state.query, token: map().tokens[state.query], ...explainedAt(state.query) },
    provenance: map().provenance, notes: map().notes, options, rows }, null, 1)], { type: "application/json" }));
  const svg = pictured(), text = forXml(new XMLSerializer().serializeToString(svg));
  if (kind === "svg") return offer(`${name}.svg`, new Blob([text], { type: "image/svg+xml" }));
  const image = new Image(), [width, height] = ["width", "height"].map(side => +svg.getAttribute(side));
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  // Browsers limit a canvas to 16,384 pixels a side.
  const canvas = make("canvas"), scale = Math.min(2, 16000 / Math.max(width, height));
  canvas.width = Math.ceil(width * scale); canvas.height = Math.ceil(height * scale);
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob(blob => offer(`${name}.png`, blob));
}

// Return the answer, the view, and the lines below it about its source, as one SVG. The elements become rectangles, text and
// pictures at the places and in the colors that they have on the screen.
function pictured() {
  // Whatever scrolls is shown from its start, and in full.
  const panes = [$("view"), ...$("view").querySelectorAll(".pane")].map(pane => [pane, pane.scrollLeft]);
  for (const [pane] of panes) pane.scrollLeft = 0;
  document.body.classList.add("pictured");
  const sections = [$("question"), $("model"), $("answer"), $("headline"), $("view"), $("about"), $("notes")], svg = draw("svg", {});
  const base = { left: $("answer").getBoundingClientRect().left - 14, top: document.querySelector("header").getBoundingClientRect().top };
  const measure = make("canvas").getContext("2d"), far = { x: 0, y: 0 };
  const put = (name, box, attributes, text) => {
    far.x = Math.max(far.x, box.right - base.left); far.y = Math.max(far.y, box.bottom - base.top);
    const node = draw(name, { x: (box.left - base.left).toFixed(2), y: (box.top - base.top).toFixed(2), ...attributes }, text);
    svg.append(node);
    return node;
  };
  const sides = box => ({ width: box.width.toFixed(2), height: box.height.toFixed(2) });
  const walk = element => {
    const style = getComputedStyle(element), box = element.getBoundingClientRect();
    if (style.display === "none" || element.matches(".visually-hidden, details, [data-detail=hint]")) return;
    if (element.localName === "canvas") return void put("image", box, { ...sides(box), href: element.toDataURL() });
    if (element.localName === "svg") return void put("svg", box, sides(box)).append(...[...element.children].map(plainSvg));
    if (style.borderTopStyle === "dashed") put("rect", box, { ...sides(box), rx: 6, fill: "none", stroke: style.borderTopColor,
      "stroke-width": style.borderTopWidth, "stroke-dasharray": "5 3" });
    const filled = style.backgroundColor !== "rgba(0, 0, 0, 0)", framed = style.outlineStyle === "solid";
    if (filled || framed) for (const rect of element.getClientRects()) put("rect", rect, { ...sides(rect), rx: 3, "fill-opacity": style.opacity,
      fill: filled ? style.backgroundColor : "none", ...(framed && { stroke: style.outlineColor, "stroke-width": style.outlineWidth }) });
    for (const child of element.childNodes) {
      if (child.nodeType === Node.ELEMENT_NODE) walk(child);
      else if (child.nodeType === Node.TEXT_NODE) for (const [text, line] of linesOf(child)) {
        measure.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
        put("text", line, { y: (line.top - base.top + measure.measureText("x").fontBoundingBoxAscent).toFixed(2), fill: style.color,
          "fill-opacity": style.opacity, "font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight },
        // SVG drops ordinary spaces at the ends of a text.
        text.replace(/^ +| +$| {2,}/g, spaces => "\u00a0".repeat(spaces.length)));
      }
    }
  };
  sections.forEach(walk);
  document.body.classList.remove("pictured");
  for (const [pane, left] of panes) pane.scrollLeft = left;
  const [width, height] = [far.x + 14, far.y + 10].map(Math.ceil);
  svg.prepend(draw("rect", { width, height, fill: css("--ground") }));
  for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(key, value);
  return svg;
}
// Return a copy of a drawing that needs no style sheet.
function plainSvg(node) {
  const copy = node.cloneNode(false), style = getComputedStyle(node);
  copy.append(...[...node.childNodes].map(child => child.nodeType === Node.ELEMENT_NODE ? plainSvg(child) : child.cloneNode()));
  for (const name of ["fill", "stroke", "stroke-width", "stroke-linecap", "stroke-dasharray", "font-family", "font-size", "font-weight"])
    if (style.getPropertyValue(name) !== "none") copy.setAttribute(name, style.getPropertyValue(name));
  for (const name of ["class", "role", "tabindex"]) copy.removeAttribute(name);
  return copy;
}
// Return the lines of a text as the browser breaks it, with their boxes.
function linesOf(node) {
  const range = document.createRange(), lines = [];
  range.selectNodeContents(node);
  if (range.getClientRects().length < 2) return range.getClientRects().length ? [[node.data, range.getBoundingClientRect()]] : [];
  let place = 0;
  for (const c of node.data) {
    range.setStart(node, place);
    range.setEnd(node, place += c.length);
    const box = range.getBoundingClientRect(), last = lines[lines.length - 1];
    if (!box.width) continue;
    if (last && Math.abs(last[1].top - box.top) < 2) {
      last[0] += c;
      last[1] = new DOMRect(Math.min(last[1].left, box.left), last[1].top,
        Math.max(last[1].right, box.right) - Math.min(last[1].left, box.left), box.height);
    } else lines.push([c, box]);
  }
  return lines;
}
