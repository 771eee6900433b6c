// Why a contig was called virus, drawn below its track: what it loses without each chunk, the class of each chunk, and the stretches
// that these were scored from, in the frames of the contig.

const evidence = data.evidence || null; // of runs over the longest stretches
const WHY = { label: 20, bars: 66, gap: 9, classes: 8, lane: 6, strands: 3 };
WHY.lanes = 6 * WHY.lane + WHY.strands;
WHY.height = 2 * WHY.label + WHY.bars + WHY.gap + WHY.classes + WHY.lanes + 6;
const NO_CLASS = 255;
const FRAMES = ["F1", "F2", "F3", "R1", "R2", "R3"];
const MIN_STRETCH_PIXELS = 2; // of a chunk, to draw its stretches
const ARROW_PIXELS = 3;
const HARDLY = 0.001; // log-odds

const viralClasses = new Set(data.predicted ? data.predicted.viral : []);
const classKind = (number) => {
  const alike = [...PREDICTED.keys()].filter((one) => viralClasses.has(one) === viralClasses.has(number));
  return `class-${viralClasses.has(number) ? "virus" : "other"}-${alike.indexOf(number) % 6}`;
};
const classDot = (number) => h("span", { class: `dot ${classKind(number)}`, "aria-hidden": "true" });

const logOdds = (p) => Math.log(p / (1 - p));
const digits = (number) => number.toFixed(number >= 10 ? 0 : number >= 1 || number === 0 ? 1 : number >= 0.1 ? 2 : 3);
const signed = (number) => (number < 0 ? `\u2212${digits(-number)}` : digits(number));

// Arrays over all chunks that have evidence, and where each contig begins in them; decoded when first needed.
let chunksOf = null;
function evidenceArrays() {
  if (chunksOf) return chunksOf;
  const begin = new Map();
  const number = evidence.rows.reduce((sum, row) => { begin.set(row, sum); return sum + contigs.chunks[row]; }, 0);
  chunksOf = { begin, values: new Float32Array(bytesOf(evidence.values).buffer), classes: bytesOf(evidence.classes), first: null };
  const own = evidence.stretches;
  if (!own) return chunksOf;
  const counts = bytesOf(own.counts);
  chunksOf.first = new Uint32Array(number + 1);
  counts.forEach((many, i) => { chunksOf.first[i + 1] = chunksOf.first[i] + many; });
  chunksOf.frames = bytesOf(own.frames);
  chunksOf.starts = new Uint32Array(bytesOf(own.starts).buffer);
  chunksOf.bases = new Uint32Array(bytesOf(own.bases).buffer);
  chunksOf.scores = new Float32Array(bytesOf(own.p_virus).buffer);
  return chunksOf;
}

const hasEvidence = (row) => Boolean(evidence) && evidenceArrays().begin.has(row);

// What the figure of a contig needs; null where the report holds no evidence of it.
function evidenceOf(row, scores, places) {
  if (!hasEvidence(row)) return null;
  const all = evidenceArrays(), begin = all.begin.get(row), number = contigs.chunks[row];
  const values = all.values.subarray(begin, begin + number);
  const known = values.filter((value) => !Number.isNaN(value));
  const furthest = (pick) => known.reduce((most, value) => pick(most, value), 0);
  const why = { row, values, classes: all.classes.subarray(begin, begin + number), high: furthest(Math.max), low: furthest(Math.min), scored: known.length, scores };
  if (why.high === why.low) why.high = 1;
  // A chunk's place among those with a score.
  let rank = 0;
  why.ranks = Uint32Array.from(scores, (level) => (level === NO_SCORE ? 0 : rank++));
  why.stretches = (chunk) => stretchesOf(all, begin + chunk, chunk, places, contigs.length[row]);
  return why;
}

// The stretches of a chunk, where they lie on the contig and in which of its frames (0 to 2 forward, 3 to 5 reverse).
function stretchesOf(all, place, chunk, places, length) {
  if (!all.first) return [];
  const found = [];
  for (let i = all.first[place]; i < all.first[place + 1]; i += 1) {
    const isReverse = all.frames[i] >= 3, bases = all.bases[i];
    const from = isReverse ? places.end(chunk) - all.starts[i] - bases : places.start(chunk) + all.starts[i];
    const lane = isReverse ? 3 + ((length - from - bases) % 3) : from % 3;
    found.push({ from, to: from + bases, isReverse, lane, frame: FRAMES[all.frames[i]], p: all.scores[i] });
  }
  return found;
}

