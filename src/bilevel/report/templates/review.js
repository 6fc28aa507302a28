"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const total = data.index.length;
  const DROP = -1; // a decision is null, DROP, or the class that the example has after it
  const CHUNK = 24; // cards made and removed together; whole rows of 1 to 4 columns
  const FIELDS = 8; // fields of a card that are seen without unfolding
  const NARROW = 48; // pictures up to this side are drawn with sharp pixels
  const NAME = 60; // signs of a name on a card; a longer one loses its middle
  const PRINTED = 12; // chunks that go to the printer

  const by = (id) => document.getElementById(id);
  const feed = by("feed"), chooser = by("chooser"), wanted = by("wanted"), choices = by("choices");
  const given = by("given"), suggested = by("suggested"), state = by("state"), search = by("search");
  const say = (text) => { by("message").textContent = text; };
  const number = (count) => count.toLocaleString("en");
  const percent = (share) => `${Math.round(100 * share)}%`;
  // A row of a table or an array is called by its number, to which its key adds a checksum.
  const own = (p) => (data.key[p].split("-")[0] === String(data.index[p]) ? "" : data.key[p]);
  const named = (p) => (own(p) ? `${number(data.index[p])}, ${own(p)}` : number(data.index[p]));
  const short = (key) => {
    const signs = Array.from(key);
    if (signs.length <= NAME) return key;
    return `${signs.slice(0, NAME / 3).join("")}…${signs.slice((-2 * NAME) / 3).join("")}`;
  };
  const make = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };

  // ---- decisions, kept in the browser if it allows this

  const memory = `bilevel-review:${data.run}`;
  const place = new Map(data.index.map((index, p) => [String(index), p]));
  const decisions = new Array(total).fill(null);
  const steps = []; // what to undo, last first: each a list of [position, decision before]
  let kept = true, saved = true;

  const kind = (p) => {
    if (decisions[p] === null) return null;
    if (decisions[p] === DROP) return "drop";
    return decisions[p] === data.label[p] ? "keep" : "relabel";
  };

  function remember() {
    const found = {};
    decisions.forEach((decision, p) => { if (decision !== null) found[data.index[p]] = decision; });
    try {
      localStorage.setItem(memory, JSON.stringify(found));
      kept = true;
    } catch {
      kept = false;
    }
    by("forgetful").hidden = kept;
  }

  function recall(text) {
    let found;
    try {
      found = JSON.parse(text ?? localStorage.getItem(memory)) ?? {};
    } catch {
      found = {};
    }
    decisions.fill(null);
    for (const [index, decision] of Object.entries(found)) {
      const known = Number.isInteger(decision) && decision >= DROP && decision < data.classes.length;
      if (place.has(index) && known) decisions[place.get(index)] = decision;
    }
  }

  function change(changes) {
    const real = changes.filter(([p, decision]) => decisions[p] !== decision);
    if (real.length) {
      steps.push(real.map(([p]) => [p, decisions[p]]));
      real.forEach(([p, decision]) => { decisions[p] = decision; });
      written(real.map(([p]) => p));
    }
    return real.length;
  }

  function undo() {
    const step = steps.pop();
    if (!step) return say("There is nothing to undo.");
    step.forEach(([p, decision]) => { decisions[p] = decision; });
    written(step.map(([p]) => p));
    const first = step[0][0];
    if (rank[first] >= 0) focus(first);
    return say(step.length === 1 ? `Undone: ${named(first)}.` : `Undone: ${number(step.length)} decisions.`);
  }

  function written(positions) {
    saved = false;
    remember();
    for (const p of positions) if (cards.has(p)) dress(p, cards.get(p));
    refresh();
  }

  // ---- which suspects are shown

  let shown = [], rank = new Int32Array(total).fill(-1), current = 0;

  function refresh() {
    const text = search.value.trim().toLowerCase();
    const wants = (p) =>
      (given.value === "" || data.label[p] === Number(given.value)) &&
      (suggested.value === "" || data.suggested[p] === Number(suggested.value)) &&
      (state.value === "all" || (decisions[p] === null) === (state.value === "undecided")) &&
      (text === "" || String(data.index[p]) === text || data.key[p].toLowerCase().includes(text));
    const before = shown;
    shown = [];
    for (let p = 0; p < total; p++) if (wants(p)) shown.push(p);
    rank = new Int32Array(total).fill(-1);
    shown.forEach((p, i) => { rank[p] = i; });
    const inside = feed.contains(document.activeElement);
    if (rank[current] < 0) point(shown.find((p) => p > current) ?? shown[shown.length - 1] ?? 0);
    if (before.length !== shown.length || before.some((p, i) => p !== shown[i])) arrange();
    if (inside && !feed.contains(document.activeElement)) {
      if (shown.length) focus(current);
      else state.focus();
    }
    tell();
  }

  function tell() {
    const counts = { keep: 0, drop: 0, relabel: 0 };
    for (let p = 0; p < total; p++) if (decisions[p] !== null) counts[kind(p)]++;
    const done = counts.keep + counts.drop + counts.relabel;
    by("progress").textContent =
      `${number(done)} of ${number(total)} reviewed: ${number(counts.keep)} kept, ` +
      `${number(counts.drop)} dropped, ${number(counts.relabel)} relabelled`;
    document.querySelector(".meter .kept").style.width = `${(100 * counts.keep) / total}%`;
    document.querySelector(".meter .dropped").style.width = `${(100 * counts.drop) / total}%`;
    document.querySelector(".meter .relabelled").style.width = `${(100 * counts.relabel) / total}%`;
    const open = shown.filter((p) => decisions[p] === null);
    const other = open.filter((p) => data.suggested[p] !== data.label[p]);
    by("shown").textContent =
      `${number(shown.length)} of ${number(total)} shown, ${number(open.length)} of them undecided.`;
    const words = {
      relabel: [other, `Relabel all ${number(other.length)} as suggested`],
      drop: [open, `Drop all ${number(open.length)}`],
      keep: [open, `Keep all ${number(open.length)}`],
    };
    for (const button of document.querySelectorAll("[data-bulk]")) {
      const [positions, text] = words[button.dataset.bulk];
      button.textContent = text;
      button.disabled = !positions.length;
    }
    by("undo").disabled = !steps.length;
    by("next").disabled = done === total;
    for (const button of document.querySelectorAll("[data-save]")) button.disabled = !done;
    by("nothing").hidden = shown.length > 0;
    by("clear").hidden = !given.value && !suggested.value && !search.value && state.value === "all";
  }

  // ---- the cards: only chunks near the window, and the one with the current card, have any

  const cards = new Map(); // position -> element
  const chunks = []; // elements; those with children are filled
  const inSight = new Set(); // chunks near the window
  const home = () => Math.floor(rank[current] / CHUNK); // the chunk of the current card
  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const k = chunks.indexOf(target);
      if (k < 0) continue;
      if (isIntersecting) inSight.add(target);
      else inSight.delete(target);
      if (isIntersecting) fill(k);
      else if (k !== home()) empty(k);
    }
  }, { rootMargin: "900px 0px" });
  let height = 0, columns = 1;

  function arrange() {
    const count = Math.ceil(shown.length / CHUNK), before = chunks.length;
    while (chunks.length > count) {
      const element = chunks.pop();
      near.unobserve(element);
      inSight.delete(element);
      element.remove();
    }
    while (chunks.length < count) {
      const element = make("div", undefined, "chunk");
      chunks.push(element);
      feed.append(element);
    }
    chunks.forEach((element, k) => { if (!inSight.has(element) && k !== home()) empty(k); });
    chunks.forEach((element, k) => { if (element.firstChild) fill(k, true); });
    if (count) fill(home());
    for (const [p, card] of cards) if (!card.isConnected) cards.delete(p);
    if (count !== before) reserve();
    chunks.slice(before).forEach((element) => near.observe(element));
  }

  function fill(k, anew = false) {
    const element = chunks[k];
    if (element.firstChild && !anew) return;
    element.style.height = "";
    const content = shown.slice(k * CHUNK, (k + 1) * CHUNK).map((p) => {
      const card = cards.get(p) ?? born(p);
      card.setAttribute("aria-posinset", rank[p] + 1);
      card.setAttribute("aria-setsize", shown.length);
      return card;
    });
    element.replaceChildren(...content);
  }

  function empty(k) {
    const element = chunks[k];
    if (!element.firstChild) return;
    element.style.height = `${element.offsetHeight}px`;
    for (const card of element.children) cards.delete(Number(card.dataset.position));
    element.replaceChildren();
  }

  // Chunks without cards take the height that they are going to have.
  function reserve() {
    const first = chunks.find((element) => element.firstChild);
    if (!first) return;
    const style = getComputedStyle(first);
    columns = style.gridTemplateColumns.split(" ").length;
    const rows = Math.ceil(first.children.length / columns);
    const gap = parseFloat(style.rowGap) || 0;
    height = (first.offsetHeight + gap) / rows;
    chunks.forEach((element, k) => {
      if (element.firstChild) return;
      const size = Math.min(CHUNK, shown.length - k * CHUNK);
      element.style.height = `${Math.ceil(size / columns) * height - gap}px`;
    });
  }

  function born(p) {
    const card = by("card").content.firstElementChild.cloneNode(true);
    const part = (name) => card.querySelector(name);
    card.dataset.position = p;
    part(".given").textContent = data.classes[data.label[p]];
    part(".proposed").textContent = data.classes[data.suggested[p]];
    part(".sure").textContent = percent(data.confidence[p]);
    part(".importance").textContent = data.importance[p].toFixed(3);
    part(".index").textContent = `#${data.index[p]}`;
    part(".key").textContent = short(own(p));
    part(".name").title = data.key[p];
    if (data.pictures) part(".picture").append(picture(p));
    if (data.fields) part(".top").after(...fields(data.fields[p]));
    part('[data-do="relabel"]').disabled = data.suggested[p] === data.label[p];
    part('[data-do="relabel"]').title = `Relabel as ${data.classes[data.suggested[p]]}`;
    cards.set(p, card);
    dress(p, card);
    reach(card, p === current);
    return card;
  }

  // What changes with the decision.
  function dress(p, card) {
    const is = kind(p);
    if (is) card.dataset.is = is;
    else delete card.dataset.is;
    const label = decisions[p] === null ? "" : data.classes[decisions[p]];
    const verdict = { keep: "Kept", drop: "Dropped", relabel: `Relabelled as ${label}` }[is] ?? "Undecided";
    card.querySelector(".verdict").textContent = verdict;
    const as = is === "relabel" && decisions[p] !== data.suggested[p] ? "other" : is;
    for (const button of card.querySelectorAll("[data-do]")) {
      button.setAttribute("aria-pressed", String(button.dataset.do === as));
    }
    card.setAttribute("aria-label",
      `Example ${named(p)}. Given ${data.classes[data.label[p]]}, suggested ${data.classes[data.suggested[p]]}, ` +
      `confidence ${percent(data.confidence[p])}, importance ${data.importance[p].toFixed(3)}. ${verdict}.`);
  }

  function fields(pairs) {
    const list = (some) => {
      const element = make("dl", undefined, "features");
      for (const [name, text] of some) element.append(make("dt", name), make("dd", text));
      for (const child of element.children) child.dir = "auto";
      return element;
    };
    if (pairs.length <= FIELDS + 1) return [list(pairs)];
    const more = make("details", undefined, "more");
    more.append(make("summary", `${pairs.length - FIELDS} more`));
    more.addEventListener("toggle", () => {
      if (more.open && !more.querySelector("dl")) more.append(list(pairs.slice(FIELDS)));
    });
    return [list(pairs.slice(0, FIELDS)), more];
  }

  const loading = [];
  function sheet(k) {
    loading[k] ??= (async () => {
      const image = new Image();
      image.src = data.pictures.sheets[k];
      await image.decode();
      return image;
    })();
    return loading[k];
  }

  function picture(p) {
    const { width, height: tall, across, down, columns: wide, rows } = data.pictures;
    const canvas = make("canvas");
    canvas.width = width;
    canvas.height = tall;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Picture of example ${data.index[p]}`);
    if (Math.max(width, tall) <= NARROW) canvas.className = "tiny";
    const i = p % (wide * rows);
    sheet(Math.floor(p / (wide * rows))).then((image) => {
      const x = across * (i % wide), y = down * Math.floor(i / wide);
      canvas.getContext("2d").drawImage(image, x, y, width, tall, 0, 0, width, tall);
    });
    return canvas;
  }

  // ---- the current card: the one that keys act on and that Tab reaches

  function reach(card, isCurrent) {
    card.classList.toggle("current", isCurrent);
    card.tabIndex = isCurrent ? 0 : -1;
    for (const inner of card.querySelectorAll("button, summary")) inner.tabIndex = isCurrent ? 0 : -1;
  }

  let fresh = true; // the current card has not had the focus

  function point(p) {
    const left = home();
    if (cards.has(current)) reach(cards.get(current), false);
    current = p;
    fresh = true;
    if (cards.has(current)) reach(cards.get(current), true);
    if (chunks[left] && left !== home() && !inSight.has(chunks[left])) empty(left);
  }

  function focus(p) {
    point(p);
    fill(home());
    const card = cards.get(p);
    card.focus({ preventScroll: true }); // without a jump; then no further than is needed
    card.scrollIntoView({ block: "nearest" });
  }

  function move(count) {
    const i = Math.min(Math.max(rank[current] + count, 0), shown.length - 1);
    if (shown.length) focus(shown[i]);
  }

  function next(from = current) {
    const open = (p) => decisions[p] === null;
    if (fresh && rank[current] >= 0 && open(current)) return focus(current);
    const p = shown.find((q) => q > from && open(q)) ?? shown.find(open);
    if (p !== undefined) return focus(p);
    if (rank[current] >= 0) focus(current);
    return say(decisions.includes(null) ? "All that are shown are reviewed." : "All are reviewed.");
  }

  // A key never decides on a card that is out of view: it shows the current card, or the first undecided one.
  function begin(inHand) {
    const p = inHand && decisions[current] === null ? current : shown.find((q) => decisions[q] === null);
    if (p === undefined) return next();
    focus(p);
    return say("Press the key again to decide on this one.");
  }

  function onScreen(card) {
    if (!card) return false;
    const box = card.getBoundingClientRect();
    return box.bottom > by("bar").getBoundingClientRect().bottom + 20 && box.top < innerHeight - 20;
  }

  // ---- deciding

  function decide(p, decision, goOn) {
    const after = decisions[p] === decision ? null : decision; // the same again takes it back
    say("");
    change([[p, after]]);
    if (goOn && after !== null) next(p);
  }

  function act(p, what, goOn) {
    if (what === "keep") decide(p, data.label[p], goOn);
    else if (what === "drop") decide(p, DROP, goOn);
    else if (what === "other") ask(p, goOn);
    else if (data.suggested[p] !== data.label[p]) decide(p, data.suggested[p], goOn);
    else say("The suggested label is the given one; keep, drop, or choose another.");
  }

  function bulk(what) {
    const changes = [];
    for (const p of shown) {
      if (decisions[p] !== null || (what === "relabel" && data.suggested[p] === data.label[p])) continue;
      changes.push([p, { keep: data.label[p], drop: DROP, relabel: data.suggested[p] }[what]]);
    }
    const count = change(changes);
    const word = { keep: "kept", drop: "dropped", relabel: "relabelled" }[what];
    say(`${number(count)} ${word}. Undo takes all of them back.`);
  }

  // ---- choosing another label

  let asking = null;

  function ask(p, goOn) {
    asking = { p, goOn };
    by("asked-of").textContent = `Example ${named(p)}; given ${data.classes[data.label[p]]}.`;
    if (data.pictures) chooser.querySelector(".picture").replaceChildren(picture(p));
    wanted.value = "";
    offer();
    chooser.showModal();
    wanted.focus();
    choices.scrollTop = 0;
  }

  function offer() {
    const text = wanted.value.trim().toLowerCase();
    const names = data.classes.map((name) => name.toLowerCase());
    const found = names.map((_, c) => c).filter((c) => names[c].includes(text));
    const order = (c) => (names[c] === text ? 0 : names[c].startsWith(text) ? 1 : 2);
    found.sort((a, b) => order(a) - order(b) || a - b);
    choices.replaceChildren(...found.map((c) => {
      const choice = make("li", data.classes[c]);
      choice.id = `choice-${c}`;
      choice.dir = "auto";
      choice.dataset.label = c;
      choice.setAttribute("role", "option");
      if (c === data.label[asking.p]) choice.append(" ", make("small", "(given: keep)"));
      else if (c === data.suggested[asking.p]) choice.append(" ", make("small", "(suggested)"));
      return choice;
    }));
    choose(text ? choices.firstElementChild : null);
  }

  function choose(choice) {
    for (const each of choices.children) each.setAttribute("aria-selected", String(each === choice));
    if (choice) {
      wanted.setAttribute("aria-activedescendant", choice.id);
      choice.scrollIntoView({ block: "nearest" });
    } else wanted.removeAttribute("aria-activedescendant");
  }

  function take(choice) {
    if (!choice) return;
    const { p, goOn } = asking;
    chooser.close();
    const label = Number(choice.dataset.label);
    if (decisions[p] !== label) decide(p, label, goOn);
  }

  // ---- decisions.csv

  const HEADER = ["index", "key", "decision", "label"];
  const cell = (text) => (/[",\r\n]|^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

  function table() {
    const decided = [];
    for (let p = 0; p < total; p++) if (decisions[p] !== null) decided.push(p);
    decided.sort((a, b) => data.index[a] - data.index[b]);
    const rows = decided.map((p) => [
      String(data.index[p]), data.key[p], kind(p), decisions[p] === DROP ? "" : data.classes[decisions[p]],
    ]);
    return [HEADER, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
  }

  function save() {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([table()], { type: "text/csv;charset=utf-8" }));
    link.download = "decisions.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    saved = true;
    say("Saved as decisions.csv.");
  }

  function parse(text) {
    const rows = [[]];
    let value = "", quoted = false, i = text.charCodeAt(0) === 0xfeff ? 1 : 0;
    const end = () => { rows[rows.length - 1].push(value); value = ""; };
    for (; i < text.length; i++) {
      const sign = text[i];
      if (quoted) {
        if (sign !== '"') value += sign;
        else if (text[i + 1] === '"') value += text[++i];
        else quoted = false;
      } else if (sign === '"') quoted = true;
      else if (sign === ",") end();
      else if (sign === "\n" || sign === "\r") {
        if (sign === "\r" && text[i + 1] === "\n") i++;
        end();
        rows.push([]);
      } else value += sign;
    }
    end();
    return rows.filter((row) => row.length > 1 || row[0] !== "");
  }

  // The text as it is in a saved file, which cannot hold half a surrogate pair.
  const wellFormed = (text) => new TextDecoder().decode(new TextEncoder().encode(text));

  function load(text) {
    const [head = [], ...rows] = parse(text);
    const at = HEADER.map((name) => head.indexOf(name));
    const missing = HEADER[at.indexOf(-1)];
    if (missing) return say(`The file has no column "${missing}"; it is not a saved decisions.csv.`);
    const names = data.classes.map(wellFormed), changes = [];
    for (const row of rows) {
      const [index, key, decision, name] = at.map((i) => row[i] ?? "");
      const p = place.get(index);
      const label = { drop: DROP, keep: data.label[p] }[decision] ?? names.indexOf(name);
      const known = ["keep", "drop", "relabel"].includes(decision) && (decision !== "relabel" || label >= 0);
      if (p !== undefined && known && wellFormed(data.key[p]) === key) changes.push([p, label]);
    }
    change(changes);
    const missed = rows.length - changes.length;
    const rest = missed ? ` ${number(missed)} skipped: they do not name a suspect of this page and a label.` : "";
    return say(`${number(changes.length)} decisions read.${rest}`);
  }

  // ---- what the user does

  function options() {
    for (const [select, labels] of [[given, data.label], [suggested, data.suggested]]) {
      const counts = new Array(data.classes.length).fill(0);
      labels.forEach((label) => counts[label]++);
      data.classes.forEach((name, c) => {
        if (!counts[c]) return;
        const option = make("option", `${name} (${number(counts[c])})`);
        option.value = c;
        select.append(option);
      });
    }
  }

  feed.addEventListener("click", (event) => {
    const card = event.target.closest(".suspect");
    if (!card) return;
    point(Number(card.dataset.position));
    const button = event.target.closest("[data-do]");
    if (button) act(current, button.dataset.do, false);
    else if (!event.target.closest("summary") && String(getSelection()) === "") card.focus({ preventScroll: true });
  });
  feed.addEventListener("focusin", (event) => {
    const card = event.target.closest(".suspect");
    if (card && Number(card.dataset.position) !== current) point(Number(card.dataset.position));
    fresh = false;
  });

  const writing = (element) => element.closest("input:not([type=checkbox]), select, textarea, [contenteditable]");
  const moves = { ArrowLeft: () => -1, ArrowRight: () => 1, ArrowUp: () => -columns, ArrowDown: () => columns };
  const acts = { k: "keep", d: "drop", r: "relabel", l: "other" };

  document.addEventListener("keydown", (event) => {
    const { target, key } = event;
    if (event.defaultPrevented || event.isComposing || chooser.open || writing(target) || !by("keys").checked) return;
    const letter = key.toLowerCase();
    if ((event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey && letter === "z") {
      event.preventDefault();
      return void undo();
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (letter === "u") return void undo();
    if (letter === "n") return void next();
    const inside = feed.contains(target);
    const sideways = key === "ArrowLeft" || key === "ArrowRight";
    if (!(letter in acts) && !(key in moves && (inside || (sideways && !target.closest(".scroll"))))) return;
    const seen = onScreen(cards.get(current));
    if (letter in acts && (!seen || (!inside && decisions[current] !== null))) {
      event.preventDefault();
      return void begin(inside);
    }
    if (!inside && !seen) {
      const first = shown.find((p) => onScreen(cards.get(p)));
      if (first === undefined) return;
      event.preventDefault();
      return void focus(first);
    }
    if (rank[current] < 0 || (event.repeat && !(key in moves))) return;
    event.preventDefault();
    if (key in moves) move(inside ? moves[key]() : 0);
    else act(current, acts[letter], true);
  });

  for (const control of [given, suggested, state]) control.addEventListener("change", refresh);
  let typing;
  search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(refresh, 120); });
  by("filters").addEventListener("submit", (event) => { event.preventDefault(); refresh(); });
  by("filters").addEventListener("reset", () => setTimeout(() => { refresh(); given.focus(); }));
  for (const button of document.querySelectorAll("[data-bulk]")) {
    button.addEventListener("click", () => bulk(button.dataset.bulk));
  }
  for (const button of document.querySelectorAll("[data-save]")) button.addEventListener("click", save);
  by("undo").addEventListener("click", () => undo());
  by("next").addEventListener("click", () => next());
  by("load").addEventListener("click", () => by("file").click());
  by("file").addEventListener("change", async () => {
    const [file] = by("file").files;
    if (file) load(await file.text());
    by("file").value = "";
  });

  wanted.addEventListener("input", offer);
  wanted.addEventListener("keydown", (event) => {
    const selected = choices.querySelector('[aria-selected="true"]');
    if (event.key === "ArrowDown") choose(selected?.nextElementSibling ?? choices.firstElementChild);
    else if (event.key === "ArrowUp") choose(selected?.previousElementSibling ?? choices.lastElementChild);
    else if (event.key === "Enter") take(selected);
    else return;
    event.preventDefault();
  });
  choices.addEventListener("click", (event) => take(event.target.closest("li")));

  // The pairs: one stop of the Tab key, arrows within.
  const pairs = [...document.querySelectorAll("button.pair")];
  pairs.forEach((button, i) => {
    button.tabIndex = i ? -1 : 0;
    button.addEventListener("click", () => {
      const there = data.label.some((c, p) => c === Number(button.dataset.given)
        && data.suggested[p] === Number(button.dataset.suggested));
      if (!there) return say(`None of them is among the ${number(data.label.length)} worst on this page.`);
      given.value = button.dataset.given;
      suggested.value = button.dataset.suggested;
      search.value = "";
      state.value = "all";
      refresh();
      by("filters").scrollIntoView();
      if (shown.length) {
        point(shown[0]);
        cards.get(shown[0]).focus({ preventScroll: true });
      }
      say(`Given ${data.classes[given.value] ?? ""}, suggested ${data.classes[suggested.value] ?? ""}.`);
    });
    button.addEventListener("keydown", (event) => {
      const to = pairs[{ ArrowLeft: i - 1, ArrowUp: i - 1, ArrowRight: i + 1, ArrowDown: i + 1 }[event.key]];
      if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      button.tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    });
  });

  let width = 0;
  new ResizeObserver(() => {
    if (feed.clientWidth === width) return;
    width = feed.clientWidth;
    reserve();
  }).observe(feed);
  addEventListener("storage", (event) => {
    if (event.key !== memory) return;
    recall(event.newValue ?? "{}");
    for (const [p, card] of cards) dress(p, card);
    refresh();
  });
  addEventListener("beforeunload", (event) => {
    if (!kept && !saved) event.preventDefault();
  });
  addEventListener("beforeprint", () => {
    chunks.slice(0, PRINTED).forEach((_, k) => fill(k));
    const count = chunks.reduce((sum, element) => sum + element.children.length, 0);
    by("printed").textContent = `${number(count)} of ${number(shown.length)} suspects are printed.`;
  });

  recall();
  saved = true;
  remember();
  options();
  refresh();
  const first = shown.find((p) => decisions[p] === null);
  if (first !== undefined) point(first);
  document.documentElement.dataset.ready = "true";
})();
