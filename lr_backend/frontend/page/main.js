// The form, the race, and the theme.

import { Answer } from "./answer.js";
import { element, find, seconds } from "./dom.js";
import { span } from "./timeline.js";

const RIVAL = "ar";
const about = await told();
let running = null; // the AbortController of what is asked now
let lanes = [];

/** What the server says of itself; null: it does not answer. */
async function told() {
  try {
    const response = await fetch("page/about.json");
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

function prepare() {
  find("model").textContent = about.model;
  document.title = `lookahead: ${about.model}`;
  find("question").value = about.question;
  for (const id of ["mode", "rival"]) {
    find(id).append(...about.modes.map((mode) => element("option", {}, mode)));
  }
  find("rival").value = RIVAL;
  find("max-tokens").max = about.max_tokens;
  find("max-tokens").value = about.default_tokens;
  find("temperature").placeholder = about.default_temperature;
  find("key-field").hidden = !about.keyed;
  find("pace").hidden = !about.pace;
  find("pace").querySelector("span").textContent = `${about.pace}.`;
}

/** What a request says but for its mode. A field that is empty is left out. */
function asked() {
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  return {
    model: about.model,
    messages: [{ role: "user", content: find("question").value }],
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0],
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function run(modes) {
  if (running) {
    return;
  }
  running = new AbortController();
  busy(true);
  const body = asked();
  lanes = modes.map((mode) => new Answer(mode));
  find("lanes").replaceChildren(...lanes.map((lane) => lane.element));
  find("lanes").classList.toggle("two", lanes.length > 1);
  find("verdict").hidden = find("outcomes").hidden = true;
  find("origins").hidden = false;
  say(lanes.length > 1 ? `${modes[0]} races against ${modes[1]} …` : `Asking with mode ${modes[0]} …`);
  const key = find("key").value;
  const runs = lanes.map((lane) => lane.run({ ...body, lookahead: { mode: lane.mode, trace: true } }, key, running.signal));
  const ends = await Promise.all(runs);
  running = null;
  busy(false);
  drawTimelines();
  const wrong = ends.find((end) => end !== "answered");
  if (wrong) {
    say(wrong === "stopped" ? "Stopped." : `No answer: ${wrong}`);
  } else if (lanes.length > 1) {
    judge(body.seed);
  } else {
    const [{ tookS, cut }] = lanes;
    say(`Answered in ${seconds(tookS)}, with seed ${body.seed}${cut && `, but ${cut}`}.`);
  }
}

/** All on one scale. */
function drawTimelines() {
  const done = lanes.filter((lane) => lane.trace);
  const spanMs = Math.max(...done.map((lane) => span(lane.trace)));
  done.forEach((lane) => lane.drawTimeline(spanMs, lanes.length > 1));
  find("outcomes").hidden = !done.length;
}

/** Who was faster; nobody, if the answers were cut at different places. */
function judge(seed) {
  const [faster, slower] = [...lanes].sort((one, two) => one.tookS - two.tookS);
  const ratio = (slower.tookS / faster.tookS).toFixed(2);
  const times = `${seconds(faster.tookS)} against ${seconds(slower.tookS)}`;
  const cuts = lanes.map((lane) => `${lane.mode} was ${lane.cut || "not cut"}`).join(", ");
  const isFair = faster.cut === slower.cut;
  const won = `${faster.mode} answered ${ratio} times as fast as ${slower.mode}: ${times}.`;
  const note = `Both ran at once on the same engines, with seed ${seed}. Times are this browser's, to the last byte.`;
  const part = (name) => find("verdict").querySelector(name);
  part(".ratio").hidden = !isFair;
  part(".ratio").textContent = `${ratio}×`;
  part(".sentence").textContent = isFair ? won : `No winner: ${cuts}.`;
  part(".note").textContent = isFair && faster.cut ? `${note} Both answers were ${faster.cut}.` : note;
  find("verdict").hidden = false;
  const end = isFair ? `: ${faster.mode} was ${ratio} times as fast as ${slower.mode}` : ` without a winner: ${cuts}`;
  say(`The race is over${end}.`);
}

function say(text) {
  find("status").textContent = text;
}

function busy(yes) {
  for (const id of ["ask", "race"]) {
    find(id).setAttribute("aria-disabled", String(yes));
  }
  find("stop").setAttribute("aria-disabled", String(!yes));
}

function listen() {
  find("asking").addEventListener("submit", (event) => {
    event.preventDefault();
    run([find("mode").value]);
  });
  find("race").addEventListener("click", () => run([find("mode").value, find("rival").value]));
  find("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      running?.abort();
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target === find("question")) {
      run([find("mode").value]);
    }
  });
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (!running && width !== window.innerWidth) {
      width = window.innerWidth;
      drawTimelines();
    }
  });
}

/** Dark or light as the system has it, until the button says otherwise. */
function theme() {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => find("theme").setAttribute("aria-pressed", String(isDark()));
  system.addEventListener("change", show);
  find("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  show();
}

theme();
if (about) {
  prepare();
  listen();
} else {
  find("asking").hidden = true;
  say("The server does not answer. Reload the page to try again.");
}
document.documentElement.dataset.ready = "";
