// The table of contigs: filtered and sorted over all contigs of the report, of which the first MAX_ROWS are in the document.

const MAX_ROWS = 250;
const FILTER_DELAY = 120; // ms
const NO_FILTER = { text: "", calls: [...CALLS.keys()], tier: "", min: 0, max: Infinity, part: "all" };

const COLUMNS = [
  { key: "place", name: "#", label: "Row in contigs.tsv" },
  { key: "name", name: "Contig" },
  { key: "length", name: "Length", right: true },
  { key: "scored", name: "Scored", right: true, label: "Chunks with a score, of all chunks" },
  { key: "viral", name: "Viral", right: true, label: "Chunks called virus" },
  { key: CALL_COLUMN, name: IS_MEAN ? "Mean p_virus" : "p_virus", right: true },
  { key: "call", name: "Call" },
  hasPredicted && { key: "predicted", name: "Predicted class", label: "Most probable class on the side of the call" },
  hasTiers && { key: "tier", name: "Tier" },
  { key: "regions", name: "Viral regions", right: true, label: "Bases in viral regions" },
].filter(Boolean);
const ASCENDING_FIRST = ["name", "place", "call", "tier", "predicted"];

const view = {
  rows: [], // indices of contigs, filtered and sorted
  sort: CALL_COLUMN, descending: true,
  open: new Map(), // the detail row of each contig that is open
  filter: { ...NO_FILTER },
};

function contigTable() {
  view.head = h("tr", {}, COLUMNS.map((column) => h("th", { scope: "col", class: `c-${column.key} ${column.right ? "right" : ""}`, "data-key": column.key },
    h("button", { type: "button", title: column.label, onclick: () => sortBy(column.key) },
      h("span", { text: column.name }), h("span", { class: "arrow", "aria-hidden": "true" })))));
  view.body = h("tbody", { onkeydown: moveFocus });
  view.scroller = h("div", { class: "scroller", id: "scroller" }, h("table", { class: "contigs" },
    h("caption", { class: "unseen", text: "Contigs. A contig's name opens its track." }),
    h("colgroup", {}, COLUMNS.map((column) => h("col", { class: `c-${column.key}` }))),
    h("thead", {}, view.head), view.body));
  view.status = h("p", { class: "status", role: "status", id: "shown" });
  view.rest = h("p", { class: "rest dim" });
  view.nothing = h("p", { class: "nothing", text: "No contig matches. Widen the filter." });
  return [filterBar(), view.scroller, view.nothing, view.rest];
}

function filterBar() {
  const filter = view.filter;
  let waiting = 0;
  const change = (set) => (event) => {
    set(event.target);
    clearTimeout(waiting);
    waiting = setTimeout(applyFilter, FILTER_DELAY);
  };
  const field = (label, ...content) => h("label", {}, h("span", { text: label }), content);
  const choice = (label, name, options) => field(label, h("select", { name, onchange: change((target) => { filter[name] = target.value; }) },
    options.map(([value, text]) => h("option", { value, text }))));
  const bound = (label, name) => field(label, h("input", { type: "number", min: "0", step: "any", name, class: "short",
    oninput: change((target) => { filter[name] = target.value === "" ? NO_FILTER[name] : Number(target.value); }) }));
  const any = (names) => [["", "any"], ...names.entries()];
  const calls = CALLS.map((name, call) => h("label", { class: "check" },
    h("input", { type: "checkbox", checked: true, name: "call", value: name, onchange: change((target) => {
      filter.calls = filter.calls.filter((one) => one !== call).concat(target.checked ? call : []);
    }) }), callMark(call)));
  const reset = () => { Object.assign(filter, NO_FILTER); applyFilter(); };
  return h("form", { class: "filter", role: "search", "aria-label": "Filter of contigs", onsubmit: (event) => event.preventDefault(), onreset: reset },
    h("label", { class: "wide" }, h("span", { text: "Name" }), h("input", { type: "search", name: "text", autocomplete: "off", spellcheck: "false",
      placeholder: "part of a name", oninput: change((target) => { filter.text = target.value.trim().toLowerCase(); }) })),
    h("fieldset", {}, h("legend", { text: "Call" }), h("div", { class: "checks" }, calls)),
    hasTiers && choice("Tier", "tier", any(TIERS.slice(0, NO_TIER))),
    bound("From bp", "min"), bound("To bp", "max"),
    regions.row.length > 0 && choice("Regions", "part", [["all", "any"], ["some", "with regions"], ["islands", "viral in part"]]),
    h("button", { type: "reset", class: "quiet", text: "Reset" }), view.status);
}

const isIsland = (row) => regionBases[row] > 0 && regionBases[row] < data.island_share * contigs.length[row];

function isShown(row) {
  const filter = view.filter;
  return filter.calls.includes(contigs.call[row])
    && (filter.tier === "" || contigs.tier[row] === Number(filter.tier))
    && contigs.length[row] >= filter.min && contigs.length[row] <= filter.max
    && (filter.part === "all" || (filter.part === "some" ? regionBases[row] > 0 : isIsland(row)))
    && (filter.text === "" || contigs.name[row].toLowerCase().includes(filter.text));
}

function applyFilter() {
  view.rows = [...contigs.name.keys()].filter(isShown);
  sortRows();
}

