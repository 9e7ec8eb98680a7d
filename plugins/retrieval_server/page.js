"use strict";

const byId = (id) => document.getElementById(id);
const TINY = 64; // pixels; smaller images are enlarged with sharp pixels instead of a blur
const KEYWORDS = /^(and|or|not|in|exists|true|false|null)$/i; // keywords of the filter language

let roots = ["v1"]; // path prefixes of the searched indexes: one, or two side by side
let limits = { bytes: 20000000 };
let last = null; // current query, repeated when the filter, the index or the number of results changes
let whole = null; // the image in the preview; `last` may be a part of it
let newest = 0; // number of the newest query; responses to older queries are ignored
let severalIndexes = false;

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function show(sentence, isError) {
  byId("error").hidden = !isError;
  byId("error").textContent = isError ? sentence : "";
  byId("status").textContent = isError ? "" : sentence;
  if (!isError) return;
  for (const id of ["results", "others"]) byId(id).replaceChildren();
  byId("stages").hidden = true;
}

async function call(path, request = {}) {
  let response;
  try {
    response = await fetch(path, { ...request, headers: { ...request.headers, ...authorisation() } });
  } catch {
    throw new Error("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const fault = new Error(answer.detail || `The server answered with status ${response.status}.`);
  fault.status = response.status;
  throw fault;
}

function sharpen(image) {
  image.addEventListener("load", () => {
    image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) <= TINY);
  });
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function card(hit, place) {
  const item = element("li", "hit");
  const name = hit.label ?? "no label";
  const frame = element("button", "frame");
  frame.type = "button";
  frame.title = "Search with this item";
  frame.setAttribute("aria-label", `Search with ${hit.id}, ${name}`);
  frame.addEventListener("click", () => searchWithItem(hit, place));
  if (hit.image_url) {
    const image = element("img");
    image.alt = "";
    image.loading = "lazy";
    sharpen(image);
    image.addEventListener("error", () => { frame.textContent = "The image is gone."; });
    fill(image, hit.thumbnail_url ?? hit.image_url);
    frame.append(image);
  } else {
    frame.textContent = `item ${hit.id}`;
  }
  const words = element("div", "words");
  const distance = element("span", "distance", hit.distance.toFixed(4));
  distance.title = "Distance: smaller is closer";
  words.append(distance, element("span", "label", name), element("p", "key", hit.id));
  const entries = Object.entries(hit.metadata);
  if (entries.length) {
    const list = element("ul", "metadata");
    list.append(...entries.map(([field, value]) => element("li", "", `${field}: ${text(value)}`)));
    words.append(list);
  }
  item.append(frame, words, editButtons(hit));
  return item;
}

async function search(root, query) {
  const k = Number(byId("k").value);
  const filter = byId("filter").value.trim();
  let request;
  if (query.image) {
    if (query.image.size > limits.bytes) {
      throw new Error(`The image has ${query.image.size.toLocaleString("en")} bytes; the limit is ` +
        `${limits.bytes.toLocaleString("en")}.`);
    }
    const form = new FormData();
    form.append("k", String(k));
    form.append("explain", "true");
    if (filter) form.append("filter", filter);
    form.append("image", query.image, "query");
    request = { method: "POST", body: form };
  } else {
    const body = { k, explain: true, ...(query.vector ? { vector: query.vector } : { id: String(query.id) }) };
    if (filter) body.filter = filter;
    request = { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  }
  try {
    return await (await call(`${root}/search`, request)).json();
  } catch (fault) {
    // Some bundles encode queries differently from items, and some indexes lack the item: send its image.
    if (!query.image_url || (fault.status !== 422 && (fault.status !== 404 || root === query.root))) throw fault;
    return search(root, { image: await (await call(query.image_url)).blob() });
  }
}

function counted(answer) {
  const count = answer.results.length;
  return `${count} nearest ${count === 1 ? "item" : "items"}, found in ${answer.took_ms.toFixed(1)} ms`;
}

function showStages(answers) {
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

function offerValues(results) {
  const field = byId("field").value;
  const values = results.map((hit) => (field === "label" || field === "id" ? hit[field] : hit.metadata[field]));
  const plain = values.filter((value) => value !== null && value !== undefined && typeof value !== "object");
  byId("values").replaceChildren(...[...new Set(plain.map(String))].map((value) => new Option(value)));
}

async function ask(query) {
  last = query;
  remember();
  const number = ++newest;
  show("Searching …", false);
  byId("answers").classList.add("stale");
  const settled = await Promise.allSettled(roots.map((root) => search(root, query)));
  if (number !== newest) return;
  byId("answers").classList.remove("stale");
  const [first, second] = settled;
  if (first.status === "rejected") show(first.reason.message, true);
  else {
    byId("results").replaceChildren(...first.value.results.map((hit) => card(hit, 0)));
    show(counted(first.value), false);
    offerValues(first.value.results);
  }
  if (second) {
    const answered = second.status === "fulfilled";
    byId("others").replaceChildren(...(answered ? second.value.results.map((hit) => card(hit, 1)) : []));
    byId("others-status").textContent = answered ? counted(second.value) : second.reason.message;
  }
  const answers = settled.filter((result) => result.status === "fulfilled").map((result) => result.value);
  byId("stages").hidden = answers.length < settled.length;
  if (answers.length === settled.length) showStages(answers);
}

function showPreview(address, description) {
  const preview = byId("preview");
  if (preview.src.startsWith("blob:")) URL.revokeObjectURL(preview.src);
  byId("view").hidden = byId("crop").hidden = !address;
  preview.alt = address ? description : "";
  fill(preview, address ?? "data:,");
  byId("add").hidden = !address?.startsWith("blob:");
  byId("crop").open = false;
  setEdges([0, 0, 100, 100]);
}

function searchWithFile(file) {
  if (!file) return;
  showPreview(URL.createObjectURL(file), `The query: ${file.name || "a pasted image"}`);
  whole = { image: file };
  ask(whole);
}

function searchWithItem(item, place) {
  showPreview(item.image_url, `The query: ${item.id}`);
  whole = { id: item.id, image_url: item.image_url, root: roots[place] };
  ask(whole);
  window.scrollTo({ top: 0 });
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

// The filter.

function addCondition() {
  const [field, relation, value] = ["field", "relation", "value"].map((id) => byId(id).value);
  const isText = field === "id" || field === "label";
  const name = isText || (/^[A-Za-z_]\w*$/.test(field) && !KEYWORDS.test(field)) ? field : `"${field}"`;
  const isLiteral = !isText && (/^(true|false|null)$/.test(value) || (value.trim() && Number.isFinite(Number(value))));
  const literal = isLiteral ? (KEYWORDS.test(value) ? value : String(Number(value))) : `'${value.replaceAll("'", "''")}'`;
  const condition = relation === "exists" ? `exists(${name})` : `${name} ${relation} ${literal}`;
  const before = byId("filter").value.trim();
  const grouped = /\bor\b/i.test(before) ? `(${before})` : before;
  byId("filter").value = before ? `${grouped} and ${condition}` : condition;
  again();
}

const again = () => (last ? ask(last) : remember());

// The URL's fragment holds the query, unless it is an image. Browsers do not send it to the server.

function remember() {
  const parameters = new URLSearchParams();
  if (last && last.id !== undefined) parameters.set("id", last.id);
  const filter = byId("filter").value.trim();
  if (filter) parameters.set("filter", filter);
  if (byId("k").value !== "10") parameters.set("k", byId("k").value);
  if (severalIndexes) parameters.set("index", byId("index").value);
  if (byId("beside").value) parameters.set("beside", byId("beside").value);
  const address = String(parameters) && `#${parameters}`;
  if (address !== location.hash) history.pushState(null, "", address || location.pathname);
}

async function restore() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const k = parameters.get("k") ?? "10";
  if (![...byId("k").options].some((option) => option.value === k) && /^[1-9]\d{0,2}$/.test(k)) byId("k").add(new Option(k));
  byId("k").value = k;
  if (byId("k").selectedIndex < 0) byId("k").value = "10";
  byId("filter").value = parameters.get("filter") ?? "";
  if (severalIndexes) {
    byId("index").value = parameters.get("index") ?? byId("index").options[0].value;
    if (byId("index").selectedIndex < 0) byId("index").selectedIndex = 0;
    byId("beside").value = parameters.get("beside") ?? "";
    if (byId("beside").selectedIndex < 0) byId("beside").value = "";
  }
  await open();
  const id = parameters.get("id");
  if (id === null) {
    if (last && last.id === undefined) ask(last);
    return;
  }
  try {
    searchWithItem(await (await call(`${roots[0]}/item?id=${encodeURIComponent(id)}`)).json(), 0);
  } catch (fault) {
    show(fault.message, true);
  }
}

// The indexes.

async function choose() {
  const { indexes } = await (await call("v1/indexes")).json();
  severalIndexes = indexes.length > 1;
  if (!severalIndexes) return;
  for (const part of document.querySelectorAll(".indexes")) part.hidden = false;
  byId("index").replaceChildren(...indexes.map((name) => new Option(name)));
  byId("beside").replaceChildren(new Option("nothing", ""), ...indexes.map((name) => new Option(name)));
}

async function open() {
  if (severalIndexes) {
    roots = [byId("index").value, byId("beside").value].filter(Boolean).map((name) => `v1/indexes/${encodeURIComponent(name)}`);
  }
  byId("second").hidden = byId("results-title").hidden = roots.length < 2;
  byId("answers").classList.toggle("two", roots.length > 1);
  byId("results-title").textContent = byId("index").value;
  byId("others-title").textContent = byId("beside").value;
  try {
    const about = await (await call(`${roots[0]}/index`)).json();
    limits = about.limits;
    applyRole(about.role);
    byId("about").textContent = `${about.name}: ${about.items.toLocaleString("en")} items, ${about.distance} distance`;
    document.title = `Image search: ${about.name}`;
    const vectors = about.input.kind === "features";
    byId("drop").hidden = vectors;
    byId("numbers").hidden = !vectors;
    document.querySelector("h1").textContent = vectors ? "Vector search" : "Image search";
    byId("field").replaceChildren(...["label", "id", ...(about.fields ?? [])].map((name) => new Option(name)));
  } catch (fault) {
    byId("about").textContent = fault.status ? fault.message : "The index cannot be reached.";
    byId("access").open ||= fault.status === 401;
  }
}

const drop = byId("drop");
sharpen(byId("preview"));
byId("preview").addEventListener("load", () => {
  const { naturalWidth, naturalHeight } = byId("preview");
  byId("view").style.aspectRatio = `${naturalWidth} / ${naturalHeight}`;
  byId("view").style.width = `min(100%, ${(14 * naturalWidth) / naturalHeight}rem)`;
});
byId("preview").addEventListener("error", () => { byId("view").hidden = byId("crop").hidden = true; });
for (const id of ["file", "photo"]) {
  byId(id).addEventListener("change", (event) => {
    searchWithFile(event.target.files[0]);
    event.target.value = ""; // the same file may be chosen again
  });
}
byId("k").addEventListener("change", again);
byId("apply").addEventListener("click", again);
for (const [id, act] of [["filter", again], ["value", addCondition]]) {
  byId(id).addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); act(); } });
}
byId("add-condition").addEventListener("click", addCondition);
for (const id of ["index", "beside"]) byId(id).addEventListener("change", () => open().then(again));
byId("form").addEventListener("submit", (event) => { event.preventDefault(); searchWithNumbers(); });
window.addEventListener("popstate", restore);
document.addEventListener("paste", (event) => {
  const files = event.clipboardData.files;
  if (files.length && !drop.hidden) { event.preventDefault(); searchWithFile(files[0]); }
});
for (const [kind, over] of [["dragenter", true], ["dragover", true], ["dragleave", false], ["drop", false]]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.toggle("over", over); });
}
document.addEventListener("drop", (event) => {
  const files = event.dataTransfer.files;
  if (drop.hidden) return;
  if (files.length) searchWithFile(files[0]);
  else show("Nothing that was dropped is a file. Drop an image file.", true);
});
const start = () => choose().catch(() => {}).finally(restore);
document.addEventListener("DOMContentLoaded", start); // when the other scripts are loaded too
