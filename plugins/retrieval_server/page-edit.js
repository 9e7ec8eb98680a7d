"use strict";

// The API key, and adding, changing and deleting items with it.

let editing = null; // subject of the dialogue: an existing item, or an image to add

async function fill(image, address) {
  if (!sessionStorage.getItem(KEY) || !address.startsWith("/")) {
    image.src = address;
    return;
  }
  try { // an <img> element cannot send the key
    const content = URL.createObjectURL(await (await call(address)).blob());
    if (image.id !== "preview") image.addEventListener("load", () => URL.revokeObjectURL(content), { once: true });
    image.src = content;
  } catch {
    image.dispatchEvent(new Event("error"));
  }
}

const isWritable = () => document.body.classList.contains("writable");

function applyRole(role) {
  document.body.classList.toggle("writable", ["write", "admin"].includes(role));
}

// The label on a card, edited in place: Enter saves, Escape cancels.
function labelOf(item, place) {
  const name = item.label ?? "no label";
  if (!isWritable() || place !== 0) return element("span", "label", name);
  const label = buttonOf("label", name, `label ${item.id}`, () => {
    label.replaceWith(input);
    input.value = item.label ?? "";
    input.select();
  });
  label.title = "Change the label";
  label.setAttribute("aria-label", `Label of ${item.id}: ${name}. Change it`);
  const input = element("input", "label");
  input.type = "text";
  input.setAttribute("aria-label", `Label of ${item.id}`);
  const close = () => {
    const after = card(item, place);
    input.closest(".hit").replaceWith(after);
    after.querySelector(".label").focus();
  };
  input.addEventListener("keydown", async (event) => {
    if (event.key === "Escape") close();
    if (event.key !== "Enter") return;
    try {
      await patch(item.id, { label: input.value || null });
      item.label = input.value || null;
      close();
      showCounts();
      show(`The label of ${item.id} is now: ${item.label ?? "none"}`, false);
    } catch (fault) {
      show(fault.message, true);
    }
  });
  return label;
}

function editButtons(hit) {
  const row = element("p", "edit");
  for (const [word, act] of [["Change", () => describe(hit)], ["Delete", () => remove(hit)]]) {
    const button = buttonOf("", word, `${word} ${hit.id}`, act);
    button.setAttribute("aria-label", `${word} ${hit.id}`);
    row.append(button);
  }
  return row;
}

const addressOf = (id) => `${roots[0]}/item?id=${encodeURIComponent(id)}`;

function patch(id, changes) {
  const headers = { "Content-Type": "application/json" };
  return call(addressOf(id), { method: "PATCH", body: JSON.stringify(changes), headers });
}

function describe(item) {
  editing = item;
  byId("item-title").textContent = item.image ? "Add this picture" : "Change the item";
  byId("item-id").value = item.image ? item.image.name ?? "" : item.id;
  byId("item-id").readOnly = !item.image;
  byId("item-label").value = item.label ?? "";
  byId("item-metadata").value = JSON.stringify(item.metadata ?? {}, null, 2);
  byId("item-fault").textContent = "";
  byId("item").showModal();
}

async function exists(id) {
  try {
    return Boolean(await call(addressOf(id)));
  } catch (fault) {
    if (fault.status === 404) return false;
    throw fault;
  }
}

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

// The server merges metadata as RFC 7396 says: an entry that is null is removed.
function mergePatch(before, after) {
  if (!isObject(before) || !isObject(after)) return after;
  const patch = {};
  for (const name of Object.keys(before)) if (!(name in after)) patch[name] = null;
  for (const [name, value] of Object.entries(after)) {
    if (JSON.stringify(value) !== JSON.stringify(before[name])) patch[name] = mergePatch(before[name], value);
  }
  return patch;
}

async function save() {
  const id = byId("item-id").value;
  const label = byId("item-label").value;
  const metadata = byId("item-metadata").value.trim() || "{}";
  const item = editing;
  try {
    let parsed;
    try {
      parsed = JSON.parse(metadata);
    } catch {
      throw new Error('The metadata must be a JSON object, such as {"price": 20}.');
    }
    if (item.image) {
      if (await exists(id)) throw new Error("An item has this id already. Choose another, or change that item.");
      const body = new FormData();
      if (label) body.append("label", label);
      body.append("metadata", metadata);
      body.append("image", item.image, "item");
      await call(addressOf(id), { method: "PUT", body });
    } else {
      await patch(id, { label: label || null, metadata: mergePatch(item.metadata ?? {}, parsed) });
    }
    byId("item").close();
    await open();
    await again();
  } catch (fault) {
    byId("item-fault").textContent = fault.message;
  }
}

async function remove(hit) {
  if (!window.confirm(`Delete ${hit.id} from the index? This cannot be undone.`)) return;
  try {
    await call(addressOf(hit.id), { method: "DELETE" });
    await open();
    await again();
  } catch (fault) {
    show(fault.message, true);
  }
}

async function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  byId("key").value = "";
  byId("key-state").textContent = key ? "This tab has a key." : "This tab has no key.";
  await start();
}

byId("key-state").textContent = sessionStorage.getItem(KEY) ? "This tab has a key." : "This tab has no key.";
byId("key-form").addEventListener("submit", (event) => { event.preventDefault(); useKey(byId("key").value.trim()); });
byId("forget").addEventListener("click", () => useKey(""));
byId("add").addEventListener("click", () => describe({ image: whole.image }));
byId("item-form").addEventListener("submit", (event) => { event.preventDefault(); save(); });
byId("cancel").addEventListener("click", () => byId("item").close());
