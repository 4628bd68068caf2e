/** Zoom of lanes that are drawn along time: buttons, + - 0 in the box, Ctrl with the wheel; panning is the box's own scrolling. */
dressings.push((body, model, signal) => {
  const box = body.querySelector(".pl-lanes");
  if (!box) return;
  const bar = element("div", "pl-tools");
  let factor = 1;
  const set = (next, x = box.clientWidth / 2) => {
    const old = factor;
    factor = Math.min(64, Math.max(1, next));
    const at = (box.scrollLeft + x) * (factor / old) - x;
    box.style.setProperty("--pl-zoom", factor);
    box.scrollLeft = at;
  };
  const steps = { "+": ["Zoom in", 2], "−": ["Zoom out", 0.5], Fit: ["Show all", 0] };
  for (const [label, [title, by]] of Object.entries(steps)) {
    const button = element("button", "", label);
    button.type = "button";
    button.title = title;
    button.setAttribute("aria-label", title);
    button.addEventListener("click", () => set(factor * by), { signal });
    bar.append(button);
  }
  box.before(bar);
  box.addEventListener("keydown", (event) => {
    const by = { "+": 2, "=": 2, "-": 0.5, 0: 0 }[event.key];
    if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    set(factor * by);
  }, { signal });
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    set(factor * 2 ** (-event.deltaY / 300), event.clientX - box.getBoundingClientRect().left);
  }, { signal, passive: false });
  signal.addEventListener("abort", () => {
    bar.remove();
    box.style.removeProperty("--pl-zoom");
  });
});
