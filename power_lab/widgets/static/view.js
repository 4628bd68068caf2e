// Brings the static view of an inspector to life. The view is complete without this file: it only adds details under the pointer or
// the keyboard focus, files to save and, where the source can change, a refresh button and a live switch.

const ASK_EVERY = 1000; // ms between questions of a live view
const PATIENCE = 3000; // ms without an answer until the view says so
const RETRY = 15000; // ms until a live view asks again without an answer; a busy kernel would otherwise collect a question a second
const ITEMS = ".pl-t, .pl-c";

// What parts that only some views have add, to the view and to its content each time that is replaced.
const extras = []; // (root, body, model, signal) => void
const dressings = []; // (body, model, signal) => void

/** Show details of what is under the pointer or focused; arrow keys walk from item to item. */
function details(root, body, signal) {
  const line = element("div", "pl-detail");
  line.textContent = body.querySelector(ITEMS)
    ? "Point at an item, or press Enter in the box and walk with the arrow keys."
    : "Point at what you want explained.";
  root.append(line);

  let shown;
  const show = (target, spoken) => {
    const item = target.closest?.("[title]");
    if (!item || !body.contains(item)) return;
    shown = item;
    line.setAttribute("aria-live", spoken ? "polite" : "off");
    const row = item.matches(".pl-t") ? item.closest("tr")?.querySelector("th[title]")?.title : "";
    line.textContent = [item.matches(ITEMS) ? item.textContent.trim() : "", item.title, row].filter(Boolean).join("  ·  ");
    item.dispatchEvent(new Event("pl-shown", { bubbles: true }));
  };
  const focus = (item) => {
    item.tabIndex = -1;
    item.focus();
    item.scrollIntoView({ block: "nearest", inline: "nearest" });
  };
  const walk = (event) => {
    const box = event.target.closest(".pl-scroll");
    if (!box || event.altKey || event.ctrlKey || event.metaKey) return;
    const items = [...box.querySelectorAll(ITEMS)];
    const at = items.indexOf(event.target);
    let next;
    if (at < 0) {
      if (event.key === "Enter") next = items[0];
    } else if (event.key === "Escape") next = box;
    else if (event.key === "ArrowRight") next = items[at + 1];
    else if (event.key === "ArrowLeft") next = items[at - 1];
    else if (event.key === "Home") next = items[0];
    else if (event.key === "End") next = items.at(-1);
    else if (event.key === "ArrowDown") next = nearest(items.slice(at + 1), event.target);
    else if (event.key === "ArrowUp") next = nearest(items.slice(0, at).reverse(), event.target);
    else return;
    if (!next && at < 0) return;
    event.preventDefault();
    event.stopPropagation();
    if (next === box) box.focus();
    else if (next) focus(next);
  };
  let pointer = "";
  body.addEventListener("pointerover", (event) => {
    const place = `${event.clientX} ${event.clientY}`;
    if (place !== pointer) show(event.target, false); // else the content was scrolled below a pointer that rests
    pointer = place;
  }, { signal });
  body.addEventListener("focusin", (event) => show(event.target, true), { signal });
  body.addEventListener("keydown", walk, { signal });
  body.addEventListener("pl-retitled", (event) => {
    if (event.target === shown) show(shown, shown === document.activeElement); // more is known of it now
  }, { signal });
  return line;
}

/** The item on the next line that is closest in the horizontal direction. */
function nearest(items, from) {
  const start = from.getBoundingClientRect();
  let best, line;
  for (const item of items) {
    const box = item.getBoundingClientRect();
    if (Math.abs(box.top - start.top) < start.height / 2) continue;
    if (line !== undefined && Math.abs(box.top - line) > box.height / 2) break;
    line = box.top;
    const distance = Math.abs(box.left - start.left);
    if (!best || distance < best.distance) best = { item, distance };
  }
  return best?.item;
}

