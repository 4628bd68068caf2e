// What the scripts of all views begin with. Each view's own part defines `attach(root, model)`, which brings one place of the page to
// life and returns the function that leaves it as it was found.

function element(tag, name, text = "") {
  const node = document.createElement(tag);
  node.className = name;
  node.textContent = text;
  return node;
}

/** Hand a file that the kernel made to the browser. */
function save(message, buffers) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(buffers, { type: message.mime }));
  link.download = message.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Keys are for what has the focus: JupyterLab takes Enter and the arrows for its notebook unless the very element forbids it. */
function ownKeys(event) {
  event.target.dataset.lmSuppressShortcuts = "true";
}

/** The whole style sheet, which comes with the widget, holds for places that are alive; others have what their content needs. */
function enliven(root, model) {
  root.classList.add("pl-on");
  root.addEventListener("focusin", ownKeys);
  const leave = attach(root, model);
  return () => {
    leave();
    root.removeEventListener("focusin", ownKeys);
    root.classList.remove("pl-on");
  };
}

export default {
  /** Runs once for the model, without any widget output: find the saved HTML of this view wherever it is or appears. */
  initialize({ model }) {
    const selector = `[data-power-lab-view="${model.get("view_id")}"]`;
    const attached = new Map();
    let planned = 0;
    const scan = () => {
      planned = 0;
      for (const [root, detach] of attached) {
        if (root.isConnected) continue; // notebooks take cells out of the page while they are scrolled away
        detach();
        attached.delete(root);
      }
      for (const root of document.querySelectorAll(selector)) if (!attached.has(root)) attached.set(root, enliven(root, model));
    };
    const observer = new MutationObserver(() => (planned ||= setTimeout(scan, 100)));
    observer.observe(document.body, { childList: true, subtree: true });
    scan();
    return () => {
      clearTimeout(planned);
      observer.disconnect();
      for (const detach of attached.values()) detach();
    };
  },

  /** Inside an ipywidgets layout there is no saved HTML; ask the kernel for it. */
  render({ model, el }) {
    const root = element("div", "power-lab mathjax_ignore tex2jax_ignore");
    const body = element("div", "pl-body", "Waiting for the kernel");
    root.append(body);
    el.append(root);
    let detach;
    const first = (message) => {
      if (message.kind === "gone" && !detach) body.textContent = message.message;
      if (message.kind !== "body" || detach) return;
      body.innerHTML = message.html;
      detach = enliven(root, model);
    };
    model.on("msg:custom", first);
    model.send({ kind: "refresh" });
    return () => {
      model.off("msg:custom", first);
      detach?.();
    };
  },
};
