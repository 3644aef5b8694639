/** Elements, what a tab keeps, and texts with numbers. */

/** Return an element. Children are nodes or strings; strings become text, so nothing is ever read as HTML. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  set(element, attributes);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Return an element of SVG. */
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(element, attributes);
  element.append(...children);
  return element;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
}

export const find = (id) => document.getElementById(id);

/** Tell users of screen readers what has happened. */
export function announce(text) {
  find("status").textContent = text;
}

/** Say a problem that is not one of an answer, or clear it. */
export function complain(text) {
  const place = find("problem");
  place.textContent = text ?? "";
  place.hidden = !text;
}

/** What this tab keeps when the page is loaded again. A browser may not allow it. */
export const tab = {
  get(name) {
    try {
      return sessionStorage.getItem(name);
    } catch {
      return null;
    }
  },
  /** Keep a text, or forget it. What is too large is forgotten. */
  set(name, text) {
    try {
      sessionStorage.removeItem(name);
      if (text) sessionStorage.setItem(name, text);
    } catch {
      // Nothing is kept; the page works without.
    }
  },
};

export const whole = (number) => Math.round(number).toLocaleString("en");

export function counted(number, noun) {
  return `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function bytes(number) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (number >= size) return `${(number / size).toFixed(number < 10 * size ? 2 : 1)} ${unit}`;
  }
  return `${whole(number)} B`;
}

export function seconds(milliseconds) {
  return milliseconds < 1000 ? `${whole(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

export function speed(perSecond) {
  return `${perSecond < 100 ? perSecond.toFixed(1) : whole(perSecond)} tokens/s`;
}
