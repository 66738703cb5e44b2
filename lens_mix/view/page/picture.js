// ------------------------------------------------------------------ a picture or a waveform, with a row over it
// What a position of a map is called, and many of them, and how its number is announced.
const nounOf = m => m.grid ? m.grid.noun : "token";
const nounsOf = m => m.grid ? (m.grid.noun === "patch" ? "patches" : "frames") : "tokens";
// The positions of a decoder's rows are tokens, also where it reads the frames of a sound.
const rowNoun = m => m.keys ? "token" : nounOf(m);
const numberName = m => m.grid && !m.keys ? "position" : "token";
const PICTURE = 400, SMALL_PICTURE = 128, WAVE = 70, STRIP = 26;

// Return the image of this prompt, or null; it is read once.
const images = new Map();
function imageOf(prompt) {
  if (!images.has(prompt)) images.set(prompt, DATA.pictures[prompt] ? new Promise(resolve => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = () => resolve(null);
    image.src = DATA.pictures[prompt];
  }) : Promise.resolve(null));
  return images.get(prompt);
}
// Return the left, top, width and height of a cell in a canvas. The lowest band of a spectrogram is at the bottom.
function cellBox(grid, cell, width, height) {
  const row = Math.floor(cell / grid.columns), column = cell % grid.columns, [tall, wide] = grid.size;
  const across = width / wide, down = height / tall, top = row * grid.step[0];
  const bottom = row === grid.rows - 1 ? top + grid.patch[0] : top + grid.step[0];
  const right = (column === grid.columns - 1 && !grid.sound ? grid.patch[1] : grid.step[1]) * across;
  return [column * grid.step[1] * across, (grid.sound ? tall - bottom : top) * down, right, (bottom - top) * down];
}
// Draw a row over the picture, or below the waveform, and return the size.
function paintPicture(context, m, image, row, most, width, wave) {
  const { grid } = m, isWave = grid.noun === "frame";
  const height = heightOf(grid, image, width, wave);
  context.clearRect(0, 0, width, height);
  if (wave) paintWave(context, DATA.waves[state.prompt], width);
  if (!isWave && image) {
    context.drawImage(image, 0, 0, width, height);
    // The picture becomes grey and light, so that only scores have a color.
    context.globalCompositeOperation = "saturation";
    context.fillStyle = "hsl(0, 0%, 50%)";
    context.fillRect(0, 0, width, height);
    context.globalCompositeOperation = "source-over";
    context.fillStyle = `rgba(${channels("--heat-0")}, .45)`;
    context.fillRect(0, 0, width, height);
  }
  const top = isWave ? wave : 0, inner = height - top;
  grid.positions.forEach((key, cell) => {
    const x = row[key], [left, above, across, down] = cellBox(grid, cell, width, inner);
    if (Number.isNaN(x) || !most) return;
    context.globalAlpha = isWave || !image ? 1 : .9 * Math.sqrt(Math.min(1, Math.abs(x) / most));
    context.fillStyle = color(x, most);
    context.fillRect(left, top + above, across, down);
  });
  context.globalAlpha = 1;
  const chosen = grid.positions.indexOf(state.query);
  if (chosen >= 0 && !m.keys) {
    const [left, above, across, down] = cellBox(grid, chosen, width, inner);
    context.strokeStyle = css("--accent");
    context.lineWidth = 2;
    context.strokeRect(left, isWave ? 1 : above, across, isWave ? height - 2 : down);
  }
}
function paintWave(context, wave, width) {
  if (!wave) return;
  const most = Math.max(...wave.map(([low, high]) => Math.max(-low, high))) || 1;
  context.fillStyle = css("--ink");
  wave.forEach(([low, high], i) => {
    const top = WAVE / 2 * (1 - high / most), bottom = WAVE / 2 * (1 - low / most);
    context.fillRect(i * width / wave.length, top, Math.max(1, width / wave.length), Math.max(1, bottom - top));
  });
}
// What the model read may have other proportions than the part of the picture that was resized to it.
const ratioOf = (grid, image) => image ? image.naturalHeight / image.naturalWidth : grid.size[0] / grid.size[1];
const heightOf = (grid, image, width, wave) => grid.noun === "frame" ? wave + STRIP : width * ratioOf(grid, image);
// Return the largest width at which neither side of a picture is longer than this.
const widthOf = (grid, image, side) => Math.min(side, side / ratioOf(grid, image));
// Return a canvas with a row; a click on a cell chooses its position. `wave` is the height of a waveform, 0 for none.
function pictureCanvas(m, image, row, most, width, wave, name) {
  const { grid } = m, height = heightOf(grid, image, width, wave), { canvas, context } = canvasOf(width, height, { role: "img", "aria-label": name });
  paintPicture(context, m, image, row, most, width, wave);
  const isWave = grid.noun === "frame", top = isWave ? wave : 0;
  const find = (x, y) => {
    const cell = grid.positions.findIndex((_, i) => {
      const [left, above, across, down] = cellBox(grid, i, width, height - top);
      return x >= left && x < left + across && (isWave || y >= above && y < above + down);
    });
    return cell < 0 ? null : { key: grid.positions[cell] };
  };
  follow(canvas, find, ({ key }) => tellToken(keysOf(m), key, row), ({ key }) => m.keys || choosePosition(key), cell => linkPanels(cell && cell.key));
  return canvas;
}
let pictureDraws = 0;
async function drawPicture(found, row, pale, most) {
  const box = $("picture"), m = map(), version = ++pictureDraws;
  box.hidden = !m.grid;
  if (!m.grid || !found || !found.m.grid) return box.replaceChildren();
  const image = await imageOf(state.prompt), inner = $("answer").clientWidth - 8;
  const width = m.grid.noun === "frame" ? Math.min(720, inner) : widthOf(m.grid, image, Math.min(PICTURE, inner));
  const parts = [pictureCanvas(m, image, row, most, width, m.grid.noun === "frame" ? WAVE : 0, `${found.name}, over the picture`)];
  const inside = new Set(m.grid.positions), outside = m.keys ? [...row.keys()].filter(key => !inside.has(key)) : [];
  if (outside.length) parts.push(make("p", { class: "caption", text: `What is outside of the sound has ${percent(totalOf(row, outside))} of the row.` }));
  if (image) parts.push(make("p", { class: "caption", text: `The row is drawn ${DATA.picture_words[state.prompt]}.` }));
  if (found.m.kind === "layer" && found.m.names.length > 1) {
    const rows = (await rowsOf(found.m, headShown(found.m), state.query)).map(sharesOf), strip = make("div", { class: "layers-of-picture" });
    rows.forEach((each, place) => {
      const own = m.keys ? -1 : state.query, cells = m.grid.positions.filter(key => key !== own && !Number.isNaN(each[key]));
      const largest = Math.max(0, ...cells.map(key => Math.abs(each[key]))), isPale = isNoiseRow(each, new Set([...m.sinks, own])), small = m.grid.noun === "frame" ? width : widthOf(m.grid, image, SMALL_PICTURE);
      strip.append(make("figure", {}, make("figcaption", { text: `${found.m.layer_names[place]}, a ${nounOf(m)} ≤ ${percent(largest)}${isPale ? ", not colored" : ""}` }),
        pictureCanvas(m, image, each, isPale ? size(each) : largest, small, 0, `${found.m.title}, ${found.m.layer_names[place]}`)));
    });
    parts.push(make("details", { open: pictureDetails(), ontoggle: event => { isOpen = event.target.open; } },
      make("summary", { text: `${found.m.title}, layer by layer: each on its own scale` }), strip));
  }
  if (version === pictureDraws) box.replaceChildren(...parts);
}
let isOpen = true;
const pictureDetails = () => isOpen ? "" : false;
