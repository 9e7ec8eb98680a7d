"use strict";

// The answers: cards of items, in one list or in two side by side.

const TINY = 64; // pixels; smaller images are enlarged with sharp pixels instead of a blur
const LISTS = ["results", "others"];

let roots = ["v1"]; // path prefixes of the searched indexes: one, or two side by side
let abouts = [{}]; // descriptions of these indexes
let last = null; // current query; without one, the page shows all items
let newest = 0; // number of the newest request; responses to older ones are ignored
let shown = [[], []]; // items in the lists
let severalIndexes = false;

function buttonOf(className, text, key, act) {
  const button = element("button", className, text);
  button.type = "button";
  button.dataset.key = key;
  button.addEventListener("click", act);
  return button;
}

function sharpen(image) {
  image.addEventListener("load", () => {
    image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) <= TINY);
  });
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const valueOf = (item, field) => (field === "label" || field === "id" ? item[field] : item.metadata[field]);

function picture(item, gone) {
  const image = element("img");
  image.alt = "";
  image.loading = "lazy";
  sharpen(image);
  image.addEventListener("error", gone);
  fill(image, item.thumbnail_url ?? item.image_url);
  return image;
}

function card(item, place) {
  const entry = element("li", "hit");
  const frame = buttonOf("frame", "", `frame ${place} ${item.id}`, () => searchWithItem(item, place));
  frame.title = "Search with this item";
  frame.setAttribute("aria-label", `Search with ${item.id}, ${item.label ?? "no label"}`);
  if (item.image_url) frame.append(picture(item, () => { frame.textContent = "The image is gone."; }));
  else frame.textContent = `item ${item.id}`;
  const words = element("div", "words");
  if (item.distance !== undefined) words.append(measures(item));
  words.append(labelOf(item, place), element("p", "key", item.id));
  const entries = Object.entries(item.metadata);
  if (entries.length) {
    const list = element("ul", "metadata");
    list.append(...entries.map(([field, value]) => element("li", "", `${field}: ${text(value)}`)));
    words.append(list);
  }
  entry.append(frame, markButtons(item), words, judgeButtons(item, place), editButtons(item));
  return entry;
}

function measures(hit) {
  const both = element("p", "measures");
  if (hit.distance !== null) {
    const distance = element("span", "distance", hit.distance.toFixed(4));
    distance.title = "Distance: smaller is closer";
    both.append(distance);
  }
  // The score of a text's hit is no share: it only orders the hits.
  if (typeof hit.score === "number" && !last?.text) {
    const score = element("span", "score", `${(100 * hit.score).toFixed(1)} %`);
    score.title = "Of things that the index does not have, this share comes less near";
    both.append(score);
  }
  return both;
}

const cards = () => [...document.querySelectorAll(".hit")];

// Redraws parts of the page and keeps the focus: on the same control, or on the card in its place.
function redraw(draw) {
  const active = document.activeElement;
  const place = cards().indexOf(active.closest(".hit"));
  draw();
  if (!active.dataset.key || (active.isConnected && !active.hidden)) return;
  const same = [...document.querySelectorAll("[data-key]")].find((node) => node.dataset.key === active.dataset.key);
  const near = cards()[Math.min(place, cards().length - 1)]?.querySelector(".frame");
  (same && !same.hidden ? same : near ?? byId("results")).focus({ preventScroll: true });
}

function counted(place, milliseconds) {
  const count = shown[place].length;
  const items = count === 1 ? "item" : "items";
  if (isWall()) return `${count} ${items}${newestFirst[place] ? ", the newest first" : ""}`;
  const time = milliseconds === undefined ? "" : `, found in ${milliseconds.toFixed(1)} ms`;
  return `${count} nearest ${items}${time}`;
}

function tell(place, sentence, isError) {
  if (place === 0) show(sentence, isError);
  else byId("others-status").textContent = sentence;
}

function showStages(answers) {
  const isComplete = answers.length > 0 && answers.every((answer) => answer?.explain);
  byId("stages").hidden = !isComplete;
  if (!isComplete) return;
  const stages = [...new Set(answers.flatMap((answer) => Object.keys(answer.explain.stages_ms)))];
  const row = (tag, cells) => {
    const line = element("tr");
    line.append(...cells.map((cell, column) => element(column === 0 ? "th" : tag, "", cell)));
    return line;
  };
  const names = answers.length > 1 ? [byId("index").value, byId("beside").value] : ["Milliseconds"];
  byId("stages").querySelector("thead").replaceChildren(row("th", ["Stage", ...names]));
  byId("stages").querySelector("tbody").replaceChildren(...stages.map((stage) => (
    row("td", [stage, ...answers.map((answer) => (answer.explain.stages_ms[stage] ?? 0).toFixed(2))])
  )));
}

