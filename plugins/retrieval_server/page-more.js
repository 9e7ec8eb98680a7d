"use strict";

// Portions of an answer, in groups if asked for, and the next portion when the end comes into view.
// Without a query the answer is the wall: all items that match the filter.

const WALL = 60; // items of a portion
const MOST_SKIPPED = 10000; // hits that a search can skip

let starts = []; // where each list's next portion starts: a number of hits or a cursor
let newestFirst = [true, true]; // whether each index can list its newest items first
let isLoading = false;

const isWall = () => !last && !marked("like").length;

async function portion(place, start) {
  const filter = byId("filter").value.trim();
  if (isWall()) return itemsAfter(place, { limit: WALL, ...(filter && { filter }), ...(start && { cursor: start }) });
  const k = Number(byId("k").value);
  const options = { k, explain: true, ...(filter && { filter }), ...(start && { offset: start }) };
  for (const sign of ["like", "dislike"]) if (marked(sign).length) options[sign] = marked(sign);
  const group = byId("group").value;
  if (group) Object.assign(options, { group_by: nameOf(group), group_size: Number(byId("size").value) });
  if (abouts[place].calibration && !last?.text) options.scores = true;
  const answer = await send("search", roots[place], last, options);
  const groups = new Set(answer.results.map((hit) => (group ? text(valueOf(hit, group)) : hit.id)));
  const end = (start ?? 0) + k;
  return { ...answer, next: groups.size < k || end > MOST_SKIPPED ? null : end };
}

async function itemsAfter(place, parameters) {
  const list = async (order) => {
    const address = `${roots[place]}/items?${new URLSearchParams({ ...parameters, ...order })}`;
    const { items, cursor } = await (await call(address)).json();
    return { results: items, next: cursor };
  };
  if (!newestFirst[place]) return list();
  try {
    return await list({ order: "newest" });
  } catch (fault) {
    if (![400, 422].includes(fault.status)) throw fault;
    const answer = await list(); // some stores cannot tell which items are new
    newestFirst[place] = false;
    return answer;
  }
}

function extend(place, { results, next, search_id: search }) {
  const field = isWall() || byId("size").value === "1" ? "" : byId("group").value;
  const list = byId(LISTS[place]);
  list.setAttribute("aria-label", isWall() ? "Items" : "Nearest items, nearest first");
  for (const item of results) item.search_id = search;
  for (const item of results) (field ? groupOf(list, text(valueOf(item, field))) : list).append(card(item, place));
  shown[place].push(...results);
  starts[place] = next;
}

// Returns the list of a group's hits, which follow one another.
function groupOf(list, value) {
  const before = list.lastElementChild;
  if (before?.dataset.value === value) return before.lastElementChild;
  const group = element("li", "group");
  const hits = element("ol", "hits");
  group.dataset.value = value;
  hits.setAttribute("aria-label", value);
  group.append(element("p", "title", value), hits);
  list.append(group);
  return hits;
}

async function more() {
  if (isLoading || !starts.some(Boolean)) return;
  isLoading = true;
  const number = newest;
  const settled = await Promise.allSettled(roots.map((_, place) => starts[place] && portion(place, starts[place])));
  isLoading = false;
  if (number !== newest) return;
  settled.forEach(({ value, reason }, place) => {
    if (value) extend(place, value);
    if (value || reason) tell(place, reason ? reason.message : counted(place), Boolean(reason));
    if (reason) starts[place] = null;
  });
  redraw(() => { showCounts(); watchMore(); });
}

const bottom = new IntersectionObserver((entries) => {
  // Only a person who scrolls asks for more: answers that fit the window stay as long as they are.
  if (window.scrollY > 0 && entries.some((entry) => entry.isIntersecting)) more();
});

function watchMore() {
  byId("more").hidden = !starts.some(Boolean);
  bottom.disconnect();
  bottom.observe(byId("more"));
}

byId("more").dataset.key = "more";
byId("more").addEventListener("click", more);
byId("size").addEventListener("change", again);
byId("group").addEventListener("change", again);
