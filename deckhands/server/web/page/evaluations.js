// Evaluations: the list, and for one of them its figures, the outcomes of attempts, and the attempts.

import { ask } from "./api.js";
import { histogram, share, stacked } from "./chart.js";
import { ago, block, duration, el, grid, named, replace, usd } from "./dom.js";

const REFRESH_MS = 4_000, PAGE = 50;
const OUTCOMES = ["resolved", "unresolved", "limit", "refused", "setup_failed", "infra-abandoned", "not-run"];
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const address = (name) => `/evaluations/${encodeURIComponent(name)}`;

/** Load now and then periodically until the page is left; `load` returns whether to continue. */
function repeated(load, signal, refused) {
  let timer = 0;
  async function look() {
    let again = true;
    try { if (!document.hidden) again = await load(); } catch (error) { if (!signal.aborted) refused(error); again = error.status === undefined || error.status >= 500; }
    if (again && !signal.aborted) timer = setTimeout(look, REFRESH_MS);
  }
  signal.addEventListener("abort", () => clearTimeout(timer));
  look();
}

function words(outcomes) {
  return OUTCOMES.filter((name) => outcomes[name]).map((name) => `${outcomes[name]} ${name}`).join(", ") || "none has ended";
}

function bar(outcomes, rest = 0) {
  const parts = OUTCOMES.map((name) => [`o-${name}`, outcomes[name] || 0, name]);
  return stacked(words(outcomes), rest ? [...parts, ["o-rest", rest, "not ended"]] : parts);
}

function standing(one) {
  const state = one.state === "running" && !one.is_driven ? "interrupted" : one.state || "unknown";
  return el("span", { class: `state ${{ running: "running", over: "finished", interrupted: "error", paused: "paused" }[state] || ""}` }, state);
}

export function evaluations({ main, signal, refused }) {
  named("Evaluations");
  const body = el("div", { class: "list scroll", tabindex: 0, role: "region", "aria-label": "Evaluations" });
  replace(main, el("div", { class: "bar" }, el("h1", {}, "Evaluations"), el("span", { class: "dim" }, "carried out within the last month")), body);
  repeated(async () => {
    const found = await ask("/evaluations", { signal });
    if (signal.aborted) return false;
    if (body.contains(document.activeElement) && body !== document.activeElement) return true;
    replace(body, found.length ? grid(["Evaluation", "State", "Models", "Attempts", "Outcomes", "#Cost", "Last news"], found.map((one) => [
      [el("a", { href: `#/e/${one.name}` }, one.dataset || one.name), el("div", { class: "dim mono" }, one.name, one.tenant ? ` · ${one.tenant}` : "")],
      standing(one), one.models.map((name) => el("div", {}, name)),
      [`${one.ended.toLocaleString("en")} of ${one.total.toLocaleString("en")}`, el("div", { class: "dim" }, one.in_flight ? `${one.in_flight} in flight` : "")],
      [bar(one.outcomes, one.total - one.ended), el("div", { class: "dim" }, words(one.outcomes))], usd(one.cost_usd), ago(one.at)]))
      : el("p", { class: "empty" }, "No evaluation. ", el("code", {}, "deckhands eval run DATASET --model A,B --out DIR"), " starts one on this cluster."));
    return true;
  }, signal, refused);
}

