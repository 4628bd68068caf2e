// The live dashboard. The saved HTML is complete; this writes numbers into it and draws lines in place of its pictures.

const SILENCE = 1700; // ms without a sample until the view says so: with a tick of the clock and a frame less than two seconds
const BEAT = 2000; // ms between words to the kernel: "this page is looking", which also asks it to try again
const GAP = 3; // s between samples over which no line is drawn: nobody asked, or nobody answered
const NUMBERS = 250; // ms between new numbers: faster ones cannot be read

/** As `told` in watch_page.py. */
function told(value, unit) {
  if (Number.isNaN(value)) return "–";
  if (unit === "bytes") {
    let size = value;
    for (const name of ["B", "KiB", "MiB", "GiB"]) {
      if (size < 1024) return `${size.toFixed(name === "B" || size >= 99.95 ? 0 : 1)} ${name}`;
      size /= 1024;
    }
    return `${size.toFixed(1)} TiB`;
  }
  if (unit === "share") return `${Math.round(100 * value)}%`;
  const digits = unit === "ratio" ? 2 : unit === "rate" && value < 100 ? 1 : 0;
  const text = value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return text + ({ celsius: " °C", watt: " W" }[unit] ?? "");
}

function attach(root, model) {
  const body = root.querySelector(".pl-body");
  const page = Math.random().toString(36).slice(2);
  const control = new AbortController();
  const { signal } = control;
  const fields = model.get("fields");
  const samples = []; // Float64Array each, oldest first
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let heard = Date.now(), numbered = 0, planned = 0, renewed = 0, inView = true, on = null, drawnAt = 0;

  const bar = element("div", "pl-watching");
  const status = element("span", "pl-status", "Connecting");
  status.setAttribute("role", "status");
  bar.append(status);
  for (const [format, [label, meaning]] of Object.entries(model.get("files") ?? {})) {
    const button = Object.assign(element("button", "", label), { type: "button", title: `Export: ${meaning}` });
    button.addEventListener("click", () => send({ kind: "export", format }), { signal });
    bar.append(button);
  }
  root.append(bar);

  const say = (text, bad) => {
    if (status.textContent !== text) status.textContent = text; // only changes: a screen reader hears of states, not of samples
    status.classList.toggle("pl-bad", bad);
    body.classList.toggle("pl-stale", bad);
  };
  const send = (message) => {
    try {
      model.send(message);
      return true;
    } catch {
      say("Disconnected from the kernel; this is the last snapshot", true);
      return false;
    }
  };
  const look = () => {
    const visible = inView && root.isConnected && document.visibilityState === "visible";
    if (visible !== on) {
      if (visible) heard = Date.now();
      else say("Paused while hidden", false);
      on = visible;
      send({ kind: "watch", page, on });
    }
  };

  const state = () => {
    if (!on) return;
    const facts = model.get("facts");
    const late = Date.now() - heard > SILENCE;
    if (facts.state === "ended") say(`Disconnected. ${facts.message}`, true);
    else if (facts.state === "none") {
      const old = body.querySelector(".pl-tile") !== null; // numbers of an engine that there was
      const note = body.querySelector(".pl-empty .pl-note"); // says what is missing, so the state need not
      if (note && facts.message && note.textContent !== facts.message) note.textContent = facts.message;
      say(old ? `Disconnected; these are the last numbers. ${facts.message}` : "Looking for one every two seconds", old);
    }
    else if (late) say("Disconnected: no sample for two seconds; this is the last one", true);
    else if (facts.state === "loading") say(facts.message ? `Loading: ${facts.message}` : "Loading", false);
    else say("Live", false);
  };
  const top = () => {
    const facts = model.get("facts");
    const name = body.querySelector("[data-fact=model]"), rest = body.querySelector("[data-fact=rest]");
    if (!name || !facts.model) return;
    name.textContent = facts.model;
    const others = facts.others?.length ? `also loaded: ${facts.others.join(", ")}` : "";
    rest.textContent = [facts.mode, facts.device, facts.drafter && `drafter ${facts.drafter}`, others].filter(Boolean).join(" · ");
  };

  const number = (row) => {
    const value = (field) => row[fields.indexOf(field)];
    for (const tile of body.querySelectorAll(".pl-tile")) {
      const text = told(value(tile.dataset.field), tile.dataset.unit);
      const node = tile.querySelector("b");
      if (node.textContent !== text) node.textContent = text;
    }
    for (const stack of body.querySelectorAll(".pl-stack")) {
      const parts = [...stack.querySelectorAll("[data-part]")];
      const values = parts.map((part) => value(part.dataset.part) || 0);
      const whole = values.reduce((sum, one) => sum + one, 0) || 1;
      parts.forEach((part, at) => {
        part.style.width = `${(100 * values[at]) / whole}%`;
        stack.querySelector(`[data-value=${part.dataset.part}]`).textContent = told(values[at], stack.dataset.unit);
      });
    }
  };

  /** Whether there is a tile to write into. A page made before there was a sample, or for a device with other sensors, is asked for anew. */
  const tiled = () => {
    const there = [...body.querySelectorAll(".pl-tile")].map((tile) => tile.dataset.field).join();
    if (there !== (model.get("facts").tiles ?? []).join() && Date.now() - renewed > BEAT) {
      renewed = Date.now();
      send({ kind: "refresh" });
    }
    return there !== "";
  };

  const draw = () => {
    planned = 0;
    if (!on || !samples.length) return;
    drawnAt = Date.now();
    if (!tiled()) return;
    const last = samples.at(-1);
    if (Date.now() - numbered >= NUMBERS) {
      numbered = Date.now();
      number(last);
    }
    const looks = getComputedStyle(root);
    const kept = model.get("kept"), end = last[0], ratio = devicePixelRatio || 1;
    for (const tile of body.querySelectorAll(".pl-tile")) {
      const box = tile.querySelector(".pl-spark");
      let canvas = box.querySelector("canvas");
      if (!canvas) {
        canvas = element("canvas", "");
        canvas.setAttribute("aria-hidden", "true");
        box.replaceChildren(canvas);
      }
      const width = box.clientWidth, height = 32;
      if (canvas.width !== Math.round(width * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = height * ratio;
      }
      const pen = canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, width, height);
      pen.fillStyle = "rgba(128,128,128,.35)";
      pen.fillRect(0, height - 1, width, 1);
      const at = fields.indexOf(tile.dataset.field);
      let most = Number(tile.dataset.top);
      if (!most) for (const row of samples) if (row[at] > most) most = row[at];
      pen.strokeStyle = looks.getPropertyValue(`--pl-${tile.dataset.mark}`);
      pen.lineWidth = 1.5;
      pen.beginPath();
      let down = false, before = end;
      for (const row of samples) {
        if (row[0] - before > GAP) down = false;
        before = row[0];
        if (Number.isNaN(row[at])) {
          down = false;
          continue;
        }
        const x = width * (1 - (end - row[0]) / kept), y = height - 2 - (height - 5) * Math.min(1, row[at] / (most || 1));
        if (down) pen.lineTo(x, y);
        else pen.moveTo(x, y);
        down = true;
      }
      pen.stroke();
    }
  };
  const plan = () => {
    if (still && Date.now() - drawnAt < 1000) return;
    if (on) planned ||= requestAnimationFrame(draw);
  };

  const take = () => {
    const view = model.get("frame");
    if (!view?.byteLength) return;
    heard = Date.now();
    const row = new Float64Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
    if (samples.length && row[fields.indexOf("tokens")] < samples.at(-1)[fields.indexOf("tokens")]) samples.length = 0; // another engine
    samples.push(row);
    trim();
    plan();
    state();
  };
  const trim = () => {
    while (samples.length && samples.at(-1)[0] - samples[0][0] > model.get("kept")) samples.shift();
  };
  const answer = (message, buffers) => {
    if (message.kind === "history") {
      const view = buffers[0], width = fields.length * 8;
      samples.length = 0;
      for (let at = 0; at + width <= view.byteLength; at += width)
        samples.push(new Float64Array(view.buffer.slice(view.byteOffset + at, view.byteOffset + at + width)));
      trim();
      plan();
    } else if (message.kind === "body") {
      body.innerHTML = message.html;
      if (body.querySelector(".pl-tile")) plan();
    } else if (message.kind === "file") {
      save(message, buffers);
    }
  };
  const changed = () => {
    top();
    state();
  };
  const beat = setInterval(() => {
    look();
    if (on) send({ kind: "watch", page, on }) && state();
  }, BEAT);
  const tick = setInterval(state, 250);
  const watcher = new IntersectionObserver((entries) => {
    inView = entries.at(-1).isIntersecting;
    look();
  });
  watcher.observe(root);
  document.addEventListener("visibilitychange", look, { signal });
  addEventListener("pagehide", () => on && send({ kind: "watch", page, on: false }), { signal });
  model.on("change:frame", take);
  model.on("change:facts", changed);
  model.on("msg:custom", answer);
  changed();
  look();
  return () => {
    control.abort();
    clearInterval(beat);
    clearInterval(tick);
    cancelAnimationFrame(planned);
    watcher.disconnect();
    model.off("change:frame", take);
    model.off("change:facts", changed);
    model.off("msg:custom", answer);
    if (on) send({ kind: "watch", page, on: false });
    body.classList.remove("pl-stale");
    bar.remove();
  };
}
