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
    this.bars = ["closed form", "plan"].map((name) => new Bar(this.chart, name, look));
    this.host = new Bar(this.chart, "host", look);
    this.legend = add(this.chart, "div", "lab-tuner-legend");
    this.note = add(this.root, "div", "lab-tuner-note");
    this.bill = add(this.root, "div", "lab-tuner-note lab-tuner-bill");
    this.texts = ["Python", "shell"].map((name) => new Copied(this.root, name));
  }

  draw(content) {
    this.root.dataset.verdict = content.verdict;
    this.verdict.textContent = content.words;
    this.note.textContent = content.note;
    this.bill.textContent = content.bill;
    this.suggestions.replaceChildren();
    content.suggestions.forEach((words, n) => {
      const button = add(this.suggestions, "button");
      button.textContent = `Set ${words}`;
      button.addEventListener("click", () => this.accept(n));
    });
    this.texts.forEach((text, n) => text.show(content.texts[n]));
    // An illegal combination has no bytes: the last bars stay, pale.
    if (!content.bars.length) return;
    this.bars.forEach((bar, n) => bar.show(content.bars[n], content.limit, content.scale));
    this.host.show(content.host, content.host?.limit, content.host?.scale);
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
    this.root = add(parent, "div", `lab-tuner-bar lab-tuner-${name.replace(" ", "-")}`);
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

  show(bar, limit, scale) {
    this.root.hidden = !bar;
    if (!bar) return;
    this.name.textContent = bar.name;
    this.total.textContent = bar.total;
    this.root.classList.toggle("lab-tuner-stale", bar.stale);
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
    const button = add(this.root, "button");
    button.textContent = "Copy";
    button.title = `Copy as ${name}`;
    this.code = add(this.root, "code");
    button.addEventListener("click", async () => {
      const range = document.createRange();
      range.selectNodeContents(this.code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      // A page from another machine without https has no clipboard: the text is selected, to be copied by hand.
      if (navigator.clipboard) await navigator.clipboard.writeText(this.code.textContent);
      button.textContent = navigator.clipboard ? "Copied" : "Marked";
      setTimeout(() => (button.textContent = "Copy"), 1200);
    });
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