export function evaluation({ main, signal, refused }, name) {
  const meant = { outcome: "", cause: null, model: "", instance: "", after: 0 };
  const title = el("h1", {}, name), facts = el("p", { class: "facts" }), progress = el("div", { class: "progress" });
  const models = el("section", { class: "card" }), spread = el("section", { class: "card" }), classes = el("section", { class: "card" }), under = el("section", { class: "card", hidden: true });
  const outcome = el("select", { id: "outcome", onchange: () => choose({ outcome: outcome.value, cause: null }) }, ["", ...OUTCOMES].map((one) => el("option", { value: one }, one || "any")));
  const model = el("select", { id: "model", onchange: () => choose({ model: model.value }) }, el("option", { value: "" }, "any"));
  const instance = el("input", { id: "instance", type: "search", placeholder: "a part of its id", onchange: () => choose({ instance: instance.value.trim() }) });
  const cause = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => choose({ cause: null }) });
  const count = el("span", { class: "dim", role: "status" }), rows = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Attempts" });
  const before = el("button", { type: "button", onclick: () => turn(-PAGE) }, "Previous"), after = el("button", { type: "button", onclick: () => turn(PAGE) }, "Next");
  const attempts = el("section", { class: "card", id: "attempts" }, el("div", { class: "bar" }, el("h2", {}, "Attempts that have ended"), count, el("span", { class: "grow" }),
    el("label", { for: "outcome" }, "Outcome"), outcome, cause, el("label", { for: "model" }, "Model"), model, el("label", { for: "instance" }, "Instance"), instance),
  rows, el("div", { class: "bar" }, before, after));
  let ended = "";
  replace(main, el("p", { class: "crumbs" }, el("a", { href: "#/evaluations" }, "Evaluations")), el("div", { class: "bar" }, title), facts, progress, models, el("div", { class: "cards" }, spread, classes), under, attempts);

  function choose(more) { Object.assign(meant, more, { after: 0 }); list().catch(refused); }
  function turn(by) { meant.after = Math.max(0, meant.after + by); list().catch(refused); }

  async function list() {
    const query = new URLSearchParams({ limit: PAGE, after: meant.after });
    for (const each of ["outcome", "model", "instance"]) if (meant[each]) query.set(each, meant[each]);
    if (meant.cause !== null) query.set("cause", meant.cause);
    outcome.value = meant.outcome; model.value = meant.model;
    cause.hidden = !meant.cause;
    replace(cause, meant.cause ? el("span", {}, `cause: ${meant.cause.slice(0, 100)} ✕`) : "");
    cause.title = "Show other causes too";
    const found = await ask(`${address(name)}/attempts?${query}`, { signal });
    if (signal.aborted) return;
    count.textContent = `${found.total.toLocaleString("en")}${found.total > PAGE ? `, from ${meant.after + 1}` : ""}`;
    before.disabled = !meant.after;
    after.disabled = found.next_after === null;
    before.parentElement.hidden = before.disabled && after.disabled;
    replace(rows, found.attempts.length ? grid(["Instance", "Model", "Outcome", "#Steps", "#Time", "#Cost", "Conversation"], found.attempts.map((one) => [
      details(one), one.model, [el("span", { class: `outcome o-${one.outcome}` }, one.outcome), one.cause ? el("div", { class: "dim" }, one.cause) : ""],
      one.iterations, duration(one.seconds), `${usd(one.cost_usd)}${one.has_unknown_cost ? " at least" : ""}`,
      [one.conversation_id ? el("a", { href: `#/c/${one.conversation_id}`, "aria-label": `Conversation of ${one.instance}` }, "Open") : "", one.checked_id ? [" · ", el("a", { href: `#/c/${one.checked_id}`, "aria-label": `Check of ${one.instance}` }, "check")] : "", one.critic_id ? [" · ", el("a", { href: `#/c/${one.critic_id}`, "aria-label": `Critic of ${one.instance}` }, "critic")] : ""]]))
      : el("p", { class: "dim" }, "No attempt is like this."));
  }

  repeated(async () => {
    const found = await ask(address(name), { signal });
    if (signal.aborted) return false;
    named(found.dataset || name);
    title.replaceChildren(el("span", {}, found.dataset || name));
    const rest = found.total - found.ended;
    replace(facts, standing(found), el("span", {}, `${found.ended.toLocaleString("en")} of ${found.total.toLocaleString("en")} attempts`), el("span", { title: "With critics and tries that failed" }, usd(found.cost_usd)),
      el("span", {}, `${found.tokens.toLocaleString("en")} tokens`), found.eta_seconds === null ? "" : el("span", {}, `${duration(found.eta_seconds)} left`),
      found.is_driven && found.bound && !found.bound.startsWith("nothing:") ? el("span", {}, `bound by ${found.bound}`) : "", found.stopped ? el("span", {}, found.stopped) : "", found.warning ? el("span", {}, found.warning) : "", el("span", { class: "mono dim" }, name));
    replace(progress, bar(found.outcomes, rest), legend(found.outcomes, rest));
    const known = `${found.ended} ${found.figures.reduce((sum, one) => sum + one.attempts, 0)}`;  // figures may come later
    if (known !== ended) {
      ended = known;
      replace(models, el("h2", {}, "Models"), figures(found.figures));
      replace(spread, el("h2", {}, "Distributions"), found.distributions.map(distribution));
      replace(classes, el("h2", {}, "How attempts failed"), failures(found.failure_classes, choose));
      replace(model, el("option", { value: "" }, "any"), found.figures.map((one) => el("option", { value: one.model }, one.model)));
      if (!rows.contains(document.activeElement)) await list();
    }
    under.hidden = !found.attempts.length;
    if (!under.contains(document.activeElement)) replace(under, el("h2", {}, "In flight"), el("div", { class: "scroll" }, grid(["Instance", "Model", "State", "#Steps", "#Time", "#Cost"], found.attempts.map((one) => [
      one.conversation_id ? el("a", { href: `#/c/${one.conversation_id}` }, one.instance) : one.instance, one.model,
      [el("span", { class: `state ${one.state}` }, one.state.replaceAll("_", " ")), one.waits_for ? el("div", { class: "dim" }, `waits: ${one.waits_for}`) : "", one.cause && one.cause !== one.waits_for ? el("div", { class: "dim" }, one.cause) : ""], one.iterations, duration(one.seconds), usd(one.cost_usd)]))));
    return found.state !== "over" || found.is_driven;
  }, signal, refused);
}

