"use strict";

const byId = (id) => document.getElementById(id);
const TINY = 64; // pixels: smaller images are shown with sharp edges instead of a blur

let base = "v1"; // below it are the routes of the index that is searched
let limits = { bytes: 20000000 };
let last = null; // the query shown: asked again when the number of results changes
let asked = 0; // only the answer to the newest question is shown

function show(sentence, isError) {
  byId("error").hidden = !isError;
  byId("error").textContent = isError ? sentence : "";
  byId("status").textContent = isError ? "" : sentence;
  if (isError) byId("results").replaceChildren();
}

function sharpen(image) {
  image.addEventListener("load", () => {
    image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) <= TINY);
  });
}

function card(hit) {
  const item = document.createElement("li");
  item.className = "hit";
  const name = hit.label ?? "no label";
  let frame;
  if (hit.image_url) {
    frame = document.createElement("button");
    frame.type = "button";
    frame.title = "Search with this image";
    frame.setAttribute("aria-label", `Search with ${hit.key}, ${name}`);
    frame.addEventListener("click", () => searchWithItem(hit));
    const image = document.createElement("img");
    image.alt = "";
    image.loading = "lazy";
    sharpen(image);
    image.addEventListener("error", () => { frame.textContent = "The image is gone."; frame.disabled = true; });
    image.src = hit.image_url;
    frame.append(image);
  } else {
    frame = document.createElement("div");
    frame.textContent = `item ${hit.id}`;
  }
  frame.classList.add("frame");
  const words = document.createElement("div");
  words.className = "words";
  for (const [kind, text] of [["distance", hit.distance.toFixed(4)], ["label", name]]) {
    const span = document.createElement("span");
    span.className = kind;
    span.textContent = text;
    if (kind === "distance") span.title = "Distance: smaller is closer";
    words.append(span);
  }
  const key = document.createElement("p");
  key.className = "key";
  key.textContent = hit.key;
  const more = Object.entries(hit.metadata).map(([column, value]) => `${column}: ${value}`).join("\n");
  if (more) key.title = more;
  words.append(key);
  item.append(frame, words);
  return item;
}

async function ask(query) {
  last = query;
  const number = ++asked;
  const k = Number(byId("k").value);
  show("Searching …", false);
  byId("results").classList.add("stale");
  try {
    let request;
    if (query.image) {
      if (query.image.size > limits.bytes) {
        throw new Error(`The image has ${query.image.size.toLocaleString("en")} bytes; the limit is ` +
          `${limits.bytes.toLocaleString("en")}.`);
      }
      const form = new FormData();
      form.append("k", String(k));
      form.append("image", query.image, "query");
      request = { method: "POST", body: form };
    } else {
      const body = JSON.stringify({ vector: query.vector, k });
      request = { method: "POST", body, headers: { "Content-Type": "application/json" } };
    }
    let response;
    try {
      response = await fetch(`${base}/search`, request);
    } catch {
      throw new Error("The server cannot be reached. Is it still running?");
    }
    const answer = await response.json().catch(() => ({}));
    if (number !== asked) return;
    if (!response.ok) throw new Error(answer.detail || `The server answered with status ${response.status}.`);
    byId("results").replaceChildren(...answer.results.map(card));
    const count = answer.results.length;
    show(`${count} nearest ${count === 1 ? "item" : "items"}, found in ${answer.took_ms.toFixed(1)} ms`, false);
  } catch (fault) {
    if (number === asked) show(fault.message, true);
  } finally {
    if (number === asked) byId("results").classList.remove("stale");
  }
}

function searchWithFile(file) {
  if (!file) return;
  const preview = byId("preview");
  if (preview.src.startsWith("blob:")) URL.revokeObjectURL(preview.src);
  preview.alt = `The query: ${file.name || "a pasted image"}`;
  preview.src = URL.createObjectURL(file);
  preview.hidden = false;
  ask({ image: file });
}

async function searchWithItem(hit) {
  try {
    const response = await fetch(hit.image_url);
    if (!response.ok) throw new Error((await response.json()).detail);
    searchWithFile(new File([await response.blob()], hit.key));
    window.scrollTo({ top: 0 });
  } catch (fault) {
    show(fault.message, true);
  }
}

function searchWithNumbers() {
  const words = byId("vector").value.replace(/[[\]]/g, " ").split(/[\s,;]+/).filter(Boolean);
  const vector = words.map(Number);
  if (!vector.length || !vector.every(Number.isFinite)) {
    show("Write the vector as numbers, separated by commas or spaces.", true);
    return;
  }
  ask({ vector });
}

async function choose() {
  const { indexes } = await (await fetch("v1/indexes")).json().catch(() => ({ indexes: [] }));
  if (indexes.length < 2) return;
  byId("indexes").hidden = false;
  byId("index").replaceChildren(...indexes.map((name) => new Option(name, name)));
  byId("index").addEventListener("change", () => {
    base = `v1/indexes/${byId("index").value}`;
    open();
    if (last) ask(last);
  });
  base = `v1/indexes/${indexes[0]}`;
}

async function open() {
  try {
    const about = await (await fetch(`${base}/index`)).json();
    limits = about.limits;
    byId("about").textContent = `${about.name}: ${about.items.toLocaleString("en")} items, ${about.distance} distance`;
    document.title = `Image search: ${about.name}`;
    const vectors = about.input.kind === "features";
    byId("drop").hidden = vectors;
    byId("numbers").hidden = !vectors;
    document.querySelector("h1").textContent = vectors ? "Vector search" : "Image search";
  } catch {
    byId("about").textContent = "The index cannot be reached.";
  }
}

const drop = byId("drop");
sharpen(byId("preview"));
byId("preview").addEventListener("error", () => { byId("preview").hidden = true; });
byId("file").addEventListener("change", (event) => {
  searchWithFile(event.target.files[0]);
  event.target.value = ""; // the same file may be chosen again
});
byId("k").addEventListener("change", () => { if (last) ask(last); });
byId("form").addEventListener("submit", (event) => { event.preventDefault(); searchWithNumbers(); });
document.addEventListener("paste", (event) => {
  const files = event.clipboardData.files;
  if (files.length && !drop.hidden) { event.preventDefault(); searchWithFile(files[0]); }
});
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
for (const kind of ["dragleave", "drop"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.remove("over"); });
}
document.addEventListener("drop", (event) => {
  const files = event.dataTransfer.files;
  if (drop.hidden) return;
  if (files.length) searchWithFile(files[0]);
  else show("Drop an image file: what was dropped holds no file.", true);
});
choose().finally(open);
