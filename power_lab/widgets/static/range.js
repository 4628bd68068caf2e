// Ranges of lanes: drag with Shift held and the range fills the box; Escape or a double click goes back.

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
    Object.assign(band.style, { left: `${Math.min(from, to)}px`, width: `${Math.abs(to - from)}px` });
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
  const { before } = kept.get(body); // ranges were chosen: the spans seen till then, null for all
  const fill = (low, high) => {
    const left = labels(box), wide = widthOf(box);
    before.push(zoomOf(box) === 1 ? null : spanOf(box));
    showSpan(box, [low, high].map((end) => across(box, (end - left) / wide, 1, 0)));
  };
  const back = () => {
    if (zoomOf(box) === 1) before.length = 0; // all is shown
    if (!before.length) return false;
    const last = before.pop();
    if (last) showSpan(box, last);
    else zoomTo(box, 1, 0);
    return true;
  };
  choose(box, signal, fill);
  box.addEventListener("dblclick", back, { signal });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !back()) return;
    event.preventDefault();
    event.stopPropagation();
  }, { signal });
  box.previousElementSibling.lastChild.textContent =
    "drag or arrow keys to pan, Ctrl + wheel or + − 0 to zoom, Shift + drag for a range, Esc or double click to go back";
});
