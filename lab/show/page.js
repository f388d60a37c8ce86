// Functions with which all widgets build their part of a page.
function add(parent, tag, name = "") {
  const element = document.createElement(tag);
  element.className = name;
  parent.append(element);
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
