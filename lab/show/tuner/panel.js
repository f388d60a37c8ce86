// The tuner's panel: it draws the last content from Python. The widths of the bars change with a transition.
// page.js comes before this file in one module.

class Panel {
  constructor(el, look, accept) {
    this.look = look;
    this.accept = accept;
    this.root = add(el, "div", "lab-widget lab-tuner");
    this.verdict = add(this.root, "div", "lab-tuner-verdict");
    this.verdict.setAttribute("aria-live", "polite");
    this.suggestions = add(this.root, "div", "lab-tuner-suggestions");
    this.chart = add(this.root, "div", "lab-tuner-chart");
    this.device = new Bar(this.chart, "device", look);
    this.host = new Bar(this.chart, "host", look);
    this.legend = add(this.chart, "div", "lab-tuner-legend");
    this.note = add(this.root, "div", "lab-tuner-note");
    this.seconds = add(this.root, "div", "lab-tuner-note");
    this.texts = ["Python", "shell"].map((name) => new Copied(this.root, name));
  }

  draw(content) {
    this.root.dataset.verdict = content.verdict;
    this.verdict.textContent = content.words;
    this.note.textContent = content.note;
    this.seconds.textContent = content.seconds;
    this.suggestions.replaceChildren();
    content.suggestions.forEach((words, n) => button(this.suggestions, `Set ${words}`, "", () => this.accept(n)));
    this.texts.forEach((text, n) => text.show(content.texts[n]));
    // An illegal combination, and one that is being planned, have no bytes: the last bars stay, pale.
    if (!content.bar) return;
    this.device.show(content.bar);
    this.host.show(content.host);
    this.legend.replaceChildren();
    for (const [category, bytes, parts] of content.legend) {
      swatch(add(this.legend, "span", "lab-tuner-category"), category, this.look[category]);
      add(this.legend, "span", "lab-tuner-bytes").textContent = bytes;
      add(this.legend, "span", "lab-tuner-parts").textContent = parts;
    }
  }
}

// A bar with its name above it, and a line at the limit if there is one.
class Bar {
  constructor(parent, name, look) {
    this.root = add(parent, "div", `lab-tuner-bar lab-tuner-${name}`);
    this.root.hidden = true;
    const head = add(this.root, "div", "lab-tuner-head");
    this.name = add(head, "span");
    this.total = add(head, "span", "lab-tuner-total");
    const track = add(this.root, "div", "lab-tuner-track");
    this.parts = Object.entries(look).map(([category, colour]) => {
      const part = add(track, "div", "lab-tuner-part");
      part.style.background = colour;
      return [category, part];
    });
    this.line = add(track, "div", "lab-tuner-line");
    this.limit = add(this.line, "span");
  }

  show(bar) {
    this.root.hidden = !bar;
    if (!bar) return;
    this.name.textContent = bar.name;
    this.total.textContent = bar.total;
    const { limit, scale } = bar;
    let start = 0;
    for (const [category, part] of this.parts) {
      // A bar longer than the scale is cut; its total says so.
      const end = Math.min(scale, start + (bar.sizes[category] ?? 0));
      part.style.width = `${((end - start) / scale) * 100}%`;
      part.title = bar.sizes[category] ? `${category}: ${bar.texts[category]}` : "";
      start = end;
    }
    this.line.style.left = `${(limit / scale) * 100}%`;
    // A line far to the left has its label at its right.
    this.line.classList.toggle("lab-tuner-early", limit / scale < 0.6);
    this.limit.textContent = bar.line;
  }
}

// A line of code and a button that puts it on the clipboard.
class Copied {
  constructor(parent, name) {
    this.root = add(parent, "div", "lab-tuner-copy");
    const copy = button(this.root, "Copy", `Copy as ${name}`, async () => {
      const range = document.createRange();
      range.selectNodeContents(this.code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      // A page from another machine without https has no clipboard: the text is selected, to be copied by hand.
      if (navigator.clipboard) await navigator.clipboard.writeText(this.code.textContent);
      copy.textContent = navigator.clipboard ? "Copied" : "Marked";
      setTimeout(() => (copy.textContent = "Copy"), 1200);
    });
    this.code = add(this.root, "code");
  }

  show(text) {
    this.root.hidden = !text;
    this.code.textContent = text;
  }
}

export default {
  render({ model, el }) {
    const panel = new Panel(el, model.get("look"), (n) => model.send({ suggestion: n }));
    const draw = () => panel.draw(model.get("content"));
    model.on("change:content", draw);
    draw();
    return () => model.off("change:content", draw);
  },
};
