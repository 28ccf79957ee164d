// One answer on its way: its clock, its steps by origin, its figures, and in the end its timeline.

import { ask, Refused } from "./api.js";
import { copied, element, seconds, share, trimmed } from "./dom.js";
import { draw } from "./timeline.js";

const CLOCK_MS = window.matchMedia("(prefers-reduced-motion: reduce)").matches ? 500 : 50;

let numLanes = 0;

export class Answer {
  constructor(mode) {
    this.mode = mode;
    this.element = copied("lane");
    this.trace = null;
    this.usage = null;
    this.counts = null;
    this.finish = null; // the server's own word: "stop", "length" or "deadline"
    this.tookS = null; // until the last byte; null: it has not come to its end
    this.firstS = null;
    this._steps = [];
    this._part("h2").textContent = mode;
    this._part("h2").id = `lane-${(numLanes += 1)}`;
    this.element.setAttribute("aria-labelledby", this._part("h2").id);
    this._part(".reasoning").hidden = this._part(".content").hidden = true;
  }

  /** Ask, and show what comes. Returns how it went: "answered", "stopped" or what was said instead. */
  async run(body, key, signal) {
    const started = performance.now();
    const elapsed = () => (performance.now() - started) / 1000;
    const show = () => (this._part(".clock").textContent = seconds(elapsed()));
    const ticking = setInterval(show, CLOCK_MS);
    this.element.setAttribute("aria-busy", "true");
    try {
      for await (const chunk of ask(body, key, signal)) {
        this._take(chunk, elapsed());
      }
      this.tookS = elapsed();
      this._figures();
      return "answered";
    } catch (error) {
      return signal.aborted ? "stopped" : this._failed(error);
    } finally {
      clearInterval(ticking);
      this._part(".clock").textContent = seconds(this.tookS ?? elapsed());
      this.element.removeAttribute("aria-busy");
    }
  }

  /** How an answer that has come was cut off; empty: it was not. */
  get cut() {
    const at = `at ${this.usage.completion_tokens} tokens`;
    return { length: `cut ${at}`, deadline: `cut by time, ${at}` }[this.finish] ?? "";
  }

  drawTimeline(spanMs, fits) {
    draw(this._part(".timeline"), this.trace, spanMs, fits);
  }

  _part(selector) {
    return this.element.querySelector(selector);
  }

  _take({ choices, usage, lookahead: counts }, nowS) {
    this.usage = usage ?? this.usage;
    this.counts = counts ?? this.counts;
    for (const { delta, lookahead } of choices) {
      if (lookahead?.step) {
        this.firstS ??= nowS;
        this._steps.push({ record: lookahead.step, atS: nowS, items: {}, texts: {} });
      }
      this._write("reasoning", delta.reasoning_content);
      this._write("content", delta.content);
      this.trace = lookahead?.trace ?? this.trace;
      this.finish = lookahead?.finish_reason ?? this.finish;
    }
  }

  /** Text belongs to the step that was told last. */
  _write(section, text) {
    const step = this._steps.at(-1);
    if (!text || !step) {
      return;
    }
    step.texts[section] = (step.texts[section] ?? "") + text;
    if (step.texts[section].trim()) {
      step.items[section] ??= this._begin(section, step);
      step.items[section].querySelector(".text").textContent = trimmed(step.texts[section]);
    }
  }

  _begin(section, { record, atS, items }) {
    const { origin, reason, index, num_tokens: tokens } = record;
    const label = element("span", { class: `origin ${origin}` }, origin);
    const about = `step ${index}: ${reason}, ${tokens} tokens`;
    const item = element("li", { class: `step ${origin}`, title: about }, element("div", {}, label));
    item.append(element("p", { class: "text" }), element("time", {}, seconds(atS)));
    const others = origin === "draft" ? record.target_text : record.drafted_text;
    const isFirst = !Object.keys(items).length; // of a step whose text ends the reasoning
    if (isFirst && others && others !== record.text) {
      const whose = origin === "draft" ? "the target's own words" : "what the draft had";
      item.append(element("details", {}, element("summary", {}, whose), element("p", {}, visible(others))));
    }
    this._part(`.${section}`).hidden = false;
    this._part(`.${section} ol`).append(item);
    return item;
  }

  _figures() {
    const { completion_tokens: tokens, completion_tokens_details: details } = this.usage;
    const counts = this.counts;
    const rejected = Object.values(counts.num_steps_rejected).reduce((sum, one) => sum + one, 0);
    const failed = counts.num_steps_rejected.draft_error ?? 0; // compared with nothing
    const compared = counts.num_steps_accepted + rejected - failed + counts.num_steps_late;
    const figures = [
      ["Tokens a second", (tokens / this.tookS).toFixed(0), `${tokens} tokens, ${details.reasoning_tokens} of reasoning`],
      ["First step", this.firstS === null ? "–" : seconds(this.firstS), `${counts.num_steps} steps in all`],
      ["Steps accepted", share(counts.num_steps_accepted, compared), compared ? `${counts.num_steps_accepted} of ${compared}` : "none drafted"],
      [
        "Draft tokens accepted",
        share(counts.num_accepted_tokens, counts.num_draft_tokens),
        counts.num_draft_tokens ? `${counts.num_accepted_tokens} of ${counts.num_draft_tokens}` : "none offered",
      ],
      ["Calls", `${counts.num_target_calls} target`, `${counts.num_draft_calls} draft, ${counts.num_judge_calls} judge`],
      ["Tokens not used", String(counts.num_wasted_tokens), "written by target or draft"],
    ];
    const degraded = this.trace?.usage.degraded ?? [];
    if (degraded.length) {
      figures.push(["Degraded", `without ${degraded.join(", ")}`, ""]);
    }
    const shown = figures.map(([name, value, more]) => {
      const said = element("dd", {}, value, ...(more ? [element("small", {}, more)] : []));
      return element("div", {}, element("dt", {}, name), said);
    });
    this._part("dl").replaceChildren(...shown);
    this._part(".figures").hidden = false;
    this._part(".cut").textContent = `This answer was ${this.cut}.`;
    this._part(".cut").hidden = !this.cut;
  }

  _failed(error) {
    const { code, param, request_id: id } = error instanceof Refused ? error.error : {};
    const more = [code, param && `at ${param}`, id && `request ${id}`].filter(Boolean).join(", ");
    const said = more ? `${error.message} (${more})` : error.message;
    this._part(".failure").textContent = said;
    this._part(".failure").hidden = false;
    return said;
  }
}

function visible(text) {
  return trimmed(text.replace(/<\/?think>/g, ""));
}
