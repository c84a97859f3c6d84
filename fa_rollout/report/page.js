// Values under the pointer. Without this script the page still says all that its pictures show.
"use strict";
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const cross = document.createElement("div");
  cross.className = "cross";

  const show = (event, nodes) => {
    tip.replaceChildren(...nodes);
    tip.hidden = false;
    const width = document.documentElement.clientWidth;
    const left = Math.min(event.pageX + 14, scrollX + width - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(scrollX + 8, left)}px`;
    tip.style.top = `${event.pageY + 18}px`;
  };
  const hide = () => {
    tip.hidden = true;
    cross.remove();
  };
  const row = (colour, text) => {
    const line = document.createElement("div");
    if (colour) {
      const mark = document.createElement("i");
      mark.className = `fill ${colour}`;
      line.append(mark);
    }
    line.append(text);
    return line;
  };
  const said = (value) => {
    if (value === null) return "–";
    const size = Math.abs(value);
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 6 : 3 });
  };

  for (const area of document.querySelectorAll(".area[data-tip]")) {
    const { points, between, lines } = JSON.parse(area.dataset.tip);
    if (!points.length) continue;
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      const place = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const last = points.length - 1;
      const index = between ? Math.round(place * last) : Math.min(last, Math.floor(place * points.length));
      const at = between ? (last ? index / last : 0.5) : (index + 0.5) / points.length;
      cross.style.left = `${at * 100}%`;
      area.append(cross);
      const rows = lines.map((line) => row(line.colour, `${line.name}: ${said(line.values[index] ?? null)}`));
      show(event, [row("", points[index]), ...rows]);
    });
    area.addEventListener("pointerleave", hide);
  }
  for (const part of document.querySelectorAll("[data-t]")) {
    part.addEventListener("pointermove", (event) => show(event, [row("", part.dataset.t)]));
    part.addEventListener("pointerleave", hide);
  }
})();
