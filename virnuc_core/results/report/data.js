// The data of the report, and the few words with which its parts are built.
// Text from the data becomes a text node or an attribute; nothing of it is ever read as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const contigs = data.contigs;
const regions = data.regions;
const CALLS = data.names.calls;
const TIERS = data.names.tiers;
const PREDICTED = data.names.predicted; // of the head
const VIRUS = CALLS.indexOf("virus");
const OTHER = CALLS.indexOf("other");
const UNSCORED = CALLS.indexOf("unscored");
const NO_TIER = TIERS.indexOf("NA");
// From this p_virus on, chunks and contigs are called virus.
const THRESHOLD = data.run.threshold;
// For contigs, there may be a false discovery rate instead; no call may keep it.
const SAMPLE = data.run.sample;
const CONTIG_THRESHOLD = SAMPLE ? SAMPLE.threshold ?? 1 : THRESHOLD;
// What contigs are called from: mean_p, or p_virus of the whole contig.
const CALL_COLUMN = data.call_column;
const IS_MEAN = CALL_COLUMN === "mean_p";
const SCORE_LEVELS = 254;
const NO_SCORE = 255;
const hasPredicted = Boolean(contigs.predicted);
const hasTiers = contigs.tier.some((tier) => tier !== NO_TIER);

const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const count = (number) => integer.format(number);
const percent = (part, whole) => {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return `${share > 0 && share < 10 ? share.toFixed(1) : share.toFixed(0)}\u2009%`;
};
const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;
const probability = (p) => (p === null ? "–" : p.toFixed(3));

// Lengths in the unit that suits them.
const bases = (number) => {
  if (number < 1e4) return `${count(number)} bp`;
  const [unit, size] = number < 1e6 ? ["kb", 1e3] : number < 1e9 ? ["Mb", 1e6] : ["Gb", 1e9];
  return `${(number / size).toPrecision(3)} ${unit}`;
};

const seconds = (number) => {
  if (number < 1) return `${(1000 * number).toFixed(0)} ms`;
  if (number < 120) return `${number.toFixed(1)} s`;
  return number < 7200 ? `${(number / 60).toFixed(1)} min` : `${(number / 3600).toFixed(1)} h`;
};

const rate = (number, what) => `${number < 10 ? number.toFixed(1) : count(number)} ${what}/s`;

const fileSize = (number) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${unit ? number.toPrecision(3) : number} ${units[unit]}`;
};

// An element: properties of its own (on..., class, text) or attributes, then children: nodes, strings, or nothing.
function put(node, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const h = (tag, properties, ...children) => put(document.createElement(tag), properties, children);
const SVG = document.getElementById("svg-space").content.firstElementChild.namespaceURI;
const s = (tag, properties, ...children) => put(document.createElementNS(SVG, tag), properties, children);

// Text of the user: shown as it is, and isolated from the direction of the text around it.
const foreign = (text) => h("bdi", { class: "name", text });
const foreignWords = (text) => h("bdi", { class: "words", text });

// A table of the run, beside this file.
const fileLink = (name) => h("a", { href: name, text: name });

const tierMark = (tier) =>
  tier === NO_TIER ? null : h("span", { class: `tier tier-${TIERS[tier]}`, text: TIERS[tier] });
const callMark = (call) => h("span", { class: `call call-${CALLS[call]}`, text: CALLS[call] });

// The rows of `regions` that each contig has, and the bases in them.
const regionRows = new Map();
const regionBases = new Float64Array(contigs.name.length);
regions.row.forEach((row, i) => {
  if (!regionRows.has(row)) regionRows.set(row, []);
  regionRows.get(row).push(i);
  regionBases[row] += regions.end[i] - regions.start[i] + 1;
});
const regionsOf = (row) => regionRows.get(row) || [];

const UNSURE = TIERS.indexOf("unsure");
const isClear = (row) => regionsOf(row).some((i) => regions.tier[i] !== UNSURE);

// The scores of a contig's chunks as levels 0 to 254, 255 for none; null where the report does not hold them.
const trackBegin = new Map();
data.tracks.rows.reduce((begin, row) => {
  trackBegin.set(row, begin);
  return begin + contigs.chunks[row];
}, 0);
let levels = null;
function levelsOf(row) {
  if (!trackBegin.has(row)) return null;
  if (!levels) levels = Uint8Array.from(atob(data.tracks.levels), (letter) => letter.charCodeAt(0));
  return levels.subarray(trackBegin.get(row), trackBegin.get(row) + contigs.chunks[row]);
}
const levelScore = (level) => Math.min(1, (level + 0.5) / SCORE_LEVELS);
