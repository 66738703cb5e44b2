"use strict";
// What all pages use: elements, stored numbers, numbers and tokens as text, and the tooltip.
// Tokens are only ever inserted as text (textContent, canvas text, SVG text), so that none can act as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const make = (name, attributes = {}, ...children) => {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
};
const draw = (name, attributes, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
};

// ------------------------------------------------------------------ numbers
// Return stored bytes: deflated, as base 64, between two places of one of two texts. The second text comes after this
// script, and is there when the whole file is.
const stored = [], parsed = new Promise(resolve => document.readyState === "loading" ? addEventListener("DOMContentLoaded", resolve) : resolve());
async function inflate([start, end, which]) {
  if (which) await parsed;
  stored[which] ??= $(which ? "later" : "numbers").textContent;
  const text = stored[which].slice(start, end);
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
function fromFloat16(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}
const shown = x => Number.isNaN(x) ? "hidden" : x === 0 ? "0"
  : Math.abs(x) >= 0.001 && Math.abs(x) < 10000 ? x.toPrecision(4) : x.toExponential(2);
function percent(x) {
  const whole = 100 * x, size = Math.abs(whole);
  return Number.isNaN(x) ? "hidden" : size === 0 ? "0 %" : size < 0.0001 ? "< 0.0001 %"
    : `${minus(size >= 9.95 ? whole.toFixed(0) : size >= 0.1 ? whole.toFixed(1) : whole.toPrecision(1))} %`;
}
// Return a number with a minus sign that is as wide as a digit.
const minus = text => String(text).replace(/^-/, "−");

// ------------------------------------------------------------------ tokens
const JOINER = 0x200d;
// Return a character as it is shown: those that have no shape, or turn the direction of the text, as ⟨their number⟩.
function withShape(c, i, all) {
  const point = c.codePointAt(0);
  if (c === "\n") return "↵";
  if (c === "\t") return "⇥";
  // The character that joins two emoji is kept, because they are drawn as one.
  if (point === JOINER && i && /^\p{Extended_Pictographic}/u.test(all[i + 1] || "")) return c;
  if (point < 32 || point === 127 || (point >= 0x200b && point <= 0x200f) || (point >= 0x202a && point <= 0x202e)
    || (point >= 0x2066 && point <= 0x2069) || (point >= 0xd800 && point <= 0xdfff) || point === 0xfffe || point === 0xffff)
    return "\u27e8" + point.toString(16) + "\u27e9";
  return c;
}
const visible = token => [...token].map(withShape).join("").replace(/^[Ġ▁]/, " ");
// A token that is a piece of a character is written as the character and the token's number, "é[1/2]".
const NUMBERED = /^(.+)(\[(\d{1,6})\/(\d{1,6})\])$/s;
// Return the text of neighbouring tokens; the pieces of a character become that character.
function joined(tokens) {
  const texts = [];
  for (let i = 0; i < tokens.length; i++) {
    const [, text, , first, count] = NUMBERED.exec(tokens[i]) || [];
    const whole = first === "1" && i + +count <= tokens.length && Array.from({ length: +count }, (_, j) => `${text}[${j + 1}/${count}]`)
      .every((token, j) => token === tokens[i + j]);
    texts.push(whole ? text : tokens[i]);
    if (whole) i += count - 1;
  }
  return texts.join("");
}
function shortened(token, count = 14) {
  const [, text, number] = NUMBERED.exec(token) || [null, token, ""], all = [...text];
  if (all.length <= count) return token;
  // Of "picture 1, 3,5", the place is what differs from patch to patch.
  const place = text.replace(/^picture (\d+), /, "$1: ");
  return (place === text ? all.slice(0, count - 1).join("") + "…" : place) + number;
}
// Special tokens, as in lens_mix/maps/words.py.
const SPECIAL = /^\s*(<(?!0x)[^<>\s]+>|\[[A-Z]+\d*\]|\[unused\d+\])\s*$/;
const SPACED = /^[\sĠ▁]/;
// Return a text as one line of words.
function asLine(m) {
  const tokens = m.tokens.filter(token => !SPECIAL.test(token)), hasSpaces = tokens.some(token => SPACED.test(token));
  return visible((hasSpaces ? joined(tokens) : tokens.join(" ")).replace(/[Ġ▁]/g, " ")).trim();
}
const plain = text => visible(text).trim() || visible(text);
const named = (tokens, place) => `${place} “${shortened(plain(tokens[place]), 24)}”`;
const quotedToken = token => `“${shortened(visible(token), 24)}”`;

// Return the positions and the text of a unit.
const spelled = (tokens, unit) => unit.length === 1 ? named(tokens, unit[0])
  : `${unit[0]}–${unit[unit.length - 1]} “${shortened(visible(joined(unit.map(i => tokens[i]))).trim(), 60)}”`;

function tip(event, text) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const x = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
  const y = event.clientY + 18 + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : event.clientY + 18;
  box.style.left = `${Math.max(4, x)}px`;
  box.style.top = `${Math.max(4, y)}px`;
}

const writeCount = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
// A note on how the prompt was read is not a warning, and has the color of the text.
const isCalm = note => /^(prepend_bos: the model read|picture: )/.test(note);
function writeNotes(notes) {
  const written = notes.map((note, i) => make("span", { class: isCalm(note) ? "" : "warning", text: `${i ? "; " : ""}${note}` }));
  $("notes").replaceChildren(...(notes.length ? [notes.length === 1 ? "Note: " : "Notes: ", ...written] : []));
}

// ------------------------------------------------------------------ around the page
// Buttons of which one is pressed.
function press(key, names, label) {
  const node = make("div", { class: "choice", role: "group", "aria-label": label }, ...names.map(([value, text]) => make("button", { type: "button",
    "data-option": key, "data-value": value, text, onclick: () => set({ [key]: value }) })));
  node.sync = () => { for (const button of node.children) button.setAttribute("aria-pressed", String(state[key] === button.dataset.value)); };
  return node;
}
// Tell the frame of a notebook how high the page is.
const tellHeight = () => { if (window.parent !== window) parent.postMessage({ lensMixHeight: document.documentElement.offsetHeight }, "*"); };
$("maximise").hidden = !document.fullscreenEnabled;
$("maximise").addEventListener("click", () => document.fullscreenElement ? document.exitFullscreen()
  : document.documentElement.requestFullscreen?.().catch(() => {}));
// The explanation is shown until the first click anywhere in the page. A sandboxed frame has no storage, so that it is
// shown there each time.
const TOUR = `lens_mix-tour-closed${document.body.dataset.page ?? ""}`;
try { $("tour").hidden = localStorage.getItem(TOUR) === "1"; } catch { $("tour").hidden = false; }
addEventListener("click", () => {
  $("tour").hidden = true;
  try { localStorage.setItem(TOUR, "1"); } catch { /* the explanation is shown again next time */ }
}, { once: true });
