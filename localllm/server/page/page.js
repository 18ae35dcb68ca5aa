// The page's program: it shows the chats that the server stores, and follows the answers that the server writes.
// It talks to the routes under /api only. A model's text arrives as HTML that the server has made safe.

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 800px)");
const touch = matchMedia("(pointer: coarse)");
const HIDDEN_MS = 30_000; // after which a page in the background stops following, to free its connection

let key = sessionStorage.getItem("key") ?? localStorage.getItem("key") ?? "";
let chat = Number(location.hash.slice(1)) || null; // the id of the chat that is shown
let shown = null; // the chat as the server last described it
let model = localStorage.getItem("model") ?? "";
let parameters = {}; // of a chat that has not begun
let files = []; // to attach to the next prompt
let editing = null; // the message that is being edited
let following = null; // aborts the stream of events
let reading = 0; // numbers the readings of the chat, so that a late one is dropped
const articles = new Map(); // message id -> {element, json, blocks}

// ---- The server

class Refused extends Error {}

async function call(path, options = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const { body, ...others } = options;
  const response = await fetch(path, {
    ...others,
    method: options.method ?? (body === undefined ? "GET" : "POST"),
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
  });
  if (response.status === 401) {
    askForKey();
    throw new Refused("This server needs its API key.");
  }
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    throw new Refused(told.error ?? `The server answered with status ${response.status}.`);
  }
  return response;
}

const json = async (path, options) => (await call(path, options)).json();

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const line of parts) if (line.trim()) yield JSON.parse(line);
  }
}

function attempt(work) {
  return async (...given) => {
    try {
      return await work(...given);
    } catch (error) {
      if (error.name !== "AbortError") toast(error instanceof Refused ? error.message : "The server cannot be reached.");
    }
  };
}

// ---- Following what happens

async function follow() {
  let wait = 500;
  for (;;) {
    if (document.hidden) await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
    following = new AbortController();
    try {
      const response = await call(`/api/chats/events${chat ? `?chat=${chat}` : ""}`, { signal: following.signal });
      $("offline").hidden = true;
      wait = 500;
      for await (const event of lines(response)) {
        if (event.error) throw new Refused(event.error);
        if ("list" in event) showList();
        if ("chat" in event) readChat();
        if (event.answer) showAnswer(event.answer);
      }
    } catch (error) {
      if (following.signal.aborted) continue;
      if (error instanceof Refused) {
        tell("offline", error.message);
        if ($("key-dialog").open) await new Promise((closed) => $("key-dialog").addEventListener("close", closed, { once: true }));
      }
    }
    if (following.signal.aborted) continue;
    if ($("offline").hidden || wait > 500) tell("offline", "The server cannot be reached. Trying again …");
    await new Promise((over) => setTimeout(over, wait));
    wait = Math.min(2 * wait, 5000);
  }
}

const refollow = () => following?.abort();

let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(refollow, HIDDEN_MS);
});

// ---- The list of chats

async function showList() {
  const wanted = $("search").value.trim();
  let found;
  try {
    found = (await json(`/api/chats?search=${encodeURIComponent(wanted)}`)).chats;
  } catch (error) {
    if (error instanceof Refused) tell("offline", error.message);
    return;
  }
  if (wanted !== $("search").value.trim()) return;
  const focused = document.activeElement?.dataset?.focus;
  $("chats").replaceChildren(...found.map(chatRow));
  $("no-chats").hidden = found.length > 0;
  if (focused) document.querySelector(`[data-focus="${focused}"]`)?.focus();
}

function chatRow(row) {
  const item = element("li", { className: row.id === chat ? "shown" : "" });
  const tags = row.tags.map((tag) => `#${tag}`).join(" ");
  const under = row.answering ? "answering …" : row.found || [tags, when(row.updated)].filter(Boolean).join(" · ");
  const open = element("button", { type: "button", className: "open" }, element("b", {}, row.title), element("small", {}, under));
  open.dataset.focus = `open-${row.id}`;
  if (row.id === chat) open.setAttribute("aria-current", "true");
  open.addEventListener("click", () => openChat(row.id));
  const more = button("⋯", () => changeChat(row), `⋯ Rename, tag or delete: ${row.title}`);
  more.className = "more";
  more.dataset.focus = `more-${row.id}`;
  item.append(open, more);
  return item;
}

function when(seconds) {
  const date = new Date(1000 * seconds);
  const today = new Date().toDateString() === date.toDateString();
  return today ? date.toLocaleTimeString([], { timeStyle: "short" }) : date.toLocaleDateString();
}

