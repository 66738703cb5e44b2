// ------------------------------------------------------------------ colors
// Colors of one hue, from the ground to a dark blue (in the dark: a light one); negative numbers are orange. Blue and
// orange differ for all kinds of color blindness. A legend maps its colors to numbers.
let ramps = null;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = name => css(name).split(",").map(Number);
function findRamps() {
  if (ramps) return ramps;
  const ground = channels("--heat-0"), ramp = stops => Array.from({ length: 256 }, (_, i) => {
    const x = i / 255 * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(x));
    return stops[low].map((from, channel) => Math.round(from + (stops[low + 1][channel] - from) * (x - low)));
  });
  const [up, down] = ["--heat", "--cool"].map(name => ramp([ground, channels(`${name}-1`), channels(`${name}-2`)]));
  ramps = { up, down, hidden: channels("--hidden-key") };
  return ramps;
}
// Return how strong the color of a number is, 0 to 1, if 1 is the largest. The logarithm covers four orders.
const SCALES = { root: Math.sqrt, linear: x => x, log: x => Math.max(0, 1 + Math.log10(x) / 4) };
const strength = x => x <= 0 ? 0 : x >= 1 ? 1 : SCALES[state.scale](x);
// Return the number that has a strength.
const ofStrength = s => state.scale === "log" ? 10 ** (4 * (s - 1)) : state.scale === "root" ? s * s : s;
// Return whether the keys that are colored have next to nothing: less than 1 % each, where those without a color have more
// than 90 % (as in lens_mix/view/strongest.py). The scale then ends at the whole row, so that noise is not drawn as a finding.
const isNoise = (most, left, total) => most < .01 * total && left > .9 * total;
function rgb(x, most) {
  const { up, down, hidden } = findRamps();
  if (Number.isNaN(x)) return hidden;
  return (x < 0 ? down : up)[Math.round(255 * strength(most ? Math.abs(x) / most : 0))];
}
const color = (x, most) => `rgb(${rgb(x, most)})`;
const luminance = ([r, g, b]) => [[.2126, r], [.7152, g], [.0722, b]].reduce((sum, [weight, value]) => {
  const x = value / 255;
  return sum + weight * (x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
}, 0);
// Return black or white, whichever is easier to read on a color.
const inkOn = channels => { const light = luminance(channels) + .05; return light / .05 > 1.05 / light ? "#000" : "#fff"; };

// ------------------------------------------------------------------ canvas
const FONT = "system-ui, -apple-system, \"Segoe UI\", Roboto, \"Noto Sans\", sans-serif";
function sizeCanvas(canvas, width, height) {
  const sharp = Math.min(Math.max(window.devicePixelRatio || 1, 1), 2), context = canvas.getContext("2d");
  canvas.width = Math.round(width * sharp); canvas.height = Math.round(height * sharp);
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  context.setTransform(sharp, 0, 0, sharp, 0, 0);
  context.font = `11px ${FONT}`;
  context.textBaseline = "middle";
  return context;
}
function canvasOf(width, height, attributes = {}) {
  const canvas = make("canvas", attributes);
  return { canvas, context: sizeCanvas(canvas, width, height) };
}
// Draw [rows × columns] numbers into a box. If several cells share a pixel, it shows the strongest one. `at(row, column)`
// returns a number, NaN for a hidden key and null for a cell to leave out; `most` is the largest, or that of a row.
const sheet = document.createElement("canvas");
function heat(context, box, rows, columns, at, most) {
  // All keys may be shown as numbers beside the cells: the first position reads itself alone.
  if (!rows || !columns) return;
  const [left, top, width, height] = box, pixels = context.getTransform().a;
  const across = Math.min(columns, Math.max(1, Math.floor(width * pixels))), down = Math.min(rows, Math.max(1, Math.floor(height * pixels)));
  const best = new Float32Array(across * down).fill(-1), colors = new Uint8ClampedArray(4 * across * down);
  const { hidden } = findRamps();
  for (let row = 0; row < rows; row++) {
    const line = Math.floor(row * down / rows) * across, scale = typeof most === "function" ? most(row) : most;
    for (let column = 0; column < columns; column++) {
      const x = at(row, column), pixel = line + Math.floor(column * across / columns);
      if (x === null) continue;
      const s = Number.isNaN(x) ? -.5 : scale ? Math.abs(x) / scale : 0;
      if (s <= best[pixel]) continue;
      best[pixel] = s;
      const c = s < 0 ? hidden : rgb(x, scale);
      colors[4 * pixel] = c[0]; colors[4 * pixel + 1] = c[1]; colors[4 * pixel + 2] = c[2]; colors[4 * pixel + 3] = 255;
    }
  }
  if (sheet.width < across) sheet.width = across;
  if (sheet.height < down) sheet.height = down;
  const paper = sheet.getContext("2d", { willReadFrequently: true });
  paper.putImageData(new ImageData(colors, across, down), 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(sheet, 0, 0, across, down, left, top, width, height);
}
const placeBox = (box, ...sides) => ["left", "top", "width", "height"].forEach((side, i) => { box.style[side] = `${sides[i]}px`; });
function upright(context, text, x, y, align = "left") {
  context.save();
  context.translate(x, y);
  context.rotate(-Math.PI / 2);
  context.textAlign = align;
  context.fillText(text, 0, 0);
  context.restore();
}
// Return the places whose labels fit; the largest ones get theirs first.
function spaced(sizes, zoom, count, most = 90) {
  const apart = Math.max(1, Math.ceil(13 / zoom)), taken = [];
  for (const place of [...sizes.keys()].sort((a, b) => sizes[b] - sizes[a]).slice(0, 400))
    if (taken.length < most && taken.every(other => Math.abs(other - place) >= apart)) taken.push(place);
  return taken.filter(place => place < count);
}
// Follow the pointer over a canvas: `find(x, y)` returns a cell or null, `tell(cell)` its text, `choose(cell)` reacts to a
// click, and `pass(cell)` to every move.
function follow(canvas, find, tell, choose, pass = () => {}) {
  const at = event => { const box = canvas.getBoundingClientRect(); return find(event.clientX - box.left, event.clientY - box.top); };
  canvas.addEventListener("mousemove", async event => {
    const cell = at(event);
    canvas.style.cursor = cell ? "pointer" : "";
    pass(cell);
    tip(event, cell && await tell(cell));
  });
  canvas.addEventListener("mouseleave", () => { tip(); pass(null); });
  canvas.addEventListener("click", event => { const cell = at(event); if (cell) choose(cell); });
}

// ------------------------------------------------------------------ legend
// Return a strip of colors with the numbers that they mean below it.
function legend(most, isSigned, name, format = shownUnit) {
  const width = isSigned ? 240 : 150, { canvas, context } = canvasOf(width, 8, { "aria-hidden": "true" }), { up, down } = findRamps();
  for (let x = 0; x < width; x++) {
    const s = isSigned ? 2 * x / (width - 1) - 1 : x / (width - 1);
    context.fillStyle = `rgb(${(s < 0 ? down : up)[Math.round(255 * Math.abs(s))]})`;
    context.fillRect(x, 0, 1, 8);
  }
  // The logarithm has no zero: its first color is that of all smaller numbers.
  const middle = format(most * ofStrength(.5)), lowest = state.scale === "log" ? `≤ ${format(most * ofStrength(0))}` : "0";
  const ticks = [...(isSigned ? [format(-most), format(-most * ofStrength(.5))] : []), lowest, middle, format(most)];
  const below = make("span", { class: "ticks" }, ...ticks.map(text => make("span", { text })));
  return make("span", { class: "scale" }, make("span", { class: "strip" }, canvas, below), ` ${name}`);
}
