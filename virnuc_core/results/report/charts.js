// Bars and histograms.

// A bar of parts side by side, with what each part is.
// parts: [{name, value, kind}], kind being a class of colour.
function stackedBar(title, parts, whole) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const bar = h("div", { class: "stack", role: "img", "aria-label":
    `${title}: ${parts.map((part) => `${part.name} ${count(part.value)}`).join(", ")}` });
  parts.filter((part) => part.value).forEach((part) => {
    const piece = h("span", { class: `fill-${part.kind}`, title: `${part.name}: ${count(part.value)}` });
    piece.style.flexGrow = part.value / total;
    bar.append(piece);
  });
  const legend = h("ul", { class: "legend" }, parts.map((part) =>
    h("li", {},
      h("span", { class: `dot fill-${part.kind}`, "aria-hidden": "true" }),
      h("span", { text: part.name }), " ",
      h("b", { text: count(part.value) }), " ",
      h("span", { class: "dim", text: percent(part.value, total) }))));
  return h("figure", { class: "stacked" },
    h("figcaption", {}, h("span", { text: title }), h("span", { class: "dim", text: whole })), bar, legend);
}

// A histogram of probabilities: equal parts of 0 to 1, coloured by the side of the threshold on which they lie.
function histogram(title, counts, unit, threshold = THRESHOLD) {
  const width = 520, height = 190, left = 44, bottom = 34, top = 12, right = 6;
  const highest = Math.max(1, ...counts);
  const step = (width - left - right) / counts.length;
  const y = (value) => height - bottom - (value / highest) * (height - bottom - top);
  const total = counts.reduce((sum, value) => sum + value, 0);
  const first = Math.ceil(threshold * counts.length - 1e-9);
  const edge = first / counts.length;
  const below = counts.slice(0, first).reduce((sum, value) => sum + value, 0);
  const image = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label":
    `${title}: ${count(below)} below ${edge}, ${count(total - below)} from ${edge} on` });
  niceTicks(highest).forEach((tick) => {
    image.append(
      s("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      s("text", { class: "tick", x: left - 6, y: y(tick) + 3.5, "text-anchor": "end", text: count(tick) }));
  });
  counts.forEach((value, i) => {
    if (!value) return;
    const box = s("rect", { class: i < first ? "fill-other" : "fill-virus",
      x: left + i * step + 0.6, y: y(value), width: step - 1.2, height: height - bottom - y(value) });
    const [from, to] = [i, i + 1].map((edge) => (edge / counts.length).toFixed(2));
    box.append(s("title", { text: `${from} to ${to}: ${count(value)} ${unit}` }));
    image.append(box);
  });
  [0, 0.25, 0.5, 0.75, 1].forEach((p) => {
    const x = left + p * (width - left - right);
    image.append(
      s("line", { class: "axis", x1: x, x2: x, y1: height - bottom, y2: height - bottom + 4 }),
      s("text", { class: "tick", x, y: height - bottom + 16, "text-anchor": "middle", text: String(p) }));
  });
  const middle = left + (width - left - right) / 2;
  const border = left + (width - left - right) * threshold;
  image.append(
    s("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    s("line", { class: "threshold", x1: border, x2: border, y1: top - 6, y2: height - bottom }),
    s("text", { class: "tick", x: middle, y: height - 3, "text-anchor": "middle", text: "p_virus" }));
  return h("figure", { class: "histogram" },
    h("figcaption", {}, h("span", { text: title }),
      h("span", { class: "dim", text: `${count(below)} other · ${count(total - below)} virus` })),
    image);
}

// At most four round numbers up to the highest one, zero left out.
function niceTicks(highest) {
  const rough = highest / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough));
  const ticks = [];
  for (let tick = step; tick <= highest; tick += step) ticks.push(tick);
  return ticks;
}

// A plain table. columns: [{name, right}], rows: arrays of strings or nodes.
function plainTable(caption, columns, rows) {
  return h("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: "plain" },
      h("caption", { class: "unseen", text: caption }),
      h("thead", {}, h("tr", {}, columns.map((column) =>
        h("th", { scope: "col", class: column.right ? "right" : "", text: column.name })))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) =>
        h("td", { class: columns[i].right ? "right" : "" }, cell)))))));
}
