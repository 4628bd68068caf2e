
/** The box that looks a prompt up; it stays out of the body, so that a refresh never takes what is being typed. */
extras.push((root, body, model, signal) => {
  const form = element("form", "pl-ask");
  const label = (text, input, name) => {
    const holder = element("label", name);
    holder.append(text, input);
    form.append(holder);
    return input;
  };
  const prompt = label("Where would this prompt hit?", element("textarea", ""), "pl-prompt");
  prompt.rows = 2;
  const hint = "Type or paste a prompt; Ctrl+Enter looks it up";
  const key = label("cache_key", element("input", ""), "");
  key.type = "text";
  key.placeholder = "default";
  const raw = element("input", "");
  raw.type = "checkbox";
  label("", raw, "pl-flat").after();
  raw.parentElement.append("raw text, no chat template");
  const button = element("button", "", "Look up");
  button.type = "submit";
  const said = element("output", "");
  form.append(button, said);
  form.dataset.lmSuppressShortcuts = "true"; // keys typed here are no commands of the notebook
  root.insertBefore(form, body);

  const fill = () => {
    const { prompt: text = "", note = "", cache_key = "", raw: flat = false } = model.get("box") ?? {};
    prompt.placeholder = note ? `Below: ${note}, looked up in Python. ${hint}` : hint;
    if (form.contains(document.activeElement)) return; // never over what is being typed
    prompt.value = text;
    key.value = cache_key;
    raw.checked = flat;
  };
  fill(); // a lookup made in Python stands in the box, too

  let waiting = 0;
  const ask = (event) => {
    event?.preventDefault();
    if (!prompt.value) return;
    clearTimeout(waiting);
    said.textContent = "Looking up";
    waiting = setTimeout(() => (said.textContent = "No answer from the kernel: busy or gone."), PATIENCE);
    try {
      model.send({ kind: "lookup", prompt: prompt.value, cache_key: key.value, chat: raw.checked ? false : null });
    } catch {
      clearTimeout(waiting);
      said.textContent = "Disconnected from the kernel; this is the last snapshot.";
    }
  };
  const answer = (message) => {
    const stopped = message.kind === "stopped" && message.asked === "lookup";
    if (message.kind !== "looked" && !stopped) return;
    clearTimeout(waiting);
    if (stopped) return (said.textContent = "Stopped.");
    said.textContent = message.html ? "" : message.message;
    if (message.html) replace(body, message.html);
  };
  form.addEventListener("submit", ask, { signal });
  form.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event);
  }, { signal });
  model.on("msg:custom", answer);
  model.on("change:box", fill);
  signal.addEventListener("abort", () => {
    clearTimeout(waiting);
    model.off("msg:custom", answer);
    model.off("change:box", fill);
    form.remove();
  });
});
