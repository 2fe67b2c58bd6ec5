// Small photos with what was found in them; a click opens one on the desk. A photo that is corrected
// there is drawn anew here. Names are only ever written as text.
const grid = element.querySelector(".tiles");
const tiles = new Map();

function add(kind, into, tag) {
  const made = into.appendChild(document.createElement(tag || "span"));
  made.className = kind;
  return made;
}

function mark(tile, marks) {
  const layer = tile.querySelector(".dots");
  layer.replaceChildren();
  for (const one of marks) {
    const dot = add(one.found ? "dot found" : "dot", layer);
    dot.textContent = one.text;
    dot.style.setProperty("--colour", one.colour);
    dot.style.left = 100 * one.x + "%";
    dot.style.top = 100 * one.y + "%";
  }
}

function draw() {
  grid.replaceChildren();
  tiles.clear();
  for (const one of props.value?.tiles || []) {
    const tile = add("tile", grid, "button"), picture = add("picture", tile);
    add("photo", picture, "img").src = one.photo;
    picture.firstChild.alt = "";
    picture.style.aspectRatio = one.width + " / " + one.height;
    add("dots", picture);
    add("name", tile).textContent = one.name;
    add("note", tile).textContent = one.note;
    tile.type = "button";
    tile.title = one.name + ": open it above";
    tile.addEventListener("click", () => {
      trigger("open", { at: one.at });
      document.getElementById(props.value.desk + "_photo")?.scrollIntoView({ block: "nearest" });
    });
    mark(tile, one.marks);
    tiles.set(one.name, tile);
  }
}

document.addEventListener("surefeat-shown", (event) => {
  const shown = event.detail, tile = tiles.get(shown.name);
  if (shown.desk !== props.value?.desk) return;
  for (const other of tiles.values()) other.classList.toggle("open", other === tile);
  if (!tile) return;
  mark(tile, shown.marks);
  tile.classList.toggle("checked", shown.checked);
});
watch("value", draw);
draw();
