// One question with its answer: what the model was told, and what a person sees of it.

import { copyText, Formatted } from "./render.js";
import { copyOf, say } from "./words.js";

export class Turn {
  answer = "";
  #error = null;
  #figures = "";
  #isDue = false; // drawing
  #cost = 0; // of the last drawing, in milliseconds

  /** @param act called with "retry" or "edit". */
  constructor(text, urls, act) {
    this.text = text;
    this.urls = urls;
    this.element = copyOf("turn");
    this.find = (selector) => this.element.querySelector(selector);
    this.formatted = new Formatted(this.find(".answer .text"));
    this.find(".question .text").textContent = text;
    this.find(".question .text").hidden = !text;
    this.find(".pictures").hidden = !urls.length;
    this.find(".pictures").append(...urls.map(picture));
    for (const button of this.element.querySelectorAll("[data-act]")) {
      const name = button.dataset.act;
      button.onclick = () => (name === "copy" ? copyText(this.answer, button) : act(name));
    }
  }

  /** What goes to the server; a turn that failed has no answer and is left out of later ones. */
  messages() {
    const question = { role: "user", content: this.#content() };
    return this.answer ? [question, { role: "assistant", content: this.answer }] : [question];
  }

  #content() {
    if (!this.urls.length) return this.text;
    const images = this.urls.map((url) => ({ type: "image_url", image_url: { url } }));
    return this.text ? [...images, { type: "text", text: this.text }] : images;
  }

  begin() {
    this.answer = this.#figures = "";
    this.#error = null;
    this.#draw();
    this.element.classList.add("running");
    this.find(".error").hidden = true;
    this.find(".foot").hidden = true;
  }

  /** @param drawn called around the drawing, with a function that draws. */
  write(text, drawn) {
    this.answer += text;
    if (this.#isDue) return;
    this.#isDue = true; // at most once a frame, and a fifth of the time: tokens may come faster
    setTimeout(() => requestAnimationFrame(() => this.#isDue && drawn(() => this.#draw())), 4 * this.#cost);
  }

  /** @param figures shown below: {usage, seconds, firstAfter, reason}. */
  end({ error, figures }) {
    this.#error = error;
    this.#figures = error ? "" : describe(figures, this.answer);
    this.#finish();
  }

  #finish() {
    this.#draw(true);
    this.element.classList.remove("running");
    this.element.classList.toggle("failed", Boolean(this.#error));
    this.find(".error").hidden = !this.#error;
    this.find(".error").textContent = this.#error ?? "";
    this.find('[data-act="copy"]').hidden = !this.answer;
    this.find(".figures").textContent = this.#figures;
    this.find(".foot").hidden = false;
  }

  /** What a reload brings back: plain values. */
  kept() {
    const isRunning = this.element.classList.contains("running");
    const figures = isRunning ? say("stopped") : this.#figures;
    return { text: this.text, urls: this.urls, answer: this.answer, error: this.#error, figures };
  }

  /** Takes what `kept` gave. */
  restore({ answer, error, figures }) {
    this.answer = answer;
    this.#error = error;
    this.#figures = figures;
    this.#finish();
  }

  #draw(isWhole = false) {
    const began = performance.now();
    this.#isDue = false;
    this.formatted.show(this.answer, isWhole);
    this.element.classList.toggle("begun", this.answer !== "");
    this.#cost = performance.now() - began;
  }
}

function picture(url, place) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = say("pictureOf", place + 1);
  return image;
}

function describe({ usage, seconds, firstAfter, reason }, answer) {
  const parts = [];
  if (reason === "stopped") parts.push(say("stopped"));
  else if (reason === "length") parts.push(say("cut"));
  else if (!answer) parts.push(say("empty"));
  if (usage) {
    const made = usage.completion_tokens;
    parts.push(say("tokens", made));
    // the first token waits for the prompt to be read; the others show the speed
    if (made > 1 && seconds > 0) parts.push(say("speed", ((made - 1) / seconds).toFixed(1)));
    parts.push(say("prompt", usage.prompt_tokens));
  }
  if (firstAfter !== null) parts.push(say("first", firstAfter.toFixed(firstAfter < 1 ? 2 : 1)));
  return parts.join(" · ");
}
