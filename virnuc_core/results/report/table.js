// The table of contigs: all of them are filtered, sorted and exported; the first MAX_ROWS rows are in the document.

const MAX_ROWS = 250;
const FILTER_DELAY = 120; // ms
const EXPORTED = ["seq_name", "length", "chunks", "scored_chunks", "virus_score", "call", "confidence", "class", "novelty"];
const COLUMNS = [
  { key: "seq_name", name: "Contig", ascending: true },
  { key: "length", name: "Length (bp)", right: true },
  { key: "call", name: "Call", ascending: true },
  { key: "confidence", name: "Confidence", ascending: true },
  { key: "virus_score", name: "Virus score", right: true },
  { key: "class", name: "Class", ascending: true },
  { key: "scored_chunks", name: "Scored chunks", right: true },
  { key: "gc", name: "GC", right: true },
  { key: "novelty", name: "Novelty", right: true },
].filter(({ key }) => !["class", "gc", "novelty"].includes(key) || has(key));

const view = { rows: [], sort: "call", ascending: true };
const cards = new Map(); // by contig

function contigTable() {
  view.head = h("tr", {}, COLUMNS.map((column) => h("th", { scope: "col", class: `c-${column.key} ${column.right ? "right" : ""}` },
    h("button", { type: "button", text: column.name, onclick: () => sortBy(column) }))));
  view.body = h("tbody", {});
  view.scroller = h("div", { class: "scroller", tabindex: "0", role: "region", "aria-labelledby": "contigs-title" },
    h("table", {}, h("thead", {}, view.head), view.body));
  view.rest = h("p", { class: "dim", id: "rest" });
  return [filterForm(), view.scroller, view.rest];
}

function filterForm() {
  let waiting = 0;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(applyFilter, FILTER_DELAY); };
  const field = (label, control) => h("label", {}, dim(label), control);
  const input = (name, properties) => h("input", { name, autocomplete: "off", ...properties });
  const choice = (label, name) => field(label, h("select", { name },
    h("option", { value: "", text: "any" }), names[name].map((text, number) => h("option", { value: number, text }))));
  view.status = h("span", { role: "status", id: "shown" });
  view.export = h("button", { type: "button", id: "export", text: "Download TSV", onclick: exportRows });
  view.form = h("form", { role: "search", oninput: later, onsubmit: (event) => event.preventDefault(), onreset: later },
    field("Name", input("text", { type: "search", placeholder: "part of a name", spellcheck: "false" })),
    choice("Call", "call"), choice("Confidence", "confidence"), has("class") && choice("Class", "class"),
    field("Min. length", input("min", { type: "number", min: "0" })), field("Min. score", input("score", { type: "number", min: "0", max: "1", step: "any" })),
    h("button", { type: "reset", text: "Reset" }), view.export, view.status);
  return view.form;
}

function applyFilter() {
  const wanted = Object.fromEntries(new FormData(view.form));
  const text = wanted.text.trim().toLowerCase();
  const equal = ["call", "confidence", "class"].filter((name) => wanted[name]);
  view.rows = [...contigs.seq_name.keys()].filter((row) =>
    equal.every((name) => contigs[name][row] === Number(wanted[name]))
    && contigs.length[row] >= Number(wanted.min) && (contigs.virus_score[row] ?? 0) >= Number(wanted.score)
    && contigs.seq_name[row].toLowerCase().includes(text));
  sortRows();
}

function sortBy({ key, ascending = false }) {
  view.ascending = view.sort === key ? !view.ascending : ascending;
  view.sort = key;
  sortRows();
}

const alphabetical = new Intl.Collator("en", { numeric: true });
function sortRows() {
  const values = contigs[view.sort], sign = view.ascending ? 1 : -1;
  const compare = view.sort === "seq_name" ? alphabetical.compare : (x, y) => x - y;
  view.rows.sort((a, b) => {
    const [x, y] = [values[a], values[b]];
    // Missing values come last, either way; equal ones are in the order of the scores.
    const order = x === null || y === null ? (x === null) - (y === null) : sign * compare(x, y);
    return order || contigs.virus_score[b] - contigs.virus_score[a] || a - b;
  });
  [...view.head.children].forEach((cell, i) =>
    cell.setAttribute("aria-sort", COLUMNS[i].key !== view.sort ? "none" : view.ascending ? "ascending" : "descending"));
  view.scroller.scrollTop = 0;
  showRows();
}

function showRows() {
  const matching = view.rows.length;
  view.body.replaceChildren(...view.rows.slice(0, MAX_ROWS).map(contigRow));
  if (!matching) view.body.append(h("tr", {}, h("td", { colspan: COLUMNS.length, text: "No contig matches the filter." })));
  view.status.textContent = matching === numContigs ? plural(matching, "contig") : `${count(matching)} of ${plural(numContigs, "contig")}`;
  view.export.disabled = !matching;
  const cut = matching > MAX_ROWS && `Showing ${count(MAX_ROWS)} of ${count(matching)} rows; sorting, filters and the download apply to all. `;
  const missing = numContigs < data.total && `The report lists ${count(numContigs)} of ${plural(data.total, "contig")}, the most likely viral ones; contigs.tsv lists all.`;
  view.rest.replaceChildren(...[cut, missing].filter(Boolean));
}

function contigRow(row) {
  const value = (key) => contigs[key][row];
  const name = h("bdi", { class: "name", text: value("seq_name"), title: value("seq_name") });
  const named = (key) => (value(key) === null ? "–" : names[key][value(key)]);
  const cells = {
    seq_name: () => (cards.has(row) ? h("a", { href: `#${cards.get(row).id}`, onclick: () => { cards.get(row).open = true; } }, name) : name),
    length: () => count(value("length")),
    call: () => h("span", { class: `call-${named("call")}`, text: named("call") }),
    confidence: () => h("span", { class: `confidence-${named("confidence")}`, text: named("confidence") }),
    virus_score: () => [value("virus_score") !== null && h("meter", { value: value("virus_score"), "aria-hidden": "true" }), score(value("virus_score"))],
    class: () => (value("class") === null ? "–" : [dot(named("class")), h("bdi", { text: named("class") })]),
    scored_chunks: () => `${count(value("scored_chunks"))} / ${count(value("chunks"))}`,
    gc: () => (value("gc") === null ? "–" : `${value("gc").toFixed(1)}%`),
    novelty: () => score(value("novelty")),
  };
  return h("tr", {}, COLUMNS.map(({ key, right }) => h("td", { class: `c-${key} ${right ? "right" : ""}` }, cells[key]())));
}

// Downloads the filtered rows as they are in contigs.tsv, in the order shown.
function exportRows() {
  const cell = (key, row) => {
    const value = contigs[key][row];
    if (value === null) return "NA";
    if (names[key]) return names[key][value];
    return key === "virus_score" || key === "novelty" ? value.toFixed(6) : value;
  };
  const lines = view.rows.map((row) => EXPORTED.map((key) => cell(key, row)).join("\t"));
  const url = URL.createObjectURL(new Blob([[EXPORTED.join("\t"), ...lines, ""].join("\n")], { type: "text/tab-separated-values" }));
  h("a", { href: url, download: "contigs_filtered.tsv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
