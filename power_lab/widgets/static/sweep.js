/** One click from a point of a sweep to its trace: places on the picture, a button in each row, and the trace below. */
extras.push((root, body, model, signal) => {
  const spots = model.get("spots") ?? [];
  const panel = element("div", "pl-trace");
  panel.hidden = true;
  panel.setAttribute("role", "group"); // not a landmark: a page may have several
  panel.setAttribute("aria-label", "Trace of a point");
  body.append(panel);
  const asked = { point: -1, prompt: 0, what: "acceptance" };
  let waiting = 0;

  const ask = (change) => {
    Object.assign(asked, change);
    clearTimeout(waiting);
    panel.hidden = false;
    if (!panel.children.length) panel.textContent = "Asking the kernel";
    waiting = setTimeout(say, PATIENCE, "No answer from the kernel: busy or gone.");
    try {
      model.send({ kind: "trace", ...asked });
    } catch {
      clearTimeout(waiting);
      say("Disconnected from the kernel, which has the traces.");
    }
  };
  let opener;
  const say = (words) => panel.replaceChildren(element("p", "pl-note", words));

  const button = (holder, label, act, pressed) => {
    const one = element("button", "", label);
    one.type = "button";
    if (pressed !== undefined) one.setAttribute("aria-pressed", pressed);
    one.addEventListener("click", act, { signal });
    holder.append(one);
    return one;
  };
  const answer = (message) => {
    if (message.kind === "stopped" && message.asked === "trace") {
      clearTimeout(waiting);
      say("Stopped.");
    }
    if (message.kind !== "traced") return;
    clearTimeout(waiting);
    if (message.failed) return say(message.failed);
    const title = element("p", "pl-title", message.title); // no heading, of no known level
    title.tabIndex = -1;
    const bar = element("div", "pl-tools");
    for (const [what, label] of [["acceptance", "Acceptance"], ["timeline", "Timeline"]])
      button(bar, label, () => ask({ what }), message.what === what);
    if (message.prompts > 1)
      for (let at = 0; at < message.prompts; at++) button(bar, `Prompt ${at}`, () => ask({ prompt: at }), message.prompt === at);
    const close = () => {
      panel.hidden = true;
      panel.replaceChildren();
      mark(-1);
      opener?.focus();
    };
    button(bar, "Close", close);
    const content = element("div", "");
    content.innerHTML = message.html;
    panel.replaceChildren(title, bar, content);
    mark(message.point);
    body.dispatchEvent(new Event("pl-replaced"));
    title.focus({ preventScroll: true });
    panel.scrollIntoView({ block: "nearest" });
  };
  const mark = (point) => {
    body.querySelectorAll(".pl-spot").forEach((spot) => spot.setAttribute("aria-pressed", +spot.dataset.point === point));
    body.querySelectorAll("tr.pl-opened").forEach((row) => row.classList.remove("pl-opened"));
    body.querySelector(`td.pl-number[data-point="${point}"]`)?.parentElement.classList.add("pl-opened");
  };
  const open = (point, from) => {
    opener = from;
    ask({ point, prompt: 0 });
  };

  const closest = (x, y) => {
    const away = (spot) => {
      const box = spot.getBoundingClientRect();
      return Math.hypot(box.left + box.width / 2 - x, box.top + box.height / 2 - y);
    };
    return places.reduce((best, spot) => (away(spot) < away(best) ? spot : best));
  };
  const plot = body.querySelector(".pl-plot");
  const places = [];
  for (const [point, x, y, title, wide, tall] of plot ? spots : []) {
    const spot = element("button", "pl-spot");
    spot.type = "button";
    spot.title = title;
    spot.dataset.point = point;
    spot.setAttribute("aria-label", `${title}: open its trace`);
    spot.setAttribute("aria-pressed", "false");
    spot.style.left = `${x}%`;
    spot.style.top = `${y}%`;
    if (wide) {
      spot.classList.add("pl-wide-spot");
      spot.style.width = `${wide}%`;
      spot.style.height = `${tall}%`;
    }
    spot.tabIndex = places.length ? -1 : 0; // one stop for Tab; arrow keys walk
    spot.addEventListener("click", (event) => {
      // Places of points that are close lie on each other, so a pointer means the nearest one; a key means this one.
      const meant = event.detail && !wide ? closest(event.clientX, event.clientY) : spot;
      open(+meant.dataset.point, meant);
    }, { signal });
    spot.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const next = by && places[places.indexOf(spot) + by];
      if (!by) return;
      event.preventDefault();
      event.stopPropagation();
      if (!next) return;
      spot.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }, { signal });
    plot.append(spot);
    places.push(spot);
  }
  for (const cell of body.querySelectorAll("td.pl-number[data-measured]")) {
    const words = cell.textContent;
    const one = element("button", "pl-open", words);
    one.type = "button";
    one.title = "Open its trace";
    one.setAttribute("aria-label", `Point ${words}: open its trace`);
    one.addEventListener("click", () => open(+cell.dataset.point, one), { signal });
    cell.replaceChildren(one);
    signal.addEventListener("abort", () => cell.replaceChildren(words));
  }
  // A Bokeh plot of the same sweep, wherever it is on the page, says which point was clicked.
  const tapped = (event) => {
    if (event.detail?.sweep !== model.get("sweep_id") || event.defaultPrevented) return;
    event.preventDefault(); // one view of the sweep answers
    open(event.detail.point, undefined);
  };
  document.addEventListener("power-lab-point", tapped, { signal });
  model.on("msg:custom", answer);
  signal.addEventListener("abort", () => {
    clearTimeout(waiting);
    model.off("msg:custom", answer);
    for (const node of [panel, ...places]) node.remove();
  });
});
