"use strict";

// The filter, and the counts of values that narrow it.

const KEYWORDS = /^(and|or|not|in|exists|true|false|null)$/i; // keywords of the filter language
const MOST_VALUES = 12; // of one field

let countedFields = ["label"];

const nameOf = (field) => (/^[A-Za-z_]\w*$/.test(field) && !KEYWORDS.test(field) ? field : `"${field}"`);

function conditionOf(field, relation, value) {
  if (relation === "exists") return `exists(${nameOf(field)})`;
  const literal = typeof value === "string" ? `'${value.replaceAll("'", "''")}'` : String(value);
  return `${nameOf(field)} ${relation} ${literal}`;
}

function narrow(condition) {
  const before = byId("filter").value.trim();
  const grouped = /\bor\b/i.test(before) ? `(${before})` : before;
  byId("filter").value = before ? `${grouped} and ${condition}` : condition;
  again();
}

function addCondition() {
  const [field, relation, words] = ["field", "relation", "value"].map((id) => byId(id).value);
  let value = words;
  if (field !== "id" && field !== "label") {
    if (/^(true|false|null)$/.test(words)) value = JSON.parse(words);
    else if (words.trim() && Number.isFinite(Number(words))) value = Number(words);
  }
  narrow(conditionOf(field, relation, value));
}

const surrounded = (filter) => ` and ${filter.trim()} and `;
const isNarrowed = (condition) => surrounded(byId("filter").value).includes(surrounded(condition));

function toggleCondition(condition) {
  if (!isNarrowed(condition)) {
    narrow(condition);
    return;
  }
  const rest = surrounded(byId("filter").value).replace(surrounded(condition), () => " and ");
  byId("filter").value = rest.slice(" and ".length, -" and ".length);
  again();
}

// Counts the values of a field in the first list, the most frequent first; each element of a list counts.
function countsOf(field) {
  const counts = new Map();
  for (const value of shown[0].flatMap((item) => valueOf(item, field) ?? [])) {
    if (typeof value !== "object") counts.set(value, (counts.get(value) ?? 0) + 1);
  }
  return [...counts].sort((one, other) => other[1] - one[1]);
}

function chipOf(field, [value, count]) {
  const condition = conditionOf(field, "=", value);
  const chip = buttonOf("chip", `${text(value)} `, `count ${condition}`, () => toggleCondition(condition));
  chip.append(element("span", "count", count));
  chip.title = condition;
  chip.setAttribute("aria-pressed", String(isNarrowed(condition)));
  return chip;
}

function showCounts() {
  byId("counts").replaceChildren(...countedFields.flatMap((field) => {
    const counts = countsOf(field);
    if (!counts.length) return [];
    const row = element("p", "chips");
    row.append(element("span", "", `${field}:`), ...counts.slice(0, MOST_VALUES).map((pair) => chipOf(field, pair)));
    if (counts.length > MOST_VALUES) row.append(element("span", "", `and ${counts.length - MOST_VALUES} more`));
    return [row];
  }));
  byId("values").replaceChildren(...countsOf(byId("field").value).map(([value]) => new Option(String(value))));
}

function offerFields(fields) {
  const options = (names) => names.map((name) => new Option(name));
  const group = byId("group").value;
  byId("field").replaceChildren(...options(["label", "id", ...fields.slice(1)]));
  byId("group").replaceChildren(new Option("nothing", ""), ...options(fields));
  select("group", group);
  byId("counted").replaceChildren(byId("counted").firstElementChild, ...fields.map((field) => {
    const label = element("label");
    const box = element("input");
    box.type = "checkbox";
    box.value = field;
    box.checked = countedFields.includes(field);
    label.append(box, ` ${field}`);
    return label;
  }));
}

byId("apply").addEventListener("click", again);
byId("add-condition").addEventListener("click", addCondition);
for (const [id, act] of [["filter", again], ["value", addCondition]]) {
  byId(id).addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); act(); } });
}
byId("field").addEventListener("change", showCounts);
byId("counted").addEventListener("change", () => {
  countedFields = [...byId("counted").querySelectorAll(":checked")].map((box) => box.value);
  remember();
  showCounts();
});
