/**
 * What was said: turns, each after another one, and conversations that show some of them.
 *
 * A turn has an answer of each model, and an answer has the id of a state of the server. So a turn can be asked after
 * any other one: a fork is a conversation that begins with the turns of another.
 */

import { tab } from "./dom.js";

const KEPT = "t2r-conversations";

export class Conversations {
  constructor() {
    this.turns = new Map();
    this.all = [];
    this.current = null;
    this.restore();
    if (!this.all.length) this.begin();
  }

  /** Begin a conversation, which shows these turns. */
  begin(turns = []) {
    this.current = { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, turns: turns.map((turn) => turn.id) };
    this.all.unshift(this.current);
    return this.current;
  }

  select(conversation) {
    this.current = conversation;
    this.keep();
  }

  /** Forget a conversation. Turns that others show stay. */
  remove(conversation) {
    this.all = this.all.filter((other) => other !== conversation);
    const shown = new Set(this.all.flatMap((other) => other.turns));
    const gone = conversation.turns.filter((id) => !shown.has(id)).map((id) => this.turns.get(id));
    for (const turn of gone) this.turns.delete(turn.id);
    if (this.current === conversation) this.current = this.all[0] ?? this.begin();
    this.keep();
    return gone;
  }

  /** Add a turn to the current conversation, after `parent`. */
  add(kind, text, parent) {
    const turn = { id: Math.max(0, ...this.turns.keys()) + 1, kind, text, parent: parent?.id ?? null, answers: {} };
    this.turns.set(turn.id, turn);
    this.current.turns.push(turn.id);
    return turn;
  }

  shown(conversation = this.current) {
    return conversation.turns.map((id) => this.turns.get(id));
  }

  /** Return the turns before and with this one, as the models have read them. */
  path(turn) {
    const found = [];
    for (let at = turn; at; at = this.turns.get(at.parent)) found.unshift(at);
    return found;
  }

  /** Show a conversation that goes on after this turn. */
  fork(turn) {
    const path = turn ? this.path(turn) : [];
    const empty = this.all.find((other) => !other.turns.length);
    if (empty) this.all = this.all.filter((other) => other !== empty);
    this.begin(path).forked = path.length > 0;
    this.keep();
  }

  title(conversation) {
    const turns = this.shown(conversation);
    if (!turns.length) return "New conversation";
    const short = (turn) => turn.text.trim().replace(/\s+/g, " ").slice(0, 60);
    if (conversation.forked) return `↳ ${short(turns.at(-1))}`;
    return `${turns[0].kind === "document" ? "Document: " : ""}${short(turns.find((turn) => turn.kind === "question") ?? turns[0])}`;
  }

  /** Keep everything while the tab is open, also when it is loaded again. */
  keep() {
    const kept = { turns: [...this.turns.values()], all: this.all, current: this.current.id };
    tab.set(KEPT, JSON.stringify(kept));
  }

  restore() {
    const kept = JSON.parse(tab.get(KEPT) ?? "null");
    if (!kept) return;
    for (const turn of kept.turns) {
      this.turns.set(turn.id, turn);
      for (const answer of Object.values(turn.answers)) {
        if (answer.status === "waiting" || answer.status === "running") answer.status = "stopped";
      }
    }
    this.all = kept.all;
    this.current = this.all.find((conversation) => conversation.id === kept.current) ?? this.all[0];
  }
}

/**
 * Return the request that asks a model the last of these turns.
 *
 * It begins at the latest state that the server has. What came after it, such as an answer that was stopped, is sent
 * again. Questions that this model did not answer are left out.
 */
export function request(turns, model) {
  const asked = turns.at(-1);
  const of = (turn) => turn.answers[model.id];
  const known = turns.findLastIndex((turn) => turn !== asked && of(turn)?.state);
  const before = turns.slice(known + 1, -1);
  const body = { model: model.id };
  if (known >= 0) body.previous_response_id = of(turns[known]).state;
  body.input = model.t2r.chat_template ? messages(before, asked, of) : continued(turns[known], before, asked, of);
  return body;
}

function messages(before, asked, of) {
  const found = [];
  let document = "";
  for (const turn of before) {
    if (turn.kind === "document") {
      document += `${turn.text.trimEnd()}\n\n`;
    } else if (of(turn)?.text) {
      found.push({ role: "user", content: document + turn.text }, { role: "assistant", content: of(turn).text });
      document = "";
    }
  }
  const last = document + asked.text;
  return found.length ? [...found, { role: "user", content: last }] : last;
}

/** Return the text that goes on, for a model without a chat template. One space is put between texts without any. */
function continued(known, before, asked, of) {
  let text = known ? (of(known).text ?? known.text) : "";
  const start = text.length;
  for (const turn of [...before, asked]) {
    if (turn !== asked && turn.kind === "question" && !of(turn)?.text) continue;
    const gap = text && !/\s$/.test(text) && !/^\s/.test(turn.text) ? " " : "";
    text += gap + turn.text + (turn === asked ? "" : (of(turn)?.text ?? ""));
  }
  return text.slice(start);
}
