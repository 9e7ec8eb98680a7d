"use strict";
for (const box of document.querySelectorAll(".embedding")) {
  const { points, thumbnails, near, apart } = JSON.parse(box.querySelector("script").textContent);
  const map = box.querySelector("svg"), status = box.querySelector("[role=status]"), shown = box.querySelector(".shown");
  const dots = [...map.querySelectorAll("circle")];
  let view = { x: -2, y: -2, size: 104 };
  const look = () => {
    map.setAttribute("viewBox", `${view.x} ${view.y} ${view.size} ${view.size}`);
    for (const dot of dots) dot.setAttribute("r", (0.8 * view.size) / 104);
  };
  const zoom = (by, x = view.x + view.size / 2, y = view.y + view.size / 2) => {
    const size = Math.min(104, Math.max(2, view.size * by)), share = size / view.size;
    view = { x: x - (x - view.x) * share, y: y - (y - view.y) * share, size };
    if (size === 104) view = { x: -2, y: -2, size };
    look();
  };
  let opened = -1;
  const picture = (number) => { const image = new Image(); image.src = thumbnails[number]; image.alt = ""; return image; };
  const element = (name, kind, ...children) => { const node = document.createElement(name); node.className = kind; node.append(...children); return node; };
  const show = (number) => {
    const [label, key] = points[number];
    shown.replaceChildren();
    if (thumbnails[number]) shown.append(picture(number));
    shown.append(`${label} · ${key}`);
    if (number !== opened) return;
    shown.append(element("p", "note", "Its nearest items on this map:"), element("ul", "sheet", ...near[number].map((other, place) =>
      element("li", `item ${points[other][0] === label ? "right" : "wrong"}`, ...(thumbnails[other] ? [picture(other)] : []), `${points[other][0]} `, element("small", "", `${apart[number][place]}`)))));
  };
  const closest = (event) => {
    const [x, y] = place(event);
    let best = -1, least = (view.size / 40) ** 2;
    dots.forEach((dot, number) => {
      const far = (dot.cx.baseVal.value - x) ** 2 + (dot.cy.baseVal.value - y) ** 2;
      if (far < least) { least = far; best = number; }
    });
    return best;
  };
  const place = (event) => {
    const frame = map.getBoundingClientRect();
    return [view.x + ((event.clientX - frame.left) / frame.width) * view.size, view.y + ((event.clientY - frame.top) / frame.height) * view.size];
  };
  box.querySelector(".in").addEventListener("click", () => zoom(0.6));
  box.querySelector(".out").addEventListener("click", () => zoom(1 / 0.6));
  box.querySelector(".whole").addEventListener("click", () => zoom(1e9));
  map.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY < 0 ? 0.8 : 1.25, ...place(event)); }, { passive: false });
  let from = null;
  map.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY, view.x, view.y]; });
  addEventListener("pointerup", () => { from = null; });
  map.addEventListener("pointermove", (event) => {
    if (from) {
      const scale = view.size / map.getBoundingClientRect().width;
      view = { ...view, x: from[2] - (event.clientX - from[0]) * scale, y: from[3] - (event.clientY - from[1]) * scale };
      look();
    }
    const best = closest(event);
    if (best >= 0 && opened < 0) show(best);
  });
  map.addEventListener("click", (event) => {
    opened = closest(event);
    dots.forEach((dot, number) => dot.setAttribute("stroke", number === opened ? "#000" : "none"));
    if (opened >= 0) show(opened);
  });
  const highlight = (wanted, fits) => {
    let count = 0;
    dots.forEach((dot, number) => {
      const hit = wanted === "" || fits(points[number][0]);
      dot.style.opacity = hit ? 1 : 0.08;
      if (wanted && hit && !count++) show(number);
    });
    status.textContent = wanted ? `${count} items` : "";
  };
  box.querySelector("input").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    highlight(wanted, (label) => label.toLowerCase().includes(wanted));
  });
  const classes = [...box.querySelectorAll(".legend button")];
  for (const button of classes) button.addEventListener("click", () => {
    const pressed = button.getAttribute("aria-pressed") === "true";
    for (const other of classes) other.setAttribute("aria-pressed", other === button && !pressed);
    highlight(pressed ? "" : button.value, (label) => label === button.value);
  });
}