function changeChat(row) {
  const title = element("input", { value: row.title, maxLength: 200, required: true, id: "chat-title" });
  const tags = element("input", { value: row.tags.join(" "), id: "chat-tags", placeholder: "work urgent" });
  const form = element("form", {}, element("label", { htmlFor: "chat-title" }, "Title"), title,
    element("label", { htmlFor: "chat-tags" }, "Tags"), tags);
  const dialog = element("dialog", {}, element("h2", { id: "change-title" }, "Change this chat"), form);
  dialog.setAttribute("aria-labelledby", "change-title");
  const remove = button("Delete", attempt(async () => {
    await json(`/api/chats/${row.id}`, { body: { deleted: true } });
    dialog.close();
    if (chat === row.id) openChat(null);
    toast(`“${row.title}” is deleted.`, "Undo", attempt(() => json(`/api/chats/${row.id}`, { body: { deleted: false } })));
  }));
  const row_ = element("div", { className: "row ending" }, element("button", { type: "submit", className: "main" }, "Save"), remove,
    button("Cancel", () => dialog.close()));
  const files = element("div", { className: "row ending wrap" }, button("Export as Markdown", () => exportChat(row, "markdown")),
    button("Export as JSON", () => exportChat(row, "json")));
  form.append(row_, files);
  form.addEventListener("submit", attempt(async (event) => {
    event.preventDefault();
    await json(`/api/chats/${row.id}`, { body: { title: title.value.trim(), tags: tags.value.split(/[\s,]+/).filter(Boolean) } });
    dialog.close();
  }));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

const exportChat = attempt(async (row, form) => {
  const response = await call(`/api/chats/${row.id}/export?form=${form}`);
  const name = decodeURIComponent(response.headers.get("content-disposition").split("''")[1]);
  const link = element("a", { download: name, href: URL.createObjectURL(await response.blob()) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
});

$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", attempt(async () => {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  const body = { name: file.name, data: await base64(file) };
  const found = await json("/api/chats/import", { body });
  if (!found.new) return toast(found.summary);
  ask("Import these chats?", element("p", {}, found.summary), "Import", attempt(async () => {
    const { chats } = await json("/api/chats/import", { body: { ...body, stores: true } });
    toast(`Imported: ${chats.length}.`);
    openChat(chats.at(-1));
  }));
}));

// ---- One chat

function openChat(id) {
  keepDraft();
  chat = id;
  shown = null;
  parameters = {};
  history.replaceState(null, "", id ? `#${id}` : location.pathname);
  articles.clear();
  $("log").replaceChildren();
  setEditing(null);
  setFiles([]);
  $("prompt").value = sessionStorage.getItem(draftName()) ?? "";
  $("title").textContent = "New chat";
  $("note").hidden = true;
  document.title = "localllm";
  $("welcome").hidden = Boolean(id);
  showState(null);
  closeSide();
  refollow();
  showList();
  if (!touch.matches) $("prompt").focus();
}

async function readChat() {
  if (!chat) return;
  const number = ++reading;
  const id = chat;
  let found;
  try {
    found = await json(`/api/chats/${id}`);
  } catch (error) {
    if (error instanceof Refused) {
      toast(error.message);
      if (number === reading && error.message.includes("no such chat")) openChat(null);
    }
    return;
  }
  if (number !== reading || id !== chat) return;
  const answered = shown?.state && !found.state;
  shown = found;
  model = found.model || model;
  $("title").textContent = found.title;
  document.title = `${found.title} – localllm`;
  $("welcome").hidden = found.messages.length > 0;
  for (const id of ["unsaved", "note"]) found[id] ? tell(id, found[id]) : ($(id).hidden = true);
  const stays = atEnd();
  showMessages(found);
  showModel();
  showState(found.state);
  if (stays) toEnd();
  if (answered) $("spoken").textContent = "The answer is complete.";
}

function showMessages(found) {
  const log = $("log");
  const kept = new Set();
  const change = found.messages.findLast((message) => message.role === "tool" && message.content.startsWith(CHANGED));
  let before = null;
  for (const [place, message] of found.messages.entries()) {
    const last = place === found.messages.length - 1;
    message.undoes = message === change;
    message.goesOn = last && (message.role === "tool" || (message.role === "assistant" && message.calls.length > 0 && found.parameters.tools === "on"));
    const running = last && Boolean(found.state) && message.role === "assistant";
    const described = JSON.stringify([message, last, running, Boolean(found.state)]);
    let known = articles.get(message.id);
    if (!known || known.json !== described) {
      const made = article(message, last, running, Boolean(found.state));
      known?.element.replaceWith(made.element);
      known = { ...made, json: described };
      articles.set(message.id, known);
    }
    const next = before ? before.nextSibling : log.firstChild;
    if (next !== known.element) log.insertBefore(known.element, next);
    before = known.element;
    kept.add(message.id);
  }
  for (const [id, known] of articles) {
    if (kept.has(id)) continue;
    known.element.remove();
    articles.delete(id);
  }
}

