"use strict";

// The URL's fragment holds the query, unless it is an image. Browsers do not send it to the server.

function select(id, value) {
  byId(id).value = value;
  if (byId(id).selectedIndex < 0) byId(id).selectedIndex = 0;
}

function remember() {
  const parameters = new URLSearchParams();
  if (last && last.id !== undefined) parameters.set("id", last.id);
  if (last?.text) parameters.set("text", last.text);
  for (const [id, sign] of marks) parameters.append(sign, id);
  const filter = byId("filter").value.trim();
  if (filter) parameters.set("filter", filter);
  if (byId("k").value !== "10") parameters.set("k", byId("k").value);
  if (byId("group").value) parameters.set("group", byId("group").value);
  if (byId("size").value !== "1") parameters.set("size", byId("size").value);
  if (String(countedFields) !== "label") for (const field of countedFields) parameters.append("count", field);
  if (!countedFields.length) parameters.set("count", "");
  if (severalIndexes) parameters.set("index", byId("index").value);
  if (byId("beside").value) parameters.set("beside", byId("beside").value);
  const address = String(parameters) && `#${parameters}`;
  if (address !== location.hash) history.pushState(null, "", address || location.pathname);
}

async function restore() {
  newest += 1; // an answer under way is of the address before
  const parameters = new URLSearchParams(location.hash.slice(1));
  const k = parameters.get("k") ?? "10";
  const isOffered = [...byId("k").options].some((option) => option.value === k);
  if (!isOffered && /^[1-9]\d{0,2}$/.test(k)) byId("k").add(new Option(k));
  byId("k").value = k;
  if (byId("k").selectedIndex < 0) byId("k").value = "10";
  byId("filter").value = parameters.get("filter") ?? "";
  countedFields = parameters.has("count") ? parameters.getAll("count").filter(Boolean) : ["label"];
  if (severalIndexes) {
    select("index", parameters.get("index") ?? byId("index").options[0].value);
    select("beside", parameters.get("beside") ?? "");
  }
  marks.clear();
  for (const [name, id] of parameters) if (Object.hasOwn(SIGNS, name)) marks.set(id, name);
  if (!(await open())) {
    show("", false);
    render([]);
    return;
  }
  select("group", parameters.get("group") ?? "");
  select("size", parameters.get("size") ?? "1");
  const id = parameters.get("id");
  const words = parameters.get("text");
  byId("text").value = words ?? "";
  try {
    if (id !== null) last = queryOf(await (await call(`${roots[0]}/item?id=${encodeURIComponent(id)}`)).json(), 0);
    else if (words) {
      last = { text: words };
      showPreview(null);
    } else if (last && (last.id !== undefined || last.text)) {
      last = null;
      showPreview(null);
    }
    await answer();
  } catch (fault) {
    render([]);
    show(fault.message, true);
  }
}

const start = () => listIndexes().catch(() => {}).finally(restore);
window.addEventListener("popstate", restore);
document.addEventListener("DOMContentLoaded", start); // when the other scripts are loaded too