async function answer() {
  const number = ++newest;
  starts = [];
  show(isWall() ? "Loading …" : "Searching …", false);
  byId("answers").classList.add("stale");
  const settled = await Promise.allSettled(roots.map((_, place) => portion(place)));
  if (number === newest) render(settled);
}

// Shows the first portion of each list, or the reason why there is none.
function render(settled) {
  byId("answers").classList.remove("stale");
  byId("answers").classList.toggle("wall", isWall());
  byId("identity").hidden = !last || last.text !== undefined || !abouts[0].calibration;
  byId("sizes").hidden = !byId("group").value;
  byId("verdict").replaceChildren();
  shown = [[], []];
  starts = [];
  redraw(() => {
    byId("clear").hidden = isWall();
    for (const id of LISTS) byId(id).replaceChildren();
    settled.forEach(({ value, reason }, place) => {
      if (value) extend(place, value);
      tell(place, reason ? reason.message : counted(place, value.took_ms), Boolean(reason));
    });
    showPhotos();
    showMarks();
    showCounts();
  });
  showStages(settled.map((result) => result.value));
  watchMore();
}

// Answers what a person asks for, and keeps it in the address.
function ask(query) {
  if (query !== last) {
    marks.clear();
    byId("text").value = query?.text ?? "";
  }
  last = query;
  remember();
  return answer();
}

const again = () => ask(last);

// The indexes.

async function listIndexes() {
  const { indexes } = await (await call("v1/indexes")).json();
  severalIndexes = indexes.length > 1;
  if (!severalIndexes) return;
  for (const part of document.querySelectorAll(".indexes")) part.hidden = false;
  byId("index").replaceChildren(...indexes.map((name) => new Option(name)));
  byId("beside").replaceChildren(new Option("nothing", ""), ...indexes.map((name) => new Option(name)));
}

// Returns whether the first index can be used.
async function open() {
  if (severalIndexes) {
    const names = [byId("index").value, byId("beside").value].filter(Boolean);
    roots = names.map((name) => `v1/indexes/${encodeURIComponent(name)}`);
  }
  byId("second").hidden = byId("results-title").hidden = roots.length < 2;
  byId("answers").classList.toggle("two", roots.length > 1);
  byId("results-title").textContent = byId("index").value;
  byId("others-title").textContent = byId("beside").value;
  const settled = await Promise.allSettled(roots.map(async (root) => (await call(`${root}/index`)).json()));
  abouts = settled.map((result) => result.value ?? {});
  newestFirst = [true, true];
  const fault = settled[0].reason;
  if (fault) {
    byId("about").textContent = fault.status ? fault.message : "The index cannot be reached.";
    byId("access").open ||= fault.status === 401;
    return false;
  }
  const [about] = abouts;
  applyRole(about.role);
  document.body.classList.toggle("markable", !about.rescores);
  byId("about").textContent = `${about.name}: ${about.items.toLocaleString("en")} items, ${about.distance} distance`;
  document.title = `Image search: ${about.name}`;
  byId("words").hidden = !abouts.some(({ text, words }) => text || words);
  const vectors = about.input.kind === "features";
  byId("drop").hidden = vectors;
  byId("numbers").hidden = !vectors;
  document.querySelector("h1").textContent = vectors ? "Vector search" : "Image search";
  byId("file").multiple = Boolean(about.calibration);
  byId("several").hidden = !about.calibration;
  offerFields(["label", ...(about.fields ?? []).filter((field) => field !== "label" && field !== "id")]);
  return true;
}

async function switchIndex() {
  marks.clear(); // they are ids of the index before
  if (await open()) await again();
}

byId("k").addEventListener("change", again);
for (const id of ["index", "beside"]) byId(id).addEventListener("change", switchIndex);
byId("clear").dataset.key = "clear";
byId("clear").addEventListener("click", () => {
  marks.clear();
  showPreview(null);
  ask(null);
});
