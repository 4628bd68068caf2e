/** Lanes are zoomed by buttons, + - 0 and Ctrl with the wheel; panned by dragging and the box's own scrolling. */
function pan(box, signal) {
  const on = (name, act) => box.addEventListener(name, act, { signal });
  const end = () => box.classList.remove("pl-panning");
  let from = null; // where it was pressed, along the content
  on("pointerdown", (event) => (from = event.pointerType === "mouse" ? box.scrollLeft + event.clientX : null));
  on("pointermove", (event) => {
    if (from === null || event.buttons !== 1) return end();
    const left = from - event.clientX;
    if (!box.matches(".pl-panning") && Math.abs(left - box.scrollLeft) < 4) return; // a click that trembles
    box.setPointerCapture(event.pointerId);
    box.classList.add("pl-panning");
    box.scrollLeft = left;
  });
  on("pointerup", end);
  on("dragstart", (event) => event.preventDefault()); // or the browser carries a picture away
}

const zoomOf = (box) => +box.style.getPropertyValue("--pl-zoom") || 1;
const bounded = (factor) => Math.min(64, Math.max(1, factor));

function zoomTo(box, factor, left) {
  box.style.setProperty("--pl-zoom", factor);
  box.classList.toggle("pl-pan", box.scrollWidth > box.clientWidth);
  box.scrollLeft = left;
}

dressings.push((body, model, signal) => {
  const box = body.querySelector(".pl-lanes");
  if (!box) return;
  const bar = element("div", "pl-tools");
  const set = (by, x = box.clientWidth / 2) => {
    const old = zoomOf(box), next = bounded(old * by);
    zoomTo(box, next, ((box.scrollLeft + x) * next) / old - x);
  };
  const steps = { "+": ["Zoom in", 2], "−": ["Zoom out", 0.5], Fit: ["Show all", 0] };
  for (const [label, [title, by]] of Object.entries(steps)) {
    const button = element("button", "", label);
    button.type = "button";
    button.title = button.ariaLabel = title;
    button.addEventListener("click", () => set(by), { signal });
    bar.append(button);
  }
  bar.append(element("span", "pl-n", "drag to pan, Ctrl + wheel to zoom"));
  box.before(bar);
  pan(box, signal);
  box.addEventListener("keydown", (event) => {
    const by = { "+": 2, "=": 2, "-": 0.5, 0: 0 }[event.key];
    if (by == null || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    set(by);
  }, { signal });
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    set(2 ** (-event.deltaY / 300), event.clientX - box.getBoundingClientRect().left);
  }, { signal, passive: false });
  signal.addEventListener("abort", () => {
    bar.remove();
    box.classList.remove("pl-pan");
    box.style.removeProperty("--pl-zoom");
  });
});
