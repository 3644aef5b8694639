/** Translation: a box for the source, and one for what each model makes of it. */

import { announce, complain, counted, find, make, seconds, speed } from "./dom.js";
import { kindOf } from "./turns.js";

/** Lines that are translated at the same time. */
const TOGETHER = 8;

export class Translation {
  /** The arguments are those of `Chat`, with models that translate. */
  constructor(server, models, settings) {
    Object.assign(this, { server, models, settings });
    this.stopper = null;
    this.source = make("textarea", { id: "source", rows: 8, keydown: (event) => this.key(event) });
    this.button = make("button", { type: "submit", class: "main" }, "Translate");
    this.halt = make("button", { type: "button", class: "main stop", hidden: true, click: () => this.stopper?.abort() }, "Stop");
    this.boxes = models.map((model) => box(model));
    const told = make("p", { class: "told" }, "Every line is translated on its own.");
    const form = make(
      "form",
      { submit: (event) => this.submit(event) },
      make("label", { for: "source" }, "Text"),
      this.source,
      make("div", { class: "line" }, told, this.button, this.halt),
    );
    find("translation").replaceChildren(form, make("div", { class: "answers" }, this.boxes.map((each) => each.element)));
    find("translation").hidden = false;
  }

  key(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.submit(event);
    if (event.key === "Escape") this.stopper?.abort();
  }

  async submit(event) {
    event.preventDefault();
    const lines = this.source.value.split("\n").map((line) => line.trim());
    const boxes = this.boxes.filter((each) => this.settings.on.has(each.model.id));
    if (this.stopper || !lines.some(Boolean)) return;
    if (!boxes.length) return complain("Switch a model on first: its name is at the top.");
    complain(null);
    this.busy(new AbortController());
    const one = (each) => this.translate(each, lines, this.stopper.signal);
    if (this.settings.inTurn()) for (const each of boxes) await one(each);
    else await Promise.all(boxes.map(one));
    this.busy(null);
    announce("Translated.");
  }

  busy(stopper) {
    this.stopper = stopper;
    this.button.hidden = Boolean(stopper);
    this.halt.hidden = !stopper;
  }

  /** Translate lines with one model, some of them at the same time. */
  async translate(each, lines, signal) {
    const places = each.begin(lines);
    const began = performance.now();
    const options = this.settings.options();
    let next = 0;
    let tokens = 0;
    let first = null;
    const worker = async () => {
      while (next < lines.length) {
        const number = next++;
        if (!lines[number]) continue;
        const body = { model: each.model.id, input: lines[number], ...options };
        for await (const event of this.server.stream("v1/responses", body, signal)) {
          if (event.type === "response.output_text.delta") {
            first ??= performance.now() - began;
            places[number].append(event.delta);
          } else if (event.response?.usage && event.type !== "response.in_progress") {
            tokens += event.response.usage.output_tokens;
            each.measured(tokens, performance.now() - began, first);
          }
        }
      }
    };
    try {
      await Promise.all(Array.from({ length: TOGETHER }, worker));
    } catch (error) {
      next = lines.length;
      each.note.textContent = error.name === "AbortError" ? "Stopped." : error.message;
      if (error.name !== "AbortError") this.stopper.abort();
    }
  }
}

function box(model) {
  const text = make("div", { class: "text lines", lang: "" });
  const note = make("p", { class: "note" });
  const stats = make("p", { class: "stats" });
  const head = make("h2", {}, make("span", { class: "name" }, model.id), " ", make("span", { class: "kind" }, kindOf(model)));
  const element = make("section", { class: "answer", "data-model": model.number, "aria-label": model.id }, head, text, note, stats);
  return {
    model,
    element,
    note,
    begin(lines) {
      const places = lines.map(() => make("p", {}));
      text.replaceChildren(...places);
      note.textContent = "";
      stats.replaceChildren();
      return places;
    },
    measured(tokens, time, first) {
      const parts = [counted(tokens, "token"), speed(tokens / (time / 1000)), `first token ${seconds(first ?? time)}`];
      stats.replaceChildren(...parts.map((part) => make("span", {}, part)));
    },
  };
}
