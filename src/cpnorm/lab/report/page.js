"use strict";

// --- tables: a click on a heading sorts by it, a second one the other way round, a third restores the order ---

for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  for (const button of table.querySelectorAll("thead button")) {
    button.addEventListener("click", () => {
      const heading = button.closest("th");
      const column = Number(button.dataset.column);
      const next = { none: "descending", descending: "ascending", ascending: "none" }[heading.getAttribute("aria-sort") || "none"];
      for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      if (next !== "none") heading.setAttribute("aria-sort", next);
      body.append(...(next === "none" ? original : sorted(original, column, next === "ascending" ? 1 : -1)));
    });
  }
}

function sorted(rows, column, direction) {
  const key = (row) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
  };
  return [...rows].sort((first, second) => {
    const a = key(first), b = key(second);
    const missing = (a === "–") - (b === "–"); // always last
    if (missing) return missing;
    return direction * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  });
}

// --- the explorer: the same share of every layer's terms goes, smallest first ---

const explorer = document.querySelector(".explorer");
if (explorer) {
  const networks = JSON.parse(document.getElementById("networks").textContent);
  const find = (name) => explorer.querySelector(`[data-part=${name}]`);
  const select = find("network"), slider = find("rate"), course = find("course"), layers = find("layers");
  networks.forEach((network, index) => select.append(new Option(network.name, index)));
  select.addEventListener("change", () => choose(networks[select.value]));
  slider.addEventListener("input", () => show(networks[select.value], Number(slider.value)));
  explorer.hidden = false;
  choose(networks[0]);

  function choose(network) {
    const before = slider.dataset.rate === undefined ? 0.5 : Number(slider.dataset.rate);
    slider.max = network.rates.length - 1;
    const distance = (index) => Math.abs(network.rates[index] - before);
    slider.value = network.rates.reduce((best, _, index) => (distance(index) < distance(best) ? index : best), 0);
    show(network, Number(slider.value));
  }

  function show(network, index) {
    const rate = network.rates[index];
    slider.dataset.rate = rate;
    slider.setAttribute("aria-valuetext", `${percent(rate)} of the terms removed`);
    find("removed").textContent = percent(rate);
    const cut = network.layers.map((layer) => {
      const kept = Math.max(1, layer.rank - Math.floor(layer.rank * rate + 1e-9));
      return { ...layer, kept, weights: kept * layer.term };
    });
    const sum = (of) => cut.reduce((total, layer) => total + of(layer), 0);
    const terms = sum((layer) => layer.rank), kept = sum((layer) => layer.kept);
    const gone = sum((layer) => (layer.rank - layer.kept) * layer.term);
    const whole = network.weights ?? sum((layer) => layer.rank * layer.term);
    put("accuracy", `${network.accuracy[index].toFixed(2)} %`, `${change(network.accuracy[index] - network.accuracy[0])} points`);
    put("weights", short(whole - gone), `${percent((whole - gone) / whole)} of ${short(whole)}`);
    put("terms", kept.toLocaleString("en"), `of ${terms.toLocaleString("en")}`);
    const measured = cut.every((layer) => layer.flops !== null);
    find("flops").parentElement.hidden = !measured;
    if (measured) {
      const all = sum((layer) => layer.rank * layer.flops), left = sum((layer) => layer.kept * layer.flops);
      put("flops", short(left), `${percent(left / all)} of ${short(all)} through the terms`);
    }
    course.replaceChildren(drawCourse(network, index));
    layers.replaceChildren(...cut.map(drawLayer));
  }

  function put(part, text, note) {
    find(part).replaceChildren(text, element("small", {}, note));
  }

  function drawCourse(network, index) {
    const width = 460, height = 170, left = 42, right = 446, top = 10, bottom = 132;
    const low = Math.min(...network.accuracy), high = Math.max(...network.accuracy);
    const x = (rate) => left + (right - left) * rate;
    const y = (value) => bottom - (bottom - top) * ((value - low) / (high - low || 1));
    const svg = drawing(width, height, `Accuracy against the share of terms removed: ${network.name}`);
    for (const value of [low, (low + high) / 2, high]) {
      svg.append(shape("path", { class: "rule", d: `M${left} ${y(value)}H${right}` }));
      svg.append(shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(1)));
    }
    for (const rate of [0, 0.25, 0.5, 0.75, 1])
      svg.append(shape("text", { x: x(rate), y: bottom + 17, "text-anchor": "middle" }, percent(rate)));
    svg.append(shape("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, "terms removed"));
    const points = network.rates.map((rate, k) => `${x(rate).toFixed(1)} ${y(network.accuracy[k]).toFixed(1)}`);
    svg.append(shape("path", { class: "line s2", d: `M${points.join("L")}` }));
    network.rates.forEach((rate, k) =>
      svg.append(shape("circle", { class: "dot s2", cx: x(rate), cy: y(network.accuracy[k]), r: k === index ? 6 : 3 })));
    return svg;
  }

  function drawLayer(layer) {
    const width = 210, height = 64, most = layer.lambdas[0] || 1;
    const gone = layer.rank - layer.kept;
    const svg = drawing(width, height, `${layer.name}: absolute λ in order, ${gone} of ${layer.rank} terms removed`);
    const border = (width * layer.kept) / layer.rank;
    const bar = width / layer.lambdas.length;
    layer.lambdas.forEach((value, k) => {
      const tall = Math.max((height * value) / most, 0.5);
      const style = (k + 0.5) * bar <= border ? "kept" : "gone";
      svg.append(shape("rect", { class: style, x: k * bar, y: height - tall, width: Math.max(bar - 0.4, 0.5), height: tall }));
    });
    svg.append(shape("path", { class: "axis", d: `M${border.toFixed(1)} 0V${height}` }));
    const box = element("div", {});
    box.append(
      element("h4", {}, layer.name),
      element("p", {}, `${layer.kept} of ${layer.rank} terms, ${short(layer.weights)} weights`),
      svg,
    );
    return box;
  }

  function drawing(width, height, title) {
    return shape("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  }
}

// --- small things ---

function element(name, attributes, text) {
  return fill(document.createElement(name), attributes, text);
}

function shape(name, attributes, text) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, text);
}

function fill(node, attributes, text) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function percent(share) {
  return `${Number((100 * share).toFixed(1))} %`;
}

function change(value) {
  return (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(value).toFixed(2);
}

function short(value) {
  if (value >= 1e8) return `${(value / 1e9).toFixed(2)} G`;
  if (value >= 1e5) return `${(value / 1e6).toFixed(2)} M`;
  return value >= 1e3 ? `${(value / 1e3).toFixed(1)} k` : value.toFixed(0);
}
