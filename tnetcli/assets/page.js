"use strict";
// Show one image, or the list of all. Data is only put into text and attributes.
(() => {
  const PADDING = 12; // screen pixels around an image that is shown whole
  const FINEST = 16; // screen pixels for a pixel of the image, at most
  const STEP = 1.5; // of a zoom by button or key
  const SLACK = 4; // screen pixels that a click may move
  const MOST_ROWS = 1000; // of the list, until more are asked for
  const MOST_IN_STRIP = 8;

  const byId = (id) => document.getElementById(id);
  const within = (value, least, most) => Math.min(Math.max(value, least), most);
  const stage = byId("stage");
  const view = byId("view");

  const build = (element, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const make = (tag, attributes = {}, ...children) =>
    build(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) =>
    build(document.createElementNS(view.namespaceURI, tag), attributes, children);
  const isolated = (text) => make("bdi", {}, text);

  // Number formats

  const SPACE = "\u00a0";
  const grouped = (number) => number.toLocaleString("en-GB", { maximumFractionDigits: 2 });
  const counted = (number, noun) => `${grouped(number)}${SPACE}${noun}${number === 1 ? "" : "s"}`;
  const percent = (part, least = 1e-4) => {
    if (part === null) return "unknown";
    if (part > 0 && part < least) return `<${SPACE}${Number((100 * least).toPrecision(1))}${SPACE}%`;
    if (part < 1 && part >= 0.9995) return `>${SPACE}99.9${SPACE}%`;
    return `${part === 0 ? 0 : (100 * part).toPrecision(3)}${SPACE}%`;
  };
  const sized = (number, unit) => {
    const power = number < 1000 ? 0 : Math.min(Math.floor(Math.log10(number) / 3), 4);
    return `${Number((number / 1000 ** power).toPrecision(3))}${SPACE}${["", "k", "M", "G", "T"][power]}${unit}`;
  };
  const duration = (seconds) => (seconds === null ? "unknown" : `${seconds.toFixed(2)}${SPACE}s`);
  const degrees = ([longitude, latitude]) =>
    `${Math.abs(latitude).toFixed(5)}°${SPACE}${latitude < 0 ? "S" : "N"}, ` +
    `${Math.abs(longitude).toFixed(5)}°${SPACE}${longitude < 0 ? "W" : "E"}`;
  const span = (from, to) => `${grouped(from)} to ${grouped(to)}`;

  // The viewport: which pixel is in the middle, and the scale

  const camera = { x: 0, y: 0, scale: 1, atFit: true };
  let shown = null; // the data of the image
  let windows = []; // its regions, with their elements
  let extent = [0, 0, 1, 1]; // of image and regions, in pixels

  const fitScale = (place) => {
    const across = Math.max(place.width - 2 * PADDING, 1) / (extent[2] - extent[0]);
    return Math.min(across, Math.max(place.height - 2 * PADDING, 1) / (extent[3] - extent[1]));
  };
  const possible = (scale, place) =>
    within(scale, fitScale(place), Math.max(FINEST, 8 * fitScale(place)));
  const held = (middle, low, high, length, padding) =>
    length >= high - low + 2 * padding
      ? (low + high) / 2
      : within(middle, low - padding + length / 2, high + padding - length / 2);

  const aim = (x, y, scale) => {
    const place = view.getBoundingClientRect();
    if (!place.width || !place.height) return;
    camera.scale = possible(scale, place);
    camera.atFit = camera.scale <= fitScale(place) * 1.0001;
    const width = place.width / camera.scale;
    const height = place.height / camera.scale;
    const padding = PADDING / camera.scale;
    camera.x = held(x, extent[0], extent[2], width, padding);
    camera.y = held(y, extent[1], extent[3], height, padding);
    view.setAttribute("viewBox", `${camera.x - width / 2} ${camera.y - height / 2} ${width} ${height}`);
    stage.classList.toggle("moved", !camera.atFit);
  };
  const fit = () => aim((extent[0] + extent[2]) / 2, (extent[1] + extent[3]) / 2, 0);
  const move = (across, down) =>
    aim(camera.x + across / camera.scale, camera.y + down / camera.scale, camera.scale);
  const zoom = (factor, clientX, clientY) => {
    const place = view.getBoundingClientRect();
    const across = clientX === undefined ? 0 : clientX - place.left - place.width / 2;
    const down = clientY === undefined ? 0 : clientY - place.top - place.height / 2;
    const before = camera.scale;
    const scale = possible(before * factor, place);
    // What is under the pointer stays there.
    const shift = 1 / before - 1 / scale;
    aim(camera.x + across * shift, camera.y + down * shift, scale);
  };
  const zoomTo = ([x0, y0, x1, y1]) => {
    const place = view.getBoundingClientRect();
    const scale = 0.7 * Math.min(place.width / (x1 - x0), place.height / (y1 - y0));
    aim((x0 + x1) / 2, (y0 + y1) / 2, scale);
  };
  const bringIntoView = ([x0, y0, x1, y1]) => {
    const place = view.getBoundingClientRect();
    const halfWidth = place.width / camera.scale / 2;
    const halfHeight = place.height / camera.scale / 2;
    const outside =
      Math.abs((x0 + x1) / 2 - camera.x) > halfWidth || Math.abs((y0 + y1) / 2 - camera.y) > halfHeight;
    if (outside) aim((x0 + x1) / 2, (y0 + y1) / 2, camera.scale);
  };

  // Regions

  const className = (number) => shown.names[number][0];
  const classColour = (number) => shown.names[number][1];
  const isGlimpse = (each) => /\/g[0-9]+$/.test(each.path);
  const turn = (each) => `${isGlimpse(each) ? "glimpse" : "rank"} ${each.rank}`;
  const sentence = (each) =>
    `Level ${each.level}, ${turn(each)}: ${className(each.label)} ${percent(each.probability)}, ` +
    `attention ${percent(each.attention)}`;
  const facts = (each) => {
    const [x0, y0, x1, y1] = each.box;
    const pairs = [
      ["attention", percent(each.attention)],
      ["joint probability", percent(each.joint)],
      [isGlimpse(each) ? "glimpse" : "rank", `${each.rank} at level ${each.level}`],
      ["columns", `${span(x0, x1)} px`],
      ["rows", `${span(y0, y1)} px`],
    ];
    if (each.centre) pairs.push(["centre", degrees(each.centre)]);
    return pairs;
  };

  const hint = byId("hint");
  const describe = (each, clientX, clientY) => {
    const vote = make("b", {}, isolated(className(each.label)), ` ${percent(each.probability)}`);
    const lines = facts(each).map(([name, value]) => make("span", {}, `${name} ${value}`));
    hint.replaceChildren(vote, ...lines);
    hint.hidden = false;
    const place = stage.getBoundingClientRect();
    const left = clientX - place.left + 14;
    const top = clientY - place.top + 14;
    const fitsBelow = top + hint.offsetHeight + 6 <= place.height;
    hint.style.left = `${within(left, 6, Math.max(place.width - hint.offsetWidth - 6, 6))}px`;
    hint.style.top = `${fitsBelow ? top : Math.max(top - hint.offsetHeight - 28, 6)}px`;
  };
  const windowOf = (target) => {
    const element = target instanceof Element ? target.closest(".window") : null;
    return element ? windows[Number(element.dataset.place)] : null;
  };

  const bars = (classes) =>
    classes.flatMap(([number, chance]) => {
      const bar = make("span");
      bar.style.width = `${100 * within(chance ?? 0, 0, 1)}%`;
      bar.style.background = classColour(number);
      bar.hidden = !chance;
      return [
        isolated(className(number)),
        make("div", { class: "track" }, bar),
        make("span", {}, percent(chance)),
      ];
    });
  const definitions = (pairs) =>
    pairs.flatMap(([name, value]) => [make("dt", {}, isolated(name)), make("dd", {}, isolated(value))]);

  let chosen = null;
  const mark = (each, is) => {
    each.element.classList.toggle("chosen", is);
    each.button?.classList.toggle("chosen", is);
  };
  const dismiss = () => {
    if (!chosen) return;
    mark(chosen, false);
    chosen = null;
    byId("chosen").hidden = true;
    byId("chosen").replaceChildren();
  };
  const choose = (each) => {
    dismiss();
    chosen = each;
    mark(each, true);
    const close = make("button", { type: "button", class: "close" }, "Close");
    close.addEventListener("click", () => {
      dismiss();
      each.element.focus();
    });
    const closer = make("button", { type: "button" }, "Zoom to region");
    closer.addEventListener("click", () => zoomTo(each.box));
    const figure = make("figure");
    if (each.picture) {
      const { source, width, height } = each.picture;
      const coarse = Math.max(width, height) < 128;
      const about = { alt: `The pixels of region ${each.path}`, class: coarse ? "coarse" : "" };
      figure.append(make("img", { src: source, width, height, ...about }));
    } else {
      figure.append(make("p", { class: "soft" }, "The page has no pixels of this region."));
    }
    byId("chosen").replaceChildren(
      make("h3", {}, "Region ", isolated(each.path)),
      close,
      figure,
      make("dl", {}, ...definitions(facts(each))),
      make("h4", {}, "Prediction of this region"),
      make("div", { class: "bars" }, ...bars(each.classes)),
      make("p", { class: "soft" }, `Share in the prediction: ${percent(each.share)}.`),
      closer,
    );
    byId("chosen").hidden = false;
  };

  const visible = () => windows.filter((each) => !each.group.hasAttribute("hidden"));
  const setStop = (each) => {
    for (const other of windows) other.element.setAttribute("tabindex", other === each ? "0" : "-1");
  };
  const moveFocus = (each, step) => {
    const all = visible();
    const next = all[within(all.indexOf(each) + step, 0, all.length - 1)];
    setStop(next);
    next.element.focus();
  };

  const drawWindow = (each) => {
    const [x0, y0, x1, y1] = each.box;
    const box = { x: x0, y: y0, width: x1 - x0, height: y1 - y0 };
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(each.colour.slice(at, at + 2), 16));
    const dark = 0.299 * red + 0.587 * green + 0.114 * blue < 110;
    // The whole image was not chosen, so its outline shows no attention.
    const width = each.path.includes("/") ? 1.5 + 2.5 * within(each.attention ?? 0, 0, 1) : 1;
    const casing = { stroke: dark ? "#ffffff" : "#000000", "stroke-opacity": 0.6, "stroke-width": width + 2 };
    each.element = draw(
      "g",
      { class: "window", role: "button", tabindex: -1, "data-place": each.place, "aria-label": sentence(each) },
      draw("rect", { class: "casing", ...box, ...casing }),
      draw("rect", { class: "edge", ...box, stroke: each.colour, "stroke-width": width }),
    );
    return each.element;
  };
  // Only pixels finer than those of the overview are worth laying over it.
  const drawDetail = ({ box: [x0, y0, x1, y1], picture }) => {
    const { overview } = shown;
    if (!picture || !overview || (x1 - x0) / picture.width >= shown.width / overview.width) return [];
    const box = { x: x0, y: y0, width: x1 - x0, height: y1 - y0 };
    return [draw("image", { href: picture.source, ...box, preserveAspectRatio: "none" })];
  };

  const checkbox = (words, change) => {
    const box = make("input", { type: "checkbox" });
    box.checked = true;
    box.addEventListener("change", () => change(box.checked));
    return make("label", {}, box, words);
  };
  const drawLevels = () => {
    const details = byId("details");
    details.replaceChildren();
    details.removeAttribute("hidden");
    byId("windows").replaceChildren();
    const switches = shown.drawn.map(({ level, drawn, all }) => {
      const members = windows.filter((each) => each.level === level);
      const under = draw("g", {}, ...members.flatMap(drawDetail));
      const group = draw("g", { "data-level": level });
      for (const each of members) {
        each.group = group;
        group.append(drawWindow(each));
      }
      details.append(under);
      byId("windows").append(group);
      const number = drawn === all ? grouped(all) : `${grouped(drawn)} of ${grouped(all)}`;
      const glimpses = members.filter(isGlimpse).length;
      const some = glimpses ? `, ${counted(glimpses, "glimpse")} among them` : "";
      const what = glimpses && glimpses === all ? counted(all, "glimpse") : `${number}${some}`;
      return checkbox(`level ${level} (${what})`, (on) => {
        group.toggleAttribute("hidden", !on);
        under.toggleAttribute("hidden", !on);
        hint.hidden = true;
        setStop(visible()[0]);
      });
    });
    if (details.querySelector("image")) {
      switches.push(checkbox("fine pixels", (on) => details.toggleAttribute("hidden", !on)));
    }
    byId("levels").replaceChildren(byId("levels").querySelector("legend"), ...switches);
    byId("levels").hidden = !switches.length;
    setStop(windows[0]);
  };

  const measure = () => {
    const { width, height } = shown;
    extent = [0, 0, width, height];
    // Regions may reach past the image; the square around it is shown at most.
    const beyondX = Math.max((height - width) / 2, width / 4);
    const beyondY = Math.max((width - height) / 2, height / 4);
    for (const { level, box } of windows) {
      if (level === 1) continue;
      extent[0] = Math.min(extent[0], Math.max(box[0], -beyondX));
      extent[1] = Math.min(extent[1], Math.max(box[1], -beyondY));
      extent[2] = Math.max(extent[2], Math.min(box[2], width + beyondX));
      extent[3] = Math.max(extent[3], Math.min(box[3], height + beyondY));
    }
    stage.style.aspectRatio = `${extent[2] - extent[0]} / ${extent[3] - extent[1]}`;
  };
  const drawGround = () => {
    const box = { x: 0, y: 0, width: shown.width, height: shown.height };
    const ground = shown.overview
      ? draw("image", { href: shown.overview.source, ...box, preserveAspectRatio: "none" })
      : draw("rect", { class: "blank-image", ...box });
    byId("ground").replaceChildren(ground);
  };

  // The text beside the image

  const strip = (level) => {
    const members = windows.filter((each) => each.level === level && each.picture);
    const buttons = members.slice(0, MOST_IN_STRIP).map((each) => {
      each.button = make(
        "button",
        { type: "button", "aria-label": sentence(each) },
        make("img", { src: each.picture.source, alt: "" }),
      );
      each.button.addEventListener("click", () => {
        choose(each);
        bringIntoView(each.box);
      });
      return each.button;
    });
    return buttons.length ? [make("div", { class: "strip" }, ...buttons)] : [];
  };
  const describeImage = () => {
    const story = shown.levels.map((each) => {
      const read = each.level === 1 && each.windows === 1 ? "whole image" : counted(each.windows, "region");
      const answer = make("b", {}, isolated(className(each.label)));
      return make(
        "li",
        {},
        make("p", { class: "step" }, `Level ${each.level}, ${read}`),
        make("p", {}, answer, ` ${percent(each.probability)}`),
        ...strip(each.level),
      );
    });
    // Glimpses are below the last level and have no prediction of their own.
    const listed = new Set(shown.levels.map((each) => each.level));
    for (const { level } of shown.drawn) {
      const glimpses = windows.filter((each) => each.level === level && isGlimpse(each)).length;
      if (listed.has(level) || !glimpses) continue;
      const words = `Level ${level}, ${counted(glimpses, "glimpse")} inside the regions above`;
      story.push(make("li", {}, make("p", { class: "step" }, words), ...strip(level)));
    }
    byId("story").hidden = !story.length;
    byId("story").querySelector("ol").replaceChildren(...story);
    byId("stopped").textContent = shown.stopped ? `Stopped: ${shown.stopped}.` : "";
    byId("classes").hidden = !shown.classes.length;
    byId("classes").querySelector(".bars").replaceChildren(...bars(shown.classes));
    byId("classes").querySelector("p").textContent = shown.more
      ? `${counted(shown.more, "more class").replace(/ss$/, "sses")}, each less probable.`
      : "";
    byId("warnings").hidden = !shown.warnings.length;
    byId("warnings").querySelector("ul").replaceChildren(...shown.warnings.map((each) => make("li", {}, isolated(each))));
    byId("notes").replaceChildren(...shown.notes.map((each) => make("li", {}, isolated(each))));
    byId("facts").querySelector("dl").replaceChildren(...definitions(shown.facts));
    const { cost } = shown;
    byId("cost").hidden = !cost;
    if (!cost) return;
    const lines = [
      ["regions read", grouped(cost.windows)],
      ["pixels decoded", `${sized(cost.pixels_decoded, "")} of ${sized(cost.pixels_total, "")}`],
      ["fraction decoded", percent(cost.fraction_decoded, 1e-6)],
      ["bytes read", `${sized(cost.bytes_read, "B")} of ${sized(cost.file_bytes, "B")}`],
      ["reading", duration(cost.read_seconds)],
      ["model", duration(cost.model_seconds)],
      ["total time", duration(cost.seconds)],
    ];
    const rows = lines.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value)));
    byId("cost").querySelector("tbody").replaceChildren(...rows);
  };

  const showImage = (number) => {
    dismiss();
    hint.hidden = true;
    shown = JSON.parse(byId(`image-${number}`).textContent);
    const failed = shown.status === "failed";
    windows = shown.windows.map((each, place) => ({ ...each, place }));
    byId("name").querySelector("bdi").textContent = shown.id;
    const answer = failed
      ? ["Failed"]
      : shown.label === null
      ? ["Abstained: ", isolated(shown.reason)]
      : [isolated(className(shown.label)), " ", make("span", { class: "chance" }, percent(shown.probability))];
    byId("answer").replaceChildren(...answer);
    document.querySelector(".seen").hidden = failed || shown.width < 1 || shown.height < 1;
    byId("warnings").querySelector("h3").textContent = failed ? "Why" : "Warnings";
    if (shown.error) {
      const { type, message, hint: advice } = shown.error;
      shown.warnings.unshift(`${type}: ${message}`, ...(advice ? [advice] : []));
    }
    measure();
    drawGround();
    drawLevels();
    describeImage();
    const place = (id, other) => {
      const link = byId(id);
      if (other >= 1 && other <= rows.length) link.setAttribute("href", `#image-${other}`);
      else link.removeAttribute("href");
    };
    byId("steps").hidden = rows.length === 1;
    place("previous", number - 1);
    place("next", number + 1);
    byId("position").textContent = `${grouped(number)} of ${grouped(rows.length)}`;
    byId("image").hidden = false;
    fit();
  };

  // The list of all images

  const rows = Array.from(document.querySelectorAll("script.row"), (block) => {
    const row = JSON.parse(block.textContent);
    row.text = [row.id, row.label, row.status, row.reason].join("\n").toLowerCase();
    return row;
  });
  const COLUMNS = [
    { key: "id", title: "Image" },
    { key: "label", title: "Prediction" },
    { key: "probability", title: "Probability", show: percent },
    { key: "windows", title: "Regions", show: grouped },
    { key: "fraction", title: "Decoded", show: (part) => percent(part, 1e-6) },
    { key: "status", title: "Status" },
  ];
  const anyPreview = rows.some((row) => row.preview);
  const words = new Intl.Collator("en", { numeric: true });
  const order = { key: "", falling: false };
  let limit = MOST_ROWS;

  const compare = (a, b) => {
    const [one, other] = [a[order.key], b[order.key]];
    const unknown = (one === null || one === "") - (other === null || other === "");
    if (unknown) return unknown; // last in both directions
    const sign = order.falling ? -1 : 1;
    return sign * (typeof one === "string" ? words.compare(one, other) : one - other);
  };
  const cells = (row) =>
    COLUMNS.map(({ key, title, show }) => {
      if (key === "id") {
        const link = make("a", { href: `#image-${row.number}` }, isolated(row.id));
        const entry = make("div", { class: "entry" }, link);
        if (row.preview) entry.prepend(make("img", { src: row.preview, alt: "", loading: "lazy" }));
        else if (anyPreview) entry.prepend(make("span", { class: "blank" }));
        return make("td", {}, entry);
      }
      const value = row[key];
      const cell = make("td", { class: show ? "number" : "", "data-title": title });
      if (key === "status" && row.status !== "ok") {
        cell.classList.add("failed");
        cell.append(row.status, row.reason ? ": " : "", isolated(row.reason));
      } else if (value !== null && value !== "") {
        cell.append(isolated(show ? show(value) : value));
      }
      return cell;
    });
  const rowOf = (row) => (row.element ??= make("tr", { "data-number": row.number }, ...cells(row)));

  const showRows = () => {
    const wanted = byId("filter").value.trim().toLowerCase();
    const found = rows.filter((row) => row.text.includes(wanted));
    if (order.key) found.sort(compare);
    document.querySelector("#rows tbody").replaceChildren(...found.slice(0, limit).map(rowOf));
    byId("found").textContent = `${grouped(found.length)} of ${counted(rows.length, "image")}`;
    const left = found.length - limit;
    byId("more").hidden = left <= 0;
    byId("more").textContent = `Show ${grouped(Math.min(left, MOST_ROWS))} more`;
  };
  const heads = COLUMNS.map(({ key, title, show }) => {
    const button = make("button", { type: "button" }, title);
    const head = make("th", { scope: "col", class: show ? "number" : "" }, button);
    button.addEventListener("click", () => {
      order.falling = order.key === key && !order.falling;
      order.key = key;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order.falling ? "descending" : "ascending");
      showRows();
    });
    return head;
  });
  const totals = () => {
    const done = rows.filter((row) => row.status !== "failed");
    const tally = new Map();
    for (const { status, label } of done) {
      const answer = status === "abstained" ? "(abstained)" : label;
      tally.set(answer, (tally.get(answer) ?? 0) + 1);
    }
    const most = [...tally].sort((a, b) => b[1] - a[1]);
    const named = most.slice(0, 6).flatMap(([label, number], at) => [at ? ", " : ": ", isolated(label), ` ${grouped(number)}`]);
    const failed = rows.length - done.length;
    byId("totals").replaceChildren(
      `${counted(done.length, "image")} done`,
      ...named,
      most.length > 6 ? ", …" : "",
      failed ? `; ${grouped(failed)} failed` : "",
    );
  };

  // The address selects the list or an image, so that the back button works.

  let last = 0;
  const go = (first) => {
    const [, digits] = /^#image-(\d+)$/.exec(location.hash) ?? [];
    const number = rows.length === 1 ? 1 : Number(digits ?? 0);
    byId("list").hidden = byId("image").hidden = true;
    if (number >= 1 && number <= rows.length) {
      showImage(number);
      last = number;
      if (!first) byId("answer").focus({ preventScroll: true });
      window.scrollTo(0, 0);
    } else {
      byId("list").hidden = false;
      showRows();
      const link = document.querySelector(`#rows tr[data-number="${last}"] a`);
      if (!first) (link ?? byId("list-title")).focus();
    }
  };

  // Pointer and keyboard

  const pointers = new Map();
  let dragged = false;
  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.target.closest("button")) return;
    if (!pointers.size) dragged = false;
    pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  });
  stage.addEventListener("pointermove", (event) => {
    const from = pointers.get(event.pointerId);
    const to = { x: event.clientX, y: event.clientY };
    if (!from) {
      const each = windowOf(event.target);
      if (each && event.pointerType === "mouse") describe(each, to.x, to.y);
      else hint.hidden = true;
      return;
    }
    if (!dragged && Math.hypot(to.x - from.x, to.y - from.y) < SLACK) return;
    dragged = true;
    hint.hidden = true;
    stage.setPointerCapture(event.pointerId);
    stage.classList.add("dragging");
    const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    if (other) {
      const apart = (point) => Math.max(Math.hypot(point.x - other.x, point.y - other.y), 1);
      zoom(apart(to) / apart(from), (to.x + other.x) / 2, (to.y + other.y) / 2);
      move((from.x - to.x) / 2, (from.y - to.y) / 2);
    } else {
      move(from.x - to.x, from.y - to.y);
    }
    pointers.set(event.pointerId, to);
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (!pointers.size) stage.classList.remove("dragging");
  };
  stage.addEventListener("pointerup", release);
  stage.addEventListener("pointercancel", release);
  stage.addEventListener("pointerleave", (event) => {
    if (!stage.hasPointerCapture(event.pointerId)) release(event);
    hint.hidden = true;
  });
  stage.addEventListener("click", (event) => {
    const each = dragged ? null : windowOf(event.target);
    if (!each) return;
    choose(each);
    setStop(each);
  });
  stage.addEventListener(
    "wheel",
    (event) => {
      // At the smallest scale the wheel scrolls the page.
      if (camera.atFit && event.deltaY > 0 && !event.ctrlKey) return;
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 30 : 1;
      zoom(Math.exp(within(-event.deltaY * lines, -240, 240) / 400), event.clientX, event.clientY);
    },
    { passive: false },
  );
  stage.addEventListener("focusin", (event) => {
    const each = windowOf(event.target);
    if (!each || !event.target.matches(":focus-visible")) return;
    bringIntoView(each.box);
    const place = each.element.getBoundingClientRect();
    describe(each, place.left + place.width / 2, Math.min(place.bottom, stage.getBoundingClientRect().bottom) - 20);
  });
  stage.addEventListener("focusout", () => (hint.hidden = true));

  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const each = windowOf(event.target);
    const arrow = ARROWS[event.key];
    if (event.key === "+" || event.key === "=") zoom(STEP);
    else if (event.key === "-") zoom(1 / STEP);
    else if (event.key === "0") fit();
    else if (each && arrow) moveFocus(each, arrow[0] + arrow[1]);
    else if (each && event.key === "Home") moveFocus(each, -Infinity);
    else if (each && event.key === "End") moveFocus(each, Infinity);
    else if (each && (event.key === "Enter" || event.key === " ")) choose(each);
    else if (arrow && event.target === stage) move(80 * arrow[0], 80 * arrow[1]);
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    hint.hidden = true;
    const inside = byId("chosen").contains(document.activeElement);
    const back = chosen;
    dismiss();
    if (inside) back.element.focus();
  });

  byId("closer").addEventListener("click", () => zoom(STEP));
  byId("farther").addEventListener("click", () => zoom(1 / STEP));
  byId("fit").addEventListener("click", fit);
  byId("filter").addEventListener("input", () => {
    limit = MOST_ROWS;
    showRows();
  });
  byId("more").addEventListener("click", () => {
    limit += MOST_ROWS;
    showRows();
  });

  const theme = byId("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const nameTheme = () => (theme.textContent = isDark() ? "\u25d0 Light" : "\u25d0 Dark");
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  system.addEventListener("change", nameTheme);
  nameTheme();

  const scale = JSON.parse(byId("attention").textContent);
  byId("ramp").style.background = `linear-gradient(to right, ${scale.join(", ")})`;
  new ResizeObserver(() => {
    if (shown) aim(camera.x, camera.y, camera.atFit ? 0 : camera.scale);
  }).observe(stage);
  window.addEventListener("hashchange", () => go(false));
  byId("loading").hidden = true;
  document.querySelector("#rows thead tr").append(...heads);
  totals();
  go(true);
})();
