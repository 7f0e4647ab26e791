// The page: what a person does, and the conversation that comes of it.

import { listModels, streamChat } from "./client.js";
import { Pictures, takeFiles } from "./images.js";
import {
  apiKey,
  checkAll,
  keepSettings,
  keptModel,
  requestFields,
  showServer,
  systemMessages,
} from "./settings.js";
import { forgetAll, keepTurns, keptTurns } from "./store.js";
import { Turn } from "./turns.js";
import { isChinese, say, translate } from "./words.js";

const find = (id) => document.getElementById(id);
const message = find("message");
const scroller = find("scroller");
const pictures = new Pictures(find("thumbnails"), notice);
let models = [];
let turns = [];
let running = null; // the AbortController of the answer that comes in
let isLooking = false; // for models, with a message that waits for them
let untold = new Set(["picturesLeft", "notKept"]); // each is said once

document.documentElement.lang = isChinese ? "zh-Hans" : "en";
translate(document);
keepSettings();
restore().then(loadModels);

async function loadModels() {
  try {
    models = await listModels(apiKey());
  } catch (error) {
    notice(error.message);
    return;
  }
  find("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  if (models.some(({ id }) => id === keptModel())) find("model").value = keptModel();
  find("model").disabled = models.length < 2;
  showModel();
}

const model = () => models.find(({ id }) => id === find("model").value);
const takesImages = () => Boolean(model()?.stageline?.takes_images);

function showModel() {
  find("welcome-model").textContent = say("talksTo", model().id);
  find("attach").hidden = !takesImages();
  if (!takesImages()) pictures.set([]);
  showServer(model());
}

function notice(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}

function takePictures(files) {
  if (takesImages()) pictures.add(files);
  else notice(say("noImages", find("model").value));
}

async function submit() {
  const text = message.value.trim();
  if (running || isLooking || (!text && !pictures.urls.length)) return;
  if (!models.length) {
    isLooking = true;
    await loadModels(); // the server may have come up meanwhile
    isLooking = false;
  }
  if (!models.length || !isReady()) return;
  const turn = addTurn(text, [...pictures.urls]);
  message.value = "";
  pictures.set([]);
  fitMessage();
  await answer(turn);
}

/** Whether the settings can be sent; if not, shows the first that can't. */
function isReady() {
  const wrong = checkAll();
  notice(wrong ? say("wrongSettings") : "");
  if (!wrong) return true;
  if (!find("settings").open) find("settings").showModal();
  wrong.focus();
  return false;
}

function addTurn(text, urls) {
  const turn = new Turn(text, urls, (act) => redo(turn, act));
  turns.push(turn);
  find("log").append(turn.element);
  return turn;
}

/** Brings back what was kept before a reload. */
async function restore() {
  try {
    const kept = await keptTurns();
    if (turns.length || !kept.length) return; // somebody was faster
    for (const one of kept) addTurn(one.text, one.urls).restore(one);
    showState();
    scrollDown();
  } catch (error) {
    notice(say("notRestored", error.message));
  }
}

/** Keeps the conversation for a reload, without its pictures if there is no room for them. */
async function keep() {
  const kept = turns.map((turn) => turn.kept());
  try {
    await keepTurns(kept);
  } catch (error) {
    const bare = kept.map((one) => ({ ...one, urls: [] }));
    const hasPictures = kept.some(({ urls }) => urls.length);
    const isKept = hasPictures && (await keepTurns(bare).then(() => true, () => false));
    const name = isKept ? "picturesLeft" : "notKept";
    if (untold.delete(name)) notice(say(name, error.message || error.name));
  }
}

async function answer(turn) {
  const controller = new AbortController();
  running = controller;
  turn.begin();
  showState();
  scrollDown();
  keep();
  const figures = { usage: null, seconds: 0, firstAfter: null, reason: null };
  let error = null;
  try {
    await receive(turn, controller.signal, figures);
  } catch (caught) {
    if (controller.signal.aborted) figures.reason = "stopped";
    else error = caught.message;
    if (caught.status === 404) loadModels(); // the server has another model by now
  }
  keepDown(() => turn.end({ error, figures }));
  if (running === controller) running = null;
  if (turns.includes(turn)) keep();
  find("said").textContent = error ?? say(figures.reason === "stopped" ? "stopped" : "answered");
  showState();
}

async function receive(turn, signal, figures) {
  const began = performance.now();
  let first = null;
  const earlier = turns.slice(0, turns.indexOf(turn)).filter((one) => one.answer);
  const messages = [...systemMessages(), ...[...earlier, turn].flatMap((one) => one.messages())];
  const body = { model: find("model").value, messages, ...requestFields() };
  for await (const chunk of streamChat(body, { key: apiKey(), signal })) {
    const choice = chunk.choices?.[0];
    if (chunk.usage) figures.usage = chunk.usage;
    if (choice?.finish_reason) figures.reason = choice.finish_reason;
    if (!choice?.delta?.content) continue;
    const now = performance.now();
    first ??= now;
    figures.firstAfter = (first - began) / 1000;
    figures.seconds = (now - first) / 1000;
    turn.write(choice.delta.content, keepDown);
  }
}

/** The last message once more, or back into the field to be changed. */
function redo(turn, act) {
  if (running || turn !== turns.at(-1)) return;
  if (act === "retry") {
    if (isReady()) answer(turn);
    return;
  }
  turns.pop();
  keep();
  turn.element.remove();
  message.value = turn.text;
  pictures.set(turn.urls);
  showState();
  fitMessage();
}

function startAnew() {
  running?.abort();
  running = null;
  turns = [];
  find("log").replaceChildren();
  notice("");
  showState();
  keep();
}

async function forget() {
  try {
    await forgetAll();
    startAnew();
    find("settings").close();
    notice(say("forgotten"));
  } catch (error) {
    find("settings").close();
    notice(say("notForgotten", error.message));
  }
}

function showState() {
  const isRunning = running !== null;
  find("welcome").hidden = turns.length > 0;
  find("log").setAttribute("aria-busy", String(isRunning)); // read out when it is whole
  find("send").hidden = isRunning;
  find("stop").hidden = !isRunning;
  if (!find("settings").open) message.focus({ preventScroll: true });
}

function fitMessage() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

const isDown = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;

function scrollDown() {
  scroller.scrollTop = scroller.scrollHeight;
}

/** Changes the page; who reads further up stays there. */
function keepDown(change) {
  const wasDown = isDown();
  change();
  if (wasDown) requestAnimationFrame(scrollDown);
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // composing: Chinese
  event.preventDefault();
  submit();
});
message.addEventListener("input", () => keepDown(fitMessage));
window.addEventListener("keydown", (event) => {
  const isForUs = event.key === "Escape" && !event.isComposing && !find("settings").open;
  if (isForUs) running?.abort();
});
find("stop").addEventListener("click", () => running?.abort());
find("new").addEventListener("click", startAnew);
find("forget").addEventListener("click", forget);
window.addEventListener("pagehide", () => {
  if (!running) return;
  keep();
  running.abort(); // by ourselves: the browser's end of it looks like a fault
});
find("model").addEventListener("change", showModel);
find("open-settings").addEventListener("click", () => find("settings").showModal());
find("settings").addEventListener("click", (event) => {
  if (event.target === find("settings")) find("settings").close(); // beside the drawer
});
find("settings").addEventListener("close", () => {
  if (!models.length) {
    notice("");
    loadModels(); // perhaps with a key now
  }
  message.focus();
});
find("attach").addEventListener("click", () => find("files").click());
find("files").addEventListener("change", () => {
  takePictures([...find("files").files]);
  find("files").value = "";
});
takeFiles({ sign: find("drop"), isWanted: takesImages, give: takePictures });
