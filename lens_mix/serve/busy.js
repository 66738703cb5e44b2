"use strict";
// Shows the state of a computation every second, and the page once it is there.
const state = document.getElementById("state"), spoken = document.getElementById("spoken");
const bar = document.querySelector("progress"), job = location.pathname.split("/").pop();
async function look(turn) {
  try {
    const answer = await fetch(`/state/${job}`);
    const now = await answer.json();
    if (now.done) return location.reload();
    state.textContent = now.text;
    // A screen reader says the state every ten seconds only.
    if (turn % 10 === 0) spoken.textContent = now.text;
    if (now.expected) {
      bar.max = now.expected;
      bar.value = Math.min(now.seconds, 0.97 * now.expected);
    }
  } catch {
    state.textContent = "The server does not answer. Is it still running?";
  }
  setTimeout(look, 1000, turn + 1);
}
look(0);