function article(message, last, running, busy) {
  const names = { user: "You", assistant: message.model || "Answer", tool: `Tool ${message.calls[0]?.name ?? ""}` };
  const body = element("div", { className: "body" });
  const box = element("article", { className: `message ${message.role}` }, element("h2", {}, names[message.role]));
  const thoughts = element("div");
  const reasoning = element("details", { hidden: !message.reasoning }, element("summary", {}, "Thinking"), thoughts);
  thoughts.textContent = message.reasoning;
  let blocks = [];
  if (message.role === "user") {
    body.textContent = message.content;
  } else if (message.role === "tool") {
    const changed = message.content.startsWith(CHANGED) && message.calls[0]?.name === "edit_file";
    const text = changed ? diff(element("div", { className: "diff" }), message.content.slice(CHANGED.length)) : element("div");
    if (!changed) text.textContent = message.content;
    body.append(element("details", { open: changed }, element("summary", {}, firstLine(message.content)), text));
  } else {
    blocks = message.html.map(blockOf);
    body.append(...blocks);
  }
  for (const call of message.role === "assistant" ? message.calls : []) {
    const text = element("div");
    text.textContent = JSON.stringify(call.arguments, null, 1);
    body.append(element("details", {}, element("summary", {}, `Calls ${call.name}`), text));
  }
  box.append(reasoning);
  if (message.files.length) box.append(attachedFiles(message));
  box.append(body);
  const pictures = (message.stats?.pictures ?? []).map((seen) => `${/ of sound, /.test(seen) ? "Sound" : "Picture"}: ${seen}`);
  for (const name of message.stats?.unseen ?? []) pictures.push(`Not shown to the model: ${name}`);
  for (const seen of pictures) box.append(element("p", { className: "quiet" }, seen));
  if (message.error) box.append(element("p", { className: "error" }, message.error));
  if (!running) box.append(actions(message, last, busy));
  return { element: box, blocks, body, reasoning, thoughts };
}

function blockOf(html) {
  const block = element("div", { className: "block" });
  block.innerHTML = html; // made by the server, which escapes all text of the model
  for (const code of block.querySelectorAll(".code")) {
    const head = element("div", { className: "head" }, element("span", {}, code.dataset.language ?? "code"));
    head.append(button("Copy", () => copy(code.querySelector("code").textContent, "The code is copied."), "Copy the code"));
    code.prepend(head);
    code.querySelector("pre").setAttribute("aria-label", `Code ${code.dataset.language ?? ""}`.trim());
    code.querySelector("pre").setAttribute("role", "region");
  }
  for (const wide of block.querySelectorAll(".table, div.formula")) {
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", wide.className === "table" ? "Table" : "Formula");
  }
  return block;
}

function attachedFiles(message) {
  const chips = element("div", { className: "chips" });
  for (const [place, file] of message.files.entries()) {
    const chip = element("span", { className: "chip" }, file.name);
    chips.append(chip);
    if (file.picture) {
      call(`/api/chats/${chat}/messages/${message.id}/files/${place}`)
        .then((response) => response.blob())
        .then((blob) => {
          const src = URL.createObjectURL(blob);
          if (blob.type.startsWith("audio/")) {
            chip.append(element("audio", { controls: true, src, ariaLabel: file.name }));
            return;
          }
          const image = element("img", { alt: file.name, src });
          image.addEventListener("load", () => URL.revokeObjectURL(src), { once: true });
          chip.replaceWith(image);
        })
        .catch(() => {}); // the name stays
    }
  }
  return chips;
}

