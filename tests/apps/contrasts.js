// [text, its contrast, the least that it must have] of all visible text, by WCAG 2.2, 1.4.3.
() => {
  const rgba = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, under) => under.map((part, i) => top[i] * top[3] + part * (1 - top[3]));
  const backOf = (element) => {
    if (!element) return [255, 255, 255];
    return over(rgba(getComputedStyle(element).backgroundColor), backOf(element.parentElement));
  };
  const linear = (part) =>
    part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) =>
    0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
  const contrastOf = (element) => {
    const style = getComputedStyle(element);
    const back = backOf(element);
    const ink = rgba(element instanceof SVGElement ? style.fill : style.color);
    const [dark, bright] = [over(ink, back), back].map(luminance).sort((a, b) => a - b);
    const large = parseFloat(style.fontSize) >= (style.fontWeight >= 700 ? 18.66 : 24);
    return [element.textContent.trim(), bright / dark, large ? 3 : 4.5];
  };
  const hasText = (element) =>
    [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  const shown = [...document.querySelectorAll("main *")].filter((each) => each.checkVisibility());
  return shown.filter(hasText).map(contrastOf);
}
