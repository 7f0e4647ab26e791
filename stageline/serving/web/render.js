// A model's Markdown -> DOM nodes. The text is never trusted: markup in it stays text, and what the
// libraries make of it passes DOMPurify, whose policy is the only one that the page's headers allow.

import "./vendor/katex.min.js";
import "./vendor/markdown-it.umd.min.js";
import "./vendor/purify.min.js";
import hljs from "./vendor/highlight.min.js";
import { copyOf, say } from "./words.js";

const { DOMPurify, katex, markdownit } = globalThis;
const MOST_LETTERS = 200_000; // of an answer; a longer one is shown as it is
const MOST_COLOURED = 50_000; // letters of one piece of code
// of a formula: the end of one that stays open is not looked for further down
const MOST_MATH_LETTERS = 2_000;
const MOST_MATH_LINES = 50;
const MATH = [
  { open: "$$", close: "$$", isBlock: true },
  { open: "\\[", close: "\\]", isBlock: true },
  { open: "\\(", close: "\\)", isBlock: false },
  { open: "$", close: "$", isBlock: false },
];
const SAFE_URL = /^(?:https?:|mailto:)/i;
const TAGS = `p br hr h4 h5 h6 ul ol li blockquote table thead tbody tr th td pre code span strong em s a
  math mrow mi mn mo ms mtext mspace mfrac msqrt mroot msub msup msubsup mover munder munderover mtable mtr
  mtd mstyle mpadded mphantom menclose mmultiscripts mprescripts`;
const ATTRIBUTES = `class start align colspan display displaystyle scriptlevel mathvariant mathcolor
  mathbackground mathsize stretchy fence separator symmetric accent accentunder lspace rspace minsize maxsize
  movablelimits largeop linethickness width height depth voffset columnalign columnspacing columnlines
  rowspacing rowlines rowalign notation`;
const CLEAN = {
  ALLOWED_TAGS: TAGS.split(/\s+/),
  ALLOWED_ATTR: ["href", ...ATTRIBUTES.split(/\s+/)],
  ADD_URI_SAFE_ATTR: ATTRIBUTES.split(/\s+/),
  ALLOWED_URI_REGEXP: SAFE_URL,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ADD_FORBID_CONTENTS: ["annotation"], // KaTeX's copy of the source
  RETURN_DOM_FRAGMENT: true,
};

const markdown = markdownit({ breaks: true, linkify: true, highlight });
markdown.validateLink = (url) => SAFE_URL.test(url);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // README.md is no site
// of our own: the known plugins take all that follows `$$x$$ and` for one formula
markdown.inline.ruler.before("escape", "math", inlineMath);
const alt = ["paragraph", "reference", "blockquote", "list"];
markdown.block.ruler.after("blockquote", "math", blockMath, { alt });
const rules = markdown.renderer.rules;
rules.math = (tokens, place) => formula(tokens[place].content, tokens[place].meta.isBlock);
// a picture from elsewhere would tell its owner who reads: a link in its place
rules.image = (tokens, place) => {
  const { escapeHtml } = markdown.utils;
  const url = tokens[place].attrGet("src");
  return `<a href="${escapeHtml(url)}">${escapeHtml(tokens[place].content || url)}</a>`;
};
rules.heading_open = rules.heading_close = (tokens, place, options, env, self) => {
  const token = tokens[place];
  const level = Math.min(6, Number(token.tag[1]) + 3); // below the page's own
  return self.renderToken([Object.assign(token, { tag: `h${level}` })], 0, options);
};
rules.th_open = rules.td_open = (tokens, place, options, env, self) => {
  const side = tokens[place].attrGet("style")?.split(":")[1]; // inline styles are forbidden
  tokens[place].attrs = side ? [["align", side]] : null;
  return self.renderToken(tokens, place, options);
};

