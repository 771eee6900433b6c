// The table of contigs: only the rows in sight are in the document, however many there are.

const ROW_HEIGHT = 36;
const DETAIL_HEIGHT = 252;
const MARGIN_ROWS = 8;
const PRINTED_ROWS = 200;
const FILTER_PAUSE = 120;

const COLUMNS = [
  { key: "place", name: "#", kind: "number", label: "Row in contigs.tsv" },
  { key: "name", name: "Contig", kind: "text" },
  hasClasses && { key: "class", name: "Class", kind: "number" },
  { key: "length", name: "Length", kind: "number", right: true },
  { key: "scored", name: "Scored", kind: "number", right: true, label: "Chunks with a score, of all chunks" },
  hasDnaAlone && { key: "dna_alone", name: "By DNA", kind: "number", right: true, label: "Chunks without an open frame, scored by their DNA alone" },
  { key: "viral", name: "Viral", kind: "number", right: true, label: "Chunks called virus" },
  { key: "mean_p", name: "Mean p_virus", kind: "number", right: true },
  { key: "call", name: "Call", kind: "number" },
  hasTiers && { key: "tier", name: "Tier", kind: "number" },
  { key: "regions", name: "Viral regions", kind: "number", right: true, label: "Bases in called regions" },
].filter(Boolean);

// What a column is sorted by, NaN for what is not known.
const sortKeys = new Map();
function sortKey(key) {
  if (!sortKeys.has(key)) {
    if (key === "name") {
      const order = new Intl.Collator("en", { numeric: true }).compare;
      const rank = new Float64Array(contigs.name.length);
      [...contigs.name.keys()].sort((a, b) => order(contigs.name[a], contigs.name[b])).forEach((row, i) => { rank[row] = i; });
      sortKeys.set(key, rank);
    } else {
      const values = key === "regions" ? regionBases : contigs[key];
      sortKeys.set(key, Float64Array.from(values, (value) => (value === null ? NaN : value)));
    }
  }
  return sortKeys.get(key);
}

const view = {
  rows: Uint32Array.from(contigs.name.keys()), // rows of the data, filtered and sorted
  sort: "mean_p", descending: true,
  open: new Set(), // rows of the data whose track is shown
  filter: { text: "", calls: new Set(CALLS.keys()), tier: "", class: "", min: 0, max: Infinity, part: "all" },
  built: new Map(), // elements of rows that are in the document
  details: new Map(), // elements of open rows, with what a person did in them
  isPrinted: false,
};

function contigTable() {
  const header = h("tr", {}, COLUMNS.map((column) => h("th", { scope: "col", class: `c-${column.key} ${column.right ? "right" : ""}`, "data-key": column.key },
    h("button", { type: "button", title: column.label, onclick: () => sortBy(column.key) },
      h("span", { text: column.name }), h("span", { class: "arrow", "aria-hidden": "true" })))));
  view.before = h("tr", { class: "space", "aria-hidden": "true" }, h("td", { colspan: COLUMNS.length }));
  view.after = h("tr", { class: "space", "aria-hidden": "true" }, h("td", { colspan: COLUMNS.length }));
  view.body = h("tbody", { onkeydown: moveFocus }, view.before, view.after);
  view.table = h("table", { class: "contigs" },
    h("caption", { class: "unseen", text: "Contigs. A contig's name opens its track." }),
    h("colgroup", {}, COLUMNS.map((column) => h("col", { class: `c-${column.key}` }))),
    h("thead", {}, header), view.body);
  view.scroller = h("div", { class: "scroller", id: "scroller", onscroll: () => requestAnimationFrame(fillTable) }, view.table);
  view.status = h("p", { class: "status", role: "status", id: "shown" });
  view.printed = h("p", { class: "printed dim" });
  view.nothing = h("p", { class: "nothing", text: "No contig is like that. Widen the filter.", hidden: true });
  window.addEventListener("beforeprint", () => printTable(true));
  window.addEventListener("afterprint", () => printTable(false));
  new ResizeObserver(() => fillTable()).observe(view.scroller);
  return [filterBar(), view.scroller, view.nothing, view.printed];
}

