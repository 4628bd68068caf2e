// Ranges of lanes: drag with Shift held and the range fills the box; Escape or a double click goes back.

/** Width in px of the labels that lanes begin behind. */
function labels(box) {
  return box.scrollLeft + box.querySelector("img").getBoundingClientRect().left - box.getBoundingClientRect().left;
}

/** Drag with Shift held: `chosen` is told both ends, along the content. Escape lets go. */
function choose(box, signal, chosen) {
  const on = (name, act) => box.addEventListener(name, act, { signal, capture: true }); // before panning
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
    event.stopPropagation();
    box.focus({ preventScroll: true });
    from = along(event);
  });
  on("pointermove", (event) => {
    if (from === null) return;
    if (event.buttons !== 1) return end();
    event.stopPropagation();
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
  const before = []; // ranges were chosen: [factor, left]
  const fill = (low, high) => {
    const left = labels(box), seen = box.clientWidth - left, old = zoomOf(box);
    const next = bounded((old * seen) / (high - low));
    before.push([old, box.scrollLeft]);
    zoomTo(box, next, ((low + high) / 2 - left) * (next / old) - seen / 2);
  };
  const back = () => {
    if (zoomOf(box) === 1) before.length = 0; // all is shown
    const last = before.pop();
    if (last) zoomTo(box, ...last);
    return last;
  };
  choose(box, signal, fill);
  box.addEventListener("dblclick", back, { signal });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !back()) return;
    event.preventDefault();
    event.stopPropagation();
  }, { signal });
  box.previousElementSibling.lastChild.textContent =
    "drag or arrow keys to pan, Ctrl + wheel or + − 0 to zoom, Shift + drag to zoom into a range, Esc or double click to go back";
});
