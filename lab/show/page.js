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