function filterBar() {
  let waiting = 0;
  const change = (set) => (event) => {
    set(event.target);
    clearTimeout(waiting);
    waiting = setTimeout(applyFilter, FILTER_PAUSE);
  };
  const filter = view.filter;
  const number = (target, otherwise) => (target.value === "" ? otherwise : Number(target.value));
  const calls = CALLS.map((name, call) => h("label", { class: "check" },
    h("input", { type: "checkbox", checked: true, name: "call", value: name,
      onchange: change((target) => { filter.calls[target.checked ? "add" : "delete"](call); }) }), callMark(call)));
  const choice = (label, name, names, set) => h("label", {}, h("span", { text: label }),
    h("select", { name, onchange: change(set) }, h("option", { value: "", text: "any" }),
      names.map((option, i) => h("option", { value: i, text: option }))));
  const bar = h("form", { class: "filter", role: "search", "aria-label": "Filter of contigs", onsubmit: (event) => event.preventDefault(),
    onreset: () => {
      Object.assign(filter, { text: "", calls: new Set(CALLS.keys()), tier: "", class: "", min: 0, max: Infinity, part: "all" });
      applyFilter();
    } },
    h("label", { class: "wide" }, h("span", { text: "Name" }), h("input", { type: "search", name: "text", autocomplete: "off", spellcheck: "false",
      placeholder: hasClasses ? "part of a name or class" : "part of a name", oninput: change((target) => { filter.text = target.value.trim().toLowerCase(); }) })),
    h("fieldset", {}, h("legend", { text: "Call" }), h("div", { class: "checks" }, calls)),
    hasTiers && choice("Tier", "tier", TIERS.slice(0, NO_TIER), (target) => { filter.tier = target.value; }),
    hasClasses && choice("Class", "class", CLASSES, (target) => { filter.class = target.value; }),
    h("label", {}, h("span", { text: "From bp" }), h("input", { type: "number", min: "0", step: "any", name: "min", class: "short", oninput: change((target) => { filter.min = number(target, 0); }) })),
    h("label", {}, h("span", { text: "To bp" }), h("input", { type: "number", min: "0", step: "any", name: "max", class: "short", oninput: change((target) => { filter.max = number(target, Infinity); }) })),
    regions.row.length ? h("label", {}, h("span", { text: "Regions" }), h("select", { name: "part", onchange: change((target) => { filter.part = target.value; }) },
      h("option", { value: "all", text: "any" }), h("option", { value: "some", text: "with regions" }), h("option", { value: "islands", text: "viral in part" }))) : null,
    h("button", { type: "reset", class: "quiet", text: "Reset" }), view.status);
  return bar;
}

const isIsland = (row) => regionBases[row] > 0 && regionBases[row] < data.island_share * contigs.length[row];

function isShown(row) {
  const filter = view.filter;
  return filter.calls.has(contigs.call[row])
    && (filter.tier === "" || contigs.tier[row] === Number(filter.tier))
    && (filter.class === "" || contigs.class[row] === Number(filter.class))
    && contigs.length[row] >= filter.min && contigs.length[row] <= filter.max
    && (filter.part === "all" || (filter.part === "some" ? regionBases[row] > 0 : isIsland(row)))
    && (filter.text === "" || contigs.name[row].toLowerCase().includes(filter.text)
      || (hasClasses && CLASSES[contigs.class[row]].toLowerCase().includes(filter.text)));
}

function applyFilter() {
  view.rows = Uint32Array.from(contigs.name.keys()).filter(isShown);
  sortRows();
}

function sortBy(key) {
  // Numbers begin with the largest, names and what is counted from the top with the smallest.
  view.descending = view.sort === key ? !view.descending : !["name", "place", "call", "tier", "class"].includes(key);
  view.sort = key;
  sortRows();
}