function actions(message, last, busy) {
  const row = element("div", { className: "actions" });
  if (message.variants > 1) {
    const turn = (step) => attempt(() => json(`/api/chats/${chat}/turn`, { body: { message: message.id, step } }));
    const back = button("‹", turn(-1), "Previous version");
    const on = button("›", turn(1), "Next version");
    back.disabled = busy || message.variant === 1;
    on.disabled = busy || message.variant === message.variants;
    row.append(back, element("span", {}, `${message.variant} of ${message.variants}`), on);
  }
  row.append(button("Copy", () => copy(message.content, "The text is copied."), "Copy the text"));
  if (message.role === "user") {
    const edit = button("Edit", () => setEditing(message));
    edit.disabled = busy;
    row.append(edit);
  }
  if (message.role === "assistant") {
    const again = button("Regenerate", attempt(() => json(`/api/chats/${chat}/answers`, { body: { message: message.id } })));
    again.disabled = busy;
    row.append(again);
  }
  if (message.goesOn || (message.role === "assistant" && last && message.finish_reason !== "stop")) {
    const body = { continues: message.role === "assistant" };
    const more = button("Continue", attempt(() => json(`/api/chats/${chat}/answers`, { body })));
    more.disabled = busy;
    row.append(more);
  }
  if (message.undoes && toolFolder) {
    const undo = button("Undo", attempt(() => undoChange("")), "Undo the last change of a file");
    undo.disabled = busy;
    row.append(undo);
  }
  if (message.role === "assistant") {
    row.append(button("Branch", attempt(async () => {
      openChat((await json(`/api/chats/${chat}/fork`, { body: { message: message.id } })).chat);
      toast("This is a copy of the chat up to that answer.");
    }), "Branch: continue in a copy of the chat"));
    row.append(element("span", {}, figures(message.stats)));
  }
  return row;
}

function figures(stats) {
  if (!stats?.generated) return "";
  const speed = stats.speed ? `${stats.speed.toFixed(1)} tok/s` : "";
  const cached = stats.cached ? `${stats.cached} of ${stats.prompt} prompt tokens cached` : `${stats.prompt} prompt tokens`;
  return [`${stats.generated} tokens`, speed, `first after ${(stats.ttft_s ?? 0).toFixed(2)} s`, cached].filter(Boolean).join(" · ");
}

// ---- Tools

const CHANGED = "Changed:\n"; // begins the result of a call that has changed a file
let toolFolder = null; // in which tools may be used

function diff(place, text) {
  place.replaceChildren(...text.split("\n").map((line) => {
    const kind = /^(---|\+\+\+|@@)/.test(line) ? "t-gh" : line.startsWith("+") ? "t-gi" : line.startsWith("-") ? "t-gd" : "";
    return element("span", { className: kind }, `${line}\n`);
  }));
  return place;
}

function showTools() {
  const on = (shown ? shown.parameters.tools : parameters.tools) === "on";
  $("tools").hidden = !toolFolder;
  $("tools").textContent = `Tools: ${on ? "on" : "off"}`;
  $("tools").title = toolFolder ? `Files and commands in ${toolFolder}` : "";
  $("tools").setAttribute("aria-pressed", on);
}
$("tools").addEventListener("click", attempt(async () => {
  const tools = $("tools").getAttribute("aria-pressed") === "true" ? "off" : "on";
  if (chat) await json(`/api/chats/${chat}`, { body: { parameters: { tools } } });
  else parameters.tools = tools;
  showTools();
}));

let asked = ""; // what is shown, so that it is not drawn again while its reason is typed
function showQuestion(state) {
  const asking = state?.phase === "asking";
  $("asking").hidden = !asking;
  const now = asking ? JSON.stringify(state) : "";
  if (now === asked) return;
  asked = now;
  $("reason").value = "";
  if (!asking) return;
  $("question").textContent = state.question;
  $("where").textContent = `In ${state.folder}`;
  state.changes ? diff($("preview"), state.preview) : ($("preview").textContent = state.preview);
  $("preview").scrollTop = 0;
  const allow = (text, decision) => button(text, () => decide(decision));
  $("choices").replaceChildren(allow("Allow once", "once"));
  if (state.rule !== null) {
    $("choices").append(allow(`Allow in this chat: ${state.rule}`, "chat"), allow(`Always allow in this folder: ${state.rule}`, "always"));
  }
  $("spoken").textContent = `The model asks: ${state.question}`;
}

const decide = attempt(async (decision) => {
  const { preview } = JSON.parse(asked);
  await json(`/api/chats/${chat}/decision`, { body: { decision, preview, reason: $("reason").value } });
  $("prompt").focus();
});
$("refuse").addEventListener("submit", (event) => {
  event.preventDefault();
  decide("refuse");
});

async function undoChange(seen) {
  const { undone, ask } = await json(`/api/chats/${chat}/undo`, { body: { seen } });
  if (undone) return showDiff("The change is undone", undone);
  if (ask) showDiff("Undo this change of another chat?", ask, attempt(() => undoChange(ask)));
}

const showDiff = (title, text, undo) => ask(title, diff(element("div", { className: "diff", tabIndex: 0 }), text), "Undo", undo);

// ---- The answer as it is written

