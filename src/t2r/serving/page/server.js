/** The server's API. */

import { tab } from "./dom.js";

const KEY = "t2r-key";

/** What the server has refused, or why it could not be asked. */
export class Refusal extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Server {
  constructor() {
    this.key = tab.get(KEY) ?? "";
    /** Asks for a key, and resolves to whether there is one. */
    this.askKey = async () => false;
  }

  useKey(key) {
    this.key = key;
    tab.set(KEY, key);
  }

  /** Return the response to a request. Throws Refusal. Without a valid key, it asks for one and tries again. */
  async call(path, { method = "GET", body, signal } = {}) {
    for (;;) {
      const headers = this.key ? { authorization: `Bearer ${this.key}` } : {};
      if (body !== undefined) headers["content-type"] = "application/json";
      let response;
      try {
        response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Refusal("The server cannot be reached.");
      }
      if (response.ok) return response;
      const refusal = await refused(response);
      if (refusal.status !== 401 || !(await this.askKey())) throw refusal;
    }
  }

  async get(path) {
    return (await this.call(path)).json();
  }

  async post(path, body, signal) {
    return (await this.call(path, { method: "POST", body, signal })).json();
  }

  /** Yield the events of a stream. Throws Refusal, also if the stream breaks off. */
  async *stream(path, body, signal) {
    const response = await this.call(path, { method: "POST", body: { ...body, stream: true }, signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Refusal("The connection to the server was lost.");
      }
      if (part.done) return;
      const events = (rest + part.value).split("\n\n");
      rest = events.pop();
      for (const text of events) {
        const data = text.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length && data[0] !== "[DONE]") yield checked(JSON.parse(data.join("\n")));
      }
    }
  }
}

async function refused(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Something between here and the server has answered: the status is all there is.
  }
  return new Refusal(error.message ?? `The server has answered with status ${response.status}.`, response.status, error.code);
}

function checked(event) {
  if (event.type === "error") throw new Refusal(event.message, 0, event.code);
  return event;
}
