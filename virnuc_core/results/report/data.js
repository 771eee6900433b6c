// The data of the report, and what its parts are built with.
// Text from the data becomes a text node or an attribute; nothing of it is ever read as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const contigs = data.contigs; // columns of contigs.tsv, and gc
const names = data.names; // of calls, confidence and classes, which the columns refer to by number
const numContigs = contigs.seq_name.length;
const BALANCED = 0.5; // the score of as many viruses as others
const has = (column) => contigs[column].some((value) => value !== null);

const count = (number) => number.toLocaleString("en");
const plural = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;
const score = (value) => (value === null ? "–" : value.toFixed(3));
const bases = (number) => {
  if (number < 1e4) return `${count(number)} bp`;
  return number < 1e6 ? `${(number / 1e3).toPrecision(3)} kb` : `${(number / 1e6).toPrecision(3)} Mb`;
};

// An element: properties (on..., text) or attributes, then children: nodes, strings, or nothing.
function put(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
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
const dim = (text) => h("span", { class: "dim", text });

// Each class has the same colour in every run; classes of other classifiers share the last four.
const COLOURED = ["prokaryotic virus", "eukaryotic virus", "virus", "provirus", "bacterium", "archaeon", "plasmid", "eukaryote", "organelle", "nonviral", "unscored"];
function colour(name) {
  const known = COLOURED.indexOf(name);
  return `colour-${known >= 0 ? known : COLOURED.length + ([...name].reduce((sum, letter) => sum + letter.codePointAt(0), 0) % 4)}`;
}
const dot = (name) => h("span", { class: `dot ${colour(name)}`, "aria-hidden": "true" });
