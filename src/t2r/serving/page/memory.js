/** What a user costs: the bytes of this conversation in each model, and how they grow. */

import { bytes, counted, draw, make, whole } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 84;

/** Return the bytes of a conversation of this number of tokens. */
export function cost(model, tokens) {
  return model.t2r.state_bytes + model.t2r.bytes_per_token * tokens;
}

export function growth(model) {
  const each = model.t2r.bytes_per_token;
  return each ? `+${bytes(each)} a token` : "constant";
}

/** Return the number of tokens at which two models cost the same. Null: there is none. */
export function crossing(models) {
  if (models.length !== 2) return null;
  const [one, other] = models.map((model) => model.t2r);
  const tokens = (one.state_bytes - other.state_bytes) / (other.bytes_per_token - one.bytes_per_token);
  return Number.isFinite(tokens) && tokens > 0 ? tokens : null;
}

export class Memory {
  constructor(place, models) {
    this.models = models;
    this.equal = crossing(models);
    this.title = make("h2", {}, "Memory of this conversation");
    this.rows = models.map((model) => {
      const bar = make("span", {});
      const value = make("output", { class: "value" });
      const name = make("span", { class: "name" }, model.id);
      const grows = make("span", { class: "grows" }, growth(model));
      const row = make("div", { class: "cost", "data-model": model.number }, name, value, make("span", { class: "bar" }, bar), grows);
      return { row, bar, value };
    });
    this.chart = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 16}`, role: "img" });
    const told = this.equal === null ? null : `They cost the same at ${counted(this.equal, "token")}.`;
    place.replaceChildren(this.title, ...this.rows.map((each) => each.row), this.chart, make("p", { class: "told" }, told));
  }

  /** Show the costs after these numbers of tokens, by the id of a model. */
  show(tokens) {
    const costs = this.models.map((model) => cost(model, tokens[model.id] ?? 0));
    const most = Math.max(...costs);
    this.rows.forEach(({ bar, value }, i) => {
      bar.style.width = `${Math.max(1, (100 * costs[i]) / most)}%`;
      value.textContent = bytes(costs[i]);
    });
    const length = Math.max(0, ...Object.values(tokens));
    this.title.textContent = length ? `Memory at ${counted(length, "token")}` : "Memory of this conversation";
    this.plot(tokens, length);
  }

  plot(tokens, length) {
    const span = Math.max(256, 1.4 * length, 1.4 * (this.equal ?? 0));
    const top = 1.1 * Math.max(...this.models.map((model) => cost(model, span)));
    const x = (n) => (WIDTH * n) / span;
    const y = (size) => HEIGHT - (HEIGHT * size) / top;
    const parts = [draw("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT })];
    for (const model of this.models) {
      const at = tokens[model.id] ?? 0;
      const line = { x1: 0, y1: y(cost(model, 0)), x2: WIDTH, y2: y(cost(model, span)) };
      parts.push(
        draw("line", { class: "curve", "data-model": model.number, ...line }),
        draw("circle", { class: "here", "data-model": model.number, cx: Math.max(4, x(at)), cy: y(cost(model, at)), r: 4 }),
      );
    }
    parts.push(
      draw("text", { x: 0, y: HEIGHT + 13 }, "0"),
      draw("text", { x: WIDTH, y: HEIGHT + 13, "text-anchor": "end" }, `${whole(span)} tokens`),
    );
    this.chart.setAttribute("aria-label", `Bytes by tokens: ${this.models.map((m) => `${m.id} ${growth(m)}`).join(", ")}`);
    this.chart.replaceChildren(...parts);
  }
}
