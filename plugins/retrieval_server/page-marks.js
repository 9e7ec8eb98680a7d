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
}
