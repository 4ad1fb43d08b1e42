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

// --- folded parts: a link into one opens it, and printing opens all ---

function openTarget() {
  const part = location.hash && document.getElementById(location.hash.slice(1))?.closest("details");
  if (part) part.open = true;
}
addEventListener("hashchange", openTarget);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));
openTarget();

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

// --- the explorer: the same share of every layer's terms is removed, smallest first; other cuts as they were measured ---

const explorer = document.querySelector(".explorer");
if (explorer) {
  const networks = JSON.parse(document.getElementById("explorer-networks").textContent);
  const find = (name) => explorer.querySelector(`[data-part=${name}]`);
  const select = find("network"), slider = find("rate"), course = find("course"), cuts = find("cuts"), layers = find("layers");
  networks.forEach((network, index) => select.append(new Option(network.name, index)));
  select.addEventListener("change", () => choose(networks[select.value]));
  slider.addEventListener("input", () => show(networks[select.value], Number(slider.value)));
  explorer.hidden = false;
  choose(networks[0]);

  function choose(network) {
    const slides = network.rates.length > 0;
    for (const name of ["slider", "spectra"]) find(name).hidden = !slides;
    explorer.querySelector(".figures").hidden = !slides;
    if (!slides) {
      course.replaceChildren(drawCourse(network, null), element("p", {}, explain(network)));
      cuts.replaceChildren(...listCuts(network));
      return;
    }
    const before = slider.dataset.rate === undefined ? 0.5 : Number(slider.dataset.rate);
    slider.max = network.rates.length - 1;
    const distance = (index) => Math.abs(network.rates[index] - before);
    slider.value = network.rates.reduce((best, _, index) => (distance(index) < distance(best) ? index : best), 0);
    show(network, Number(slider.value));
  }

  function cutAt(network, rate) {
    return network.layers.map((layer) => {
      const kept = Math.max(1, layer.rank - Math.floor(layer.rank * rate + 1e-9));
      return { ...layer, kept, parameters: kept * layer.term };
    });
  }

  function left(network, rate) {
    const cut = cutAt(network, rate);
    const whole = network.parameters ?? cut.reduce((total, layer) => total + layer.rank * layer.term, 0);
    return whole - cut.reduce((total, layer) => total + (layer.rank - layer.kept) * layer.term, 0);
  }

  function show(network, index) {
    const rate = network.rates[index];
    slider.dataset.rate = rate;
    slider.setAttribute("aria-valuetext", `${percent(rate)} of the terms removed`);
    find("removed").textContent = percent(rate);
    const cut = cutAt(network, rate);
    const sum = (of) => cut.reduce((total, layer) => total + of(layer), 0);
    const terms = sum((layer) => layer.rank), kept = sum((layer) => layer.kept);
    const whole = left(network, 0), now = left(network, rate);
    put("accuracy", `${network.accuracy[index].toFixed(2)} %`, `${change(network.accuracy[index] - network.accuracy[0])} points`);
    put("parameters", short(now), `${percent(now / whole)} of ${short(whole)}`);
    put("terms", kept.toLocaleString("en"), `of ${terms.toLocaleString("en")}`);
    const measured = cut.every((layer) => layer.flops !== null);
    find("flops").parentElement.hidden = !measured;
    if (measured) {
      const all = sum((layer) => layer.rank * layer.flops), some = sum((layer) => layer.kept * layer.flops);
      put("flops", short(some), `${percent(some / all)} of ${short(all)} through the terms`);
    }
    course.replaceChildren(drawCourse(network, index), element("p", {}, explain(network)));
    cuts.replaceChildren(...listCuts(network));
    layers.replaceChildren(...cut.map(drawLayer));
  }

  function explain(network) {
    const line = network.rates.length ? "Line: the same share of every layer removed, without fine-tuning." : "";
    return network.cuts.length ? `${line} Hollow: measured cuts, before fine-tuning. Filled: after it.${network.cuts.some((cut) => cut.peer) ? " Grey: other methods." : ""}`.trim() : line;
  }

  function listCuts(network) {
    if (!network.cuts.length) return [];
    const list = element("ul", {});
    for (const cut of [...network.cuts].sort((a, b) => b.parameters - a.parameters)) {
      const tuned = cut.tuned === null ? "" : `, fine-tuned ${cut.tuned.toFixed(2)} %`;
      const first = cut.cut === null ? "" : `: ${cut.cut.toFixed(2)} %`;
      list.append(element("li", {}, `${short(cut.parameters)} parameters, ${cut.name}${first}${tuned}`));
    }
    return [element("h4", {}, "Measured cuts of this network"), list];
  }

  function put(part, text, note) {
    find(part).replaceChildren(text, element("small", {}, note));
  }

  function drawCourse(network, index) {
    const width = 460, height = 210, start = 42, end = 446, top = 10, bottom = 172;
    const line = network.rates.map((rate, k) => [left(network, rate), network.accuracy[k]]);
    const marks = network.cuts.flatMap((cut) => [[cut.parameters, cut.cut, cut, "hollow"], [cut.parameters, cut.tuned, cut, "dot s1"]])
      .filter(([, value]) => value !== null);
    const values = [...line, ...marks].map(([, value]) => value), sizes = [...line, ...marks].map(([size]) => Math.max(size, 1));
    const low = Math.min(...values), high = Math.max(...values), least = Math.min(...sizes), most = Math.max(...sizes);
    const x = (size) => end - ((end - start) * Math.log(most / Math.max(size, 1))) / (Math.log(most / least) || 1);
    const y = (value) => bottom - (bottom - top) * ((value - low) / (high - low || 1));
    const svg = drawing(width, height, `Accuracy against parameters: ${network.name}`);
    for (const value of [low, (low + high) / 2, high]) {
      svg.append(shape("path", { class: "rule", d: `M${start} ${y(value)}H${end}` }));
      svg.append(shape("text", { x: start - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(1)));
    }
    for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      const size = least * (most / least) ** share;
      svg.append(shape("text", { x: x(size), y: bottom + 17, "text-anchor": anchor }, short(size)));
    }
    svg.append(shape("text", { x: (start + end) / 2, y: height - 4, "text-anchor": "middle" }, "parameters, logarithmic"));
    if (line.length) svg.append(shape("path", { class: "line s2", d: `M${line.map(([size, value]) => `${x(size).toFixed(1)} ${y(value).toFixed(1)}`).join("L")}` }));
    line.forEach(([size, value], k) => svg.append(shape("circle", { class: "dot s2", cx: x(size), cy: y(value), r: k === index ? 6 : 3 })));
    for (const [size, value, cut, style] of marks) {
      const mark = shape("circle", { class: cut.peer ? `${style} peer` : style, cx: x(size), cy: y(value), r: 4.5 });
      mark.append(shape("title", {}, `${cut.name}: ${value.toFixed(2)} %`));
      svg.append(mark);
    }
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
      element("p", {}, `${layer.kept} of ${layer.rank} terms, ${short(layer.parameters)} parameters`),
      svg,
    );
    return box;
  }

  function drawing(width, height, title) {
    return shape("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  }
}

// --- elements, shapes and numbers ---

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
