"use strict";

// Pictures that the hits should be more like, or less like.

const SIGNS = { like: ["+", "More like"], dislike: ["−", "Less like"] };

const marks = new Map(); // "like" or "dislike" by item id

const marked = (sign) => [...marks.keys()].filter((id) => marks.get(id) === sign);

function mark(id, sign) {
  marks.set(id, sign);
  again();
}

function unmark(id) {
  marks.delete(id);
  if (isWall()) marks.clear(); // without anything to be like, there is nothing to search for
  again();
}

function markButtons(item) {
  const row = element("p", "mark");
  const signs = item.distance === undefined ? ["like"] : ["like", "dislike"];
  row.append(...signs.map((sign) => {
    const [character, words] = SIGNS[sign];
    const button = buttonOf(sign, character, `${sign} ${item.id}`, () => mark(item.id, sign));
    button.title = `${words} this`;
    button.setAttribute("aria-label", `${words} ${item.id}`);
    return button;
  }));
  return row;
}

function showMarks() {
  byId("marks").replaceChildren(...[...marks].map(([id, sign]) => {
    const [character, words] = SIGNS[sign];
    const chip = buttonOf(`chip ${sign}`, `${character} `, `mark ${id}`, () => unmark(id));
    const address = `${roots[0]}/items/${encodeURIComponent(id)}/thumbnail`;
    const image = picture({ thumbnail_url: address }, () => image.remove());
    chip.append(image, element("span", "", id), element("span", "count", "×"));
    chip.setAttribute("aria-label", `${words} ${id}: remove this mark`);
    return chip;
  }));
  byId("golden").hidden = goldenQuery() === null;
}

// A golden query names the liked pictures as the right answers to the current query.

const golden = new Map(); // the saved lines of the file, by their query

function goldenQuery() {
  const relevant = marked("like");
  const { id, vector, image, text } = last ?? {};
  const isPart = image !== undefined && !image.name; // a part of a picture has no file
  if (!last || !relevant.length || isPart) return null;
  if (text) return { text, relevant };
  if (id !== undefined) return { id, relevant };
  return vector ? { vector, relevant } : { query: image.name, relevant };
}

function saveGoldenQuery() {
  const { relevant, ...query } = goldenQuery();
  golden.set(JSON.stringify(query), JSON.stringify({ ...query, relevant }));
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([...golden.values()].map((line) => `${line}\n`), { type: "application/jsonl" }));
  link.download = "golden.jsonl";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

byId("golden").addEventListener("click", saveGoldenQuery);