function highlight(code, language) {
  if (!hljs.getLanguage(language) || code.length > MOST_COLOURED) return "";
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

function inlineMath(state, silent) {
  const form = MATH.find(({ open }) => state.src.startsWith(open, state.pos));
  if (!form) return false;
  const begin = state.pos + form.open.length;
  const length = lengthOf(state.src.slice(begin, begin + MOST_MATH_LETTERS), form.close);
  if (length < 1) return false;
  const content = state.src.slice(begin, begin + length);
  // $5 and $6 are money, as pandoc has it
  const isMoney = /^\s|\s$|`/.test(content) || /\d/.test(state.src.charAt(begin + length + 1));
  if (form.open === "$" && isMoney) return false;
  if (!silent) Object.assign(state.push("math", "", 0), { content, meta: form });
  state.pos = begin + length + form.close.length;
  return true;
}

function blockMath(state, first, last, silent) {
  const start = state.bMarks[first] + state.tShift[first];
  const form = MATH.find(({ open, isBlock }) => isBlock && state.src.startsWith(open, start));
  let content = "";
  const most = form ? Math.min(last, first + MOST_MATH_LINES) : first;
  for (let line = first; line < most; line += 1) {
    const isOut = state.sCount[line] < state.blkIndent; // of the list or quote
    if (isOut || state.isEmpty(line)) return false;
    let text = state.getLines(line, line + 1, state.blkIndent, false).trim();
    if (line === first) text = text.slice(form.open.length);
    const length = lengthOf(text, form.close);
    content += `${length < 0 ? text : text.slice(0, length)}\n`;
    if (length < 0) continue;
    if (text.length > length + form.close.length) return false; // a part of a paragraph
    if (silent) return true;
    state.line = line + 1;
    const map = [first, state.line];
    Object.assign(state.push("math", "", 0), { content, map, block: true, meta: form });
    return true;
  }
  return false;
}

/** Letters before the sign that closes a formula; -1: there is none. */
function lengthOf(text, close) {
  let end = text.indexOf(close);
  while (end > 0 && text[end - 1] === "\\") end = text.indexOf(close, end + 1);
  return end;
}

function formula(source, isBlock) {
  const [begin, end] = isBlock ? ['<span class="math">', "</span>"] : ["", ""];
  try {
    const options = { output: "mathml", displayMode: isBlock, strict: false, maxSize: 20 };
    return begin + katex.renderToString(source, options) + end;
  } catch {
    return `${begin}<code>${markdown.utils.escapeHtml(source)}</code>${end}`; // no TeX
  }
}

/** Shows an answer that grows: finished blocks keep their nodes, and so a selection. */
export class Formatted {
  #element;
  #nodes = []; // one a block
  #numLetters = 0; // of the blocks that no further text can change
  #numBlocks = 0;

  constructor(element) {
    this.#element = element;
  }

  /** @param isWhole nothing follows: all blocks are looked at again, for links that came later. */
  show(text, isWhole) {
    if (text === "" || isWhole) this.#numLetters = this.#numBlocks = 0;
    try {
      if (text.length > MOST_LETTERS) throw new RangeError("too long to be formatted");
      this.#format(text.replace(/\r\n?/g, "\n").slice(this.#numLetters));
    } catch {
      // too deep for a library: the words matter more than their form
      const plain = document.createElement("p");
      plain.className = "plain";
      plain.textContent = text;
      this.#element.replaceChildren(plain);
      this.#nodes = [plain];
      this.#numLetters = this.#numBlocks = 0;
    }
  }

  #format(rest) {
    const blocks = blocksOf(rest);
    blocks.forEach(({ html }, place) => this.#put(html, this.#numBlocks + place));
    const numBlocks = this.#numBlocks + blocks.length;
    for (const node of this.#nodes.splice(numBlocks)) node.remove();
    if (blocks.length < 2) return;
    this.#numBlocks = numBlocks - 1; // the last one may still grow
    this.#numLetters += lettersOf(rest, blocks.at(-1).line);
  }

  #put(html, place) {
    const old = this.#nodes[place];
    if (old?.html === html) return;
    const node = build(html);
    if (old?.matches(".code") && node.matches(".code")) {
      // the same node while it grows: it may be scrolled or hold the focus
      for (const part of ["code", ".language"]) {
        old.querySelector(part).replaceChildren(...node.querySelector(part).childNodes);
      }
      old.html = html;
      return;
    }
    if (old) old.replaceWith(node);
    else this.#element.append(node);
    this.#nodes[place] = node;
  }
}

/** Text -> its outermost blocks: {html, line}. */
function blocksOf(text) {
  const env = {}; // targets of links; one that is not whole yet must not stay
  const blocks = [];
  let group = [];
  for (const token of markdown.parse(text, env)) {
    // deeper down it would leave words out
    if (token.level >= markdown.options.maxNesting - 1) throw new RangeError("nested too deep");
    if (token.tag === "code") token.content = token.content.replace(/\n$/, ""); // fences
    group.push(token);
    if (token.level > 0 || token.nesting === 1) continue;
    const html = markdown.renderer.render(group, markdown.options, env);
    blocks.push({ html, line: group[0].map[0] });
    group = [];
  }
  return blocks;
}

/** Letters before a line. */
function lettersOf(text, line) {
  let letters = 0;
  for (; line > 0; line -= 1) letters = text.indexOf("\n", letters) + 1;
  return letters;
}

function build(html) {
  const fragment = DOMPurify.sanitize(html, CLEAN);
  for (const link of fragment.querySelectorAll("a")) {
    link.rel = "noopener noreferrer";
    link.target = "_blank";
  }
  for (const table of fragment.querySelectorAll("table")) wrap(table, "table");
  for (const code of fragment.querySelectorAll("pre > code")) dress(code);
  const node = fragment.childElementCount === 1 ? fragment.firstElementChild : wrap(fragment, "block");
  return Object.assign(node, { html });
}

function wrap(inner, name) {
  const outer = document.createElement("div");
  outer.className = name;
  if (inner.parentNode) inner.replaceWith(outer);
  outer.append(inner);
  return outer;
}

/** Code -> a box with its language and a button to copy it. */
function dress(code) {
  const box = copyOf("code-block");
  const language = /^language-(\S+)/.exec(code.className);
  box.querySelector(".language").textContent = language?.[1] ?? "";
  code.parentNode.replaceWith(box);
  box.querySelector("code").replaceChildren(...code.childNodes);
  const button = box.querySelector("button");
  button.onclick = () => copyText(box.querySelector("code").textContent, button);
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