function showAnswer(answer) {
  const known = articles.get(answer.message);
  if (!known) return readChat();
  if (answer.from > known.blocks.length || answer.reasoning_from > known.thoughts.textContent.length) return readChat();
  const stays = atEnd();
  for (const old of known.blocks.splice(answer.from)) old.remove();
  for (const html of answer.blocks) {
    const block = blockOf(html);
    const before = known.blocks.at(-1);
    before ? before.after(block) : known.body.prepend(block);
    known.blocks.push(block);
  }
  if (answer.reasoning) {
    known.thoughts.textContent = known.thoughts.textContent.slice(0, answer.reasoning_from) + answer.reasoning;
    known.reasoning.hidden = false;
  }
  showState(answer.state);
  stays ? toEnd() : ($("latest").hidden = false);
}

function showState(state) {
  $("send").hidden = Boolean(state);
  $("stop").hidden = !state;
  $("status").textContent = state ? stateText(state) : "";
  showQuestion(state);
  showTools();
}

function stateText(state) {
  const percent = (share) => `${Math.floor(100 * share)} %`;
  switch (state.phase) {
    case "loading":
      return `Loading the model: ${state.what}, ${percent(state.share)}`;
    case "reading":
      if (state.queue_position > 0) return `Waiting: place ${state.queue_position} in the queue`;
      return `Reading the prompt: ${state.completed} of ${state.total} tokens, ${percent(state.completed / Math.max(state.total, 1))}`;
    case "writing":
      return `Writing · ${state.generated} tokens · ${state.speed.toFixed(1)} tok/s · ${state.cached} of ${state.prompt} prompt tokens cached`;
    case "asking":
      return "Waiting for your decision";
    case "calling":
      return `Calling ${state.tool} ${state.subject}`;
    default:
      return "Waiting …";
  }
}

const atEnd = () => $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight < 60;
function toEnd() {
  $("messages").scrollTop = $("messages").scrollHeight;
  $("latest").hidden = true;
}
$("messages").addEventListener("scroll", () => atEnd() && ($("latest").hidden = true));
$("latest").addEventListener("click", toEnd);

// ---- The prompt

const draftName = () => `draft ${chat ?? "new"}`;
function keepDraft() {
  if (editing) return;
  const text = $("prompt").value;
  text ? sessionStorage.setItem(draftName(), text) : sessionStorage.removeItem(draftName());
}
$("prompt").addEventListener("input", keepDraft);

const send = attempt(async () => {
  const content = $("prompt").value;
  if (!content.trim() && !files.length) return;
  if (shown?.state) return toast("An answer is still being written. Stop it first.");
  await beginning;
  if (!model) return openModels();
  const body = { content, files: files.filter((file) => !("kept" in file)) };
  const sent = [content, files];
  $("send").disabled = true;
  try {
    if (editing) {
      Object.assign(body, { edits: editing.id, kept: files.filter((file) => "kept" in file).map((file) => file.kept) });
      await json(`/api/chats/${chat}/messages`, { body });
    } else if (chat) {
      await json(`/api/chats/${chat}/messages`, { body });
    } else {
      const begun = await json("/api/chats", { body: { ...body, model, parameters } });
      sessionStorage.removeItem(draftName());
      $("prompt").value = "";
      openChat(begun.chat);
    }
  } finally {
    $("send").disabled = false;
  }
  if ($("prompt").value === sent[0]) $("prompt").value = "";
  editing = null;
  $("editing").hidden = true;
  keepDraft();
  setFiles([]);
  toEnd();
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !$("prompt").value && shown && !shown.state) {
    const last = shown.messages.findLast((message) => message.role === "user");
    if (last) {
      event.preventDefault();
      setEditing(last);
    }
  }
});
const stop = attempt(() => chat && json(`/api/chats/${chat}/stop`, { method: "POST" }));
$("stop").addEventListener("click", stop);

function setEditing(message) {
  if (!message && !editing) return;
  if (message) keepDraft();
  editing = message;
  $("editing").hidden = !message;
  $("prompt").value = message ? message.content : sessionStorage.getItem(draftName()) ?? "";
  setFiles(message ? message.files.map((file, kept) => ({ name: file.name, kept })) : []);
  $("prompt").focus();
}
$("cancel-edit").addEventListener("click", () => setEditing(null));

// ---- Files

function setFiles(list) {
  files = list;
  $("files").replaceChildren(...files.map((file) => {
    const remove = button("✕", () => setFiles(files.filter((one) => one !== file)), `Remove ${file.name}`);
    return element("li", { className: "chip" }, file.name, remove);
  }));
}

async function base64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}

