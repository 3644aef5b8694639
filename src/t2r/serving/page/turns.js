/** Shows turns: a message or a document, and the answers side by side. */

import { bytes, counted, make, seconds, speed, whole } from "./dom.js";
import { cost } from "./memory.js";

const LONG = 300;

export class TurnView {
  /**
   * @param {object} turn the turn.
   * @param {object[]} models the models.
   * @param {object} actions what its buttons do: `fork`, `edit` and `save`.
   */
  constructor(turn, models, actions) {
    this.turn = turn;
    this.actions = actions;
    this.models = models.filter((model) => turn.answers[model.id]);
    this.answers = this.models.map((model) => answerView(model));
    this.buttons = make("div", { class: "actions" });
    const answers = make("div", { class: "answers" }, this.answers.map((view) => view.element));
    this.element = make("article", { class: `turn ${turn.kind}` }, this.said(), answers, this.buttons);
    this.update();
  }

  said() {
    const { kind, text } = this.turn;
    if (kind === "question") {
      const edit = small("Edit", "Ask something else here, in a new conversation", this.actions.edit);
      return make("div", { class: "said" }, make("h2", { class: "hidden" }, "You"), make("p", { class: "text" }, text), edit);
    }
    const short = text.length > LONG;
    const start = make("p", { class: "text" }, short ? `${text.slice(0, LONG)}…` : text);
    const all = short && make("details", {}, make("summary", {}, "The whole document"), make("p", { class: "text" }, text));
    return make("div", { class: "said" }, make("h2", {}, `Document, ${counted(text.length, "character")}`), start, all || null);
  }

  update() {
    const { turn } = this;
    this.answers.forEach((view, i) => view.update(turn.answers[this.models[i].id], turn.kind));
    const all = this.models.map((model) => turn.answers[model.id]);
    const ended = all.every((answer) => !["waiting", "running"].includes(answer.status));
    if (!ended || this.buttons.childElementCount) return;
    const told = turn.kind === "document" ? "Begin here" : "Fork here";
    const about = "A new conversation that goes on from here. Nothing is read again.";
    this.buttons.append(small(told, about, this.actions.fork));
    this.models.forEach((model, i) => {
      const { text, state } = all[i];
      const place = this.answers[i].tools;
      // Only pages of this machine or with HTTPS may write to the clipboard.
      const copy = (event) => navigator.clipboard.writeText(text).then(() => (event.target.textContent = "Copied"));
      if (text && navigator.clipboard) place.append(small("Copy", `Copy the answer of ${model.id}`, copy));
      const save = () => this.actions.save(model, all[i]);
      if (state) place.append(small("Save state", `Download what ${model.id} remembers, as a file`, save));
    });
  }
}

function small(text, about, click) {
  return make("button", { type: "button", class: "small", title: about, click }, text);
}

function answerView(model) {
  const text = make("p", { class: "text" });
  const note = make("p", { class: "note" });
  const stats = make("p", { class: "stats" });
  const tools = make("div", { class: "actions" });
  const title = make("h3", {}, make("span", { class: "name" }, model.id), " ", make("span", { class: "kind" }, kindOf(model)));
  const head = make("div", { class: "head" }, title, tools);
  const element = make("section", { class: "answer", "data-model": model.number, "aria-label": model.id }, head, text, note, stats);
  const update = (answer, kind) => {
    element.dataset.status = answer.status;
    // While a text grows, only its end is added, so that a selection stays.
    const shown = answer.text.trimStart();
    if (shown.startsWith(text.textContent)) text.append(shown.slice(text.textContent.length));
    else text.textContent = shown;
    note.textContent = noteOf(answer, kind);
    stats.replaceChildren(...(kind === "document" ? readings(answer, model) : measurements(answer)).map(part));
  };
  return { element, tools, update };
}

export function kindOf(model) {
  return { rnn: "RNN", transformer: "Transformer", hybrid: "Hybrid", "encoder-decoder": "Translation" }[model.t2r.kind];
}

const part = (text) => make("span", {}, text);

function noteOf(answer, kind) {
  const notes = [];
  if (answer.again) notes.push("The server had forgotten this conversation, and read it again.");
  if (answer.status === "stopped") notes.push("Stopped.");
  if (answer.status === "failed") notes.push(answer.error);
  if (answer.cut) notes.push("The limit of tokens is reached.");
  if (answer.status === "running" && kind === "document") notes.push("Reading…");
  if (answer.status === "done" && kind !== "document" && !answer.text) notes.push("The answer is empty.");
  return notes.join(" ");
}

function measurements(answer) {
  const found = [];
  if (answer.first !== undefined) found.push(`first token ${seconds(answer.first)}`);
  if (answer.speed !== undefined) found.push(speed(answer.speed));
  if (answer.generated) found.push(counted(answer.generated, "token"));
  if (answer.read !== null) found.push(`${whole(answer.read)} read${answer.cached ? `, ${whole(answer.cached)} from the state` : ""}`);
  return found;
}

function readings(answer, model) {
  if (answer.status !== "done") return [];
  const tokens = answer.read + answer.cached;
  const found = [`${counted(tokens, "token")} read in ${seconds(answer.time)}`, bytes(cost(model, tokens))];
  return answer.cached ? [...found, `${whole(answer.cached)} from a state`] : found;
}