/** The bar with button, switch and state, and the questions to the kernel. */
function live(root, body, model, signal) {
  const bar = element("div", "pl-live");
  const button = element("button", "", "Refresh");
  button.type = "button";
  const label = element("label", "");
  const toggle = element("input", "");
  toggle.type = "checkbox";
  toggle.checked = model.get("live");
  label.append(toggle, "Live");
  const status = element("span", "pl-status", "Snapshot from when the cell ran");
  status.setAttribute("role", "status");
  bar.append(button, label, status);
  root.insertBefore(bar, body);

  let asked = 0; // when the question without an answer was put
  let sent = 0;
  let inView = true;
  let pressed = false; // what is dragged or clicked is not taken away meanwhile
  body.addEventListener("pointerdown", () => (pressed = true), { signal, capture: true });
  for (const name of ["pointermove", "pointerup", "pointercancel"])
    addEventListener(name, (event) => (pressed &&= event.buttons > 0), { signal, capture: true });
  // Only changes are written, so that a screen reader hears of a new state and not of every second.
  const say = (text, bad) => {
    if (status.textContent !== text) status.textContent = text;
    status.classList.toggle("pl-bad", bad);
    body.classList.toggle("pl-stale", bad);
  };
  const ask = () => {
    sent = Date.now();
    asked ||= sent;
    try {
      model.send({ kind: "refresh" });
    } catch {
      say("Disconnected from the kernel; this is the last snapshot", true);
    }
  };
  const answer = (message) => {
    asked = 0;
    if (message.kind === "body" && pressed) {
      if (!toggle.checked) setTimeout(ask, ASK_EVERY); // a live view asks anyway
    } else if (message.kind === "body") {
      replace(body, message.html);
      say(toggle.checked ? "Updated every second" : `Snapshot from ${new Date().toLocaleTimeString()}`, false);
    } else if (message.kind === "gone") {
      toggle.checked = false;
      say(`The engine is gone; this is the last snapshot. ${message.message}`, true);
    }
  };
  const setLive = (on) => {
    toggle.checked = on;
    if (on) ask();
    else if (!status.classList.contains("pl-bad")) say(`Snapshot from ${new Date().toLocaleTimeString()}`, false);
  };
  const beat = setInterval(() => {
    if (asked && Date.now() - asked > PATIENCE) say("No answer from the kernel: busy or gone; this is the last snapshot", true);
    const free = !asked || Date.now() - sent > RETRY;
    if (free && toggle.checked && inView && document.visibilityState === "visible") ask();
  }, ASK_EVERY);
  const watcher = new IntersectionObserver((entries) => (inView = entries.at(-1).isIntersecting));
  watcher.observe(root);

  button.addEventListener("click", ask, { signal });
  toggle.addEventListener("change", () => {
    model.set("live", toggle.checked);
    model.save_changes();
    setLive(toggle.checked);
  }, { signal });
  const follow = () => toggle.checked !== model.get("live") && setLive(model.get("live"));
  model.on("msg:custom", answer);
  model.on("change:live", follow);
  signal.addEventListener("abort", () => {
    clearInterval(beat);
    watcher.disconnect();
    model.off("msg:custom", answer);
    model.off("change:live", follow);
    body.classList.remove("pl-stale");
    bar.remove();
  });
  if (toggle.checked) ask();
}

/** Buttons that save the view as a file; the kernel makes it. */
function exports(root, model, signal) {
  const files = Object.entries(model.get("files") ?? {});
  if (!files.length) return;
  const bar = element("div", "pl-tools");
  const status = element("span", "pl-status");
  status.setAttribute("role", "status");
  bar.append(element("span", "pl-n", "Export"));
  for (const [format, [label, meaning]] of files) {
    const button = element("button", "", label);
    button.type = "button";
    button.title = meaning;
    button.addEventListener("click", () => {
      try {
        model.send({ kind: "export", format });
        status.textContent = "Asked the kernel";
      } catch {
        status.textContent = "Disconnected from the kernel";
      }
    }, { signal });
    bar.append(button);
  }
  bar.append(status);
  root.append(bar);
  const answer = (message, buffers) => {
    if (message.kind === "failed") status.textContent = message.message;
    if (message.kind !== "file") return;
    save(message, buffers);
    status.textContent = `Saved ${message.name}`;
  };
  model.on("msg:custom", answer);
  signal.addEventListener("abort", () => {
    model.off("msg:custom", answer);
    bar.remove();
  });
}

/** Put new content in place without losing scroll position, focus or what was opened. */
function replace(body, html) {
  if (replace.last.get(body) === html) return;
  replace.last.set(body, html);
  const all = (selector) => [...body.querySelectorAll(selector)];
  const boxes = ".pl-scroll, .pl-sideways", places = `.pl-scroll, .pl-tools button, summary, ${ITEMS}`;
  const spots = all(boxes).map((box) => [box.scrollLeft, box.scrollTop]);
  const opened = all("details").map((one) => one.open);
  const focused = all(places).indexOf(document.activeElement);
  body.dispatchEvent(new Event("pl-replacing"));
  body.innerHTML = html;
  all("details").forEach((one, index) => (one.open = opened[index] ?? one.open));
  all(boxes).forEach((box, index) => spots[index] && box.scrollTo(...spots[index]));
  body.dispatchEvent(new Event("pl-replaced"));
  const item = all(places)[focused];
  if (item?.matches(ITEMS)) item.tabIndex = -1;
  item?.focus({ preventScroll: true });
}
replace.last = new WeakMap();

/** Attach to one static view; returns the function that leaves it as it was found. */
function attach(root, model) {
  const body = root.querySelector(".pl-body");
  const control = new AbortController();
  if (model.get("refreshable")) live(root, body, model, control.signal);
  const line = details(root, body, control.signal);
  control.signal.addEventListener("abort", () => line.remove());
  exports(root, model, control.signal);
  for (const add of extras) add(root, body, model, control.signal);
  // What hangs on the content itself is made again when that is replaced.
  let inner;
  const dress = () => {
    inner?.abort();
    inner = new AbortController();
    for (const add of dressings) add(body, model, inner.signal);
  };
  body.addEventListener("pl-replaced", dress, { signal: control.signal });
  control.signal.addEventListener("abort", () => inner.abort());
  dress();
  return () => control.abort();
}