async function addFiles(list) {
  const read = await Promise.all([...list].map(async (file) => ({ name: file.name, data: await base64(file) })));
  setFiles([...files, ...read]);
}
$("attach").addEventListener("click", () => $("picker").click());
$("picker").addEventListener("change", async () => {
  await addFiles($("picker").files);
  $("picker").value = "";
});
$("prompt").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) {
    event.preventDefault();
    addFiles(event.clipboardData.files);
  }
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer.files.length) addFiles(event.dataTransfer.files);
});

// ---- Models

function showModel() {
  $("model").textContent = model ? model.split("/").at(-1) : "Choose a model";
  $("model").title = model;
}

async function readModels() {
  const [tags, loaded] = await Promise.all([json("/api/tags"), json("/api/ps")]);
  const memory = new Map(loaded.models.map((row) => [row.name, row]));
  const able = tags.models.filter((row) => !row.capabilities || row.capabilities.includes("completion"));
  return able.map((row) => ({ ...row, loaded: memory.get(row.name) }));
}

const openModels = attempt(async () => {
  $("models-dialog").showModal();
  await showModels();
});

let choices = { models: [], suggestions: [] }; // memory and speed of models before they are loaded
async function showModels() {
  await drawModels();
  try {
    choices = await json("/api/chats/models");
  } catch (error) {
    if (!(error instanceof Refused)) throw error; // the models are on another server
  }
  if ($("models-dialog").open) await drawModels();
}

async function drawModels() {
  const found = await readModels();
  const focused = document.activeElement?.getAttribute("aria-label");
  const about = new Map(choices.models.map((row) => [row.name, row]));
  const measured = [...choices.models, ...choices.suggestions].some((row) => row.speed);
  $("free").textContent = choices.free
    ? `${bytes(choices.free)} of memory is free.${measured ? "" : " Run “localllm bench” once for expected speeds."}` : "";
  $("suggestions-title").hidden = !choices.suggestions.length;
  $("suggestions").replaceChildren(...choices.suggestions.map((row) => {
    const details = [row.suits, row.quantization, `${bytes(row.size)} to download`, `context ${row.context.toLocaleString()}`, row.licence];
    const get = button("Download", () => download(row.name), `Download: ${row.name}`);
    return element("li", {}, element("div", {}, row.name, element("small", {}, details.join(" · ")), expected(row)), get);
  }));
  $("models").replaceChildren(...found.map((row) => {
    const details = [row.details.parameter_size, row.details.quantization_level, bytes(row.size)];
    if (row.details.context_length) details.push(`context ${row.details.context_length.toLocaleString()}`);
    if (row.loaded) details.push(`loaded, ${bytes(row.loaded.size)} in memory`);
    if (row.capabilities?.includes("vision")) details.push("sees images");
    const text = element("div", {}, row.name, element("small", {}, details.filter(Boolean).join(" · ")));
    if (!row.loaded && about.has(row.name)) text.append(expected(about.get(row.name)));
    const use = button(row.name === model ? "In use" : "Use", () => useModel(row.name), `${row.name === model ? "In use" : "Use"}: ${row.name}`);
    use.className = row.name === model ? "" : "main";
    return element("li", {}, text, use);
  }));
  if (focused) document.querySelector(`#models-dialog [aria-label="${CSS.escape(focused)}"]`)?.focus();
}

function expected({ memory, fits, speed }) {
  const needs = memory ? `needs ${bytes(memory)} of memory${fits === false ? ", more than is free" : ""}` : "";
  const text = [needs, speed ? `about ${speed < 10 ? speed.toFixed(1) : Math.round(speed)} tok/s` : ""].filter(Boolean).join(" · ");
  return element("small", { className: fits === false ? "bad" : "" }, text);
}

const useModel = attempt(async (name) => {
  model = name;
  localStorage.setItem("model", name);
  if (chat) await json(`/api/chats/${chat}`, { body: { model: name } });
  showModel();
  $("models-dialog").close();
  $("prompt").focus();
});

function bytes(count) {
  return count >= 2 ** 30 ? `${(count / 2 ** 30).toFixed(1)} GiB` : `${Math.round(count / 2 ** 20)} MiB`;
}

let pulling = null;
$("pull").addEventListener("submit", (event) => {
  event.preventDefault();
  if (pulling) return pulling.abort();
  const name = $("pull-name").value.trim();
  if (name) download(name);
});

