// A square to draw on, by mouse, pen, finger or keys; emits all strokes when one ends.
const STEP = 0.05; // of the side, for each press of an arrow
const ARROWS = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] };
const within = (part) => Math.round(1000 * Math.min(1, Math.max(0, part))) / 1000;

export default {
  template: `
    <svg viewBox="0 0 1 1" role="application" tabindex="0"
         aria-label="Pad: the arrow keys move the pen, the space bar sets it down or lifts it"
         @pointerdown.prevent="begin" @dragstart.prevent @pointermove="go" @pointerup="end" @pointercancel="end"
         @keydown="press" @blur="end">
      <polyline v-for="stroke in strokes" :points="stroke.map((point) => point.join()).join(' ')" />
      <circle class="pen" :class="{ down: drawing }" :cx="pen[0]" :cy="pen[1]" r="0.03" />
    </svg>`,
  data: () => ({ strokes: [], drawing: false, pen: [0.5, 0.5] }),
  methods: {
    at(event) {
      const box = this.$el.getBoundingClientRect();
      return [
        within((event.clientX - box.left) / box.width),
        within((event.clientY - box.top) / box.height),
      ];
    },
    begin(event) {
      if (event.button !== 0 || this.drawing) return;
      this.$el.setPointerCapture(event.pointerId);
      this.start(this.at(event));
    },
    start(point) {
      this.drawing = true;
      this.strokes.push([point, point]);
    },
    go(event) {
      if (this.drawing) this.strokes.at(-1).push(this.at(event));
    },
    end() {
      if (!this.drawing) return;
      this.drawing = false;
      this.$emit("drawn", this.strokes);
    },
    press(event) {
      if (event.key in ARROWS) this.move(ARROWS[event.key]);
      else if (event.key === " ") this.toggle();
      else return;
      event.preventDefault(); // the page does not scroll
    },
    move(step) {
      this.pen = this.pen.map((part, i) => within(part + step[i]));
      if (this.drawing) this.strokes.at(-1).push(this.pen);
    },
    toggle() {
      if (this.drawing) return this.end();
      this.start(this.pen);
      this.$emit("down");
    },
    replace(strokes) {
      this.drawing = false;
      this.strokes = strokes;
    },
  },
};
