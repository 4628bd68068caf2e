/** Buttons that lead to other places of the same view, such as the next position. */
extras.push((root, body, model, signal) => {
  const stops = model.get("stops") ?? {};
  if (!Object.keys(stops).length) return;
  const bar = element("div", "pl-tools");
  for (const [to, label] of Object.entries(stops)) {
    const button = element("button", "", label);
    button.type = "button";
    button.addEventListener("click", () => {
      try {
        model.send({ kind: "go", to });
      } catch {
        button.disabled = true;
      }
    }, { signal });
    bar.append(button);
  }
  root.insertBefore(bar, body);
  const answer = (message) => message.kind === "body" && replace(body, message.html);
  model.on("msg:custom", answer);
  signal.addEventListener("abort", () => {
    model.off("msg:custom", answer);
    bar.remove();
  });
});
