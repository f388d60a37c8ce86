// The player: it plays the frames, steps through them, and describes the box under the pointer.
// page.js and stage.js come before this file in one module.

const FRAME = 420; // milliseconds
const TRAVEL = 1100; // milliseconds of a frame in which bytes move
const HALFWAY = 0.5; // where moving parts stand in a frame that is not played
const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];

class Player {
  constructor(content, el) {
    this.content = content;
    this.last = content.captions.length - 1;
    this.number = 0;
    this.progress = HALFWAY;
    this.playing = false;
    this.root = add(el, "div", "lab-widget lab-layer");
    this.root.tabIndex = 0;
    this.root.setAttribute("role", "group");
    this.root.setAttribute("aria-label", `One layer, moving: ${content.title}`);
    add(this.root, "div", "lab-layer-title").textContent = [content.title, content.note].filter(Boolean).join(" · ");
    this.makeControls();
    this.caption = add(this.root, "div", "lab-layer-caption");
    this.where = add(this.caption, "span", "lab-layer-where");
    this.text = add(this.caption, "span", "lab-layer-text");
    this.canvas = add(this.root, "canvas");
    this.canvas.setAttribute("role", "img");
    this.makeScrubber();
    const legend = add(this.root, "div", "lab-legend");
    for (const n of this.usedCategories()) swatch(add(legend, "span"), ...content.categories[n]);
    this.readout = add(this.root, "div", "lab-layer-readout lab-readout");
    this.readout.hidden = true;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => (this.readout.hidden = true));
    this.canvas.addEventListener("pointerdown", (event) => this.pick(event));
    this.root.addEventListener("keydown", (event) => this.press(event));
    this.root.addEventListener("transitionend", () => this.schedule());
    this.resized = new ResizeObserver(() => this.schedule());
    this.resized.observe(this.root);
  }

  makeControls() {
    const controls = add(this.root, "div", "lab-layer-controls");
    const make = (text, title, act) => {
      const made = button(controls, text, title, act);
      made.setAttribute("aria-label", title);
      return made;
    };
    make("|◂", "To the first frame (Home)", () => this.go(0));
    make("◂", "One frame back (left arrow)", () => this.go(this.number - 1));
    this.playButton = make("▶ Play", "Play or pause (space)", () => this.toggle());
    make("▸", "One frame on (right arrow)", () => this.go(this.number + 1));
    const label = add(controls, "label");
    label.append("speed ");
    this.speed = add(label, "select");
    for (const speed of SPEEDS) {
      const option = add(this.speed, "option");
      option.value = speed;
      option.textContent = `${speed}×`;
    }
    this.speed.value = 1;
    this.counter = add(controls, "span", "lab-layer-counter");
  }

  makeScrubber() {
    this.scrubber = add(this.root, "input", "lab-layer-scrubber");
    Object.assign(this.scrubber, { type: "range", min: 0, max: this.last, value: 0 });
    this.scrubber.setAttribute("aria-label", "Frame");
    this.scrubber.addEventListener("input", () => this.go(Number(this.scrubber.value)));
  }

  usedCategories() {
    const used = new Set(this.content.ranks.flatMap(({ boxes }) => boxes.map((box) => box[2])));
    for (const { frames } of this.content.ranks) {
      for (const { held } of frames) held.forEach((size, n) => size && used.add(n));
    }
    return [...used].sort((a, b) => a - b);
  }

  close() {
    this.resized.disconnect();
    cancelAnimationFrame(this.request);
    clearTimeout(this.timer);
  }

  go(number) {
    this.pause();
    this.number = Math.max(0, Math.min(this.last, number));
    this.progress = HALFWAY;
    this.schedule();
  }

  toggle() {
    if (this.playing) {
      this.pause();
      this.schedule();
      return;
    }
    if (this.number === this.last) this.number = 0;
    this.playing = true;
    this.startedAt = performance.now();
    this.schedule();
  }

  pause() {
    this.playing = false;
    this.progress = HALFWAY;
  }

  press(event) {
    if (event.target.closest("button, select") && event.key === " ") return;
    if (event.target === this.speed || event.altKey || event.ctrlKey || event.metaKey) return;
    const act = {
      " ": () => this.toggle(),
      ArrowLeft: () => this.go(this.number - 1),
      ArrowRight: () => this.go(this.number + 1),
      Home: () => this.go(0),
      End: () => this.go(this.last),
    }[event.key];
    if (!act) return;
    // The notebook has its own meaning for these keys, and so has the scrubber.
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  schedule() {
    cancelAnimationFrame(this.request);
    this.request = requestAnimationFrame((now) => this.tick(now));
  }

  tick(now) {
    if (this.playing) {
      const moves = this.content.flights[this.number];
      const long = (moves ? TRAVEL : FRAME) / Number(this.speed.value);
      let passed = (now - this.startedAt) / long;
      if (passed >= 1) {
        this.startedAt = now;
        passed = 0;
        if (this.number === this.last) this.pause();
        else this.number += 1;
      }
      // What moves rests at both ends of its way for a moment.
      if (this.playing) this.progress = Math.min(Math.max(passed * 1.3 - 0.15, 0), 1);
    }
    this.draw();
    if (this.playing) this.schedule();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width || !penOf(this.canvas)) return;
    const plan = (this.plan = new Plan(this.content, width));
    this.canvas.style.height = `${plan.height}px`;
    const style = getComputedStyle(this.root);
    const pen = penOn(this.canvas, width, plan.height, window.devicePixelRatio || 1, style);
    const paper = style.getPropertyValue("--paper").trim() || "#fff";
    drawStage(pen, plan, this.number, this.progress, paper);
    drawCurve(pen, plan, this.number, style.color);
    this.scrubber.value = this.number;
    this.playButton.textContent = this.playing ? "⏸ Pause" : "▶ Play";
    this.counter.textContent = `frame ${this.number + 1} of ${this.last + 1}`;
    const [phase, stage, module, text] = this.content.captions[this.number];
    const where = [phase, module, stage.length ? `stage ${stage[0]} of ${stage[1]}` : ""];
    this.where.textContent = where.filter(Boolean).join(" · ");
    this.text.textContent = text;
    this.canvas.setAttribute("aria-label", `${this.where.textContent}: ${text}`);
    this.scrubber.setAttribute("aria-valuetext", `frame ${this.number + 1}, ${this.where.textContent}: ${text}`);
  }

  // On the curve the pointer moves the cursor.
  pick(event) {
    const { plan } = this;
    if (!plan || event.offsetY < plan.curveTop || event.offsetX < LABELS) return;
    const part = (event.offsetX - LABELS) / (plan.right - LABELS);
    this.go(Math.floor(part * (this.last + 1)));
  }

  point(event) {
    this.readout.hidden = true;
    if (event.buttons) this.pick(event);
    const found = this.boxAt(event.offsetX, event.offsetY);
    if (!found) return;
    const [name, about, category, size] = found;
    this.readout.replaceChildren();
    swatch(add(this.readout, "div", "lab-layer-name"), name, this.content.categories[category][1]);
    const bytes = formatBytes(size * this.content.unitBytes);
    for (const line of [`${inA(size)} · ${bytes} · ${this.content.categories[category][0]}`, about]) {
      add(this.readout, "div").textContent = line;
    }
    this.readout.hidden = false;
    const left = Math.min(event.offsetX + 14, this.canvas.clientWidth - this.readout.offsetWidth);
    this.readout.style.left = `${Math.max(0, left)}px`;
    this.readout.style.top = `${this.canvas.offsetTop + event.offsetY + 16}px`;
  }

  boxAt(x, y) {
    if (!this.plan) return null;
    for (const lane of this.content.lanes.keys()) {
      const boxes = this.plan.boxesOf(lane);
      for (const n of this.plan.frameOf(lane, this.number).boxes) {
        const [left, top, width] = this.plan.place(lane, boxes[n]);
        if (x >= left && x < left + width && y >= top && y < top + SHELF) return boxes[n];
      }
    }
    return null;
  }
}

export default {
  render({ model, el }) {
    const player = new Player(model.get("content"), el);
    return () => player.close();
  },
};
