// The page's own words, in English and Chinese. Answers of a model never pass through here.

const ENGLISH = {
  skip: "Skip to the message",
  model: "Model",
  new: "New conversation",
  newShort: "New",
  settings: "Settings",
  welcome: "What would you like to know?",
  talksTo: "You are talking to {0}.",
  keys: "Enter sends · Shift + Enter starts a line · Escape stops an answer",
  conversation: "Conversation",
  attached: "Images of the next message",
  message: "Message",
  hint: "Write a message",
  attach: "Add images",
  image: "Image",
  send: "Send",
  stop: "Stop the answer",
  caution: "A model can be wrong. Check what matters.",
  close: "Close",
  system: "System message",
  systemHint: "How the model is to answer",
  temperature: "Temperature",
  topP: "Top p",
  maxTokens: "Most tokens",
  seed: "Seed",
  serverOwn: "the server's",
  random: "none",
  stopStrings: "Stop strings, one a line",
  stopHelp: "An answer ends before the first of them. \\n is a line break.",
  key: "API key",
  keyHelp: "Only when the server asks for one. Kept in this tab, gone when it closes.",
  drop: "Drop images here",
  you: "You",
  answer: "Answer",
  copy: "Copy",
  copied: "Copied",
  notCopied: "The browser does not let this page copy",
  copyAnswer: "Copy the answer",
  retry: "Answer again",
  edit: "Change the message",
  remove: "Remove this image",
  pictureOf: "Image {0}",
  answered: "The answer is complete",
  stopped: "Stopped",
  cut: "Cut at the longest length",
  empty: "The model had nothing to say",
  tokens: "{0} tokens",
  speed: "{0} tokens/s",
  first: "first after {0} s",
  prompt: "{0} in the prompt",
  unreachable: "The server cannot be reached: {0}",
  broken: "The connection ended before the answer did",
  noModels: "The server names no model",
  status: "The server answered {0}",
  noImages: "{0} takes no images",
  notImage: "{0} is no PNG, JPEG, WebP or GIF image",
  unreadable: "{0} cannot be read as an image",
};

const CHINESE = {
  skip: "跳到输入框",
  model: "模型",
  new: "新对话",
  newShort: "新对话",
  settings: "设置",
  welcome: "想了解什么？",
  talksTo: "正在与 {0} 对话。",
  keys: "Enter 发送 · Shift + Enter 换行 · Esc 停止回答",
  conversation: "对话",
  attached: "下一条消息的图片",
  message: "消息",
  hint: "输入消息",
  attach: "添加图片",
  image: "图片",
  send: "发送",
  stop: "停止回答",
  caution: "模型可能出错，重要内容请核实。",
  close: "关闭",
  system: "系统消息",
  systemHint: "希望模型怎样回答",
  temperature: "温度",
  topP: "Top p",
  maxTokens: "最多 token 数",
  seed: "随机种子",
  serverOwn: "由服务器决定",
  random: "无",
  stopStrings: "停止字符串，每行一个",
  stopHelp: "回答在最先出现的一个之前结束。\\n 表示换行。",
  key: "API 密钥",
  keyHelp: "仅在服务器要求时填写。只保存在此标签页，关闭即消失。",
  drop: "将图片拖放到这里",
  you: "你",
  answer: "回答",
  copy: "复制",
  copied: "已复制",
  notCopied: "浏览器不允许本页复制",
  copyAnswer: "复制回答",
  retry: "重新回答",
  edit: "修改消息",
  remove: "移除这张图片",
  pictureOf: "图片 {0}",
  answered: "回答完毕",
  stopped: "已停止",
  cut: "已达到最大长度",
  empty: "模型没有回答任何内容",
  tokens: "{0} 个 token",
  speed: "{0} token/秒",
  first: "{0} 秒后开始",
  prompt: "提示 {0} 个",
  unreachable: "无法连接服务器：{0}",
  broken: "回答尚未结束，连接已断开",
  noModels: "服务器没有提供模型",
  status: "服务器返回 {0}",
  noImages: "{0} 不接受图片",
  notImage: "{0} 不是 PNG、JPEG、WebP 或 GIF 图片",
  unreadable: "无法读取图片 {0}",
};

export const isChinese = navigator.language.toLowerCase().startsWith("zh");
const WORDS = isChinese ? CHINESE : ENGLISH;

/** A phrase, with its places filled in. */
export function say(name, ...values) {
  return WORDS[name].replace(/\{(\d)\}/g, (_, place) => String(values[place]));
}

/** Writes the words into a part of the page: texts, labels for screen readers, placeholders. */
export function translate(root) {
  for (const node of root.querySelectorAll("[data-word]")) {
    node.textContent = say(node.dataset.word);
  }
  for (const node of root.querySelectorAll("[data-label]")) {
    node.setAttribute("aria-label", say(node.dataset.label));
    if (node.localName === "button") node.title = say(node.dataset.label);
  }
  for (const node of root.querySelectorAll("[data-hint]")) {
    node.placeholder = say(node.dataset.hint);
  }
}

/** A fresh copy of a template's one element, with its words. */
export function copyOf(id) {
  const copy = document.getElementById(id).content.firstElementChild.cloneNode(true);
  translate(copy);
  return copy;
}
