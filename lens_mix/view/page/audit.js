// ------------------------------------------------------------------ the audit
// The claims with their verdicts, and what each of them rests on. Without an audit, the list of claims is empty.
const claims = DATA.audit ? DATA.audit.claims : [];
// A source with several roles has the first of them in the prompt. The last one is not shown there.
const ROLES = ["needed", "one is enough", "against", "other"];
const claimAt = (start, stop) => claims.find(claim => claim.start === start && claim.stop === stop);
// Return the chosen claim, or all claims of which something is chosen.
function findClaims() {
  const own = claimAt(state.start, state.stop);
  return own ? [own] : claims.filter(claim => claim.start < state.stop && state.start < claim.stop);
}
const badge = name => make("span", { class: `badge ${name.replaceAll(" ", "-")}`, text: name });
const nats = x => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(2)} nats`;
const changed = (before, after) => `probability ${percent(before)} → ${percent(after)}`;
const quotedClaim = ({ start, stop }) => quoted(textBetween(start, stop), 140);
const quotedSource = ranges => quoted(textOf({ positions: spread(ranges) }, DATA.audit.unit), 140);
// Return the boxes of some tokens without white space at the end.
function wordBoxes(start, stop) {
  const boxes = boxesIn(start, stop), last = boxes.findLastIndex(index => DATA.boxes[index][2].trim());
  return last < 0 ? boxes : boxes.slice(0, last + 1);
}
// Write the verdict of each claim after its last word.
function markClaims() {
  claims.forEach(({ start, stop, verdict }, number) => {
    const last = wordBoxes(DATA.n_prompt + start, DATA.n_prompt + stop).at(-1);
    pieces[last]?.after(make("span", { class: "verdict", "data-claim": number }, " ", badge(verdict)));
  });
}
const claimButton = claim => make("button", { type: "button", class: "claim", onclick: () => set({ start: claim.start, stop: claim.stop }) }, badge(claim.verdict), ` ${quotedClaim(claim)}`);
function writeAudit() {
  if (!DATA.audit) return;
  const found = findClaims(), claim = found.length === 1 ? found[0] : null;
  const isWhole = claim && claim === claimAt(state.start, state.stop), why = claim && `${claim.why.charAt(0).toUpperCase()}${claim.why.slice(1)}.`;
  $("verdict").replaceChildren(...(claim ? [isWhole ? "" : `In the claim ${quotedClaim(claim)}: `, badge(claim.verdict), ` ${why}`] : []));
  $("audit-title").textContent = claim ? "What the claim rests on" : "The claims";
  $("claim").replaceChildren(...(claim ? describeClaim(claim) : found.map(claimButton)));
  const { passes, kept, precision } = DATA.audit;
  $("audited").textContent = [claim && precision[claim.verdict] ? `The verdict “${claim.verdict}” was ${precision[claim.verdict]}.` : "",
    claim && claim.groups.length ? "Loss: what the claim's decisive tokens, those that depend on the sources, lose in log probability without the source, measured in a forward pass whose prompt has the source's tokens deleted." : "",
    `The audit took ${passes} forward pass${passes === 1 ? "" : "es"} without sources.`,
    kept.length ? `Kept in all of them: ${kept.map(([name, ranges]) => [name === "prompt" ? "" : name, quotedSource(ranges)].join(" ").trim()).join(", ")}.` : ""].filter(Boolean).join(" ");
  $("audit").hidden = !found.length;
  frameSources(claim ? claim.groups : []);
}
// Return the elements of a claim: its groups of sources, and what it loses without all sources.
function describeClaim(claim) {
  const { without_all, follows } = claim, earlier = follows && claimAt(...follows);
  const isMemory = claim.verdict === "from memory", numbers = without_all && [without_all[0] === null ? "" : `loss ${nats(without_all[0])}`, changed(claim.probability, without_all[1])];
  return [
    claim.groups.length ? "" : make("p", { text: isMemory ? "No source: it loses little without all of them." : "Unknown." }),
    ...(earlier ? [make("p", { text: "It was audited as the earlier claim that it repeats:" }), claimButton(earlier)] : []),
    ...claim.groups.flatMap(group => describeGroup(group, claim)),
    numbers ? make("p", { class: "all", text: `without all sources: ${numbers.filter(Boolean).join(" · ")}` }) : ""];
}
function describeGroup({ role, text, loss, instead, sources }, claim) {
  const own = quoted(text, 80), other = quoted(instead, 80), isOne = sources.length === 1;
  const head = { needed: `${own} needs:`, "one is enough": `For ${own}, each of these is enough:`, against: `Against ${own}:`, other: "Other sources that were measured:" }[role];
  const end = role === "against" ? `${isOne ? "It makes" : "Together they make"} ${other} more probable by ${loss.toFixed(2)} nats.`
    : role === "other" ? "" : `Without ${isOne ? "it" : "all of them"}, ${own} loses ${loss.toFixed(2)} nats${instead.trim() ? `, and the model would write ${other}` : ""}.`;
  return [make("h3", { text: head }), make("ul", {}, ...sources.map(source => make("li", {}, sourceButton(role, source, claim)))), end ? make("p", { text: end }) : ""];
}
function sourceButton(role, { name, ranges, loss, probability, share }, claim) {
  const numbers = [loss === null ? "" : `loss without it: ${nats(loss)}`,
    probability === null ? "" : changed(claim.measured_probability, probability),
    share === null ? "" : `with it alone ${percent(Math.min(share, 1))} remains`].filter(Boolean).join(" · ");
  return make("button", { type: "button", class: "claim", "data-role": role, title: "show it in the text", onclick: () => goTo({ positions: spread(ranges) }) },
    badge(role), " ", name === "prompt" ? "" : make("span", { class: "name", text: name }), ` ${quotedSource(ranges)}`, make("span", { class: "loss", text: numbers }));
}
// Frame the sources of a claim in the prompt, with their roles before them; the background has the scores.
function frameSources(groups) {
  for (const node of document.querySelectorAll(".role")) node.remove();
  for (const piece of document.querySelectorAll(".framed")) piece.classList.remove("framed", "first", "last", ...ROLES.map(role => role.replaceAll(" ", "-")));
  const framed = new Set();
  for (const role of ROLES.slice(0, 3)) for (const { ranges } of groups.filter(group => group.role === role).flatMap(group => group.sources)) {
    if (framed.has(String(ranges))) continue;
    framed.add(String(ranges));
    for (const [start, stop] of ranges) {
      const own = wordBoxes(start, stop).map(index => pieces[index]);
      own.forEach(piece => piece.classList.add("framed", role.replaceAll(" ", "-")));
      own[0]?.classList.add("first");
      own.at(-1)?.classList.add("last");
      own[0]?.before(make("span", { class: "role" }, badge(role)));
    }
  }
}
