"use strict";

// The query: an image, an item, a vector or a text, and how it is sent.

const MOST_PHOTOS = 16; // of one thing, as the server accepts

let whole = null; // the image in the preview and its other photos; the query may be a part of it

const PLACES_OF_PICTURES = ["like", "dislike"];

function bodyOf(fields) {
  const isForm = Object.values(fields).flat().some((value) => value instanceof Blob);
  if (!isForm) return { body: JSON.stringify(fields), headers: { "Content-Type": "application/json" } };
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    const values = [value].flat();
    if (values[0] instanceof Blob) for (const file of values) form.append(name, file, "query");
    else form.append(name, typeof value === "string" ? value : JSON.stringify(value));
  }
  return { body: form };
}

async function send(action, root, query, options) {
  const { image, vector, id, text } = query ?? {};
  const { bytes } = abouts[0].limits ?? {};
  const tooLarge = [image ?? []].flat().find((file) => file.size > bytes);
  if (tooLarge) {
    const [size, limit] = [tooLarge.size, bytes].map((count) => count.toLocaleString("en"));
    throw new Error(`The image has ${size} bytes; the limit is ${limit}.`);
  }
  const fields = { ...options, ...(image && { image }), ...(vector && { vector }), ...(id !== undefined && { id }) };
  if (text) fields.text = text;
  const post = async () => (await call(`${root}/${action}`, { method: "POST", ...bodyOf(fields) })).json();
  try {
    return await post();
  } catch (fault) {
    // Some bundles encode queries differently from items, and some indexes lack the items: send their images.
    if (fault.status !== 422 && (fault.status !== 404 || root === (query?.root ?? roots[0]))) throw fault;
    if (text) throw fault;
    if (!(await withImages(fields, query).catch(() => false))) throw fault;
    return post();
  }
}

// Replaces the ids among the fields of a request by the items' images; returns whether there were any.
async function withImages(fields, query) {
  const image = async (root, id) => (await call(`${root}/items/${encodeURIComponent(id)}/image`)).blob();
  const { id } = fields;
  const marked = PLACES_OF_PICTURES.filter((name) => fields[name]);
  for (const name of marked) fields[name] = await Promise.all(fields[name].map((id) => image(roots[0], id)));
  if (id !== undefined) fields.image = await image(query.root, id);
  delete fields.id;
  return id !== undefined || marked.length > 0;
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

// Searches with the first file. An index that is calibrated identifies what all of them show.
function searchWithFiles(files) {
  const photos = [...files].slice(0, abouts[0].calibration ? files.length : 1);
  if (!photos.length) return;
  if (photos.length > MOST_PHOTOS) {
    show(`These are ${photos.length} files. Choose at most ${MOST_PHOTOS} photos, all of one thing.`, true);
    return;
  }
  const [image] = photos;
  showPreview(URL.createObjectURL(image), `The query: ${image.name || "a pasted image"}`);
  whole = { image, photos };
  ask(whole);
}

function queryOf(item, place) {
  showPreview(item.image_url, `The query: ${item.id}`);
  whole = { id: item.id, root: roots[place] };
  return whole;
}

function searchWithItem(item, place) {
  ask(queryOf(item, place));
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

function searchWithText() {
  const words = byId("text").value.trim();
  if (!words) {
    show("Write what to search for, such as: a red mug.", true);
    return;
  }
  showPreview(null);
  ask({ text: words });
}

byId("seek").addEventListener("click", searchWithText);
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); searchWithText(); }
});

const drop = byId("drop");
sharpen(byId("preview"));
byId("preview").addEventListener("load", () => {
  const { naturalWidth, naturalHeight } = byId("preview");
  byId("view").style.setProperty("--ratio", naturalWidth / naturalHeight);
});
byId("preview").addEventListener("error", () => { byId("view").hidden = byId("crop").hidden = true; });
for (const id of ["file", "photo"]) {
  byId(id).addEventListener("change", (event) => {
    searchWithFiles(event.target.files);
    event.target.value = ""; // the same file may be chosen again
  });
}
byId("form").addEventListener("submit", (event) => { event.preventDefault(); searchWithNumbers(); });
document.addEventListener("paste", (event) => {
  const files = event.clipboardData.files;
  if (files.length && !drop.hidden) { event.preventDefault(); searchWithFiles(files); }
});
for (const [kind, over] of [["dragenter", true], ["dragover", true], ["dragleave", false], ["drop", false]]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.toggle("over", over); });
}
document.addEventListener("drop", (event) => {
  const files = event.dataTransfer.files;
  if (drop.hidden) return;
  if (files.length) searchWithFiles(files);
  else show("Nothing that was dropped is a file. Drop an image file.", true);
});
