"use strict";

// Marks that say whether a hit is right, if the server takes feedback and the key permits it.

const JUDGEMENTS = { liked: ["👍", "right"], disliked: ["👎", "wrong"] };

const mayJudge = ({ feedback, role }) => feedback && ["feedback", "write", "admin"].includes(role);

function judgeButtons(item, place) {
  const row = element("p", "judge");
  if (!item.search_id || !mayJudge(abouts[place])) return document.createDocumentFragment();
  row.append(...Object.entries(JUDGEMENTS).map(([name, [character, word]]) => {
    const button = buttonOf(name, character, `${name} ${place} ${item.id}`, () => judge(item, place, name, row));
    button.title = `This hit is ${word}`;
    button.setAttribute("aria-label", `${item.id} is ${word}`);
    button.setAttribute("aria-pressed", String(item.judged === name));
    return button;
  }));
  return row;
}

async function judge(item, place, name, row) {
  const body = JSON.stringify({ search_id: item.search_id, [name]: [item.id] });
  try {
    await call(`${roots[place]}/feedback`, { method: "POST", body, headers: { "Content-Type": "application/json" } });
    item.judged = name;
    for (const button of row.children) button.setAttribute("aria-pressed", String(button.className === name));
    show(`Marked: ${item.id} is ${JUDGEMENTS[name][1]}.`, false);
  } catch (fault) {
    show(fault.message, true);
  }
}
