"use strict";

// Review of the groups in a file of `retrieval index duplicates --output`.
// Nothing is written before the button that deletes is pressed and confirmed.

const MOST_BYTES = 100000000; // of a file of groups
const GROUPS_SHOWN = 20;
const ITEMS_SHOWN = 24; // of a group; others on request
const DELETED_AT_ONCE = 1000; // a filter has no more values

let groups = []; // { ids, distances, diameter, number, apart: whether it is "not the same", shown: items }
let index = null; // the server's description of the file's index, with `root`, the prefix of its routes
let identity = ""; // of the file's index
let start = 0; // number of groups before those that are shown
let newest = 0; // number of the newest file; what was read for older ones is ignored
let unsaved = false; // whether anything was decided since the last download
const decisions = new Map(); // "keep" or "delete" by id

function button(text, act) {
  const node = element("button", "", text);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

function labelled(kind, text, act) {
  const input = element("input");
  input.type = kind;
  input.addEventListener("change", act);
  const label = element("label");
  label.append(input, text);
  return { input, label };
}

const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

// The file.

function isGroup(group) {
  return Array.isArray(group?.ids) && group.ids.length > 1 && group.ids.every((id) => typeof id === "string") &&
    Array.isArray(group.distances) && group.distances.length === group.ids.length &&
    [...group.distances, group.diameter].every(Number.isFinite);
}

function parsed(text) {
  let content = null;
  try {
    content = JSON.parse(text);
  } catch {
    // The check below names what is wrong.
  }
  if (typeof content?.identity !== "string" || !Array.isArray(content.groups) || !content.groups.every(isGroup)) {
    throw new Error("The file is damaged, or retrieval index duplicates --output has not written it. Write it again.");
  }
  return content;
}

async function find() {
  const { indexes } = await (await call("v1/indexes")).json();
  for (const name of indexes) {
    const root = `v1/indexes/${encodeURIComponent(name)}`;
    const about = await (await call(`${root}/index`)).json();
    if (about.identity === identity) return { ...about, root };
  }
  throw new Error(`The file is of another index than ${indexes.join(", ")}.`);
}

// Finds the index of the file again, for example with another key; what was decided stays.
async function connect() {
  const number = newest;
  try {
    const found = await find();
    if (number !== newest) return;
    index = found;
    show(groups.length ? `${counted(groups.length, "group")} of ${index.index}.` : "The file has no groups.", false);
    render();
  } catch (fault) {
    if (number !== newest) return;
    byId("access").open ||= fault.status === 401;
    show(fault.message, true);
  }
}

async function open(file) {
  if (!file || (unsaved && !window.confirm("Open another file? What you decided is not downloaded yet."))) return;
  const number = ++newest;
  groups = [];
  index = null;
  identity = "";
  start = 0;
  unsaved = false;
  decisions.clear();
  render();
  try {
    if (file.size > MOST_BYTES) {
      throw new Error(`The file has ${counted(file.size, "byte")}; the limit is ${counted(MOST_BYTES, "byte")}.`);
    }
    show("Reading …", false);
    const content = parsed(await file.text().catch(() => ""));
    if (number !== newest) return;
    identity = content.identity;
    groups = content.groups.map((group, place) => ({ ...group, number: place + 1, apart: false, shown: ITEMS_SHOWN }));
    await connect();
  } catch (fault) {
    if (number === newest) show(fault.message, true);
  }
}

// The groups. A card asks the server for its item when it is about to be seen.

const waiting = new WeakMap();
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    waiting.get(target)();
  }
}, { rootMargin: "300px" });

async function fill(card, frame, id) {
  try {
    const item = await (await call(`${index.root}/item?id=${encodeURIComponent(id)}`)).json();
    card.querySelector("p").append(item.label === null ? "" : `, ${item.label}`);
    const address = item.thumbnail_url ?? item.image_url;
    if (!address) throw new Error("This item has no picture.");
    const image = element("img");
    image.alt = "";
    // An <img> element cannot send the key.
    image.src = URL.createObjectURL(await (await call(address)).blob());
    image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
    image.addEventListener("error", () => { frame.textContent = "The picture cannot be shown."; });
    frame.replaceChildren(image);
  } catch (fault) {
    frame.textContent = fault.message; // for example, that the item is gone
  }
}

function choose(word, id) {
  decisions.set(id, word);
  unsaved = true;
  showActions();
}

function cardOf(group, place) {
  const id = group.ids[place];
  const card = element("li", "item");
  const frame = element("div", "frame", "…");
  const choice = element("fieldset");
  const distance = group.distances[place];
  const about = place || distance ? `distance ${distance.toFixed(4)}` : "representative";
  choice.append(element("legend", "key", id), element("p", "", about));
  for (const [word, text] of [["keep", "Keep"], ["delete", "Delete"]]) {
    const { input, label } = labelled("radio", text, () => choose(word, id));
    input.name = `${group.number}-${place}`;
    input.value = word;
    input.checked = decisions.get(id) === word;
    choice.append(label);
  }
  card.append(frame, choice);
  waiting.set(card, () => fill(card, frame, id));
  seen.observe(card);
  return card;
}

