// p_virus along a contig: a bar for each chunk that has a score, up from the threshold for virus and down for other, a line for the
// mean over neighbours, called regions shaded, and ticks below where a chunk has no score.

const TRACK = { left: 34, right: 8, lane: 12, top: 20, plot: 104, rug: 9, axis: 22 };
TRACK.base = TRACK.top + TRACK.plot + TRACK.rug;
const SMOOTHED_CHUNKS = 11;
const LEAST_SMOOTHED = 2 * SMOOTHED_CHUNKS; // a shorter contig is hardly more than one window
const MIN_BAR_PIXELS = 2.5;

// The chunk length of a contig, in bp.
function chunkSize(length) {
  return data.run.chunk_steps.find(([, below]) => below === null || length < below)[0];
}

// Where the chunks of a contig lie: ceil(length / size) chunks that cover it, the surplus shared out as overlaps.
function chunkPlaces(row) {
  const length = contigs.length[row], number = contigs.chunks[row], size = chunkSize(length);
  const surplus = number * size - length;
  const base = Math.floor(surplus / Math.max(number, 1));
  const longer = surplus - base * (number - 1);
  const start = (i) => i * (size - base) - Math.min(i, longer);
  return { start, end: (i) => Math.min(start(i) + size, length) };
}

// The figure of one contig, with its own part in view; null where the report holds no scores of it.
function trackFigure(row) {
  const scores = levelsOf(row);
  if (!scores) return null;
  const name = contigs.name[row], length = contigs.length[row];
  const track = { row, scores, places: chunkPlaces(row), from: 0, to: length, cursor: -1 };
  const readout = h("output", { class: "readout", "aria-live": "polite" });
  const canvas = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label":
    `Scores along ${name}. Left and right arrow keys read chunk by chunk, plus and minus zoom, 0 shows the whole contig.` });
  const show = (from, to) => {
    const least = Math.min(length, 4 * chunkSize(length));
    const width = Math.min(length, Math.max(least, to - from));
    const begin = Math.min(Math.max(0, (from + to - width) / 2), length - width);
    Object.assign(track, { from: begin, to: begin + width });
    draw();
  };
  const zoom = (factor) => {
    const at = track.cursor < 0 ? (track.from + track.to) / 2 : middleOf(track, track.cursor);
    show(at - (at - track.from) * factor, at + (track.to - at) * factor);
  };
  const draw = () => {
    const width = canvas.clientWidth;
    if (width) canvas.replaceChildren(drawTrack(track, width));
    tell();
  };
  const tell = () => {
    whole.disabled = track.from === 0 && track.to === length;
    readout.textContent = track.cursor < 0 ? span(track) : chunkText(track);
  };
  const button = (text, label, action) => h("button", { type: "button", class: "quiet", text, "aria-label": label, onclick: action });
  const whole = button("Whole contig", "Show the whole contig", () => show(0, length));
  const tools = h("div", { class: "track-tools" }, readout,
    button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)), whole);
  track.move = (chunk) => {
    track.cursor = chunk;
    moveCursor(track, canvas.firstElementChild);
    tell();
  };
  listenToTrack(track, canvas, { show, zoom, draw });
  new ResizeObserver(() => canvas.clientWidth !== track.drawn && draw()).observe(canvas);
  return h("figure", { class: "track" }, tools, canvas, regionButtons(row, show));
}

// What a mouse and a keyboard do on a track.
function listenToTrack(track, canvas, { show, zoom }) {
  const length = contigs.length[track.row];
  let drag = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - TRACK.left) / (box.width - TRACK.left - TRACK.right);
    return track.from + Math.min(1, Math.max(0, share)) * (track.to - track.from);
  };
  canvas.addEventListener("pointermove", (event) => {
    const at = place(event);
    track.move(chunkAt(track, at));
    if (drag !== null) markDrag(track, canvas.firstElementChild, drag, at);
  });
  canvas.addEventListener("pointerleave", () => { drag = null; markDrag(track, canvas.firstElementChild, 0, 0); track.move(-1); });
  canvas.addEventListener("pointerdown", (event) => { if (event.button === 0) drag = place(event); });
  canvas.addEventListener("pointerup", (event) => {
    const [from, to] = [drag, place(event)].sort((a, b) => a - b);
    const isDrag = drag !== null && to - from > (track.to - track.from) / 100;
    drag = null;
    if (isDrag) show(from, to);
  });
  canvas.addEventListener("dblclick", () => show(0, length));
  canvas.addEventListener("blur", () => track.move(-1));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      const first = chunkAt(track, track.from);
      track.move(Math.min(track.scores.length - 1, Math.max(0, track.cursor < 0 ? first : track.cursor + step)));
      const at = middleOf(track, track.cursor);
      if (at < track.from || at > track.to) show(at - (track.to - track.from) / 2, at + (track.to - track.from) / 2);
    } else if (event.key === "+") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0") show(0, length);
    else return;
    event.preventDefault();
  });
}

