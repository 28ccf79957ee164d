// Elements and numbers for people. Every text becomes a text node: nothing here, or elsewhere on the page, parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; a child that is a string is text. */
export function element(tag, attributes = {}, ...children) {
  return furnished(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return furnished(document.createElementNS(SVG, tag), attributes, children);
}

function furnished(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function find(id) {
  return document.getElementById(id);
}

export function copied(id) {
  return find(id).content.firstElementChild.cloneNode(true);
}

export function seconds(value, digits = 2) {
  return `${value.toFixed(digits)} s`;
}

export function milliseconds(value) {
  return value >= 1000 ? seconds(value / 1000) : `${value.toFixed(value >= 100 ? 0 : 1)} ms`;
}

/** Without blank lines before it and blanks after it. The first line keeps its indentation. */
export function trimmed(text) {
  return text.replace(/^\s*\n/, "").trimEnd();
}

/** A share of two counts, or a dash where nothing was counted. */
export function share(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}