function sortRows() {
  const key = sortKey(view.sort), sign = view.descending ? -1 : 1;
  view.rows.sort((a, b) => {
    const [x, y] = [key[a], key[b]];
    if (x === y || (x !== x && y !== y)) return a - b;
    if (x !== x) return 1; // what is not known comes last, either way
    if (y !== y) return -1;
    return sign * (x - y);
  });
  view.table.querySelectorAll("th").forEach((cell) => {
    const isSorted = cell.dataset.key === view.sort;
    cell.setAttribute("aria-sort", isSorted ? (view.descending ? "descending" : "ascending") : "none");
  });
  view.scroller.scrollTop = 0;
  showRows();
}

function showRows() {
  view.built.forEach((elements) => elements.forEach((element) => element.remove()));
  view.built.clear();
  view.openAt = [];
  view.rows.forEach((row, i) => { if (view.open.has(row)) view.openAt.push(i); });
  const shown = view.rows.length, all = contigs.name.length;
  view.status.textContent = shown === all ? plural(all, "contig", "contigs") : `${count(shown)} of ${plural(all, "contig", "contigs")}`;
  view.table.setAttribute("aria-rowcount", shown + 1);
  view.nothing.hidden = shown > 0;
  view.scroller.hidden = shown === 0;
  fillTable();
}

// Pixels above the row at a position, open ones before it included.
function offsetOf(position) {
  let opened = 0;
  while (opened < view.openAt.length && view.openAt[opened] < position) opened += 1;
  return position * ROW_HEIGHT + opened * DETAIL_HEIGHT;
}

function positionAt(offset) {
  let low = 0, high = view.rows.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (offsetOf(middle) <= offset) low = middle; else high = middle - 1;
  }
  return low;
}

// Brings the document up to what is in sight; rows that stay are not touched, so they keep the focus.
function fillTable() {
  const number = view.rows.length;
  let first = Math.max(0, positionAt(view.scroller.scrollTop) - MARGIN_ROWS);
  let last = Math.min(number, positionAt(view.scroller.scrollTop + view.scroller.clientHeight) + MARGIN_ROWS + 1);
  if (view.isPrinted) [first, last] = [0, Math.min(number, PRINTED_ROWS)];
  view.built.forEach((elements, position) => {
    if (position >= first && position < last) return;
    elements.forEach((element) => element.remove());
    view.built.delete(position);
  });
  let anchor = view.before;
  for (let position = first; position < last; position += 1) {
    if (!view.built.has(position)) view.built.set(position, buildRow(position));
    view.built.get(position).forEach((element) => {
      if (anchor.nextSibling !== element) anchor.after(element);
      anchor = element;
    });
  }
  const total = offsetOf(number);
  setSpace(view.before, offsetOf(first));
  setSpace(view.after, view.isPrinted ? 0 : total - offsetOf(last));
}

function setSpace(row, pixels) {
  row.hidden = pixels <= 0;
  row.firstElementChild.style.height = `${pixels}px`;
}

function buildRow(position) {
  const row = view.rows[position], isOpen = view.open.has(row);
  const name = h("button", { type: "button", class: "open", "aria-expanded": String(isOpen), "data-row": row, title: contigs.name[row],
    onclick: () => toggleRow(position) }, h("span", { class: "chevron", "aria-hidden": "true" }), foreign(contigs.name[row]));
  const cells = {
    place: () => count(contigs.place[row] + 1),
    name: () => name,
    class: () => foreignWords(CLASSES[contigs.class[row]]),
    length: () => count(contigs.length[row]),
    scored: () => [count(contigs.scored[row]), h("span", { class: "dim", text: ` / ${count(contigs.chunks[row])}` })],
    dna_alone: () => count(contigs.dna_alone[row]),
    viral: () => count(contigs.viral[row]),
    mean_p: () => [scoreBar(contigs.mean_p[row]), probability(contigs.mean_p[row])],
    call: () => callMark(contigs.call[row]),
    tier: () => tierMark(contigs.tier[row]) || "–",
    regions: () => regionCell(row),
  };
  const elements = [h("tr", { class: isOpen ? "row is-open" : "row", "aria-rowindex": position + 2 },
    COLUMNS.map((column) => h("td", { class: `c-${column.key} ${column.right ? "right" : ""}` }, cells[column.key]())))];
  if (isOpen) {
    if (!view.details.has(row)) view.details.set(row, detailRow(row));
    elements.push(view.details.get(row));
  }
  return elements;
}

