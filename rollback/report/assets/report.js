"use strict";
// The chart of a report: curves by step in one SVG, drawn anew for each view. Colours are the style sheet's.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const host = document.getElementById("chart");
  if (!data || !host) return;
  const SVG = "http://www.w3.org/2000/svg";
  const LEFT = 64, RIGHT = 14, FLAGS = 24, PLOT = [230, 170], GAP = 30, LANE = 14, LANES = 54, AXIS = 26;
  const tip = document.getElementById("tip"), readout = document.getElementById("readout");
  const toolbar = document.querySelector(".toolbar");

  // Data -----------------------------------------------------------------------------------------------------------
  const bytes = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer;
  const curves = data.curves.map((curve) => ({
    name: curve.name, nonfinite: curve.nonfinite,
    lines: curve.lines.map((line) => ({
      undone: line.undone, attempt: line.attempt,
      steps: new Uint32Array(bytes(line.steps)), values: new Float32Array(bytes(line.values)),
    })),
  }));
  const checkpoints = data.checkpoints.map((kind) => ({ fate: kind.fate, steps: new Uint32Array(bytes(kind.steps)) }));
  const whole = [data.first - 0.5, Math.max(data.last + 0.5, data.first + 1.5)];
  const state = { view: whole.slice(), cursor: null, log: null, undone: true, drag: null, incident: -1 };
  let width = 0;

  // Index of the first step that is not below `step`.
  const lower = (steps, step) => {
    let low = 0, high = steps.length;
    while (low < high) { const middle = (low + high) >> 1; if (steps[middle] < step) low = middle + 1; else high = middle; }
    return low;
  };
  const number = (value) => {
    if (!Number.isFinite(value)) return String(value);
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(5)));
  };
  const whole_number = (value) => (Math.round(value) || 0).toLocaleString("en"); // no minus zero

  // Scales ---------------------------------------------------------------------------------------------------------
  const x = (step) => LEFT + (step - state.view[0]) / (state.view[1] - state.view[0]) * (width - LEFT - RIGHT);
  const step_at = (place) => state.view[0] + (place - LEFT) / (width - LEFT - RIGHT) * (state.view[1] - state.view[0]);
  const nice = (span, count) => {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw)), share = raw / power;
    return (share <= 1 ? 1 : share <= 2 ? 2 : share <= 5 ? 5 : 10) * power;
  };
  function bounds(curve) {
    let low = Infinity, high = -Infinity;
    for (const line of shown(curve)) {
      // One point beyond each edge, so that a view between two points has a curve.
      const first = Math.max(0, lower(line.steps, state.view[0]) - 1);
      const last = Math.min(line.steps.length, lower(line.steps, state.view[1]) + 1);
      for (let i = first; i < last; i++) { const value = line.values[i]; if (value < low) low = value; if (value > high) high = value; }
    }
    return low <= high ? [low, high] : [0, 1];
  }
  const shown = (curve) => curve.lines.filter((line) => state.undone || !line.undone);
  function scale(curve, top, height) {
    let [low, high] = bounds(curve);
    const log = low > 0 && (state.log === null ? high / low > 50 : state.log);
    if (log) { low = Math.log10(low); high = Math.log10(high); }
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.5;
    low -= margin; high += margin;
    const y = (value) => top + height - ((log ? Math.log10(value) : value) - low) / (high - low) * height;
    const ticks = [];
    if (log && high - low >= 1) {
      for (let power = Math.ceil(low); power <= high; power++) ticks.push(10 ** power);
      if (high - low < 2.2) for (let power = Math.floor(low); power <= high; power++) for (const part of [2, 5]) {
        const tick = part * 10 ** power; if (Math.log10(tick) > low && Math.log10(tick) < high) ticks.push(tick);
      }
    } else {
      const [from, to] = log ? [10 ** low, 10 ** high] : [low, high], gap = nice(to - from, 4);
      for (let tick = Math.ceil(from / gap) * gap; tick <= to; tick += gap) if (!log || tick > 0) ticks.push(Math.abs(tick) < gap * 1e-9 ? 0 : tick);
    }
    return { y, ticks, log };
  }

  // Drawing --------------------------------------------------------------------------------------------------------
  function make(parent, name, attributes = {}, text = null) {
    const element = document.createElementNS(SVG, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== null) element.textContent = text;
    parent.appendChild(element);
    return element;
  }
  const svg = make(host, "svg", { "aria-hidden": "true", focusable: "false" });
  const total = () => FLAGS + PLOT[0] + (curves.length > 1 ? GAP + PLOT[1] : 0) + 10 + LANES + AXIS;

  // A line as a path, with the extremes of each pixel's column where points are denser than pixels.
  function path(line, y) {
    const first = Math.max(0, lower(line.steps, state.view[0]) - 1);
    const last = Math.min(line.steps.length, lower(line.steps, state.view[1]) + 1);
    if (last - first < 2) return last > first ? `M${x(line.steps[first]).toFixed(1)} ${y(line.values[first]).toFixed(1)}h.01` : "";
    const dense = last - first > 3 * width, parts = [];
    const put = (i) => parts.push(`${x(line.steps[i]).toFixed(1)} ${y(line.values[i]).toFixed(1)}`);
    for (let i = first; i < last;) {
      if (!dense) { put(i++); continue; }
      const column = Math.floor(x(line.steps[i]));
      let low = i, high = i, end = i;
      while (end < last && Math.floor(x(line.steps[end])) === column) {
        if (line.values[end] < line.values[low]) low = end;
        if (line.values[end] > line.values[high]) high = end;
        end++;
      }
      for (const each of new Set([i, Math.min(low, high), Math.max(low, high), end - 1])) put(each);
      i = end;
    }
    return "M" + parts.join("L");
  }

  function draw() {
    width = Math.max(280, host.clientWidth);
    const height = total(), right = width - RIGHT;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const clip = make(make(svg, "defs"), "clipPath", { id: "inside" });
    make(clip, "rect", { x: LEFT, y: 0, width: right - LEFT, height });
    const inner = make(svg, "g", { "clip-path": "url(#inside)" });
    const bottom = height - AXIS, gap = Math.max(1, nice(state.view[1] - state.view[0], Math.max(2, width / 130)));
    for (let tick = Math.ceil(state.view[0] / gap) * gap; tick <= state.view[1]; tick += gap) {
      make(svg, "path", { class: "grid", d: `M${x(tick).toFixed(1)} ${FLAGS}V${bottom}` });
      make(svg, "text", { x: x(tick), y: height - 8, "text-anchor": "middle" }, whole_number(tick));
    }
    for (const incident of data.incidents) {
      const from = x(incident.onset - 0.5), to = x(incident.detection + 0.5);
      if (to < LEFT || from > right) continue;
      make(inner, "rect", { class: "band", x: from, y: FLAGS, width: Math.max(1.5, to - from), height: bottom - FLAGS - LANES });
      make(inner, "path", { class: "detection", d: `M${x(incident.detection)} ${FLAGS}V${bottom - LANES}` });
    }
    let top = FLAGS;
    curves.forEach((curve, place) => {
      const size = PLOT[place], { y, ticks, log } = scale(curve, top, size);
      for (const tick of ticks) {
        if (y(tick) < top + 4 || y(tick) > top + size + 1) continue;
        make(svg, "path", { class: "grid", d: `M${LEFT} ${y(tick).toFixed(1)}H${right}` });
        make(svg, "text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, number(tick));
      }
      for (const undone of [true, false]) for (const line of shown(curve)) {
        if (line.undone === undone) make(inner, "path", { class: undone ? "line undone" : "line", d: path(line, y) });
      }
      let crosses = "", before = -Infinity;
      for (const [first, last] of curve.nonfinite.slice().sort((a, b) => a[0] - b[0])) {
        for (let place = Math.max(x(first), LEFT); place <= Math.min(x(last), right); place += 10) {
          if (place - before < 7) continue;
          crosses += `M${(place - 3.5).toFixed(1)} ${top + 8}l7 7m0 -7l-7 7`; before = place;
        }
      }
      if (crosses) make(inner, "path", { class: "cross", d: crosses });
      make(svg, "text", { class: "title", x: 12, y: top - 9 }, curve.name + (log ? " (logarithmic)" : ""));
      make(svg, "path", { class: "grid", d: `M${LEFT} ${top + size}H${right}` });
      Object.assign(curve, { y, top, size });
      top += size + GAP;
    });
    flags(svg, right);  // not clipped: one at the edge would be cut in half
    lanes(inner, bottom);
    overlay();
  }

  function flags(parent, right) {
    let before = -Infinity;
    for (const incident of data.incidents) {
      const place = x(incident.detection);
      if (place < LEFT || place > right || place - before < 17) continue;
      before = place;
      const flag = make(parent, "g", { class: "incident" });
      make(flag, "circle", { class: "flag", cx: place, cy: 13, r: 8.5 });
      make(flag, "text", { x: place, y: 17 }, incident.number);
      make(flag, "title", {}, incident.title);
      flag.addEventListener("click", () => { location.hash = `incident-${incident.number}`; });
    }
  }

  function lanes(parent, bottom) {
    const [skipped, high, low] = [3, 2, 1].map((lane) => bottom - lane * (LANE + 4));
    for (const [y, name] of [[skipped, "skipped"], [high, "ring"], [low, "attempts"]]) make(svg, "text", { x: LEFT - 8, y: y + 11, "text-anchor": "end" }, name);
    for (const [step] of data.skips) if (step >= state.view[0] && step <= state.view[1]) {
      make(parent, "path", { class: "skip", d: `M${x(step).toFixed(1)} ${skipped + 2}l-5 9h10z` });
    }
    const order = ["lost", "evicted", "candidate", "good", "drained", "discarded", "dropped", "quarantined"];
    const sorted = checkpoints.slice().sort((a, b) => order.indexOf(a.fate) - order.indexOf(b.fate));
    for (const { fate, steps } of sorted) {
      let d = "", before = -Infinity;
      for (const step of steps.slice().sort()) {
        const place = x(step);
        if (place < LEFT - 1 || place > width || place - before < 1.5) continue;
        d += `M${place.toFixed(1)} ${high + 1}v${LANE - 2}`; before = place;
      }
      if (d) make(parent, "path", { class: `checkpoint ${fate}`, d });
    }
    for (const [attempt, first, last] of data.attempts) {
      const from = Math.max(x(first - 0.5), LEFT - 2), to = Math.min(x(last + 0.5), width);
      if (to < LEFT || from > width - RIGHT) continue;
      make(parent, "rect", { class: attempt % 2 ? "attempt odd" : "attempt", x: from, y: low, width: Math.max(1, to - from), height: LANE });
      if (to - from > 24) make(parent, "text", { x: from + 6, y: low + 11 }, attempt);
    }
  }

  // The cursor, and what it points at ------------------------------------------------------------------------------
  const layer = () => svg.querySelector(".overlay") || make(svg, "g", { class: "overlay" });
  function overlay() {
    const group = layer();
    group.replaceChildren();
    if (state.drag && state.drag.to !== undefined && !state.drag.pan) {
      const [from, to] = [state.drag.from, state.drag.to].sort((a, b) => a - b);
      make(group, "rect", { class: "selection", x: from, y: FLAGS, width: to - from, height: total() - FLAGS - AXIS });
    }
    if (state.cursor === null || state.cursor < state.view[0] || state.cursor > state.view[1]) { tip.hidden = true; return; }
    const place = x(state.cursor);
    make(group, "path", { class: "cursor", d: `M${place} ${FLAGS}V${total() - AXIS}` });
    for (const curve of curves) {
      const point = nearest(curve, state.cursor);
      if (point) make(group, "circle", { class: "point", cx: x(point.step), cy: curve.y(point.value), r: 4 });
    }
    tip.textContent = describe(state.cursor).join("\n");
    tip.hidden = false;
    const left = svg.getBoundingClientRect().left - host.parentElement.getBoundingClientRect().left;
    tip.style.left = `${left + (place > width / 2 ? place - tip.offsetWidth - 14 : place + 14)}px`;
    tip.style.top = `${FLAGS + 12}px`;
  }
  function nearest(curve, step) {
    let best = null;
    for (const line of curve.lines) {
      if (line.undone) continue;
      const after = lower(line.steps, step);
      for (const i of [after - 1, after]) if (i >= 0 && i < line.steps.length) {
        const away = Math.abs(line.steps[i] - step);
        if (!best || away < best.away) best = { step: line.steps[i], value: line.values[i], away, attempt: line.attempt };
      }
    }
    return best;
  }
  function describe(step) {
    const at = Math.round(step), lines = [`step ${whole_number(at)}`], reach = (state.view[1] - state.view[0]) / width * 6 + 0.5;
    for (const curve of curves) {
      const point = nearest(curve, at), broken = curve.nonfinite.find(([first, last]) => at >= first && at <= last);
      if (point) lines.push(`${curve.name.toLowerCase()} ${number(point.value)}${point.step === at ? "" : ` (step ${whole_number(point.step)})`}`);
      if (broken) lines.push(`${curve.name.toLowerCase()} was ${broken[2]}`);
    }
    for (const incident of data.incidents) if (at >= incident.onset - reach && at <= incident.detection + reach) lines.push(incident.title);
    for (const [where, first, last] of data.skips) if (Math.abs(where - at) <= reach) lines.push(`batches ${whole_number(first)} to ${whole_number(last)} skipped`);
    return lines.slice(0, 9);
  }

  // Moving about ---------------------------------------------------------------------------------------------------
  function look(from, to) {
    const least = Math.min(8, whole[1] - whole[0]);
    let span = Math.min(Math.max(to - from, least), whole[1] - whole[0]);
    from = Math.min(Math.max((from + to - span) / 2, whole[0]), whole[1] - span);
    state.view = [from, from + span];
    draw();
  }
  const zoom = (factor, around) => {
    const middle = around ?? (state.cursor !== null && state.cursor > state.view[0] && state.cursor < state.view[1] ? state.cursor : (state.view[0] + state.view[1]) / 2);
    look(middle - (middle - state.view[0]) * factor, middle + (state.view[1] - middle) * factor);
  };
  const move = (share) => { const by = (state.view[1] - state.view[0]) * share; look(state.view[0] + by, state.view[1] + by); };
  const say = (text) => { readout.textContent = text; };
  const say_view = () => say(`steps ${whole_number(Math.max(data.first, state.view[0]))} to ${whole_number(Math.min(data.last, state.view[1]))}`);
  function show_incident(index) {
    if (!data.incidents.length) { say("there are no incidents"); return; }
    state.incident = (index + data.incidents.length) % data.incidents.length;
    show(data.incidents[state.incident]);
  }
  function show(incident) {
    const margin = Math.max(40, 2 * (incident.detection - incident.onset));
    state.cursor = incident.detection;
    look(incident.onset - margin, incident.detection + margin);
    say(describe(incident.detection).join(", "));
  }
  function step_cursor(by) {
    const middle = (state.view[0] + state.view[1]) / 2, stride = Math.max(1, Math.round((state.view[1] - state.view[0]) / 200));
    state.cursor = Math.min(Math.max(Math.round(state.cursor === null ? middle : state.cursor + by * stride), data.first), data.last);
    if (state.cursor < state.view[0]) move(-0.25); else if (state.cursor > state.view[1]) move(0.25); else overlay();
    say(describe(state.cursor).join(", "));
  }
  const toggle = (button, value) => { button.setAttribute("aria-pressed", value); draw(); };
  const actions = {
    in: () => { zoom(0.5); say_view(); }, out: () => { zoom(2); say_view(); },
    left: () => { move(-0.25); say_view(); }, right: () => { move(0.25); say_view(); },
    reset: () => { look(...whole); say_view(); },
    next: () => show_incident(state.incident + 1), previous: () => show_incident(state.incident < 0 ? -1 : state.incident - 1),
    log: (button) => toggle(button, state.log = button.getAttribute("aria-pressed") !== "true"),
    undone: (button) => toggle(button, state.undone = !state.undone),
  };
  const keys = {
    "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.reset, Escape: () => { state.cursor = null; overlay(); },
    PageUp: actions.left, PageDown: actions.right, n: actions.next, p: actions.previous,
    Home: () => { state.cursor = data.first; step_cursor(0); }, End: () => { state.cursor = data.last; step_cursor(0); },
  };

  toolbar.hidden = false;
  toolbar.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) actions[button.dataset.do](button);
  });
  host.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const key = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (arrow) step_cursor(arrow * (event.shiftKey ? 10 : 1)); else if (key) key(); else return;
    event.preventDefault();
  });
  const at = (event) => (event.clientX - svg.getBoundingClientRect().left) * width / svg.getBoundingClientRect().width;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.target.closest(".incident")) return;
    state.drag = { from: at(event), pan: event.shiftKey, view: state.view.slice() };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    const place = at(event), drag = state.drag;
    state.cursor = place >= LEFT && place <= width - RIGHT ? Math.round(step_at(place)) : null;
    if (drag && drag.pan) {
      const by = (drag.from - place) / (width - LEFT - RIGHT) * (drag.view[1] - drag.view[0]);
      look(drag.view[0] + by, drag.view[1] + by);
      return;
    }
    if (drag) drag.to = Math.min(Math.max(place, LEFT), width - RIGHT);
    overlay();
  });
  svg.addEventListener("pointerup", () => {
    const drag = state.drag;
    state.drag = null;
    if (drag && !drag.pan && drag.to !== undefined && Math.abs(drag.to - drag.from) > 4) {
      const [from, to] = [step_at(drag.from), step_at(drag.to)].sort((a, b) => a - b);
      look(from, to); say_view();
    } else overlay();
  });
  svg.addEventListener("pointercancel", () => { state.drag = null; overlay(); });
  svg.addEventListener("pointerleave", () => { if (!state.drag) { state.cursor = null; overlay(); } });
  svg.addEventListener("dblclick", actions.reset);
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, step_at(at(event)));
  }, { passive: false });
  for (const button of document.querySelectorAll("button[data-onset]")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      show({ onset: Number(button.dataset.onset), detection: Number(button.dataset.detection) });
      host.scrollIntoView({ block: "center" });
      host.focus({ preventScroll: true });
    });
  }
  new ResizeObserver(() => { if (host.clientWidth !== width) draw(); }).observe(host);
  addEventListener("beforeprint", () => { state.cursor = null; draw(); for (const each of document.querySelectorAll("details")) each.open = true; });
  draw();
})();
