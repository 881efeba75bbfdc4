// A square to draw on, by mouse, pen or finger; emits all strokes when one ends.
export default {
  template: `
    <svg viewBox="0 0 1 1" role="img" aria-label="pad to draw on"
         @pointerdown.prevent="begin" @dragstart.prevent @pointermove="go" @pointerup="end" @pointercancel="end">
      <polyline v-for="stroke in strokes" :points="stroke.map((point) => point.join()).join(' ')" />
    </svg>`,
  data: () => ({ strokes: [], drawing: false }),
  methods: {
    at(event) {
      const box = this.$el.getBoundingClientRect();
      const place = (share) => Math.round(1000 * Math.min(1, Math.max(0, share))) / 1000;
      return [
        place((event.clientX - box.left) / box.width),
        place((event.clientY - box.top) / box.height),
      ];
    },
    begin(event) {
      if (event.button !== 0 || this.drawing) return;
      this.$el.setPointerCapture(event.pointerId);
      this.drawing = true;
      this.strokes.push([this.at(event), this.at(event)]);
    },
    go(event) {
      if (this.drawing) this.strokes.at(-1).push(this.at(event));
    },
    end() {
      if (!this.drawing) return;
      this.drawing = false;
      this.$emit("drawn", this.strokes);
    },
    replace(strokes) {
      this.drawing = false;
      this.strokes = strokes;
    },
    clear() {
      this.drawing = false; // what is under way is gone as well
      this.strokes = [];
    },
  },
};
