"use strict";

// "Who is it?": the class of the query, or unknown, at the rate that the index's calibration measured.

const FAR = 0.01; // accepted rate of false alarms, if the index has enough classes for it
const EVIDENCE = 5; // items

function inWords(rate) {
  if (rate >= 0.1) return `${Math.round(100 * rate)} in 100 come`;
  return `1 in ${Math.round(1 / rate).toLocaleString("en")} comes`;
}

function sentencesOf(verdict) {
  const sentences = [`Of things that the index does not have, about ${inWords(verdict.rate)} as near.`];
  if (verdict.label === null) sentences.push(`A name is given if at most ${inWords(verdict.far)} as near.`);
  if (verdict.second !== null) sentences.push(`It could also be: ${verdict.second}.`);
  if (verdict.stale) sentences.push("Many items have changed since the index was calibrated; calibrate it again.");
  return sentences.join(" ");
}

function evidenceOf(hits) {
  const list = element("ol", "evidence");
  list.setAttribute("aria-label", "Its nearest items");
  list.append(...hits.slice(0, EVIDENCE).map((hit) => {
    const entry = element("li");
    if (hit.image_url) entry.append(picture(hit, () => {}));
    entry.append(element("span", "", `${hit.label ?? "no label"} ${hit.distance.toFixed(4)}`));
    return entry;
  }));
  return list;
}

function photoChip(photo) {
  const others = last.photos.filter((other) => other !== photo);
  const chip = buttonOf("chip", "", `photo ${photo.name}`, () => searchWithFiles(others));
  const address = URL.createObjectURL(photo);
  const image = picture({ image_url: address }, () => image.remove());
  image.addEventListener("load", () => URL.revokeObjectURL(address));
  chip.append(image, element("span", "", photo.name), element("span", "count", "×"));
  chip.setAttribute("aria-label", `${photo.name}: remove this photo`);
  return chip;
}

function showPhotos() {
  const photos = last?.photos ?? [];
  const sentence = `The verdict is on all ${photos.length} photos; the search uses the first.`;
  byId("photos").replaceChildren(...(photos.length > 1 ? [...photos.map(photoChip), sentence] : []));
}

async function identify() {
  const number = newest;
  const query = last.photos ? { image: last.photos } : last;
  byId("verdict").replaceChildren(element("p", "", "Looking …"));
  let parts;
  try {
    const far = Math.max(FAR, abouts[0].calibration.least_rate);
    const verdict = await send("identify", roots[0], query, { far });
    const name = element("p", "name", verdict.label ?? "Unknown");
    parts = [name, element("p", "", sentencesOf(verdict)), evidenceOf(verdict.results)];
  } catch (fault) {
    parts = [element("p", "", fault.message)];
  }
  if (number === newest) byId("verdict").replaceChildren(...parts);
}

byId("who").addEventListener("click", identify);
