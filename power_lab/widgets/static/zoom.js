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

const widthOf = (box) => box.querySelector("img").getBoundingClientRect().width;

/** Width in px of the labels that lanes begin behind. */
function labels(box) {
  return box.scrollLeft + box.querySelector("img").getBoundingClientRect().left - box.getBoundingClientRect().left;
}

function zoomTo(box, factor, left) {
  box.style.setProperty("--pl-zoom", factor);
  box.classList.toggle("pl-pan", box.scrollWidth > box.clientWidth);
  box.scrollLeft = left;
}

/** The axis of lanes: [seconds, place from 0 to 1], straight between; where it cannot change, places alone. */
const knotsOf = (box) => JSON.parse(box.dataset.knots ?? "[[0,0],[1,1]]");

/** From seconds (0) to a place (1) or back; beyond both ends it goes straight on. */
function across(box, value, from, to) {
  const knots = knotsOf(box);
  const at = Math.max(1, knots.findIndex((knot, index) => knot[from] >= value || !knots[index + 1]));
  const low = knots[at - 1], high = knots[at];
  return low[to] + ((value - low[from]) * (high[to] - low[to])) / (high[from] - low[from] || 1);
}

/** From when to when lanes are seen. */
function spanOf(box) {
  const ends = [box.scrollLeft, box.scrollLeft + box.clientWidth - labels(box)];
  return ends.map((end) => across(box, end / widthOf(box), 1, 0));
}

function showSpan(box, span) {
  const [low, high] = span.map((at) => across(box, at, 0, 1));
  const seen = box.clientWidth - labels(box), whole = widthOf(box) / zoomOf(box);
  const factor = bounded(seen / ((high - low) * whole));
  zoomTo(box, factor, ((low + high) / 2) * whole * factor - seen / 2);
}

// What outlives the content of a view that asks again: `before`, the spans to go back to; `span`, what was seen; `end`, if that was the
// end of all, when: new steps are followed then; `place`, where that span led, as a span that is read again and again would drift.
const kept = new WeakMap();

const placeOf = (box) => `${zoomOf(box)} ${box.scrollLeft}`;

/** Show the same span again. */
function again(box, known) {
  const { span, end } = known;
  if (!span) return;
  const later = end === undefined ? 0 : knotsOf(box).at(-1)[0] - end;
  known.span = span.map((at) => at + later);
  showSpan(box, known.span);
  known.place = placeOf(box);
}

function remember(box, known) {
  if (zoomOf(box) === 1) known.span = undefined; // all is shown, and will be
  else if (!known.span || known.place !== placeOf(box)) known.span = spanOf(box);
  known.end = box.scrollLeft + box.clientWidth > box.scrollWidth - 8 ? knotsOf(box).at(-1)[0] : undefined;
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
  bar.append(element("span", "pl-n"));
  box.before(bar);
  pan(box, signal);
  const known = (model.get("refreshable") && kept.get(body)) || { before: [] };
  kept.set(body, known);
  again(box, known);
  body.addEventListener("pl-replacing", () => remember(box, known), { signal });
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
