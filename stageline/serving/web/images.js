// The pictures of the next message: picked, dropped or pasted; kept as data URLs.

import { copyOf, say } from "./words.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_PIXELS_A_SIDE = 2048; // a phone's photograph would fill the server's largest body

export class Pictures {
  #list;
  #onError;
  urls = [];

  /** @param list the element that shows thumbnails. */
  constructor(list, onError) {
    this.#list = list;
    this.#onError = onError;
  }

  async add(files) {
    for (const file of files) {
      if (!KINDS.includes(file.type)) {
        this.#onError(say("notImage", file.name));
        continue;
      }
      try {
        this.urls.push(await urlOf(file));
      } catch {
        this.#onError(say("unreadable", file.name));
      }
    }
    this.#show();
  }

  set(urls) {
    this.urls = [...urls];
    this.#show();
  }

  #show() {
    this.#list.hidden = this.urls.length === 0;
    this.#list.replaceChildren(
      ...this.urls.map((url, place) => {
        const item = copyOf("thumbnail");
        item.querySelector("img").src = url;
        item.querySelector("img").alt = say("pictureOf", place + 1);
        item.querySelector("button").onclick = () => this.set(this.urls.toSpliced(place, 1));
        return item;
      }),
    );
  }
}

/** Listens for files that come over the window by drag and drop or from the clipboard. */
export function takeFiles({ sign, isWanted, give }) {
  let depth = 0; // dragenter and dragleave come for each element that is passed
  const carriesFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const onto = (name, act) =>
    window.addEventListener(name, (event) => {
      if (!carriesFiles(event)) return;
      event.preventDefault(); // or the browser leaves the page for the picture
      act(event);
    });
  const show = (change) => {
    depth = Math.max(0, depth + change);
    sign.hidden = depth === 0 || !isWanted();
  };
  onto("dragenter", () => show(1));
  onto("dragleave", () => show(-1));
  onto("dragover", () => {});
  onto("drop", (event) => {
    show(-depth);
    give([...event.dataTransfer.files]);
  });
  window.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    give(files);
  });
}

async function urlOf(file) {
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  const scale = MOST_PIXELS_A_SIDE / Math.max(bitmap.width, bitmap.height);
  if (scale >= 1) return dataUrl(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(bitmap.width * scale);
  canvas.height = Math.round(bitmap.height * scale);
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/jpeg" ? "image/jpeg" : "image/png", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