async function download(name) {
  if (pulling) return toast("Another download is running. Stop it first.");
  $("pull-name").value = name;
  $("models-dialog").scrollTop = 0;
  pulling = new AbortController();
  $("pulling").hidden = false;
  $("pull").querySelector("button").textContent = "Stop";
  try {
    const parts = new Map();
    for await (const line of lines(await call("/api/pull", { body: { model: name }, signal: pulling.signal }))) {
      if (line.error) throw new Refused(line.error);
      if (line.digest) parts.set(line.digest, [line.completed ?? 0, line.total]);
      const [done, all] = [...parts.values()].reduce(([d, a], [x, y]) => [d + x, a + y], [0, 0]);
      if (all) $("pull-bar").value = done / all;
      else $("pull-bar").removeAttribute("value");
      $("pull-text").textContent = all ? `${line.status}: ${bytes(done)} of ${bytes(all)}` : line.status;
    }
    $("pull-text").textContent = `${name} is here.`;
    await showModels();
  } catch (error) {
    $("pull-text").textContent = pulling.signal.aborted
      ? "Stopped. What was downloaded is kept."
      : error instanceof Refused ? error.message : "The server cannot be reached.";
  }
  pulling = null;
  $("pull").querySelector("button").textContent = "Download";
}
$("model").addEventListener("click", openModels);

// ---- Settings

let options = null;
let personaModel = ""; // of the persona that fills the settings
const openSettings = attempt(async () => {
  options = await json(`/api/chats/options?model=${encodeURIComponent(model)}`);
  $("presets").replaceChildren(...Object.entries(options.presets).map(([name, values]) =>
    button(name, () => Object.entries(values).forEach(([one, value]) => ($(`p-${one}`).value = value)))));
  $("parameters").replaceChildren(...options.parameters.filter((one) => one.name !== "system").map(parameterField));
  personaModel = "";
  $("personas-field").hidden = options.personas === null;
  $("personas").replaceChildren(...(options.personas ?? []).map((name) => button(name, attempt(async () => {
    const persona = await json(`/api/chats/saved/persona/${encodeURIComponent(name)}`);
    fillSettings({ ctx: $("p-ctx").value, ...persona.parameters });
    personaModel = persona.model;
  }))));
  fillSettings(shown ? shown.parameters : parameters);
  $("settings-error").textContent = "";
  $("settings-dialog").showModal();
});

function parameterField(one) {
  const id = `p-${one.name}`;
  const field = one.kind === "switch" ? element("select", { id, name: one.name }) : element("input", { id, name: one.name });
  if (one.kind === "switch") {
    for (const value of ["default", "on", "off"]) field.append(element("option", { value }, value));
  } else if (one.kind === "number") {
    Object.assign(field, { inputMode: one.whole ? "numeric" : "decimal", placeholder: one.default });
    field.title = `${one.low} to ${one.high}`;
  }
  return element("div", {}, element("label", { htmlFor: id }, one.name.replaceAll("_", " ")), field);
}

function fillSettings(values) {
  for (const { name, kind } of options.parameters) $(`p-${name}`).value = values[name] ?? (kind === "switch" ? "default" : "");
}

const givenSettings = () =>
  Object.fromEntries(options.parameters.map(({ name }) => [name, $(`p-${name}`).value.trim() || "default"]));

$("persona-save").addEventListener("click", attempt(async () => {
  const name = $("persona-name").value.trim();
  if (!name) return toast("Give the persona a name.");
  await json(`/api/chats/saved/persona/${encodeURIComponent(name)}`, { body: { parameters: givenSettings(), model } });
  $("persona-name").value = "";
  toast(`The persona ${name} is saved.`);
}));

$("settings-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = givenSettings();
  try {
    if (personaModel && !chat) model = personaModel;
    if (personaModel) showModel();
    if (chat) await json(`/api/chats/${chat}`, { body: { parameters: given, ...(personaModel && { model: personaModel }) } });
    else parameters = { ...(parameters.tools && { tools: parameters.tools }), ...Object.fromEntries(Object.entries(given).filter(([, value]) => value !== "default")) };
    $("settings-dialog").close();
  } catch (error) {
    $("settings-error").textContent = error instanceof Refused ? error.message : "The server cannot be reached.";
  }
});
$("settings-reset").addEventListener("click", () => fillSettings({}));
$("settings-close").addEventListener("click", () => $("settings-dialog").close());
$("settings").addEventListener("click", openSettings);

// ---- The key, which is never in an address, and kept beyond this visit only if the user says so

function askForKey() {
  if ($("key-dialog").open) return;
  $("key-text").textContent = key ? "The server does not know this key." : "This server needs its API key.";
  $("key").value = "";
  $("key-dialog").showModal();
}
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("key", key);
  $("key-keep").checked ? localStorage.setItem("key", key) : localStorage.removeItem("key");
  $("key-dialog").close();
  beginning = begin();
});

// ---- Saved prompts