function legend(outcomes, rest) {
  const shown = [...OUTCOMES.map((name) => [name, outcomes[name] || 0]), ["rest", rest]].filter(([, value]) => value);
  return el("ul", { class: "legend" }, shown.map(([name, value]) => el("li", {}, el("span", { class: `swatch o-${name}`, "aria-hidden": "true" }), `${value.toLocaleString("en")} ${name === "rest" ? "not ended" : name}`)));
}

function figures(found) {
  if (!found.length) return el("p", { class: "dim" }, "No attempt has ended yet.");
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Figures of the models" }, grid(["Model", "pass@1", "Outcomes", "#Cost", "#Per attempt", "#Time (median, p90)", "#Steps", "#Failures of infrastructure"], found.map((one) => [
    [one.model, el("div", { class: "dim" }, `${one.attempts.toLocaleString("en")} attempts at ${one.instances.toLocaleString("en")} instances`)],
    one.pass_at_1 === null ? "nothing scored" : [el("strong", {}, percent(one.pass_at_1)), share(`${percent(one.pass_at_1)}, ${between(one.interval)}`, one.pass_at_1, one.interval),
      el("div", { class: "dim" }, between(one.interval))],
    [bar(one.outcomes), el("div", { class: "dim" }, words(one.outcomes))],
    [usd(one.total_cost_usd), one.has_unknown_cost ? el("div", { class: "dim" }, "at least") : "", further(one).map((text) => el("div", { class: "dim" }, text))], usd(one.cost_usd.median), `${duration(one.seconds.median)}, ${duration(one.seconds.p90)}`,
    one.iterations.median.toLocaleString("en"), one.infrastructure_failures.toLocaleString("en")])));
}

/** An interval in words. */
function between(interval) {
  return interval ? `${percent(interval[0])} to ${percent(interval[1])}` : "no interval: too few instances";
}

/** The costs besides those of attempts. */
function further(one) {
  return [one.critic_cost_usd ? `critics ${usd(one.critic_cost_usd)}` : "", one.lost_cost_usd ? `tries that failed ${usd(one.lost_cost_usd)}` : ""].filter(Boolean);
}

function distribution(one) {
  const name = { cost_usd: "Cost of an attempt", seconds: "Time of an attempt" }[one.value] || one.value, show = one.value === "cost_usd" ? usd : duration;
  const tallest = Math.max(1, ...Object.values(one.counts).flat());
  return el("div", { class: "spread" }, el("h3", {}, name), Object.entries(one.counts).map(([model, counts]) => el("figure", {},
    el("figcaption", { class: "dim" }, model), histogram(`${name} with ${model}, from 0 to ${show(one.most)}`, counts, one.most, tallest, show),
    el("div", { class: "axis dim" }, el("span", {}, "0"), el("span", {}, show(one.most / 2)), el("span", {}, show(one.most))))));
}

function failures(found, choose) {
  if (!found.length) return el("p", { class: "dim" }, "None has failed.");
  const models = [...new Set(found.flatMap((one) => Object.keys(one.attempts)))];
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "How attempts failed" }, grid(["Outcome and cause", ...models.map((name) => `#${name}`)], found.map((one) => [
    [el("span", { class: `outcome o-${one.outcome}` }, one.outcome), " ", el("button", { type: "button", class: "quiet", "aria-label": `Show attempts that ended as ${one.outcome} ${one.cause}`, onclick: () => {
      choose({ outcome: one.outcome, cause: one.cause });
      document.getElementById("attempts").scrollIntoView();
    } }, one.cause || (one.outcome === "unresolved" ? "by its score" : "show"))], ...models.map((name) => (one.attempts[name] || 0).toLocaleString("en"))])));
}

function details(one) {
  const waited = Object.entries(one.waiting_seconds).map(([reason, seconds]) => `${duration(seconds)} ${reason.replaceAll("_", " ")}`).join(", ");
  const said = [`attempt ${one.attempt}`, `${one.tokens.toLocaleString("en")} tokens`, `worked ${duration(one.working_seconds)}${waited ? `, waited ${waited}` : ""}`,
    one.tries > 1 ? `started ${one.tries} times (${one.failures.join(", ")})` : "", one.round ? `requeued ${one.round} times` : "", one.left_out.length ? `left out: ${one.left_out.join(", ")}` : "", ...further(one), one.reward === null ? "" : `reward ${one.reward}`, ...Object.entries(one.metrics).map(([name, value]) => `${name} ${value}`), one.score === null ? "" : `the critic gave ${one.score}: ${one.verdict}`];
  return el("details", {}, el("summary", { class: "instance" }, one.instance), el("p", { class: "dim" }, said.filter(Boolean).join(" · ")), one.evidence ? block(one.evidence) : el("p", { class: "dim" }, "There is no evidence."));
}
