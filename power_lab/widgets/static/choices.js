/** Sliders on a table of what-ifs: all numbers are in the table, so they answer without the kernel; it only adds the chart. */
dressings.push((body, model, signal) => {
  const box = body.querySelector(".pl-choices details");
  if (!box) return;
  const tables = [...box.querySelectorAll("table")];
  const bar = element("div", "pl-live");
  const select = document.createElement("select");
  select.setAttribute("aria-label", "Drafter");
  tables.forEach((table) => select.append(new Option(table.caption.textContent, table.caption.textContent.split(" · ")[0])));
  const slider = document.createElement("input");
  slider.type = "range";
  slider.min = 0;
  slider.setAttribute("aria-label", "Most drafts a round");
  const said = element("output", "pl-said");
  const chart = element("div", "");
  bar.append(select, slider, said);
  box.querySelector("summary").after(bar, chart);
  let waiting;
  const show = () => {
    const table = tables[select.selectedIndex];
    const rows = [...table.tBodies[0].rows];
    tables.forEach((other) => (other.parentElement.hidden = other !== table));
    box.querySelectorAll(".pl-chosen").forEach((row) => row.classList.remove("pl-chosen"));
    rows[slider.value].classList.add("pl-chosen");
    const [width, rounds, drafted, vain, rate, speed] = [...rows[slider.value].cells].map((cell) => cell.lastChild.textContent.trim());
    slider.setAttribute("aria-valuetext", `width ${width}`);
    said.textContent = `Width ${width}: ${rounds} rounds, ${rate} tokens each; ${drafted} drafted, ${vain} in vain; ${speed}${/^[0-9]/.test(speed) ? " tokens/s" : ""}`;
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      try {
        if (box.open) model.send({ kind: "what-if", drafter: select.value, width: +width });
      } catch {
        chart.textContent = "";
      }
    }, 80);
  };
  const answer = (message) => message.kind === "part" && (chart.innerHTML = message.html);
  model.on("msg:custom", answer);
  const begin = () => {
    const table = tables[select.selectedIndex];
    slider.max = table.tBodies[0].rows.length - 1;
    slider.value = table.parentElement.dataset.first;
    show();
  };
  select.addEventListener("change", begin, { signal });
  slider.addEventListener("input", show, { signal });
  box.addEventListener("toggle", show, { signal });
  begin();
  signal.addEventListener("abort", () => {
    clearTimeout(waiting);
    model.off("msg:custom", answer);
    tables.forEach((table) => (table.parentElement.hidden = false));
    body.querySelectorAll(".pl-chosen").forEach((row) => row.classList.remove("pl-chosen"));
    bar.remove();
    chart.remove();
  });
});
