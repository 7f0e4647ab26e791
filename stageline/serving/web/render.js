// A model's text -> DOM nodes: paragraphs, lists, headings, code. Text is only ever set as
// textContent, so nothing that a model or a user writes becomes markup.

import { copyOf, say } from "./words.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const BULLET = /^\s{0,3}[-*+]\s+(.*)$/;
const NUMBER = /^\s{0,3}(\d{1,9})[.)]\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const INLINE = /(`+)(?!`)(.+?)(?<!`)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]+?)(?<=[^\s*])\*(?![\w*])|\bhttps?:\/\/[^\s<>"'`)\]]+[^\s<>"'`)\].,;:!?]/g;

/** Shows a text in an element; blocks that did not change keep their nodes, and so a selection. */
export function render(element, text) {
  const blocks = blocksOf(text);
  blocks.forEach((block, place) => {
    const signature = JSON.stringify(block);
    const old = element.children[place];
    if (old?.signature === signature) return;
    const node = build(block, old);
    node.signature = signature;
    if (!old) element.append(node);
    else if (node !== old) old.replaceWith(node);
  });
  while (element.children.length > blocks.length) element.lastElementChild.remove();
}

/** Copies a text; says on the button whether it worked. */
export async function copyText(text, button) {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    isCopied = copyFromField(text); // no permission, or a page of another machine without https
  }
  const said = isCopied ? "copied" : "notCopied";
  document.getElementById("said").textContent = say(said);
  button.classList.add(said);
  setTimeout(() => button.classList.remove(said), 1600);
}

function copyFromField(text) {
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.className = "unseen";
  field.value = text;
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    field.remove();
    focused?.focus();
  }
}

/** Text -> blocks: {kind, lines or text, language}. A fence that is still open is code already. */
export function blocksOf(text) {
  const blocks = [];
  let code = null;
  for (const line of text.split("\n")) {
    if (code) {
      const end = line.trim();
      if (end.startsWith(code.fence) && end.replaceAll(code.fence[0], "") === "") code = null;
      else code.block.lines.push(line);
      continue;
    }
    const fence = FENCE.exec(line);
    if (fence) {
      code = { fence: fence[1], block: { kind: "code", language: fence[2], lines: [] } };
      blocks.push(code.block);
      continue;
    }
    add(blocks, line);
  }
  return blocks.filter((block) => block.kind !== "gap");
}

function add(blocks, line) {
  const last = blocks.at(-1);
  const heading = HEADING.exec(line);
  const bullet = BULLET.exec(line);
  const number = NUMBER.exec(line);
  if (!line.trim()) {
    if (last?.kind !== "gap") blocks.push({ kind: "gap" });
  } else if (heading) {
    blocks.push({ kind: "heading", lines: [heading[2]] });
  } else if (bullet || number) {
    const kind = bullet ? "bullets" : "numbers";
    const list = [last, last?.kind === "gap" ? blocks.at(-2) : null].find((one) => one?.kind === kind);
    if (list) list.lines.push(bullet ? bullet[1] : number[2]);
    else blocks.push({ kind, start: bullet ? 1 : Number(number[1]), lines: [bullet ? bullet[1] : number[2]] });
  } else if (last && ["bullets", "numbers"].includes(last.kind) && /^\s/.test(line)) {
    last.lines[last.lines.length - 1] += `\n${line.trim()}`;
  } else if (last?.kind === "text") {
    last.lines.push(line);
  } else {
    blocks.push({ kind: "text", lines: [line] });
  }
}

function build(block, old) {
  if (block.kind === "code") return codeBlock(block, old);
  if (block.kind === "heading") return withText("h4", block.lines[0]);
  if (block.kind === "text") return withText("p", block.lines.join("\n"));
  const list = document.createElement(block.kind === "bullets" ? "ul" : "ol");
  if (block.kind === "numbers") list.start = block.start;
  list.append(...block.lines.map((line) => withText("li", line)));
  return list;
}

function codeBlock(block, old) {
  const text = block.lines.join("\n");
  // the same node while it grows: it may be scrolled or hold the focus
  const node = old?.classList.contains("code") ? old : copyOf("code-block");
  node.querySelector(".language").textContent = block.language;
  node.querySelector("code").textContent = text;
  const button = node.querySelector("button");
  button.onclick = () => copyText(text, button);
  return node;
}

function withText(name, text) {
  const node = document.createElement(name);
  let done = 0;
  for (const found of text.matchAll(INLINE)) {
    node.append(text.slice(done, found.index), inline(found));
    done = found.index + found[0].length;
  }
  node.append(text.slice(done));
  return node;
}

function inline([whole, ticks, code, strong, emphasis]) {
  const name = ticks ? "code" : strong ? "strong" : emphasis ? "em" : "a";
  const node = document.createElement(name);
  node.textContent = code ?? strong ?? emphasis ?? whole;
  if (name === "a") {
    node.href = whole; // begins with http, see INLINE
    node.rel = "noopener noreferrer";
    node.target = "_blank";
  }
  return node;
}
