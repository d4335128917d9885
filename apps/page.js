"use strict";
// Zooms the timeline: bars carry their times in ms, so a view is two numbers.
for (const chart of document.querySelectorAll(".timeline")) {
  const bars = chart.querySelector(".bars"), ticks = chart.querySelector(".ticks");
  const section = chart.closest("section"), status = section.querySelector("[role=status]");
  const left = Number(bars.dataset.left), span = Number(bars.dataset.span);
  const end = Number(bars.dataset.until), least = Math.min(1, end), top = 8;
  let from = 0, until = end;

  const make = (tag, attributes, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    return made;
  };
  const draw = () => {
    const scale = span / (until - from), floor = Number(ticks.dataset.floor);
    for (const bar of bars.children) {
      const start = Number(bar.dataset.s), stop = Number(bar.dataset.e);
      bar.setAttribute("x", left + (start - from) * scale);
      bar.setAttribute("width", (stop - start) * scale);
    }
    const power = 10 ** Math.floor(Math.log10((until - from) / 6));
    const step = [1, 2, 5, 10].map((digit) => digit * power).find((s) => s * 6 >= until - from);
    ticks.replaceChildren();
    for (let mark = Math.ceil(from / step - 1e-9) * step; mark <= until + 1e-9; mark += step) {
      const x = left + (mark - from) * scale;
      ticks.append(make("line", { x1: x, x2: x, y1: top, y2: floor, class: "grid" }));
      const label = `${Number(mark.toPrecision(6))} ms`;
      ticks.append(make("text", { x, y: floor + 16, class: "tick", "text-anchor": "middle" }, label));
    }
    status.textContent = `${from.toFixed(1)} ms to ${until.toFixed(1)} ms`;
    chart.dataset.from = from;
    chart.dataset.until = until;
  };
  const show = (start, width) => {
    width = Math.min(end, Math.max(least, width));
    from = Math.min(end - width, Math.max(0, start));
    until = from + width;
    draw();
  };
  const acts = {
    in: () => show(from + (until - from) / 4, (until - from) / 2),
    out: () => show(from - (until - from) / 2, (until - from) * 2),
    left: () => show(from - (until - from) / 4, until - from),
    right: () => show(from + (until - from) / 4, until - from),
    all: () => show(0, end),
  };
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all", Home: "all" };
  chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    acts[keys[event.key]]();
  });
  for (const button of section.querySelectorAll("[data-do]")) {
    button.addEventListener("click", acts[button.dataset.do]);
  }
  draw();
}
// What is folded on the screen is wanted on paper.
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
});
