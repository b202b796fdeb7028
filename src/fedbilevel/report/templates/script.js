
"use strict";
// Curves are switched by the buttons of the legend; points are read by pointer or by arrow keys.
// Everything that is shown stands in the tables of the page: it is set as text, never as HTML.
for (const charts of document.querySelectorAll(".charts")) {
  for (const button of charts.querySelectorAll("button[data-curve]")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      for (const curve of charts.querySelectorAll(`.curve[data-curve="${button.dataset.curve}"]`)) {
        curve.classList.toggle("off", !shown);
      }
    });
  }
  for (const figure of charts.querySelectorAll("figure")) follow(figure);
}

function follow(figure) {
  const [plot, mark, readout, heard] = [".plot", ".mark", ".readout", "output"].map((one) => figure.querySelector(one));
  const [, , width, height] = plot.querySelector("svg").getAttribute("viewBox").split(" ").map(Number);
  const curves = [...figure.querySelectorAll("tbody[data-curve]")].map((body) => ({
    line: plot.querySelector(`.curve[data-curve="${body.dataset.curve}"]`),
    points: [...body.rows].map((row) => ({ row, at: row.dataset.at.split(" ").map(Number) })),
  }));
  const visible = () => curves.filter((one) => !one.line.classList.contains("off"));
  const heads = [...figure.querySelectorAll("thead th")].map((one) => one.textContent);
  let curve = null, index = 0;

  function show(point) {
    const [x, y] = point.at, cells = [...point.row.cells].map((one) => one.textContent);
    const spread = cells[3] ? ` ± ${cells[3]}` : "";
    readout.textContent = `${cells[0]}: ${cells[2]}${spread} at ${cells[1]} ${heads[1]}`;
    mark.style.left = `${(100 * x) / width}%`;
    mark.style.top = `${(100 * y) / height}%`;
    const right = x > width / 2, low = y > height / 2;
    readout.style.left = right ? "auto" : `${(100 * x) / width + 3}%`;
    readout.style.right = right ? `${100 - (100 * x) / width + 3}%` : "auto";
    readout.style.top = low ? "auto" : `${(100 * y) / height + 3}%`;
    readout.style.bottom = low ? `${100 - (100 * y) / height + 3}%` : "auto";
    mark.hidden = readout.hidden = false;
  }

  function hide() {
    mark.hidden = readout.hidden = true;
  }

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), scale = width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const far = (point) => Math.abs(point.at[0] - x) + Math.abs(point.at[1] - y);
    const points = visible().flatMap((one) => one.points);
    if (points.length) show(points.reduce((best, one) => (far(one) < far(best) ? one : best)));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const turns = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e9], End: [0, 1e9] };
    const choice = visible();
    if (event.key === "Escape") return hide();
    if (!(event.key in turns) || !choice.length) return;
    event.preventDefault();
    const [across, along] = turns[event.key];
    const place = choice.indexOf(curve);
    const fresh = place < 0 || readout.hidden;
    curve = choice[fresh ? Math.max(place, 0) : (place + across + choice.length) % choice.length];
    index = Math.min(Math.max(index + (fresh && Math.abs(along) < 2 ? 0 : along), 0), curve.points.length - 1);
    show(curve.points[index]);
    heard.textContent = readout.textContent;
  });
}