function sortBy(key) {
  view.descending = view.sort === key ? !view.descending : !ASCENDING_FIRST.includes(key);
  view.sort = key;
  sortRows();
}

const names = new Intl.Collator("en", { numeric: true });
function sortRows() {
  const values = view.sort === "regions" ? regionBases : contigs[view.sort];
  const compare = view.sort === "name" ? names.compare : (x, y) => x - y;
  const sign = view.descending ? -1 : 1;
  view.rows.sort((a, b) => {
    const [x, y] = [values[a], values[b]];
    // Missing values come last, either way.
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return sign * compare(x, y) || a - b;
  });
  [...view.head.children].forEach((cell) => {
    cell.setAttribute("aria-sort", cell.dataset.key !== view.sort ? "none" : view.descending ? "descending" : "ascending");
  });
  view.scroller.scrollTop = 0;
  showRows();
}

function showRows() {
  const matching = view.rows.length, all = contigs.name.length;
  view.body.replaceChildren(...view.rows.slice(0, MAX_ROWS).flatMap((row) => [contigRow(row), ...(view.open.has(row) ? [view.open.get(row)] : [])]));
  view.status.textContent = matching === all ? plural(all, "contig", "contigs") : `${count(matching)} of ${plural(all, "contig", "contigs")}`;
  view.rest.replaceChildren(...(matching > MAX_ROWS ? [`The first ${count(MAX_ROWS)} of ${count(matching)} rows. The filter and the order apply to all of them; `, fileLink("contigs.tsv"), " has every contig."] : []));
  view.nothing.hidden = matching > 0;
  view.scroller.hidden = matching === 0;
}

function contigRow(row) {
  const isOpen = view.open.has(row);
  const name = h("button", { type: "button", class: "open", "aria-expanded": String(isOpen), title: contigs.name[row],
    onclick: () => toggleRow(row, name) }, h("span", { class: "chevron", "aria-hidden": "true" }), foreign(contigs.name[row]));
  const cells = {
    place: () => count(contigs.place[row] + 1),
    name: () => name,
    length: () => count(contigs.length[row]),
    scored: () => [count(contigs.scored[row]), h("span", { class: "dim", text: ` / ${count(contigs.chunks[row])}` })],
    viral: () => count(contigs.viral[row]),
    [CALL_COLUMN]: () => [scoreBar(contigs[CALL_COLUMN][row]), probability(contigs[CALL_COLUMN][row])],
    predicted: () => predictedClass(row) || "–",
    call: () => callMark(contigs.call[row]),
    tier: () => tierMark(contigs.tier[row]) || "–",
    regions: () => regionCell(row),
  };
  return h("tr", { class: isOpen ? "row is-open" : "row" },
    COLUMNS.map((column) => h("td", { class: `c-${column.key} ${column.right ? "right" : ""}` }, cells[column.key]())));
}

const predictedClass = (row) => (contigs.predicted[row] === null ? null : foreignWords(PREDICTED[contigs.predicted[row]]));

const noveltyText = (row) =>
  hasPredicted && contigs.novelty[row] !== null && text(`Novelty ${probability(contigs.novelty[row])}`, { class: "dim" });

function scoreBar(p) {
  if (p === null) return null;
  const bar = h("span", { class: "score", "aria-hidden": "true" }, h("span", { class: p >= CONTIG_THRESHOLD ? "fill-virus" : "fill-other" }));
  bar.firstElementChild.style.left = `${100 * Math.min(p, CONTIG_THRESHOLD)}%`;
  bar.firstElementChild.style.width = `${Math.max(2, 100 * Math.abs(p - CONTIG_THRESHOLD))}%`;
  return bar;
}

function regionCell(row) {
  const number = regionsOf(row).length;
  if (!number) return h("span", { class: "dim", text: "–" });
  return [h("span", { text: bases(regionBases[row]) }), h("span", { class: "dim", text: ` in ${count(number)}` })];
}

function whyNoTrack(row) {
  if (!contigs.scored[row]) return "No chunk of this contig has a score, so there is nothing to draw.";
  if (contigs.chunks[row] < data.tracks.min_chunks) {
    return `A track is drawn for contigs of ${data.tracks.min_chunks} chunks or more; this one has ${contigs.chunks[row]}. Its scores are in predictions.tsv.`;
  }
  return "To keep this file small it holds no scores of this contig; they are in predictions.tsv.";
}

function toggleRow(row, name) {
  const element = name.closest("tr");
  if (view.open.has(row)) {
    view.open.get(row).remove();
    view.open.delete(row);
  } else {
    const detail = h("tr", { class: "detail" }, h("td", { colspan: COLUMNS.length },
      h("div", { class: "detail-box" }, trackFigure(row) || h("p", { class: "dim", text: whyNoTrack(row) }), noveltyText(row))));
    view.open.set(row, detail);
    element.after(detail);
  }
  name.setAttribute("aria-expanded", String(view.open.has(row)));
  element.classList.toggle("is-open", view.open.has(row));
}

// Arrow keys and the like go from name to name.
function moveFocus(event) {
  const buttons = [...view.body.querySelectorAll(".open")];
  const at = buttons.indexOf(event.target.closest(".open"));
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -at, End: buttons.length }[event.key];
  if (at < 0 || step === undefined) return;
  event.preventDefault();
  buttons[Math.min(buttons.length - 1, Math.max(0, at + step))].focus();
}