const middleOf = (track, chunk) => (track.places.start(chunk) + track.places.end(chunk)) / 2;
const span = (track) => `${count(Math.floor(track.from) + 1)} – ${count(Math.ceil(track.to))} bp`;
function chunkAt(track, at) {
  let low = 0, high = track.scores.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (track.places.start(middle) <= at) low = middle; else high = middle - 1;
  }
  return low;
}
function chunkText(track) {
  const level = track.scores[track.cursor];
  const where = `chunk ${count(track.cursor + 1)}, ${count(track.places.start(track.cursor) + 1)} – ${count(track.places.end(track.cursor))} bp`;
  return level === NO_SCORE ? `${where}: no score` : `${where}: p_virus ${levelScore(level).toFixed(2)}`;
}

// Buttons that name the regions of a contig and bring them into view.
function regionButtons(row, show) {
  const found = regionsOf(row);
  if (!found.length) return null;
  const most = 24;
  const buttons = found.slice(0, most).map((i) => {
    const [start, end] = [regions.start[i], regions.end[i]];
    const flank = Math.max((end - start) / 2, 5 * chunkSize(contigs.length[row]));
    const sure = [["score", regions.score[i], 0], ["mean p", regions.mean_p[i], 2]]
      .filter(([, value]) => value !== null).map(([what, value, digits]) => ` · ${what} ${value.toFixed(digits)}`).join("");
    return h("button", { type: "button", class: "region", title: "Bring this region into view",
      onclick: () => show(start - flank, end + flank) },
      h("span", { text: `${count(start)} – ${count(end)}` }),
      h("span", { class: "dim", text: ` ${bases(end - start + 1)}${sure}` }), tierMark(regions.tier[i]));
  });
  const left = found.length - most;
  return h("div", { class: "regions" }, h("span", { class: "dim", text: found.length === 1 ? "Region" : "Regions" }), buttons,
    left > 0 && h("span", { class: "dim", text: `and ${count(left)} more in regions.tsv` }));
}

function drawTrack(track, width) {
  track.drawn = width;
  const { left, right, top, plot, rug } = TRACK;
  const height = TRACK.base + TRACK.axis;
  track.x = (at) => left + ((at - track.from) / (track.to - track.from)) * (width - left - right);
  const y = (p) => top + (1 - p) * plot;
  const name = contigs.name[track.row];
  const found = regionsOf(track.row);
  const image = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label":
    `p_virus along ${name}, ${span(track)}; ${plural(found.length, "viral region", "viral regions")}` });
  found.forEach((i) => image.append(...regionShapes(track, i, width)));
  [0, THRESHOLD, 1].forEach((p) => image.append(
    s("line", { class: p === THRESHOLD ? "axis" : "grid", x1: left, x2: width - right, y1: y(p), y2: y(p) }),
    s("text", { class: "tick", x: left - 6, y: y(p) + 3.5, "text-anchor": "end", text: String(p) })));
  const columns = trackColumns(track, width);
  image.append(
    s("path", { class: "fill-other", d: barPath(columns, y, false) }),
    s("path", { class: "fill-virus", d: barPath(columns, y, true) }),
    s("path", { class: "mean", d: meanPath(track, y, width) }),
    s("path", { class: "rug", d: columns.filter((column) => !column.scored)
      .map((column) => `M${column.x.toFixed(1)} ${top + plot + 3}h${Math.max(0.5, column.width - 0.4).toFixed(1)}v${rug - 5}h${-Math.max(0.5, column.width - 0.4).toFixed(1)}z`).join("") }),
    ...positionAxis(track, width),
    s("rect", { class: "drag", y: top, height: plot, width: 0 }),
    s("line", { class: "cursor", y1: top - 4, y2: TRACK.base, x1: 0, x2: 0 }));
  return image;
}

function regionShapes(track, i, width) {
  const from = Math.max(track.x(regions.start[i] - 1), TRACK.left);
  const to = Math.min(track.x(regions.end[i]), width - TRACK.right);
  if (to <= TRACK.left || from >= width - TRACK.right) return [];
  const tier = `tier-${TIERS[regions.tier[i]]}`;
  return [
    s("rect", { class: "shade", x: from, width: Math.max(1, to - from), y: 3, height: TRACK.top + TRACK.plot - 3 }),
    s("rect", { class: `band ${tier}`, x: from, width: Math.max(2, to - from), y: 3, height: TRACK.lane - 5, rx: 1.5 },
      s("title", { text: `${TIERS[regions.tier[i]]} region, ${count(regions.start[i])} – ${count(regions.end[i])}` })),
  ];
}

