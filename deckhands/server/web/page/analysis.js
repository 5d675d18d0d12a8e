// Where the time and the money of a conversation went: a waterfall of its steps, and its use of models.

import { ask, place } from "./api.js";
import { costText, duration, usd } from "./dom.js";
import { lineOf, lineOfCall } from "./steps.js";
import { html, useEffect, useMemo, useRef, useState } from "./ui.js";
import { usage } from "./usage.js";
import { List } from "./virtual.js";

const GAP_MS = 2_000, ROW_PX = 30, TAKEOVERS_MS = 10_000;
const WAITS = { awaiting_user_confirmation: "waits for a confirmation", awaiting_user_input: "waits for a message", rate_limited: "waits for the model's quota", paused: "is paused", stopped: "is stopped", error: "has failed", finished: "has finished" };
const ms = (text) => new Date(text).getTime();

/** Return the rows of the waterfall: model calls, tools, waits and takeovers, each with its spans. */
function rowsOf(items, events, takeovers) {
  const rows = [];
  for (const item of items) {
    if (item.type === "user") rows.push({ first: item.first, line: `You: ${lineOf(item)}`, spans: [["user", ms(item.events[0].timestamp), ms(item.events[0].timestamp), "a message"]] });
    if (item.type !== "step") continue;
    const spans = [];
    if (item.reply) { const end = ms(item.reply.timestamp), took = 1000 * (item.reply.latency_seconds || 0); spans.push(["model", end - took, end, `model call, ${duration(took / 1000)}`]); }
    for (const { action, results } of item.parts) {
      if (!results.length) continue;
      const from = ms(action.timestamp), to = ms(results.at(-1).timestamp);
      spans.push([results.some((one) => one.kind === "observation.error") ? "bad" : "tool", from, to, `${lineOfCall(action)}, ${duration((to - from) / 1000)}`]);
    }
    if (spans.length) rows.push({ first: item.first, line: `${item.number ? `${item.number}. ` : ""}${lineOf(item)}`, spans });
  }
  let since = null;
  for (const event of events) {
    if (event.kind !== "observation.agent_state_changed") continue;
    if (since) { const [from, to] = [ms(since.timestamp), ms(event.timestamp)]; if (to - from > 200) rows.push({ first: since.id, line: `It ${WAITS[since.agent_state]}`, spans: [["wait", from, to, `${WAITS[since.agent_state]}, ${duration((to - from) / 1000)}`]] }); }
    since = WAITS[event.agent_state] ? event : null;
  }
  for (const one of takeovers) {
    const at = ms(one.at), before = events.findLast((event) => ms(event.timestamp) <= at);
    const what = one.action_id ? `A tool worker took over action ${one.action_id}` : "A controller worker took over";
    rows.push({ first: before?.id ?? 1, key: `takeover-${one.at}-${one.action_id ?? ""}`, line: what, spans: [["takeover", at, at, `${what}${one.from_worker ? ` from ${one.from_worker}, which had died: now ${one.to_worker}` : " from one that had died"}`]] });
  }
  return rows.sort((one, other) => one.first - other.first);
}

/** Return a function from a time to a place from 0 to 1. Long times in which nothing ran take little room. */
function scaleOf(rows) {
  const spans = rows.flatMap((row) => row.spans).map(([kind, from, to]) => [from, kind === "wait" ? Math.min(to, from + GAP_MS) : to]).sort((one, other) => one[0] - other[0]);
  const points = [];
  let place = 0, end = spans[0]?.[0] ?? 0;
  points.push([end, 0]);
  for (const [from, to] of spans) {
    if (from > end) { place += Math.min(GAP_MS, from - end); end = from; points.push([end, place]); }
    if (to > end) { place += to - end; end = to; points.push([end, place]); }
  }
  const whole = place || 1;
  return (time) => {
    let low = 0, high = points.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (points[middle][0] <= time) low = middle; else high = middle - 1; }
    const [at, from] = points[low], next = points[low + 1];
    const part = next ? Math.min(1, Math.max(0, (time - at) / (next[0] - at))) : 0;
    return (from + (next ? part * (next[1] - from) : 0)) / whole;
  };
}

export function Timeline({ id, items, events, signal, onOpen }) {
  const [takeovers, setTakeovers] = useState([]);
  useEffect(() => {
    const look = () => { if (!document.hidden) ask(`${place(id)}/takeovers`, { signal }).then(setTakeovers, () => {}); };  // it is asked again
    look();
    const timer = setInterval(look, TAKEOVERS_MS);
    return () => clearInterval(timer);
  }, [id]);
  const rows = useMemo(() => rowsOf(items, events, takeovers), [items, takeovers]);
  const scale = useMemo(() => scaleOf(rows), [rows]);
  const sums = useMemo(() => {
    const found = { model: 0, tool: 0, wait: 0, takeover: 0 };
    for (const row of rows) for (const [kind, from, to] of row.spans) found[kind === "bad" ? "tool" : kind] += (to - from) / 1000 || 0;
    return found;
  }, [rows]);
  if (!rows.length) return html`<p class="dim empty">Nothing has run yet.</p>`;
  return html`<div class="waterfall"><ul class="legend"><li><span class="swatch model"></span>Model calls ${duration(sums.model)}</li><li><span class="swatch tool"></span>Tools ${duration(sums.tool)}</li><li><span class="swatch wait"></span>Waits ${duration(sums.wait)}</li>${takeovers.length ? html`<li><span class="swatch takeover"></span>Takeovers ${takeovers.length}</li>` : ""}<li class="dim">Times in which nothing runs are shortened</li></ul>
    <${List} count=${rows.length} keyOf=${(index) => rows[index]?.key ?? rows[index]?.first ?? index} estimate=${ROW_PX} aria-label="Timeline" tabindex="0" role="region" row=${(index) => {
      const row = rows[index];
      return html`<div class="lane"><button type="button" class="quiet" title="Show it in the log" onClick=${() => onOpen(row.first)}>${row.line}</button><div class="track">${row.spans.map(([kind, from, to, text]) => {
        const left = scale(from), width = scale(to) - left;
        return html`<span class=${`span ${kind}`} role="img" aria-label=${text} title=${text} style=${{ left: `${100 * left}%`, width: `max(3px, ${100 * width}%)` }}></span>`;
      })}</div><span class="dim took">${duration(row.spans.reduce((sum, [, from, to]) => sum + to - from, 0) / 1000)}</span></div>`;
    }} /></div>`;
}

