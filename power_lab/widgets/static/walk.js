/** Buttons that lead to other places of the same view, such as the next position. An answer may take a while: a lens computes it. */
extras.push((root, body, model, signal) => {
  const stops = model.get("stops") ?? {};
  if (!Object.keys(stops).length) return;
  const bar = element("div", "pl-tools");
  const status = element("span", "pl-status");
  status.setAttribute("role", "status");
  const newest = model.get("newest"); // whether a newer question ends the one before it
  let asked = 0, waiting; // when the question without an answer was put, and the timer that tells of waiting
  const say = (text, bad) => {
    status.textContent = text;
    status.classList.toggle("pl-bad", bad);
    body.classList.toggle("pl-stale", bad);
  };
  const settle = () => {
    clearTimeout(waiting);
    asked = 0;
  };
  for (const [to, label] of Object.entries(stops)) {
    const button = element("button", "", label);
    button.type = "button";
    button.addEventListener("click", () => {
      if (!newest && asked && Date.now() - asked < RETRY) return; // a busy kernel would otherwise collect questions
      try {
        model.send({ kind: "go", to });
        settle();
        asked = Date.now();
        waiting = setTimeout(() => say("Asked; no answer yet", false), PATIENCE / 6);
      } catch {
        button.disabled = true;
        say("Disconnected from the kernel; this is the last place", true);
      }
    }, { signal });
    bar.append(button);
  }
  bar.append(status);
  root.insertBefore(bar, body);
  const answer = (message) => {
    if (message.kind === "stopped" && message.asked === "go") {
      settle();
      say("Stopped; this is the last place", false);
    }
    if (message.kind !== "body" && message.kind !== "gone") return;
    settle();
    if (message.kind === "body") replace(body, message.html);
    say(message.kind === "body" ? "" : message.message, message.kind === "gone");
  };
  model.on("msg:custom", answer);
  signal.addEventListener("abort", () => {
    settle();
    model.off("msg:custom", answer);
    body.classList.remove("pl-stale");
    bar.remove();
  });
});