// The chunks that were left out together with one: the first and the last of them.
function blockOf(why, chunk) {
  const blocks = Math.min(why.scored, evidence.occlusions);
  const number = (i) => Math.floor((why.ranks[i] * blocks) / why.scored);
  const same = (i) => why.scores[i] !== NO_SCORE && number(i) === number(chunk);
  let [first, last, size] = [chunk, chunk, 1];
  for (let i = chunk - 1; i >= 0 && (why.scores[i] === NO_SCORE || same(i)); i -= 1) if (same(i)) { first = i; size += 1; }
  for (let i = chunk + 1; i < why.scores.length && (why.scores[i] === NO_SCORE || same(i)); i += 1) if (same(i)) { last = i; size += 1; }
  return { first, last, size };
}

function evidenceShapes(track, width, columns, top) {
  const why = track.why, { left, right } = TRACK;
  const bars = top + WHY.label;
  const y = (value) => bars + ((why.high - value) / (why.high - why.low)) * WHY.bars;
  const label = (at, words) => s("text", { class: "tick", x: left, y: at - 6, text: words });
  const averages = columns.map((column) => {
    const values = [...why.values.subarray(column.begin, column.end + 1)].filter((value) => !Number.isNaN(value));
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  });
  const barsOf = (isFor) => columns.map((column, i) => {
    if (averages[i] === null || averages[i] > 0 !== isFor) return "";
    const wide = Math.max(0.5, column.width - (column.width > 3 ? 0.8 : 0));
    return `M${column.x.toFixed(1)} ${y(0).toFixed(1)}h${wide.toFixed(1)}V${y(averages[i]).toFixed(1)}h${-wide.toFixed(1)}z`;
  }).join("");
  const ticks = [0, why.high, why.low].filter((value, i, all) => all.slice(0, i).every((other) => Math.abs(y(other) - y(value)) > 12));
  const classes = bars + WHY.bars + WHY.gap, lanes = classes + WHY.classes + WHY.label;
  return [
    label(bars, "Log-odds that the contig loses without the chunk"),
    ...ticks.flatMap((value) => [
      s("line", { class: value === 0 ? "axis" : "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      s("text", { class: "tick", x: left - 6, y: y(value) + 3.5, "text-anchor": "end", text: signed(value) })]),
    s("path", { class: "fill-virus", d: barsOf(true) }), s("path", { class: "fill-other", d: barsOf(false) }),
    ...classShapes(why, columns, classes),
    ...stretchShapes(track, width, lanes, label)];
}

// A strip of the classes of chunks; where several share a place, that of most of them.
function classShapes(why, columns, top) {
  const paths = new Map();
  for (const column of columns) {
    const numbers = new Map();
    for (const number of why.classes.subarray(column.begin, column.end + 1)) if (number !== NO_CLASS) numbers.set(number, (numbers.get(number) || 0) + 1);
    if (!numbers.size) continue;
    const [most] = [...numbers].reduce((best, one) => (one[1] > best[1] ? one : best));
    paths.set(most, `${paths.get(most) || ""}M${column.x.toFixed(1)} ${top}h${column.width.toFixed(1)}v${WHY.classes}h${-column.width.toFixed(1)}z`);
  }
  return [...paths].map(([number, d]) => s("path", { class: classKind(number), d }));
}

function stretchShapes(track, width, top, label) {
  if (!evidence.stretches) return [label(top, "Stretches: embeddings.h5 was not there")];
  const { left, right } = TRACK, [begin, end] = [left, width - right];
  const first = chunkAt(track, track.from), last = chunkAt(track, Math.max(track.from, track.to - 1));
  const laneTop = (lane) => top + lane * WHY.lane + (lane >= 3 ? WHY.strands : 0);
  const strand = (lane, text) => s("text", { class: "tick", x: left - 6, y: laneTop(lane) + WHY.lane / 2 + 3.5, "text-anchor": "end", text });
  const middle = s("line", { class: "grid", x1: begin, x2: end, y1: laneTop(3) - WHY.strands / 2 - 0.5, y2: laneTop(3) - WHY.strands / 2 - 0.5 });
  const marks = [strand(1, "+"), strand(4, "\u2212"), middle];
  if ((end - begin) / (last - first + 1) < MIN_STRETCH_PIXELS) return [label(top, "Stretches are drawn when you zoom in"), ...marks];
  const paths = new Map();
  for (let chunk = first; chunk <= last; chunk += 1) {
    for (const one of track.why.stretches(chunk)) {
      const from = Math.max(begin, track.x(one.from)), to = Math.min(end, track.x(one.to));
      if (to <= from) continue;
      const kind = `${one.p >= THRESHOLD ? "fill-virus" : "fill-other"} sure-${Math.min(3, Math.floor(8 * Math.abs(one.p - 0.5)))}`;
      paths.set(kind, (paths.get(kind) || "") + arrowPath(from, to, laneTop(one.lane), WHY.lane - 1, one.isReverse));
    }
  }
  return [label(top, "Stretches that were scored, by strand and frame"), ...marks, ...[...paths].map(([kind, d]) => s("path", { class: kind, d }))];
}

function arrowPath(from, to, top, height, isReverse) {
  const point = Math.min(ARROW_PIXELS, (to - from) / 2);
  const [tail, head, neck] = isReverse ? [to, from, from + point] : [from, to, to - point];
  const at = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  return `M${at(tail, top)}L${at(neck, top)}L${at(head, top + height / 2)}L${at(neck, top + height)}L${at(tail, top + height)}z`;
}

// A chunk's part in the call, in words.
function evidenceText(track, chunk) {
  const why = track.why, value = why.values[chunk];
  if (Number.isNaN(value)) return "It has no score, so it has no part in the call.";
  const words = [];
  const block = blockOf(why, chunk), change = value * block.size;
  const what = block.size === 1 ? "Taking this chunk out" : `Taking ${count(block.size)} chunks out together (${count(block.first + 1)} to ${count(block.last + 1)})`;
  if (why.scored === 1) words.push(`It is the only chunk with a score: all of the contig's log-odds, ${signed(value)}, come from it.`);
  else if (Math.abs(change) < HARDLY) words.push(`${what} hardly changes the contig's log-odds of a virus.`);
  else words.push(`${what} ${change > 0 ? "lowers" : "raises"} the contig's log-odds of a virus by ${digits(Math.abs(change))}.`);
  if (why.classes[chunk] !== NO_CLASS) words.push(`Class of the chunk: ${PREDICTED[why.classes[chunk]]}.`);
  const stretches = why.stretches(chunk).map((one) => `${count(one.from + 1)} – ${count(one.to)} bp (${one.frame}, p_virus ${one.p.toFixed(2)})`);
  if (stretches.length) words.push(`Scored from ${stretches.join(" and ")}.`);
  return words.join(" ");
}

// What stands below a figure, also in print: the chunks for and against, and how many are of which class.
function evidenceSummary(why) {
  const row = why.row, p = contigs[CALL_COLUMN][row], total = logOdds(p);
  const [favour, against] = [1, -1].map((sign) => why.values.reduce((sum, value) => sum + (sign * value > 0), 0));
  const best = why.values.reduce((most, value, i) => (value > (why.values[most] || 0) ? i : most), 0);
  const words = [`p_virus ${probability(p)}${Number.isFinite(total) ? `, log-odds ${signed(total)}` : ""}.`];
  if (why.scored === 1) words.push("The contig has one chunk with a score.");
  else words.push(`${count(favour)} of ${plural(why.scored, "chunk speaks", "chunks speak")} for a virus, ${count(against)} against${favour ? `; most for it: chunk ${count(best + 1)}, ${signed(why.values[best])}` : ""}.`);
  if (why.scored > evidence.occlusions) words.push(`The contig is long, so chunks were left out in ${count(evidence.occlusions)} blocks, and those of a block share equally.`);
  const numbers = new Map();
  why.classes.forEach((number) => { if (number !== NO_CLASS) numbers.set(number, (numbers.get(number) || 0) + 1); });
  const classes = [...numbers].sort((a, b) => b[1] - a[1]).map(([number, many]) =>
    h("li", {}, classDot(number), foreignWords(PREDICTED[number]), " ", h("b", { text: count(many) })));
  return h("div", { class: "why" }, text(words.join(" ")), h("ul", { class: "legend" }, h("li", { class: "dim", text: "Chunks by class" }), classes));
}

const classTotals = () => {
  const rows = [...data.predicted.totals].sort((a, b) => viralClasses.has(b.class) - viralClasses.has(a.class) || b.contigs - a.contigs);
  return h("div", { class: "narrow" }, plainTable("Contigs by predicted class", [{ name: "Predicted class" }, { name: "Contigs", right: true }, { name: "Bases", right: true }, { name: "of all bases", right: true }],
    rows.map((one) => [[classDot(one.class), foreignWords(PREDICTED[one.class])], count(one.contigs), bases(one.bases), percent(one.bases, totals.bases)])));
};
