/** Asks one model for one answer, and measures it. */

import { request } from "./conversations.js";
import { Refusal } from "./server.js";

/** Return an answer that has not begun. */
export function waiting() {
  return { text: "", status: "waiting", state: null, generated: 0, read: null, cached: 0 };
}

/**
 * Stream the answer to the last of these turns into `answer`, and call `changed` each time something has arrived.
 *
 * If the server has forgotten a state, the request begins at an earlier one, and the answer says so.
 */
export async function ask(server, model, turns, answer, options, signal, changed) {
  await settle(answer, changed, async () => {
    for (;;) {
      const body = { ...request(turns, model), ...options };
      try {
        await receive(server.stream("v1/responses", body, signal), answer, changed);
        return;
      } catch (error) {
        const lost = body.previous_response_id;
        if (!lost || answer.text || error.status !== 404 || !["not_found", "damaged"].includes(error.code)) throw error;
        for (const turn of turns) if (turn.answers[model.id]?.state === lost) turn.answers[model.id].state = null;
        answer.again = true;
      }
    }
  });
}

async function receive(events, answer, changed) {
  const began = performance.now();
  let first = null;
  for await (const event of events) {
    const now = performance.now();
    if (event.type === "response.in_progress") {
      count(answer, event.response.usage);
      answer.status = "running";
    } else if (event.type === "response.output_text.delta") {
      first ??= now;
      answer.text += event.delta;
      answer.generated += 1; // corrected at the end: a character may be several tokens
    } else if (event.type === "response.completed" || event.type === "response.incomplete") {
      count(answer, event.response.usage);
      answer.generated = event.response.usage.output_tokens;
      answer.state = event.response.id;
      answer.cut = event.type === "response.incomplete";
      answer.status = "done";
    } else {
      continue;
    }
    if (first !== null) {
      answer.first = first - began;
      if (answer.generated > 1 && now > first) answer.speed = (answer.generated - 1) / ((now - first) / 1000);
    }
    changed();
  }
  if (answer.status !== "done") throw new Refusal("The answer has broken off.");
}

function count(answer, usage) {
  if (!usage) return;
  answer.cached = usage.input_tokens_details.cached_tokens;
  answer.read = usage.input_tokens - answer.cached;
}

/** Let a model read a document. */
export async function read(server, model, text, answer, signal, changed) {
  await settle(answer, changed, async () => {
    const began = performance.now();
    answer.status = "running";
    changed();
    const state = await server.post("v1/states", { model: model.id, text }, signal);
    const known = state.usage.input_tokens_details.cached_tokens;
    Object.assign(answer, { state: state.id, cached: known, read: state.tokens - known, status: "done" });
    answer.time = performance.now() - began;
    changed();
  });
}

/** Do the work of an answer, and note how it has ended. */
async function settle(answer, changed, work) {
  try {
    await work();
  } catch (error) {
    answer.status = error.name === "AbortError" ? "stopped" : "failed";
    if (answer.status === "failed") answer.error = error.message;
    if (!(error instanceof Refusal) && error.name !== "AbortError") console.error(error);
  }
  changed();
}
