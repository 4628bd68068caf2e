/** Zoom of lanes that are drawn along time: buttons, + - 0 in the box, Ctrl with the wheel, and ranges that are dragged over with Shift held.
 * Panning is the box's own scrolling, also by its arrow keys, and dragging. */
function pan(box, signal) {
  const on = (name, act) => box.addEventListener(name, act, { signal });
  const end = () => box.classList.remove("pl-panning");
  let from = null; // where the mouse was pressed, along the content
  on("pointerdown", (event) => (from = event.pointerType === "mouse" && !event.shiftKey ? box.scrollLeft + event.clientX : null));
  on("pointermove", (event) => {
    if (from === null || event.buttons !== 1) return end();
    const left = from - event.clientX;
    if (!box.matches(".pl-panning") && Math.abs(left - box.scrollLeft) < 4) return; // a click that trembles
    box.setPointerCapture(event.pointerId);
    box.classList.add("pl-panning");
    box.scrollLeft = left;
  });
  on("pointerup", end);
  on("dragstart", (event) => event.preventDefault()); // or the browser carries a lane's picture away
}

/** Width in px of the labels that lanes begin behind. */
function labels(box) {
  return box.scrollLeft + box.querySelector("img").getBoundingClientRect().left - box.getBoundingClientRect().left;
}

/** Drag with Shift held: `chosen` is told both ends, along the content. Escape lets go. */
function choose(box, signal, chosen) {
  const on = (name, act) => box.addEventListener(name, act, { signal });
  const band = element("div", "pl-range");
  let from = null, to = null; // `to` once it is no click that trembles
  const end = () => {
    band.remove();
    from = to = null;
  };
  const along = (event) => {
    const at = Math.max(labels(box), event.clientX - box.getBoundingClientRect().left);
    return box.scrollLeft + Math.min(at, box.clientWidth);
  };
  on("mousedown", (event) => {
    if (!event.shiftKey) return;
    event.preventDefault(); // or the browser marks text up to here
    event.stopPropagation(); // and JupyterLab cells
  });
  on("pointerdown", (event) => {
    if (!event.shiftKey || event.button !== 0) return;
    box.focus({ preventScroll: true });
    from = along(event);
  });
  on("pointermove", (event) => {
    if (from === null) return;
    if (event.buttons !== 1) return end();
    const at = along(event);
    if (to === null && Math.abs(at - from) < 4) return;
    to = at;
    box.setPointerCapture(event.pointerId);
    box.append(band);
    band.style.left = `${Math.min(from, to)}px`;
    band.style.width = `${Math.abs(to - from)}px`;
  });
  on("pointerup", () => {
    if (to !== null && to !== from) chosen(Math.min(from, to), Math.max(from, to));
    end();
  });
  on("pointercancel", end);
  on("keydown", (event) => {
    if (event.key !== "Escape" || to === null) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    end();
  });
  signal.addEventListener("abort", end);
}

dressings.push((body, model, signal) => {
  const box = body.querySelector(".pl-lanes");
  if (!box) return;
  const bar = element("div", "pl-tools");
  const before = []; // ranges were chosen: [factor, left]
  let factor = 1;
  const draw = (next, left) => {
    factor = next;
    box.style.setProperty("--pl-zoom", factor);
    box.classList.toggle("pl-pan", box.scrollWidth > box.clientWidth);
    box.scrollLeft = left;
  };
  const bounded = (next) => Math.min(64, Math.max(1, next));
  const set = (next, x = box.clientWidth / 2) => {
    if (!next) before.length = 0;
    const wanted = bounded(next);
    draw(wanted, (box.scrollLeft + x) * (wanted / factor) - x);
  };
  const fill = (low, high) => {
    const left = labels(box), seen = box.clientWidth - left;
    const wanted = bounded((factor * seen) / (high - low));
    before.push([factor, box.scrollLeft]);
    draw(wanted, ((low + high) / 2 - left) * (wanted / factor) - seen / 2);
  };
  const back = () => before.length && (draw(...before.pop()), true);
  const steps = { "+": ["Zoom in", 2], "−": ["Zoom out", 0.5], Fit: ["Show all", 0] };
  for (const [label, [title, by]] of Object.entries(steps)) {
    const button = element("button", "", label);
    button.type = "button";
    button.title = title;
    button.setAttribute("aria-label", title);
    button.addEventListener("click", () => set(factor * by), { signal });
    bar.append(button);
  }
  const hint = "drag or arrow keys to pan, Ctrl + wheel or + − 0 to zoom, Shift + drag to zoom into a range, Esc or double click to go back";
  bar.append(element("span", "pl-n", hint));
  box.before(bar);
  pan(box, signal);
  choose(box, signal, fill);
  box.addEventListener("dblclick", back, { signal });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && back()) {
      event.preventDefault();
      event.stopPropagation();
    }
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
    box.classList.remove("pl-pan");
    box.style.removeProperty("--pl-zoom");
  });
});
