// Functions with which all widgets build their part of a page.
function add(parent, tag, name = "") {
  const element = document.createElement(tag);
  element.className = name;
  parent.append(element);
  return element;
}

function button(parent, text, title, act, name = "") {
  const element = add(parent, "button", name);
  element.type = "button";
  element.textContent = text;
  element.title = title;
  element.addEventListener("click", act);
  return element;
}

function swatch(parent, name, colour) {
  add(parent, "i", "lab-swatch").style.background = colour;
  parent.append(name);
}

// The pen of a canvas. Where a browser draws no canvas, a line says so in its place.
function penOf(canvas) {
  const pen = canvas.getContext("2d");
  if (!pen && canvas.isConnected) {
    const line = document.createElement("div");
    line.textContent = "This browser draws no canvas, which this picture needs: a current Firefox, Chrome or Safari does.";
    canvas.replaceWith(line);
  }
  return pen;
}

// An empty canvas of so many CSS pixels, and the pen on it.
function penOn(canvas, width, height, ratio, style) {
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = penOf(canvas);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = `11px ${style.fontFamily}`;
  pen.textBaseline = "middle";
  pen.fillStyle = pen.strokeStyle = style.color;
  return pen;
}

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function unitFor(top) {
  return UNITS.find(([, size]) => top >= size) ?? UNITS[3];
}

function formatBytes(bytes) {
  if (bytes < 2 ** 10) return `${bytes.toFixed(0)} B`;
  const [name, size] = unitFor(bytes);
  const value = bytes / size;
  return `${value.toFixed(value < 10 ? 2 : 1)} ${name}`;
}
