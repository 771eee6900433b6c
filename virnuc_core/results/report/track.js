// A card for each contig with a provirus; the scores of its chunks along the contig are drawn when it is opened.

const TRACK = { left: 30, right: 10, top: 14, plot: 110, axis: 24 };
const MIN_BAR = 2.5; // px

function provirusCards() {
  data.tracks.forEach((track) => cards.set(track.contig, card(track)));
  const all = contigs.call.filter((call) => names.call[call] === "provirus").length;
  return [h("p", { class: "dim", text: "Each bar is the virus score of a chunk, or the mean of neighbouring chunks in long contigs; the provirus is shaded." }),
    ...cards.values(), all > cards.size && h("p", { class: "dim", text: `Showing ${cards.size} of ${count(all)}; virus_summary.tsv lists all.` })];
}

function card(track) {
  const length = contigs.length[track.contig];
  const plot = h("div", { class: "track" });
  const range = { from: 0, to: length };
  const draw = () => plot.clientWidth && plot.replaceChildren(trackImage(track, range, plot.clientWidth));
  const show = (from, to) => { Object.assign(range, { from: Math.max(0, from), to: Math.min(length, to) }); draw(); };
  const button = (text, label, onclick) => h("button", { type: "button", text, "aria-label": label, onclick });
  const proviruses = track.proviruses.map(({ start, end, virus_score, fdr, confidence }) => h("li", {},
    h("b", { text: `${count(start)}–${count(end)}` }),
    dim(`${bases(end - start + 1)} · score ${score(virus_score)}${fdr === null ? "" : ` · FDR ${(100 * fdr).toFixed(1)}%`} · ${confidence}`),
    track.start.length > 0 && button("Zoom in", `Zoom in on ${start} to ${end}`, () => show(start - (end - start) / 2, end + (end - start) / 2))));
  let drawn = 0;
  new ResizeObserver(() => { if (plot.clientWidth !== drawn) { drawn = plot.clientWidth; draw(); } }).observe(plot);
  return h("details", { class: "card", id: `contig-${track.contig}` },
    h("summary", {}, h("bdi", { class: "name", text: contigs.seq_name[track.contig] }), " ", dim(`${bases(length)} · ${track.proviruses.map(({ start, end }) => `${count(start)}–${count(end)}`).join(", ")}`)),
    h("ul", {}, proviruses),
    track.start.length ? [plot, button("Whole contig", "Show the whole contig", () => show(0, length))]
      : h("p", { class: "dim", text: "Too many chunks to plot here: see chunks.tsv." }));
}

function trackImage(track, { from, to }, width) {
  const { left, right, top, plot, axis } = TRACK;
  const inside = (at) => Math.min(to, Math.max(from, at));
  const x = (at) => left + ((inside(at) - from) / (to - from)) * (width - left - right);
  const y = (value) => top + (1 - value) * plot;
  const image = s("svg", { viewBox: `0 0 ${width} ${top + plot + axis}`, class: "plot", role: "img",
    "aria-label": `Virus scores of chunks from ${count(Math.floor(from) + 1)} to ${count(Math.ceil(to))}` });
  track.proviruses.filter(({ start, end }) => end > from && start < to).forEach(({ start, end }) =>
    image.append(s("rect", { class: "shade", x: x(start - 1), width: x(end) - x(start - 1), y: 2, height: top + plot - 2 })));
  [0, BALANCED, 1].forEach((value) => image.append(
    s("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    s("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", text: value })));
  bars(track, from, to, (width - left - right) / MIN_BAR).forEach(({ begin, end, mean, text }) => image.append(
    s("rect", { class: mean >= BALANCED ? "viral" : "other", x: x(begin), width: Math.max(1, x(end) - x(begin) - 0.6),
      y: Math.min(y(mean), y(BALANCED)), height: Math.abs(y(mean) - y(BALANCED)) + 0.5 }, s("title", { text }))));
  const rough = (to - from) / Math.max(2, width / 130), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    image.append(s("text", { x: x(at), y: top + plot + 18, "text-anchor": x(at) > width - 40 ? "end" : "middle", text: `${count(at / 1e3)} kb` }));
  }
  return image;
}

// The chunks in view, or the means of as many neighbours as share one bar; those without a score are left out.
function bars(track, from, to, most) {
  const ends = [...track.start.slice(1).map((start) => start - 1), contigs.length[track.contig]];
  const chunks = [...track.start.keys()].filter((i) => track.score[i] !== null && ends[i] > from && track.start[i] <= to);
  const together = Math.ceil(chunks.length / most);
  const found = [];
  for (let i = 0; i < chunks.length; i += together) {
    const group = chunks.slice(i, i + together), begin = track.start[group[0]] - 1, end = ends[group[group.length - 1]];
    const mean = group.reduce((sum, chunk) => sum + track.score[chunk], 0) / group.length;
    found.push({ begin, end, mean, text: `${count(begin + 1)}–${count(end)}: ${group.length > 1 ? `mean of ${group.length} chunks ` : ""}${score(mean)}` });
  }
  return found;
}