function scoreBar(p) {
  if (p === null) return null;
  const bar = h("span", { class: "score", "aria-hidden": "true" }, h("span", { class: p >= THRESHOLD ? "fill-virus" : "fill-other" }));
  const [from, to] = [Math.min(p, THRESHOLD), Math.max(p, THRESHOLD)];
  bar.firstElementChild.style.left = `${100 * from}%`;
  bar.firstElementChild.style.width = `${Math.max(2, 100 * (to - from))}%`;
  return bar;
}

function regionCell(row) {
  const number = regionStart[row + 1] - regionStart[row];
  if (!number) return h("span", { class: "dim", text: "–" });
  return [h("span", { text: bases(regionBases[row]) }), h("span", { class: "dim", text: ` in ${count(number)}` })];
}

function detailRow(row) {
  return h("tr", { class: "detail" }, h("td", { colspan: COLUMNS.length },
    h("div", { class: "detail-box" }, trackFigure(row) || h("p", { class: "dim", text: whyNoTrack(row) }))));
}

function whyNoTrack(row) {
  if (!contigs.scored[row]) return "No chunk of this contig has a score, so there is nothing to draw.";
  if (contigs.chunks[row] < data.tracks.min_chunks) {
    return `A track is drawn for contigs of ${data.tracks.min_chunks} chunks or more; this one has ${contigs.chunks[row]}. Its scores are in predictions.tsv.`;
  }
  return "To keep this file small it holds no scores of this contig; they are in predictions.tsv.";
}

function toggleRow(position) {
  const row = view.rows[position];
  if (!view.open.delete(row)) view.open.add(row);
  else view.details.delete(row);
  view.built.get(position).forEach((element) => element.remove());
  view.built.delete(position);
  view.openAt = [];
  view.rows.forEach((shown, i) => { if (view.open.has(shown)) view.openAt.push(i); });
  fillTable();
  focusRow(position);
}

function focusRow(position) {
  const elements = view.built.get(position);
  if (elements) elements[0].querySelector(".open").focus({ preventScroll: true });
}

function moveFocus(event) {
  const button = event.target.closest(".open");
  if (!button) return;
  const at = view.rows.indexOf(Number(button.dataset.row));
  const page = Math.floor(view.scroller.clientHeight / ROW_HEIGHT) - 2;
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -at, End: view.rows.length };
  if (!(event.key in steps)) return;
  event.preventDefault();
  const position = Math.min(view.rows.length - 1, Math.max(0, at + steps[event.key]));
  const head = view.table.tHead.offsetHeight, top = offsetOf(position), { scrollTop, clientHeight } = view.scroller;
  if (top < scrollTop) view.scroller.scrollTop = top;
  else if (top + ROW_HEIGHT + head > scrollTop + clientHeight) view.scroller.scrollTop = top + ROW_HEIGHT + head - clientHeight;
  fillTable();
  focusRow(position);
}

function printTable(isPrinted) {
  view.isPrinted = isPrinted;
  const left = view.rows.length - PRINTED_ROWS;
  view.printed.textContent = left > 0 ? `The first ${count(PRINTED_ROWS)} of ${count(view.rows.length)} rows; contigs.tsv has all of them.` : "";
  fillTable();
}