/** Show a plot over the steps. `series` are [name, values, unit]. */
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000];

function Plot({ title, steps, series, show }) {
  const place = useRef(null);
  useEffect(() => {
    const node = place.current, size = () => ({ width: Math.max(200, node.clientWidth), height: 220 });
    let plot = null, observer = null, isGone = false;
    import("./vendored/uplot.js").then(({ default: UPlot }) => {
      if (isGone) return;
      const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
      const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
      plot = new UPlot({ ...size(), scales: { x: { time: false }, y: { range: (_plot, _least, most) => [0, most || 1] } }, legend: { live: true },
        axes: [{ ...axis, label: "Step", incrs: WHOLE_STEPS }, { ...axis, size: 70, values: (_plot, values) => values.map(show) }],
        series: [{ label: "Step" }, ...series.map(([label, , name]) => ({ label, stroke: colour(name), width: 2, fill: series.length === 1 ? `${colour(name)}22` : undefined, value: (_plot, value) => value === null ? "–" : show(value) }))] },
      [steps, ...series.map(([, values]) => values)], node);
      observer = new ResizeObserver(() => requestAnimationFrame(() => { if (!isGone) plot.setSize(size()); }));
      observer.observe(node);
    });
    return () => { isGone = true; observer?.disconnect(); plot?.destroy(); };
  }, [steps.length]);
  return html`<section class="card"><h2>${title}</h2><div class="uplot-place" ref=${place} role="img" aria-label=${`${title}: ${series.map(([label, values]) => `${label} ${show(values.at(-1) ?? 0)}`).join(", ")} at the last step`}></div></section>`;
}

export function Usage({ events }) {
  const found = useMemo(() => {
    const steps = [], cost = [], prompts = [], completions = [], models = new Map(), used = usage();
    for (const event of events) {
      used.take(event);
      if (event.kind !== "model.reply") continue;
      const name = `${event.model || "unknown"}${event.service && event.service !== "agent" ? ` (${event.service})` : ""}`, tokens = event.usage || {};
      const one = models.get(name) || { calls: 0, prompt: 0, cached: 0, completion: 0, cost: 0, isWhole: true, seconds: 0 };
      models.set(name, one);
      one.calls += 1; one.prompt += tokens.prompt_tokens || 0; one.cached += tokens.cache_read_tokens || 0; one.completion += tokens.completion_tokens || 0; one.cost += event.cost_usd || 0; one.seconds += event.latency_seconds || 0;
      one.isWhole &&= event.cost_usd !== undefined && event.cost_usd !== null;
      steps.push(steps.length + 1); cost.push(used.cost); prompts.push(tokens.prompt_tokens || 0); completions.push(tokens.completion_tokens || 0);
    }
    return { steps, cost, prompts, completions, models, used };
  }, [events.length, events[0]?.id]);
  if (!found.steps.length) return html`<p class="dim empty">No model has been called yet.</p>`;
  const number = (value) => Math.round(value).toLocaleString("en");
  return html`<div class="usage" tabindex="0" role="region" aria-label="Usage">
    <section class="card"><h2>Models</h2><div class="scroll"><table><thead><tr><th scope="col">Model</th>${["Calls", "Tokens in", "Cached", "Tokens out", "Time", "Cost"].map((name) => html`<th scope="col" class="number">${name}</th>`)}</tr></thead>
      <tbody>${[...found.models].map(([name, one]) => html`<tr><td>${name}</td><td class="number">${number(one.calls)}</td><td class="number">${number(one.prompt)}</td><td class="number">${one.prompt ? `${Math.round((100 * one.cached) / one.prompt)} %` : "–"}</td><td class="number">${number(one.completion)}</td><td class="number">${duration(one.seconds)}</td><td class="number">${costText(one.cost, one.isWhole)}</td></tr>`)}</tbody></table></div></section>
    <${Plot} title="Cost so far" steps=${found.steps} series=${[["Cost", found.cost, "--link"]]} show=${usd} />
    <${Plot} title="Tokens of each model call" steps=${found.steps} series=${[["In", found.prompts, "--link"], ["Out", found.completions, "--warm"]]} show=${number} /></div>`;
}
