// The timeline of one answer: a band of its steps, and every call of draft, target and judge, from the trace.

import { element, milliseconds, svg, trimmed } from "./dom.js";

const ROW = 20, BAR = 16, GAP = 14, AXIS = 24;
const LABEL_FROM = 15; // a narrower bar carries no number
const TYPICAL_BAR = 9; // width of the median call, if there is room; then it scrolls
const MAX_WIDTH = 6000;
const TICK = 90;
const ROLES = ["draft", "target", "judge"];
const PATTERNS = { rejected: "url(#hatch)", correction: "url(#hatch)", wasted: "url(#dots)" };

/** Milliseconds that a trace spans. */
export function span(trace) {
  return Math.max(1, 1000 * trace.usage.latency_s, ...trace.calls.map((call) => call.end_ms));
}

/** Draws into a lane's section. `spanMs`: of the axis; `fits`: all of it is seen at once, so that two stand on one scale. */
export function draw(section, trace, spanMs, fits) {
  const [names, scroll] = section.querySelector(".drawing").children;
  section.hidden = false;
  const placed = layOut(trace, spanMs, scroll.clientWidth - 4, fits);
  names.replaceChildren(...placed.tracks.map((track) => roleName(track)));
  const counts = ROLES.map((role) => `${trace.calls.filter((call) => call.role === role).length} of the ${role}`).join(", ");
  const label = `Timeline of ${milliseconds(1000 * trace.usage.latency_s)} with calls: ${counts}`;
  scroll.setAttribute("aria-label", label);
  scroll.replaceChildren(drawn(placed, label));
  const [tableScroll] = section.querySelectorAll("details .scroll");
  tableScroll.setAttribute("aria-label", "Table of calls");
  tableScroll.firstElementChild.replaceChildren(...table(trace));
}

/** Everything placed, in pixels. Pure. */
export function layOut(trace, spanMs, room, fits) {
  const lengths = trace.calls.map((call) => call.end_ms - call.start_ms).filter((length) => length > 0).sort((a, b) => a - b);
  const typical = lengths[Math.floor(lengths.length / 2)] ?? spanMs;
  const width = fits ? room : Math.min(MAX_WIDTH, Math.max(room, (TYPICAL_BAR / typical) * spanMs));
  const scale = width / spanMs;
  const tracks = [];
  let y = AXIS;
  const made = [steps(trace, scale), ...ROLES.map((role) => calls(trace, role, scale)).filter((track) => track.bars.length)];
  for (const { name, bars, rows } of made) {
    tracks.push({ name, y, bars: bars.map((bar) => ({ ...bar, y: y + ROW * bar.row })) });
    y += ROW * rows + GAP;
  }
  const commits = trace.steps.map((step) => 1000 * scale * step.committed_s);
  return { width, height: y, tracks, commits, ticks: ticks(spanMs, scale) };
}

function steps(trace, scale) {
  let from = 0;
  const bars = trace.steps.map((step) => {
    const until = 1000 * step.committed_s;
    const title = `step ${step.index}: ${step.origin}, ${step.reason}, ${step.num_tokens} tokens, at ${milliseconds(until)}\n${trimmed(step.text)}`;
    const made = bar(from, until, scale, step.origin, step.index, title, 0);
    from = until;
    return made;
  });
  return { name: "answer", bars, rows: 1 };
}

function calls(trace, role, scale) {
  const free = []; // of each row: when it is free, and the step that was there last
  const bars = trace.calls
    .filter((call) => call.role === role)
    .sort((a, b) => a.start_ms - b.start_ms || a.end_ms - b.end_ms)
    .map((call) => {
      let row = free.findIndex(({ until, step }) => until <= call.start_ms && step === call.step);
      row = row < 0 ? free.findIndex(({ until }) => until <= call.start_ms) : row;
      row = row < 0 ? free.length : row;
      free[row] = { until: call.end_ms, step: call.step };
      return bar(call.start_ms, call.end_ms, scale, call.outcome, call.step, about(call), row);
    });
  return { name: role, bars, rows: Math.max(1, free.length) };
}

