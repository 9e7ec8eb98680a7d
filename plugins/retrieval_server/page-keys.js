"use strict";

// The keyboard: arrows move among the pictures, + and - mark one, / goes to the filter.

const STEPS = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 };

// Returns the frame beside one, or the closest one in the rows above or below it.
function neighbour(frame, key) {
  const frames = [...frame.closest("section").querySelectorAll(".frame")];
  if (key === "Home") return frames[0];
  if (key === "End") return frames.at(-1);
  const step = STEPS[key];
  if (key === "ArrowLeft" || key === "ArrowRight") return frames[frames.indexOf(frame) + step];
  const from = frame.getBoundingClientRect();
  const far = (other) => {
    const { left, top } = other.getBoundingClientRect();
    return 10 * step * (top - from.top) + Math.abs(left - from.left); // rows count more than columns
  };
  const beyond = frames.filter((other) => step * (other.getBoundingClientRect().top - from.top) > 1);
  return beyond.sort((one, other) => far(one) - far(other))[0];
}

function moveOrMark(event) {
  const entry = event.target.closest(".hit");
  if (!entry) return;
  const sign = { "+": ".like", "-": ".dislike" }[event.key];
  if (sign) entry.querySelector(sign)?.click();
  const isMove = event.key in STEPS || event.key === "Home" || event.key === "End";
  const next = isMove && neighbour(entry.querySelector(".frame"), event.key);
  if (!next) return;
  event.preventDefault();
  next.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
  if (event.key !== "/") {
    moveOrMark(event);
    return;
  }
  event.preventDefault();
  byId("filter").focus();
});
