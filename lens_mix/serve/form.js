"use strict";
// Shows the length and the expected time of a prompt while it is typed, and the picked methods.
const form = document.forms[0], shown = document.getElementById("estimate");
let timer, asked = 0;
async function estimate() {
  const own = ++asked;
  const text = form.elements.text.value.trim()
    ? await fetch("/estimate", {method: "POST", body: new URLSearchParams(new FormData(form))})
      .then(answer => answer.ok ? answer.text() : "").catch(() => "")
    : "";
  if (own === asked) shown.textContent = text;
}
function update() {
  const picked = [...form.querySelectorAll("[name=method]:checked")].map(box => box.value);
  document.getElementById("picked").textContent = `: ${picked.join(", ") || "none"}`;
  clearTimeout(timer);
  timer = setTimeout(estimate, 500);
}
form.addEventListener("input", update);
addEventListener("pageshow", update);
form.addEventListener("submit", () => {
  document.querySelector("details").open = false;
  document.querySelector("iframe").scrollIntoView({block: "nearest"});
});
form.elements.text.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
