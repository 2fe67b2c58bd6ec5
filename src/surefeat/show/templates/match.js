"use strict";
// The two photos with their matches: hover or tap a mark for its partner, slide to see fewer.
(function () {
  const data = JSON.parse(document.getElementById("matches").textContent);
  const stage = document.getElementById("stage"), drawing = document.getElementById("marks");
  const photos = [0, 1].map((side) => document.getElementById("photo" + side));
  const slider = document.getElementById("slider"), least = document.getElementById("least");
  const lines = document.getElementById("lines"), said = document.getElementById("said");
  const rows = Array.from(document.querySelectorAll("#points tbody tr"));
  const hint = said.textContent, reach = 30;
  let chosen = -1, pinned = -1;

  function element(name, into) {
    return into.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
  }

  const below = element("g", drawing), above = element("g", drawing);
  const marks = data.map(() => null);
  // The best is drawn last, on top of the others.
  for (let i = data.length - 1; i >= 0; i--) {
    marks[i] = { seam: element("line", below), line: element("line", below),
      ends: [element("circle", above), element("circle", above)] };
    const kind = (data[i].doubtful ? "doubtful" : "sure") + (data[i].back ? "" : " astray");
    for (const part of [marks[i].line, ...marks[i].ends]) {
      part.setAttribute("class", kind);
      if (!data[i].doubtful) part.style.setProperty("--colour", data[i].colour);
    }
    marks[i].seam.setAttribute("class", "seam");
  }

  function place(match, side) {
    const box = photos[side].getBoundingClientRect(), from = stage.getBoundingClientRect();
    const [x, y] = match.places[side];
    return [box.left - from.left + x * box.width, box.top - from.top + y * box.height];
  }

  function layOut() {
    drawing.setAttribute("viewBox", [0, 0, stage.clientWidth, stage.clientHeight].join(" "));
    data.forEach((match, i) => {
      const ends = [place(match, 0), place(match, 1)];
      for (const line of [marks[i].seam, marks[i].line]) {
        ends.forEach(([x, y], side) => {
          line.setAttribute("x" + (side + 1), x);
          line.setAttribute("y" + (side + 1), y);
        });
      }
      ends.forEach(([x, y], side) => {
        marks[i].ends[side].setAttribute("cx", x);
        marks[i].ends[side].setAttribute("cy", y);
      });
    });
  }

  const visible = (i) => data[i].value >= Number(slider.value);

  function show() {
    let count = 0;
    data.forEach((match, i) => {
      const on = visible(i), picked = i === chosen;
      count += on;
      for (const part of [marks[i].seam, marks[i].line, ...marks[i].ends]) {
        part.classList.toggle("chosen", picked);
        part.classList.toggle("dim", chosen >= 0 && !picked);
      }
      const drawn = on && (lines.checked || picked) ? "" : "none";
      marks[i].line.style.display = drawn;
      marks[i].seam.style.display = picked ? drawn : "none";
      for (const end of marks[i].ends) end.style.display = on ? "" : "none";
      if (rows[i]) {
        rows[i].hidden = !on;
        rows[i].classList.toggle("chosen", picked);
      }
    });
    least.textContent = slider.dataset.unit === "%" ? slider.value + " %" : Number(slider.value).toFixed(2);
    document.getElementById("count").textContent = count + " of " + data.length + " shown";
    said.textContent = chosen < 0 ? hint : data[chosen].says;
  }

  function choose(i) {
    if (i === chosen) return;
    chosen = i;
    if (i >= 0) {  // On top of all others.
      below.append(marks[i].seam, marks[i].line);
      above.append(...marks[i].ends);
    }
    show();
  }

  function nearest(event) {
    const from = stage.getBoundingClientRect();
    const x = event.clientX - from.left, y = event.clientY - from.top;
    let best = -1, closest = reach;
    data.forEach((match, i) => {
      if (!visible(i)) return;
      for (const side of [0, 1]) {
        const [px, py] = place(match, side), far = Math.hypot(px - x, py - y);
        if (far < closest) [best, closest] = [i, far];
      }
    });
    return best;
  }

  stage.addEventListener("pointermove", (event) => {
    const near = nearest(event);
    choose(near >= 0 ? near : pinned);
  });
  stage.addEventListener("pointerleave", () => choose(pinned));
  stage.addEventListener("click", (event) => {
    const near = nearest(event);
    pinned = near === pinned ? -1 : near;
    choose(pinned);
  });
  rows.forEach((row, i) => {
    row.addEventListener("pointerenter", () => choose(i));
    row.addEventListener("pointerleave", () => choose(pinned));
    row.addEventListener("focus", () => choose(i));
    row.addEventListener("blur", () => choose(pinned));
  });
  slider.addEventListener("input", () => {
    pinned = -1;
    chosen = -1;
    show();
  });
  lines.addEventListener("change", show);
  new ResizeObserver(layOut).observe(stage);
  window.addEventListener("load", layOut);
  layOut();
  show();
})();
