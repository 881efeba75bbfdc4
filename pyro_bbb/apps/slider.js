// A range of the browser's own: it has keys (arrows, page up, home, end) and a name for screen readers.
export default {
  template: `
    <input type="range" :min="min" :max="max" :step="step" :aria-label="label"
           v-model.number="value" @input="$emit('moved', value)">`,
  props: { min: Number, max: Number, step: Number, initial: Number, label: String },
  data() {
    return { value: this.initial };
  },
  watch: {
    initial(value) {
      this.value = value;
    },
  },
};
