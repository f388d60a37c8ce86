// The widget: it receives messages, draws when there are new rows, and describes the row under the pointer.
// page.js, rows.js and panels.js come before this file in one module.

class View {
  constructor(store, look, el, stop) {
    this.store = store;
    this.look = look;
    this.root = add(el, "div", "lab-widget lab-live");
    const head = add(this.root, "div", "lab-live-head");
    this.status = add(head, "span", "lab-live-status");
    const button = add(head, "button", "lab-live-stop");
    button.textContent = "Stop";
    button.title = "End the run here; what was measured is kept";
    button.addEventListener("click", () => {
      button.disabled = true;
      button.textContent = "Stopping";
      stop();
    });
    this.chips = add(head, "span", "lab-live-ranks");
    this.hidden = new Set();
    const legend = add(head, "span", "lab-live-legend");
    for (const [name, colour] of look.categories) swatch(add(legend, "span"), name, colour);
    this.canvas = add(this.root, "canvas");
    this.canvas.style.height = `${look.height}px`;
    this.canvas.setAttribute("role", "img");
    this.readout = add(this.root, "div", "lab-live-readout");
    this.pointer = null;
    this.canvas.addEventListener("pointermove", (event) => this.point([event.offsetX, event.offsetY]));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.root.addEventListener("transitionend", () => this.schedule());
    this.resized = new ResizeObserver(() => this.schedule());
    this.resized.observe(this.canvas);
  }

  close() {
    this.resized.disconnect();
    cancelAnimationFrame(this.frame);
  }

  point(pointer) {
    this.pointer = pointer;
    this.schedule();
  }

  schedule() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  // A button for each rank, if there are several. A rank that is switched off leaves its space to the others.
  offerRanks() {
    const count = this.store.ranks.length;
    if (count < 2) return;
    for (let rank = this.chips.children.length; rank < count; rank++) {
      const chip = add(this.chips, "button", "lab-live-chip");
      chip.textContent = rank === 0 ? "rank 0" : rank;
      chip.title = `Show or hide rank ${rank}`;
      chip.addEventListener("click", () => {
        if (!this.hidden.delete(rank)) this.hidden.add(rank);
        this.schedule();
      });
    }
    [...this.chips.children].forEach((chip, rank) => {
      chip.setAttribute("aria-pressed", !this.hidden.has(rank));
      chip.disabled = !this.hidden.has(rank) && this.hidden.size === count - 1; // the last one stays
    });
  }

  draw() {
    this.offerRanks();
    const [width, height, ratio] = [this.canvas.clientWidth, this.look.height, window.devicePixelRatio || 1];
    if (!width) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const style = getComputedStyle(this.root);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = `11px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    pen.fillStyle = pen.strokeStyle = style.color;
    const { panels, scale } = arrange(this.store, width, height, this.hidden);
    for (const panel of panels) drawPanel(pen, panel, scale, this.look, this.store.names, ratio);
    this.readOut(pen, panels, scale, ratio);
    this.status.textContent = statusText(this.store);
    const peaks = panels.map(({ name, rank }) => `${name} peak ${formatBytes(rank.peak?.total ?? 0)}`);
    this.canvas.setAttribute("aria-label", `Memory by category over seconds: ${peaks.join(", ")}`);
  }

  readOut(pen, panels, scale, ratio) {
    this.readout.hidden = true;
    if (!this.pointer) return;
    const [x, y] = this.pointer;
    const under = panels.find((p) => x >= p.x && x < p.x + p.width && y >= p.y - 20 && y < p.y + p.height + p.lane + 8);
    const row = under?.columns[Math.floor((x - under.x) * ratio)];
    if (!row) return;
    for (const panel of panels) fill(pen, 0.6, panel.x + x - under.x, panel.y, 1 / ratio, panel.height);
    const { names } = this.store;
    const name = (number) => names[number] ?? "";
    this.readout.replaceChildren();
    line(this.readout, `${under.name} · step ${row.step + 1}`, `${row.seconds.toFixed(3)} s`, "lab-live-total");
    for (const text of [`${name(row.phase)}: ${name(row.op)}`, name(row.module)]) {
      if (text) add(this.readout, "div").textContent = text;
    }
    this.look.categories.forEach(([category, colour], n) => {
      swatch(line(this.readout, "", formatBytes(row.sizes[n])), category, colour);
    });
    line(this.readout, "device", formatBytes(row.total), "lab-live-total");
    if (scale.host) swatch(line(this.readout, "", formatBytes(row.host)), "host", this.look.host);
    this.readout.hidden = false;
    const fits = this.canvas.clientWidth - x > this.readout.offsetWidth + 24;
    const top = this.canvas.offsetTop + Math.min(y, this.look.height - this.readout.offsetHeight);
    this.readout.style.left = `${fits ? x + 14 : x - this.readout.offsetWidth - 14}px`;
    this.readout.style.top = `${Math.max(0, top)}px`;
  }
}

function statusText({ step, steps, loss }) {
  if (!steps) return "waiting for the ranks";
  return `step ${step} of ${steps}` + (loss === null ? "" : ` · loss ${Number(loss).toFixed(4)}`);
}

function line(parent, left, right, name = "") {
  const row = add(parent, "div", `lab-live-row ${name}`);
  const start = add(row, "span");
  start.textContent = left;
  add(row, "span").textContent = right;
  return start;
}

// One store of rows for each widget; a widget may have several views, which draw the same rows.
export default () => {
  const store = { names: [], ranks: [], step: 0, steps: 0, loss: null };
  const views = new Set();
  return {
    initialize({ model }) {
      model.on("msg:custom", (message, buffers) => {
        receive(store, message, buffers[0]);
        for (const view of views) view.schedule();
      });
    },
    render({ model, el }) {
      const view = new View(store, model.get("look"), el, () => model.send({ stop: true }));
      views.add(view);
      return () => {
        views.delete(view);
        view.close();
      };
    },
  };
};
