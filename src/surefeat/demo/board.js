// A photo with its parts: click to put one down, drag to move it, drag it off the photo to take it
// away. Works with mouse, finger and keys. Names and numbers are only ever written as text.
const stage = element.querySelector(".stage"), photo = element.querySelector("img");
const layer = element.querySelector(".marks"), loupe = element.querySelector(".loupe");
const NEAR = 4, CLOSER = 3;
let held = null;

const share = (event) => {
  const box = photo.getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
};
const off = ([x, y]) => x < 0 || y < 0 || x > 1 || y > 1;
const kept = (place) => place.map((part) => Math.min(1, Math.max(0, part)));

function add(kind, into) {
  const made = into.appendChild(document.createElement("div"));
  made.className = kind;
  return made;
}

function put(made, [x, y]) {
  made.style.left = 100 * x + "%";
  made.style.top = 100 * y + "%";
}

function draw() {
  if (held) return;
  const shown = props.value, focus = document.activeElement?.dataset?.part;
  if (shown) document.dispatchEvent(new CustomEvent("surefeat-shown", { detail: shown }));
  layer.replaceChildren();
  stage.hidden = !shown;
  if (!shown) return;
  if (photo.getAttribute("src") !== shown.photo) photo.src = shown.photo;
  photo.width = shown.width;
  photo.height = shown.height;
  photo.alt = shown.name;
  if (shown.box) {
    const [x0, y0, x1, y1] = shown.box, box = add(shown.boxFound ? "box found" : "box", layer);
    put(box, [x0, y0]);
    box.style.width = 100 * (x1 - x0) + "%";
    box.style.height = 100 * (y1 - y0) + "%";
  }
  if (shown.corner) put(add("corner", layer), shown.corner);
  for (const mark of shown.marks) {
    const disc = add(mark.found ? "mark found" : "mark", layer);
    disc.textContent = mark.text;
    disc.title = mark.says;
    disc.dataset.part = mark.part;
    disc.style.setProperty("--colour", mark.colour);
    disc.tabIndex = 0;
    disc.setAttribute("role", "button");
    disc.setAttribute("aria-label", mark.says + ", drag or press an arrow key to move it");
    put(disc, [mark.x, mark.y]);
    if (mark.part === focus) disc.focus({ preventScroll: true });
  }
}

function look(place) {
  loupe.hidden = off(place);
  const box = photo.getBoundingClientRect(), [x, y] = place, half = loupe.clientWidth / 2;
  loupe.style.backgroundImage = "url(" + photo.src + ")";
  loupe.style.backgroundSize = CLOSER * box.width + "px " + CLOSER * box.height + "px";
  loupe.style.backgroundPosition =
    half - CLOSER * x * box.width + "px " + (half - CLOSER * y * box.height) + "px";
  loupe.classList.toggle("right", x < 0.5);
}

function release(event) {
  const { disc, moved } = held, place = share(event);
  held = null;
  loupe.hidden = true;
  disc.classList.remove("held", "leaving");
  if (event.type === "pointercancel") draw();
  else if (moved) trigger("move", { part: disc.dataset.part, place: off(place) ? null : place });
  else trigger("put", { place: kept(place) });
}

stage.addEventListener("pointerdown", (event) => {
  const disc = event.target.closest(".mark");
  if (!disc || event.button) return;
  held = { disc, from: [event.clientX, event.clientY], moved: false };
  disc.setPointerCapture(event.pointerId);
});
stage.addEventListener("pointermove", (event) => {
  if (!held) return;
  const [x, y] = held.from;
  held.moved ||= Math.hypot(event.clientX - x, event.clientY - y) > NEAR;
  if (!held.moved) return;
  const place = share(event);
  held.disc.classList.add("held");
  held.disc.classList.toggle("leaving", off(place));
  put(held.disc, place);
  look(place);
});
stage.addEventListener("pointerup", (event) => held && release(event));
stage.addEventListener("pointercancel", (event) => held && release(event));
stage.addEventListener("click", (event) => {
  if (!event.target.closest(".mark")) trigger("put", { place: kept(share(event)) });
});
stage.addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const disc = event.target.closest(".mark"), step = steps[event.key];
  if (!disc || !(step || event.key === "Delete")) return;
  event.preventDefault();
  if (!step) return trigger("move", { part: disc.dataset.part, place: null });
  const far = event.shiftKey ? 10 : 1;
  const now = [parseFloat(disc.style.left) / 100, parseFloat(disc.style.top) / 100];
  const place = kept([now[0] + (far * step[0]) / photo.width, now[1] + (far * step[1]) / photo.height]);
  put(disc, place);
  trigger("move", { part: disc.dataset.part, place });
});
watch("value", draw);
draw();