$("prompts").addEventListener("click", attempt(async () => {
  const names = (await json("/api/chats/options")).prompts ?? [];
  const list = element("div", { className: "row wrap" }, ...names.map((name) => button(name, attempt(async () => {
    const { text } = await json(`/api/chats/saved/prompt/${encodeURIComponent(name)}`);
    dialog.close();
    const prompt = $("prompt");
    prompt.setRangeText(text, prompt.selectionStart, prompt.selectionEnd, "end");
    keepDraft();
    prompt.focus();
  }))));
  const name = element("input", { placeholder: "Name", maxLength: 64 });
  name.setAttribute("aria-label", "Name of a new prompt");
  const keep = button("Save the prompt below", attempt(async () => {
    if (!name.value.trim()) return toast("Give the prompt a name.");
    await json(`/api/chats/saved/prompt/${encodeURIComponent(name.value.trim())}`, { body: { text: $("prompt").value } });
    dialog.close();
    toast("The prompt is saved.");
  }));
  keep.disabled = !$("prompt").value.trim();
  const empty = names.length ? "" : element("p", { className: "quiet" }, "No prompts are saved yet.");
  const dialog = ask("Saved prompts", element("div", {}, empty, list, element("div", { className: "row" }, name, keep)));
}));

// ---- Small things

function ask(title, content, label, action) {
  const dialog = element("dialog", {}, element("h2", { id: "ask-title" }, title), content);
  dialog.setAttribute("aria-labelledby", "ask-title");
  const act = action ? [button(label, () => (dialog.close(), action()))] : [];
  dialog.append(element("div", { className: "row ending" }, ...act, button(action ? "Cancel" : "Close", () => dialog.close())));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function button(text, action, label) {
  const made = element("button", { type: "button" }, text);
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", action);
  return made;
}

const firstLine = (text) => text.split("\n", 1)[0].slice(0, 120) || "No output";

function tell(id, text) {
  $(id).textContent = text;
  $(id).hidden = false;
}

let toasting = 0;
function toast(text, label, action) {
  const [said, act] = $("toast").children;
  said.textContent = text;
  act.textContent = label ?? "Close";
  act.onclick = () => {
    $("toast").hidden = true;
    action?.();
  };
  $("toast").hidden = false;
  clearTimeout(toasting);
  toasting = setTimeout(() => ($("toast").hidden = true), 10_000);
}

async function copy(text, said) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else { // pages of the local network without TLS have no clipboard
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(said);
}

function closeSide() {
  $("side").classList.remove("open");
  $("shade").hidden = true;
  $("menu").setAttribute("aria-expanded", "false");
}
$("menu").addEventListener("click", () => {
  $("side").classList.add("open");
  $("shade").hidden = false;
  $("menu").setAttribute("aria-expanded", "true");
  $("close-side").focus();
});
for (const id of ["close-side", "shade"]) $(id).addEventListener("click", () => (closeSide(), $("menu").focus()));
$("new").addEventListener("click", () => openChat(null));
$("help").addEventListener("click", () => $("help-dialog").showModal());
let searching = 0;
$("search").addEventListener("input", () => {
  clearTimeout(searching);
  searching = setTimeout(showList, 150);
});

const THEMES = ["system", "light", "dark"];
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = `Theme: ${name}`;
  localStorage.setItem("theme", name);
}
setTheme(THEMES.find((name) => name === localStorage.getItem("theme")) ?? "system");
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]));

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if ($("side").classList.contains("open")) return closeSide();
    if (editing) return setEditing(null);
    if (shown?.state) stop();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey) {
    const wanted = { KeyN: () => openChat(null), KeyS: () => $("search").focus(), KeyM: openModels }[event.code];
    if (wanted) {
      event.preventDefault();
      if (event.code === "KeyS" && narrow.matches) $("menu").click();
      wanted();
    }
  }
});
addEventListener("hashchange", () => {
  const wanted = Number(location.hash.slice(1)) || null;
  if (wanted !== chat) openChat(wanted);
});

let begun = false;
const begin = attempt(async () => {
  const able = await readModels();
  if (!able.some((row) => row.name === model)) model = (able.find((row) => row.loaded) ?? able[0])?.name ?? "";
  showModel();
  showList();
  if (begun) refollow();
  begun = true;
  const { tools, prompts } = await json("/api/chats/options");
  toolFolder = tools;
  $("prompts").hidden = prompts === null;
  showTools();
});
$("prompt").value = sessionStorage.getItem(draftName()) ?? "";
$("welcome").hidden = Boolean(chat);
let beginning = begin();
follow();
if (!touch.matches) $("prompt").focus();