function sectionOf(group) {
  const section = element("section", "group");
  const title = element("h2", "", `Group ${group.number}: ${counted(group.ids.length, "item")}, diameter ${group.diameter.toFixed(4)}`);
  title.id = `group-${group.number}`;
  title.tabIndex = -1;
  section.setAttribute("aria-labelledby", title.id);
  const redraw = () => {
    const fresh = sectionOf(group);
    section.replaceWith(fresh);
    fresh.querySelector("h2").focus();
  };
  const { input, label } = labelled("checkbox", "Not the same", () => {
    group.apart = input.checked;
    unsaved = true;
    showActions();
  });
  input.checked = group.apart;
  const row = element("div", "row");
  row.append(label, button("Keep only the first", () => {
    for (const id of group.ids) decisions.set(id, "delete");
    choose("keep", group.ids[0]);
    redraw();
  }));
  // The representative comes first, then the nearest.
  const places = group.ids.map((_, place) => place).sort((a, b) => (a && b ? group.distances[a] - group.distances[b] : a - b));
  const list = element("ol", "items");
  list.append(...places.slice(0, group.shown).map((place) => cardOf(group, place)));
  section.append(title, row, list);
  const left = places.length - group.shown;
  if (left > 0) section.append(button(`Show more of ${counted(left, "other item")}`, () => { group.shown += 240; redraw(); }));
  return section;
}

function render() {
  seen.disconnect();
  start = Math.max(0, Math.min(start, GROUPS_SHOWN * Math.floor((groups.length - 1) / GROUPS_SHOWN)));
  const end = Math.min(start + GROUPS_SHOWN, groups.length);
  byId("groups").replaceChildren(...(index ? groups.slice(start, end).map(sectionOf) : []));
  byId("pages").hidden = !index || groups.length <= GROUPS_SHOWN;
  byId("range").textContent = `${start + 1} to ${end} of ${counted(groups.length, "group")}`;
  byId("previous").disabled = start === 0;
  byId("next").disabled = end === groups.length;
  showActions();
}

function turn(count) {
  start += count;
  render();
  byId("groups").querySelector("h2").focus();
}

// What was decided.

const doomed = () => [...decisions.keys()].filter((id) => decisions.get(id) === "delete");

// Sets of ids of which no two are a group again.
function reviewed() {
  const keeps = (group) => (id) => (group.apart ? decisions.get(id) !== "delete" : decisions.get(id) === "keep");
  return groups.map((group) => group.ids.filter(keeps(group))).filter((ids) => ids.length > 1);
}

function showActions() {
  const writable = ["write", "admin"].includes(index?.role);
  const ids = doomed();
  byId("actions").hidden = !index;
  byId("delete").textContent = `Delete ${counted(ids.length, "item")}`;
  byId("delete").disabled = !ids.length || !writable;
  byId("role").textContent = writable ? "" : "Deleting needs a key with the role write.";
}

function drop(ids) {
  const deleted = new Set(ids);
  for (const id of ids) decisions.delete(id);
  for (const group of groups) {
    const left = group.ids.map((id, place) => [id, group.distances[place]]).filter(([id]) => !deleted.has(id));
    group.ids = left.map(([id]) => id);
    group.distances = left.map(([, distance]) => distance);
  }
  groups = groups.filter((group) => group.ids.length > 1);
}

async function remove() {
  const ids = doomed();
  if (!window.confirm(`Delete ${counted(ids.length, "item")} from ${index.index}? This cannot be undone.`)) return;
  byId("delete").disabled = true;
  let asked = 0;
  let deleted = 0;
  let fault = null;
  try {
    while (asked < ids.length) {
      const body = JSON.stringify({ filter: { id: { in: ids.slice(asked, asked + DELETED_AT_ONCE) } } });
      const request = { method: "POST", body, headers: { "Content-Type": "application/json" } };
      deleted += (await (await call(`${index.root}/delete`, request)).json()).deleted;
      asked = Math.min(asked + DELETED_AT_ONCE, ids.length);
    }
  } catch (error) {
    fault = error;
  }
  drop(ids.slice(0, asked));
  render();
  const gone = asked - deleted ? ` ${counted(asked - deleted, "item")} had been gone already.` : "";
  show(`${fault ? `${fault.message} ` : ""}${counted(deleted, "item")} deleted.${gone}`, fault !== null);
  byId("status").focus();
}

function download() {
  const link = element("a");
  const content = new Blob([JSON.stringify({ identity, reviewed: reviewed() }, null, 1)], { type: "application/json" });
  link.href = URL.createObjectURL(content);
  link.download = "reviewed.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  unsaved = false;
}

byId("file").addEventListener("change", (event) => open(event.target.files[0]));
byId("file").addEventListener("click", (event) => { event.target.value = ""; }); // the same file may be chosen again
byId("previous").addEventListener("click", () => turn(-GROUPS_SHOWN));
byId("next").addEventListener("click", () => turn(GROUPS_SHOWN));
byId("delete").addEventListener("click", remove);
byId("download").addEventListener("click", download);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  if (identity) connect();
});
window.addEventListener("beforeunload", (event) => { if (unsaved) event.preventDefault(); });
