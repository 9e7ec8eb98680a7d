"use strict";

// Selection of a part of the image; its edges are in percent of the whole.

const LARGEST_CUT = 1600; // pixels; no encoder uses more
const EDGES = ["left", "top", "right", "bottom"];

function setEdges(values) {
  EDGES.forEach((edge, number) => { byId(edge).value = String(values[number]); });
  drawBox();
}

function drawBox() {
  const [left, top, right, bottom] = EDGES.map((edge) => Number(byId(edge).value));
  const box = byId("box");
  Object.assign(box.style, { left: `${left}%`, top: `${top}%`, right: `${100 - right}%`, bottom: `${100 - bottom}%` });
  box.hidden = right - left === 100 && bottom - top === 100;
}

function moveEdge(event) {
  const moved = EDGES.indexOf(event.target.id);
  const values = EDGES.map((edge) => Number(byId(edge).value));
  const [low, high] = [moved % 2, (moved % 2) + 2]; // opposite edges stay at least one percent apart
  if (moved === low) values[low] = Math.min(values[low], values[high] - 1);
  else values[high] = Math.max(values[high], values[low] + 1);
  setEdges(values);
}

function drawWithPointer(down) {
  if (down.button !== 0) return;
  const view = byId("view");
  const point = (event) => {
    const frame = view.getBoundingClientRect();
    const inside = (share) => Math.round(100 * Math.min(1, Math.max(0, share)));
    return [inside((event.clientX - frame.left) / frame.width), inside((event.clientY - frame.top) / frame.height)];
  };
  const [x, y] = point(down);
  const move = (event) => {
    const [toX, toY] = point(event);
    setEdges([Math.min(x, toX), Math.min(y, toY), Math.max(x, toX), Math.max(y, toY)]);
  };
  const end = (event) => {
    view.removeEventListener("pointermove", move);
    for (const kind of ["pointerup", "pointercancel"]) view.removeEventListener(kind, end);
    const [toX, toY] = point(event);
    if (event.type === "pointercancel" || Math.abs(toX - x) < 2 || Math.abs(toY - y) < 2) setEdges([0, 0, 100, 100]);
    else byId("crop").open = true;
  };
  view.setPointerCapture(down.pointerId);
  view.addEventListener("pointermove", move);
  for (const kind of ["pointerup", "pointercancel"]) view.addEventListener(kind, end);
}

async function searchWithPart() {
  const preview = byId("preview");
  const [left, top, right, bottom] = EDGES.map((edge) => Number(byId(edge).value) / 100);
  const x = Math.floor(left * preview.naturalWidth);
  const y = Math.floor(top * preview.naturalHeight);
  const width = Math.max(1, Math.ceil(right * preview.naturalWidth) - x);
  const height = Math.max(1, Math.ceil(bottom * preview.naturalHeight) - y);
  const scale = Math.min(1, LARGEST_CUT / Math.max(width, height));
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(scale * width));
  canvas.height = Math.max(1, Math.round(scale * height));
  canvas.getContext("2d").drawImage(preview, x, y, width, height, 0, 0, canvas.width, canvas.height);
  const image = await new Promise((done) => { canvas.toBlob(done, "image/png"); });
  if (image) ask({ image });
  else show("The browser cannot cut this picture.", true);
}

byId("view").addEventListener("pointerdown", drawWithPointer);
for (const edge of EDGES) byId(edge).addEventListener("input", moveEdge);
byId("cut").addEventListener("click", searchWithPart);
byId("whole").addEventListener("click", () => { setEdges([0, 0, 100, 100]); ask(whole); });
