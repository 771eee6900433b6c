// The sections of the report, from the header to how it was computed.

const FAMILIES = { esm2: "ESM-2", dnabert_s: "DNABERT-S" };
const run = data.run, counts = run.counts, totals = data.totals;
const MAX_CARDS = 12;
const FILES = ["contigs.tsv", "predictions.tsv", "regions.tsv", "viral_contigs.fa.gz", "rejected.tsv", "run.json"];
const isOnCalibration = (note) => /calibrat/i.test(note);

const sections = [];
function section(id, title, ...content) {
  const node = h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title`, text: title }), content);
  sections.push({ id, title });
  document.getElementById("main").append(node);
  return node;
}
const text = (words, properties) => h("p", { ...properties, text: words });
const tile = (number, words, kind) => h("div", { class: `tile ${kind || ""}` }, h("b", { text: number }), h("span", { text: words }));

function header() {
  const files = run.inputs.map((file) => file.name);
  const more = run.num_inputs - files.length;
  const named = files.slice(0, 3);
  const left = files.length - named.length + more;
  const folder = run.out.replace(/\/+$/, "").split("/").pop();
  const kicker = document.getElementById("kicker");
  kicker.append(foreign(folder || "run"));
  if (run.finished) kicker.append(" · ", h("time", { datetime: run.finished, text: new Date(run.finished).toLocaleString("en-GB", { dateStyle: "long", timeStyle: "short" }) }));
  const fact = (name, ...value) => h("div", {}, h("dt", { text: name }), h("dd", {}, value));
  const precisions = [...new Set(run.models.map((model) => model.precision))].join(", ");
  const links = Object.entries(run.links).filter(([, target]) => isWebAddress(target));
  put(document.getElementById("facts"), {}, [
    fact("Input", named.map((name, i) => [i ? ", " : "", foreign(name)]).flat(), left > 0 ? ` and ${count(left)} more` : ""),
    fact("Models", run.models.map((model) => `${FAMILIES[model.family] || model.family} ${model.name}`).join(" + ")),
    fact("Head", foreign(run.head.name)),
    fact("Chunks", run.chunk_steps.map(([size, below]) => `${count(size)} bp${below ? ` below ${count(below)} bp` : ""}`).join(", ")),
    fact("Frames", run.frames_in_words),
    fact("Precision", precisions),
    fact("virnuc", run.versions.virnuc || "–"),
    links.length ? fact("Also in", links.map(([name, target], i) => [i ? ", " : "", h("a", { href: target, rel: "noreferrer noopener", text: linkName(name) })]).flat()) : null,
  ]);
}

function isWebAddress(target) {
  try { return ["http:", "https:"].includes(new URL(target).protocol); } catch { return false; }
}
const linkName = (name) => (name.startsWith("mlflow") ? "MLflow" : name.startsWith("prefect") ? "Prefect" : name);

// Colours of the predicted classes, those of viruses and the others.
const viralClasses = new Set(data.predicted.filter((one) => one.is_virus).map((one) => one.class));
const classKind = (number) => {
  const alike = [...PREDICTED.keys()].filter((one) => viralClasses.has(one) === viralClasses.has(number));
  return `class-${viralClasses.has(number) ? "virus" : "other"}-${alike.indexOf(number) % 6}`;
};
const classDot = (number) => h("span", { class: `dot ${classKind(number)}`, "aria-hidden": "true" });
const classTotals = () => {
  const rows = [...data.predicted].sort((a, b) => b.is_virus - a.is_virus || b.contigs - a.contigs);
  return h("div", { class: "narrow" }, plainTable("Contigs by predicted class", [{ name: "Predicted class" }, { name: "Contigs", right: true }, { name: "Bases", right: true }, { name: "of all bases", right: true }],
    rows.map((one) => [[classDot(one.class), foreignWords(PREDICTED[one.class])], count(one.contigs), bases(one.bases), percent(one.bases, totals.bases)])));
};

const remark = (kind, name, words) => h("p", { class: kind }, h("b", { text: `${name}:` }), " ", words);

function found() {
  const open = counts.scored_chunks;
  const part = (name, value, kind) => ({ name, value, kind });
  const remarks = [...run.warnings.map((words) => ["warning", "Warning", words]), ...run.notes.filter((note) => !isOnCalibration(note)).map((words) => ["note", "Note", words])];
  section("found", "What was found",
    h("div", { class: "tiles" },
      tile(count(counts.contigs_virus), "contigs called viral", "virus"),
      tile(count(totals.regions), totals.regions === 1 ? "viral region" : "viral regions"),
      tile(bases(totals.region_bases), `in regions, of ${bases(totals.bases)}`),
      tile(count(totals.island_contigs), "contigs viral only in part"),
      tile(percent(counts.chunks - open, counts.chunks), "of chunks without a score")),
    data.sample ? text(data.sample, { id: "sample" }) : null,
    h("div", { class: "pair" },
      stackedBar("Contigs", [part("virus", counts.contigs_virus, "virus"), part("other", counts.contigs_other, "other"),
        part("no score", counts.contigs_unscored, "unscored")], `${count(counts.records)} in all`),
      stackedBar("Chunks", [part("virus", counts.viral_chunks, "virus"), part("other", open - counts.viral_chunks, "other"),
        part("no score", counts.chunks - open, "unscored")], `${count(counts.chunks)} in all`)),
    data.predicted.length ? [h("h3", { text: "Contigs by predicted class" }), classTotals()] : null,
    remarks.map((one) => remark(...one)));
}

function confidence() {
  const tiers = totals.tiers;
  const known = TIERS.slice(0, NO_TIER).filter((tier) => tiers[tier]);
  section("confidence", "Confidence",
    h("div", { class: "pair" },
      histogram("Chunks with a score", data.chunk_histogram, "chunks"),
      histogram(IS_MEAN ? "Contigs, by the mean over their chunks" : "Contigs, by p_virus", totals.histogram, "contigs", CONTIG_THRESHOLD)),
    known.length ? stackedBar("Contigs called viral, by tier", TIERS.slice(0, NO_TIER).map((tier) =>
      ({ name: tier, value: tiers[tier] || 0, kind: `tier-${tier}` })), IS_MEAN ? "from the number of scored chunks and their agreement" : "from p_virus and the number of scored chunks") : null,
    text("p_virus is the score of the classifier, from 0 (other) to 1 (virus). A chunk is called viral from " + THRESHOLD + " on, a contig when "
      + (IS_MEAN ? "the mean over its scored chunks is" : "its own p_virus, for which the classifier reads its chunks in their order, is")
      + (CONTIG_THRESHOLD === THRESHOLD ? "" : ` at least ${probability(CONTIG_THRESHOLD)}`) + ". Peaks at both ends mean confident scores, a peak around 0.5 uninformative ones. A score is not the probability that a chunk "
      + "is viral: how close it comes depends on the calibration of the head and on how common viruses are in the sample. The rarer they are, the more "
      + "of the calls are false positives."),
    run.notes.filter(isOnCalibration).map((words) => remark("note", "Calibration", words)));
}

function regionCards() {
  if (!totals.regions) return;
  // Contigs with a clear region first, of these the ones that are viral in part, and then those whose regions are longest.
  const rows = [...contigs.name.keys()].filter((row) => regionBases[row] > 0);
  rows.sort((a, b) => isClear(b) - isClear(a) || isIsland(b) - isIsland(a) || regionBases[b] - regionBases[a] || a - b);
  const shown = rows.slice(0, MAX_CARDS);
  const host = h("div", { class: "cards" }, shown.map((row) => contigCard(row)));
  const inPart = totals.island_contigs
    ? `${count(totals.island_contigs)} of them ${totals.island_contigs === 1 ? "is" : "are"} viral only in part, as a bacterial contig with a prophage is.`
    : "None of them is viral only in part, as a bacterial contig with a prophage would be.";
  const drawn = shown.length < rows.length ? ` The first ${shown.length} are drawn here; the table has the others.` : "";
  section("regions", "Viral regions",
    text(`${plural(totals.regions, "region", "regions")} in ${plural(rows.length, "contig", "contigs")}. ${inPart}${drawn}`),
    shown.length ? [trackKey(), host] : null);
}

function trackKey() {
  const entry = (kind, words) => h("li", {}, h("span", { class: `dot ${kind}`, "aria-hidden": "true" }), words);
  return h("ul", { class: "legend key" }, entry("fill-virus", "chunk scored as virus"), entry("fill-other", "as other"),
    entry("line-mean", `mean over ${SMOOTHED_CHUNKS} chunks`), entry("fill-shade", "viral region"), entry("fill-unscored", "no score"),
    h("li", { class: "dim", text: "Drag to zoom, double-click for the whole contig." }));
}

// A card of one contig; its track is drawn when it becomes visible.
function contigCard(row) {
  const card = h("article", { class: "card" },
    h("h3", {}, foreign(contigs.name[row])),
    h("p", { class: "dim" }, `${bases(contigs.length[row])} · ${count(contigs.scored[row])} of ${plural(contigs.chunks[row], "chunk", "chunks")} scored · ${IS_MEAN ? "mean " : ""}p_virus ${probability(contigs[CALL_COLUMN][row])} · `,
      callMark(contigs.call[row]), hasPredicted && predictedClass(row) ? [" · ", predictedClass(row)] : null,
      regionBases[row] ? ` · ${percent(regionBases[row], contigs.length[row])} in regions` : null,
      hasPredicted && contigs.novelty[row] !== null ? ` · novelty ${probability(contigs.novelty[row])}` : null));
  const place = h("div", { class: "track-place" });
  card.append(place);
  whenSeen(place, () => place.replaceChildren(trackFigure(row) || text(whyNoTrack(row), { class: "dim" })));
  return card;
}

function whenSeen(node, action) {
  let isDone = false;
  const once = () => {
    if (isDone) return;
    isDone = true;
    watcher.disconnect();
    action();
  };
  const watcher = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) once(); }, { rootMargin: "300px" });
  watcher.observe(node);
  window.addEventListener("beforeprint", once);
}

function contigSection() {
  const all = totals.contigs, shown = contigs.name.length;
  const cut = shown < all ? h("p", { class: "note" }, h("b", { text: "Not all" }), ` The table holds ${count(shown)} of ${count(all)} contigs: viral ones first, then those with the most viral chunks, then the longest. `, fileLink("contigs.tsv"), " has all of them.") : null;
  const tracks = data.tracks.rows.length;
  const node = section("contigs", "Contigs", cut,
    text(`Open a contig to see its scores along the sequence; ${plural(tracks, "contig has", "contigs have")} ${data.tracks.min_chunks} chunks or more and a track. A click on a heading sorts.`), ...contigTable());
  applyFilter();
  return node;
}

// Why a chunk has no score, by what is embedded of chunks.
const WHY_UNSCORED = {
  open: ["stop-free reading frame: each of the six frames has a stop codon, so there is no protein, and no score",
    " The longer a chunk, the more likely is a stop codon in every frame; shorter chunks leave fewer without a score, a head for the longest stop-free stretches nearly none."],
  longest: ["stop-free stretch of 10 codons or more in any of the six frames, as in gaps of N, and so no score", ""],
};

function unscored() {
  const none = counts.chunks - counts.scored_chunks, rejected = data.rejected;
  const left = rejected.total - rejected.first.length;
  const [why, advice] = WHY_UNSCORED[run.frames];
  section("unscored", "Without a score",
    text(`${count(none)} of ${plural(counts.chunks, "chunk", "chunks")} (${percent(none, counts.chunks)}) ${none === 1 ? "has" : "have"} no ${why}. `
      + `A contig is called from its scored chunks alone, so trust the call less where these are few.${advice}`),
    counts.contigs_unscored ? text(`${plural(counts.contigs_unscored, "contig has", "contigs have")} no scored chunk at all.`) : null,
    h("h3", { text: "Rejected records" }),
    rejected.total === 0 ? text("None: every record of the input was used.") : [
      text(`${plural(rejected.total, "record was", "records were")} not used.`),
      plainTable("Reasons", [{ name: "Reason" }, { name: "Records", right: true }], Object.entries(rejected.reasons).map(([reason, number]) => [foreignWords(reason), count(number)])),
      h("details", {}, h("summary", { text: "Which" }),
        plainTable("Rejected records", [{ name: "Record", right: true }, { name: "Name" }, { name: "File" }, { name: "Length", right: true }, { name: "Reason" }],
          rejected.first.map((cells) => cells.map((cell, i) => (i === 0 || i === 3 ? cell : foreign(cell))))),
        left > 0 ? text(`and ${count(left)} more in rejected.tsv.`, { class: "dim" }) : null)]);
}

function computation() {
  const right = (name) => ({ name, right: true });
  const models = run.models.map((model) => {
    const work = run.work.models.find((one) => one.family === model.family) || {};
    return [`${FAMILIES[model.family] || model.family} ${model.name}`, `${model.repr_layer} of ${model.spec.num_layers}`, count(model.spec.embedding_dim), model.precision, `${model.engine}, ${model.attention}`,
      h("code", { text: model.weights_fingerprint.slice(0, 12), title: model.weights_fingerprint }),
      count(work.sequences || 0), count(work.tokens || 0), packing(work)];
  });
  const kept = run.shards.total - run.shards.computed;
  const speed = run.throughput;
  const speeds = run.shards.computed
    ? `${count(run.shards.computed)} of ${plural(run.shards.total, "shard was", "shards were")} computed in ${plural(run.num_lanes, "lane", "lanes")}${kept ? `, ${count(kept)} reused` : ""}: ${rate(speed.sequences_per_second || 0, "sequences")}, ${rate(speed.residues_per_second || 0, "residues")}, model loading not counted.`
    : "All shards were reused from an earlier attempt; nothing was computed.";
  section("computed", "How it was computed",
    plainTable("Models", [{ name: "Model" }, right("Layer"), right("Width"), { name: "Precision" }, { name: "Engine, attention" }, { name: "Weights" }, right("Sequences"), right("Tokens"), right("Packing efficiency")], models),
    text(`${count(run.work.frames)} ${run.frames_in_words}, ${count(run.work.residues)} residues. Packing efficiency is tokens over the capacity of the batches; equal sequences are embedded once.`, { class: "dim" }),
    h("h3", { text: "Throughput" }), text(speeds),
    run.lanes.length ? laneTable() : null,
    h("h3", { text: "Time" }), stageTimes(),
    h("div", { class: "pair" }, h("div", {}, h("h3", { text: "Input" }), inputTable()), h("div", {}, h("h3", { text: "Versions" }), versions())));
}

function packing(work) {
  const share = work.capacity ? work.tokens / work.capacity : 1;
  const bar = h("span", { class: "meter", "aria-hidden": "true" }, h("span", {}));
  bar.firstElementChild.style.width = `${100 * share}%`;
  return [bar, percent(share, 1)];
}

function laneTable() {
  const right = (name) => ({ name, right: true });
  const left = run.num_lanes - run.lanes.length;
  return [plainTable("Lanes", [right("Lane"), { name: "Host" }, { name: "Hardware" }, right("Shards"), right("Sequences"), right("Sequences/s"), right("Residues/s"), right("Loading"), right("Total")],
    run.lanes.map((lane) => [String(lane.lane), foreignWords(lane.host), foreignWords(`${lane.device_name || "–"} (${lane.device})`), count(lane.shards), count(lane.sequences),
      count(lane.sequences_per_second), count(lane.residues_per_second), seconds(lane.load_seconds), seconds(lane.seconds)])),
  left > 0 ? text(`and ${count(left)} more in run.json.`, { class: "dim" }) : null];
}

function stageTimes() {
  const stages = Object.entries(run.stage_seconds);
  const whole = stages.reduce((sum, [, spent]) => sum + spent, 0);
  const longest = Math.max(1e-9, ...stages.map(([, spent]) => spent));
  return h("div", { class: "stages" }, stages.map(([name, spent]) => {
    const bar = h("span", { class: "fill-ink", "aria-hidden": "true" });
    bar.style.width = `${(100 * spent) / longest}%`;
    return h("div", {}, h("span", { text: name }), h("span", { class: "stage-bar" }, bar), h("span", { class: "right", text: seconds(spent) }), h("span", { class: "right dim", text: percent(spent, whole) }));
  }));
}

function inputTable() {
  const left = run.num_inputs - run.inputs.length;
  return [plainTable("Input files", [{ name: "File" }, { name: "Size", right: true }, { name: "SHA-256" }],
    run.inputs.map((file) => [foreign(file.name), fileSize(file.size), h("code", { text: file.sha256.slice(0, 12), title: file.sha256 })])),
  left > 0 ? text(`and ${count(left)} more in run.json.`, { class: "dim" }) : null];
}

function versions() {
  return h("dl", { class: "versions" }, Object.entries(run.versions).map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value }))));
}

function navigation() {
  document.getElementById("nav").append(...sections.map(({ id, title }) => h("a", { href: `#${id}`, text: title })));
  put(document.getElementById("footer"), {}, [
    text(`Folder ${run.out}`), text(`Plan ${run.plan_fingerprint.slice(0, 16)}`),
    h("p", {}, "Files beside this one: ", FILES.map((name, i) => [i ? ", " : "", fileLink(name)]))]);
}

// The theme of the system, until the button is used.
function themeButton() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Switch to the light theme" : "Switch to the dark theme");
  };
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  dark.addEventListener("change", name);
  name();
}

themeButton();
header();
found();
confidence();
regionCards();
contigSection();
unscored();
computation();
navigation();
document.documentElement.dataset.ready = "yes";
