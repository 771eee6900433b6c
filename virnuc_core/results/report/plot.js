// Scatter plots of all contigs in the report.

const PLOT = { width: 560, height: 300, left: 40, right: 28, top: 10, bottom: 48 };

function scorePlots() {
  // One path for each class, the largest below; without classes, for each call.
  const key = has("class") ? "class" : "call";
  const groups = names[key].map((name, number) => ({ name, rows: [...contigs[key].keys()].filter((row) => contigs[key][row] === number && contigs.virus_score[row] !== null) }))
    .filter(({ rows }) => rows.length).sort((a, b) => b.rows.length - a.rows.length);
  if (!groups.length) return [];
  const lengths = groups.flatMap(({ rows }) => rows.map((row) => contigs.length[row]));
  const low = lengths.reduce((a, b) => Math.min(a, b)), high = lengths.reduce((a, b) => Math.max(a, b));
  const ticks = [];
  for (let power = 0; power < 10; power += 1) [1, 2, 5].forEach((step) => ticks.push(step * 10 ** power));
  const legend = h("ul", { class: "legend" }, groups.map(({ name, rows }) => h("li", {}, dot(name), h("bdi", { text: name }), " ", dim(count(rows.length)))),
    data.threshold !== null && h("li", {}, dim(`- - score threshold ${score(data.threshold)}`)));
  const shown = ticks.filter((tick) => tick >= 0.8 * low && tick <= 1.2 * high);
  const sparse = shown.length > 5 ? shown.filter((tick) => /^1/.test(tick)) : shown;
  return [legend, h("div", { class: "pair" },
    scatter("Score by length", "Length (log scale)", groups, (row) => Math.log10(contigs.length[row]), Math.log10(0.8 * low), Math.log10(1.2 * high),
      sparse.map((tick) => [Math.log10(tick), tick < 1e3 ? `${tick} bp` : tick < 1e6 ? `${tick / 1e3} kb` : `${tick / 1e6} Mb`])),
    has("gc") && scatter("Score by GC content", "GC content", groups, (row) => contigs.gc[row], 0, 100, [0, 20, 40, 60, 80, 100].map((tick) => [tick, `${tick}%`])))];
}

function scatter(title, label, groups, valueOf, low, high, ticks) {
  const { width, height, left, right, top, bottom } = PLOT;
  const x = (value) => left + ((value - low) / (high - low)) * (width - left - right);
  const y = (value) => height - bottom - value * (height - bottom - top);
  const line = (kind, x1, y1, x2, y2) => s("line", { class: kind, x1, y1, x2, y2 });
  const image = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "plot scatter", role: "img", "aria-label": `${title}, of ${plural(numContigs, "contig")}` });
  [0, 0.5, 1].forEach((tick) => image.append(line("grid", left, y(tick), width - right, y(tick)),
    s("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end", text: tick })));
  ticks.forEach(([value, text]) => image.append(line("grid", x(value), height - bottom, x(value), height - bottom + 4),
    s("text", { x: x(value), y: height - bottom + 20, "text-anchor": "middle", text })));
  groups.forEach(({ name, rows }) => {
    // Points that would be drawn over each other are drawn once.
    const points = new Set(rows.filter((row) => valueOf(row) !== null).map((row) => `M${x(valueOf(row)).toFixed(0)} ${y(contigs.virus_score[row]).toFixed(0)}h0`));
    image.append(s("path", { class: `points ${colour(name)} ${numContigs > 2000 ? "small" : ""}`, d: [...points].join("") }));
  });
  if (data.threshold !== null) {
    image.append(line("threshold", left, y(data.threshold), width - right, y(data.threshold)));
  }
  image.append(s("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle", text: label }));
  return h("figure", {}, h("figcaption", { text: title }), image);
}