function bar(startMs, endMs, scale, style, label, title, row) {
  const width = Math.max(1.5, scale * (endMs - startMs) - 1);
  return { x: scale * startMs, width, style, title, row, label: width >= LABEL_FROM ? String(label) : "" };
}

function about(call) {
  const reused = call.num_reused_tokens === null ? "" : ` (${call.num_reused_tokens} reused)`;
  const lines = [
    `${call.role}: ${call.purpose.replaceAll("_", " ")} ${call.step}, ${call.outcome}`,
    `${milliseconds(call.start_ms)} to ${milliseconds(call.end_ms)}, depth ${call.depth}`,
    `${call.num_prompt_tokens} tokens in${reused}, ${call.num_tokens} out`,
  ];
  if (call.num_draft_tokens) {
    lines.push(`draft tokens: ${call.num_accepted_tokens} of ${call.num_draft_tokens} accepted`);
  }
  return lines.join("\n");
}

function ticks(spanMs, scale) {
  const wanted = TICK / scale;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const stepMs = power * [1, 2, 5, 10].find((digit) => digit * power >= wanted * (1 - 1e-9));
  return Array.from({ length: Math.floor(spanMs / stepMs) + 1 }, (_, number) => {
    const atMs = Number((number * stepMs).toPrecision(6));
    return { x: scale * atMs, label: stepMs >= 100 ? `${Number((atMs / 1000).toPrecision(6))} s` : `${atMs} ms` };
  });
}

function drawn(placed, label) {
  const { width, height, tracks } = placed;
  const picture = svg("svg", { width: width + 4, height, viewBox: `0 0 ${width + 4} ${height}`, role: "img", "aria-label": label });
  const line = (kind, x) => svg("line", { class: kind, x1: x, x2: x, y1: AXIS - 6, y2: height - GAP / 2 });
  for (const { x, label: text } of placed.ticks) {
    const late = x > width - 34;
    picture.append(line("tick", x), svg("text", { x: late ? x - 3 : x + 3, y: 12, "text-anchor": late ? "end" : "start" }, text));
  }
  picture.append(...placed.commits.map((x) => line("commit", x)));
  for (const { name, bars } of tracks) {
    picture.append(svg("g", { "data-track": name }, ...bars.map(drawnBar)));
  }
  return picture;
}

function drawnBar({ x, y, width, style, title, label }) {
  const place = { x, y, width, height: BAR, rx: Math.min(3, width / 2) };
  const group = svg("g", { "data-outcome": style }, svg("title", {}, title), svg("rect", { class: style, ...place }));
  if (PATTERNS[style] && width > 3) {
    group.append(svg("rect", { fill: PATTERNS[style], "fill-opacity": 0.55, ...place }));
  }
  if (label) {
    group.append(svg("text", { class: `in ${style}`, x: x + width / 2, y: y + 12, "text-anchor": "middle" }, label));
  }
  return group;
}

function roleName({ name, y }) {
  const made = element("div", {}, name);
  made.style.top = `${y - 1}px`;
  return made;
}

function table(trace) {
  const heads = ["role", "purpose", "step", "outcome", "start", "time", "tokens"];
  const numeric = (name) => (["step", "start", "time", "tokens"].includes(name) ? { class: "num" } : {});
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col", ...numeric(name) }, name)));
  const rows = trace.calls.map((call) => {
    const said = [call.role, call.purpose.replaceAll("_", " "), call.step, call.outcome, milliseconds(call.start_ms)];
    const cells = [...said, milliseconds(call.end_ms - call.start_ms), call.num_tokens];
    return element("tr", {}, ...cells.map((cell, number) => element("td", numeric(heads[number]), String(cell))));
  });
  return [element("thead", {}, head), element("tbody", {}, ...rows)];
}
