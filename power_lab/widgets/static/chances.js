/** Probabilities of what is shown in the line of details: a moment after it came there the kernel is asked, once a token. */
extras.push((root, body, model, signal) => {
  const REST = 150; // ms
  let waiting, wanted;
  const leave = () => {
    clearTimeout(waiting);
    wanted = undefined;
  };
  const come = (event) => {
    const item = event.target.closest?.(".pl-t[data-at]");
    if (item === wanted) return;
    leave();
    if (!item || item.dataset.known) return;
    wanted = item;
    waiting = setTimeout(() => {
      try {
        model.send({ kind: "chance", position: +item.dataset.at, rejected: item.matches(".pl-rejected") });
      } catch {
        leave(); // what is written there stays true without a kernel
      }
    }, REST);
  };
  const answer = (message) => {
    if (message.kind !== "chance") return;
    for (const item of body.querySelectorAll(`.pl-t[data-at="${+message.position}"]`)) {
      if (item.matches(".pl-rejected") !== message.rejected) continue;
      item.title = message.title;
      if (message.known) item.dataset.known = "true";
      item.dispatchEvent(new Event("pl-retitled", { bubbles: true }));
    }
    if (!message.known) wanted = undefined; // coming back asks again
  };
  body.addEventListener("pl-shown", come, { signal });
  body.addEventListener("pointerleave", () => wanted !== document.activeElement && leave(), { signal });
  model.on("msg:custom", answer);
  signal.addEventListener("abort", () => {
    leave();
    model.off("msg:custom", answer);
  });
});
