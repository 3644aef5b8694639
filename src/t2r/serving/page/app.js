/** Starts the page: finds the models, and shows what they can do. */

import { Chat } from "./chat.js";
import { complain, find, make } from "./dom.js";
import { Server } from "./server.js";
import { Translation } from "./translation.js";
import { kindOf } from "./turns.js";

/** What users have chosen for requests. */
class Settings {
  constructor(models) {
    /** The ids of the models that answer. */
    this.on = new Set(models.map((model) => model.id));
    this.form = find("options");
    this.form.addEventListener("submit", (event) => event.preventDefault());
  }

  inTurn() {
    return this.form.elements.in_turn.checked;
  }

  /** Return the options of a request. What is empty is left to the server. */
  options() {
    const found = {};
    for (const name of ["temperature", "max_output_tokens", "seed"]) {
      const value = this.form.elements[name].valueAsNumber;
      if (!Number.isNaN(value)) found[name] = value;
    }
    return found;
  }
}

function toggles(models, settings) {
  const toggle = (model) => {
    const box = make("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => settings.on[box.checked ? "add" : "delete"](model.id));
    const name = make("span", { class: "name" }, model.id);
    return make("label", { class: "model", "data-model": model.number }, box, name, make("span", { class: "kind" }, kindOf(model)));
  };
  find("models").replaceChildren(...models.map(toggle));
}

/** Ask for a key. Resolves to whether there is one. Several requests may ask at once, and users are asked once. */
function keys(server) {
  const dialog = find("key");
  const place = find("key-text");
  let asked = null;
  let given = false;
  dialog.querySelector("form").addEventListener("submit", () => {
    server.useKey(place.value.trim());
    given = true;
  });
  const ask = () => {
    asked ??= new Promise((resolve) => {
      given = false;
      place.value = "";
      dialog.addEventListener("close", () => resolve(given), { once: true });
      dialog.showModal();
    }).finally(() => (asked = null));
    return asked;
  };
  server.askKey = ask;
  find("change-key").addEventListener("click", ask);
}

function dialogs() {
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
  }
  const settings = find("settings");
  document.addEventListener("click", (event) => {
    if (!settings.contains(event.target)) settings.open = false;
  });
  settings.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !settings.open) return;
    event.preventDefault();
    settings.open = false;
    settings.querySelector("summary").focus();
  });
}

async function start() {
  const server = new Server();
  dialogs();
  keys(server);
  const found = (await server.get("v1/models")).data;
  const models = found.map((model, number) => ({ ...model, number }));
  document.title = `${models.map((model) => model.id).join(" and ")} · t2r`;
  const settings = new Settings(models);
  toggles(models, settings);
  const translate = models.filter((model) => model.t2r.kind === "encoder-decoder");
  const talk = models.filter((model) => !translate.includes(model));
  if (talk.length) new Chat(server, talk, settings);
  if (translate.length) new Translation(server, translate, settings);
}

start().catch((error) => {
  console.error(error);
  complain(`${error.message} Load the page again to try once more.`);
});