// What is drawn side by side: a chunk each, or as many chunks as share a few pixels.
function trackColumns(track, width) {
  const first = chunkAt(track, track.from), last = chunkAt(track, Math.max(track.from, track.to - 1));
  const pixels = (width - TRACK.left - TRACK.right) / (last - first + 1);
  const together = Math.max(1, Math.ceil(MIN_BAR_PIXELS / pixels));
  const columns = [];
  for (let begin = first; begin <= last; begin += together) {
    const end = Math.min(begin + together - 1, last);
    const column = { begin, end, scored: 0, sum: 0 };
    for (let i = begin; i <= end; i += 1) {
      if (track.scores[i] === NO_SCORE) continue;
      column.scored += 1;
      column.sum += levelScore(track.scores[i]);
    }
    column.x = Math.max(TRACK.left, track.x(track.places.start(begin)));
    const next = end + 1 < track.scores.length ? track.places.start(end + 1) : track.places.end(end);
    column.width = Math.min(width - TRACK.right, track.x(next)) - column.x;
    columns.push(column);
  }
  return columns;
}

function barPath(columns, y, isVirus) {
  return columns.filter((column) => column.scored && (column.sum / column.scored >= THRESHOLD) === isVirus).map((column) => {
    const height = y(column.sum / column.scored) - y(THRESHOLD);
    const wide = Math.max(0.5, column.width - (column.width > 3 ? 0.8 : 0));
    return `M${column.x.toFixed(1)} ${y(THRESHOLD)}h${wide.toFixed(1)}v${height.toFixed(1)}h${-wide.toFixed(1)}z`;
  }).join("");
}

// The mean over scored chunks in a window that is SMOOTHED_CHUNKS wide, or what a few pixels hold.
function meanPath(track, y, width) {
  const number = track.scores.length;
  if (number < LEAST_SMOOTHED) return "";
  if (!track.sums) {
    track.sums = new Float64Array(number + 1);
    track.counts = new Uint32Array(number + 1);
    track.scores.forEach((level, i) => {
      track.sums[i + 1] = track.sums[i] + (level === NO_SCORE ? 0 : levelScore(level));
      track.counts[i + 1] = track.counts[i] + (level !== NO_SCORE);
    });
  }
  const first = chunkAt(track, track.from), last = chunkAt(track, Math.max(track.from, track.to - 1));
  const step = Math.max(1, Math.floor((last - first + 1) / ((width - TRACK.left - TRACK.right) / 2)));
  const half = Math.max((SMOOTHED_CHUNKS - 1) / 2, step);
  let path = "", pen = "M";
  for (let i = first; i <= last; i += step) {
    const begin = Math.max(0, i - half), end = Math.min(number, i + half + 1);
    const scored = track.counts[end] - track.counts[begin];
    if (!scored) { pen = "M"; continue; }
    const x = Math.min(width - TRACK.right, Math.max(TRACK.left, track.x(middleOf(track, i))));
    path += `${pen}${x.toFixed(1)} ${y((track.sums[end] - track.sums[begin]) / scored).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

function positionAxis(track, width) {
  const base = TRACK.base;
  const range = track.to - track.from;
  const rough = range / Math.max(2, (width - TRACK.left) / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const [unit, size] = range < 2e3 ? ["bp", 1] : range < 2e6 ? ["kb", 1e3] : ["Mb", 1e6];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  const shapes = [];
  for (let at = Math.ceil(track.from / step) * step; at <= track.to; at += step) {
    const x = track.x(at);
    const anchor = x < TRACK.left + 14 ? "start" : x > width - TRACK.right - 24 ? "end" : "middle";
    shapes.push(
      s("line", { class: "axis", x1: x, x2: x, y1: base, y2: base + 4 }),
      s("text", { class: "tick", x, y: base + 16, "text-anchor": anchor, text: `${(at / size).toFixed(digits)} ${unit}` }));
  }
  return [...shapes, s("line", { class: "axis", x1: TRACK.left, x2: width - TRACK.right, y1: base, y2: base })];
}

function moveCursor(track, image) {
  if (!image) return;
  const line = image.querySelector(".cursor");
  line.classList.toggle("is-on", track.cursor >= 0);
  if (track.cursor < 0) return;
  const x = track.x(middleOf(track, track.cursor));
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
}

function markDrag(track, image, from, to) {
  if (!image) return;
  const [left, right] = [track.x(from), track.x(to)].sort((a, b) => a - b);
  const box = image.querySelector(".drag");
  box.setAttribute("x", left);
  box.setAttribute("width", right - left);
}
