/** The conversation: asks all models that are on, and shows what they say. */

import { ask, read, waiting } from "./asking.js";
import { Conversations } from "./conversations.js";
import { announce, bytes, complain, find, make } from "./dom.js";
import { Memory, growth } from "./memory.js";
import { TurnView } from "./turns.js";

export class Chat {
  /**
   * @param {Server} server the server.
   * @param {object[]} models the models that can talk.
   * @param {object} settings `on`, the ids of the models that answer, and `options()`, those of requests.
   */
  constructor(server, models, settings) {
    Object.assign(this, { server, models, settings });
    this.conversations = new Conversations();
    this.memory = new Memory(find("memory"), models);
    this.message = find("message");
    this.thread = find("thread");
    /** Stops what runs. Null: nothing runs. */
    this.stopper = null;
    this.listen();
    find("chat").hidden = false;
    const chats = models.every((model) => model.t2r.chat_template);
    this.message.placeholder = chats ? "Message" : "Text that the model continues";
    this.show();
  }

  listen() {
    const composer = find("composer");
    composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      composer.requestSubmit();
    });
    this.message.addEventListener("input", () => this.fit());
    find("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector("dialog[open]")) this.stop();
    });
    find("new").addEventListener("click", () => this.fork(null));
    find("add-document").addEventListener("click", () => find("document").showModal());
    find("document").querySelector("form").addEventListener("submit", () => this.addDocument());
    find("document-file").addEventListener("change", (event) => this.openFile(event.target));
  }

  /** Make the message as high as its text. */
  fit() {
    this.message.style.height = "auto";
    this.message.style.height = `${this.message.scrollHeight + 2}px`;
  }

  // --- What is shown ----------------------------------------------------------------------------------------

  show() {
    const turns = this.conversations.shown();
    this.thread.replaceChildren(...(turns.length ? turns.map((turn) => this.view(turn).element) : [this.welcome()]));
    find("alone-label").hidden = !turns.some((turn) => turn.kind === "document");
    this.list();
    this.count();
    this.thread.scrollTop = this.thread.scrollHeight;
  }

  view(turn) {
    return new TurnView(turn, this.models, {
      fork: () => this.fork(turn),
      edit: () => this.edit(turn),
      save: (model, answer) => this.save(model, answer),
    });
  }

  welcome() {
    const about = (model) => {
      const facts = model.t2r;
      const start = facts.state_bytes ? `${bytes(facts.state_bytes)} for each user, ` : "";
      return make("li", { "data-model": model.number }, make("strong", {}, model.id), `: ${start}${growth(model)}`);
    };
    const says = this.models.length > 1 ? "Both models get the same messages." : "Send a message to begin.";
    const may = "An earlier answer can be continued in another way, and a document is read once for all questions.";
    return make("div", { class: "welcome" }, make("p", {}, `${says} ${may}`), make("ul", {}, this.models.map(about)));
  }

  list() {
    const { all, current } = this.conversations;
    const item = (conversation) => {
      const title = this.conversations.title(conversation);
      const here = conversation === current;
      const open = () => this.open(conversation);
      const remove = () => this.remove(conversation);
      return make(
        "li",
        { class: here && "here" },
        make("button", { type: "button", "aria-current": here && "true", title, click: open }, title),
        conversation.turns.length
          ? make("button", { type: "button", class: "remove", "aria-label": `Remove: ${title}`, click: remove }, "×")
          : null,
      );
    };
    find("conversations").replaceChildren(...all.map(item));
  }

  /** Show the memory of the conversation after its last turn. */
  count() {
    const tokens = {};
    const last = this.conversations.shown().at(-1);
    for (const model of this.models) {
      const known = last && this.conversations.path(last).findLast((turn) => turn.answers[model.id]?.read != null);
      const answer = known?.answers[model.id];
      tokens[model.id] = answer ? answer.read + answer.cached + answer.generated : 0;
    }
    this.memory.show(tokens);
  }

  // --- What users do ----------------------------------------------------------------------------------------

  open(conversation) {
    if (this.stopper) return;
    this.conversations.select(conversation);
    this.show();
  }

  async remove(conversation) {
    if (this.stopper) return;
    const gone = this.conversations.remove(conversation);
    this.show();
    const states = gone.flatMap((turn) => Object.values(turn.answers)).map((answer) => answer.state);
    for (const id of states.filter(Boolean)) {
      // The server may have forgotten it already.
      await this.server.call(`v1/states/${id}`, { method: "DELETE" }).catch(() => null);
    }
  }

  fork(turn) {
    if (this.stopper) return;
    this.conversations.fork(turn);
    this.show();
    announce(turn ? "A new conversation goes on from here." : "A new conversation.");
    this.message.focus();
  }

  /** Ask something else in the place of a question. */
  edit(turn) {
    if (this.stopper) return;
    this.fork(this.conversations.turns.get(turn.parent) ?? null);
    this.message.value = turn.text;
    this.fit();
    this.message.focus();
  }

  async save(model, answer) {
    try {
      const response = await this.server.call(`v1/states/${answer.state}/content`);
      const address = URL.createObjectURL(await response.blob());
      make("a", { href: address, download: `${model.id}-${answer.state}.safetensors` }).click();
      setTimeout(() => URL.revokeObjectURL(address), 60_000);
    } catch (error) {
      complain(error.message);
    }
  }

  stop() {
    this.stopper?.abort();
  }

  async send() {
    const text = this.message.value;
    if (this.stopper || !text.trim() || !this.some()) return;
    this.message.value = "";
    this.fit();
    const turns = this.conversations.shown();
    const document = turns.findLast((turn) => turn.kind === "document");
    const alone = document && find("alone").checked;
    const turn = this.conversations.add("question", text, alone ? document : turns.at(-1));
    const options = this.settings.options();
    await this.run(turn, (model, answer, signal, changed) =>
      ask(this.server, model, this.conversations.path(turn), answer, options, signal, changed),
    );
  }

  async addDocument() {
    const place = find("document-text");
    const text = place.value;
    if (this.stopper || !text.trim() || !this.some()) return;
    place.value = "";
    this.conversations.fork(null);
    const turn = this.conversations.add("document", text, null);
    await this.run(turn, (model, answer, signal, changed) => read(this.server, model, text, answer, signal, changed));
  }

  async openFile(input) {
    const [file] = input.files;
    input.value = "";
    if (file) find("document-text").value = await file.text();
  }

  some() {
    if (this.settings.on.size) return true;
    complain("Switch a model on first: its name is at the top.");
    return false;
  }

  /** Do the work of a turn for all models that are on, together or one after the other. */
  async run(turn, work) {
    complain(null);
    const models = this.models.filter((model) => this.settings.on.has(model.id));
    for (const model of models) turn.answers[model.id] = waiting();
    this.show();
    const view = this.view(turn);
    this.thread.lastElementChild.replaceWith(view.element);
    this.busy(new AbortController());
    let drawn = false;
    const changed = () => {
      if (drawn) return;
      drawn = true; // many tokens may arrive before the next frame
      requestAnimationFrame(() => {
        drawn = false;
        this.follow(() => view.update());
        this.count();
      });
    };
    const { signal } = this.stopper;
    const one = async (model) => {
      const answer = turn.answers[model.id];
      await work(model, answer, signal, changed);
      announce(`${model.id}: ${answer.status === "done" ? answer.text || "done" : answer.error || answer.status}`);
    };
    if (this.settings.inTurn()) for (const model of models) await one(model);
    else await Promise.all(models.map(one));
    this.busy(null);
    this.conversations.keep();
    this.follow(() => view.update());
    this.list();
    this.count();
  }

  /** Change the thread, and stay at its end if that is where the reader is. */
  follow(change) {
    const { thread } = this;
    const atEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
    change();
    if (atEnd) thread.scrollTop = thread.scrollHeight;
  }

  busy(stopper) {
    this.stopper = stopper;
    find("stop").hidden = !stopper;
    find("send").hidden = Boolean(stopper);
    this.thread.setAttribute("aria-busy", String(Boolean(stopper)));
    for (const id of ["new", "add-document"]) find(id).disabled = Boolean(stopper);
  }
}
